"""docs/your_own_loop.md: its loop learns what a run learns, and what it saves is continued."""

from __future__ import annotations

import re

import mose_fast
from mose_fast.train import run
from tests.paths import ROOT

PAGE = ROOT / "docs" / "your_own_loop.md"


def test_the_page(tmp_path, monkeypatch, one_thread, capsys):
    loop, load = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(loop, PAGE.name, "exec"), names)
    told = [eval(line.split(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    settings = {"stream": {"name": "digits", "tasks": 2, "limit_per_task": 60}, "width": 4, "memory": 64}
    results = run(method="er", **settings, device="cpu")
    assert names["learner"].weights_hash() == results["weights_sha256"]
    assert [row[:n] for n, row in enumerate(results["accuracy"]["linear"]["1"], 1)] == told
    exec(compile(load, PAGE.name, "exec"), names)
    learner, stream = names["learner"], names["stream"]
    learner.begin_task(1, stream.tasks[1])
    for rows in stream.batches(1, seed=0, epoch=0):
        learner.observe(stream.x_train[rows], stream.y_train[rows], 1, index=rows)
    assert learner.weights_hash() == results["weights_sha256"]
    assert mose_fast.load_learner("after-task-1.safetensors").weights_hash() == learner.weights_hash()
