"""What the scheduler decides, with an engine that only pretends to compute."""

import io
import json
import os
import re
import signal
import sys

import numpy as np
import pytest

import mose_fast
from mose_fast.experiments import display, experiment
from mose_fast.experiments import sweep as scheduler
from mose_fast.experiments.cells import CellRecord, CellState
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.forecast import Forecast
from mose_fast.experiments.grid import axes_of, grid_cells
from mose_fast.experiments.place import Place
from mose_fast.experiments.step_cost import Cost
from mose_fast.experiments.sweep import run_grid
from mose_fast.methods import find_method
from mose_fast.runs.store import STORE
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.train import Interrupted, RunError

CHANGES = {"stream.limit_per_task": 20, "width": 1, "memory": 64, "device": "cpu"}
GRID = grid_cells({"seed": (0, 1, 2)}, CHANGES)
SMALL = {"stream.tasks": 2, "width": 1, "memory": 64, "device": "cpu"}


def save_stream(path, seed):
    labels = np.arange(16) % 4
    images = np.random.default_rng(seed).integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)


@pytest.fixture
def say():
    lines = []
    return lines.append


def test_all_cells_run_once_and_end_in_the_table(tmp_path, engine):
    made, said = engine(), []
    outcome = run_grid(GRID, tmp_path / "s", say=said.append)
    assert [command["cell"] for command in made.runs] == ["seed-0", "seed-1", "seed-2"]
    assert made.closed
    assert outcome.failures == ()
    assert outcome.table["seed"].tolist() == [0, 1, 2]
    assert "3 of 3 runs to do: 3:00 of computing" in said[1]
    assert said[-1].startswith("3 of 3 runs done, 0 failed")
    config = RunConfig.load(tmp_path / "s" / "configs" / "seed-2.json")
    assert config == RunConfig.create(stream={"limit_per_task": 20}, width=1, memory=64, device="cpu", seed=2)


def test_dry_run_writes_nothing(tmp_path, engine):
    made, said = engine(), []
    outcome = run_grid(GRID, tmp_path / "s", dry_run=True, say=said.append)
    assert outcome.table is None
    assert made.runs == []
    assert not (tmp_path / "s").exists()
    assert "only the seed varies" in said[1]
    assert "1:00" in said[1]
    assert "1.0 GB" in said[1]


def test_finished_cells_are_skipped_and_a_grown_grid_adds_to_them(tmp_path, engine, say):
    engine()
    run_grid(GRID, tmp_path / "s", say=say)
    (tmp_path / "s" / STORE).unlink()  # killed before the row was written
    made = engine()
    outcome = run_grid(grid_cells({"seed": (0, 1, 2, 3)}, CHANGES), tmp_path / "s", say=say)
    assert [command["cell"] for command in made.runs] == ["seed-3"]
    assert outcome.table["seed"].tolist() == [0, 1, 2, 3]
    # What ran before says how long the next takes: nothing was measured.
    assert len(made.commands) == 1


def test_a_failed_cell_is_tried_once_more_then_reported_and_the_others_go_on(tmp_path, engine, say, capsys):
    def log_and_fail(command):
        with open(command["log"], "a") as log:
            log.write("".join(f"line {i}\n" for i in range(30)))
        return {"event": "failed", "error": "the loss is not finite"}

    made = engine({"seed-0": [{"event": "failed", "error": "no room"}], "seed-1": [log_and_fail, log_and_fail]})
    outcome = run_grid(GRID, tmp_path / "s", say=say)
    assert [command["cell"] for command in made.runs] == ["seed-0", "seed-1", "seed-2", "seed-0", "seed-1"]
    assert [command["afresh"] for command in made.runs] == [False] * 5
    assert outcome.table["seed"].tolist() == [0, 2]
    (failure,) = outcome.failures
    assert failure.reason == "the loss is not finite"
    assert failure.log.splitlines()[-1] == "line 29"
    assert len(failure.log.splitlines()) == 15
    folder = tmp_path / "s"
    threads = json.loads((folder / "sweep.json").read_text())["threads"]
    run = f"mose-fast run --config {folder}/configs/seed-1.json --out {folder}/seed-1 --overwrite"
    assert failure.command == f"OMP_NUM_THREADS={threads} {run}"
    assert failure.command in capsys.readouterr().err


def test_a_cell_that_fails_from_its_checkpoint_starts_afresh(tmp_path, engine, say):
    engine({"seed-0": [{"event": "failed", "error": "no room"}] * 2})
    run_grid(GRID, tmp_path / "s", say=say)
    made = engine({"seed-0": [{"event": "failed", "error": "damaged checkpoint"}]})
    outcome = run_grid(GRID, tmp_path / "s", say=say)
    assert [command["afresh"] for command in made.runs] == [False, True]
    assert len(outcome.table) == 3


def test_a_killed_cell_goes_on_but_not_for_ever(tmp_path, engine, say):
    died = {"event": "died", "signal": 9}

    def die_with_a_new_checkpoint(command):
        folder = SweepFolder(command["out"]).path / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step-{len(list(folder.iterdir())):09d}.safetensors").touch()
        return died

    script = {"seed-0": [died, died], "seed-1": [died] * 9, "seed-2": [die_with_a_new_checkpoint] * 5}
    made = engine({**script, "seed-3": [{"event": "stopped"}] * 4})  # by somebody else's signal
    outcome = run_grid(grid_cells({"seed": range(4)}, CHANGES), tmp_path / "s", say=say)
    assert sorted(outcome.table["seed"]) == [0, 2, 3]
    (failure,) = outcome.failures
    assert failure.name == "seed-1"
    assert "killed by signal 9 3 times" in failure.reason
    started = [command["cell"] for command in made.runs]
    assert started.count("seed-2") == 6 and started.count("seed-3") == 5
    assert not any(command["afresh"] for command in made.runs) and not made.stopped


@pytest.mark.usefixtures("signals_act")
@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGHUP, 2)])
@pytest.mark.parametrize("ending", [{"event": "stopped"}, {"event": "died", "signal": 2}])
def test_a_signal_stops_the_runs_and_the_same_call_goes_on(tmp_path, engine, say, number, times, ending):
    def interrupt(command):
        for _ in range(times):  # a job's processes pass it on to each other
            os.kill(os.getpid(), number)
        return ending

    made = engine({"seed-0": [interrupt], "seed-1": [{"event": "stopped"}]})
    with pytest.raises(Interrupted) as error:
        run_grid(GRID, tmp_path / "s", say=say)
    assert error.value.number == number
    assert made.stopped and made.closed
    assert [command["cell"] for command in made.runs] == ["seed-0", "seed-1"]
    engine()
    assert len(run_grid(GRID, tmp_path / "s", say=say).table) == 3


def test_damaged_folders_are_left_and_named_and_the_others_run(tmp_path, engine, say):
    engine()
    run_grid(GRID, tmp_path / "s", say=say)
    (tmp_path / "s" / "seed-1" / "results.json").write_text("{")
    (tmp_path / "s" / "seed-2" / "config.json").write_text("{")
    made = engine()
    outcome = run_grid(grid_cells({"seed": (0, 1, 2, 3)}, CHANGES), tmp_path / "s", say=say)
    assert [command["cell"] for command in made.runs] == ["seed-3"]
    assert [failure.name for failure in outcome.failures] == ["seed-1", "seed-2"]
    assert all("Delete the folder to run it again" in failure.reason for failure in outcome.failures)
    assert (tmp_path / "s" / "seed-1" / "results.json").read_text() == "{"


def test_a_larger_grid_knows_what_a_smaller_one_has_done(tmp_path, engine, say):
    def sweep(values):
        made = engine()
        return run_grid(grid_cells(axes_of(values, ["mose"], "grid"), CHANGES), tmp_path / "s", say=say), made.runs

    sweep({"temperature": [0.07], "seed": [0, 1]})
    outcome, runs = sweep({"temperature": [0.07, 0.2], "lr": [0.001, 0.01], "seed": [0, 1]})
    assert len(runs) == 6  # of eight: the preset's lr is 0.001
    assert len(outcome.table) == 8
    assert outcome.folders["temperature-0.07_lr-0.001_seed-1"] == "temperature-0.07_seed-1"
    assert not (tmp_path / "s" / "temperature-0.07_lr-0.001_seed-1").exists()
    assert outcome.table["config"].nunique() == 8
    outcome, runs = sweep({"temperature": [0.07], "seed": [0, 1]})
    assert len(outcome.table) == 2 and runs == []


def test_a_larger_grid_of_streams_with_the_same_name(tmp_path, engine, say):
    for number, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        save_stream(tmp_path / name / "data.npz", number)

    def sweep(names):
        made, files = engine(), tuple(str(tmp_path / name / "data.npz") for name in names)
        cells = grid_cells({"stream.name": files, "seed": (0,)}, SMALL)
        return run_grid(cells, tmp_path / "s", say=say).table, made.runs

    sweep("bc")
    table, runs = sweep("abc")
    assert len(runs) == 1
    assert sorted(table["stream"]) == [str(tmp_path / name / "data.npz") for name in "abc"]
    assert table["folder"].nunique() == 3
    again, runs = sweep("cab")
    assert again.equals(table) and runs == []


def test_changed_data_are_refused_by_name(tmp_path, engine, say):
    data = tmp_path / "data.npz"
    save_stream(data, 0)
    grid = grid_cells({"seed": (0, 1)}, {**SMALL, "stream.name": str(data)})
    engine()
    table = run_grid(grid, tmp_path / "s", say=say).table
    plan = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert plan["data"] == {str(data): table["data"][0]}
    save_stream(data, 1)
    made = engine()
    with pytest.raises(
        RunError, match=f"seed-0 holds a run on other data: the fingerprint of stream '{data}' was {table['data'][0]}"
    ):
        run_grid(grid_cells({"seed": (0, 1, 2)}, {**SMALL, "stream.name": str(data)}), tmp_path / "s", say=say)
    assert made.commands == []


def test_a_run_of_another_version_of_its_method_is_given_up(tmp_path, engine, say, monkeypatch):
    """As if the method's file had been edited while the sweep ran."""
    engine()
    monkeypatch.setattr("mose_fast.experiments.folder.method_files", lambda learner: {"mine.py": "0" * 16})
    outcome = run_grid(grid_cells({"seed": (0,)}, CHANGES), tmp_path / "s", say=say)
    assert len(outcome.table) == 0 and "(mine.py was absent and is 0000000000000000 now)" in outcome.failures[0].reason


@pytest.mark.parametrize("name", ["sweep.json", "configs/seed-0.json"])
def test_files_that_no_sweep_wrote_are_not_replaced(tmp_path, engine, say, name):
    file = tmp_path / "s" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"mine": 1}')
    made = engine()
    with pytest.raises(RunError, match=f"{file} is .* would be replaced; choose another --out"):
        run_grid(GRID, tmp_path / "s", say=say)
    assert file.read_text() == '{"mine": 1}'
    assert made.commands == []


def test_what_a_killed_sweep_had_half_written_is_tidied(tmp_path, engine, say):
    (tmp_path / "s" / "configs").mkdir(parents=True)
    left = (".sweep.json.ab0_xyz9", "configs/.seed-0.json.ab0_xyz9", ".runs.sqlite.ab0_xyz9")
    mine = ".sweep.json.backup"
    for name in (*left, mine):
        (tmp_path / "s" / name).touch()
    engine()
    run_grid(GRID, tmp_path / "s", say=say)
    assert [name for name in (*left, mine) if (tmp_path / "s" / name).exists()] == [mine]


def test_a_folder_with_other_settings_is_refused_before_anything_starts(tmp_path, engine, say):
    engine()
    run_grid(GRID, tmp_path / "s", say=say)
    made = engine()
    with pytest.raises(RunError, match=r"seed-0 holds a run with other settings \(width is 1 there and 2 here\)"):
        run_grid(grid_cells({"seed": (0,)}, {**CHANGES, "width": 2}), tmp_path / "s", say=say)
    assert made.commands == []


def test_more_runs_than_the_memory_holds_are_refused_or_not_started(tmp_path, engine, say, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core has room for one worker only")
    monkeypatch.setattr(experiment, "available_bytes", lambda: 15 * 10**8)
    engine()
    message = r"2 runs at a time need 2\.0 GB of memory, and 1\.5 GB are free; wanted at most 1"
    with pytest.raises(ConfigError, match=message):
        run_grid(GRID, tmp_path / "s", Place(workers=2), say=say)
    run_grid(GRID, tmp_path / "s", say=say)
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["workers"] == 1
    engine(cost=Cost(1.0, 2 * 10**9, None))
    with pytest.raises(ConfigError, match="wanted at most 0"):
        run_grid(grid_cells({"seed": (0,)}, {**CHANGES, "width": 2}), tmp_path / "t", say=say)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": 10**6}, "wanted at most .* the number of cores here"),
        ({"per_gpu": 2}, "per_gpu is 2, but the runs compute on the CPU"),
        ({"engine": "slurm"}, "engine is 'slurm'; wanted 'local' or 'ray'"),
    ],
)
def test_unusable_places(tmp_path, engine, say, place, message):
    made = engine()
    with pytest.raises(ConfigError, match=message):
        run_grid(GRID, tmp_path / "s", Place(**place), say=say)
    assert made.commands == []


def test_unusable_settings_start_nothing(tmp_path, engine, say, monkeypatch):
    made = engine()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "nvidia.dali", None)
        with pytest.raises(ConfigError, match="feed is 'dali', but DALI is not installed"):
            run_grid(grid_cells({"seed": (0,)}, {**CHANGES, "feed": "dali"}), tmp_path / "s", say=say)
    with pytest.raises(ConfigError, match=r"cuda:0.*wanted cuda in a sweep"):
        run_grid(grid_cells({"seed": (0,)}, {**CHANGES, "device": "cuda:0"}), tmp_path / "s", say=say)
    with pytest.raises(mose_fast.StreamError, match="did you mean 'digits'"):
        run_grid(grid_cells({"stream.name": ("digits", "digist")}, CHANGES), tmp_path / "s", say=say)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write into the sweep's folder"):
        run_grid(GRID, tmp_path / "file" / "s", say=say)
    assert made.commands == []
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("alone", "threads"), [(5.0, 1), (15.0, 2)])
def test_runs_have_several_threads_only_where_these_are_faster(tmp_path, engine, monkeypatch, alone, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("mose_fast.experiments.place.usable_cores", lambda: 2)
    made, said, measured = engine(), [], []

    def costs(configs, engine, budget=None):
        measured.append(sorted(config.method for config in configs.values()))
        seconds = 10.0 if len(measured) == 1 else alone
        return {key: Cost(seconds, 10**9, None) for key in configs}

    for module in (experiment, scheduler):
        monkeypatch.setattr(module, "measured_costs", costs)
    grid = grid_cells({"method": ("er", "mose", "finetune")}, CHANGES)
    run_grid(grid, tmp_path / "s", Place(workers=1), say=said.append)
    assert measured == [["mose"], ["mose"], ["er", "finetune"]] and len(made.runs) == 3
    plan = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert (plan["workers"], plan["threads"]) == (1, threads)
    assert ("each run has one thread: here that is 2.0 times as fast as 2" in said) == (threads == 1)

    # Continued: the remaining runs have as many threads as the first.
    run_grid(
        grid_cells({"method": ("er", "mose", "gdumb")}, CHANGES), tmp_path / "s", Place(workers=1), say=said.append
    )
    assert measured[3:] == [["gdumb"]]
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["threads"] == threads


def test_a_full_disk_for_the_table_alone_loses_no_run(tmp_path, engine, say, monkeypatch, capsys):
    engine()

    add, rooms = experiment.Store.add, iter([True, False, False, True, True])

    def full(self, *rows):
        if not next(rooms):
            raise RunError("cannot write the table of runs: database or disk is full")
        add(self, *rows)

    monkeypatch.setattr(experiment.Store, "add", full)
    outcome = run_grid(GRID, tmp_path / "s", say=say)
    assert len(outcome.table) == 3
    assert "disk is full" in capsys.readouterr().err


def test_python_call_gives_a_data_frame_with_the_grid_in_it(tmp_path, engine, capsys):
    engine({"student-2_seed-1": [{"event": "failed", "error": "broken"}] * 2})
    with pytest.warns(UserWarning, match="failed: student-2_seed-1: broken"):
        table = mose_fast.run_sweep(
            {"student": [2, 4], "seed": range(2)},
            out=tmp_path / "s",
            stream={"limit_per_task": 20},
            width=1,
            memory=64,
            device="cpu",
        )
    assert table["student"].tolist() == [2, 4, 4]
    assert table["seed"].tolist() == [0, 0, 1]
    assert table["stream"].tolist() == ["digits"] * 3


def test_what_cannot_be_measured_in_time_is_estimated_from_the_most_similar_run(tmp_path, engine):
    made, said = engine(), []
    grid = grid_cells(
        {"method": ("scr", "gdumb", "er"), "memory": (64, 128), "epochs": (1, 3)}, {"width": 1, "device": "cpu"}
    )
    outcome = run_grid(grid, tmp_path / "s", dry_run=True, measure_for=0.0, say=said.append)
    # One is measured in any case: ER, one epoch, 60 seconds of it.
    assert json.loads(made.commands[0]["cell"])["method"] == "er"
    assert "measured 1 of 12 settings" in said[1]
    costs = {
        (cell.config.method, cell.config.memory, cell.config.epochs): outcome.forecast.costs[cell.name]
        for cell in outcome.forecast.cells
    }
    assert costs["er", 64, 1].source == "measured"
    gdumb = find_method("gdumb").about.cost
    for (method, memory, epochs), cost in costs.items():
        assert cost.seconds == pytest.approx(60.0 * {"er": 1, "scr": 2, "gdumb": gdumb}[method] * epochs)
        assert cost.source == ("measured" if (method, memory, epochs) == ("er", 64, 1) else "estimated")
    # With time enough, one of each method comes first, and all are measured.
    made = engine()
    outcome = run_grid(grid, tmp_path / "s", dry_run=True, measure_for=600.0, say=said.append)
    measured = [json.loads(command["cell"]) for command in made.commands]
    assert [(values["method"], values["epochs"]) for values in measured[:3]] == [("er", 1), ("gdumb", 1), ("scr", 1)]
    declared = [find_method(values["method"]).about.cost * values["epochs"] for values in measured[3:]]
    assert declared == sorted(declared) and len(declared) == 9
    assert {cost.source for cost in outcome.forecast.costs.values()} == {"measured"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_table_is_drawn_in_a_terminal(tmp_path, engine, say, monkeypatch):
    engine()
    monkeypatch.setattr(display, "_EVERY", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    run_grid(GRID, tmp_path / "s", say=say)
    shown = sys.stderr.getvalue()
    assert re.search(
        r"0 done, \d running, 0 failed, \d waiting; 0:00 gone, about \d:\d\d left\n  seed-0   50 % \[#{10} {10}\]\n",
        shown,
    )
    assert "\x1b[2A\x1b[J" in shown
    assert "[3/3] done    seed-2: ACC" in shown


@pytest.mark.parametrize("what", ["task", "part"])
def test_tasks_are_counted_from_one_in_the_table(what):
    out = Terminal()
    (cell,) = grid_cells({"seed": (0,)}, CHANGES)
    record = CellRecord(cell, CellState.RUNNING, task={"task": 1, "tasks": 5, "what": what, "accuracy": 0.5})
    forecast = Forecast([cell], {}, runs=1, threads=1, available=0)
    display.Display({"seed-0": record}, forecast, out).draw()
    assert f"accuracy  50.0 after {what} 2 of 5\n" in out.getvalue()
