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
SMALL = {"stream.tasks": 2, "width": 1, "memory": 64, "device": "cpu"}
NO_ROOM = {"event": "failed", "error": "no room"}


def seeds(count, **changes):
    return grid_cells({"seed": range(count)}, {**CHANGES, **changes})


def save_stream(path, seed):
    labels = np.arange(16) % 4
    images = np.random.default_rng(seed).integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)


class Sweeps:
    """Sweeps in a folder, each with an engine of its own; ``made``, ``said``: the last one's."""

    def __init__(self, folder, engine):
        self.folder, self.engine = folder, engine

    def __call__(self, cells=None, place=None, script=None, cost=None, **more):
        self.made, self.said = self.engine(script, cost), []
        return run_grid(cells or seeds(3), self.folder, place, say=self.said.append, **more)

    @property
    def started(self):
        return [command["cell"] for command in self.made.runs]

    @property
    def plan(self):
        return json.loads((self.folder / "sweep.json").read_text())


@pytest.fixture
def sweep(tmp_path, engine):
    return Sweeps(tmp_path / "s", engine)


def test_a_dry_run_writes_nothing_and_all_cells_run_once_and_end_in_the_table(sweep):
    outcome = sweep(dry_run=True)
    assert outcome.table is None and sweep.started == [] and not sweep.folder.exists()
    assert re.search(r"only the seed varies +3 +3 +1:00 +1\.0 GB", sweep.said[1])
    outcome = sweep()
    assert sweep.started == ["seed-0", "seed-1", "seed-2"] and sweep.made.closed
    assert outcome.failures == () and outcome.table["seed"].tolist() == [0, 1, 2]
    assert "3 of 3 runs to do: 3:00 of computing" in sweep.said[1]
    assert sweep.said[-1].startswith("3 of 3 runs done, 0 failed")
    config = RunConfig.load(sweep.folder / "configs" / "seed-2.json")
    assert config == RunConfig.create(stream={"limit_per_task": 20}, width=1, memory=64, device="cpu", seed=2)


def test_finished_cells_are_skipped_and_a_grown_grid_adds_to_them(sweep):
    sweep()
    (sweep.folder / STORE).unlink()  # killed before the row was written
    outcome = sweep(seeds(4))
    assert sweep.started == ["seed-3"]
    assert outcome.table["seed"].tolist() == [0, 1, 2, 3]
    # What ran before says how long the next takes: nothing was measured.
    assert len(sweep.made.commands) == 1


def test_a_failed_cell_is_tried_once_more_then_reported_and_the_others_go_on(sweep, capsys):
    def log_and_fail(command):
        with open(command["log"], "a") as log:
            log.write("".join(f"line {i}\n" for i in range(30)))
        return {"event": "failed", "error": "the loss is not finite"}

    outcome = sweep(script={"seed-0": [NO_ROOM], "seed-1": [log_and_fail, log_and_fail]})
    assert sweep.started == ["seed-0", "seed-1", "seed-2", "seed-0", "seed-1"]
    assert [command["afresh"] for command in sweep.made.runs] == [False] * 5
    assert outcome.table["seed"].tolist() == [0, 2]
    (failure,) = outcome.failures
    assert failure.reason == "the loss is not finite"
    assert failure.log.splitlines() == [f"line {i}" for i in range(15, 30)]
    run = f"mose-fast run --config {sweep.folder}/configs/seed-1.json --out {sweep.folder}/seed-1 --overwrite"
    assert failure.command == f"OMP_NUM_THREADS={sweep.plan['threads']} {run}"
    assert failure.command in capsys.readouterr().err


def test_a_cell_that_fails_from_its_checkpoint_starts_afresh(sweep):
    sweep(script={"seed-0": [NO_ROOM] * 2})
    outcome = sweep(script={"seed-0": [{"event": "failed", "error": "damaged checkpoint"}]})
    assert [command["afresh"] for command in sweep.made.runs] == [False, True]
    assert len(outcome.table) == 3


def test_a_killed_cell_goes_on_but_not_for_ever(sweep):
    died = {"event": "died", "signal": 9}

    def die_with_a_new_checkpoint(command):
        folder = sweep.folder / command["cell"] / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step-{len(list(folder.iterdir())):09d}.safetensors").touch()
        return died

    script = {"seed-0": [died, died], "seed-1": [died] * 9, "seed-2": [die_with_a_new_checkpoint] * 5}
    script["seed-3"] = [{"event": "stopped"}] * 4  # by somebody else's signal
    outcome = sweep(seeds(4), script=script)
    assert sorted(outcome.table["seed"]) == [0, 2, 3]
    (failure,) = outcome.failures
    assert failure.name == "seed-1" and "killed by signal 9 3 times" in failure.reason
    assert sweep.started.count("seed-2") == 6 and sweep.started.count("seed-3") == 5
    assert not any(command["afresh"] for command in sweep.made.runs) and not sweep.made.stopped


@pytest.mark.usefixtures("signals_act")
@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGHUP, 2)])
@pytest.mark.parametrize("ending", [{"event": "stopped"}, {"event": "died", "signal": 2}])
def test_a_signal_stops_the_runs_and_the_same_call_goes_on(sweep, number, times, ending):
    def interrupt(command):
        for _ in range(times):  # a job's processes pass it on to each other
            os.kill(os.getpid(), number)
        return ending

    with pytest.raises(Interrupted) as error:
        sweep(script={"seed-0": [interrupt], "seed-1": [{"event": "stopped"}]})
    assert error.value.number == number
    assert sweep.made.stopped and sweep.made.closed and sweep.started == ["seed-0", "seed-1"]
    assert len(sweep().table) == 3


def test_damaged_folders_are_left_and_named_and_the_others_run(sweep):
    sweep()
    (sweep.folder / "seed-1" / "results.json").write_text("{")
    (sweep.folder / "seed-2" / "config.json").write_text("{")
    outcome = sweep(seeds(4))
    assert sweep.started == ["seed-3"]
    assert [failure.name for failure in outcome.failures] == ["seed-1", "seed-2"]
    assert all("Delete the folder to run it again" in failure.reason for failure in outcome.failures)
    assert (sweep.folder / "seed-1" / "results.json").read_text() == "{"


def test_a_larger_grid_knows_what_a_smaller_one_has_done(sweep):
    def grid(values):
        return grid_cells(axes_of(values, ["mose"], "grid"), CHANGES)

    sweep(grid({"temperature": [0.07], "seed": [0, 1]}))
    outcome = sweep(grid({"temperature": [0.07, 0.2], "lr": [0.001, 0.01], "seed": [0, 1]}))
    assert len(sweep.started) == 6  # of eight: the preset's lr is 0.001
    assert len(outcome.table) == 8 and outcome.table["config"].nunique() == 8
    assert outcome.folders["temperature-0.07_lr-0.001_seed-1"] == "temperature-0.07_seed-1"
    assert not (sweep.folder / "temperature-0.07_lr-0.001_seed-1").exists()
    assert len(sweep(grid({"temperature": [0.07], "seed": [0, 1]})).table) == 2 and sweep.started == []


def test_a_larger_grid_of_streams_with_the_same_name(tmp_path, sweep):
    for number, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        save_stream(tmp_path / name / "data.npz", number)

    def grid(names):
        files = tuple(str(tmp_path / name / "data.npz") for name in names)
        return grid_cells({"stream.name": files, "seed": (0,)}, SMALL)

    sweep(grid("bc"))
    table = sweep(grid("abc")).table
    assert len(sweep.started) == 1
    assert sorted(table["stream"]) == [str(tmp_path / name / "data.npz") for name in "abc"]
    assert table["folder"].nunique() == 3
    assert sweep(grid("cab")).table.equals(table) and sweep.started == []


def test_changed_data_are_refused_by_name(tmp_path, sweep):
    data = tmp_path / "data.npz"
    save_stream(data, 0)
    cells = grid_cells({"seed": (0, 1)}, {**SMALL, "stream.name": str(data)})
    fingerprint = sweep(cells).table["data"][0]
    assert sweep.plan["data"] == {str(data): fingerprint}
    save_stream(data, 1)
    message = f"seed-0 holds a run on other data: the fingerprint of stream '{data}' was {fingerprint}"
    with pytest.raises(RunError, match=message):
        sweep(cells)
    assert sweep.made.commands == []


def test_a_run_of_another_version_of_its_method_is_given_up(sweep, monkeypatch):
    """As if the method's file had been edited while the sweep ran."""
    monkeypatch.setattr("mose_fast.experiments.folder.method_files", lambda learner: {"mine.py": "0" * 16})
    outcome = sweep(seeds(1))
    assert len(outcome.table) == 0 and "(mine.py was absent and is 0000000000000000 now)" in outcome.failures[0].reason


@pytest.mark.parametrize("name", ["sweep.json", "configs/seed-0.json"])
def test_files_that_no_sweep_wrote_are_not_replaced(sweep, name):
    file = sweep.folder / name
    file.parent.mkdir(parents=True)
    file.write_text('{"mine": 1}')
    with pytest.raises(RunError, match=f"{file} is .* would be replaced; choose another --out"):
        sweep()
    assert file.read_text() == '{"mine": 1}' and sweep.made.commands == []


def test_what_a_killed_sweep_had_half_written_is_tidied(sweep):
    (sweep.folder / "configs").mkdir(parents=True)
    left = (".sweep.json.ab0_xyz9", "configs/.seed-0.json.ab0_xyz9", ".runs.sqlite.ab0_xyz9")
    mine = ".sweep.json.backup"
    for name in (*left, mine):
        (sweep.folder / name).touch()
    sweep()
    assert [name for name in (*left, mine) if (sweep.folder / name).exists()] == [mine]


def test_a_folder_with_other_settings_is_refused_before_anything_starts(sweep):
    sweep()
    with pytest.raises(RunError, match=r"seed-0 holds a run with other settings \(width is 1 there and 2 here\)"):
        sweep(seeds(1, width=2))
    assert sweep.made.commands == []


def test_more_runs_than_the_memory_holds_are_refused_or_not_started(sweep, monkeypatch):
    monkeypatch.setattr("mose_fast.experiments.place.usable_cores", lambda: 2)
    monkeypatch.setattr(experiment, "available_bytes", lambda: 15 * 10**8)
    message = r"2 runs at a time need 2\.0 GB of memory, and 1\.5 GB are free; wanted at most 1"
    with pytest.raises(ConfigError, match=message):
        sweep(place=Place(workers=2))
    with pytest.raises(ConfigError, match="wanted at most 0"):
        sweep(cost=Cost(1.0, 2 * 10**9, None))
    sweep()
    assert sweep.plan["workers"] == 1


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": 10**6}, "wanted at most .* the number of cores here"),
        ({"per_gpu": 2}, "per_gpu is 2, but the runs compute on the CPU"),
        ({"engine": "slurm"}, "engine is 'slurm'; wanted 'local' or 'ray'"),
    ],
)
def test_unusable_places(tmp_path, place, message):
    with pytest.raises(ConfigError, match=message):
        run_grid(seeds(1), tmp_path / "s", Place(**place))


def test_unusable_settings_start_nothing(tmp_path, sweep, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "nvidia.dali", None)
        with pytest.raises(ConfigError, match="feed is 'dali', but DALI is not installed"):
            sweep(seeds(1, feed="dali"))
    with pytest.raises(ConfigError, match=r"cuda:0.*wanted cuda in a sweep"):
        sweep(seeds(1, device="cuda:0"))
    with pytest.raises(mose_fast.StreamError, match="did you mean 'digits'"):
        sweep(grid_cells({"stream.name": ("digits", "digist")}, CHANGES))
    assert sweep.made.commands == [] and not sweep.folder.exists()
    (tmp_path / "s").touch()
    with pytest.raises(RunError, match="cannot write into the sweep's folder"):
        sweep()


@pytest.mark.parametrize(("alone", "threads"), [(5.0, 1), (15.0, 2)])
def test_runs_have_several_threads_only_where_these_are_faster(sweep, monkeypatch, alone, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("mose_fast.experiments.place.usable_cores", lambda: 2)
    measured = []

    def costs(configs, engine, budget=None):
        measured.append(sorted(config.method for config in configs.values()))
        seconds = 10.0 if len(measured) == 1 else alone
        return {key: Cost(seconds, 10**9, None) for key in configs}

    for module in (experiment, scheduler):
        monkeypatch.setattr(module, "measured_costs", costs)
    sweep(grid_cells({"method": ("er", "mose", "finetune")}, CHANGES), Place(workers=1))
    assert measured == [["mose"], ["mose"], ["er", "finetune"]] and len(sweep.started) == 3
    assert (sweep.plan["workers"], sweep.plan["threads"]) == (1, threads)
    assert ("each run has one thread: here that is 2.0 times as fast as 2" in sweep.said) == (threads == 1)

    # Continued: the remaining runs have as many threads as the first.
    sweep(grid_cells({"method": ("er", "mose", "gdumb")}, CHANGES), Place(workers=1))
    assert measured[3:] == [["gdumb"]] and sweep.plan["threads"] == threads


def test_a_full_disk_for_the_table_alone_loses_no_run(sweep, monkeypatch, capsys):
    add, rooms = experiment.Store.add, iter([True, False, False, True, True])

    def full(self, *rows):
        if not next(rooms):
            raise RunError("cannot write the table of runs: database or disk is full")
        add(self, *rows)

    monkeypatch.setattr(experiment.Store, "add", full)
    assert len(sweep().table) == 3
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


def test_what_cannot_be_measured_in_time_is_estimated_from_the_most_similar_run(sweep):
    axes = {"method": ("scr", "gdumb", "er"), "memory": (64, 128), "epochs": (1, 3)}
    cells = grid_cells(axes, {"width": 1, "device": "cpu"})
    forecast = sweep(cells, dry_run=True, measure_for=0.0).forecast
    # One is measured in any case: ER, one epoch, 60 seconds of it.
    assert json.loads(sweep.made.commands[0]["cell"])["method"] == "er"
    assert "measured 1 of 12 settings" in sweep.said[1]
    declared = {"er": 1, "scr": 2, "gdumb": find_method("gdumb").about.cost}
    for cell in forecast.cells:
        cost, config = forecast.costs[cell.name], cell.config
        assert cost.seconds == pytest.approx(60.0 * declared[config.method] * config.epochs)
        measured = (config.method, config.memory, config.epochs) == ("er", 64, 1)
        assert cost.source == ("measured" if measured else "estimated")
    # With time enough, one of each method comes first, and all are measured.
    forecast = sweep(cells, dry_run=True, measure_for=600.0).forecast
    measured = [json.loads(command["cell"]) for command in sweep.made.commands]
    assert [(values["method"], values["epochs"]) for values in measured[:3]] == [("er", 1), ("gdumb", 1), ("scr", 1)]
    costs = [declared[values["method"]] * values["epochs"] for values in measured[3:]]
    assert costs == sorted(costs) and len(costs) == 9
    assert {cost.source for cost in forecast.costs.values()} == {"measured"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_table_is_drawn_in_a_terminal(sweep, monkeypatch):
    monkeypatch.setattr(display, "_EVERY", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    sweep()
    shown = sys.stderr.getvalue()
    running = (
        r"0 done, \d running, 0 failed, \d waiting; 0:00 gone, about \d:\d\d left\n  seed-0   50 % \[#{10} {10}\]\n"
    )
    assert re.search(running, shown)
    assert "\x1b[2A\x1b[J" in shown
    assert "[3/3] done    seed-2: ACC" in shown


@pytest.mark.parametrize("what", ["task", "part"])
def test_tasks_are_counted_from_one_in_the_table(what):
    out = Terminal()
    (cell,) = seeds(1)
    record = CellRecord(cell, CellState.RUNNING, task={"task": 1, "tasks": 5, "what": what, "accuracy": 0.5})
    forecast = Forecast([cell], {}, runs=1, threads=1, available=0)
    display.Display({"seed-0": record}, forecast, out).draw()
    assert f"accuracy  50.0 after {what} 2 of 5\n" in out.getvalue()
