"""``mose-fast paper all``: every table in one folder, and the page that shows them."""

import base64
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from mose_fast.app.cli import main
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.paper import measured as measured_module
from mose_fast.experiments.paper.description import judge
from mose_fast.experiments.paper.measured import Measured
from mose_fast.experiments.paper.plan import all_plans
from mose_fast.experiments.paper.reproduce import _Pages
from mose_fast.experiments.paper.rows import CIFAR, TINY, Presets
from mose_fast.experiments.paper.tables import TABLES, describe
from mose_fast.experiments.paper.web_page import Section, web_page
from mose_fast.present.statistics import summarise
from mose_fast.runs.store import read_run
from mose_fast.streams import StreamError
from mose_fast.train import RunError
from tests.paths import ROOT

from .test_command import cells

# Some rows of each table; one memory makes many of their runs the same.
SAMPLE = ["--methods", "er,scr,mose", "--set", "memory=64", "--seeds", "0"]


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


@pytest.mark.slow
def test_from_end_to_end(tmp_path, engine, trial, capsys):
    command = ["paper", "all", *trial, *SAMPLE, "--out", str(tmp_path)]
    first = engine(interrupt_in=3)
    assert main(command) == 130
    assert len(first.started) == 4
    (page,) = tmp_path.glob("*.html")
    runs = re.search(r'<p class="box">Unfinished: 1 of (\d+) runs have ended so far', page.read_text())[1]
    assert "1 run, 1 seed for each setting" in page.read_text()
    second = engine()
    assert main(command) == 0
    told = capsys.readouterr().out
    assert told.count("departs from the protocol: memory 64 instead of 1000") == 2  # once in each call
    assert list(tmp_path.glob("*.html")) == [page]
    assert page.name == "paper-er-scr-mose-trial.html"
    assert "nfinished:" not in page.read_text() and f"{runs} runs, 1 seed" in page.read_text()
    assert f"page      {page}" in told
    # Each run once, whichever tables have it.
    assert second.resumed == [first.started[3]]
    done = [*first.started[:3], *second.started]
    assert len(done) == len(set(done)) == len(list(tmp_path.glob("*/results.json")))

    for plan in all_plans([0], Presets(), {"width": 8}, ["er", "scr", "mose"]):
        found = cells(tmp_path / f"{plan.stem}.csv")
        assert len(found) == len(plan.description.entries)
        for (part, row, column), cell in found.items():
            # Two tasks: the paper's others have no number here.
            beyond = re.fullmatch(r"task (\d+)", column) and int(column.split()[1]) > 2
            undefined = cell["metric"].startswith("BOF")
            lowest = -100 if cell["metric"] == "AF" else 0
            measured = cell["n"] == "1" and float(cell["ours"]) >= lowest
            assert measured or beyond or undefined, (plan.name, part, row, column, cell)
        assert not re.search(r"\| (pass|miss)", (tmp_path / f"{plan.stem}.md").read_text())

    text = page.read_text()
    read = Page(text)
    assert read.open == [] and read.ids == list(TABLES)
    assert all(loaded.startswith("data:") for loaded in read.loaded)
    svgs = sorted(path.read_bytes() for path in tmp_path.glob("*.svg"))
    assert sorted(read.pictures) == svgs and len(svgs) >= 2
    for name in TABLES:
        assert describe(name).caption.split(",")[0] in text
    assert "there is no pass or fail" in text and "✓" not in re.sub(r"(?s)<style>.*?</style>", "", text)

    # A table of the same runs has nothing to compute, and neither has the same command.
    third = engine()
    assert main(["paper", "taskwise", *trial, "--set", "memory=64", "--seeds", "0", "--out", str(tmp_path)]) == 0
    assert main(command) == 0
    assert third.started == []
    assert page.read_text() == text


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
def test_a_run_that_fails(tmp_path, engine, trial, capsys):
    engine(break_in="distillation-off")
    same = ["memory=64", "experts=4", "augment=simclr", "student=null", "contrastive=all", "inner_views=2"]
    settings = [part for setting in same for part in ("--set", setting)]
    assert main(["paper", "all", *trial, "--methods", "mose", *settings, "--seeds", "0", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "paper-mose-trial.html").read_text()
    assert "<h3>Not finished</h3>" in text and "broken on purpose" in text
    assert "Not finished: " in (tmp_path / "taskwise-trial.md").read_text()
    assert "Not finished: " not in (tmp_path / "classifier-trial.md").read_text()  # it does not need that run
    assert len(list(tmp_path.glob("*-trial.md"))) == len(TABLES) - 1  # MOSE has no row in dilemma


@pytest.mark.slow
def test_a_table_is_written_as_results_come(tmp_path, engine, trial, monkeypatch):
    monkeypatch.setattr("mose_fast.experiments.paper.reproduce._EVERY", 0.0)
    monkeypatch.setattr("mose_fast.experiments.paper.reproduce._SHARE", 0.0)
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
    monkeypatch.setattr("mose_fast.experiments.paper.reproduce.time", SimpleNamespace(monotonic=lambda: now[0]))

    def write(failures):
        written.append(now[0])
        now[0] += 10.0

    pages = _Pages([], SweepFolder(tmp_path), None, [], print)
    monkeypatch.setattr(pages, "write", write)
    while now[0] < 2600:
        pages.update({})
        now[0] += 1
    assert written == [1000, 1510, 2020, 2530]  # 50 times as long as it takes in between


def test_a_full_disk_while_runs_go_on_is_a_warning(tmp_path, monkeypatch):
    def full(failures):
        raise RunError("cannot write paper.html")

    said = []
    pages = _Pages([], SweepFolder(tmp_path), None, [], said.append)
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
    assert "Without split-tiny-imagenet." in web_page([Section(plans["small-buffers"], [{}], [], [])], [], [TINY])


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


def test_verdicts_and_ranks_are_marked():
    """The main table, with our numbers a point above the paper's."""
    (plan,) = [plan for plan in all_plans([0, 1, 2], Presets(), {}, None) if plan.name == "table1-cifar"]
    measured, verdicts = [], []
    for part in plan.description.parts:
        found = {}
        for e in part.entries:
            ours = summarise([e.paper.mean + 1 + d for d in (-0.1, 0, 0.1)], resamples=0)
            found[e.row, e.column] = Measured(e, ours, judge(e.metric, e.standard, ours))
        measured.append(found)
        verdicts += [m.verdict for m in found.values() if m.verdict]
    text = web_page([Section(plan, measured, [], [])], [])
    assert Page(text).open == []
    marks = re.findall(r'<span class="mark (pass|miss|none)( unsure)?"', text.split("<h2>", 1)[1])
    assert [kind for kind, _ in marks].count("none") == 3  # cells of the paper that cannot be right
    assert [kind for kind, _ in marks if kind != "none"] == ["pass" if v.passed else "miss" for v in verdicts]
    assert sum(bool(unsure) for _, unsure in marks) == sum(not v.sure for v in verdicts) > 0
    assert f"{sum(v.passed for v in verdicts)} of {len(verdicts)} pass" in text
    row = re.search(r'(?s)<th scope="row">MOE-MOSE, with RSD</th>(.*?)</tr>', text)[1]
    assert '<span class="best">38.4</span>' in row and '<span class="best">37.4</span>' in row
    row = re.search(r'(?s)<th scope="row">MOSE</th>(.*?)</tr>', text)[1]
    assert '<span class="second">36.1</span>' in row and '<span class="second">35.1</span>' in row
    assert "12.2" in text and "±\N{NO-BREAK SPACE}" not in text
