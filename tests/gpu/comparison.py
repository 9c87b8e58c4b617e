"""What the tests of kernels do with the problems of the self-check."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mose_fast.self_check.problems import Problem
from mose_fast.self_check.rows import compared


def results(problem: Problem, function: Any, *args: Any, **options: Any) -> list[Tensor]:
    """The results of a function in their order."""
    return list(problem.run(function, *args, **options).values())


def check(problem: Problem) -> None:
    """Fails unless each result of the op is within its bound."""
    beyond = [
        f"{name}: error {error:.3g}, bound {bound:.3g}"
        for name, error, bound in compared(problem)
        if not error <= bound
    ]
    assert not beyond, "; ".join(beyond)
