"""The replay memory: slots and the policy that fills them."""

from mose_fast.memory.replay import ReplayMemory

__all__ = ["ReplayMemory"]
