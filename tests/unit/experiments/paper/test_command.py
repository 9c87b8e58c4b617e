"""The command ``mose-fast paper``: what it plans, runs, continues and writes."""

import csv
import json
import re

import pytest

from mose_fast.app.cli import main
from mose_fast.experiments.paper.main_tables import BEYOND_PRESETS
from mose_fast.experiments.paper.pages import overview
from mose_fast.experiments.paper.plan import Plan
from mose_fast.experiments.paper.tables import TABLES
from mose_fast.runs.store import read_run
from mose_fast.settings.run import RunConfig
from tests.help_text import flags_of
from tests.paths import ROOT

PAGES = {name: ROOT / "docs" / name for name in ("paper.md", "command_line.md", "paper/README.md")}


def cells(path):
    """Rows of the CSV by (part, row, column)."""
    with path.open(encoding="utf-8") as file:
        return {(r["part"], r["row"], r["column"]): r for r in csv.DictReader(file)}


def test_notes_are_about_the_rows_that_are_there():
    def notes(*methods):
        plan = Plan("table1-cifar", (0,), methods=methods or None)
        return overview(plan).partition("\n\nBold: ")[2].partition("An accuracy passes if")[0]

    others = {"GDumb's AF": "ccil", "of ASER at M = 2k": "aser", "LUCIR's ACC": "lucir", "MOE-MOSE": "mose"}
    assert all(words in notes() for words in others)
    assert not any(words in notes("er", "scr") for words in others)
    assert "Baselines have the preset table" in notes("er", "scr") and "Baselines have" not in notes("mose")
    for words, method in others.items():
        assert words in notes(method, "scr")


@pytest.mark.slow
def test_a_figure_stands_beside_the_page_and_is_drawn_again(tmp_path, engine, trial):
    engine()
    command = ["paper", "dilemma", *trial, "--methods", "scr", "--seeds", "0", "--out", str(tmp_path)]
    assert main(command) == 0
    page = tmp_path / "dilemma-scr-trial.md"
    assert "\n![fig:epoch_acc_plot](dilemma-scr-trial.svg)\n" in page.read_text()
    files = [page.with_suffix(f".{kind}") for kind in ("svg", "pdf", "png")]
    before = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    assert main(command) == 0
    assert [path.read_bytes() for path in files] == before


@pytest.mark.slow
def test_numbers_are_those_of_the_runs(tmp_path, engine, trial, capsys):
    engine()
    assert main(["paper", "sd-vs-rsd", *trial, "--seeds", "0-1", "--set", "memory=64", "--out", str(tmp_path)]) == 0
    runs = {path.parent.name: read_run(path.parent) for path in tmp_path.glob("*/results.json")}
    assert len(runs) == 4  # memory is the same in all of them
    values = [
        100 * results["acc"]["ncm"]["4"] for name, (_, results) in sorted(runs.items()) if "distillation" not in name
    ]
    cell = cells(tmp_path / "sd-vs-rsd-trial.csv")["ACC of the last expert", "RSD", "M = 200"]
    mean = sum(values) / 2
    half = 12.7062 * abs(values[0] - values[1]) / 2
    assert float(cell["ours"]) == pytest.approx(mean, abs=0.006)
    assert float(cell["interval low"]) == pytest.approx(mean - half, abs=0.02)
    assert (cell["n"], cell["paper"], cell["paper sd"], cell["to pass"], cell["verdict"]) == (
        "2",
        "20.2",
        "0.5",
        ">= 19.2",
        "",
    )
    assert float(cell["difference"]) == pytest.approx(mean - 20.2, abs=0.006)
    page = (tmp_path / "sd-vs-rsd-trial.md").read_text()
    (_, results), *_ = runs.values()
    for told in (
        f"commit: {results['commit']}",
        f"torch {results['versions']['torch']}",
        results["processor"],
        "precision: fp32",
    ):
        assert told in page
    assert re.search(r"\| stream=digits8 memory=64 .*distillation=sd \| 0, 1 \|", page)
    assert "caution" not in capsys.readouterr().out + page.lower()
    # The command on the page plans the very same runs.
    command = re.search(r"^    mose-fast (paper .*)$", page, re.MULTILINE)[1].split()
    assert main([*command, "--dry-run", "--out", str(tmp_path)]) == 0
    assert "0 of 4 runs to do" in capsys.readouterr().out
    # What other code or another machine has computed is told.
    changed = min(tmp_path.glob("*/results.json"))
    values = json.loads(changed.read_text())
    torch, values["versions"]["torch"] = values["versions"]["torch"], "1.0"
    changed.write_text(json.dumps(values))
    assert main([*command, "--out", str(tmp_path)]) == 0
    (said,) = re.findall(r"^caution: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert said.startswith("the version of torch differs: ")
    assert f"1.0 ({changed.parent.name})" in said and torch in said
    assert f"**Caution: {said}.**" in (tmp_path / "sd-vs-rsd-trial.md").read_text()
    # Further seeds are computed alone.
    further = engine()
    assert main([*("0-2" if part == "0,1" else part for part in command), "--out", str(tmp_path)]) == 0
    assert len(further.started) == 2 and all(name.endswith("seed-2") for name in further.started)
    assert cells(tmp_path / "sd-vs-rsd-trial.csv")["ACC of the last expert", "RSD", "M = 200"]["n"] == "3"


@pytest.mark.slow
def test_all_baselines(tmp_path, engine, trial, capsys):
    """A row of each method, and its minutes as a multiple of ER's."""
    engine()
    command = [*trial, "--seeds", "0", "--set", "memory=64", "--out", str(tmp_path)]
    for name, stem in (("table1-cifar", "table1-cifar-trial"), ("time", "time-trial")):
        # Rotating a digit changes its label.
        assert main(["paper", name, *command, "--set", "rotations=1"]) == 0
        found = cells(tmp_path / f"{stem}.csv")
        assert len({row for _, row, _ in found}) == (21 if name == "table1-cifar" else 19)
        assert all(cell["n"] == "1" for cell in found.values())
    minutes = {row: float(cell["ours"]) for (_, row, column), cell in found.items() if column == "minutes"}
    runs = {path.parent.name: read_run(path.parent)[1]["seconds"]["total"] for path in tmp_path.glob("*/results.json")}
    assert len(runs) == 18 + 4  # memory is the same in all of them
    for row, method in (("ER", "method-er"), ("GSS", "method-gss"), ("BiC", "method-bic")):
        (seconds,) = (value for name, value in runs.items() if f"{method}_" in name)
        (er,) = (value for name, value in runs.items() if "method-er_" in name)
        found_ratio = next(float(c["ours"]) for (_, r, column), c in found.items() if (r, column) == (row, "times ER"))
        assert found_ratio == pytest.approx(seconds / er, abs=0.006)
        assert minutes[row] == pytest.approx(seconds / 60, abs=0.006)
    assert main(["paper", "table1-cifar", *command, "--baselines", "sources", "--methods", "er,mose"]) == 0
    page = (tmp_path / "table1-cifar-sources-er-mose-trial.md").read_text()
    assert "--baselines sources --methods er,mose" in page
    assert "preset=sources" in page
    # The best of ours is bold, and the second best of the paper's is italic.
    best = max(re.findall(r"\| ours \| (\S+)", page), key=lambda text: float(text.strip("*")))
    assert best.startswith("**")
    assert "| MOSE | paper | *35.1 ± 0.4* |" in page


@pytest.mark.slow
def test_presets_beyond_the_paper(tmp_path, engine, trial, capsys):
    """Their rows have what predict() would score, beside the best published."""
    engine()
    command = ["paper", "beyond", *trial, "--seeds", "0,1", "--set", "memory=64", "--out", str(tmp_path)]
    assert main([*command, "--dry-run"]) == 0
    assert "| mose+ | best published | 40.1 | 48.5 | 56.5 |" in capsys.readouterr().out
    assert main(command) == 0
    runs = [read_run(path.parent)[1] for path in tmp_path.glob("*/results.json")]
    assert len(runs) == 3 * 2  # memory and stream are the same in all of them
    found = cells(tmp_path / "beyond-trial.csv")
    for row in BEYOND_PRESETS:
        of_preset = [results for results in runs if results["config"]["preset"] == row]
        own = [100 * r["acc"][r["resolved"]["classifier"]][r["resolved"]["expert"]] for r in of_preset]
        mine = [cell for (_, name, _), cell in found.items() if name == row]
        assert len(mine) == 6 and {cell["n"] for cell in mine} == {"2"}
        assert [float(cell["ours"]) for cell in mine] == pytest.approx([sum(own) / 2] * 6, abs=0.006)
    assert "| mose+ | best published | 40.1 | 48.5 | 56.5 |" in (tmp_path / "beyond-trial.md").read_text()


def test_dry_run(tmp_path, engine, trial, capsys):
    here = engine()
    assert main(["paper", "cost", *trial, "--seeds", "0-2", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "| SCR+CE | paper | 8.80 | 11.29 | 558.55 | 22.30 ± 0.40 | 45.80 ± 0.20 |" in told
    assert "| SCR+CE | to pass | - | <= 11.40 | <= 564.14 | >= 21.30 | <= 46.80 |" in told
    assert "departs from the protocol: " in told
    assert "18 of 18 runs to do: 18:00 of computing" in told  # the engine's forecast: a minute each
    assert len(here.measured) == 6
    assert not (tmp_path / "out").exists()
    assert main(["paper", "dilemma", *trial, "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "| ER + aug | paper | no number | no number | no number | no number |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "name"),
    [*(("experts", f"experts-trial.{kind}") for kind in ("md", "csv", "pdf", "html")), ("all", "paper-trial.html")],
)
def test_a_page_that_no_paper_command_wrote_is_not_replaced(tmp_path, engine, trial, capsys, table, name):
    here = engine()
    (tmp_path / name).write_text("mine")
    assert main(["paper", table, *trial, "--seeds", "0", "--out", str(tmp_path)]) == 2
    assert re.search("was not written by mose-fast paper.*, and would be replaced", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert here.started == []


def test_a_run_that_was_edited(tmp_path, engine, trial, capsys):
    engine()
    command = ["paper", "taskwise", *trial, "--seeds", "0", "--out", str(tmp_path)]
    assert main(command) == 0
    (edited,) = tmp_path.glob("*distillation-off_seed-0/results.json")
    edited.write_text("{")
    assert main(command) == 1
    found = cells(tmp_path / "taskwise-trial.csv")
    assert (found["w/o RSD", "E4", "average"]["n"], found["w/o RSD", "E4", "average"]["ours"]) == ("0", "")
    assert found["w/ RSD", "E4", "average"]["n"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasktwise"], "there is no table 'tasktwise'; did you mean 'taskwise'"),
        (["taskwise", "--preset", "papers"], "did you mean 'paper'"),
        (["taskwise", "--set", "memroy=3"], "did you mean 'memory'"),
        (["taskwise", "--set", "rotations=1"], "options.rotations is set, but no run of taskwise has this setting"),
        (["taskwise", "--set", "seed=3"], "seed is set to 3"),
        (
            ["taskwise", "--set", "stream.kind=blurry"],
            "stream.kind is 'blurry', but the numbers of the paper's taskwise are by task; wanted a kind with task",
        ),
        (
            ["taskwise", "--set", "evaluate_on=validation", "--validation", "0.1"],
            "evaluate_on is 'validation', but the numbers of the paper's taskwise are of test images; wanted 'test'",
        ),
        (["bof", "--baselines", "source"], "did you mean 'sources'"),
        (["taskwise", "--without", "cifar"], "without is split-cifar100, but taskwise has no other data set"),
        (["bof", "--methods", "mse"], "methods has 'mse', of which bof has no row; did you mean 'mose'"),
        (["taskwise", "--seeds", "3-1"], "seeds are '3-1'"),
        (["taskwise", "--workers", "0"], "workers is 0"),
        (["all", "--without", "imagenet,mnist"], "without has 'mnist'; wanted some of split-cifar100, split-tiny-i"),
        (["all", "--without", ""], "without has ''; wanted some of"),
        (["all", "--without", "cifar,tiny"], "without is split-cifar100,split-tiny-imagenet: no table remains"),
        (["all", "--methods", "ers"], "methods has 'ers', of which no table has a row; did you mean 'er'"),
        (["all", "--methods", "er", "--set", "student=2"], "options.student is set, but no run of all has"),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    assert main(["paper", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_with_a_worker_of_its_own(tmp_path, trial, capsys):
    large = ["--width", "8", "--limit-per-task", "20", "--workers", "1"]
    assert main(["paper", "taskwise", *trial, *large, "--seeds", "0", "--out", str(tmp_path)]) == 0
    assert "2 of 2 runs done, 0 failed" in capsys.readouterr().out
    config = RunConfig.load(next(tmp_path.glob("*distillation-off_seed-0/config.json")))
    assert (config.options.distillation, config.memory, config.width, config.options.augment) == (
        "off",
        5000,
        8,
        "simclr",
    )
    assert float(cells(tmp_path / "taskwise-trial.csv")["w/ RSD", "MOE", "average"]["ours"]) > 20  # chance is 10


def test_list(capsys):
    assert main(["list", "paper"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TABLES)


def test_pages_describe_every_flag_and_every_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    page = PAGES["paper.md"].read_text()
    own = flags_of("paper", capsys) - flags_of("run", capsys) | {"--preset", "--out", "--set"}
    assert own > {"--seeds", "--workers", "--dry-run"}
    for word in (*TABLES, *own):
        assert f"`{word}" in page, word
    assert "mose-fast paper NAME" in PAGES["command_line.md"].read_text()
    commands = re.findall(r"mose-fast paper ([a-z0-9-]+)", PAGES["paper/README.md"].read_text())
    assert set(commands) == set(TABLES)
