"""Listeners that a run of a test gets: one that keeps its losses, one that breaks it off."""

from __future__ import annotations

from typing import Any

from mose_fast.train import Interrupted, Listener


class Losses(Listener):
    """Keeps the number and the losses of each batch that it is told of."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        self.told.append((batch, losses))


class StopAt(Listener):
    """Raises an error after a batch; by default the one that interrupts a run."""

    def __init__(self, batch: int, error: type[BaseException] | BaseException = Interrupted) -> None:
        self.batch, self.error = batch, error

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        if batch == self.batch:
            raise self.error
