"""The replay memory: slots and the policy that fills them."""

from mose_fast.memory.gradient import GradientMemory
from mose_fast.memory.replay import ReplayMemory
from mose_fast.memory.shapley import ShapleyMemory

__all__ = ["GradientMemory", "ReplayMemory", "ShapleyMemory"]
