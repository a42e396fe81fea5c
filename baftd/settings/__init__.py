"""Settings: one table, five sources, the origin of every value.

    flag > BAFTD_* variable > ./baftd.toml > /etc/baftd/baftd.toml > default

    settings = load_settings(flags={"durable_dir": "/ckpt"})
    settings.durable_dir, settings.origin("durable_dir")        # PosixPath('/ckpt'), '--durable-dir'
"""

from baftd.settings.load import FILES, OTHER_VARIABLES, load_settings
from baftd.settings.table import SETTINGS, Setting, Settings
from baftd.settings.units import (
    Every,
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_every,
    parse_share,
    parse_size,
    parse_steps,
)

__all__ = [
    "FILES",
    "OTHER_VARIABLES",
    "SETTINGS",
    "Every",
    "Setting",
    "Settings",
    "format_duration",
    "format_share",
    "format_size",
    "load_settings",
    "parse_duration",
    "parse_every",
    "parse_share",
    "parse_size",
    "parse_steps",
]
