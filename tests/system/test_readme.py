"""The README and the pages it leads to: the presets' table, the Python example and every link."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

import mose_fast
from mose_fast.methods.mose import MoseOptions
from mose_fast.settings.run import RunConfig
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "tests").rglob("*.md"))]


def test_the_table_of_presets_has_the_switches_that_differ_and_no_other():
    released, paper = (RunConfig.create(preset).options for preset in ("released", "paper"))
    pairs = [(f.name, getattr(released, f.name), getattr(paper, f.name)) for f in dataclasses.fields(MoseOptions)]
    differ = [
        (name, *(value if isinstance(value, str) else json.dumps(value) for value in values))
        for name, *values in pairs
        if values[0] != values[1]
    ]
    assert re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| .+ \|$", README, re.MULTILINE) == differ


def test_the_python_example_runs(monkeypatch, capsys):
    """With two tasks of two batches, and a narrower network for the sake of time."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    generator = np.random.default_rng(0)
    batches = [
        (task, generator.integers(256, size=(10, 32, 32, 3), dtype=np.uint8), 5 * task + np.arange(10) % 5)
        for task in (0, 0, 1, 1)
    ]
    create = mose_fast.create_learner
    monkeypatch.setattr(mose_fast, "create_learner", lambda **given: create(**{**given, "width": 2}))
    exec(compile(example, "README.md", "exec"), {"my_batches": batches})
    assert re.search(r"\d", capsys.readouterr().out)


def _anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{page.name} links to {target}"
