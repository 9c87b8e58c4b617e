"""Adam over flat buffers in plain PyTorch: the definition of the native step.

The formulas are those of ``torch.optim.Adam`` (Kingma and Ba 2015, algorithm 1, with weight decay
added to the gradient). For a parameter w with moments m and v, gradient g and its own count of
steps t, after t <- t + 1 and g <- g + weight_decay w:

    m <- m + (1 - beta1) (g - m),    v <- beta2 v + (1 - beta2) g^2,
    w <- w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps),

and a moving average a of the weight follows it: a <- a + average_rate (w - a).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradients: Sequence[Tensor | None],
    offsets: Sequence[int],
    steps: Tensor,
    lr: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    shadow: Tensor | None = None,
    loss: Tensor | None = None,
    latch: Tensor | None = None,
    average: Tensor | None = None,
    average_shadow: Tensor | None = None,
    average_rate: float = 0.0,
) -> None:
    """Takes one step in place, without waiting; see :func:`mose_fast.ops.adam.adam_step`."""
    frozen = torch.zeros((), dtype=torch.bool, device=master.device) if latch is None else latch.clone()
    if loss is not None:
        frozen |= ~loss.reshape(()).isfinite()
        if latch is not None:
            latch.copy_(frozen)
    for position, (gradient, start) in enumerate(zip(gradients, offsets, strict=True)):
        if gradient is None:
            continue
        count = gradient.numel()
        part = slice(start, start + count)
        t = steps[position].double() + 1
        # In memory order, as the flat buffers hold it.
        g = gradient.detach().as_strided((count,), (1,)).float() + weight_decay * master[part]
        m = exp_avg[part].lerp(g, 1 - beta1)
        v = (exp_avg_sq[part] * beta2).addcmul(g, g, value=1 - beta2)
        step_size = (lr.double() / (1 - beta1**t)).float()
        correction = (1 - beta2**t).sqrt().float()
        w = master[part] - step_size * m / (v.sqrt() / correction + eps)
        a = None if average is None else average[part] + average_rate * (w - average[part])
        steps[position] = torch.where(frozen, steps[position], t.float())
        written = ((exp_avg, m), (exp_avg_sq, v), (master, w), (shadow, w), (average, a), (average_shadow, a))
        for buffer, value in written:
            if buffer is not None:
                buffer[part] = torch.where(frozen, buffer[part], value.to(buffer.dtype))
