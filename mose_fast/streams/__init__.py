"""Streams: data sets, their split into tasks, the class order, and streams of your own images."""

from typing import TYPE_CHECKING

from mose_fast._lazy import lazy_names
from mose_fast.streams.catalogue import names, summary

if TYPE_CHECKING:
    from mose_fast.streams.arrays import from_arrays, from_batches
    from mose_fast.streams.draws import StreamError
    from mose_fast.streams.map_style import from_dataset
    from mose_fast.streams.registry import create, locate
    from mose_fast.streams.stream import NORMALISATIONS, Normalisation, Stream

__all__ = [
    "NORMALISATIONS",
    "Normalisation",
    "Stream",
    "StreamError",
    "create",
    "from_arrays",
    "from_batches",
    "from_dataset",
    "locate",
    "names",
    "summary",
]

# These need torch; listing the streams does not.
__getattr__, __dir__ = lazy_names(
    __name__,
    {"StreamError": "mose_fast.streams.draws"}
    | dict.fromkeys(("NORMALISATIONS", "Normalisation", "Stream"), "mose_fast.streams.stream")
    | dict.fromkeys(("create", "locate"), "mose_fast.streams.registry")
    | dict.fromkeys(("from_arrays", "from_batches"), "mose_fast.streams.arrays")
    | {"from_dataset": "mose_fast.streams.map_style"},
)
