"""Optimisers whose step never waits for the host."""

from mose_fast.optim.flat_adam import FlatAdam

__all__ = ["FlatAdam"]
