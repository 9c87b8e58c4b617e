"""Checks of arguments, the same for every op. A check that fails raises an error that names the
argument, its value and what was wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mose_fast.reference.batch_norm import Norm

#: The dtypes of feature maps and loss inputs.
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
#: The sizes of a feature map.
MAP = ("N", "C", "H", "W")


def _alternatives(values: Iterable[object]) -> str:
    *others, last = (str(getattr(value, "name", value)) for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def _written(sizes: Sequence[int | str]) -> str:
    """A wanted shape: a tuple, or in brackets where a size is free."""
    if any(isinstance(size, str) for size in sizes):
        return f"[{', '.join(map(str, sizes))}]"
    return str(tuple(sizes))


def _fits(shape: torch.Size, sizes: Sequence[int | str], filled: Sequence[int]) -> bool:
    if shape != sizes:  # without a free size the two are equal, which is the cheaper question
        if len(shape) != len(sizes):
            return False
        if any(not isinstance(size, str) and size != given for size, given in zip(sizes, shape, strict=True)):
            return False
    return all(shape[dimension] for dimension in filled)


def require(fits: bool, name: str, value: object, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name} is {value!r}; wanted {wanted}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; wanted {_alternatives(choices)}")


def check_integer(name: str, value: object, low: int | None = None, high: int | None = None) -> None:
    """Raises ValueError unless ``value`` is an int, not a bool, in ``low`` ... ``high``."""
    is_integer = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if is_integer and (low is None or value >= low) and (high is None or value <= high):
        return
    bounds = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
    raise ValueError(f"{name} is {value!r}; wanted an integer{bounds}")


def check_tensor(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[int | str] | None = None,
    *,
    beside: tuple[str, Tensor] | None = None,
    filled: Sequence[int] = (),
    because: str = "",
    contiguous: bool = False,
) -> None:
    """Raises TypeError or ValueError unless ``value`` is a strided tensor that fits.

    Args:
        name: The argument's name.
        value: The argument.
        dtypes: Allowed dtypes.
        sizes: The wanted shape: a number is a fixed size, a name a free one. None: any shape.
        beside: Name and tensor of another argument, whose device is wanted.
        filled: Dimensions whose size must not be 0.
        because: What a message about the shape ends with.
        contiguous: Want contiguous memory, for a tensor that is changed in place.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {value!r}; wanted a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}; wanted {_alternatives(dtypes)}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; wanted torch.strided")
    if sizes is not None and not _fits(value.shape, sizes, filled):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; wanted {_written(sizes)}{because}")
    if beside is not None and value.device != beside[1].device:
        raise ValueError(f"{name} is on {value.device}; wanted {beside[1].device}, where {beside[0]} is")
    if contiguous and not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}; wanted contiguous memory, since it is changed in place")


def check_rows(name: str, count: object, most: int, beside: tuple[str, Tensor]) -> None:
    """Raises TypeError or ValueError unless ``count`` is an int from 0 to ``most``, or an int32
    scalar on the device of ``beside``.

    The value of a scalar is not read: on a GPU that would wait.
    """
    if not isinstance(count, Tensor):
        check_integer(name, count, 0, most)
    elif count.dtype != torch.int32 or count.dim() != 0:
        raise TypeError(f"{name} is {count.dtype} {tuple(count.shape)}; wanted an int or an int32 scalar")
    else:
        check_tensor(name, count, (torch.int32,), beside=beside)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which statistics over ``x`` are kept: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_norm(name: str, norm: object, channels: int, x: Tensor, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Raises TypeError or ValueError unless ``norm`` is a :class:`Norm` over ``channels`` channels
    beside ``x`` that has the statistics it needs.
    """
    if not isinstance(norm, Norm):
        raise TypeError(f"{name} is {norm!r}; wanted a Norm, as Norm.of(module) returns it")
    for part in ("weight", "bias", "running_mean", "running_var"):
        vector = getattr(norm, part)
        if vector is not None:
            check_tensor(f"{name}.{part}", vector, dtypes, (channels,), beside=("x", x))
    missing = (norm.running_mean is None) + (norm.running_var is None)
    if missing and not norm.training:
        raise ValueError(f"{name}.training is False without running statistics; wanted both of them")
    if missing == 1:
        raise ValueError(f"{name} has one of running_mean and running_var; wanted both or neither")


def check_statistics(norm: Norm, size: Sequence[int], valid_rows: int | Tensor | None) -> None:
    """Raises PyTorch's own ValueError where ``norm`` would take statistics of one element a channel
    in a map of ``size`` [N, C, H, W].
    """
    rows = size[0] if valid_rows is None else valid_rows
    if norm.training and not isinstance(rows, Tensor) and rows * size[2] * size[3] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {torch.Size(size)}")
