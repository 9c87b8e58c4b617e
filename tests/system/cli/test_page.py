"""docs/command_line.md and docs/settings.md describe the flags that there are, with the defaults
that they have.
"""

import re

from mose_fast.app.cli import build_parser
from mose_fast.app.flags import read_settings
from mose_fast.settings.knob import as_text
from tests.help_text import flags_of
from tests.paths import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "command_line.md").read_text()
SETTINGS = (DOCS / "settings.md").read_text()


def test_page_lists_every_flag_of_run_and_no_other(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    in_help = flags_of("run", capsys)
    assert len(in_help) == 34
    of_settings = set(re.findall(r"^\| `[a-z._]+` \|.*?\| `(--[a-z-]+)` \|", SETTINGS, re.MULTILINE))
    others = set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE))
    assert len(of_settings) == 29 and not of_settings & others
    assert of_settings | others == in_help


def test_page_tells_the_defaults():
    config = read_settings(build_parser().parse_args(["run"]))
    rows = re.findall(r"^\| `[a-z._]+` \| ([^ ]+) \| `--([a-z-]+)` \|", SETTINGS, re.MULTILINE)
    told = {flag: default for default, flag in rows}
    settings = {**vars(config.stream), **vars(config), "stream": config.stream.name}
    assert {flag: as_text(settings[flag.replace("-", "_")]) for flag in told} == told
    assert len(told) == 29


def test_examples_of_set_are_settings():
    examples = re.findall(r"`([a-z_.]+=[a-z0-9_]+)`", PAGE)
    assert len(examples) == 7
    for example in examples:
        assert read_settings(build_parser().parse_args(["run", "--set", example]))
