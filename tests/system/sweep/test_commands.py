"""The commands sweep and collect, and the page that describes them."""

import json
import re

from mose_fast.app.cli import main
from mose_fast.experiments.grid import axes_of, grid_cells, read_file
from mose_fast.runs.store import read_store
from mose_fast.settings.run import RunConfig
from mose_fast.train import Interrupted
from tests.help_text import flags_of
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "sweeps.md").read_text()
RUN = ["sweep", "--width", "1", "--memory", "64", "--limit-per-task", "20", "--device", "cpu"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_sweep_and_collect(tmp_path, engine, capsys):
    engine()
    out = tmp_path / "s"
    assert main([*RUN, "--grid", "preset=released,paper", "--seeds", "0-1", "--set", "lr=0.01", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"preset=released +2 +2 +1:00 +1\.0 GB  \(measured\)", told)
    assert str(out / "runs.sqlite") in told
    config = RunConfig.load(out / "preset-paper_seed-1" / "config.json")
    assert config == RunConfig.create(
        "paper", stream={"limit_per_task": 20}, options={"lr": 0.01}, width=1, memory=64, device="cpu", seed=1
    )
    listed = re.search(r"^## What a sweep writes\n\n    runs/first/\n((?:      .*\n)+)", PAGE, re.MULTILINE)[1]
    names = [re.match(r" {6}(\S+?)/? {2,}\S", line)[1] for line in listed.splitlines()]
    runs, others = names[0], names[1:]
    assert runs == grid_cells({"memory": (200,), "preset": ("released",), "seed": (0,)}, {})[0].name
    written = {path.name for path in out.iterdir() if not path.name.startswith((".", "preset-"))}
    assert {*others} == written | {"logs", "configs"}
    (out / "preset-paper_seed-1" / "results.json").write_text("{")
    assert main(["collect", str(out)]) == 0
    told = capsys.readouterr()
    assert "3 runs in" in told.out
    assert "1 folders skipped" in told.out
    assert told.err.startswith(f"skipped: {out / 'preset-paper_seed-1'}: ")


def test_runs_of_other_code_and_machines_are_told(tmp_path, engine, capsys):
    engine()
    sweep = [*RUN, "--seeds", "0-1", "--out", str(tmp_path / "s")]
    assert main(sweep) == 0 and "caution" not in capsys.readouterr().err
    results = tmp_path / "s" / "seed-0" / "results.json"
    values = json.loads(results.read_text())
    commit, values["code"], values["resolved"]["kernels"] = values["commit"], "0" * 16, "fused"
    results.write_text(json.dumps(values))
    for command in (sweep, ["collect", str(tmp_path / "s")]):
        assert main(command) == 0
        told = capsys.readouterr().err
        assert "mose-fast: caution: the kind of kernels differs: fused (seed-0), torch (seed-1)" in told
        assert re.search(
            rf"caution: the code of mose-fast differs: .*{commit[:12]}.*, code 00000000 \(seed-0\), ", told
        )


def test_exit_codes(tmp_path, engine, capsys, monkeypatch):
    failed = {"event": "failed", "error": "broken"}
    engine({"seed-0": [failed, failed]})
    assert main([*RUN, "--seeds", "0-1", "--out", str(tmp_path / "a")]) == 1
    assert "failed: seed-0: broken" in capsys.readouterr().out
    for more, message in (
        (["--grid", "memroy=64"], "--grid memroy is not a setting; did you mean 'memory'"),
        ([], "the grid is empty"),
        (["--grid", "seed=1,2", "--seeds", "0-1"], "--seeds and a grid over seed are both given"),
    ):
        assert main([*RUN, *more, "--out", str(tmp_path / "b")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "b").exists()

    def interrupted(*args, **settings):
        raise Interrupted

    monkeypatch.setattr("mose_fast.experiments.sweep.run_grid", interrupted)
    assert main([*RUN, "--seeds", "0", "--out", str(tmp_path / "c")]) == 130
    assert "; to continue, run the same command again" in capsys.readouterr().err


def test_page_describes_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    own = flags_of("sweep", capsys) - flags_of("run", capsys)
    assert own >= {"--grid", "--seeds", "--workers", "--per-gpu", "--gpus", "--engine", "--address", "--dry-run"}
    assert {flag for flag in own if flag not in PAGE} == set()


def test_file_on_the_page_is_the_command_on_the_page(tmp_path, engine, capsys):
    (example,) = blocks("toml")
    (tmp_path / "first.toml").write_text(example)
    values, table = read_file(tmp_path / "first.toml")
    cells = grid_cells(axes_of(table, ["mose"], "[grid]"), {}, RunConfig.from_dict(values))
    command = re.search(r"mose-fast (sweep .*) --out runs/first", PAGE)[1].split()
    engine()

    def told(out):
        """What was printed, without the folder and without the machine's free memory, which changes
        from moment to moment.
        """
        return re.sub(r"[\d.]+ GB free", "", capsys.readouterr().out.replace(str(tmp_path / out), ""))

    assert main([*command, "--dry-run", "--out", str(tmp_path / "a")]) == 0
    by_flags = told("a")
    assert main(["sweep", str(tmp_path / "first.toml"), "--dry-run", "--out", str(tmp_path / "b")]) == 0
    assert told("b") == by_flags
    assert "12 runs" in by_flags
    assert len(cells) == 12
    assert main(["sweep", str(tmp_path / "first.toml"), "--device", "cpu", "--out", str(tmp_path / "c")]) == 0
    assert set(json.loads((tmp_path / "c" / "sweep.json").read_text())["cells"]) == {cell.name for cell in cells}


def test_example_in_python(tmp_path, engine, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine()
    (example,) = blocks("python")
    exec(compile(example, "docs/sweeps.md", "exec"), {})
    told = capsys.readouterr().out
    assert re.search(r"^paper: ACC \d+\.\d \+- 0\.0, n = 3$", told, re.MULTILINE)
    assert re.search(
        r"^released .*3 common seeds\) Holm p 1\.0 released and paper have 3 seeds in common", told, re.MULTILINE
    )


def test_kinds_of_streams(tmp_path, engine, capsys):
    """They can be in a grid; a method that needs task boundaries is refused, and
    nothing is written.
    """
    engine()
    grid = ["--method", "er", "--grid", "stream.kind=tasks,imbalanced,blurry,si_blurry,task_free", "--seeds", "0"]
    assert main([*RUN, *grid, "--set", "stream.imbalance=5", "--out", str(tmp_path / "a")]) == 0
    table = read_store(tmp_path / "a")
    assert table["kind"].tolist() == [
        "blurry (disjoint 0.5, blur 0.1)",
        "imbalanced (imbalance 5)",
        "si_blurry (disjoint 0.5, blur 0.1)",
        "task_free (drift 0.05)",
        "tasks",
    ]
    capsys.readouterr()
    refused = [*RUN, "--kind", "blurry", "--grid", "method=er,ccil", "--out", str(tmp_path / "b")]
    assert main(refused) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert "method 'ccil' chooses its exemplars" in message and "a stream of kind 'blurry' has none" in message
    assert not (tmp_path / "b").exists()
