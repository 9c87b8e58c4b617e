"""Every method through the commands: runs killed on both sides of a task's end, exported; a sweep
over some of them, and its report.
"""

import json
import signal

import pytest
import torch

from mose_fast.app.cli import main
from mose_fast.export import CARD
from mose_fast.methods import METHODS
from mose_fast.present.published import method_name
from mose_fast.runs.progress import Progress
from tests.system.test_kills import CONTEXT, result

#: Flags that keep a test short.
BRIEF = {"gdumb": ["--set", "passes=2", "--set", "passes_before=1"]}
#: One method for each way in which methods differ: replay, the end of a task, a fit for each
#: evaluation, many views. Each run of a sweep imports torch anew.
SWEPT = ("er", "il2a", "gdumb", "ocm")
#: Batches in each of the two tasks.
BATCHES = 6


@pytest.fixture(scope="module")
def settings(two_tasks_of_six):
    return two_tasks_of_six


@pytest.mark.slow
def test_a_sweep_and_its_report(settings, tmp_path, monkeypatch):
    out = tmp_path / "sweep"
    # One worker would give its run a thread for each core, and other tests share them.
    monkeypatch.setattr("mose_fast.experiments.place.usable_cores", lambda: 1)
    assert main(["sweep", *settings, "--grid", f"method={','.join(SWEPT)}", "--workers", "1", "--out", str(out)]) == 0
    assert {json.loads(path.read_text())["config"]["method"] for path in out.rglob("results.json")} == set(SWEPT)
    assert main(["report", str(out)]) == 0
    page = (out / "report" / "report.html").read_text()
    assert all(f">{method_name(name)}" in page for name in SWEPT)


def killed(arguments, last):
    """Runs a command on one thread and kills it as batch number ``last`` of its process ends."""
    torch.set_num_threads(1)
    ended, on_batch = [], Progress.on_batch

    def counted(*arguments):
        on_batch(*arguments)
        ended.append(True)
        if len(ended) == last:
            signal.raise_signal(signal.SIGKILL)

    Progress.on_batch = counted
    main(arguments)


def kill(arguments, last):
    """Runs :func:`killed` in a process of its own."""
    process = CONTEXT.Process(target=killed, args=(arguments, last))
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_killed_before_and_after_the_end_of_a_task_and_exported(name, settings, tmp_path):
    """The first kill comes in the last batch of the first task, the second after its end."""
    flags = [*settings, "--method", name, "--checkpoint-every", "4", *BRIEF.get(name, [])]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["run", *flags, "--out", str(whole)]) == 0
    kill(["run", *flags, "--out", str(broken)], BATCHES)
    kill(["resume", str(broken)], 4)
    assert main(["resume", str(broken)]) == 0
    assert result(broken) == result(whole)
    assert main(["export", str(broken)]) == 0
    assert json.loads((broken / "export" / CARD).read_text())["run"]["method"] == name
