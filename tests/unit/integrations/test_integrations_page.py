"""The examples of docs/integrations.md run as they are written."""

from __future__ import annotations

import re

import pytest
import torch
from sklearn.datasets import load_digits

from tests.paths import ROOT

PAGE = ROOT / "docs" / "integrations.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "example"), [*zip(["avalanche", "capymoa"], EXAMPLES, strict=True)])
def test_an_example_runs_and_learns(library, example):
    pytest.importorskip(library, reason=f"{library} is not installed")
    assert len(example.splitlines()) <= 15
    names: dict = {}
    exec(compile(example, PAGE.name, "exec"), names)
    learner = names["learns"].learner
    assert sorted(learner.seen) == list(range(10)) and learner.task == 4 and learner.data.ended
    images = (torch.tensor(load_digits().images) * 15).to(torch.uint8).unsqueeze(-1).expand(-1, -1, -1, 3)
    # Of chance, it would be 0.1.
    assert (learner.predict(images) == names["y"]).float().mean() > 0.2
