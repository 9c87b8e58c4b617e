"""What the tests of this folder run on: a CUDA GPU, or an emulated one
(``MOSE_FAST_BACKEND=emulated``, docs/building.md).

A test file takes its device from ``_loader.gpu()``, its sizes from the fixture ``gpu``, and marks
tests that an emulated GPU cannot run by ``@pytest.mark.needs("streams")`` or another word of
:data:`LACKS`. On a GPU, sizes are what the tests say and nothing is left out.

``--fewest-passed N`` and ``--most-left-out N`` fail a whole run in which fewer tests passed, or
more were left out: CI gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mose_fast import _loader

HERE = Path(__file__).parent
#: What an emulated GPU does not have, and why.
LACKS = {
    "streams": "kernels run in the order of their launches",
    "graphs": "there is no CUDA to capture",
    "profiler": "torch's profiler sees no CUDA kernel",
    "memory statistics": "torch's CUDA allocator gives nothing out",
    "memory of its own": "tensors lie in the host's memory",
    "a large memory": "it would fill this machine's",
}
LEFT_OUT = "an emulated GPU lacks "


def obstacle() -> str | None:
    """Why no test of this folder can run; None if they can."""
    if _loader.gpu() == "cpu":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA GPU, and the native library emulates none"
    return None if _loader.gpu() == "cuda" else "the native library has no CUDA code"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulated GPU")
    group.addoption("--fewest-passed", type=int, metavar="N", help="fail if fewer than N tests passed")
    group.addoption(
        "--most-left-out",
        type=int,
        metavar="N",
        help="fail if more than N tests were left out because the GPU is emulated",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = obstacle()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        for mark in item.iter_markers("needs"):
            (need,) = mark.args
            if _loader.gpu() == "cpu":
                item.add_marker(pytest.mark.skip(reason=f"{LEFT_OUT}{need}: {LACKS[need]}"))
            elif need not in LACKS:
                raise pytest.UsageError(f"{item.nodeid} needs {need!r}; wanted one of {', '.join(LACKS)}")


def _reports(config: pytest.Config, outcome: str) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    return [report for report in reporter.stats.get(outcome, ()) if isinstance(report, pytest.TestReport)]


def left_out(config: pytest.Config) -> Counter[str]:
    """How many tests were left out for want of what."""
    told = [report.longrepr for report in _reports(config, "skipped")]
    reasons = [
        where_and_why[2].removeprefix("Skipped: ") for where_and_why in told if isinstance(where_and_why, tuple | list)
    ]
    return Counter(reason.removeprefix(LEFT_OUT).partition(":")[0] for reason in reasons if reason.startswith(LEFT_OUT))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = left_out(config)
    if counts:
        told = ", ".join(f"{count} {need}" for need, count in counts.most_common())
        terminalreporter.write_line(f"emulated GPU: {sum(counts.values())} tests left out, which need {told}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist; the counts are the controller's
    # There are no such options where the folder is not named on the command line.
    fewest, most = (config.getoption(option, None) for option in ("--fewest-passed", "--most-left-out"))
    passed, out = len(_reports(config, "passed")), sum(left_out(config).values())
    if fewest is not None and passed < fewest:
        print(f"\n{passed} tests passed; wanted at least {fewest}")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    if most is not None and out > most:
        print(f"\n{out} tests were left out because the GPU is emulated; wanted at most {most}")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


class Gpu:
    """The GPU of these tests."""

    emulated = _loader.gpu() == "cpu"

    def few(self, count: int, most: int = 5) -> int:
        """``count`` on a GPU; at most ``most`` on an emulated one, where a pixel takes as long as
        an image does on a GPU.
        """
        return min(count, most) if self.emulated else count

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Inside, csrc/cpu serves tensors on the CPU, on an emulated GPU as well: for what kernels
        are compared with.
        """
        if not self.emulated:
            yield
            return
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_loader, "record", {**_loader.record, "backend": "cpu"})
            _loader.native.emulate(False)
            try:
                yield
            finally:
                _loader.native.emulate(True)


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return Gpu()
