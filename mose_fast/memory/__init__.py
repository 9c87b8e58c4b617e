"""The replay memory: slots and the policy that fills them."""

from mose_fast.memory.balanced import BalancedMemory
from mose_fast.memory.exemplars import ExemplarMemory
from mose_fast.memory.gradient import GradientMemory
from mose_fast.memory.pairs import draw_pairs
from mose_fast.memory.replay import MemoryRecord, ReplayMemory, highest
from mose_fast.memory.shapley import ShapleyMemory

__all__ = [
    "BalancedMemory",
    "ExemplarMemory",
    "GradientMemory",
    "MemoryRecord",
    "ReplayMemory",
    "ShapleyMemory",
    "draw_pairs",
    "highest",
]
