"""The device and precision that a run computes with, names of GPUs and processors, and uploads
that do not wait for a GPU.
"""

from __future__ import annotations

import platform
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from mose_fast.settings.knob import ConfigError, plain

#: Held while a graph is captured, and by work of other threads that may wait for the whole GPU,
#: which would break the capture.
CAPTURING = threading.RLock()


class Choice(NamedTuple):
    """The value that a setting has on this machine, and the reason if it is not the first
    choice.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def choose_precision(wanted: str, device: torch.device) -> Choice:
    """The precision that the setting ``precision`` means on the network's device: ``auto`` is
    ``bf16`` on GPUs that multiply matrices in it (compute capability 8.0 and later), else ``fp32``.
    """
    if wanted != "auto":
        return Choice(wanted)
    if device.type != "cuda":
        return Choice("fp32", "auto: on the CPU")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        return Choice("fp32", f"auto: compute capability {major}.{minor}, bf16 wants 8.0")
    return Choice("bf16", f"auto: compute capability {major}.{minor}")


def processor() -> str:
    """The processor's name, from the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'' if threads == 1 else 's'}"


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """PyTorch's deterministic mode, without its filling of every new tensor: nothing that a step
    reads is left unwritten, and the launches that fill tensors would be in every graph.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A context with one stream for all steps and evaluations on a GPU; empty on the CPU. After a
    step on the default stream, no step could be captured: the accumulation of gradients stays on
    the stream where it first ran.
    """
    if device.type != "cuda":
        yield
        return
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copies a tensor to a device; to a GPU through pinned memory, without waiting."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def available_bytes() -> int:
    """Bytes of memory that new processes can take, within the container's limit."""
    free = psutil.virtual_memory().available
    # psutil does not read control groups.
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # there is no such file, or no limit: "max"
            allowed, taken = (int((Path("/sys/fs/cgroup") / name).read_text("ascii")) for name in (limit, used))
            free = min(free, allowed - taken)
    return max(free, 0)


def peak_bytes() -> int:
    """The largest resident memory that this process has had, in bytes."""
    # psutil tells the peak on Windows only. Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resolve_device(name: str | torch.device) -> torch.device:
    """The device that a configuration's ``device`` means on this machine; ConfigError if the GPU
    that is asked for does not exist.
    """
    name = plain(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = torch.version.cuda is not None
            why = "torch sees no GPU (is there a driver?)" if built else "this torch was built without CUDA"
            raise ConfigError(
                f"device is {name!r}, but {why}; wanted a machine with an NVIDIA GPU, or cpu", instead=("device", "cpu")
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPU(s); wanted a lower number"
            )
    return device
