"""A method of one's own with a second network: a momentum teacher, and a count that plans write."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from mose_fast.methods import METHODS, BaselineOptions, Preset, ReplayLearner, cross_entropy, method
from mose_fast.settings.run import METHOD_SETTINGS


class Ema(ReplayLearner):
    """ER that distils from the running mean of its own weights."""

    def __init__(self, config, **stream):
        super().__init__(config, **stream)
        self.keep("slow", copy.deepcopy(self.network).requires_grad_(False))
        self.keep("drawn", torch.zeros(config.memory), written="plans")

    def retrieve(self, x, y):
        slots = super().retrieve(x, y)
        self.drawn[slots] += 1
        return slots

    def losses(self, outputs, rows):
        with torch.no_grad(), self.model.autocast():
            taught = self.slow.eval()(rows.views.contiguous(memory_format=torch.channels_last)).logits[0]
        return {
            "loss_of_labels": cross_entropy(outputs.logits, rows.labels),
            "distillation": F.mse_loss(outputs.logits.float(), taught.float()),
        }

    @torch.no_grad()
    def after_update(self, outputs, rows):
        for slow, new in zip(self.slow.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(new, 0.1)
        for slow, new in zip(self.slow.buffers(), self.network.buffers(), strict=True):
            slow.copy_(new)


@contextmanager
def entered() -> Iterator[None]:
    """A context in which there is the method ``ema``; at other times it would be one of ours."""
    about = {"presets": {"table": Preset("a test")}, "year": 2026, "reference": "tests", "cost": 1.0}
    method("ema", options=BaselineOptions, **about)(Ema)
    yield
    del METHODS["ema"], METHOD_SETTINGS["ema"]
