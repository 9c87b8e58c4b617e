"""The table of runs: an SQLite file beside the run folders, with one row per finished run.

:func:`collect` can rebuild it from the run folders at any time. :data:`COLUMNS` defines the format.
Rows are only added, each in one transaction, so a crash leaves a whole row or none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from mose_fast import evaluate
from mose_fast.output import readable
from mose_fast.runs.files import RunError, RunFolder, check_folders, write_atomically
from mose_fast.runs.results import SCHEMA_VERSION, accuracy_csv
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams.kinds import Kind

if TYPE_CHECKING:
    import pandas

#: Name of the table's file in a sweep's folder.
STORE = "runs.sqlite"

#: Version of the table's format, SQLite's ``user_version``; readers refuse others.
FORMAT = 1


class Column(NamedTuple):
    """A column of the table of runs.

    Attributes:
        type: Python type of its values. Lists and dictionaries are stored as JSON.
        meaning: What it holds; details follow a comma.
        source: Path of keys in ``results.json``, or a key that :func:`_row` adds; None: the
            column's own name.
        compared: ``problem``: runs that differ in it do not belong in one table of a report;
            ``protocol``, ``made``: a report warns of the difference, in how the problem was solved
            and in what computed it; None: it does not matter, or is compared in another way.
    """

    type: Any
    meaning: str
    source: str | None = None
    compared: str | None = None

    @property
    def label(self) -> str:
        """The meaning without details."""
        return self.meaning.split(",")[0]

    @property
    def sql(self) -> str:
        optional = isinstance(self.type, UnionType)
        kind = {str: "TEXT", int: "INTEGER", float: "REAL"}[get_args(self.type)[0] if optional else self.type]
        return kind if optional else f"{kind} NOT NULL"


#: Every column of the table ``runs``. Metrics are fractions and belong to the classifier and expert
#: of predict() unless they say otherwise.
COLUMNS: dict[str, Column] = {
    "folder": Column(str, "run folder, relative to the table's"),
    "setting": Column(str, "12 hex digits, equal for runs whose settings differ in the seed alone"),
    "method": Column(str, "method", "config.method"),
    "preset": Column(str, "preset of the method", "config.preset"),
    "changes": Column(str, "options that differ from the preset", "changes_from_preset"),
    "stream": Column(str, "stream", "config.stream.name", compared="problem"),
    "data": Column(str | None, "fingerprint of the data", "config.stream.fingerprint"),
    "tasks": Column(int, "number of tasks", compared="problem"),
    "classes": Column(int, "number of classes", compared="problem"),
    "image_size": Column(str, "image size", compared="problem"),
    "limit_per_task": Column(
        int | None, "limit of training images per task", "config.stream.limit_per_task", "problem"
    ),
    "evaluate_on": Column(str, "images evaluated on, test or validation", "config.evaluate_on", compared="problem"),
    "validation": Column(
        float | None, "share of training images held out, None: none", "config.stream.validation", "problem"
    ),
    "kind": Column(str, "kind of the stream, with its settings", compared="problem"),
    "kind_seed": Column(int, "seed of the stream's kind, 0 for tasks", "config.stream.kind_seed", compared="protocol"),
    "batch": Column(int, "number of incoming images per step", "config.stream.batch", compared="protocol"),
    "class_order": Column(str, "order of classes", compared="protocol"),
    "class_order_seed": Column(int | None, "seed of the class order, None: natural", "config.stream.class_order_seed"),
    "normalisation": Column(str, "normalisation", "resolved.normalisation.name", compared="protocol"),
    "augment": Column(str, "augmentation", "config.options.augment", compared="protocol"),
    "mirrored": Column(int, "mirroring of images, 0 or 1", compared="protocol"),
    "memory": Column(int, "number of slots of the replay memory", "config.memory"),
    "width": Column(int, "width of the network", "config.width", compared="protocol"),
    "epochs": Column(int, "number of epochs", "config.epochs", compared="protocol"),
    "train_on": Column(str, "training data, stream or final_memory", "config.train_on", compared="protocol"),
    "seed": Column(int, "seed", "config.seed"),
    "precision": Column(str, "precision", compared="made"),
    "kernels": Column(str | None, "kind of kernels, None if unknown", "resolved.kernels", compared="made"),
    "classifier": Column(str, "classifier of predict()", "resolved.classifier"),
    "expert": Column(str, "expert of predict(), as in results.json", "resolved.expert"),
    "acc": Column(float, "ACC"),
    "af_paper": Column(float | None, "AF of the paper, None without an evaluation after every task"),
    "af_released": Column(float | None, "AF of the released code, None as above"),
    "bwt": Column(float | None, "backward transfer, None as above"),
    "average_anytime_accuracy": Column(float | None, "mean over time of the accuracy on the tasks seen, None as above"),
    "untrained_acc": Column(float, "ACC of the untrained network with the same final memory"),
    "metrics": Column(str, "metrics of every classifier and expert, metrics[classifier][expert]"),
    "parameters": Column(int, "number of parameters of the trained model", "parameters.trained"),
    "parameters_deployed": Column(int, "number of parameters of the deployed model", "parameters.deployed"),
    "macs": Column(int, "multiply-accumulates per image of the trained model", "macs.trained"),
    "macs_deployed": Column(int, "multiply-accumulates per image of the deployed model", "macs.deployed"),
    "steps": Column(int, "number of training steps"),
    "eager_steps": Column(int | None, "number of steps not replayed from a graph, None on the CPU"),
    "seconds_train": Column(float, "seconds of training", "seconds.train"),
    "seconds_evaluate": Column(float, "seconds of evaluation", "seconds.evaluate"),
    "seconds_checkpoint": Column(float, "seconds of checkpoints", "seconds.checkpoint"),
    "seconds_capture": Column(float, "seconds of capturing steps as CUDA graphs", "seconds.capture"),
    "seconds_total": Column(float, "sum of the seconds above", "seconds.total"),
    "seconds_other": Column(float, "seconds in no phase", "seconds.other"),
    "seconds_wall": Column(float, "seconds of the whole run", "seconds.wall"),
    "resumed": Column(int, "how often the run was continued"),
    "peak_bytes": Column(int, "peak memory of the process on the host", "peak_memory_bytes.host"),
    "peak_bytes_device": Column(
        int | None, "peak memory allocated on the GPU, None on the CPU", "peak_memory_bytes.device"
    ),
    "images_kept": Column(int, "number of images kept at most", "kept.images"),
    "bytes_kept": Column(int, "bytes of all that was kept beside network and optimiser"),
    "device": Column(str, "device, cpu or cuda:N", "resolved.device"),
    "gpu": Column(str | None, "GPU", compared="made"),
    "switched_off": Column(str, "native code that the self-check switched off, empty: none"),
    "processor": Column(str, "processor"),
    "threads": Column(int, "number of CPU threads"),
    "torch": Column(str, "version of torch", "versions.torch", compared="made"),
    "native_backend": Column(str | None, "back end of the native library, None without one", compared="made"),
    "mose_fast": Column(str, "version of this package", "versions.mose_fast"),
    "commit_id": Column(str | None, "commit of this package, None if unknown", "commit"),
    "code": Column(str, "hash of this package's code"),
    "method_version": Column(str | None, "hash of the files of a method of one's own, None for this package's"),
    "config": Column(str, "the complete configuration"),
    "weights_sha256": Column(str, "hash of the trained weights"),
    "results_sha256": Column(str, "hash of the file results.json"),
    "finished_at": Column(str, "time at which results.json was written, ISO 8601 in UTC"),
}

_METRICS: dict[str, Callable[[Any], float]] = {
    "acc": evaluate.average_accuracy,
    "af_paper": evaluate.forgetting_paper,
    "af_released": evaluate.forgetting_released,
    "bwt": evaluate.backward_transfer,
    "average_anytime_accuracy": evaluate.average_anytime_accuracy,
}


class RunDamaged(RunError):
    """A run folder is unfinished, or a file in it was edited or truncated."""


def setting_id(config: RunConfig) -> str:
    """12 hex digits, equal for configurations that differ only in seed and data fingerprint."""
    values = config.to_dict()
    del values["seed"], values["stream"]["fingerprint"]
    return _hash(values)


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def read_run(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a finished run: its row (:data:`COLUMNS`, with ``folder`` as given) and the contents of
    its ``results.json``; RunDamaged if a file is missing or unreadable, or files contradict each
    other: configurations, accuracy matrices, ``accuracy.csv`` and metrics.
    """
    files = RunFolder(folder)
    try:
        if files.unfinished:
            raise RunDamaged(files.unfinished)
        raw = files.results.read_bytes()
        results, stored = json.loads(raw), json.loads(files.config.read_text(encoding="utf-8"))
        found = results.get("schema_version") if isinstance(results, dict) else None
        if found != SCHEMA_VERSION:
            raise RunDamaged(f"{files.results.name} has schema_version {found!r}; wanted {SCHEMA_VERSION}")
        if results["config"] != stored:
            raise RunDamaged(f"{files.config.name} and the configuration in {files.results.name} differ")
        _check_metrics(results, files.accuracy.read_text(encoding="utf-8"))
        return _row(files, results, hashlib.sha256(raw).hexdigest()), results
    except RunDamaged as error:
        what = str(error)
    except ConfigError as error:  # which is a ValueError, too
        what = f"{files.config.name}: {error}"
    except OSError as error:
        what = f"{Path(error.filename or files.path).name} cannot be read ({error.strerror})"
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"{files.results.name} or {files.config.name} is truncated or no JSON ({error})"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{files.results.name} is incomplete ({type(error).__name__}: {error})"
    raise RunDamaged(f"{files.path}: {what}")


def _check_metrics(results: dict[str, Any], table: str) -> None:
    """Recomputes what follows from the accuracy matrices, to find edited numbers."""
    after = results["evaluated_after"]

    def rows(matrices: Mapping) -> dict:
        return {c: {e: [m[k][: k + 1] for k in after] for e, m in experts.items()} for c, experts in matrices.items()}

    if accuracy_csv(rows(results["accuracy"]), rows(results["buffer_accuracy"]), after) != table:
        raise RunDamaged("accuracy.csv does not hold the accuracies of results.json")
    for name, function in _METRICS.items():
        for classifier, experts in results["accuracy"].items():
            for expert, matrix in experts.items():
                found = results[name][classifier][expert]
                if found is not None and not math.isclose(found, function(matrix), abs_tol=1e-9):
                    raise RunDamaged(
                        f"{name} of {classifier}, expert {expert} does not follow from the accuracy matrix"
                    )


def _row(files: RunFolder, results: dict[str, Any], sha256: str) -> dict[str, Any]:
    config = RunConfig.from_dict(results["config"])
    classifier, expert = results["resolved"]["classifier"], results["resolved"]["expert"]
    metrics = {
        c: {e: {m: results[m][c][e] for m in _METRICS} for e in experts} for c, experts in results["acc"].items()
    }
    finished = datetime.fromtimestamp(files.results.stat().st_mtime, timezone.utc)
    known = {
        **results,
        **metrics[classifier][expert],
        "config": config.to_dict(),
        "folder": str(files.path),
        "setting": setting_id(config),
        "changes_from_preset": dict(sorted(results["changes_from_preset"].items())),
        "tasks": len(results["tasks"]),
        "kind": str(Kind.of(config.stream)),
        "mirrored": int(results["resolved"]["mirror"]),
        "precision": results["resolved"]["precision"],
        "switched_off": ", ".join(results["resolved"]["switched_off"]),
        "metrics": metrics,
        "bytes_kept": results["kept"]["bytes"] + results["kept"]["bytes_beside"],
        "method_version": _hash(results["method_files"]) if results["method_files"] else None,
        "untrained_acc": results["untrained"]["acc"][classifier][expert],
        "results_sha256": sha256,
        "finished_at": finished.isoformat(timespec="seconds"),
    }
    row = {}
    for name, column in COLUMNS.items():
        value = known
        for key in (column.source or name).split("."):
            value = value[key]
        value = json.dumps(value) if isinstance(value, list | dict) else value
        row[name] = readable(value) if isinstance(value, str) else value
    return row | {"config": config.to_json()}


class Store:
    """The table of a sweep's folder, in its ``runs.sqlite`` or ``path``, created if missing.
    RunError if the file is no table of runs, has another format, or cannot be written.
    """

    def __init__(self, folder: str | Path, path: Path | None = None) -> None:
        self.folder = Path(folder)
        self.path = path or self.folder / STORE
        with self._open() as database:
            if database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                _check_format(database, self.path)
            else:
                columns = ", ".join(f"{name} {column.sql}" for name, column in COLUMNS.items())
                database.execute(f"CREATE TABLE runs ({columns})")
                database.execute(f"PRAGMA user_version = {FORMAT}")

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Adds rows of :func:`read_run`, all of them or none, but for those that the table already
        holds. RunError if it cannot be written: it stays as it was.
        """
        with self._open() as database:
            known = set(database.execute("SELECT folder, results_sha256 FROM runs"))
            for row in rows:
                folder = _relative(Path(row["folder"]), self.folder)
                if (folder, row["results_sha256"]) not in known:
                    names = ", ".join(COLUMNS), ", :".join(COLUMNS)
                    database.execute("INSERT INTO runs ({}) VALUES (:{})".format(*names), {**row, "folder": folder})

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=30)) as database, database:
                database.execute("PRAGMA synchronous = FULL")
                yield database
        except sqlite3.Error as error:
            raise RunError(
                f"cannot write the table of runs {self.path}: {error}; the run folders beside it are untouched"
            ) from error


def collect(folder: str | Path) -> tuple[pandas.DataFrame, list[str]]:
    """Rebuilds the table of a folder from the run folders below it, in place of the old one.
    Returns it as :func:`read_store` does, and a line on each skipped folder with the reason.

    Raises:
        RunError: The folder does not exist, there is neither a run nor a table in it, its
            ``runs.sqlite`` holds other data, or the table cannot be written. The old table stays.
    """
    check_folders([folder])
    folder = Path(folder)
    rows, skipped = [], []
    for run in find_runs(folder):
        try:
            rows.append(read_run(run)[0])
        except RunDamaged as error:
            skipped.append(str(error))
    target = folder / STORE
    if not rows and not skipped and not target.exists():
        raise RunError(f"there is no run below {folder}; wanted a folder of a sweep, or any folder above run folders")
    _refuse_foreign(target)
    with tempfile.TemporaryDirectory() as temporary:
        made = Store(folder, Path(temporary) / STORE)
        made.add(*sorted(rows, key=lambda row: (row["finished_at"], row["folder"])))
        # SQLite would undo a transaction of the old table in the new one.
        Path(f"{target}-journal").unlink(missing_ok=True)
        write_atomically(target, made.path.read_bytes(), "Free some space, then collect again")
    return read_store(folder), skipped


def find_runs(folder: str | Path) -> list[Path]:
    """Every folder with a ``config.json`` or ``results.json`` at or below ``folder``, sorted."""
    found = []
    for path, below, files in os.walk(folder):
        if "config.json" in files or "results.json" in files:
            found.append(Path(path))
            below.clear()
    return sorted(found)


def read_store(folder: str | Path) -> pandas.DataFrame:
    """Reads the table of a folder, or that file, as a data frame with the columns :data:`COLUMNS`,
    ordered by folder, with the newest row of each. RunError if it is none.
    """
    # Imported here because it takes half a second, which a single run does not need.
    import pandas

    path = Path(folder)
    path = path / STORE if path.is_dir() else path
    if not path.is_file():
        raise RunError(f"there is no table of runs {path}; build it with: mose-fast collect {path.parent}")
    columns = ", ".join(f"runs.{name}" for name in COLUMNS)
    try:
        with _readable(path) as database:
            _check_format(database, path)
            rows = database.execute(
                f"SELECT {columns} FROM runs JOIN (SELECT MAX(rowid) AS newest FROM runs GROUP BY folder) ON runs.rowid"
                " = newest ORDER BY folder"
            ).fetchall()
    except sqlite3.Error as error:
        raise RunError(
            f"the table of runs {path} cannot be read: {error}; rebuild it with: mose-fast collect {path.parent}"
        ) from error
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    types = {"TEXT": "object", "INTEGER": "Int64", "REAL": "float64"}
    return frame.astype({name: types[column.sql.split()[0]] for name, column in COLUMNS.items()})


def _refuse_foreign(path: Path) -> None:
    """Refuses to replace a database that holds other data. A damaged one may be replaced."""
    tables: set[str] = set()
    if path.is_file():
        with suppress(sqlite3.Error), _readable(path) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and tables != {"runs"}:
        raise RunError(
            f"{path} is a database of something else (it holds {', '.join(sorted(tables))}); move it away, and collect"
            " again"
        )


def _readable(path: Path) -> closing[sqlite3.Connection]:
    # Not "ro": whoever reads first after a killed writer has to undo its transaction.
    # SQLite opens a file that must not be written for reading.
    return closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=30))


def _check_format(database: sqlite3.Connection, path: Path) -> None:
    found = database.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT:
        raise RunError(
            f"the table of runs {path} has format {found}; wanted {FORMAT}. Rebuild it with: mose-fast collect"
            f" {path.parent}"
        )


def _relative(run: Path, folder: Path) -> str:
    return readable(Path(os.path.relpath(run.absolute(), folder.absolute())).as_posix())
