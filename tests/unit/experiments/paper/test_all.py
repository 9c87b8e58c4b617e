"""``mose-fast paper all``: every table in one folder, and the page that shows them."""

import base64
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from mose_fast.app.cli import main
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.paper import measured as measured_module
from mose_fast.experiments.paper import reproduce
from mose_fast.experiments.paper.description import CIFAR, TINY, Presets
from mose_fast.experiments.paper.measured import Measured
from mose_fast.experiments.paper.pages import Section, text_page, web_page
from mose_fast.experiments.paper.plan import all_plans
from mose_fast.experiments.paper.tables import TABLES, describe
from mose_fast.present.statistics import summarise
from mose_fast.runs.store import read_run
from mose_fast.streams import StreamError
from mose_fast.train import RunError
from tests.paths import ROOT

from .test_command import cells


class Page(HTMLParser):
    """The elements of a page: which are open where, and what a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.loaded, self.pictures = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.loaded += [found[name] for name in ("src", "href") if name in found and not found[name].startswith("#")]
        if tag == "img":
            self.pictures.append(base64.b64decode(found["src"].removeprefix("data:image/svg+xml;base64,")))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def only_svg(monkeypatch):
    """Figures are not drawn as PDF and PNG, which takes most of the time."""
    monkeypatch.setattr("mose_fast.experiments.paper.paper_figures.KINDS", ("svg",))


@pytest.mark.slow
def test_from_end_to_end(tmp_path, engine, trial, capsys, only_svg):
    # One memory makes many of the tables' runs the same.
    common = [*trial, "--set", "memory=64", "--seeds", "0", "--out", str(tmp_path)]
    command = ["paper", "all", *common, "--methods", "er,scr"]
    first = engine(interrupt_in=3)
    assert main(command) == 130
    assert "interrupted; to continue, run the same command again" in capsys.readouterr().err
    assert len(first.started) == 4
    (page,) = tmp_path.glob("*.html")
    runs = re.search(r'<p class="box">Unfinished: 1 of (\d+) runs have ended so far', page.read_text())[1]
    assert "1 run, 1 seed for each setting" in page.read_text()
    second = engine()
    assert main(command) == 0
    told = capsys.readouterr().out
    assert told.count("departs from the protocol: memory 64 instead of 1000") == 1
    assert list(tmp_path.glob("*.html")) == [page]
    assert page.name == "paper-er-scr-trial.html"
    assert "nfinished:" not in page.read_text() and f"{runs} runs, 1 seed" in page.read_text()
    assert f"page      {page}" in told
    # Each run once, whichever tables have it.
    assert second.resumed == [first.started[3]]
    assert read_run(tmp_path / first.started[3])[1]["resumed"] == 1
    done = [*first.started[:3], *second.started]
    assert len(done) == len(set(done)) == len(list(tmp_path.glob("*/results.json")))
    # A table of the same runs has nothing to compute, and neither has the same command.
    text, third = page.read_text(), engine()
    assert main(["paper", "time", *common, "--methods", "scr"]) == 0
    assert main(command) == 0
    assert third.started == []
    assert page.read_text() == text


@pytest.mark.slow
def test_every_table_has_numbers_in_all_its_cells(tmp_path, store, only_svg):
    plans = all_plans([0], Presets(), {"width": 8}, ["er", "scr", "mose"])
    runs = {cell.name: cell for plan in plans for cell in plan.cells}
    folder, page = SweepFolder(tmp_path), tmp_path / "paper.html"
    store(folder, runs.values(), lambda *about: [[0.6 * (task <= after) for task in range(10)] for after in range(10)])
    reproduce._Pages(plans, folder, page, [], print).write({name: name for name in runs})
    for plan in plans:
        found = cells(tmp_path / f"{plan.stem}.csv")
        assert len(found) == len(plan.description.entries)
        assert all(cell["n"] == "1" and float(cell["ours"]) >= 0 for cell in found.values()), plan.name
        assert not re.search(r"\| (pass|miss)", (tmp_path / f"{plan.stem}.md").read_text())
    text = page.read_text()
    read = Page(text)
    assert read.open == [] and read.ids == list(TABLES)
    assert all(loaded.startswith("data:") for loaded in read.loaded)
    svgs = sorted(path.read_bytes() for path in tmp_path.glob("*.svg"))
    assert sorted(read.pictures) == svgs and len(svgs) == sum(len(plan.description.figures) for plan in plans)
    for name in TABLES:
        assert describe(name).caption.split(",")[0] in text
    assert "there is no pass or fail" in text and "✓" not in re.sub(r"(?s)<style>.*?</style>", "", text)


def test_dry_run_counts_shared_runs_once(tmp_path, engine, trial, capsys):
    here = engine()
    assert main(["paper", "all", *trial, "--seeds", "0-2", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    rows = {
        name: (int(runs), int(shared.replace("-", "0")), int(left), time)
        for name, runs, shared, left, time in re.findall(
            r"^\| ([\w-]+) \| (\d+) \| ([\d-]+) \| (\d+) \| ([\d:]+) \|", told, re.MULTILINE
        )
    }
    assert list(rows) == [*TABLES, "all"]
    assert rows["taskwise"] == (6, 6, 0, "0:00")  # table1-cifar has them
    assert rows["ablation"] == (21, 6, 15, "15:00")  # the engine's forecast: a minute each
    runs, _, left, _ = rows.pop("all")
    assert runs == left == sum(runs - shared for runs, shared, _, _ in rows.values())
    assert f"{left} of {runs} runs to do" in told
    assert len(here.measured) == len(set(here.measured)) == runs // 3
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_fails(tmp_path, engine, trial, capsys, only_svg):
    engine(break_in="epochs-8")
    command = ["paper", "all", *trial, "--methods", "scr", "--set", "memory=64", "--seeds", "0"]
    assert main([*command, "--out", str(tmp_path)]) == 1
    text = (tmp_path / "paper-scr-trial.html").read_text()
    assert "<h3>Not finished</h3>" in text and "broken on purpose" in text
    assert "Not finished: " in (tmp_path / "dilemma-scr-trial.md").read_text()
    assert "Not finished: " not in (tmp_path / "bof-scr-trial.md").read_text()  # it does not need that run
    found = cells(tmp_path / "dilemma-scr-trial.csv")
    assert {column: cell["n"] for (part, _, column), cell in found.items() if "task 1" in part} == {
        "epochs 1": "1",
        "epochs 2": "1",
        "epochs 4": "1",
        "epochs 8": "0",
    }
    # Only those with rows of the method.
    assert len(list(tmp_path.glob("*-trial.md"))) == 5


@pytest.mark.slow
def test_a_table_is_written_as_results_come(tmp_path, engine, trial, monkeypatch):
    monkeypatch.setattr(reproduce, "_EVERY", 0.0)
    monkeypatch.setattr(reproduce, "_SHARE", 0.0)
    here, seen, read, page = engine(), [], [], tmp_path / "taskwise-trial.md"
    start = here.start
    monkeypatch.setattr(measured_module, "read_run", lambda folder: read.append(folder) or read_run(folder))

    def look(command):
        """As a reader would, when a further run starts."""
        if command["do"] == "run":
            text = page.read_text() if page.exists() else ""
            seen.append(re.findall(r"\*\*Unfinished: (\d of \d) runs have ended so far", text))
        start(command)

    here.start = look
    assert main(["paper", "taskwise", *trial, "--set", "memory=64", "--seeds", "0,1", "--out", str(tmp_path)]) == 0
    assert seen == [[], ["1 of 4"], ["2 of 4"], ["3 of 4"]]
    assert "nfinished" not in page.read_text()
    ours = cells(page.with_suffix(".csv"))["w/ RSD", "MOE", "average"]
    assert ours["n"] == "2"
    assert len(read) == len(set(read)) == 4  # however often the pages were written
    # The table's own page has the same numbers.
    text = page.with_suffix(".html").read_text()
    assert (Page(text).open, Page(text).ids) == ([], ["taskwise"])
    row = re.search(r'(?s)<th scope="row">MOE</th>.*?</tr>', text.split("w/ RSD</p>")[1])[0]
    means = [float(mean) for mean in re.findall(r'([\d.]+)<span class="sd">', row)]
    # The row is our number above the paper's, of each task and the average; ours are of two tasks.
    assert any(mean == pytest.approx(float(ours["ours"]), abs=0.006) for mean in means)


def test_writing_the_page_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    now, written = [1000.0], []
    monkeypatch.setattr(reproduce, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def write(folders):
        written.append(now[0])
        now[0] += 10.0

    pages = reproduce._Pages([], SweepFolder(tmp_path), None, [], print)
    monkeypatch.setattr(pages, "write", write)
    while now[0] < 2600:
        pages.update({})
        now[0] += 1
    assert written == [1000, 1510, 2020, 2530]  # 50 times as long as it takes in between


def test_a_full_disk_while_runs_go_on_is_a_warning(tmp_path, monkeypatch):
    def full(folders):
        raise RunError("cannot write paper.html")

    said = []
    pages = reproduce._Pages([], SweepFolder(tmp_path), None, [], said.append)
    monkeypatch.setattr(pages, "write", full)
    pages.update({})
    assert said == ["warning: cannot write paper.html"]


def test_a_data_set_can_be_left_out(tmp_path, engine, trial, capsys):
    whole = {plan.name: plan for plan in all_plans([0], Presets(), {}, ["mose"])}
    plans = {plan.name: plan for plan in all_plans([0], Presets(), {}, ["mose"], [TINY])}
    assert whole.keys() - plans.keys() == {"table1-tiny"}
    assert {cell.config.stream.name for plan in plans.values() for cell in plan.cells} == {CIFAR}
    for name, plan in plans.items():
        theirs = [cell for cell in whole[name].cells if cell.config.stream.name == CIFAR]
        assert plan.cells == theirs
        # A table of which nothing was left out has its usual name.
        assert (plan.stem == whole[name].stem) == (theirs == whole[name].cells)
    assert plans["small-buffers"].stem == "small-buffers-without-split-tiny-imagenet"
    assert plans["small-buffers"].command.endswith("--without split-tiny-imagenet")

    engine()
    command = ["paper", "small-buffers", *trial, "--set", "memory=64", "--seeds", "0", "--out", str(tmp_path)]
    assert main([*command, "--without", "tiny"]) == 0
    text = (tmp_path / "small-buffers-without-split-tiny-imagenet-trial.md").read_text()
    assert "**Without split-tiny-imagenet.**" in text
    assert "Tiny-ImageNet M" not in text
    assert "Without split-tiny-imagenet." in web_page([Section(Measured(plans["small-buffers"], {}))], [], [TINY])


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ([], "Absent here: split-cifar100, split-tiny-imagenet"),
        (["cifar100.npz"], "Absent here: split-tiny-imagenet; to do without: --without split-tiny-imagenet"),
    ],
)
def test_absent_data_sets_are_all_named_and_how_to_do_without(tmp_path, capsys, monkeypatch, there, said):
    def missing(config, **settings):
        raise StreamError(f"no data of {config.name}")

    monkeypatch.setattr("mose_fast.streams.create", missing)
    for name in there:
        (tmp_path / name).touch()
    assert main(["paper", "all", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mose-fast: no data of split-") and line.endswith(said)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_documentation_counts_the_runs():
    page = (ROOT / "docs" / "paper.md").read_text()
    for preset, told in (("released", r"(\d+) runs a seed \("), ("paper", r"\(preset `paper`: (\d+)\) instead")):
        plans = all_plans([0], Presets(preset), {}, None)
        assert int(re.search(told, page)[1]) == len({cell.name for plan in plans for cell in plan.cells})
        assert preset == "paper" or f"instead of {sum(len(plan.cells) for plan in plans)}" in page
        for plan in plans:
            (row,) = re.findall(
                rf"^\| `{plan.name}` \|.*\| (\d+)(?: \(preset `paper`: (\d+)\))? \|$", page, re.MULTILINE
            )
            assert int(row[preset == "paper" and row[1] != ""]) == len(plan.cells), plan.name


def test_verdicts_and_ranks_are_marked(tmp_path):
    """The main table, with our numbers a point above the paper's."""
    (plan,) = [plan for plan in all_plans([0, 1, 2], Presets(), {}, None) if plan.name == "table1-cifar"]
    ours = {e: summarise(e.paper.mean + 1 + d for d in (-0.1, 0, 0.1)) for e in plan.description.entries}
    measured = Measured(plan, ours)
    verdicts = measured.verdicts
    passed, unsure = sum(v.passed for v in verdicts), sum(not v.sure for v in verdicts)
    text = web_page([Section(measured)])
    assert Page(text).open == []
    marks = re.findall(r'<span class="mark (pass|miss|none)( unsure)?"', text.split("<h2>", 1)[1])
    assert [kind for kind, _ in marks].count("none") == 3  # cells of the paper that cannot be right
    assert [kind for kind, _ in marks if kind != "none"] == ["pass" if v.passed else "miss" for v in verdicts]
    assert sum(bool(pale) for _, pale in marks) == unsure > 0
    assert f"{passed} of {len(verdicts)} pass" in text
    row = re.search(r'(?s)<th scope="row">MOE-MOSE, with RSD</th>(.*?)</tr>', text)[1]
    assert '<span class="best">38.4</span>' in row and '<span class="best">37.4</span>' in row
    row = re.search(r'(?s)<th scope="row">MOSE</th>(.*?)</tr>', text)[1]
    assert '<span class="second">36.1</span>' in row and '<span class="second">35.1</span>' in row
    assert "12.2" in text and "±\N{NO-BREAK SPACE}" not in text

    text, table = text_page(measured, ())
    assert f"{passed} of {len(verdicts)} judged cells pass; {unsure} of these verdicts are not sure" in text
    assert "| MOSE | ours | *36.1 ± 0.1* |" in text and "| MOSE | paper | *35.1 ± 0.4* |" in text
    (tmp_path / "cells.csv").write_text(table)
    found = list(cells(tmp_path / "cells.csv").values())
    assert [cell["verdict"] for cell in found if cell["verdict"] != "not judged"] == list(map(str, verdicts))
    assert len(found) - len(verdicts) == 3
    for cell in found:
        relation, _, wanted = cell["to pass"].partition(" ")
        better = {"": None, ">=": float.__ge__, "<=": float.__le__}[relation]
        told = cell["verdict"].split(",")[0]
        assert told == ("pass" if better(float(cell["ours"]), float(wanted)) else "miss") if better else "not judged"
        if cell["verdict"] in ("pass", "miss"):
            assert not float(cell["interval low"]) < float(wanted) < float(cell["interval high"])
