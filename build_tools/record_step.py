"""Records what one training step launches, for :mod:`build_tools.predict`.

    MOSE_FAST_NATIVE=build/emulated/mose_fast python -m build_tools.record_step FILE

takes a step of MOSE (preset ``released``: 384 views of 32x32, four experts, bf16) on the emulated
card without computing anything: our kernels write their launch plans to FILE in place of running
(csrc/emulated/record.h), and each operation of PyTorch that would launch a kernel on a card adds a
line ``torch NAME BYTES OPERATIONS``. Convolutions and matrix products are not computed either. With
``--backbone`` the network is the backbone and its last expert alone.

Streams are those of the step: a line ``on STREAM`` stands where launches go on on another stream,
and a line ``wait STREAM OTHER`` where what comes next on a stream comes after all that another one
was given so far.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mose_fast  # noqa: F401  (before torch: it settles for how long threads spin)

# isort: split
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from build_tools.backward_streams import after_functions, place
from mose_fast.benchmark import random_stream
from mose_fast.config import RunConfig
from mose_fast.methods import create_learner
from mose_fast.methods.mose import Mose
from mose_fast.nn.backbone import PointwiseConv2d
from mose_fast.nn.side_streams import SideStreams

#: Operations that only allocate, or that read nothing a card would have to fetch.
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_local_scalar_dense",
    "scalar_tensor",
}
#: Operations that take long on a CPU; their results are left as memory comes.
_LONG = {"convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm"}
#: The network without what MOSE adds to it.
_BACKBONE = {"experts": 1, "attention": False, "adapter": False, "distillation": "off"}


class _Launches(TorchDispatchMode):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), dict(kwargs or {})
        result = _unfilled(func, args, kwargs) if name in _LONG else func(*args, **kwargs)
        if name not in _FREE and not func.is_view and func.namespace == "aten":
            with self.path.open("a") as file:
                moved = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
                size = sum(t.numel() * t.element_size() for t in moved)
                file.write(f"torch {name} {size} {_operations(name, args, result)}\n")
        return result


def _unfilled(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Tensors like those that ``func`` returns, whatever they hold."""
    known, named = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))

    def like(result: Tensor) -> Tensor:
        # Maps in channels_last, as cuDNN leaves them.
        memory = torch.channels_last if result.dim() == 4 else torch.contiguous_format
        return torch.empty(result.shape, dtype=result.dtype, memory_format=memory)

    return tree_map_only(Tensor, like, func(*known, **named))


def _operations(name: str, args: tuple, result: Any) -> int:
    """Multiplications and additions of a convolution or matrix product; 0 of any other
    operation.
    """
    if name == "convolution":
        return 2 * result.numel() * math.prod(args[1].shape[1:])
    if name == "convolution_backward":
        return 2 * args[0].numel() * math.prod(args[2].shape[1:]) * sum(args[-1][:2])
    if name not in ("mm", "addmm", "bmm", "baddbmm"):
        return 0
    left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
    return 2 * math.prod(left.shape) * right.shape[-1]


class _Streams(TorchFunctionMode):
    """Streams where there is no card: their switches and waits go into the record."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.current = path, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return self.placed(func(*args, **(kwargs or {})))

    def placed(self, results: Any) -> Any:
        return place(results, self.current, self.switch)

    def note(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")

    def switch(self, stream: int) -> int:
        before, self.current = self.current, stream
        if stream != before:
            self.note(f"on {stream}")
        return before

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        before = self.switch(stream.number)
        yield
        self.switch(before)

    @contextmanager
    def there(self) -> Iterator[None]:
        """A context in which branches have streams."""
        with ExitStack() as stack:
            for owner, name, replacement in (
                (torch.cuda, "stream", self.on),
                (torch.cuda, "current_stream", lambda device=None: _Stream(self, self.current)),
                (torch.Tensor, "record_stream", lambda tensor, stream: None),
                (SideStreams, "of", lambda streams, branch, x: _Stream(self, branch)),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(after_functions(self.placed))
            with self:
                yield


class _Stream:
    """In place of ``torch.cuda.Stream``; 0 is the network's, and a branch's has its number."""

    device = torch.device("cpu")

    def __init__(self, streams: _Streams, number: int) -> None:
        self.streams, self.number = streams, number

    def wait_stream(self, other: _Stream) -> None:
        self.streams.note(f"wait {self.number} {other.number}")


@contextmanager
def _recorded(path: Path) -> Iterator[None]:
    os.environ["MOSE_FAST_LAUNCHES"] = str(path)
    try:
        with _Launches(path), _Streams(path).there():
            yield
    finally:
        del os.environ["MOSE_FAST_LAUNCHES"]


def main(path: Path, backbone: bool) -> None:
    """Writes the record."""
    config = RunConfig.create(
        device="cpu", kernels="fused", precision="bf16", feed="fused", memory=5000, **(_BACKBONE if backbone else {})
    )
    os.environ["MOSE_FAST_SELF_CHECK"] = "0"  # its tiny network is not this step
    stream = random_stream(config, classes=100, images=40 * config.stream.batch)
    # As on a card, where the host reads losses late.
    Mose.reads_losses_late = True  # type: ignore[assignment,method-assign]
    learner = create_learner(config, **stream.spec)
    # As on a card, where no pixels are cut out first.
    PointwiseConv2d.forward = nn.Conv2d.forward  # type: ignore[method-assign]
    for task in range(2):
        for rows in stream.batches(task, seed=config.seed)[: 12 if task else None]:
            prepared = learner.prepare(stream.x_train[rows], stream.y_train[rows], task, index=rows)
    path.unlink(missing_ok=True)
    with _recorded(path):
        learner.step(prepared.steps[0].inputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), "--backbone" in sys.argv[2:])
