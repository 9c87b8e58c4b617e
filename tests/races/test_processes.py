"""Two runs on one GPU are two processes: on the simulated GPU both are captured, and each is the
run that it would be alone. Two threads of one process are refused.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mose_fast import _loader, processes
from mose_fast.experiments import engine as engine_module
from mose_fast.experiments.engine import LocalEngine
from mose_fast.experiments.folder import SweepFolder
from mose_fast.train import Listener, RunError, run
from tests.races.simulated_gpu import SimulatedGpu
from tests.races.test_loop import settings

pytestmark = pytest.mark.skipif(
    _loader.native is None, reason="there is no native library, without which nothing is captured"
)


@pytest.mark.slow
def test_two_processes_of_one_gpu_finish(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "python", lambda module, *more: processes.python("tests.races.worker", *more))
    folder = SweepFolder(tmp_path / "s")
    folder.create()
    engine = LocalEngine(["0", "0"], threads=1, logs=folder.logs)
    ended = {}
    try:
        for seed in range(2):
            name = f"seed-{seed}"
            folder.config(name).write_text(settings(seed=seed).to_json())
            paths = {"config": folder.config(name), "out": folder.run(name), "log": folder.log(name)}
            engine.start(
                {"do": "run", "cell": name, "afresh": False, "wandb": None} | {k: str(v) for k, v in paths.items()}
            )
        assert engine.free() == 0
        while len(ended) < 2:
            ended |= {e["cell"]: e for e in engine.events(0.2) if e["event"] not in ("progress", "task")}
    finally:
        engine.close()
    assert {event["event"] for event in ended.values()} == {"done"}, ended
    for seed in range(2):
        results = json.loads((folder.run(f"seed-{seed}") / "results.json").read_text())
        assert (results["resolved"]["step"], results["eager_steps"], results["capture_retries"]) == ("captured", 2, 0)
        with SimulatedGpu():
            assert results["weights_sha256"] == run(settings(seed=seed))["weights_sha256"]
    assert not torch.cuda.is_initialized()


@pytest.mark.slow
def test_a_second_thread_makes_no_run_on_the_gpu():
    class Runs(Listener):
        def on_batch(self, batch, losses):
            if batch == 2:
                with ThreadPoolExecutor(1) as thread, pytest.raises(RunError, match="another thread of this process"):
                    thread.submit(run, settings(seed=1)).result()

    with SimulatedGpu() as gpu:
        results = run(settings(), listeners=[Runs()])
    assert not gpu.races and not gpu.broken and results["eager_steps"] == 2
