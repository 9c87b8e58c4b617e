"""Loads the native library ``mose_fast._C``, or warns once why pure PyTorch is used instead.

``MOSE_FAST_NATIVE=0`` switches the library off without a warning. If ``MOSE_FAST_NATIVE`` is a
folder, ``_C`` and ``_build.json`` are loaded from there, which serves a second build.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mose_fast._version import file_facts, source_hash

_NAME = "mose_fast._C"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _obstacle(record: dict[str, Any], version: str, cuda: str | None, sources: str | None) -> str | None:
    """Why a library with this ``record`` must not be loaded by torch ``version`` with ``cuda``
    beside these sources, or None.

    torch changes its C++ interface with every minor release, and CUDA its run-time library with
    every major one. In a checkout that was updated but not rebuilt, the library may lack what the
    Python code calls.
    """
    if record["torch"].split("+")[0].split(".")[:2] != version.split("+")[0].split(".")[:2]:
        return f"it was compiled for torch {record['torch']}, but torch {version} is running"
    if record["backend"] == "cuda" and (cuda is None or record["cuda"].split(".")[0] != cuda.split(".")[0]):
        running = f"CUDA {cuda}" if cuda else "no CUDA"
        return f"it was compiled for CUDA {record['cuda']}, but the torch that is running ({version}) uses {running}"
    if sources is not None and record["sources"] != sources:
        return "it was compiled from other sources than those in csrc now"
    return None


def _damage(library: Path, facts: dict[str, Any] | None) -> str | None:
    """How a library differs from what was recorded, or None. A truncated one would kill Python."""
    found = facts and file_facts(library)
    if found == facts:
        return None
    if found["bytes"] != facts["bytes"]:
        return f"it is damaged: it has {found['bytes']:,} bytes, and {facts['bytes']:,} were built"
    return "it is damaged: its content is not what was built"


def _load(folder: Path) -> tuple[ModuleType | None, dict[str, Any] | None, str | None]:
    """The module or None, its record, and why it is None."""
    named = (folder / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    library = next((path for path in named if path.is_file()), None)
    if library is None:
        return None, None, f"there is no native library in {folder}"
    try:
        record = json.loads((folder / "_build.json").read_text())
        sources = source_hash(Path(__file__).parent.parent, record["backend"])
        obstacle = _obstacle(record, torch.__version__, torch.version.cuda, sources)
        obstacle = obstacle or _damage(library, record.get("library"))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        return None, None, f"the record of {library} is missing or damaged ({type(error).__name__}: {error})"
    if obstacle:
        return None, record, f"{library} was not loaded: {obstacle}"
    try:
        spec = importlib.util.spec_from_file_location(_NAME, library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return None, record, f"{library} does not load: {error}"
    sys.modules[_NAME] = module
    return module, record, None


def _start() -> tuple[ModuleType | None, dict[str, Any] | None, str | None]:
    switch = os.environ.get("MOSE_FAST_NATIVE", "")
    if switch == "0":
        return None, None, "it is switched off by MOSE_FAST_NATIVE=0"
    module, record, obstacle = _load(Path(switch) if switch else Path(__file__).parent)
    if obstacle:
        warnings.warn(
            f"mose_fast: {obstacle}. Pure PyTorch is used, which is slower. To build the library, in the source folder:"
            f" {REBUILD}",
            RuntimeWarning,
            stacklevel=3,
        )
    return module, record, obstacle


native, record, obstacle = _start()
"""The native module, None where pure PyTorch is used; what its ``_build.json`` says, None where
there is none; why there is no module.
"""


def ops() -> Any:
    """The library's functions: in eager mode those of pybind11, whose calls cost a fifth of the
    dispatcher's; under torch.compile the registered ops, whose schemas the compiler needs.
    """
    return torch.ops.mose_fast if torch.compiler.is_compiling() else native


def gpu() -> str | None:
    """The type of the devices whose tensors the library's CUDA kernels take: ``"cuda"``, or
    ``"cpu"`` if the library emulates a GPU; None if there are no kernels.
    """
    return None if native is None else {"cuda": "cuda", "emulated": "cpu"}.get(record["backend"])


def has_code(device: str) -> bool:
    """Whether the native library has code for devices of this type."""
    return native is not None and device in ("cpu", gpu())


off: dict[str, str] = {}
"""What this process does not use on a GPU, and why: ops by name; ``step``, all of them;
``captured``, captured steps.
"""


def switch_off(reasons: Mapping[str, str]) -> None:
    """Adds to :data:`off`, for the rest of the process."""
    global off
    off = {**off, **reasons}  # a new one, which compiled functions notice


def serves(op: str, *tensors: torch.Tensor) -> bool:
    """Whether the native library computes an op of these tensors: all on the CPU, or all on one GPU
    in a CUDA build where the op is not switched off.

    It has no code for tensors inside a transform of ``torch.func`` (vmap, grad), which have no
    memory that native code could read.
    """
    devices = {tensor.device for tensor in tensors}
    if native is None or len(devices) != 1:
        return False
    device = devices.pop().type
    if not has_code(device) or (op in off and device == gpu()):
        return False
    # torch.compile cannot trace this function, but compiles transforms away.
    return torch.compiler.is_compiling() or not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def on_gpu(op: str, *tensors: torch.Tensor) -> bool:
    """Whether CUDA kernels compute an op of these tensors; the device's type does not tell."""
    return serves(op, *tensors) and tensors[0].device.type == gpu()
