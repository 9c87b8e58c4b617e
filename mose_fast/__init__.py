"""Online continual learning by Multi-level Online Sequential Experts (MOSE, CVPR 2024), accelerated with C++ and CUDA.

>>> results = mose_fast.run(stream="digits", width=16, memory=500)
>>> results["acc"]["ncm"]["4"]
"""

from mose_fast import streams
from mose_fast._build_info import build_info
from mose_fast._version import __version__
from mose_fast.config import ConfigError, MoseOptions, RunConfig, StreamConfig
from mose_fast.methods import METHODS, Learner, create_learner
from mose_fast.streams import StreamError
from mose_fast.sweep.scheduler import sweep
from mose_fast.train import Listener, RunError, resume, run

__all__ = [
    "METHODS",
    "ConfigError",
    "Learner",
    "Listener",
    "MoseOptions",
    "RunConfig",
    "RunError",
    "StreamConfig",
    "StreamError",
    "__version__",
    "build_info",
    "create_learner",
    "resume",
    "run",
    "streams",
    "sweep",
]
