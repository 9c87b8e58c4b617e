"""Learners, found by name: one file a method."""

from __future__ import annotations

from typing import Any

from mose_fast.config import ConfigError, RunConfig
from mose_fast.methods.base import Learner, resolve_device
from mose_fast.methods.mose import Mose
from mose_fast.methods.network import NetworkLearner

__all__ = ["METHODS", "Learner", "Mose", "NetworkLearner", "create_learner", "resolve_device"]

#: Every method by name.
METHODS: dict[str, type[Learner]] = {"mose": Mose}


def create_learner(config: RunConfig | None = None, *, classes: int, **stream_or_settings: Any) -> Learner:
    """Creates a learner that can be used without the loop.

    Args:
        config: The settings; None builds them with :meth:`RunConfig.create` from the keywords that the learner does not take itself.
        classes: Number of classes of the whole stream.
        **stream_or_settings: ``image_size``, ``mean``, ``std``, ``mirror_safe`` (see :class:`Learner`); without ``config`` also
            ``preset``, ``memory``, ``width``, ``seed``, ``options``, ...

    Raises:
        ConfigError: An unknown method or an unusable setting.
    """
    stream = {k: stream_or_settings.pop(k) for k in ("image_size", "mean", "std", "mirror_safe") if k in stream_or_settings}
    if config is None:
        config = RunConfig.create(**stream_or_settings)
    elif stream_or_settings:
        raise ConfigError(f"{', '.join(stream_or_settings)}: given beside config; wanted them inside it")
    return METHODS[config.method](config, classes=classes, **stream)
