"""What bench.processes says; bench/gpu_check.sh runs it."""

import pytest
import torch

from bench import processes


def results(seed=0, *, step="captured", eager=2, retries=0):
    reasons = {} if step == "captured" else {"step": "no graph could be captured: broken"}
    return {
        "seed": seed,
        "gpu": "H100",
        "resolved": {"step": step, "feed": "fused", "reasons": reasons},
        "steps": 300,
        "eager_steps": eager,
        "capture_retries": retries,
        "seconds": {"train": 3.0},
    }


@pytest.fixture
def on_gpu(monkeypatch):
    """Runs on a GPU that does not exist: two at a time take turns, by MPS they do not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(processes._dali, "obstacle", lambda: None)
    monkeypatch.setattr(processes.shutil, "which", lambda name: "/usr/bin/it")
    asked = []

    def results_of(config, runs, at_a_time, *, mps=False):
        asked.append((config["feed"], runs, at_a_time, mps))
        found = [results(seed, retries=seed) for seed in range(runs)]
        for run in found:
            run["seconds"] = {"train": 3.0 * (1 if mps else at_a_time)}
        return found

    monkeypatch.setattr(processes, "results_of", results_of)
    return asked


def test_rates_of_two_runs_against_one(on_gpu, capsys):
    assert processes.main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [line[:3] for line in lines[:3]] == [["fused", "1", "no"], ["fused", "2", "no"], ["fused", "2", "yes"]]
    assert [line[3:] for line in lines[:3]] == [["100.0", "1.00", "0"], ["100.0", "1.00", "1"], ["200.0", "2.00", "1"]]
    assert on_gpu == [(feed, n, n, mps) for feed in ("fused", "dali") for n, mps in ((1, False), (2, False), (2, True))]


def test_retries_are_counted(on_gpu, capsys):
    assert processes.main(["--retries", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "3 runs with dali: 3 captures were tried once more"
    assert on_gpu == [("dali", 3, 1, False)]
