"""The files of a sweep's folder, and which of its cells have run there already."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mose_fast.experiments.grid import Cell
from mose_fast.learner.named_settings import dotted
from mose_fast.learner.registry import method_changes, method_files
from mose_fast.methods import find_method
from mose_fast.runs.files import RunError, RunFolder, is_configuration, remove_leftovers
from mose_fast.runs.store import STORE, RunDamaged, read_run, setting_id
from mose_fast.settings.run import ConfigError, RunConfig, shown


class SweepFolder:
    """A sweep's folder. The run folders lie in it, beside the plan, the cells' configurations for
    ``mose-fast run --config``, and what each cell has printed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan = self.path / "sweep.json"
        self.configs = self.path / "configs"
        self.logs = self.path / "logs"

    def run(self, name: str) -> Path:
        return self.path / name

    def config(self, name: str) -> Path:
        return self.configs / f"{name}.json"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def create(self) -> None:
        """Makes the folders; RunError if they cannot be written."""
        try:
            for folder in (self.path, self.configs, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from error

    def tidy(self, cells: Iterable[Cell]) -> None:
        """Deletes the files that a killed sweep left half written; the caller holds the folder's
        lock. RunError if a file with the name of a cell's configuration is none.
        """
        for cell in cells:
            file = self.config(cell.name)
            if file.exists() and not is_configuration(file):
                raise RunError(
                    f"{file} is no configuration of a run, and would be replaced; choose another --out, or move it away"
                )
        try:
            remove_leftovers(self.path, [re.escape(self.plan.name), re.escape(STORE)])
            remove_leftovers(self.configs, [r".+\.json"])
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(f"cannot write into the sweep's folder {self.path}: {error.strerror}; choose another --out")

    def stored_plan(self) -> dict[str, Any]:
        """The plan of the sweep that the folder holds; empty if it holds none."""
        try:
            plan = json.loads(self.plan.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(
                f"cannot read the plan {self.plan}: {error}; delete it to plan again, which keeps the runs"
            ) from error
        if not isinstance(plan, dict) or not plan.keys() >= {"cells", "threads", "measured"}:
            raise RunError(
                f"{self.plan} is not the plan of a sweep, and would be replaced; choose another --out, or move it away"
            )
        return plan

    def with_known_names(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells, with the name of the run folder that holds their run where there is one: the
        names depend on the whole grid, and a larger grid finds the runs of a smaller one.
        """
        there: dict[RunConfig, list[str]] = {}  # configurations are equal whatever the fingerprint
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            with suppress(ConfigError):
                if (path / "config.json").is_file():
                    there.setdefault(RunConfig.load(path / "config.json"), []).append(path.name)
        taken = {name for cell in cells for name in there.get(cell.config, [])}

        def name(cell: Cell) -> str:
            if known := there.get(cell.config, []):
                return cell.name if cell.name in known else known[0]
            # Where the name is a count of cells of the same name, another cell's folder may have
            # it.
            return f"{cell.name}_{setting_id(cell.config)}" if cell.name in taken else cell.name

        return [dataclasses.replace(cell, name=name(cell)) for cell in cells]

    def finished(self, cell: Cell) -> dict[str, Any] | None:
        """The row of the store of a cell's finished run; None if it has not finished.

        Raises:
            RunDamaged: A file in the cell's run folder is missing, damaged or edited.
            RunError: The run folder holds a run with other settings, on other data or of another
                version of the method.
        """
        files = RunFolder(self.run(cell.name))
        if not files.config.is_file():
            if files.results.is_file():
                raise RunDamaged(f"{files.path}: there is a {files.results.name}, but no {files.config.name}")
            return None
        try:
            found = RunConfig.load(files.config)
        except ConfigError as error:
            raise RunDamaged(str(error)) from error
        if found != cell.config:
            there, here = (dotted(config.to_dict()) | {"stream.fingerprint": None} for config in (found, cell.config))
            raise RunError(
                f"{files.path} holds a run with other settings ({first_difference(there, here)}); choose another --out,"
                " or delete that folder"
            )
        data = found.stream.fingerprint
        if data not in (None, cell.config.stream.fingerprint):
            raise RunError(
                f"{files.path} holds a run on other data: the fingerprint of stream {found.stream.name!r} was"
                f" {data} and is {cell.config.stream.fingerprint} now; put the earlier data back, or choose"
                " another --out"
            )
        if not files.results.is_file():
            return None
        row, results = read_run(files.path)
        if edited := method_changes(results["method_files"], method_files(find_method(cell.config.method))):
            raise RunError(
                f"{files.path} holds a run of another version of its method ({edited}); put the earlier file"
                " back, choose another --out, or delete the folders of its runs to repeat them"
            )
        return row


def first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first name with another value there than here, and both values."""
    name = next(name for name in {**there, **here} if there.get(name) != here.get(name))
    return f"{name} is {shown(there.get(name))} there and {shown(here.get(name))} here"
