"""A run that is interrupted where a test wants it."""

from mose_fast.train import Interrupted, Listener


class StopAt(Listener):
    """Interrupts a run after a batch."""

    def __init__(self, batch):
        self.batch = batch

    def on_batch(self, batch, losses):
        if batch == self.batch:
            raise Interrupted
