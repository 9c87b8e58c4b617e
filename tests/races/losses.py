"""A listener that keeps the losses that a run tells."""

from __future__ import annotations

from typing import Any

from mose_fast.train import Listener


class Losses(Listener):
    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        self.told.append((batch, losses))
