"""The order of the files, and real data for the tests, where this machine has it."""

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import mose_fast  # noqa: F401  (before any test imports torch: it settles for how long threads spin)
from tests.paths import SHARED

PACKED = SHARED / "data"
# The tests are a check of the kernels themselves; only tests/unit/self_check wants that of a first
# run.
os.environ["MOSE_FAST_SELF_CHECK"] = "0"
# No test cuts the power, and waiting for the disk took a minute.
os.fsync = lambda descriptor: None
UNPACKED = {"cifar100": "cifar100.npz", "mnist": "mnist.npz", "tiny": "tiny-imagenet-200/wnids.txt"}

# Files that take longest come first: pytest-xdist hands out whole files, and one that comes last
# leaves the other cores idle.
LONGEST = (
    "kernels/test_kernels_on_cpu.py",
    "system/sweep/test_workers.py",
    "unit/experiments/paper/test_all.py",
    "system/test_benchmark.py",
    "races/test_methods.py",
    "system/tune/test_tune.py",
    "unit/methods/test_every_method.py",
    "system/test_kills.py",
    "unit/bench/test_gpu_check.py",
    "system/test_methods_by_command.py",
    "races/test_loop.py",
    "unit/methods/test_regression.py",
    "unit/learner/test_kernels.py",
)


def pytest_addoption(parser):
    parser.addoption("--half", type=int, choices=(0, 1), help="of the slow tests, one half or the other")


def pytest_collection_modifyitems(config, items):
    """Files in the order above, of slow tests half if ``--half`` says so. The order is only of use
    with ``--no-loadscope-reorder``, or pytest-xdist sorts files by their numbers of tests.
    """
    place = {f"tests/{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
    if (half := config.getoption("--half")) is not None:
        left_out = {item for item in items if item.get_closest_marker("slow") and _half(item) != half}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _half(item):
    """The same for all slow tests of a method, or of a kernel, in one file."""
    case = item.callspec.id.partition("-")[0] if hasattr(item, "callspec") else item.name
    return zlib.crc32(f"{item.nodeid.partition('::')[0]} {case}".encode()) % 2


@pytest.fixture
def one_thread():
    """Another number of threads changes float sums, and the tests share the machine."""
    import torch  # which some tests do not need

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def as_toml():
    """A function that gives a configuration as TOML, without what is None: TOML has no null."""

    def lines(values):
        return [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]

    def text(config):
        values = config.to_dict()
        tables = {name: values.pop(name) for name in ("stream", "options")}
        parts = [*lines(values), *(line for name, table in tables.items() for line in (f"[{name}]", *lines(table)))]
        return "\n".join(parts) + "\n"

    return text


@pytest.fixture(scope="session")
def two_tasks_of_six(tmp_path_factory):
    """Flags of a run of twelve batches of 8x8 images in two tasks."""
    import numpy as np

    labels = np.arange(96) % 4
    images = np.random.default_rng(0).integers(0, 256, (96, 8, 8, 3), dtype=np.uint8)
    data = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(data, x_train=images, y_train=labels, x_test=images[:16], y_test=labels[:16])
    sizes = ["--tasks", "2", "--batch", "8", "--width", "1", "--memory", "64", "--device", "cpu"]
    return ["--stream", str(data), *sizes]


@pytest.fixture
def signals_act():
    """SIGHUP and SIGINT act here and in the programs that are started, also if the tests run under
    nohup or in the background of a script.
    """
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, action) for number, action in usual.items()}
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A function from ``cifar100``, ``mnist`` or ``tiny`` to the folder with its unpacked files;
    skips where there are none.

    MOSE_FAST_TEST_DATA names a folder with files that are unpacked already.
    """
    ready = os.environ.get("MOSE_FAST_TEST_DATA")
    target = tmp_path_factory.mktemp("data")

    def folder(name: str) -> Path:
        if ready and (Path(ready) / UNPACKED[name]).exists():
            return Path(ready)
        if not (PACKED / "unpack.py").exists():
            pytest.skip(f"no {UNPACKED[name]} in MOSE_FAST_TEST_DATA and no packed data beside the checkout")
        if not (target / UNPACKED[name]).exists():
            subprocess.run([sys.executable, str(PACKED / "unpack.py"), name, str(target)], check=True)
        return target

    return folder
