"""What baftd says about itself: log lines, one an event, and counters."""

from baftd.telemetry.counters import DAEMON_COUNTERS, JOB_COUNTERS, Counters
from baftd.telemetry.log import LEVELS, Logger, configure, get_logger

__all__ = [
    "DAEMON_COUNTERS",
    "JOB_COUNTERS",
    "LEVELS",
    "Counters",
    "Logger",
    "configure",
    "get_logger",
]
