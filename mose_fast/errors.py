"""The base of every error that tells the user what to change; ``except mose_fast.MoseFastError``
catches them all.
"""

from __future__ import annotations

__all__ = ["MoseFastError"]


class MoseFastError(Exception):
    """Something that was given cannot be used: a setting, data, a folder.

    The command line prints the message alone.
    """
