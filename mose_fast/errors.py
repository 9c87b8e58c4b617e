"""The base of every error that tells the user what to change; ``except mose_fast.MoseFastError``
catches them all.
"""

from __future__ import annotations

from typing import Any


class MoseFastError(Exception):
    """Something that the user gave cannot be used: a setting, data, a folder. ``instead`` is the
    name and the value of a setting that may be meant; the command line says how to give it, prints
    only the message, without a traceback, and exits with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, instead: tuple[str, Any] | None = None) -> None:
        super().__init__(message)
        self.instead = instead
