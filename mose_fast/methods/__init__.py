"""Learners, found by name: one file a method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mose_fast.device import resolve_device
from mose_fast.learner.about import About, Preset
from mose_fast.learner.data import IMAGE_SIZE, check_stream
from mose_fast.learner.exemplar_learner import ExemplarLearner, ExemplarOptions
from mose_fast.learner.hooks import Planning
from mose_fast.learner.learner import Learner
from mose_fast.learner.prepared import PlannedStep, Prepared, ViewsToCome, WholeBatch
from mose_fast.learner.registry import METHODS, find_method, method, method_names, warn_of_other_protocol
from mose_fast.learner.replay_learner import BaselineOptions, Outputs, ReplayLearner, Rows, cross_entropy
from mose_fast.learner.room import check_room
from mose_fast.learner.saved import read_learner
from mose_fast.methods.agem import Agem
from mose_fast.methods.aser import Aser
from mose_fast.methods.bic import Bic
from mose_fast.methods.ccil import Ccil
from mose_fast.methods.co2l import Co2l
from mose_fast.methods.derpp import Derpp
from mose_fast.methods.er import Er
from mose_fast.methods.er_ace import ErAce
from mose_fast.methods.er_aml import ErAml
from mose_fast.methods.finetune import Finetune
from mose_fast.methods.gdumb import Gdumb
from mose_fast.methods.gsa import Gsa
from mose_fast.methods.gss import Gss
from mose_fast.methods.il2a import Il2a
from mose_fast.methods.joint import Joint
from mose_fast.methods.lucir import Lucir
from mose_fast.methods.mir import Mir
from mose_fast.methods.mose import Mose
from mose_fast.methods.ocm import Ocm
from mose_fast.methods.onpro import OnPro
from mose_fast.methods.scr import Scr
from mose_fast.methods.ssil import Ssil
from mose_fast.settings.run import ConfigError, RunConfig, knob, takes_settings

__all__ = [
    "METHODS",
    "About",
    "Agem",
    "Aser",
    "BaselineOptions",
    "Bic",
    "Ccil",
    "Co2l",
    "Derpp",
    "Er",
    "ErAce",
    "ErAml",
    "ExemplarLearner",
    "ExemplarOptions",
    "Finetune",
    "Gdumb",
    "Gsa",
    "Gss",
    "Il2a",
    "Joint",
    "Learner",
    "Lucir",
    "Mir",
    "Mose",
    "Ocm",
    "OnPro",
    "Outputs",
    "PlannedStep",
    "Planning",
    "Prepared",
    "Preset",
    "ReplayLearner",
    "Rows",
    "Scr",
    "Ssil",
    "ViewsToCome",
    "WholeBatch",
    "check_room",
    "create_learner",
    "cross_entropy",
    "find_method",
    "knob",
    "load_learner",
    "method",
    "method_names",
    "resolve_device",
    "warn_of_other_protocol",
]


@takes_settings
def create_learner(
    config: RunConfig | None = None,
    *,
    classes: int,
    image_size: tuple[int, int] = IMAGE_SIZE,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    mirror_safe: bool = True,
    **settings: Any,
) -> Learner:
    """Creates a learner that can be used without the loop.

    Args:
        config: The settings; None builds them from ``settings`` with :meth:`RunConfig.create`.
        classes: Number of classes of the whole stream.
        image_size: Height and width of the images, multiples of 8.
        mean: Mean of images in [0, 1], by channel.
        std: Standard deviation of images in [0, 1], by channel.
        mirror_safe: False where mirroring an image changes its label.
        **settings: Without ``config``: the settings, and switches of the method, which may also be
            given by themselves: ``lr=0.01``.

            {settings}

    Raises:
        ConfigError: An unknown method, an unusable setting, or a learner that does not fit into the
            free memory.
    """
    if config is None:
        config = RunConfig.create(**settings)
    elif settings:
        raise ConfigError(f"{', '.join(settings)}: given beside config; wanted them inside it")
    stream = check_stream(classes=classes, image_size=image_size, mean=mean, std=std, mirror_safe=mirror_safe)
    check_room(config, stream["image_size"], stream["classes"])
    return find_method(config.method)(config, **stream)


def load_learner(path: str | Path, *, device: str | None = None, method: str | None = None) -> Learner:
    """Reads a learner that :meth:`Learner.save` wrote. It continues bit for bit on the same kind of
    machine.

    Args:
        path: The file.
        device: Where to compute now, for example ``cpu``; None: where the configuration says. With
            a device, ``step`` and ``feed`` become ``auto``.
        method: Where the file of a method of your own is now, ``path/to/file.py:Name``; None: where
            it was.

    Raises:
        StateFileError: The file is missing, damaged, of something else, or of a newer version.
        ConfigError: The method is not found, the device does not exist, or the memory is too small.
    """
    return read_learner(Path(path), device, method)
