"""docs/methods.md tells of every method what the code says."""

from __future__ import annotations

import inspect
import json

import pytest

from mose_fast.methods import METHODS, Learner, Planning
from mose_fast.settings.run import METHOD_SETTINGS, ReplayOptions, RunConfig
from tests.paths import ROOT

PAGE = ROOT / "docs" / "methods.md"
SETTINGS = PAGE.with_name("settings.md")


def cell(text: object) -> str:
    return (text if isinstance(text, str) else json.dumps(text)).replace("|", "\\|")


def overview(name: str) -> str:
    """The method's row in the overview."""
    learner = METHODS[name]
    line = " ".join((inspect.getdoc(learner) or "").split("\n\n")[0].split()).rstrip(".")
    said = line.partition(": ")[2] or line
    captured = "yes" if learner.planning is Planning.CAPTURED else f"no: it {learner.not_captured}"
    kept = learner.images_kept(RunConfig.create(method=name, memory=1000), [(10, 5000)] * 10)
    return (
        f"| `{name}` | {learner.about.year} | {cell(said)} | {learner.about.cost:.2f} | {kept:,} | {captured} |"
        f" {cell(learner.about.reference)} |"
    )


@pytest.mark.parametrize("name", METHODS)
def test_the_overview_has_every_method(name):
    assert overview(name) in PAGE.read_text(encoding="utf-8")


def boundaries(name: str) -> list[str]:
    """A row for every switch of its own by which the method needs task boundaries, and which of its
    presets set it so.
    """
    rows = []
    for (switch, value), effect in METHODS[name].without_boundaries.items():
        if (switch, value) in Learner.without_boundaries:
            continue
        settings = METHOD_SETTINGS[name]
        presets = [
            f"`{preset}`"
            for preset, changes in settings.presets.items()
            if getattr(settings.options(**changes), switch) == value
        ]
        rows.append(f"| `{name}` | `{switch}` {cell(value)} | {', '.join(presets) or '-'} | {effect} |")
    return rows


def using(switch: str, value: object) -> str:
    """The presets of any methods that give a switch a value."""
    methods: dict[tuple[str, ...], list[str]] = {}
    for name in METHODS:
        options, presets = METHOD_SETTINGS[name]
        found = tuple(p for p, changes in presets.items() if getattr(options(**changes), switch, None) == value)
        methods.setdefault(found, []).append(name)
    methods.pop((), None)
    texts = [f"{', '.join(f'`{p}`' for p in found)} of {', '.join(sorted(names))}" for found, names in methods.items()]
    return "; ".join(texts) or "-"


def test_the_table_of_task_boundaries_is_what_methods_declare():
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Task boundaries")[2].partition("\n## ")[0]
    needing = [f"| `{name}` | {m.needs_boundaries} |" for name, m in METHODS.items() if m.needs_boundaries]
    found = [line for line in table.splitlines() if line.startswith(("| `", "| all"))]
    assert found[: len(needing)] == needing
    found = found[len(needing) :]
    shared = [
        f"| all but `gdumb` | `{switch}` {cell(value)} | {using(switch, value)} | {effect} |"
        for (switch, value), effect in Learner.without_boundaries.items()
    ]
    assert found[: len(shared)] == shared
    assert found[len(shared) :] == [row for name in METHODS for row in boundaries(name)]
    for name, learner in METHODS.items():
        has_them = learner.without_boundaries.items() >= Learner.without_boundaries.items()
        assert has_them == issubclass(METHOD_SETTINGS[name].options, ReplayOptions) == (name != "gdumb")


def test_where_the_shared_protocol_is_unfair_its_preset_says_so():
    for name, words in {"gdumb": "understates GDumb", "aser": "20, 40 and 60", "mir": "the optimiser's"}.items():
        section = SETTINGS.read_text(encoding="utf-8").partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert words in section and (name == "mir" or words in METHODS[name].about.presets["table"].source)
