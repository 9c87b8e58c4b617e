"""docs/methods.md tells of every method what the code says."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from mose_fast.config import METHOD_SETTINGS, preset_table
from mose_fast.methods import METHODS, BaselineOptions

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
BASELINES = [name for name in METHODS if issubclass(METHOD_SETTINGS[name].options, BaselineOptions)]


def cell(text: object) -> str:
    return (text if isinstance(text, str) else json.dumps(text)).replace("|", "\\|")


def overview(name: str) -> str:
    """The method's row in the overview."""
    learner = METHODS[name]
    line = (inspect.getdoc(learner) or "").splitlines()[0].rstrip(".")
    said = line.partition(": ")[2] or line
    ahead = "no: it looks at the network" if learner.plan_depends_on_model else "yes"
    return f"| `{name}` | {learner.about.year} | {cell(said)} | {learner.about.cost:.2f} | {ahead} | {cell(learner.about.reference)} |"


def switches(name: str) -> list[str]:
    """A row for every switch that is the method's own or that its presets set otherwise than the shared defaults."""
    shared = {f.name: f.default for f in dataclasses.fields(BaselineOptions)}
    presets = METHODS[name].about.presets
    rows = []
    for switch, *values, doc, source in preset_table(name):
        options = METHOD_SETTINGS[name].options
        pinned = [getattr(options(**METHOD_SETTINGS[name].presets[preset]), switch) for preset in presets]
        if switch not in shared or any(value != shared[switch] for value in pinned):
            rows.append(f"| `{switch}` | {' | '.join(map(cell, values))} | {cell(doc)} | {cell(source)} |")
    return rows


@pytest.mark.parametrize("name", METHODS)
def test_the_overview_has_every_method(name):
    assert overview(name) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BASELINES)
def test_every_switch_and_every_presets_source_is_there(name):
    page = PAGE.read_text(encoding="utf-8")
    for row in switches(name):
        assert row in page
    for preset, values in METHODS[name].about.presets.items():
        assert preset == "table" or f"`{preset}`: {values.source}" in page


def test_the_shared_defaults_are_there():
    page = PAGE.read_text(encoding="utf-8")
    for f in dataclasses.fields(BaselineOptions):
        assert f"| `{f.name}` | {cell(f.default)} | {cell(f.metadata['doc'])} | {cell(f.metadata['source'])} |" in page
