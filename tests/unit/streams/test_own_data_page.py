"""The examples of docs/own_data.md run as they are written."""

import re

from tests.paths import ROOT

PAGE = ROOT / "docs" / "own_data.md"


def test_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    streams = []
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(example, names)
        streams.append(names["stream"])
    assert [(s.name, len(s.tasks), s.classes, len(s.x_train)) for s in streams] == [
        ("pets", 2, 4, 12),
        ("mine", 3, 6, 60),
        ("arrays", 3, 6, 36),
        ("dataset", 2, 4, 12),
        ("batches", 3, 6, 30),
        ("batches", 3, 6, 60),
    ]
    assert [len(s.batches(0, seed=0)) for s in streams[4:]] == [2, 20]
    assert "cat" in streams[0].class_names and "pets: 2 tasks" in capsys.readouterr().out
