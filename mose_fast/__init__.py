"""Online continual learning by Multi-level Online Sequential Experts (MOSE, CVPR 2024), accelerated
with C++ and CUDA.

>>> results = mose_fast.run(stream="digits", width=16, memory=500)
>>> results["acc"]["ncm"]["4"]
"""

import os
from typing import TYPE_CHECKING

from mose_fast._lazy import lazy_names
from mose_fast._version import __version__
from mose_fast.errors import MoseFastError
from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig
from mose_fast.threads import settle_spinning

if TYPE_CHECKING:
    from mose_fast import streams
    from mose_fast._build_info import build_info
    from mose_fast.experiments.sweep import run_sweep
    from mose_fast.experiments.tune.tuning import tune
    from mose_fast.integrations.online_classifier import OnlineClassifier
    from mose_fast.methods import METHODS, Learner, create_learner, load_learner
    from mose_fast.methods.mose import MoseOptions
    from mose_fast.streams import StreamError
    from mose_fast.train import Listener, RunError, resume, run

__all__ = [
    "METHODS",
    "ConfigError",
    "Learner",
    "Listener",
    "MoseFastError",
    "MoseOptions",
    "OnlineClassifier",
    "RunConfig",
    "RunError",
    "StreamConfig",
    "StreamError",
    "__version__",
    "build_info",
    "create_learner",
    "load_learner",
    "resume",
    "run",
    "run_sweep",
    "streams",
    "tune",
]

# Here, because every process that computes imports this package, and in most of them before torch.
settle_spinning(os.environ)

# Everything but the settings needs torch, whose import takes more than a second.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "METHODS": "mose_fast.methods",
        "MoseOptions": "mose_fast.methods.mose",
        "Learner": "mose_fast.methods",
        "Listener": "mose_fast.train",
        "OnlineClassifier": "mose_fast.integrations.online_classifier",
        "RunError": "mose_fast.train",
        "StreamError": "mose_fast.streams",
        "build_info": "mose_fast._build_info",
        "create_learner": "mose_fast.methods",
        "load_learner": "mose_fast.methods",
        "resume": "mose_fast.train",
        "run": "mose_fast.train",
        "run_sweep": "mose_fast.experiments.sweep",
        "streams": "mose_fast.streams",
        "tune": "mose_fast.experiments.tune.tuning",
    },
)
