"""What a method says of itself: its presets, its source and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["About", "Preset"]


@dataclass(frozen=True)
class Preset:
    """A named set of values for a method's options: their source, what differs from the defaults,
    and the protocol that it is meant for: incoming images a step, and passes over each task.
    """

    source: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 10
    epochs: int = 1


@dataclass(frozen=True)
class About:
    """Facts about a method for lists of methods.

    Attributes:
        year: Year of publication.
        reference: The paper's title or the method's name, and where it appeared.
        cost: Cost of a step relative to ER's, which is 74 images forward and backward; a forward
            pass alone counts a third.
        presets: Presets by name; the first is the default.
        files: Hashes of the method's own files as they were imported, see :func:`method_files`.
    """

    year: int
    reference: str
    cost: float
    presets: Mapping[str, Preset]
    files: Mapping[str, str] = field(default_factory=dict)
