"""The README's tables against the code: it must not drift."""

from __future__ import annotations

import re

from baftd.cli.config import markdown
from baftd.cli.main import VERBS
from tests.support.daemon import ROOT


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_settings_table_is_the_codes() -> None:
    found = re.search(r"<!-- begin settings: [^\n]*-->\n(.*?)\n<!-- end settings -->", readme(), re.DOTALL)
    assert found is not None
    assert found[1] == markdown(), "run `baftd config show --markdown` and paste it"


def test_every_verb_is_named() -> None:
    for verb in VERBS:
        assert f"`baftd {verb}" in readme()


def test_links_and_scripts_exist() -> None:
    text = readme()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for script in re.findall(r"(?<![\w/])scripts/[\w./]+\w", text):
        assert (ROOT / script).exists(), script
