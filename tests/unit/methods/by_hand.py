"""What each baseline's step is compared with: one worked out by hand.

A test observes batches and compares every step with one in float64: losses, weights after the
update (hence gradients, learning rate and weight decay), batch norm's running statistics, replayed
rows, and what was stored. ``make mutants`` says which changes to a method they would not notice.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch

from mose_fast.learner.replay_learner import Rows
from mose_fast.methods import Learner
from mose_fast.nn import ExpertNetwork

LR, DECAY = 0.05, 0.1
SGD = {"optimiser": "sgd", "lr": LR, "weight_decay": DECAY, "augment": "none"}


class Step(NamedTuple):
    """A step that was taken: its rows, the losses it gave, and the network before (float64) and
    after it.
    """

    rows: Rows
    losses: dict[str, torch.Tensor]
    before: ExpertNetwork
    after: ExpertNetwork


def steps_of(learner: Learner, act) -> list[Step]:
    """Calls ``act`` and returns the steps that the learner took. The first one's network is that
    from before ``act``, so that nothing may happen to it unseen.
    """
    networks, plans, steps = [copy.deepcopy(learner.network).double().train()], [], []
    inputs, take = learner.inputs, learner.step

    def planned(plan, *stored):
        plans.append(plan)
        return inputs(plan, *stored)

    def noted(*how):
        before = copy.deepcopy(learner.network).double().train() if steps else networks[0]
        losses = take(*how)
        steps.append(Step(plans[len(steps)], losses, before, copy.deepcopy(learner.network)))
        return losses

    learner.inputs, learner.step = planned, noted
    act()
    del learner.inputs, learner.step
    return steps


def step_of(learner: Learner, x, y, task: int) -> Step:
    """The single step of an observed batch; checks that all but its incoming rows are what the
    memory held, and behind its slots the buffer of the task.
    """
    held = [learner.memory, *([learner.memory.buffer] if hasattr(learner.memory, "buffer") else [])]
    images, labels = (torch.cat([getattr(part, name) for part in held]) for name in ("images", "labels"))
    steps = steps_of(learner, lambda: learner.observe(x, y, task))
    assert len(steps) == 1
    step = steps[0]
    slots, given = step.rows.slots, step.rows.sizes[0]
    stored = slots >= 0
    assert given + len(slots) == len(step.rows.labels) == len(step.rows.images)
    assert torch.equal(step.rows.images[given:][stored], images[slots[stored]])
    assert torch.equal(step.rows.labels[given:][stored], labels[slots[stored]])
    return step


def bits(learner: Learner) -> dict[str, bytes]:
    """Every bit of a learner's state: tensors by name, and the plain values under an empty name."""
    tensors, values = learner.state()
    found = {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}
    return found | {"": repr(values).encode()}


def tensor_bits(learner: Learner, *left_out: str) -> dict[str, bytes]:
    return {name: content for name, content in bits(learner).items() if name not in ("", *left_out)}


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Views float64 [N, 3, H, W] of raw images, with mean and deviation 1/2."""
    return images.double().permute(0, 3, 1, 2) / 127.5 - 1


def logits_of(network: ExpertNetwork, views: torch.Tensor) -> torch.Tensor:
    return network.classify(network.features(views))[0]


def each_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p(label) of each row, written out."""
    return logits.exp().sum(1).log() - logits[torch.arange(len(labels)), labels]


def nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return each_nll(logits, labels).mean()


def close(found, wanted, tolerance: float = 1e-4) -> bool:
    found, wanted = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    return bool((found - wanted).norm() <= tolerance * wanted.norm() + 1e-7)


def gradients_of(loss: torch.Tensor, network: ExpertNetwork) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, list(network.parameters()), allow_unused=True, retain_graph=True))


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def expect_update(step: Step, gradients, lr: float = LR, decay: float = DECAY) -> None:
    """w - lr (g + decay w) for every parameter that the loss depends on; the others do not move.
    Batch norm's running statistics are those of the forward passes by hand.
    """
    pairs = list(zip(step.before.parameters(), gradients, strict=True))
    wanted = flat(torch.zeros_like(w) if g is None else -lr * (g + decay * w) for w, g in pairs)
    start = flat(step.before.parameters())
    moved = flat(step.after.parameters()) - start
    assert (moved - wanted).norm() < 1e-3 * wanted.norm() + 1e-6
    for g, w, now in zip(gradients, step.before.parameters(), step.after.parameters(), strict=True):
        assert g is not None or torch.equal(w.float(), now)
    buffers = dict(step.after.named_buffers())
    running = [(b, buffers[name]) for name, b in step.before.named_buffers() if "running" in name]
    assert running and all(close(found, wanted, 1e-3) for wanted, found in running)


def expect_terms(step: Step, terms: dict[str, torch.Tensor], lr: float = LR, weight: float = 1.0) -> None:
    """The step's losses and its update, for terms whose sum times ``weight`` is minimised."""
    total = sum(terms.values())
    assert step.losses.keys() == {"loss", *terms} and close(step.losses["loss"], total.detach())
    assert all(close(step.losses[name], term.detach()) for name, term in terms.items())
    expect_update(step, gradients_of(weight * total, step.before), lr)


def two_means(step: Step) -> dict[str, torch.Tensor]:
    """The terms of ER: a mean over incoming rows and one over replayed rows, from one pass."""
    given = step.rows.sizes[0]
    logits, labels = logits_of(step.before, normalised(step.rows.images)), step.rows.labels
    return {"incoming": nll(logits[:given], labels[:given]), "replayed": nll(logits[given:], labels[given:])}


def direction(v: torch.Tensor) -> torch.Tensor:
    return v / (v.norm() + 1e-5)
