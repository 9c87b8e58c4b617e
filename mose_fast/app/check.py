"""``mose-fast check``: whether a method keeps the rules of docs/adding_a_method.md."""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mose_fast.errors import MoseFastError
from mose_fast.methods import Learner, Planning, create_learner, load_learner

_CLASSES, _TASKS, _BATCHES, _BATCH = 6, 3, 4, 10

# What brings a value of a tensor to the host, or makes a tensor whose size depends on values.
_WAITS = (
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("nonzero", "argwhere", "masked_select", "unique", "equal", "allclose"),
)


class Finding(NamedTuple):
    """A rule, and how a method breaks it (None: not at all); ``asked`` is False where the rule is
    none for this method, which ``problem`` explains.
    """

    rule: str
    problem: str | None
    asked: bool = True


def check_method(name: str) -> Iterator[Finding]:
    """Checks a method, named as in ``RunConfig.method``, on the CPU, on a made-up stream of three
    tasks of two classes: 12 batches of ten images of 8x8 pixels, with a network of width 1.
    Yields a finding for each rule, as soon as it is checked; ConfigError if the method cannot be
    built.
    """
    batches = _stream()
    checks: tuple[tuple[str, Planning, Callable[[str, list], str | None]], ...] = (
        ("it learns, its losses are finite, and it predicts", Planning.LOOKS_AT_MODEL, _learns),
        ("its results depend on the seed alone, not on PyTorch's random numbers", Planning.LOOKS_AT_MODEL, _repeats),
        ("saved in the middle of a task, it continues with the same bits", Planning.LOOKS_AT_MODEL, _continues),
        ("a batch can be undone", Planning.LOOKS_AT_MODEL, _undoes),
        ("planned ahead, its steps have the same bits", Planning.AHEAD, _plans_ahead),
        ("its steps can be captured as CUDA graphs", Planning.CAPTURED, _never_waits),
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        method = _learner(name)  # refuses what is no method at all
        own = _own_files(method)
        for rule, planning, check in checks:
            if method.planning < planning:
                yield Finding(rule, f"planning is {method.planning.name}: it {method.not_captured}", asked=False)
                continue
            warned.clear()
            try:
                problem = check(name, batches)
            except MoseFastError as error:
                problem = str(error)
            except Exception as error:
                problem = f"{type(error).__name__}: {error} ({_place(error, own)})"
            told = next((w for w in warned if w.filename in own), None) if problem is None else None
            if told is not None:
                problem = f"{Path(told.filename).name}, line {told.lineno} is warned of: {told.message}"
            yield Finding(rule, problem)


def _stream() -> list[tuple[Tensor, Tensor, int]]:
    """Batches of images that tell their classes by brightness, with their tasks."""
    random = torch.Generator().manual_seed(0)
    found = []
    for task in range(_TASKS):
        for _ in range(_BATCHES):
            labels = 2 * task + torch.randint(2, (_BATCH,), generator=random)
            noise = torch.randint(90, (_BATCH, 8, 8, 3), generator=random)
            found.append(((noise + 30 * labels[:, None, None, None]).to(torch.uint8), labels, task))
    return found


def _learner(name: str) -> Learner:
    return create_learner(
        method=name, classes=_CLASSES, image_size=(8, 8), width=1, memory=24, device="cpu", options={"buffer_batch": 8}
    )


def _bits(learner: Learner) -> dict[str, bytes]:
    tensors, values = learner.state()
    bits = {name: t.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}
    return bits | {"plain values": repr(values).encode()}


def _difference(found: Learner, wanted: Learner) -> str | None:
    """The parts of the state that differ between two learners, in words."""
    now, before = _bits(found), _bits(wanted)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"these differ: {', '.join(names[:3])}{more}" if names else None


def _teach(learner: Learner, batches: list) -> Learner:
    for batch in batches:
        learner.observe(*batch)
    return learner


def _learns(name: str, batches: list) -> str | None:
    learner = _learner(name)
    before = learner.weights_hash()
    for number, batch in enumerate(batches):
        losses = learner.observe(*batch)
        for loss, value in (losses or {}).items():
            if not value.isfinite():
                return f"the loss {loss!r} of batch {number} is {value.item()}"
    learner.end_task()
    labels = learner.predict(batches[0][0])  # methods that train when asked do it here
    if learner.weights_hash() == before:
        return "no weight has changed"
    return None if len(labels) == _BATCH else f"predict() gave {len(labels)} labels for {_BATCH} images"


def _repeats(name: str, batches: list) -> str | None:
    learners = []
    for other in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(other)
            before = torch.get_rng_state()
            learners.append(_teach(_learner(name), batches))
            drawn = not torch.equal(torch.get_rng_state(), before)
    if difference := _difference(*learners):
        return f"with another seed of PyTorch {difference}; wanted random numbers of mose_fast.ops.draws"
    return "it draws from PyTorch's global generator; wanted mose_fast.ops.draws" if drawn else None


def _continues(name: str, batches: list) -> str | None:
    half = len(batches) // 2
    learner = _teach(_learner(name), batches[:half])
    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder) / "learner")
        loaded = load_learner(Path(folder) / "learner")
    return _difference(_teach(loaded, batches[half:]), _teach(learner, batches[half:]))


def _undoes(name: str, batches: list) -> str | None:
    half = len(batches) // 2
    learner, never = _teach(_learner(name), batches[:half]), _teach(_learner(name), batches[:half])
    ahead = [
        learner.prepare(*batch) for batch in batches[half : half + (2 if learner.planning >= Planning.AHEAD else 1)]
    ]
    for prepared in reversed(ahead):
        prepared.undo()
    return _difference(_teach(learner, batches[half:]), _teach(never, batches[half:]))


def _plans_ahead(name: str, batches: list) -> str | None:
    ahead, beside = _learner(name), _teach(_learner(name), batches)
    for task in range(_TASKS):
        mine = [batch for batch in batches if batch[2] == task]
        for prepared in [ahead.prepare(*batch) for batch in mine]:
            prepared.take()
    if difference := _difference(ahead, beside):
        return f"{difference}; wanted retrieve, plan and store not to read what steps write, or a lower planning"
    return None


class _Watch(TorchFunctionMode):
    """Notes where a method's own files ask for a value of a tensor."""

    def __init__(self, files: set[str]) -> None:
        super().__init__()
        self.files, self.found = files, []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        by_mask = name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if name in _WAITS or by_mask:
            frame = sys._getframe(1)
            while frame is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and frame.f_code.co_filename in self.files:
                what = "indexing by a mask" if by_mask else f"{name}()"
                self.found.append(f"{what} in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}")
        return function(*args, **(kwargs or {}))


def _never_waits(name: str, batches: list) -> str | None:
    learner = _learner(name)
    watch = _Watch(_own_files(learner))
    train_on = learner.train_on

    def watched(inputs: Any) -> Any:
        with watch:
            return train_on(inputs)

    learner.train_on = watched
    _teach(learner, batches)
    if not watch.found:
        return None
    return (
        f"a step asks for values of tensors, so that a GPU would have to wait: {'; '.join(dict.fromkeys(watch.found))}."
        " Wanted tensors throughout (docs/adding_a_method.md), or planning = Planning.AHEAD"
    )


def _own_files(learner: Learner) -> set[str]:
    """The files of a method's classes that are not those of every learner."""
    modules = [kind.__module__ for kind in type(learner).__mro__]
    return {
        sys.modules[name].__file__ for name in modules if not name.startswith(("mose_fast.learner.", "abc", "builtins"))
    }


def _place(error: BaseException, own: set[str]) -> str:
    """The innermost line of an error in some files, else in all."""
    lines = traceback.extract_tb(error.__traceback__)
    line = [*lines[-1:], *(line for line in lines if line.filename in own)][-1]
    return f"{Path(line.filename).name}, line {line.lineno}"
