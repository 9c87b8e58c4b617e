"""The page and its exports: what they say, whether they say the same, and what they refuse."""

import base64
import csv
import errno
import html
import io
import re
import shutil
import subprocess

import numpy as np
import pytest
from scipy import stats

from mose_fast.app.cli import main
from mose_fast.present.report import write_report
from mose_fast.present.report_figures import Picture, figures
from mose_fast.present.report_runs import group_runs, read_folders
from mose_fast.present.report_tables import tables
from mose_fast.present.statistics import IncomparableRuns
from mose_fast.runs.files import RunError
from mose_fast.train import run


def shown(values):
    """Mean ± standard deviation of fractions in percent, as a table shows them."""
    values = 100 * np.array(values)
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


@pytest.mark.slow
def test_main_table_parsed_back_equals_the_inputs(sweep, read_page):
    sweep, page = sweep
    heading, *rows = read_page(page).tables["main"]
    assert heading == ["method", "classifier", "ACC M=64", "ACC M=128", "AF M=64", "AF M=128"]
    wanted = []
    for preset in ("paper", "released"):
        for name, expert in (("NCM, expert 4", "4"), ("NCM, mean of experts", "mean_distance")):
            cells = [
                shown([r[metric]["ncm"][expert] for r in sweep[preset, m]])
                for metric in ("acc", "af_paper")
                for m in (64, 128)
            ]
            wanted.append([f"MOSE {preset}", name, *cells])
    assert rows == wanted


@pytest.mark.slow
def test_intervals_are_those_of_student(sweep, read_page, numbers):
    sweep, page = sweep
    heading, *rows = read_page(page).tables["estimates"]
    place = {name: i for i, name in enumerate(heading)}
    assert len(rows) == 8
    for row in rows:
        preset, memory = row[0].split()[1], int(row[place["M"]])
        expert = "4" if row[1].endswith("4") else "mean_distance"
        runs = sweep[preset, memory]
        for name, metric in (("ACC", "acc"), ("AF", "af_paper")):
            values = 100 * np.array([r[metric]["ncm"][expert] for r in runs])
            ends = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
            assert numbers(row[place[f"{name} 95 % t"]]) == pytest.approx(ends, abs=0.051)
        assert row[place["n"]] == "3"
        assert row[place["AF released"]] == shown([r["af_released"]["ncm"][expert] for r in runs])
        assert row[place["untrained"]] == shown([r["untrained"]["acc"]["ncm"][expert] for r in runs])


def test_experts_and_tasks_parsed_back_equal_the_inputs(sweep, read_page):
    sweep, page = sweep
    tables = read_page(page).tables
    experts = {(row[0], row[1]): row[3:] for row in tables["experts"][1:]}
    tasks = {(row[0], row[1], row[3]): row[4:] for row in tables["tasks"][1:]}
    assert tables["tasks"][0] == ["method", "M", "n", "expert", *(f"task {t}" for t in range(1, 6)), "mean"]
    for (preset, memory), runs in sweep.items():
        place = f"MOSE {preset}", str(memory)
        views = [("ncm", e) for e in ("1", "2", "3", "4", "mean_distance")] + [
            ("linear", e) for e in ("1", "2", "3", "4", "mean_logit")
        ]
        assert experts[place] == [shown([r["acc"][c][e] for r in runs]) for c, e in views]
        last = np.array([[r["accuracy"]["ncm"][e][-1] for e in ("1", "2", "3", "4", "mean_distance")] for r in runs])
        wanted = {**{f"E{e + 1}": last[:, e] for e in range(4)}, "MAX": last[:, :4].max(1), "MOE": last[:, 4]}
        wanted["new"] = np.array([np.diagonal(r["accuracy"]["ncm"]["4"]) for r in runs])
        for name, values in wanted.items():
            assert tasks[(*place, name)] == [f"{100 * v:.1f}" for v in [*values.mean(0), values.mean()]]


def test_comparisons_are_paired_and_corrected_over_the_whole_table(sweep, read_page, numbers):
    sweep, page = sweep
    heading, *rows = read_page(page).tables["comparisons"]
    assert heading[-4:] == ["p (Wilcoxon)", "p (Holm)", "Holm interval", "effect size"]
    p = []
    for row, memory in zip(rows, (64, 128), strict=True):
        acc = {
            preset: np.array([r["acc"]["ncm"]["4"] for r in sweep[preset, memory]]) for preset in ("released", "paper")
        }
        best = max(acc, key=lambda preset: acc[preset].mean())
        other = "paper" if best == "released" else "released"
        assert row[:4] == [str(memory), f"MOSE {other}", f"MOSE {best}", "3"]
        test = stats.ttest_rel(acc[other], acc[best])
        p.append(test.pvalue)
        assert numbers(row[4]) == pytest.approx([100 * (acc[other] - acc[best]).mean()], abs=0.051)
        assert numbers(row[5]) == pytest.approx([100 * end for end in test.confidence_interval(0.95)], abs=0.051)
        assert numbers(row[6]) == pytest.approx([test.pvalue], abs=1e-4)
        assert f"M = {memory}: MOSE {other} against MOSE {best}: " in page.read_text()
    assert "2 of 2 comparisons rest on fewer than 6 common seeds" in page.read_text()
    corrected = [min(1, 2 * p[0]), max(2 * p[0], p[1])] if p[0] < p[1] else [max(2 * p[1], p[0]), min(1, 2 * p[1])]
    assert [numbers(row[8])[0] for row in rows] == pytest.approx([min(1, c) for c in corrected], abs=2e-4)
    for row, c in zip(rows, corrected, strict=True):
        low, high = numbers(row[9])
        assert (low <= 0 <= high) == (c >= 0.05)


def test_every_setting_against_a_chosen_one(make, tmp_path, read_page, numbers, no_figures):
    presets = ("released", "paper")
    results = {(p, m): [make(s, preset=p, memory=m) for s in range(2)] for p in presets for m in (64, 128)}
    command = ["report", str(tmp_path / "runs"), "--against", "MOSE paper"]
    assert main(command) == 0
    page = tmp_path / "runs" / "report" / "report.html"
    _, *rows = read_page(page).tables["comparisons"]
    assert [row[:3] for row in rows] == [["64", "MOSE released", "MOSE paper"], ["128", "MOSE released", "MOSE paper"]]
    for row, memory in zip(rows, (64, 128), strict=True):
        ours, theirs = ([r["acc"]["ncm"]["4"] for r in results[p, memory]] for p in presets)
        assert numbers(row[4]) == pytest.approx([100 * (np.mean(ours) - np.mean(theirs))], abs=0.051)
    assert "every setting against MOSE paper" in page.read_text() and "chosen by these" not in page.read_text()
    with pytest.raises(RunError, match=r"against is 'MOSE papr'; wanted one of MOSE paper, MOSE released"):
        write_report([tmp_path / "runs"], against="MOSE papr")


def test_exports_hold_the_same_numbers(sweep, read_page, numbers):
    _, page = sweep
    folder = page.parent / "tables"
    tables = read_page(page).tables
    files = {file.name for file in folder.iterdir()}
    assert files == {f"{name}.{ending}" for name in tables for ending in ("csv", "md", "tex")}
    assert tables.keys() == {"main", "estimates", "experts", "tasks", "cost", "size", "runs", "comparisons"}
    for name, (_, *rows) in tables.items():
        wanted = [[n for cell in row for n in numbers(cell)] for row in rows]
        text = {ending: (folder / f"{name}.{ending}").read_text() for ending in ("csv", "md", "tex")}
        in_csv = list(csv.reader(io.StringIO(text["csv"])))[1:]
        in_markdown = [line for line in text["md"].splitlines() if line.startswith("|")][2:]
        body = (
            text["tex"].partition("\\midrule\n")[2].partition("\\bottomrule")[0].replace("$-$", "-").replace("\\_", "_")
        )
        assert [[n for cell in row for n in numbers(cell)] for row in in_csv] == wanted
        assert [numbers(line) for line in in_markdown] == wanted
        assert [numbers(line) for line in body.splitlines()] == wanted
        assert sum(map(len, wanted)) >= 8


def test_page_needs_no_other_file_and_no_network(sweep, read_page):
    _, page = sweep
    seen, text = read_page(page), page.read_text()
    assert not {"script", "link", "iframe", "object", "embed"} & set(seen.tags)
    assert not re.search(r"@import|url\(", text)
    images = [link for link in seen.links if not link.startswith("#")]
    assert len(images) == 6
    for image in images:
        kind, _, data = image.partition(",")
        assert kind == "data:image/svg+xml;base64"
        svg = base64.b64decode(data).decode()
        assert svg.count("<path") > 20
        for target in re.findall(r'(?:href|src)="([^"]*)"', svg):
            assert target.startswith(("#", "data:"))
    ids = re.findall(r'<section id="([^"]+)"', text)
    assert ["#" + i for i in ids] == [link for link in seen.links if link.startswith("#")]


def test_every_figure_and_table_has_a_caption_that_counts_the_seeds(sweep, read_page):
    seen = read_page(sweep[1])
    assert len(seen.captions) == 6 + 8
    assert seen.tags.count("figure") == len(seen.captions)
    for caption in seen.captions:
        assert re.search(r"3 seeds|n = 3|n seeds|\(n\)|12 runs", caption), caption


@pytest.mark.slow
def test_same_runs_give_the_same_report(sweep, tmp_path):
    _, page = sweep
    again, _ = write_report([page.parents[1]], tmp_path)
    assert again.read_bytes() == page.read_bytes()
    for table in (page.parent / "tables").iterdir():
        assert (tmp_path / "tables" / table.name).read_bytes() == table.read_bytes()


def test_columns_of_a_csv_are_those_of_any_number_of_seeds(make, tmp_path, no_figures):
    headings = []
    for seeds in (1, 2):
        for preset in ("released", "paper"):
            make(seeds - 1, preset=preset)
        tables = write_report([tmp_path / "runs"])[0].parent / "tables"
        headings.append({file.name: file.read_text().splitlines()[0].split(",") for file in tables.glob("*.csv")})
    assert headings[0] == headings[1]
    assert {"95 % interval low", "95 % interval high", "effect size"} < set(headings[0]["comparisons.csv"])
    assert {"ACC sd", "ACC 95 % t low", "ACC 95 % t high"} < set(headings[0]["estimates.csv"])
    assert "GPU MiB" in headings[0]["cost.csv"]


def test_tables_and_figures_scroll_on_a_narrow_screen(sweep):
    _, page = sweep
    text = page.read_text()
    inside = re.findall(r'<div class="wide" tabindex="0"><(table|img)', text)
    assert (inside.count("table"), inside.count("img")) == (8, 6) == (text.count("<table"), text.count("<img"))
    assert ".wide { overflow-x: auto; }" in text
    # A figure that is scaled down to 400 px has letters of 4 px.
    assert "@media screen and (max-width: 1100px) { figure img { max-width: none; } }" in text
    assert "</a> <a" in text  # else the links are one line that cannot break


def test_one_run_has_no_spread_and_no_interval(make, tmp_path, read_page):
    results = make(0)
    page, _ = write_report([tmp_path / "runs" / "run-000"])
    tables = read_page(page).tables
    acc, af = (f"{100 * results[m]['ncm']['4']:.1f}" for m in ("acc", "af_paper"))
    assert tables["main"][1] == ["MOSE", "NCM, expert 4", acc, af]
    estimates = dict(zip(*tables["estimates"][:2], strict=True))
    assert estimates["ACC 95 % t"] == estimates["ACC 95 % bootstrap"] == "-"
    assert "comparisons" not in tables
    assert "One seed alone, without any interval: MOSE, M = 64." in page.read_text()
    assert "so no interval" in page.read_text()


@pytest.mark.slow
def test_a_hundred_tasks_have_a_row_each(make, tmp_path, read_page):
    results = [make(seed, tasks=100) for seed in range(2)]
    seen = read_page(write_report([tmp_path / "runs"])[0])
    heading, *rows = seen.tables["tasks"]
    assert heading == ["method", "M", "n", "task", "E1", "E2", "E3", "E4", "MAX", "MOE", "new"]
    assert [row[3] for row in rows] == [*map(str, range(1, 101)), "mean"]
    assert rows[41][4] == f"{100 * np.mean([r['accuracy']['ncm']['1'][-1][41] for r in results]):.1f}"
    assert seen.tags.count("img") == 6


@pytest.mark.slow
def test_training_on_the_final_memory_has_no_metrics_over_time(make, tmp_path, read_page):
    for seed in range(2):
        make(seed, after=[4], train_on="final_memory")
    seen = read_page(write_report([tmp_path / "runs"])[0])
    assert [row[3] for row in seen.tables["main"]] == ["AF M=64", "-", "-"]
    assert "new" not in [row[3] for row in seen.tables["tasks"]]
    # No curve and no matrix, but buffer overfitting, cost, confusion and time.
    assert seen.tags.count("img") == 4
    assert (tmp_path / "runs" / "report" / "tables" / "main.csv").read_text().splitlines()[1].endswith(",")


def test_folders_that_cannot_be_used_are_named_and_skipped(make, tmp_path, read_page, capsys, no_figures):
    for seed in range(5):
        make(seed)
    runs = tmp_path / "runs"
    whole = (runs / "run-000" / "results.json").read_text()
    (runs / "run-001" / "results.json").write_text(whole[: len(whole) // 2])
    (runs / "run-002" / "results.json").unlink()
    (runs / "run-003" / "results.json").write_text('{"accuracy": 0.9}')
    make(0)
    assert main(["report", str(runs)]) == 0
    out, err = capsys.readouterr()
    page = runs / "report" / "report.html"
    assert out.strip() == str(page)
    seen = read_page(page)
    assert [row[2] for row in seen.tables["runs"][1:]] == ["0", "4"]
    reasons = {
        "run-001": "truncated",
        "run-002": "not finished",
        "run-003": "schema_version",
        "run-005": "same settings and seed",
    }
    for name, reason in reasons.items():
        assert re.search(rf"{name}: .*{reason}", err)
        assert re.search(rf"{name}: .*{reason}", page.read_text())


def test_incomparable_runs_are_refused_unless_forced(make, tmp_path, read_page, capsys, no_figures):
    make(0)
    make(0, tasks=4)
    with pytest.raises(IncomparableRuns, match="the number of tasks differs"):
        write_report([tmp_path / "runs"])
    assert main(["report", str(tmp_path / "runs")]) == 2
    assert "--force" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "report").exists()
    assert main(["report", str(tmp_path / "runs"), "--force"]) == 0
    page = tmp_path / "runs" / "report" / "report.html"
    assert "The number of tasks differs: 5 (" in page.read_text()


def test_test_and_validation_images_are_not_mixed(make, tmp_path, no_figures):
    held_out = {"evaluate_on": "validation", "stream": {"validation": 0.1}}
    make(0, **held_out)
    make(1, **held_out)
    text = write_report([tmp_path / "runs"])[0].read_text()
    assert "Report on digits, validation images" in text
    assert "Accuracies are percent of validation images" in text
    assert "The paper has no numbers for validation images of digits" in text
    make(0)
    with pytest.raises(
        IncomparableRuns, match=r"the images evaluated on differs: test .*, validation .*share of train"
    ):
        write_report([tmp_path / "runs"])
    text = write_report([tmp_path / "runs"], force=True)[0].read_text()
    assert "percent of test or validation images" in text
    assert "evaluate_on=validation" in text and "evaluate_on=test" in text


def test_kinds_of_streams_are_not_mixed(make, tmp_path, no_figures):
    """Nor one kind with other settings; settings of other kinds and the seed do not matter."""
    make(0, stream={"kind": "imbalanced", "imbalance": 20.0})
    make(1, stream={"kind": "imbalanced", "imbalance": 20.0, "blur": 0.3})
    make(2, stream={"kind": "imbalanced", "imbalance": 20.0, "kind_seed": 1})
    text = write_report([tmp_path / "runs"])[0].read_text()
    assert "Report on digits, imbalanced (imbalance 20), test images" in text
    assert "The seed of the stream&#39;s kind differs: 0 (" in text
    for stream in ({"kind": "imbalanced", "imbalance": 50.0}, {}):
        make(0, stream=stream)
        with pytest.raises(IncomparableRuns, match=r"the kind of the stream differs: .*imbalanced \(imbalance 20\) \("):
            write_report([tmp_path / "runs"])
    assert "kind=tasks" in write_report([tmp_path / "runs"], force=True)[0].read_text()


def test_a_stream_without_task_boundaries_has_no_forgetting_and_no_tasks(tmp_path, monkeypatch, read_page):
    drawn = {}

    def keep(name, title, caption, figure):
        drawn[name] = figure.axes[0], caption
        return Picture(name, title, caption, b"", b"")

    monkeypatch.setattr("mose_fast.present.report_figures._picture", keep)
    stream = {"name": "digits", "limit_per_task": 20, "kind": "blurry"}
    settings = {"stream": stream, "width": 1, "memory": 20, "buffer_batch": 8, "device": "cpu", "evaluate_every": 1}
    found = [run(method="er", seed=seed, out=tmp_path / "runs" / str(seed), **settings) for seed in (0, 1)]
    page = read_page(write_report([tmp_path / "runs"])[0])
    (row,) = page.tables["main"][1:]
    assert row == ["experience replay", "linear, expert 1", shown([r["acc"]["linear"]["1"] for r in found]), "-"]
    heading, row = page.tables["estimates"]
    cells = dict(zip(heading, row, strict=True))
    assert cells["AF"] == cells["AF 95 % t"] == cells["AF released"] == "-"
    assert cells["anytime (task ends)"] == shown([r["average_anytime_accuracy"]["linear"]["1"] for r in found])
    assert [row[3] for row in page.tables["tasks"][1:]] == ["E1"]  # no "new"
    assert not {"new-task-and-bof", "accuracy-matrix", "confusion"} & drawn.keys()
    axis, caption = drawn["accuracy"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("parts seen", "accuracy on the classes seen (%)")
    assert caption.startswith(
        "Accuracy on the classes seen so far, after each part of the stream, which has no task boundaries"
    )
    (curve,) = axis.get_lines()  # no line of chance
    assert "chance" not in caption
    mean = np.mean([[100 * row[0] for row in r["accuracy"]["linear"]["1"]] for r in found], axis=0)
    assert curve.get_xdata().tolist() == [1, 2, 3, 4, 5] and curve.get_ydata() == pytest.approx(mean)
    assert "vertical lines are ends of parts" in drawn["anytime"][1]


def test_accuracy_at_any_time_is_drawn_with_the_ends_of_tasks(make, tmp_path, monkeypatch):
    """Runs that were evaluated at other times are not averaged with them."""
    drawn = []
    monkeypatch.setattr("mose_fast.present.report_figures._picture", lambda *parts: drawn.append(parts) or None)
    results = [make(seed, images_seen=[50, 100, 150, 200], evaluate_every=5) for seed in range(2)]
    make(0, preset="paper")
    make(0, images_seen=[70, 100], changes={"temperature": 0.1})
    make(1, images_seen=[50, 100], changes={"temperature": 0.1})
    groups, _ = group_runs(read_folders([tmp_path / "runs"])[0])
    figures(groups)
    ((_, title, caption, figure),) = [parts for parts in drawn if parts[0] == "anytime"]
    (axis,) = figure.axes
    lines = {line.get_label(): line for line in axis.lines}
    assert sorted(line.get_xdata()[0] for line in axis.lines if len(set(line.get_xdata())) == 1) == [100, 200]
    line = lines["MOSE released"]
    assert line.get_xdata().tolist() == [50, 100, 150, 200]
    curves = [run["anytime"]["accuracy"]["ncm"]["4"] for run in results]
    assert line.get_ydata() == pytest.approx(100 * np.mean(curves, axis=0))
    assert len([label for label in lines if label.startswith("MOSE")]) == 1
    assert title == "Accuracy at any time" and "on 256 fixed test images" in caption
    (table,) = [table for table in tables(groups) if table.name == "estimates"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    by_method = {row["method"]: row["anytime (stream)"] for row in rows if row["classifier"] == "NCM, expert 4"}
    assert by_method["MOSE paper"] is None
    average = [run["anytime"]["average"]["ncm"]["4"] for run in results]
    assert by_method["MOSE released"].mean == pytest.approx(100 * np.mean(average))


def test_differing_protocols_are_told(make, tmp_path, no_figures):
    make(0)
    make(0, changes={"augment": "simclr"})
    page, _ = write_report([tmp_path / "runs"])
    assert "The augmentation differs: " in page.read_text()
    assert "MOSE, augment=simclr" in page.read_text()


def test_precision_is_what_a_run_had_not_what_was_asked_for(make, tmp_path, no_figures):
    """``auto`` of a GPU and ``auto`` of a CPU are two settings; ``auto`` that became fp32 and fp32
    itself are one.
    """
    make(0)
    make(1, precision="fp32")
    make(0, resolved={"precision": "bf16"})
    groups, skipped = group_runs(read_folders([tmp_path / "runs"])[0])
    assert skipped == []
    assert {group.label: [run.seed for run in group.runs] for group in groups} == {
        "MOSE, precision=fp32": [0, 1],
        "MOSE, precision=bf16": [0],
    }
    page, _ = write_report([tmp_path / "runs"])
    assert "The precision differs: " in page.read_text()


def test_no_runs_no_folder_and_no_permission_are_errors(make, tmp_path, no_figures):
    make(0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"no finished run in .*empty"):
        write_report([tmp_path / "empty"])
    with pytest.raises(RunError, match=r"there is no folder .*missing"):
        write_report([tmp_path / "missing"])
    with pytest.raises(RunError, match=r"cannot write the report into .*file"):
        write_report([tmp_path / "runs"], tmp_path / "file")


BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
# Writes which tables are wider than their room.
PROBE = """<pre id="probe"></pre><script>
for (const fold of document.querySelectorAll("details")) fold.open = true;
const wide = [...document.querySelectorAll(".wide")].filter(room => room.scrollWidth > room.clientWidth);
document.getElementById("probe").textContent = "cut: " + wide.map(room => room.firstChild.id).join(" ") + ";";
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_every_table_fits_into_1280_pixels(make, tmp_path, no_figures):
    """With all columns: those of the paper's numbers and of the accuracy at any time."""
    for seed in range(3):
        stream = {"name": "split-cifar100"}
        make(seed, memory=5000, tasks=10, stream=stream, images_seen=[100 * n for n in range(1, 11)])
        make(seed, memory=1000, tasks=10, stream=stream, changes={"augment": "simclr", "adapter": False})
    page, _ = write_report([tmp_path / "runs"])
    page.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--dump-dom"]
    seen = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"cut: (.*?);", seen.rpartition("<script>")[0])[1] == ""


def test_a_full_disk_has_advice_for_a_report(make, tmp_path, no_figures, monkeypatch):
    make(0)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mose_fast._files.os.fsync", full)
    with pytest.raises(RunError, match=r"report\.html .*: No space left.* then run the same command again$") as refusal:
        write_report([tmp_path / "runs"], tmp_path / "out")
    assert "resume" not in str(refusal.value)


def test_an_earlier_report_is_replaced_and_other_files_stay(make, tmp_path, read_page, no_figures):
    make(0)
    make(1, preset="paper")
    make(0, preset="paper")
    page, _ = write_report([tmp_path / "runs"], tmp_path / "out")
    assert (tmp_path / "out" / "tables" / "comparisons.md").exists()
    mine = [tmp_path / "out" / name for name in ("mine.txt", "tables/thesis.tex")]
    for file in mine:
        file.write_text("kept")
    (tmp_path / "out" / "tables" / ".main.csv.ab0_xyz9").touch()  # what a killed write leaves
    write_report([tmp_path / "runs" / "run-000"], tmp_path / "out")
    assert not (tmp_path / "out" / "tables" / "comparisons.md").exists()
    assert [file.read_text() for file in mine] == ["kept"] * 2
    assert not list((tmp_path / "out").rglob(".*"))
    assert len(read_page(page).tables["runs"]) == 2


@pytest.mark.parametrize("name", ["report.html", "tables/main.tex", "figures/accuracy.pdf"])
def test_files_that_no_report_wrote_are_neither_deleted_nor_replaced(make, tmp_path, name, monkeypatch):
    picture = Picture("accuracy", "title", "caption", b"<svg/>", b"%PDF")
    monkeypatch.setattr("mose_fast.present.report.figures", lambda groups: [picture])
    make(0)
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(RunError, match="choose another --out"):
        write_report([tmp_path / "runs"], tmp_path / "out")
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [file]
    assert file.read_text() == "mine"


def test_runs_on_different_data_of_one_name_are_refused(make, tmp_path, no_figures):
    make(0, stream={"fingerprint": "a" * 16})
    make(1, stream={"fingerprint": "b" * 16})
    with pytest.raises(IncomparableRuns, match=f"the data of stream 'digits' differ: {'a' * 16} .*, {'b' * 16} "):
        write_report([tmp_path / "runs"], tmp_path / "out")
    page, _ = write_report([tmp_path / "runs"], tmp_path / "out", force=True)
    assert "the data of stream &#39;digits&#39; differ" in page.read_text().lower()
    # They stay apart, each with rows of its own.
    table = (tmp_path / "out" / "tables" / "main.csv").read_text()
    assert [f"data={data}" in table for data in ("a" * 16, "b" * 16)] == [True] * 2


def test_names_are_escaped(make, tmp_path, read_page, no_figures):
    make(0, stream={"name": "/data/<b>my_set & 50 %"})
    page, _ = write_report([tmp_path / "runs"])
    assert "<b>" not in page.read_text()
    assert "&lt;b&gt;my_set &amp; 50 %" in page.read_text()
    assert r"$<$b$>$my\_set \& 50 \%" in (page.parent / "tables" / "main.tex").read_text()


@pytest.mark.slow
def test_many_settings_show_the_best_and_say_so(make, tmp_path, read_page):
    acc = {}
    for student in range(1, 5):
        for rate in (0.1, 0.2, 0.3, 0.4):
            changes = {"student": student, "lr": rate}
            acc[student, rate] = make(student, changes=changes)["acc"]["ncm"]["4"]
    seen = read_page(write_report([tmp_path / "runs"])[0])
    assert len(seen.tables["main"]) == 1 + 2 * 16
    told = [
        caption
        for caption in seen.captions
        if "with the highest ACC; " in caption or "with the highest ACC, " in caption
    ]
    assert [int(re.search(r"(\d+) settings? more", caption)[1]) for caption in told] == [8, 8, 4, 4]


def test_the_paper_stands_beside_runs_of_its_protocol(make, tmp_path, read_page, numbers, no_figures):
    cifar = {"name": "split-cifar100", "limit_per_task": None}
    for memory in (1000, 5000):
        for seed in range(2):
            make(seed, memory=memory, tasks=10, width=64, stream=cifar)
    page, _ = write_report([tmp_path / "runs"])
    tables = read_page(page).tables
    rows = {row[0]: row[1:] for row in tables["main"] if row[1] == "paper"}
    assert rows["MOSE"] == ["paper", "35.1 ± 0.4", "54.8 ± 0.4", "36.9 ± 0.3", "13.5 ± 0.5"]
    assert rows["ER"] == ["paper", "15.7 ± 0.3", "28.8 ± 0.8", "66.1 ± 1.3", "60.0 ± 1.6"]
    assert len(rows) == 20
    heading, *estimates = tables["estimates"]
    mine = dict(zip(heading, estimates[3], strict=True))
    assert (mine["classifier"], mine["M"]) == ("NCM, mean of experts", "5,000")
    assert (mine["paper ACC"], mine["paper AF"]) == ("55.6 ± 0.4", "12.7 ± 0.4")
    assert numbers(mine["difference"]) == pytest.approx([numbers(mine["ACC"])[0] - 55.6], abs=0.11)
    assert "Not the protocol" not in page.read_text()
    assert tables["experts"][-1][:8] == ["MOSE, paper", "5,000", "15", "47.1", "51.0", "53.5", "54.6", "55.6"]


def test_no_difference_to_the_paper_is_drawn_from_another_protocol(make, tmp_path, read_page, no_figures):
    cifar = {"name": "split-cifar100", "limit_per_task": None}
    make(0, memory=1000, tasks=10, width=32, stream=cifar, changes={"augment": "simclr"})
    page, _ = write_report([tmp_path / "runs"])
    mine = dict(zip(*read_page(page).tables["estimates"][:2], strict=True))
    assert (mine["paper ACC"], mine["difference"]) == ("35.1 ± 0.4", "-")
    told = "Not the protocol of the paper's numbers (width 32 instead of 64, augment simclr): MOSE, M = 1000."
    assert told in html.unescape(page.read_text())
