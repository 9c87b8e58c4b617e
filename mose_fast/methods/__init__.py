"""Learners, found by name: one file a method."""

from __future__ import annotations

from typing import Any

from mose_fast.config import ConfigError, RunConfig
from mose_fast.methods.agem import Agem
from mose_fast.methods.aser import Aser
from mose_fast.methods.base import IMAGE_SIZE, Learner, Prepared, check_stream, resolve_device
from mose_fast.methods.derpp import Derpp
from mose_fast.methods.er import Er
from mose_fast.methods.er_aml import ErAml
from mose_fast.methods.finetune import Finetune
from mose_fast.methods.gdumb import Gdumb
from mose_fast.methods.gss import Gss
from mose_fast.methods.joint import Joint
from mose_fast.methods.mir import Mir
from mose_fast.methods.mose import Mose
from mose_fast.methods.network import NetworkLearner
from mose_fast.methods.registry import METHODS, About, Preset, find_method, method, method_names, warn_of_other_protocol
from mose_fast.methods.replay import BaselineOptions, Outputs, ReplayLearner, Rows, cross_entropy
from mose_fast.methods.room import check_room
from mose_fast.methods.scr import Scr

__all__ = [
    "METHODS",
    "About",
    "Agem",
    "Aser",
    "BaselineOptions",
    "Derpp",
    "Er",
    "ErAml",
    "Finetune",
    "Gdumb",
    "Gss",
    "Joint",
    "Learner",
    "Mir",
    "Mose",
    "NetworkLearner",
    "Outputs",
    "Prepared",
    "Preset",
    "ReplayLearner",
    "Rows",
    "Scr",
    "check_room",
    "create_learner",
    "cross_entropy",
    "find_method",
    "method",
    "method_names",
    "resolve_device",
    "warn_of_other_protocol",
]


def create_learner(config: RunConfig | None = None, *, classes: int, **stream_or_settings: Any) -> Learner:
    """Creates a learner that can be used without the loop.

    Args:
        config: The settings; None builds them with :meth:`RunConfig.create` from the keywords that
        the learner does not take itself.
        classes: Number of classes of the whole stream.
        **stream_or_settings: What the learner must know of the stream, and without ``config`` the
            settings, all by name:

            - ``image_size`` ((int, int), (32, 32)): height and width, multiples of 8.
            - ``mean``, ``std`` (three floats each): of the channels of images in [0, 1].
            - ``mirror_safe`` (bool): False where mirroring an image changes its label.
            - ``method`` (str, ``"mose"``), ``preset`` (str), ``memory`` (int, 1000), ``width``
              (int, 64), ``seed`` (int, 0), ``device`` (str, ``"auto"``) and the other fields of
              :class:`RunConfig`.
            - ``options`` (dict): switches of the method that differ from the preset; each may also
              be given by itself: ``lr=0.01``.

    Raises:
        ConfigError: An unknown method, an unusable setting, or a learner that does not fit into the
            free memory.
    """
    stream = {
        k: stream_or_settings.pop(k) for k in ("image_size", "mean", "std", "mirror_safe") if k in stream_or_settings
    }
    if config is None:
        config = RunConfig.create(**stream_or_settings)
    elif stream_or_settings:
        raise ConfigError(f"{', '.join(stream_or_settings)}: given beside config; wanted them inside it")
    check_stream(classes=classes, **stream)
    check_room(config, stream.get("image_size", IMAGE_SIZE))
    return find_method(config.method)(config, classes=classes, **stream)
