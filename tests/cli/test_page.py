"""docs/command_line.md describes the flags that there are, with the defaults that they have."""

import re
from pathlib import Path

from mose_fast.cli import build_parser, read_settings

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()


def test_page_lists_every_flag_of_run_and_no_other(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    _, out, _ = call("run", "--help")
    in_help = set(re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE))
    assert len(in_help) == 26
    assert set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE)) == in_help


def test_page_tells_the_defaults():
    config = read_settings(build_parser().parse_args(["run"]))
    told = dict(re.findall(r"^\| `--([a-z-]+) [A-Z]+` \|.*\| `?([a-z0-9]+)`? \|$", PAGE, re.MULTILINE))
    settings = {**vars(config.stream), **vars(config), "stream": config.stream.name, "augment": config.feed}
    assert {name: str(settings[name]) for name in told if name not in ("data-dir", "limit-per-task")} == {
        name: value for name, value in told.items() if name not in ("data-dir", "limit-per-task")
    }
    assert set(told) >= {
        "stream",
        "batch",
        "method",
        "preset",
        "memory",
        "width",
        "epochs",
        "seed",
        "device",
        "precision",
    }


def test_examples_of_set_are_settings():
    examples = re.findall(r"`([a-z_.]+=[a-z0-9_]+)`", PAGE)
    assert len(examples) == 7
    for example in examples:
        assert read_settings(build_parser().parse_args(["run", "--set", example]))
