"""What a method's own functions may return, and that anything else is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mose_fast.learner.returned import are_plain, are_scalars, are_slots, are_views
from mose_fast.methods import Er, Planning
from mose_fast.settings.run import ConfigError, RunConfig


class Mine(Er):
    """ER under another name."""


@pytest.fixture
def mine(monkeypatch):
    """A function that creates a learner whose class returns something else from a function."""

    def create(hook, result):
        monkeypatch.setattr(Mine, hook, lambda self, *given, **named: result)
        config = RunConfig.create(method="er", width=1, memory=30, device="cpu", options={"buffer_batch": 12})
        return Mine(config, classes=6, image_size=(8, 8))

    return create


SLOTS = r"wanted filled slots of the memory, int64 \[n\] in 0 ... 9"
SCALARS = "wanted floating-point scalars of the outputs by name, at least one"
STORED = r"wanted int64 \[10\], the slot of each item now, -1 if it has none"
VIEWS = r"wanted normalised views, float \[V, 3, H, W\]"
ROWS = r"wanted Rows, as self.rows\(x, y, slots\) makes them, or None"
VALUES = "wanted tensors and plain values by name"


@pytest.mark.parametrize(
    ("hook", "result", "says"),
    [
        ("retrieve", [1, 2], rf"Mine.retrieve returned a list; {SLOTS}"),
        ("retrieve", None, rf"Mine.retrieve returned None; {SLOTS}"),
        ("retrieve", torch.tensor([1.0]), rf"a tensor of torch.float32 \[1\]; {SLOTS}"),
        ("retrieve", torch.tensor([[1]]), rf"a tensor of torch.int64 \[1, 1\] from 1 to 1; {SLOTS}"),
        ("retrieve", torch.tensor([3, 10]), rf"a tensor of torch.int64 \[2\] from 3 to 10; {SLOTS}"),
        ("retrieve", torch.tensor([3, -1]), rf"a tensor of torch.int64 \[2\] from -1 to 3; {SLOTS}"),
        ("plan", torch.zeros(2), rf"Mine.plan or rehearsal returned a tensor of torch.float32 \[2\]; {ROWS}"),
        ("plan", (), rf"Mine.plan or rehearsal returned a tuple; {ROWS}"),
        ("extras", None, f"Mine.extras returned None; {VALUES}"),
        ("extras", {"classes": np.arange(3)}, rf"Mine.extras returned {{'classes': a ndarray}}; {VALUES}"),
        ("extras", {3: True}, rf"Mine.extras returned {{3: True}}; {VALUES}"),
        ("make_views", torch.zeros(10, 8, 8, 3), rf"a tensor of torch.float32 \[10, 8, 8, 3\]; {VIEWS}"),
        ("make_views", torch.zeros(10, 3, 8, 8, dtype=torch.uint8), rf"a tensor of torch.uint8 .*; {VIEWS}"),
        ("make_views", [], rf"Mine.make_views returned a list; {VIEWS}"),
        ("make_views", torch.zeros(9, 3, 8, 8), r"\[9, 3, 8, 8\]; wanted the 20 views of view_sizes, \(10, 10\)"),
        ("losses", torch.tensor(1.0), rf"Mine.losses returned a tensor of torch.float32 \[\]; {SCALARS}"),
        ("losses", {}, rf"Mine.losses returned {{}}; {SCALARS}"),
        ("losses", None, f"Mine.losses returned None; {SCALARS}"),
        ("losses", {"mine": 1.0}, rf"{{'mine': 1.0}}; {SCALARS}"),
        ("losses", {"mine": torch.ones(3)}, rf"{{'mine': a tensor of torch.float32 \[3\]}}; {SCALARS}"),
        ("losses", {"mine": torch.ones(())}, rf"{{'mine': a tensor of torch.float32 \[\]}}; {SCALARS}"),
        ("store", None, f"Mine.store returned None; {STORED}"),
        ("store", torch.arange(9), rf"a tensor of torch.int64 \[9\] from 0 to 8; {STORED}"),
        ("store", torch.arange(10) + 25, rf"from 25 to 34; {STORED}"),
        ("train_on", torch.ones(()), "Mine.train_on returned a tensor .*; wanted the losses by name, floating-point"),
        ("train_on", {}, "Mine.train_on returned {}; wanted the losses by name"),
    ],
)
@pytest.mark.parametrize("planning", [Planning.CAPTURED, Planning.LOOKS_AT_MODEL], ids=["ahead", "at once"])
def test_what_a_function_returns_is_refused_in_one_line(mine, monkeypatch, batch, hook, result, says, planning):
    own = getattr(Mine, hook)
    learner = mine(hook, result)
    with monkeypatch.context() as patched:
        patched.setattr(Mine, hook, own)
        learner.observe(*batch([0, 1] * 5), task=0)  # ten slots are filled
    monkeypatch.setattr(Mine, "planning", planning)
    with pytest.raises(ConfigError, match=says) as error:
        learner.observe(*batch([0, 1] * 5), task=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("hook", "result", "says"),
    [
        ("build_network", torch.nn.Linear(2, 2), "Mine.build_network returned a Linear; wanted an ExpertNetwork"),
        ("build_optimiser", None, "Mine.build_optimiser returned None; wanted an optimiser of PyTorch's"),
        ("build_memory", {}, "Mine.build_memory returned {}; wanted a ReplayMemory"),
    ],
)
def test_what_a_learner_is_built_of_is_refused_in_one_line(mine, hook, result, says):
    with pytest.raises(ConfigError, match=says):
        mine(hook, result)


def test_what_fits():
    slots = torch.tensor([0, 4, -1])
    assert are_slots(slots, -1, 5, 3) and are_slots(slots[:0], 0, 0)
    assert not are_slots(slots, 0, 5) and not are_slots(slots, -1, 4) and not are_slots(slots, -1, 5, 2)
    assert are_plain({"a": (torch.ones(2), 1), "b": None, "c": {"d": "e"}}) and not are_plain([1])
    assert are_scalars({"a": torch.ones((), dtype=torch.bfloat16)}) and not are_scalars({"a": torch.tensor(1)})
    assert are_views(torch.ones(0, 3, 8, 8)) and not are_views(torch.ones(1, 4, 8, 8))


def test_a_prediction_before_any_class_was_seen_is_refused(make, batch):
    for name in ("er", "mose", "gdumb"):
        learner = make(name)
        for classifier in ("linear", "ncm"):
            with pytest.raises(ValueError, match="no class was seen yet, so there is none to predict; wanted observe"):
                learner.predict(batch([0, 1])[0], classifier)
        learner.observe(*batch([3]), task=0)
        assert learner.predict(batch([0, 1])[0], "ncm").tolist() == [3, 3]


def test_a_method_with_a_state_of_its_own_is_told_what_to_do():
    with pytest.raises(ConfigError, match=r"Own defines state\(\), which only copies; wanted self.keep\(NAME"):
        type("Own", (Er,), {"state": lambda self: ({}, {})})
    beside = type("Beside", (), {"state": lambda self: ({}, {})})
    with pytest.raises(ConfigError, match=r"Own defines state\(\)"):
        type("Own", (beside, Er), {})
