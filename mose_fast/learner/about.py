"""What a method says of itself: its switches, its presets, its source and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mose_fast.settings.knob import Search, knob

__all__ = ["TABLE", "About", "Preset", "Search", "knob", "official_preset", "sources_preset", "table_preset"]


@dataclass(frozen=True)
class Preset:
    """A named set of values for a method's options: their source, what differs from the defaults,
    and the protocol that it is meant for: incoming images a step, and passes over each task.
    """

    source: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 10
    epochs: int = 1


#: Source of the preset ``table``.
TABLE = (
    "MOSE, section 5.1: one protocol for all baselines; what it leaves open as recommended in the method's file (a"
    " choice)"
)


def table_preset(note: str = "") -> Preset:
    """The preset ``table`` of a baseline: the shared protocol, which is the options' defaults.
    ``note``: what a reader of its results must know about this method.
    """
    return Preset(f"{TABLE}; {note}" if note else TABLE)


def sources_preset(source: str, **changes: Any) -> Preset:
    """The preset ``sources`` of a baseline: the paper's appendix taken literally, which has each
    method by the defaults of its source code, but with the optimiser, the number of replayed rows
    and the augmentation of the shared protocol. ``source`` names every switch in ``changes``.
    """
    return Preset(
        f"MOSE, appendix: the defaults of the method's source code, in the shared protocol; {source}", changes
    )


def official_preset(source: str, *, batch: int = 10, **changes: Any) -> Preset:
    """The preset ``official`` of a baseline whose repository trains with SGD: ``source`` is the
    repository, its commit, and which of its settings ``batch`` and ``changes`` are.
    """
    return Preset(source, {"optimiser": "sgd", **changes}, batch)


@dataclass(frozen=True)
class About:
    """Facts about a method for lists of methods.

    Attributes:
        year: Year of publication.
        reference: The paper's title or the method's name, and where it appeared.
        cost: Cost of a step relative to ER's, which is 74 images forward and backward; a forward
            pass alone counts a third.
        presets: Presets by name; the first is the default.
        files: What :func:`mose_fast.learner.registry.method_files` gave when it was imported.
    """

    year: int
    reference: str
    cost: float
    presets: Mapping[str, Preset]
    files: Mapping[str, str] = field(default_factory=dict)
