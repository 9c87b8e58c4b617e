"""The process of the self-check: computes the table of small problems and five steps of a tiny
network on the GPU, and reports each row as it is done.

A part that leaves the GPU unusable for its process is the last of it; the rest is computed in a
new one (:mod:`mose_fast.self_check.verdict`).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.device import deterministic, own_stream
from mose_fast.learner.model import set_precision
from mose_fast.methods import create_learner
from mose_fast.self_check.rows import OPS, Row, rows_of, table
from mose_fast.self_check.verdict import RESTART, kind_of, switched_off
from mose_fast.settings.run import RunConfig
from mose_fast.train.captured import CapturedSteps

#: What luck may spare PyTorch's few losses, of their norm: four roundings to bf16.
FLOOR = 2.0**-7
#: Steps of the tiny network. Of captured ones the first is eager, and the second is captured.
STEPS = 5


class Trained(NamedTuple):
    """What the steps left: ``losses`` float64 [STEPS, 4], ``change`` of all weights float64 [P],
    and why steps were not captured where they should have been, else empty.
    """

    losses: Tensor
    change: Tensor
    obstacle: str


def train(
    device: str, *, small: bool, seed: int = 0, captured: bool = False, gates: bool = True, **settings: Any
) -> Trained:
    """Takes :data:`STEPS` steps of a tiny MOSE on random images; ``small``: of a size that an
    emulated GPU computes in a second; ``seed``: of weights, images and draws; ``gates``: with
    attention gates; ``settings``: of :class:`RunConfig`.
    """
    batch, side = (2, 8) if small else (10, 16)
    config = RunConfig.create(
        stream={"name": "digits", "batch": batch},
        device=device,
        memory=20,
        width=8 if small else 16,
        feed="fused",
        step="eager",
        seed=seed,
        options={
            "experts": 2 if small else 4,
            "buffer_batch": batch,
            "new_extra": 0,
            "inner_views": 1 if small else 2,
            "first_task": "same",
            "skip_first_batch": False,
            "attention": gates,
            # After larger steps one activation on the other side of zero carries runs apart.
            "lr": 4e-4,
        },
        **settings,
    )
    learner = create_learner(config, classes=6, image_size=(side, side))

    def weights() -> Tensor:
        return torch.cat([parameter.detach().double().reshape(-1) for parameter in learner.network.parameters()])

    before, losses = weights(), []
    generator = torch.Generator().manual_seed(seed)
    with own_stream(learner.device):
        steps = CapturedSteps(learner, capture=captured) if learner.reads_losses_late else None
        for _ in range(STEPS):
            x = torch.randint(0, 256, (batch, side, side, 3), dtype=torch.uint8, generator=generator)
            y = torch.randint(0, 3, (batch,), generator=generator)
            told = learner.prepare(x, y, 0).take(steps)
            losses.append(torch.stack([loss.double() for loss in told.values()]))
        change = weights() - before
    obstacle = ""
    if captured and (steps is None or steps.obstacle or not steps.graphs):
        obstacle = getattr(steps, "obstacle", "") or "there was no graph"
    return Trained(torch.stack(losses).cpu(), change.cpu(), obstacle)


def step_rows(device: str, *, small: bool, seed: int = 0) -> Iterator[Row]:
    """Steps with our kernels against PyTorch's in float32, by the norms of all losses and of the
    change of all weights: they may be twice as far away as PyTorch's in bf16, and a floor.

    In float32, too: there a single activation that rounding puts on the other side of zero costs up
    to half of what bf16 does.
    """
    how = {"small": small, "seed": seed}
    exact, plain = (train(device, **how, kernels="torch", precision=precision) for precision in ("fp32", "bf16"))
    for precision in ("bf16",) if small else ("bf16", "fp32"):
        ours = train(device, **how, kernels="fused", precision=precision)
        for name, said in (("losses", "losses"), ("change", "change of the weights")):
            wanted = getattr(exact, name)
            error, bound = ((getattr(found, name) - wanted).norm() / wanted.norm() for found in (ours, plain))
            yield Row("step", f"{STEPS} steps, {precision}", error.item(), 2 * bound.item() + FLOOR, said)


def captured_rows(device: str, *, small: bool, seed: int = 0) -> Iterator[Row]:
    """Captured steps against eager ones, with deterministic kernels: all bits must be equal."""
    kernels = "torch" if "step" in _loader.off else "fused"
    # PyTorch's up-sampling has no deterministic backward pass.
    gates = "align_conv" not in _loader.off
    how = {"small": small, "seed": seed, "kernels": kernels, "precision": "bf16", "gates": gates}
    with deterministic():
        eager, captured = (train(device, **how, captured=captured) for captured in (False, True))
    case = f"{STEPS} steps, bf16"
    if captured.obstacle:
        yield Row("captured", case, None, None, f"no graph could be captured: {captured.obstacle}")
        return
    for name, said in (("losses", "losses that differ"), ("change", "weights that differ")):
        yield Row("captured", case, float((getattr(eager, name) != getattr(captured, name)).sum()), 0.0, said)


def parts(device: str, *, small: bool, seed: int = 0) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """The parts of the check in order, and what computes the rows of each."""
    how = {"small": small, "seed": seed}
    cases = list(table(device, **how))
    for op in OPS:
        yield op, lambda op=op: (row for case in cases if case.op == op for row in rows_of(case))
    yield "step", lambda: step_rows(device, **how)
    if torch.device(device).type == "cuda":
        yield "captured", lambda: captured_rows(device, **how)


def main() -> int:
    """Computes the parts that are not done yet, and reports them on standard output.

    The argument of the command line is JSON: ``device``; ``kind``, as the caller sees it; ``done``,
    the parts that are done; ``off``, what is switched off.
    """
    wanted = json.loads(sys.argv[1])
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    device, small = torch.device(wanted["device"]), _loader.gpu() == "cpu"
    torch.set_num_threads(1 if small else torch.get_num_threads())
    set_precision("fp32")
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        kind = kind_of(device)
        _use(device)
    except Exception as error:  # as varied as what can be wrong with a machine
        tell(obstacle=f"the GPU cannot be used: {_first_line(error)}")
        return 0
    if kind != wanted["kind"]:
        differing = [name for name in wanted["kind"] if (kind or {}).get(name) != wanted["kind"][name]]
        tell(obstacle=f"its process has another {' and another '.join(differing)}")
        return 0
    _loader.switch_off(wanted["off"])
    for name, compute in parts(wanted["device"], small=small):
        if name in wanted["done"]:
            continue
        tell(begin=name)
        rows, usable = [], True
        try:
            for row in compute():
                rows.append(row)
                tell(row=row._asdict())
            _use(device)
        except torch.OutOfMemoryError as error:
            tell(obstacle=f"the GPU has too little free memory: {_first_line(error)}")
            return 0
        except Exception as error:
            rows.append(Row(name, "all", None, None, f"{type(error).__name__}: {_first_line(error)}"))
            tell(row=rows[-1]._asdict())
            try:
                _use(device)
            except RuntimeError:
                usable = False
        _loader.switch_off(switched_off(rows))
        tell(end=name)
        if not usable:
            return RESTART
    tell(finished=True)
    return 0


def _use(device: torch.device) -> None:
    """Raises if the GPU is out of order, or an earlier launch has failed."""
    if not math.isclose(float(torch.ones(8, device=device).sum()), 8):
        raise RuntimeError("the sum of eight ones is not 8")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
