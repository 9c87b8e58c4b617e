"""What arrives: data sets, their split into tasks, the class order, and streams of your own images."""

from mose_fast.streams.arrays import from_arrays, from_batches
from mose_fast.streams.registry import create, locate, names, summary
from mose_fast.streams.stream import NORMALISATIONS, Normalisation, Stream, StreamError

__all__ = [
    "NORMALISATIONS",
    "Normalisation",
    "Stream",
    "StreamError",
    "create",
    "from_arrays",
    "from_batches",
    "locate",
    "names",
    "summary",
]
