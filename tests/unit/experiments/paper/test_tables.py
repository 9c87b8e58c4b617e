"""The descriptions, against the paper's text and against themselves."""

import re

import pytest

from mose_fast.experiments.paper.description import BASELINE_PRESETS, Presets
from mose_fast.experiments.paper.main_tables import BEYOND_PRESETS
from mose_fast.experiments.paper.measured import Measured
from mose_fast.experiments.paper.plan import Plan
from mose_fast.experiments.paper.tables import TABLES, describe
from mose_fast.present import published
from mose_fast.present.published import numbers
from mose_fast.settings.run import ConfigError, RunConfig

BY_TASK = ["tab:moe_acc", "tab:rsd_final", "tab:da_final", "tab:ncm_final"]
WITHOUT_NUMBERS = {"experts", "dilemma", "bof"}


def printed(paper_text, label):
    """The numbers of a table in the paper's order, as (mean, deviation or None)."""
    (table,) = (
        t
        for t in re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", paper_text, re.DOTALL)
        if f"\\label{{{label}}}" in t
    )
    body = re.sub(
        r"rule\[[\d.]+pt\]|\[HTML\]\{\w+\}", "", table[table.index(r"\toprule") : table.index(r"\bottomrule")]
    )
    found = re.findall(r"(\d+\.\d+)(?:±(\d+\.\d*))?", body)
    return [(float(mean), float(sd) if sd else None) for mean, sd in found]


@pytest.mark.parametrize("name", list(TABLES))
def test_each_row_of_numbers_is_a_row_of_the_papers_table(name, paper_text):
    judged = 0
    for part in describe(name).parts:
        if part.theirs != "paper":
            continue
        assert f"\\label{{{part.source}}}" in paper_text
        for row in part.rows:
            ours = [(e.paper.mean, e.paper.sd) for e in part.entries if e.row == row and e.paper is not None]
            if not ours:
                continue
            judged += len(ours)
            if part.source == "fig:training_time":
                continue  # its numbers are words of the text
            theirs = printed(paper_text, part.source)
            assert any(theirs[i : i + len(ours)] == ours for i in range(len(theirs))), (part.title, row, ours)
    assert (judged == 0) == (name in WITHOUT_NUMBERS)


def panels(label):
    return {name: numbers(label, name) for name in published._tables()[label]["panels"]}


@pytest.mark.parametrize("label", BY_TASK)
def test_side_tables_are_complete_and_in_order(label, paper_text):
    ours = [tuple(cell) for rows in panels(label).values() for row in rows.values() for cell in row.values()]
    assert ours == printed(paper_text, label)


def test_each_table_names_its_lines_and_has_their_numbers_alone(paper_text):
    text = paper_text.splitlines()
    for label, table in published._tables().items():
        if label == "since":
            continue  # of other papers
        first, last = map(int, table["lines"].split("-"))
        lines = text[first - 1 : last]
        if label == "fig:training_time":
            assert f"\\label{{{label}}}" in lines[-2]
            told = " ".join(lines)
            assert "around 15 minutes" in told and "doubles the training time of each image compared to ER" in told
            assert numbers(label, "text") == {
                "ER": {"ratio": (1, None)},
                "SCR": {"ratio": (1, None)},
                "MOSE": {"minutes": (15, None), "ratio": (2, None)},
            }
            continue
        assert lines[0].startswith("\\begin{table") and lines[-1].startswith("\\end{table"), label
        assert any(f"\\label{{{label}}}" in line for line in lines), label
        means = {mean for mean, _ in printed(paper_text, label)}
        assert means >= {cell.mean for rows in panels(label).values() for row in rows.values() for cell in row.values()}


def test_main_table_is_complete_and_in_order(paper_text):
    """The paper's rows have ACC and AF of each memory side by side, for both data sets."""
    cifar, tiny = panels("tab:acc_af").values()
    ours = [tuple(number) for row in cifar for panel in (cifar, tiny) for number in panel[row].values()]
    assert ours == printed(paper_text, "tab:acc_af")
    assert list(cifar) == list(tiny)


@pytest.mark.parametrize(("name", "columns"), [("table1-cifar", slice(0, 6)), ("table1-tiny", slice(6, 12))])
def test_the_best_and_the_second_best_are_those_that_the_paper_marks(name, columns, paper_text):
    plan = Plan(name, [0])
    part = plan.description.parts[0]
    _, theirs = Measured(plan, {}).ranks(part)
    (table,) = (
        t for t in re.findall(r"\\begin\{table\*.*?\\end\{table\*\}", paper_text, re.DOTALL) if "{tab:acc_af}" in t
    )
    rows = re.findall(r"^[^&\n]*&\s*[^&]*?\d+\.\d±.*?\\\\", table, re.DOTALL | re.MULTILINE)
    assert len(rows) == 20
    marks = [
        [1 if "textbf" in cell else 2 if "textit" in cell else None for cell in row.split("&")[1:]] for row in rows
    ]
    ours = [[theirs.get(part.at[row, column]) for column in part.columns] for row in part.rows]
    del ours[-1]  # MOE-MOSE has one row there
    assert ours == [row[columns] for row in marks]


def test_cells_that_cannot_be_right_are_not_judged():
    doubtful = {(e.row, e.column) for e in describe("table1-cifar").entries if e.doubt}
    assert doubtful == {("ASER", "ACC M = 2k"), ("ASER", "AF M = 2k"), ("CCIL", "AF M = 1k")}
    for entry in describe("table1-cifar").entries:
        assert (entry.target is None) == bool(entry.doubt)
    assert any("ACC of ASER at M = 2k is not judged" in note for note in describe("table1-cifar").notes)
    assert not any(entry.doubt for entry in describe("table1-tiny").entries)


def test_baselines():
    """Eighteen in the paper's order, by their own classifier, with the chosen preset."""
    for name, memories in (("table1-cifar", 3), ("table1-tiny", 3), ("time", 1)):
        for preset in BASELINE_PRESETS:
            plan = Plan(name, [0], Presets(baselines=preset))
            configs = [cell.config for cell in plan.cells if cell.config.method != "mose"]
            assert list(dict.fromkeys(c.method for c in configs)) == list(published.BASELINES)
            assert len(configs) == 18 * memories and {c.preset for c in configs} == {preset}
            assert plan.departures == []
    assert len(published.BASELINES) == 18
    assert settings("table1-cifar", "ER", "ACC M = 1k") == RunConfig.create(
        method="er", stream="split-cifar100", memory=1000
    )
    assert {cell.name for cell in Plan("time", [0]).cells} < {cell.name for cell in Plan("table1-cifar", [0]).cells}


def test_rows_of_some_methods():
    plan = Plan("table1-cifar", [0], methods=["er", "mose"])
    assert list(dict.fromkeys(e.row for e in plan.description.entries)) == [
        "ER",
        "MOSE",
        "MOE-MOSE, with RSD",
        "MOE-MOSE, without RSD",
    ]
    assert len(plan.cells) == 3 + 12
    assert "--methods er,mose" in plan.command
    assert len(Plan("table1-cifar", [0], methods=["er"]).description.parts) == 1
    figures = Plan("dilemma", [0], methods=["scr"]).description.figures
    assert [[panel.part.rows for panel in figure.panels] for figure in figures] == [[["SCR + aug"]] * 3]
    # Minutes as multiples of ER's need ER's.
    assert {cell.config.method for cell in Plan("time", [0], methods=["scr"]).cells} == {"er", "scr"}


def test_rows_fit_their_averages():
    for label in BY_TASK:
        for rows in panels(label).values():
            for row in rows.values():
                *tasks, average = (cell.mean for cell in row.values())
                assert sum(tasks) / 10 == pytest.approx(average, abs=0.0101)  # the paper rounds both
    for rows in panels("tab:moe_acc").values():
        for task in map(str, range(1, 11)):
            assert rows["MAX"][task].mean == max(rows[f"E{expert}"][task].mean for expert in range(1, 5))


def test_targets_of_the_main_table():
    """The issue's numbers."""
    for part in describe("table1-cifar").parts:
        wanted = {at: entry.target for at, entry in part.at.items()}
        for memory, mose, moe in (("1k", 34.1, 36.4), ("2k", 44.1, 46.0), ("5k", 53.8, 54.6)):
            assert wanted["MOSE", f"ACC M = {memory}"] == pytest.approx(mose)
            for row in ("MOE-MOSE, with RSD", "MOE-MOSE, without RSD"):
                assert wanted[row, f"ACC M = {memory}"] == pytest.approx(moe)
        assert wanted["MOSE", "AF M = 1k"] == pytest.approx(37.9)


@pytest.mark.parametrize("preset", ["released", "paper"])
@pytest.mark.parametrize("name", list(TABLES))
def test_every_description_is_one_of_the_papers_protocol(name, preset):
    plan = Plan(name, [0, 1], Presets(preset))
    assert plan.departures == []
    assert all(part.source for part in plan.description.parts)
    for part in plan.description.parts:
        places = [(e.row, e.column) for e in part.entries]
        assert len(set(places)) == len(places)
    names = [cell.name for cell in plan.cells]
    assert len(set(names)) == len(names)
    configs = [cell.config for cell in plan.cells]
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
    for config in configs:
        replayed = 16 if config.method == "gdumb" else 64  # GDumb's: a batch of its training on the memory
        assert (config.width, config.stream.batch, config.options.buffer_batch) == (64, 10, replayed)
        assert config.stream.limit_per_task is None
        assert config.method != "mose" or config.preset in (preset, *(BEYOND_PRESETS if name == "beyond" else ()))
        assert config.epochs == 1 or name == "dilemma"


def settings(name, row, column=None, part=0, preset="released"):
    """The configuration behind a cell."""
    found = [
        e for e in describe(name, Presets(preset)).parts[part].entries if e.row == row and column in (None, e.column)
    ]
    plan = Plan(name, [0], Presets(preset))
    (config,) = {cell.config for e in found for cell in plan.cells_of(e.runs)}
    return config


def test_what_rows_stand_for():
    def released(memory, **options):
        return RunConfig.create(stream="split-cifar100", memory=memory, options={"augment": "simclr", **options})

    assert settings("table1-cifar", "MOSE", "ACC M = 1k") == released(1000)
    assert settings("table1-cifar", "MOSE", "ACC M = 1k", part=1) == released(1000, augment="ocm")
    assert settings("table1-cifar", "MOE-MOSE, without RSD", "AF M = 5k") == released(5000, distillation="off")
    assert settings("ablation", "w/o MLS: CE") == released(5000, experts=1, distillation="off", contrastive="off")
    assert settings("ablation", "w/ MLS: CE, SCL") == released(5000, distillation="off")
    assert settings("ablation", "w/ MLS: CE, SCL, RSD") == released(5000)
    assert settings("sd-vs-rsd", "SD", "M = 200") == released(200, distillation="sd")
    assert settings("student", "E2") == released(1000, student=2)
    assert settings("augmentation", "SimCLR w/o flip") == released(1000, inner_views=1)
    assert settings("cost", "SCR+CE", "ACC") == released(1000, experts=1, distillation="off")
    assert settings("cost", "SCR+CE", "minutes") == released(5000, experts=1, distillation="off")
    assert settings("classifier", "linear", part=2, preset="paper") == RunConfig.create(
        "paper", stream="split-cifar100", memory=5000
    )
    tiny = settings("small-buffers", "MOSE", "Tiny-ImageNet M = 500")
    assert (tiny.stream.name, tiny.stream.tasks, tiny.memory) == ("split-tiny-imagenet", 10, 500)
    er = settings("dilemma", "ER", "epochs 8")
    assert (er.method, er.epochs, er.options.augment, er.train_on) == ("er", 8, "none", "stream")
    joint = settings("dilemma", "joint + aug", "epochs 2", part=3)
    assert (joint.epochs, joint.options.augment, joint.train_on) == (2, "simclr", "final_memory")
    experts = {e.column: dict(e.runs) for e in describe("experts").parts[0].entries if e.row == "M = 200"}
    assert [experts[f"n = {n}"].get("options.experts", 4) for n in range(1, 9)] == list(range(1, 9))


def test_presets_beyond_the_paper_differ_by_the_preset_alone():
    def preset(name, stream, memory):
        return RunConfig.create(name, stream=stream, memory=memory)

    (cifar, cifar_beyond, tiny, tiny_beyond) = describe("beyond").parts
    for row in ("MOSE", "MOE-MOSE"):
        assert settings("beyond", row, "ACC M = 2k") == preset("released", "split-cifar100", 2000)
        assert settings("beyond", row, "ACC M = 4k", part=2) == preset("released", "split-tiny-imagenet", 4000)
    assert cifar_beyond.rows == tiny_beyond.rows == list(BEYOND_PRESETS)
    for row in BEYOND_PRESETS:
        assert settings("beyond", row, "ACC M = 1k", part=1) == preset(row, "split-cifar100", 1000)
    # Beside ours: the paper's numbers for its own rows, else the best of the paper's and others'.
    assert [cifar.at["MOE-MOSE", f"ACC M = {m}"].paper.mean for m in ("1k", "2k", "5k")] == [37.4, 47.0, 55.6]
    best = {
        part: [part.at["mose+", column].paper.mean for column in part.columns] for part in (cifar_beyond, tiny_beyond)
    }
    assert list(best.values()) == [[40.1, 48.5, 56.5], [21.4, 29.8, 39.3]]
    (told, _) = describe("beyond").notes
    assert "M = 1k: GSA + MKD;" in told and "M = 5k: OTC;" in told and told.count("MOE-MOSE") == 3
    assert all(entry.target is None for entry in cifar_beyond.entries) and cifar.entries[0].target == 34.1
    assert tiny_beyond.columns == ["ACC M = 2k", "ACC M = 4k", "ACC M = 10k"] == tiny.columns[::2]


def test_files_of_presets_and_trials_have_their_own_names():
    plans = [
        Plan("cost", [0], Presets(preset), changes)
        for preset in ("released", "paper")
        for changes in ({}, {"width": 8})
    ]
    assert [plan.stem for plan in plans] == ["cost", "cost-trial", "cost-paper", "cost-paper-trial"]
    assert [len(plan.cells) for plan in plans] == [6] * 4
    stems = [
        Plan(name, [0], Presets(baselines="sources"), methods=methods).stem
        for name, methods in (("cost", None), ("bof", None), ("bof", ["er", "scr"]), ("bof", ["mose"]))
    ]
    assert stems == ["cost", "bof-sources", "bof-sources-er-scr", "bof-mose"]


def test_tables_share_their_runs():
    main = {cell.name for cell in Plan("table1-cifar", [0]).cells}
    for name in ("taskwise", "classifier"):
        assert {cell.name for cell in Plan(name, [0]).cells} <= main


def test_what_departs_from_the_protocol():
    changes = {
        "width": 8,
        "stream.limit_per_task": 20,
        "options.lr": 0.01,
        "device": "cpu",
        "precision": "bf16",
        "evaluation_batch": 64,
    }
    assert Plan("taskwise", [0], changes=changes).departures == [
        "width 8 instead of 64",
        "stream.limit_per_task 20 instead of null",
        "options.lr 0.01 instead of 0.001",
    ]
    # A switch of MOSE's does not reach the baselines.
    plan = Plan("bof", [0], changes={"options.student": 2})
    assert {cell.config.options.student for cell in plan.cells if cell.config.method == "mose"} == {2}
    assert plan.departures == ["options.student 2 instead of null"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": [0, 0]}, r"seeds are \[0, 0\]"),
        ({"seeds": []}, r"seeds are \[\]"),
        ({"methods": ["er", "er"]}, "methods are 'er,er'; wanted at least one, and each once"),
    ],
)
def test_refuses(given, message):
    with pytest.raises(ConfigError, match=message):
        Plan("bof", **{"seeds": [0], **given})
