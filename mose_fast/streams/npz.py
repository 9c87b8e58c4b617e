"""Reading ``.npz`` archives, with errors that name the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mose_fast.streams.draws import StreamError

#: The parts of a data set.
SPLITS = ("train", "test")


def arrays_of(splits: Sequence[str]) -> tuple[str, ...]:
    """The names of the arrays of some parts of a data set: images and labels of each."""
    return tuple(f"{kind}_{split}" for split in splits for kind in "xy")


def read_npz(
    path: Path, names: tuple[str, ...], *, remedy: str = "write it again with numpy.savez"
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an archive. Pickled contents are refused, never executed. Raises
    StreamError if it is missing, damaged (the message ends in the ``remedy``) or lacks an array.
    """
    if not path.is_file():
        raise StreamError(f"{path} is no file; wanted an .npz with {', '.join(names)}")
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise StreamError(
                f"{path} holds a single array; wanted an .npz with {', '.join(names)}: numpy.savez writes it"
            )
        with archive:
            missing = [n for n in names if n not in archive.files]
            if missing:
                held = ", ".join(archive.files) or "nothing"
                raise StreamError(f"{path} lacks {', '.join(missing)} and holds {held}; wanted {', '.join(names)}")
            return {n: archive[n] for n in names}
    except StreamError:
        raise
    except MemoryError as error:
        raise StreamError(f"{path} is damaged, or its arrays do not fit into the memory ({error}); {remedy}") from error
    except Exception as error:  # zipfile, zlib and numpy raise many unrelated types on damaged input
        raise StreamError(f"{path} is damaged, truncated or no .npz archive ({error}); {remedy}") from error
