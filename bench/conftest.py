"""Fixtures of the benchmarks: the implementation, the device, and the measurement.

``--compiled`` chooses where torch.compile is measured: nowhere (``off``), at the size of a full
step (``headline``, the default) or at every size (``all``), which takes minutes. ``--rows`` names a
folder for the rows of bench/store.py; each row is written when it is measured, so that a killed run
keeps its finished rows.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from bench import store
from bench.common import (
    CLASSES,
    HEADLINE,
    IMPLEMENTATIONS,
    Case,
    in_microseconds,
    no_native_code,
    repetitions,
    time_on_gpu,
)
from mose_fast._version import git_commit
from mose_fast.app.bench import copy_rate
from mose_fast.device import processor

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption(
        "--compiled", choices=("off", "headline", "all"), default="headline", help="where torch.compile is measured"
    )
    parser.addoption(
        "--rows", type=Path, help="folder of CSV files that take each row as soon as it is measured: bench/store.py"
    )
    parser.addoption(
        "--devices", default="cpu,cuda", help="devices to measure on, for example cuda (default: cpu,cuda)"
    )
    parser.addoption(
        "--cudnn-search", type=int, metavar="CANDIDATES", help="bench_step.py: with cuDNN's search; 0: among all"
    )


def pytest_make_parametrize_id(config, val, argname):
    """A dtype by its name, so that -k finds it; pytest's own id would be a number."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


def pytest_generate_tests(metafunc):
    config = metafunc.config
    if "impl" in metafunc.fixturenames:
        left_out = ("compiled",) if config.getoption("--compiled") == "off" else ()
        named = getattr(metafunc.module, "IMPLEMENTATIONS", IMPLEMENTATIONS)
        metafunc.parametrize("impl", [impl for impl in named if impl not in left_out])
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", config.getoption("--devices").split(","))


@pytest.fixture(scope="session")
def commit() -> str:
    """The commit measured; without a git folder, MOSE_FAST_COMMIT gives it."""
    return os.environ.get("MOSE_FAST_COMMIT") or git_commit(ROOT) or "unknown"


@pytest.fixture(scope="session")
def copied() -> float:
    """Bytes a second that a copy moves on the GPU."""
    return copy_rate(torch.device("cuda"))


@pytest.fixture
def measure(request, benchmark, commit) -> Callable[[Case, Callable[[Case], Callable[[], object]]], None]:
    """A function ``measure(case, make_call)`` that times one case and records what bench/store.py
    needs in ``extra_info``; ``measure.given(case, take)`` records the seconds of single calls that
    ``take()`` returns.
    """

    def describe(case: Case) -> dict[str, object]:
        gpu = torch.cuda.get_device_name() if case.device == "cuda" else processor()
        return {
            "op": case.op,
            "impl": case.impl,
            "shape": case.shape_text,
            "dtype": case.dtype_text,
            "device": case.device,
            "direction": case.direction,
            "commit": commit,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "python": platform.python_version(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "processor": gpu,
            "threads": torch.get_num_threads(),
        }

    def keep() -> None:
        folder = request.config.getoption("--rows")
        if folder is not None:
            store.append([store.row_of(benchmark.extra_info)], folder)

    def skip_without(case: Case) -> None:
        if case.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("there is no CUDA GPU")
        if case.impl == "native" and (obstacle := no_native_code(case.device)):
            pytest.skip(obstacle)
        if case.impl == "compiled" and request.config.getoption("--compiled") == "headline" and not case.headline:
            pytest.skip(
                f"torch.compile is measured at N={HEADLINE} only, K={CLASSES[0]} (--compiled=all for every size)"
            )

    def given(case: Case, take: Callable[[], Sequence[float]]) -> None:
        skip_without(case)
        torch.manual_seed(0)
        benchmark.group = case.group
        seconds: list[float] = []
        benchmark.pedantic(lambda: seconds.extend(take()))
        if benchmark.enabled:
            benchmark.extra_info.update(describe(case), **in_microseconds(seconds))
            benchmark.extra_info.update(target_us=case.target_us, **({"graph": "no"} if case.device == "cuda" else {}))
            keep()

    def run(case: Case, make_call: Callable[[Case], Callable[[], object]]) -> None:
        skip_without(case)
        on_gpu = case.device == "cuda"
        torch.manual_seed(0)
        torch.compiler.reset()  # else the ninth shape of one function would run uncompiled, silently
        call, *others = (make_call(case) for _ in range(case.sets if on_gpu and benchmark.enabled else 1))
        benchmark.group = case.group
        if not benchmark.enabled:  # --benchmark-disable: does it still run?
            benchmark.pedantic(call)
            return

        info = benchmark.extra_info
        info.update(describe(case))
        if on_gpu:
            seconds, launches, peak = time_on_gpu([call, *others], case.captured)
            if case.bytes_moved is not None:
                info.update(
                    bytes_needed=case.bytes_needed, copy_bytes_per_us=round(request.getfixturevalue("copied") / 1e6)
                )
                if case.impl == "native":
                    info.update(bytes_moved=case.bytes_moved)
            info.update(in_microseconds(seconds), launches=launches, peak_bytes=peak, target_us=case.target_us)
            info.update(graph="yes" if case.captured else "no")
            keep()
            benchmark.pedantic(call)  # pytest-benchmark wants to be used; what it measures is not kept
            return
        rounds, iterations = repetitions(call)
        benchmark.pedantic(call, rounds=rounds, iterations=iterations)
        info.update(in_microseconds(benchmark.stats.stats.data))
        keep()

    run.given = given
    return run
