"""Online continual learning by Multi-level Online Sequential Experts (MOSE, CVPR 2024), accelerated with C++ and CUDA."""

from mose_fast._build_info import build_info
from mose_fast._version import __version__

__all__ = ["__version__", "build_info"]
