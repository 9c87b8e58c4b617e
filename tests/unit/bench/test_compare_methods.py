"""The comparison of methods: which classes, which figures, what is printed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.compare_methods import COLUMNS, first_classes, main, mean_and_spread, own_score
from mose_fast.streams import from_arrays
from tests.tiny import TINY


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_first_classes_two_a_task():
    y = np.arange(60) % 6
    x = np.broadcast_to(y[:, None, None, None], (60, 8, 8, 3)).astype(np.uint8)
    stream = first_classes(from_arrays(x, y, x[:12], y[:12], tasks=2, normalisation="cifar10"), 4, limit_per_task=10)
    assert stream.tasks == ((0, 1), (2, 3)) and stream.normalisation.name == "cifar10"
    assert len(stream.y_test) == 8 and set(stream.y_test.tolist()) == {0, 1, 2, 3}
    of_tasks = [torch.bincount(stream.y_train[stream.train_rows(task)], minlength=4).tolist() for task in (0, 1)]
    assert of_tasks == [[5, 5, 0, 0], [0, 0, 5, 5]]
    assert torch.equal(stream.x_train[:, 0, 0, 0].long(), stream.y_train)


def test_figures():
    results = {
        "resolved": {"classifier": "ncm", "expert": "4"},
        "acc": {"linear": {"4": 0.1}, "ncm": {"1": 0.2, "4": 0.3}},
    }
    assert own_score(results, "acc") == 0.3
    # By hand: mean 20, deviations -10, 0, 10, squares' sum over n - 1 is 100.
    assert mean_and_spread([0.1, 0.2, 0.3]) == "20.0 ± 10.0" and mean_and_spread([0.123]) == "12.3"


def test_what_it_prints(capsys):
    main([*TINY, "--seeds", "0", "1", "--methods", "finetune", "joint"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| {' | '.join(COLUMNS)} |" and len(lines) == 4
    finetune, joint = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])
    assert finetune[:2] == ["finetune", "linear"] and " ± " in finetune[2] and 0 <= float(finetune[2].split()[0]) <= 100
    assert joint[0] == "joint" and joint[3] == "-"
