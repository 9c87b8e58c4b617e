"""Files of tensors and plain values: safetensors, with the values as JSON text and a hash of the
content. They cannot execute code, and are replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mose_fast.errors import MoseFastError

_UNSIGNED = "0" * 64

# The names that safetensors files have for dtypes.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class StateFileError(MoseFastError):
    """A file is missing, damaged, of something else, or of a newer format."""


def state_file(kind: str, number: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> memoryview:
    """The content of a file: tensors on the host, and plain values for JSON."""
    file = serialised(tensors, {"sha256": _UNSIGNED, kind: str(number), "values": json.dumps(values)})
    digest = hashlib.sha256(file.data).hexdigest()  # of the file with zeros in its place
    start = file[:256].tobytes().index(_UNSIGNED.encode())
    file[start : start + 64] = np.frombuffer(digest.encode(), np.uint8)
    return file.data


def read_state(
    path: Path, kind: str, newest: int, *, called: str, instead: str = ""
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of :func:`state_file`: tensors on the CPU, and values; it checks the hash of the
    content.

    Args:
        kind: What it must hold, in a format of at most ``newest``; else StateFileError.
        called: What such a file is called in messages.
        instead: What to do about a damaged file, for the end of messages.
    """
    try:
        # safetensors takes no path that is not UTF-8.
        with path.open("rb") as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError as error:
        raise StateFileError(f"there is no {called} {path}") from error
    except (SafetensorError, OSError) as error:
        raise StateFileError(
            f"the {called} {path} is truncated, damaged or not a {called} ({error}){instead}"
        ) from error
    if kind not in metadata:
        raise StateFileError(f"{path} is a safetensors file, but not a {called} of mose-fast{instead}")
    try:
        found = int(metadata[kind])
        if found <= newest:
            unsigned = path.read_bytes().replace(metadata["sha256"].encode(), _UNSIGNED.encode(), 1)
            intact = hashlib.sha256(unsigned).hexdigest() == metadata["sha256"]
            values = json.loads(metadata["values"])
            if not isinstance(values, dict):
                raise ValueError(f"its values are a {type(values).__name__}")
            if not intact:
                raise StateFileError(
                    f"the {called} {path} is damaged: its content does not have the hash in its header{instead}"
                )
            return tensors, values
    except (KeyError, ValueError, RecursionError) as error:
        raise StateFileError(f"the {called} {path} is damaged: its header is unreadable ({error}){instead}") from error
    raise StateFileError(
        f"the {called} {path} has format {found}, newer than {newest}, the newest that this version of mose-fast reads;"
        " update mose-fast"
    )


def serialised(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> np.ndarray:
    """Tensors on the host as a safetensors file: uint8 [bytes].

    Other threads can run meanwhile, as PyTorch copies without the interpreter's lock.
    ``safetensors.torch.save`` holds it (0.2 s for 100 MB, in which no step is launched), and
    ``save_file`` writes through a file of its own, which a kill would leave, without fsync.
    """
    # Wide elements come first, so that each tensor is aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    size = 0
    for name in names:
        tensor = tensors[name]
        end = size + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = torch.empty(8 + len(text) + size, dtype=torch.uint8)
    file[: 8 + len(text)] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    contents = file[8 + len(text) :]
    for name in names:
        start, end = header[name]["data_offsets"]
        contents[start:end].view(tensors[name].dtype).view(tensors[name].shape).copy_(tensors[name])
    return file.numpy()
