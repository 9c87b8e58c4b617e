"""Folders of runs with made-up accuracies: read like real ones, written in milliseconds."""

import json

import numpy as np

from mose_fast import evaluate
from mose_fast.runs.results import accuracy_csv

_OVER_TIME = {
    "af_paper": evaluate.forgetting_paper,
    "af_released": evaluate.forgetting_released,
    "bwt": evaluate.backward_transfer,
    "average_anytime_accuracy": evaluate.average_anytime_accuracy,
    "new_task_accuracy": lambda matrix: evaluate.new_task_accuracy(matrix).tolist(),
}


def write_run(path, results, accuracy, stored, after=None):
    """Puts accuracies into the results of a real run and writes its folder.

    Args:
        results: Changed in place; their classes become two for each of T tasks.
        accuracy, stored: Accuracy matrices [T, T] on test images and on samples in the memory, by
            classifier and expert, with zeros above the diagonal.
        after: Tasks after which there was an evaluation; None: all.
    """
    tasks = len(next(iter(accuracy["ncm"].values())))
    complete, after = after is None, list(range(tasks)) if after is None else after
    results["classes"], results["tasks"] = 2 * tasks, [[2 * t, 2 * t + 1] for t in range(tasks)]
    results["class_order"], results["class_names"] = list(range(2 * tasks)), [str(c) for c in range(2 * tasks)]
    results["evaluated_after"], results["seed"] = after, results["config"]["seed"]
    rows = {"accuracy": {}, "buffer_accuracy": {}}
    for key, matrices in (("accuracy", accuracy), ("buffer_accuracy", stored)):
        for classifier, experts in matrices.items():
            results[key][classifier] = {name: np.array(m, float).tolist() for name, m in experts.items()}
            rows[key][classifier] = {
                name: [m[k][: k + 1] for k in after] for name, m in results[key][classifier].items()
            }
    for classifier, experts in results["accuracy"].items():
        results["acc"][classifier] = {name: evaluate.average_accuracy(m) for name, m in experts.items()}
        results["bof"][classifier] = {
            name: evaluate.buffer_overfitting(results["buffer_accuracy"][classifier][name][-1], m[-1]).tolist()
            for name, m in experts.items()
        }
        for metric, function in _OVER_TIME.items():
            results[metric][classifier] = {name: function(m) if complete else None for name, m in experts.items()}
    path.mkdir(parents=True)
    (path / "results.json").write_text(json.dumps(results))
    (path / "config.json").write_text(json.dumps(results["config"]))
    (path / "accuracy.csv").write_text(accuracy_csv(rows["accuracy"], rows["buffer_accuracy"], after))
