"""Batch norm, residual add and ReLU as one module."""

from __future__ import annotations

from torch import Tensor, nn

from mose_fast.ops.batch_norm_act import Norm, batch_norm_act

__all__ = ["BatchNormAct2d"]


class BatchNormAct2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that also adds a residual and rectifies, for any model; parameters,
    buffers and state_dict are the same.

    Args:
        momentum: The share of a batch's statistics in the running ones; a cumulative average (None)
            is refused.
        track_running_stats: Whether there are running statistics; without, evaluation uses the
            batch's too.

    Raises:
        ValueError: ``momentum`` is None.
    """

    def __init__(
        self,
        channels: int,
        *,
        relu: bool = True,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        if momentum is None:
            raise ValueError("momentum is None (a cumulative average); wanted a number")
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        self.relu = relu

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        residual_norm: nn.BatchNorm2d | None = None,
        prologue: Tensor | None = None,
        consumers: int = 1,
        valid_rows: int | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Computes relu(norm(x) + residual), or + residual_norm(residual);
        :func:`mose_fast.ops.batch_norm_act.batch_norm_act` describes the arguments.

        ``residual_norm`` is a module whose own forward is not called.
        """
        return batch_norm_act(
            x,
            Norm.of(self),
            relu=self.relu,
            residual=residual,
            residual_norm=None if residual_norm is None else Norm.of(residual_norm),
            prologue=prologue,
            consumers=consumers,
            valid_rows=valid_rows,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"
