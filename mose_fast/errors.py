"""The base of every error that tells the user what to change; ``except mose_fast.MoseFastError``
catches them all.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MoseFastError"]


class MoseFastError(Exception):
    """Something that the user gave cannot be used: a setting, data, a folder.

    The command line prints only its message, without a traceback.
    """

    #: Name and value of a setting that was probably meant instead; the command line says how to
    #: give it.
    instead: tuple[str, Any] | None = None
