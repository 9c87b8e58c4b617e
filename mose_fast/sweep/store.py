"""The table of runs: one SQLite file beside the run folders, a row a finished run, rows only ever
added.

The run folders are the truth; :func:`collect` builds the table from them at any time.
:data:`COLUMNS` is the format. A row is added in one transaction on disk, so a crash leaves it whole
or leaves none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mose_fast import evaluate
from mose_fast.config import ConfigError, RunConfig, current_names, upgraded
from mose_fast.train.files import RunError, RunFolder
from mose_fast.train.results import SCHEMA_VERSION, accuracy_csv, precision_of, read_results

if TYPE_CHECKING:
    import pandas

__all__ = [
    "COLUMNS",
    "FORMAT",
    "STORE",
    "RunDamaged",
    "Store",
    "collect",
    "find_runs",
    "read_run",
    "read_store",
    "setting_id",
]

#: Name of the table's file in a sweep's folder.
STORE = "runs.sqlite"

#: Version of the table's format, SQLite's ``user_version``. Format 2 had other names for some
#: options of MOSE; readers refuse what is neither.
FORMAT = 3

#: Every column of the table ``runs``: SQLite type and meaning. Metrics are fractions and those of
#: predict()'s classifier and expert; ``metrics`` holds them for all.
COLUMNS: dict[str, tuple[str, str]] = {
    "folder": (
        "TEXT NOT NULL",
        "run folder, relative to the table's; results.json there holds matrices, curves and confusion",
    ),
    "setting": (
        "TEXT NOT NULL",
        "12 hex digits; equal for runs whose configurations differ in nothing but the seed and the data",
    ),
    "method": ("TEXT NOT NULL", "name of the method"),
    "preset": ("TEXT NOT NULL", "its preset"),
    "changes": ("TEXT NOT NULL", "JSON table: options that differ from the preset"),
    "stream": ("TEXT NOT NULL", "name of the stream"),
    "data": ("TEXT", "fingerprint of the data; NULL for runs of versions that had none"),
    "tasks": ("INTEGER NOT NULL", "number of tasks"),
    "classes": ("INTEGER NOT NULL", "number of classes"),
    "image_size": ("TEXT NOT NULL", "JSON list: height and width in pixels"),
    "limit_per_task": ("INTEGER", "training images a task at most, NULL: all"),
    "batch": ("INTEGER NOT NULL", "incoming images a step"),
    "class_order": ("TEXT NOT NULL", "JSON list: the data set's label of each head index"),
    "class_order_seed": ("INTEGER", "NULL: natural order"),
    "normalisation": ("TEXT NOT NULL", "name of the constants"),
    "augment": ("TEXT NOT NULL", "recipe of the views"),
    "mirrored": ("INTEGER NOT NULL", "1 where images were mirrored"),
    "memory": ("INTEGER NOT NULL", "slots of the replay memory"),
    "width": ("INTEGER NOT NULL", "channels of the first stage"),
    "epochs": ("INTEGER NOT NULL", "passes over each task"),
    "train_on": ("TEXT NOT NULL", "stream or final_memory"),
    "seed": ("INTEGER NOT NULL", "seed"),
    "precision": ("TEXT NOT NULL", "fp32, tf32 or bf16: what the configuration's became"),
    "classifier": ("TEXT NOT NULL", "classifier of predict(), ncm or linear"),
    "expert": ("TEXT NOT NULL", "expert of predict(), as in results.json"),
    "acc": ("REAL NOT NULL", "ACC"),
    "af_paper": ("REAL", "AF of the paper; NULL without an evaluation after every task"),
    "af_released": ("REAL", "AF of the released code, alike"),
    "bwt": ("REAL", "backward transfer, alike"),
    "average_anytime_accuracy": ("REAL", "mean over time of the accuracy on the tasks seen, alike"),
    "untrained_acc": ("REAL NOT NULL", "ACC of the untrained network with the same final memory"),
    "metrics": (
        "TEXT NOT NULL",
        "JSON: metrics[classifier][expert] = {acc, af_paper, af_released, bwt, average_anytime_accuracy}",
    ),
    "parameters": ("INTEGER NOT NULL", "of the trained model"),
    "parameters_deployed": ("INTEGER NOT NULL", "of the deployed model"),
    "macs": ("INTEGER NOT NULL", "multiply-accumulates an image, trained model"),
    "macs_deployed": ("INTEGER NOT NULL", "multiply-accumulates an image, deployed model"),
    "steps": ("INTEGER NOT NULL", "training steps"),
    "seconds_train": ("REAL NOT NULL", "seconds of training"),
    "seconds_evaluate": ("REAL NOT NULL", "seconds of evaluation"),
    "seconds_checkpoint": ("REAL NOT NULL", "seconds of checkpoints"),
    "seconds_capture": ("REAL NOT NULL", "seconds of capturing steps as CUDA graphs"),
    "seconds_total": ("REAL NOT NULL", "their sum"),
    "seconds_other": ("REAL", "seconds in no phase; NULL where an older version ran"),
    "seconds_wall": ("REAL", "seconds of the whole run, alike"),
    "resumed": ("INTEGER NOT NULL", "how often the run was continued"),
    "peak_bytes": ("INTEGER NOT NULL", "peak memory of the process on the host"),
    "peak_bytes_device": ("INTEGER", "peak memory allocated on the card; NULL on the CPU"),
    "device": ("TEXT NOT NULL", "cpu or cuda:N"),
    "card": ("TEXT", "name of the card; NULL on the CPU"),
    "processor": ("TEXT NOT NULL", "name of the processor"),
    "threads": ("INTEGER NOT NULL", "threads of the CPU"),
    "torch": ("TEXT NOT NULL", "version of torch"),
    "mose_fast": ("TEXT NOT NULL", "version of this package"),
    "commit_id": ("TEXT", "commit of this package; NULL where unknown"),
    "config": ("TEXT NOT NULL", "JSON: the complete configuration"),
    "weights_sha256": ("TEXT NOT NULL", "hash of the trained weights"),
    "results_sha256": ("TEXT NOT NULL", "hash of the file results.json"),
    "finished_at": ("TEXT NOT NULL", "when results.json was written, ISO 8601 in UTC"),
}

_METRICS = ("acc", "af_paper", "af_released", "bwt", "average_anytime_accuracy")


class RunDamaged(RunError):
    """A run folder is unfinished, or was edited or truncated by hand."""


def setting_id(config: RunConfig) -> str:
    """12 hex digits that are equal for configurations which differ in nothing but the seed and the
    data that they found.
    """
    values = config.to_dict()
    del values["seed"], values["stream"]["fingerprint"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def read_run(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A finished run: its row (:data:`COLUMNS`, with ``folder`` as given) and the contents of its
    ``results.json``.

    Raises:
        RunDamaged: A file is missing or unreadable, or the files contradict each other:
            ``config.json`` against the configuration in ``results.json``, ``accuracy.csv`` and the
            metrics against the accuracy matrices.
    """
    files = RunFolder(folder)

    def damaged(what: str) -> RunDamaged:
        return RunDamaged(f"{files.path}: {what}")

    if not files.results.is_file():
        raise damaged(
            f"not finished (no {files.results.name})" if files.config.is_file() else f"no run (no {files.config.name})"
        )
    try:
        raw = files.results.read_bytes()
        results = read_results(raw)
        stored = upgraded(json.loads(files.config.read_text(encoding="utf-8")))
        table = files.accuracy.read_text(encoding="utf-8")
    except OSError as error:
        raise damaged(f"{Path(error.filename or files.path).name} cannot be read ({error.strerror})") from error
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise damaged(f"{files.results.name} or {files.config.name} is truncated or no JSON ({error})") from error
    if not isinstance(results, dict) or results.get("schema_version") != SCHEMA_VERSION:
        found = results.get("schema_version") if isinstance(results, dict) else None
        raise damaged(f"{files.results.name} has schema_version {found!r}; wanted {SCHEMA_VERSION}")
    try:
        if results["config"] != stored:
            raise damaged(f"{files.config.name} and the configuration in {files.results.name} differ")
        _check_metrics(results, table, damaged)
        row = _row(files, results, hashlib.sha256(raw).hexdigest())
    except RunDamaged:
        raise
    except ConfigError as error:
        raise damaged(f"{files.config.name}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(f"{files.results.name} is incomplete ({type(error).__name__}: {error})") from error
    return row, results


def _check_metrics(results: dict[str, Any], table: str, damaged: Any) -> None:
    """Recomputes what follows from the accuracy matrices; an edited number no longer fits."""
    after = results["evaluated_after"]

    def rows(matrices: Mapping) -> dict:
        return {c: {e: [m[k][: k + 1] for k in after] for e, m in experts.items()} for c, experts in matrices.items()}

    if accuracy_csv(rows(results["accuracy"]), rows(results["buffer_accuracy"]), after) != table:
        raise damaged("accuracy.csv does not hold the accuracies of results.json")
    functions = {
        "acc": evaluate.average_accuracy,
        "af_paper": evaluate.forgetting_paper,
        "af_released": evaluate.forgetting_released,
        "bwt": evaluate.backward_transfer,
        "average_anytime_accuracy": evaluate.average_anytime_accuracy,
    }
    for name, function in functions.items():
        for classifier, experts in results["accuracy"].items():
            for expert, matrix in experts.items():
                found = results[name][classifier][expert]
                if found is not None and not math.isclose(found, function(matrix), abs_tol=1e-9):
                    raise damaged(f"{name} of {classifier}, expert {expert} does not follow from the accuracy matrix")


def _row(files: RunFolder, results: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    config = RunConfig.from_dict(results["config"])
    resolved, seconds, peak = results["resolved"], results["seconds"], results["peak_memory_bytes"]
    classifier, expert = resolved["classifier"], resolved["expert"]
    metrics = {
        c: {e: {m: results[m][c][e] for m in _METRICS} for e in experts} for c, experts in results["acc"].items()
    }
    row = {
        "folder": str(files.path),
        "setting": setting_id(config),
        "method": config.method,
        "preset": config.preset,
        "changes": json.dumps(results["changes_from_preset"], sort_keys=True),
        "stream": config.stream.name,
        "data": config.stream.fingerprint,
        "tasks": len(results["tasks"]),
        "classes": results["classes"],
        "image_size": json.dumps(results["image_size"]),
        "limit_per_task": config.stream.limit_per_task,
        "batch": config.stream.batch,
        "class_order": json.dumps(results["class_order"]),
        "class_order_seed": config.stream.class_order_seed,
        "normalisation": resolved["normalisation"]["name"],
        "augment": config.options.augment,
        "mirrored": int(resolved["mirror"]),
        "memory": config.memory,
        "width": config.width,
        "epochs": config.epochs,
        "train_on": config.train_on,
        "seed": config.seed,
        "precision": precision_of(results),
        "classifier": classifier,
        "expert": expert,
        **metrics[classifier][expert],
        "untrained_acc": results["untrained"]["acc"][classifier][expert],
        "metrics": json.dumps(metrics),
        "parameters": results["parameters"]["trained"],
        "parameters_deployed": results["parameters"]["deployed"],
        "macs": results["macs"]["trained"],
        "macs_deployed": results["macs"]["deployed"],
        "steps": results["steps"],
        **{f"seconds_{phase}": seconds[phase] for phase in ("train", "evaluate", "checkpoint", "total")},
        "seconds_capture": seconds.get("capture", 0.0),
        **{f"seconds_{part}": seconds.get(part) for part in ("other", "wall")},
        "resumed": results["resumed"],
        "peak_bytes": peak["host"],
        "peak_bytes_device": peak["device"],
        "device": resolved["device"],
        "card": results["card"],
        "processor": results["processor"],
        "threads": results["threads"],
        "torch": results["versions"]["torch"],
        "mose_fast": results["versions"]["mose_fast"],
        "commit_id": results["commit"],
        "config": config.to_json(),
        "weights_sha256": results["weights_sha256"],
        "results_sha256": fingerprint,
        "finished_at": (
            datetime.fromtimestamp(files.results.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
        ),
    }
    return {column: row[column] for column in COLUMNS}


class Store:
    """The table of one folder, to add runs to.

    Args:
        folder: Of the sweep; the table is ``runs.sqlite`` in it and is made where it is missing.

    Raises:
        RunError: The file is no table of runs or of another format, or cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / STORE
        with self._open() as database:
            _prepare(database, self.path)

    def add(self, folder: str | Path) -> dict[str, Any]:
        """Adds the finished run in ``folder``, or does nothing where the table holds this very
        result; returns its row.

        Raises:
            RunDamaged: The folder holds no finished, unharmed run.
            RunError: The table cannot be written (a full disk); what it held before is untouched.
        """
        row, _ = read_run(folder)
        row["folder"] = _relative(Path(folder), self.folder)
        with self._open() as database:
            known = database.execute(
                "SELECT 1 FROM runs WHERE folder = ? AND results_sha256 = ?", (row["folder"], row["results_sha256"])
            ).fetchone()
            if known is None:
                _insert(database, row)
        return row

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
    """Rebuilds the table of a folder from the run folders below it; the old table is replaced in
    one move.

    Args:
        folder: Of a sweep, or any folder above run folders.

    Returns:
        The table as :func:`read_store` gives it, and for each folder that was skipped a line that
        names it and says why.

    Raises:
        RunError: The folder does not exist, there is neither a run nor a table in it, its
            ``runs.sqlite`` is a database of something else, or the table cannot be written; what
            was there is untouched then.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder; wanted one with run folders below it")
    rows, skipped = [], []
    for run in find_runs(folder):
        try:
            row, _ = read_run(run)
        except RunDamaged as error:
            skipped.append(str(error))
            continue
        rows.append({**row, "folder": _relative(run, folder)})
    target = folder / STORE
    if not rows and not skipped and not target.exists():
        raise RunError(f"there is no run below {folder}; wanted a folder of a sweep, or any folder above run folders")
    _refuse_foreign(target)
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{STORE}.")
        os.close(descriptor)
        try:
            with closing(sqlite3.connect(name)) as database, database:
                _prepare(database, Path(name))
                for row in sorted(rows, key=lambda row: (row["finished_at"], row["folder"])):
                    _insert(database, row)
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise RunError(
            f"cannot write the table of runs {target}: {error}; what was there before is untouched"
        ) from error
    return read_store(folder), skipped


def find_runs(folder: str | Path) -> list[Path]:
    """Every run folder at or below ``folder``, in order: those with a ``config.json`` or a
    ``results.json``.
    """
    found = []
    for path, below, files in os.walk(folder):
        below.sort()
        if "config.json" in files or "results.json" in files:
            found.append(Path(path))
            below.clear()
    return sorted(found)


def read_store(folder: str | Path) -> pandas.DataFrame:
    """The table as a data frame with the columns :data:`COLUMNS`: the newest row of each run
    folder, ordered by folder.

    Args:
        folder: That holds ``runs.sqlite``, or that file.

    Raises:
        RunError: There is no such table, or it is damaged or of another format.
    """
    # Not at the top: this import takes half a second that a single run need not pay.
    import pandas

    path = Path(folder)
    path = path / STORE if path.is_dir() else path
    if not path.is_file():
        raise RunError(f"there is no table of runs {path}; build it with: mose-fast collect {path.parent}")
    columns = ", ".join(f"runs.{name}" for name in COLUMNS)
    try:
        with (
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as database,
            closing(sqlite3.connect(":memory:")) as copy,
        ):
            database.backup(copy)
            _upgrade(copy, path)
            rows = copy.execute(
                f"SELECT {columns} FROM runs JOIN (SELECT MAX(rowid) AS newest FROM runs GROUP BY folder) ON runs.rowid"
                " = newest ORDER BY folder"
            ).fetchall()
    except sqlite3.Error as error:
        raise RunError(
            f"the table of runs {path} cannot be read: {error}; rebuild it with: mose-fast collect {path.parent}"
        ) from error
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    types = {"TEXT": "object", "INTEGER": "Int64", "REAL": "float64"}
    return frame.astype({name: types[kind.split()[0]] for name, (kind, _) in COLUMNS.items()})


def _refuse_foreign(path: Path) -> None:
    """Refuses to replace a database that holds something else. A damaged one may be replaced."""
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return
    if tables and tables != {"runs"}:
        raise RunError(
            f"{path} is a database of something else (it holds {', '.join(sorted(tables))}); move it away, and collect"
            " again"
        )


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    if database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
        _upgrade(database, path)
        return
    database.execute(f"CREATE TABLE runs ({', '.join(f'{name} {kind}' for name, (kind, _) in COLUMNS.items())})")
    database.execute(f"PRAGMA user_version = {FORMAT}")


def _upgrade(database: sqlite3.Connection, path: Path) -> None:
    """Brings a table of format 2 into the current one.

    Raises:
        RunError: The table has another format.
    """
    found = database.execute("PRAGMA user_version").fetchone()[0]
    if found == FORMAT:
        return
    if found != 2:
        raise RunError(
            f"the table of runs {path} has format {found}; wanted {FORMAT}. Rebuild it with: mose-fast collect"
            f" {path.parent}"
        )
    for row, text, changes in database.execute("SELECT rowid, config, changes FROM runs").fetchall():
        config = RunConfig.from_dict(upgraded(json.loads(text)))
        changes = json.dumps(current_names(json.loads(changes), config.method), sort_keys=True)
        database.execute(
            "UPDATE runs SET setting = ?, config = ?, changes = ? WHERE rowid = ?",
            (setting_id(config), config.to_json(), changes, row),
        )
    database.execute(f"PRAGMA user_version = {FORMAT}")


def _insert(database: sqlite3.Connection, row: Mapping[str, Any]) -> None:
    database.execute(
        f"INSERT INTO runs ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})",
        [row[name] for name in COLUMNS],
    )


def _relative(run: Path, folder: Path) -> str:
    return Path(os.path.relpath(run.absolute(), folder.absolute())).as_posix()
