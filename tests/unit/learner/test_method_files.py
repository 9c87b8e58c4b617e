"""The files of a method of one's own are part of a run's identity: an edited one is never mixed
with the one before it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import warnings

import pytest

from mose_fast.experiments import sweep as scheduler
from mose_fast.experiments.grid import grid_cells
from mose_fast.experiments.sweep import run_grid
from mose_fast.experiments.tune import tuning as tune_module
from mose_fast.export import export_run
from mose_fast.learner.registry import method_files
from mose_fast.methods import METHODS, Er, find_method
from mose_fast.present.report_runs import group_runs, read_folders
from mose_fast.present.statistics import check_comparable
from mose_fast.settings.run import METHOD_SETTINGS, ConfigError, RunConfig
from mose_fast.train import Interrupted, RunError, resume, run
from tests.listeners import StopAt

FILE = """
from mose_fast.methods import BaselineOptions, Preset, ReplayLearner, method


@method("mine", options=BaselineOptions, presets={{"table": Preset("")}}, year=2026, reference="a test", cost=1.0)
class Mine(ReplayLearner):
    scale = {scale}
"""
SETTINGS = {"stream": {"name": "digits", "tasks": 2, "limit_per_task": 20}, "width": 1, "memory": 64, "device": "cpu"}


@pytest.fixture
def forget():
    """A function after which methods and modules are as they were, as in a new process."""
    tables = [(table, dict(table)) for table in (METHODS, METHOD_SETTINGS, sys.modules)]

    def restore():
        for table, before in tables:
            for name in table.keys() - before.keys():
                del table[name]

    yield restore
    restore()


@pytest.fixture
def write(tmp_path, forget):
    """A function that writes the method's file, for a new process; returns the method's name."""
    times = iter(range(1_000_000_000, 2_000_000_000, 10))

    def create(scale=1, text="", name="mine.py", **helpers):
        forget()
        for file, content in ((name, FILE.format(scale=scale) + text), *helpers.items()):
            path = tmp_path / f"{file.removesuffix('.py').replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
            os.utime(path, (next(times),) * 2)  # or Python would take a cached module for the new one
        return f"{tmp_path / name}:Mine"

    return create


def files(method: str) -> dict[str, str]:
    return dict(method_files(find_method(method)))


def test_it_is_the_files_of_the_class_and_what_they_import_from_their_folder(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = files(write())
    assert plain.keys() == {"mine.py"} and files(write()) == plain and files(write(2)) != plain
    assert method_files(Er) == {}
    text = "import helper\ndef late():\n    from parts import deeper\n"
    deep = {"parts__deeper": "import json, other", "other": "x = 1", "unused": ""}
    whole = files(write(text=text, helper="import math", **deep))
    assert whole.keys() == {"mine.py", "helper.py", "parts/deeper.py", "other.py"}
    for name, content in (("helper", "import math\nx = 1"), ("parts__deeper", "import other"), ("other", "x = 2")):
        changed = files(write(text=text, **{"helper": "import math", **deep, name: content}))
        assert [file for file in whole if whole[file] != changed[file]] == [f"{name.replace('__', '/')}.py"]
    assert files(write(text=text, helper="import math", **deep | {"unused": "x = 1"})) == whole
    broken = write(text="try:\n    import broken\nexcept SyntaxError:\n    pass\n", broken="def ")
    assert files(broken).keys() == {"mine.py", "broken.py"}


def test_a_method_of_a_package_and_its_base_class(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write(name="base.py")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "losses.py").write_text("")
    text = FILE.format(scale=1).replace('"mine"', '"theirs"').replace("(ReplayLearner)", "(base.Mine)")
    (tmp_path / "pack" / "theirs.py").write_text(f"import base\nfrom . import losses\n{text}")
    from pack.theirs import Mine

    assert method_files(Mine).keys() == {"base.py", "pack/__init__.py", "pack/losses.py", "pack/theirs.py"}
    assert METHODS["theirs"] is Mine


def test_an_edit_while_the_process_lives_is_refused(write, tmp_path):
    name = write()
    config = RunConfig.create(method=name, **SETTINGS)
    run(config)
    path = tmp_path / "mine.py"
    before = files(name)["mine.py"]
    path.write_text(FILE.format(scale=2))
    for again in (lambda: run(config), lambda: run_grid(grid_cells({"seed": (0,)}, {}, config), tmp_path / "sweep")):
        with pytest.raises(ConfigError, match=rf"Mine were edited .* \(mine.py was {before} and is .* now\); restart"):
            again()
    assert not (tmp_path / "sweep").exists()


def test_resume_names_the_file(write, tmp_path):
    config = RunConfig.create(method=write(), **SETTINGS, checkpoint_every=1)
    with pytest.raises(Interrupted):
        run(config, out=tmp_path / "run", listeners=[StopAt(2)])
    before, now = files(config.method)["mine.py"], files(write(2))["mine.py"]
    with pytest.raises(
        RunError, match=rf"another version of the method \(mine.py was {before} and is {now} now\)"
    ) as e:
        resume(tmp_path / "run")
    assert "commit" not in str(e.value) and "put the earlier file back" in str(e.value)
    write(1)
    assert resume(tmp_path / "run")["method_files"] == {"mine.py": before}


def test_an_export_says_that_the_method_has_changed(write, tmp_path):
    run(RunConfig.create(method=write(), **SETTINGS), out=tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_run(tmp_path / "run")
    write(2)
    with pytest.warns(UserWarning, match=r"has changed since \(mine.py was .*\); the export has the run's weights and"):
        export_run(tmp_path / "run", overwrite=True)


def sweep(name: str, seeds: int, out) -> None:
    run_grid(
        grid_cells({"seed": tuple(range(seeds))}, {}, RunConfig.create(method=name, **SETTINGS)),
        out,
        say=lambda _: None,
    )


def test_a_sweep_refuses_to_mix_versions(write, tmp_path, monkeypatch):
    """Two finished seeds, an edit, and one seed more."""
    out, name = tmp_path / "sweep", write()
    base = RunConfig.create(method=name, **SETTINGS)
    for cell in scheduler.with_fingerprints(grid_cells({"seed": (0, 1)}, {}, base), scheduler.Place()):
        run(cell.config, out=out / cell.name)
    before, now = files(name)["mine.py"], files(write(2))["mine.py"]
    monkeypatch.setattr(scheduler._Sweep, "_engine", lambda self, logs, lock: pytest.fail("nothing starts"))
    with pytest.raises(RunError) as error:
        sweep(name, 3, out)
    assert str(error.value) == (
        f"{out / 'seed-0'} holds a run of another version of its method (mine.py was {before} and is {now} now); put"
        " the earlier file back, choose another --out, or delete the folders of its runs to repeat them"
    )


def test_a_report_keeps_versions_apart_and_says_so(write, tmp_path):
    for number, scale in enumerate((1, 1, 2)):
        config = RunConfig.create(method=write(scale), **SETTINGS, seed=number)
        run(config, out=tmp_path / "runs" / str(number))
    runs, _ = read_folders([tmp_path / "runs"])
    groups, skipped = group_runs(runs)
    assert [len(group.runs) for group in groups] in ([2, 1], [1, 2]) and not skipped
    versions = [run.row["method_version"] for run in runs]
    assert versions[0] == versions[1] != versions[2]
    assert {group.label for group in groups} == {f"mine.py:Mine, method_version={v}" for v in versions}
    (warning,) = check_comparable([run.row for run in runs])
    folders = [str(tmp_path / "runs" / str(number)) for number in range(3)]
    assert warning == (
        f"the version of method '{config.method}' differs: {versions[0]} ({folders[0]}, {folders[1]}), {versions[2]}"
        f" ({folders[2]})"
    )


def test_a_study_is_not_continued_with_another_version(write, tmp_path):
    def study():
        base = dataclasses.replace(RunConfig.create(method=write(scale), **SETTINGS))
        return tune_module._Tuning(base, {}, (0,), 1, tune_module.SweepFolder(tmp_path), tune_module.Place(1), print)

    scale = 1
    first = study()
    first.together = 1  # as its plan says
    plan = {"threads": 1, "measured": {}, **first.described()}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    study()
    scale = 2
    with pytest.raises(RunError, match=r"has other method files \(mine.py is '[0-9a-f]{16}' there and"):
        study()


def test_an_edit_while_a_sweep_runs_is_found(write, tmp_path, monkeypatch):
    """A run that a worker began after the edit."""
    name = write()
    config = RunConfig.create(method=name, **SETTINGS)
    (cell,) = scheduler.with_fingerprints(grid_cells({"seed": (0,)}, {}, config), scheduler.Place())
    folder = scheduler.SweepFolder(tmp_path / "sweep")
    run(cell.config, out=folder.run(cell.name))
    assert folder.finished(cell)["config"] == cell.config.to_json()
    results = folder.run(cell.name) / "results.json"
    results.write_text(results.read_text().replace(files(name)["mine.py"], "0" * 16))
    with pytest.raises(
        RunError, match=r"seed-0 holds a run of another version .* \(mine.py was 0000000000000000 and is"
    ):
        folder.finished(cell)
    shutil.rmtree(folder.path)
