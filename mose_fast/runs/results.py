"""What a run leaves: ``results.json`` (:func:`schema` describes it) and ``accuracy.csv``."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mose_fast import _loader, evaluate
from mose_fast._build_info import build_info
from mose_fast.device import peak_bytes, processor
from mose_fast.methods import Learner
from mose_fast.runs.clock import Clock
from mose_fast.runs.files import IN_EVERY_CONFIG, resume_advice, write_atomically
from mose_fast.settings.knob import Declared, settings_of
from mose_fast.settings.run import CLASSIFIERS, RunConfig, StreamConfig
from mose_fast.streams import Stream

#: Version of the format of ``results.json``.
SCHEMA_VERSION = 1

T = TypeVar("T")

#: Accuracies by classifier, expert, after_task: [classifier][expert] -> rows over time, each a list
#: over the tasks seen.
Matrices = dict[str, dict[str, list[list[float | None]]]]


def schema() -> dict[str, Any]:
    """The schema of ``results.json``: ``results.schema.json`` and the settings' own."""
    schema = json.loads((Path(__file__).parent / "results.schema.json").read_text(encoding="utf-8"))
    schema["required"] = list(schema["properties"])
    resolved = schema["properties"]["resolved"]["properties"]
    for name, setting in settings_of(RunConfig).items():
        if "auto" in (setting.choices or ()):
            resolved[name]["enum"] += [choice for choice in setting.choices if choice != "auto"]
    resolved["classifier"]["enum"] = schema["$defs"]["by_classifier"]["propertyNames"]["enum"] = list(CLASSIFIERS)
    tables = {"stream": _table(StreamConfig, {}, {"name"}), "options": {"$ref": "#/$defs/options"}}
    schema["$defs"]["config"] = _table(RunConfig, tables, IN_EVERY_CONFIG)
    return schema


def _table(kind: type[Declared], tables: dict[str, Any], required: set[str]) -> dict[str, Any]:
    """The JSON schema of a dataclass of settings; ``tables`` are the schemas of its fields that are
    tables. Files from before a setting was added lack it.
    """
    properties = {setting.field: setting.schema() for setting in settings_of(kind).values()} | tables
    return {"type": "object", "properties": properties, "required": sorted(required), "additionalProperties": False}


def build_results(
    config: RunConfig,
    stream: Stream,
    learner: Learner,
    identity: dict[str, Any],
    records: Mapping[str, Any],
    untrained: dict[str, dict[str, list[float]]],
    clock: Clock,
) -> dict[str, Any]:
    """Everything about a finished run, as plain values.

    Args:
        identity, records: See :class:`mose_fast.train.loop.Loop`.
        untrained: Accuracy of the network before training by classifier, expert and task, with the
            same final memory.
        clock: It is read last.
    """
    evaluated_after, anytime = records["evaluated_after"], records["anytime"]
    tasks, parts = len(stream.tasks), stream.parts
    complete = evaluated_after == list(range(parts))

    def filled(rows: list[list[float | None]], missing: float | None) -> list[list[float | None]]:
        matrix: list[list[float | None]] = [[missing] * tasks for _ in range(parts)]
        for after, row in zip(evaluated_after, rows, strict=True):
            matrix[after][: len(row)] = row
        return matrix

    def over_all(function: Any, matrices: dict[str, dict[str, list]]) -> dict[str, dict[str, Any]]:
        return {c: {e: function(m) for e, m in experts.items()} for c, experts in matrices.items()}

    accuracy = over_all(lambda rows: filled(rows, 0.0), records["test"])
    buffer_accuracy = over_all(lambda rows: filled(rows, None), records["buffer"])

    def overfitting(classifier: str, expert: str) -> list[float | None]:
        stored, tested = (matrices[classifier][expert][-1] for matrices in (buffer_accuracy, accuracy))
        values = evaluate.buffer_overfitting(np.array(stored, float), tested)
        return [None if math.isnan(value) else value for value in values]

    def over_time(function: Any, defined: bool = True) -> dict[str, dict[str, Any]]:
        """A metric that needs an evaluation after every part; null if there was none."""
        return over_all(function if complete and defined else lambda _: None, accuracy)

    def of_tasks(function: Any) -> dict[str, dict[str, Any]]:
        """A metric that needs one after every task; null also without task boundaries."""
        return over_time(function, stream.has_boundaries)

    images = [len(stream.tested(stream.test_rows(task))) for task in range(tasks)]
    if anytime is not None:
        anytime = {**anytime, "average": over_all(lambda values: float(np.mean(values)), anytime["accuracy"])}
    trained, deployed = learner.costs()
    classifier, expert = learner.resolve_expert()
    constants = stream.normalisation
    device, on_gpu = learner.device, learner.device.type == "cuda"
    chosen = {"feed": learner.feed, "step": learner.stepping, "precision": learner.precision}
    return {
        "schema_version": SCHEMA_VERSION,
        "config": config.to_dict(),
        "changes_from_preset": config.changes_from_preset(),
        "resolved": {
            "device": str(device),
            "feed": None if learner.feed is None else learner.feed.name,
            "kernels": learner.kernels,
            "step": learner.stepping.name,
            "precision": learner.precision.name,
            "reasons": {name: choice.reason for name, choice in chosen.items() if choice is not None and choice.reason},
            "self_check": None if learner.self_check is None else learner.self_check.state,
            "switched_off": {} if learner.self_check is None else dict(_loader.off),
            "mirror": learner.mirrored,
            "normalisation": {"name": constants.name, "mean": list(constants.mean), "std": list(constants.std)},
            "classifier": classifier,
            "expert": expert,
        },
        "seed": config.seed,
        "classes": stream.classes,
        "tasks": [list(t) for t in stream.tasks],
        "class_order": list(stream.class_order),
        "class_names": list(stream.class_names),
        "held_out": None if stream.held_out is None else stream.held_out.rows.tolist(),
        "image_size": list(stream.image_size),
        "skipped": records["skipped"],
        "evaluated_after": evaluated_after,
        "accuracy": accuracy,
        "buffer_accuracy": buffer_accuracy,
        "bof": {c: {e: overfitting(c, e) for e in experts} for c, experts in accuracy.items()},
        "confusion_by_task": records["confusion"],
        "confusion_by_class": records["confusion_by_class"],
        "acc": over_all(evaluate.average_accuracy, accuracy),
        "sample_acc": over_all(lambda matrix: float(np.average(matrix[-1], weights=images)), accuracy),
        "af_paper": of_tasks(evaluate.forgetting_paper),
        "af_released": of_tasks(evaluate.forgetting_released),
        "bwt": of_tasks(evaluate.backward_transfer),
        "average_anytime_accuracy": over_time(evaluate.average_anytime_accuracy),
        "new_task_accuracy": of_tasks(lambda m: evaluate.new_task_accuracy(m).tolist()),
        "anytime": anytime,
        "evaluation_points": records["evaluation_points"],
        "untrained": {"accuracy": untrained, "acc": over_all(lambda row: float(np.mean(row)), untrained)},
        "parameters": {"trained": trained.parameters, "deployed": deployed.parameters},
        "macs": {"trained": trained.macs, "deployed": deployed.macs},
        "steps": learner.steps,
        "eager_steps": learner.steps - records["replayed"] if on_gpu else None,
        "capture_retries": records["retries"] if on_gpu else None,
        "resumed": records["resumed"],
        "peak_memory_bytes": {
            "host": peak_bytes(),
            "device": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        },
        "kept": learner.kept(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "versions": {
            "mose_fast": identity["version"],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": version("numpy"),
        },
        "commit": identity["commit"],
        "code": identity["code"],
        "method_files": identity["method_files"],
        "native_backend": build_info()["backend"],
        "weights_sha256": learner.weights_hash(),
        "seconds": clock.results(),
    }


def accuracy_csv(test: Matrices, buffer: Matrices, evaluated_after: list[int]) -> str:
    """The matrices as a table: classifier, expert, after_task, task (both from 0), accuracy,
    buffer_accuracy (empty: no samples in the memory). ``evaluated_after``: the task of each row of
    the matrices of accuracies on the stream's images and on memory samples.
    """
    parts = [(c, e) for c, experts in test.items() for e in experts]
    return _HEAD + "".join(_lines(c, e, test[c][e], buffer[c][e], evaluated_after) for c, e in parts)


_HEAD = "classifier,expert,after_task,task,accuracy,buffer_accuracy\n"


def _lines(
    classifier: str,
    expert: str,
    test: list[list[float | None]],
    buffer: list[list[float | None]],
    evaluated_after: list[int],
    start: int = 0,
) -> str:
    """The lines of a part of the table, from the evaluation numbered ``start``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for after, row, stored in itertools.islice(zip(evaluated_after, test, buffer, strict=True), start, None):
        for task, (a, b) in enumerate(zip(row, stored, strict=True)):
            writer.writerow([classifier, expert, after, task, a, "" if b is None else b])
    return text.getvalue()


class AccuracyTable:
    """The file of :func:`accuracy_csv` while a run goes on.

    Each evaluation adds lines to every part. Those before it are neither formatted again nor kept,
    since there are millions in a run of hundreds of tasks: they are read back from the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: By classifier and expert, the evaluations that the file has, and the bytes they take.
        self._there: dict[tuple[str, str], tuple[int, int]] = {}
        self._hash = b""

    def write(self, test: Matrices, buffer: Matrices, evaluated_after: list[int]) -> None:
        """Writes the file, as :func:`accuracy_csv`; RunError if it cannot be written."""
        before = self._read()
        pieces, position = [_HEAD.encode()], len(_HEAD)
        for classifier, experts in test.items():
            for expert, rows in experts.items():
                evaluations, size = self._there.get((classifier, expert), (0, 0))
                stored = buffer[classifier][expert]
                new = _lines(classifier, expert, rows, stored, evaluated_after, evaluations).encode()
                pieces += [before[position : position + size], new]
                position += size
                self._there[classifier, expert] = len(rows), size + len(new)
        content = b"".join(pieces)
        del before, pieces
        self._hash = hashlib.sha256(content).digest()
        write_atomically(self.path, content, resume_advice(self.path.parent))

    def _read(self) -> memoryview:
        """The file as it was written; empty where there is none, or somebody has changed it."""
        content = b""
        if self._there:
            with suppress(OSError):
                content = self.path.read_bytes()
            if hashlib.sha256(content).digest() != self._hash:
                content, self._there = b"", {}
        return memoryview(content)


def shown_experts(experts: Mapping[str, T], classifier: str, of_predict: tuple[str, str]) -> Iterator[tuple[str, T]]:
    """The experts to show; of a single one no mean, unless ``predict()`` uses it."""
    for expert, value in experts.items():
        if len(experts) > 2 or not expert.startswith("mean_") or (classifier, expert) == of_predict:
            yield expert, value


def summary(results: dict[str, Any]) -> str:
    """A table in percent: ACC (mean over tasks), sample ACC (mean over images), forgetting."""
    images = "validation" if results["config"]["evaluate_on"] == "validation" else "test"

    def percent(value: float | None) -> str:
        return "    -" if value is None else f"{100 * value:5.1f}"

    lines = [
        f"{'classifier':<11} {'expert':<14} {'ACC':>5} {'sample ACC':>11} {'AF paper':>9} {'AF released':>12}"
        f" {'untrained ACC':>14}   (percent of {images} images)"
    ]
    of_predict = results["resolved"]["classifier"], results["resolved"]["expert"]
    for classifier, experts in results["acc"].items():
        for expert, acc in shown_experts(experts, classifier, of_predict):
            main = (classifier, expert) == of_predict
            lines.append(
                f"{classifier:<11} {expert:<14} {percent(acc)} {percent(results['sample_acc'][classifier][expert]):>11}"
                f" {percent(results['af_paper'][classifier][expert]):>9}"
                f" {percent(results['af_released'][classifier][expert]):>12}"
                f" {percent(results['untrained']['acc'][classifier][expert]):>14}{'   <- predict()' if main else ''}"
            )
    return "\n".join(lines)
