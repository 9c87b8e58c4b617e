"""The figures: what is drawn, against values worked out by hand."""

import itertools
import re

import numpy as np
import pytest
from matplotlib import rc_context
from PIL import Image

from mose_fast.experiments.cells import Failure
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.paper.measured import FinishedRuns
from mose_fast.experiments.paper.paper_figures import KINDS, PRINT_STYLE, draw, write_figures
from mose_fast.experiments.paper.plan import Plan
from mose_fast.experiments.paper.tables import TABLES, describe
from mose_fast.present.published import numbers

# Half the 95 % interval of the mean of three values a point apart: 4.303 / sqrt(3).
HALF = 4.30265 / 3**0.5
DRAWN = [name for name in TABLES if describe(name).figures]


def accuracy(config, classifier, expert):
    """Between seeds a point apart; by epochs, memory and experts; a task loses two points with each
    later one.
    """
    after, task = np.indices((10, 10))
    base = 0.5 + 0.01 * config.seed + 0.01 * config.epochs + 0.02 * expert + config.memory / 1e5
    return np.tril(base - 0.02 * (after - task) - 0.05 * (classifier == "linear"))


def seconds(config):
    """Between seeds a minute apart; ER takes ten minutes, the longer a method's name the longer."""
    return 60 * (8 + len(config.method) + config.seed - 1)


@pytest.fixture
def runs(store, tmp_path):
    """A function from a table's name to its plan and the folder with its made-up runs."""

    def make(name, seeds=(0, 1, 2), without=lambda config: False):
        plan, folder = Plan(name, seeds), SweepFolder(tmp_path / name)
        store(folder, [cell for cell in plan.cells if not without(cell.config)], accuracy, seconds)
        return plan, folder

    return make


def measured(plan, folder, failures=()):
    return FinishedRuns([plan], folder, {cell.name: cell.name for cell in plan.cells}).measure(plan, failures)


def drawn(plan, folder, number=0, failures=()):
    """A figure of a table, as matplotlib has it."""
    with rc_context(PRINT_STYLE):
        made = draw(plan.description.figures[number], measured(plan, folder, failures))
        made.draw_without_rendering()
    return made


def written(plan, folder):
    """The files of a table's figures, and the SVGs as :func:`write_figures` returns them."""
    svgs = write_figures(measured(plan, folder), folder)
    return svgs, {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}


def failed(cells):
    return [Failure(cell.name, "broken on purpose", "", "") for cell in cells]


def lines(axis):
    """The curves of a panel by name, as lists of points."""
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in axis.lines
        if not line.get_label().startswith("_") and len(line.get_xdata())
    }


def marks(axis):
    """The paper's numbers in a panel, by colour, as lists of points."""
    return {
        line.get_markeredgecolor(): list(zip(*line.get_data(), strict=True))
        for line in axis.lines
        if line.get_markerfacecolor() == "none" and len(line.get_xdata())
    }


def bands(axis):
    """Low and high ends of the intervals of a panel's curves, by place."""
    found = []
    for band in axis.collections:
        ends = {}
        for path in band.get_paths():
            for x, y in path.vertices:
                low, high = ends.get(x, (y, y))
                ends[x] = (min(low, y), max(high, y))
        found += [ends] if ends else []
    return found


def texts(figure):
    """All that is written in a figure."""
    found = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    found += [figure._suptitle.get_text()] if figure._suptitle else []
    return found


def test_means_and_intervals_of_the_dilemma(runs):
    figure = drawn(*runs("dilemma"))
    first, second, both, joint = figure.axes
    # Seeds 0 to 2: the middle one's accuracy is the mean. ER's only expert, linear classifier,
    # M = 1k: 0.5 + 0.01 + 0.02 + 0.01 - 0.05 = 0.49, and 0.01 for each epoch; task 1 is a task old.
    epochs = (1, 2, 4, 8)
    assert lines(first)["ER"] == [(e, pytest.approx(47 + e)) for e in epochs]
    assert lines(second)["ER + aug"] == [(e, pytest.approx(49 + e)) for e in epochs]
    assert lines(both)["SCR + aug"] == [(e, pytest.approx(53 + e)) for e in epochs]
    for axis in (first, second, both):
        assert list(lines(axis)) == ["ER", "ER + aug", "SCR + aug"]
        means = [dict(points) for points in lines(axis).values()]
        for ends, mean in zip(bands(axis), means, strict=True):
            assert {x: (y - HALF, y + HALF) for x, y in mean.items()} == {
                x: tuple(map(pytest.approx, end)) for x, end in ends.items()
            }
    # Trained on the memory alone: samples in it are all known, so BOF is 1 / accuracy - 1.
    test = [[0.48 + 0.01 * s + 0.08 - 0.02 * (9 - t) for t in range(10)] for s in range(3)]
    assert lines(joint)["joint"][-1] == (8, pytest.approx(np.mean(1 / np.array(test) - 1)))
    assert [axis.get_title() for axis in figure.axes] == [
        "(a) task 1, t = 2",
        "(b) task 2, t = 2",
        "(c) both tasks, t = 2",
        "(d) final memory alone",
    ]
    assert [axis.get_ylabel() for axis in figure.axes] == ["accuracy (%)", "", "", "BOF"]
    assert {axis.get_xlabel() for axis in figure.axes} == {"epochs"}
    assert first.get_ylim() == second.get_ylim() == both.get_ylim() != joint.get_ylim()
    assert texts(figure) == ["ER", "ER + aug", "SCR + aug", "joint", "joint + aug", "95 % interval, n = 3"]


def test_number_of_experts(runs):
    figure = drawn(*runs("experts"))
    acc, af = figure.axes
    # At the end tasks are 4.5 tasks old on average: 0.5 + 0.01 + 0.01 + 0.02 n + M / 1e5 - 0.09.
    names = {"M = 200": 200, "M = 500": 500, "M = 1k": 1000, "M = 2k": 2000}
    for name, memory in names.items():
        assert lines(acc)[name] == [(n, pytest.approx(43 + 2 * n + memory / 1000)) for n in range(1, 9)]
    assert (acc.get_ylabel(), af.get_ylabel()) == ("ACC (%)", "AF (%)")
    assert acc.get_xticks().tolist() == list(range(1, 9))
    looks, others = (
        [
            (line.get_color(), line.get_marker(), line.get_linestyle())
            for line in axis.lines
            if line.get_label() in names
        ]
        for axis in (acc, af)
    )
    assert len(set(looks)) == len({colour for colour, *_ in looks}) == len({marker for _, marker, _ in looks}) == 4
    assert looks == others


def test_students(runs):
    plan, folder = runs("student")
    average, final = drawn(plan, folder, 0), drawn(plan, folder, 1)
    assert [axis.get_title() for axis in average.axes] == [
        f"({letter}) {who}, M = {size}"
        for letter, (who, size) in zip("abcdef", itertools.product(("student", "MOE"), ("1k", "2k", "5k")), strict=True)
    ]
    for column, memory in enumerate((1000, 2000, 5000)):
        base = 50 + 1 + 1 + memory / 1000
        for expert in range(1, 5):
            # After task t, its tasks are (t - 1) / 2 tasks old on average; the last ten at the end.
            so_far = [(t, pytest.approx(base + 2 * expert - (t - 1))) for t in range(1, 11)]
            at_end = [(t, pytest.approx(base + 2 * expert - 2 * (10 - t))) for t in range(1, 11)]
            assert lines(average.axes[column])[f"E{expert}"] == so_far
            assert lines(final.axes[column])[f"E{expert}"] == at_end
        # The mean of four experts is 2.5 times the step above the base, whoever the student is.
        for points in lines(average.axes[3 + column]).values():
            assert points == [(t, pytest.approx(base + 5 - (t - 1))) for t in range(1, 11)]
    assert [axis.get_ylabel() for axis in final.axes] == ["final accuracy (%)", "", ""] * 2
    assert len({axis.get_ylim() for axis in final.axes}) == 1
    assert "the paper" in texts(average) and "the paper" in texts(final)


@pytest.mark.parametrize(
    ("name", "number", "first", "label"),
    [("student", 1, 0, "tab:rsd_final"), ("augmentation", 0, 3, "tab:da_final"), ("classifier", 0, 3, "tab:ncm_final")],
)
def test_marks_are_the_papers_numbers(runs, name, number, first, label):
    plan, folder = runs(name, seeds=[0])
    final = drawn(plan, folder, number)
    average = drawn(plan, folder, 0)
    for column, memory in enumerate((1000, 2000, 5000)):
        axis, theirs = final.axes[first + column], numbers(label, memory)
        colours = {line.get_label(): line.get_color() for line in axis.lines if line.get_label() in theirs}
        assert list(colours) == list(theirs)
        assert marks(axis) == {
            colours[row]: [(t, cells[str(t)].mean) for t in range(1, 11)] for row, cells in theirs.items()
        }
        # The average after the last task is the average that the table prints.
        assert marks(average.axes[column]) == {
            colours[row]: [(10, cells["average"].mean)] for row, cells in theirs.items()
        }
    assert "the paper" in texts(final)


@pytest.mark.slow
def test_rows_of_augmentation_and_classifier(runs):
    augmentation, classifier = drawn(*runs("augmentation")), drawn(*runs("classifier"))
    assert list(lines(augmentation.axes[5])) == ["SCR w/o flip", "SimCLR w/o flip", "SCR", "SimCLR"]
    # The fourth expert and the mean, 3 points lower; the linear classifier 5 points lower.
    by_row = {row: points[-1] for row, points in lines(classifier.axes[5]).items()}
    assert by_row == {
        "linear": (10, pytest.approx(60)),
        "NCM": (10, pytest.approx(65)),
        "linear(MOE)": (10, pytest.approx(57)),
        "NCM(MOE)": (10, pytest.approx(62)),
    }
    assert [lines(classifier.axes[2])[row][-1] for row in by_row] == [
        (10, pytest.approx(y - 9)) for _, y in [(10, 60), (10, 65), (10, 57), (10, 62)]
    ]


def test_new_tasks_and_overfitting(runs):
    plan, folder = runs("bof")
    methods, new, old = (drawn(plan, folder, number) for number in range(3))
    assert [axis.get_title() for axis in methods.axes] == ["(a) new task", "(b) old tasks"]
    # New tasks: 50 + 1 for the seed + 1 for the epoch + 2 for each expert + 1 for M = 1k.
    wanted = {"MOSE": 61, "ER + aug": 50, "SCR + aug": 55}
    for row, value in wanted.items():
        assert lines(methods.axes[0])[row] == [(t, pytest.approx(value)) for t in range(1, 11)]
    after_two = {row: np.mean([100 / (value - 2 + s) - 1 for s in (-1, 0, 1)]) for row, value in wanted.items()}
    assert {row: points[0] for row, points in lines(methods.axes[1]).items()} == {
        row: (2, pytest.approx(value)) for row, value in after_two.items()
    }
    for figure in (new, old):
        assert [axis.get_title() for axis in figure.axes] == [
            f"({letter}) {rsd} RSD, M = {size}"
            for letter, (rsd, size) in zip(
                "abcdef", itertools.product(("without", "with"), ("1k", "2k", "5k")), strict=True
            )
        ]
    assert lines(new.axes[2])["E3"] == [(t, pytest.approx(63)) for t in range(1, 11)]
    assert [x for x, _ in lines(old.axes[4])["E1"]] == list(range(2, 11))


def test_each_panel_has_the_runs_that_it_names(runs):
    """The runs without RSD fail: the panels with RSD stay."""
    plan, folder = runs("bof", without=lambda config: getattr(config.options, "distillation", None) == "off")
    for number in (1, 2):
        figure = drawn(plan, folder, number)
        assert [len(lines(axis)) for axis in figure.axes] == [0, 0, 0, 4, 4, 4]
        assert "Missing: E1, E2, E3, E4 in (a) to (c)." in texts(figure)


def test_times(runs):
    minutes, ratios = drawn(*runs("time")).axes
    rows = [label.get_text() for label in minutes.get_yticklabels()]
    assert (rows[0], rows[-1], len(rows)) == ("A-GEM", "MOSE", 19)
    bars = {rows[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in minutes.patches}
    assert bars["ER"] == pytest.approx(10) and bars["MOSE"] == pytest.approx(12) and bars["GDumb"] == pytest.approx(13)
    (er,) = [line for line in minutes.lines if list(line.get_ydata()) == [rows.index("ER")] * 2]
    assert er.get_xdata() == pytest.approx([10 - HALF, 10 + HALF])
    bars = {rows[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in ratios.patches}
    assert bars["MOSE"] == pytest.approx(np.mean([11 / 9, 12 / 10, 13 / 11]))
    theirs = numbers("fig:training_time", "text")["MOSE"]
    place = rows.index("MOSE")
    assert (theirs["minutes"].mean, place) in marks(minutes)["black"]
    assert (theirs["ratio"].mean, place) in marks(ratios)["black"]
    assert (ratios.get_xlabel(), minutes.get_xlabel()) == ("times ER", "minutes")
    colours = [bar.get_facecolor() for bar in minutes.patches]
    assert colours[-1] not in colours[:-1] and len(set(colours[:-1])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "student", "time"])  # one column, both, and bars
def test_files_are_equal_for_equal_runs_and_of_print_size(name, runs):
    plan, folder = runs(name, seeds=[0, 1])
    svgs, before = written(plan, folder)
    assert written(plan, folder) == (svgs, before)
    stems = [figure.stem(plan.stem) for figure in plan.description.figures]
    assert set(before) == {f"{stem}.{kind}" for stem in stems for kind in KINDS}
    for figure, stem, svg in zip(plan.description.figures, stems, svgs, strict=True):
        assert svg == before[f"{stem}.svg"]
        width = float(re.search(rb'<svg [^>]*width="([\d.]+)pt"', svg)[1])
        assert width == pytest.approx(72 * (6.875 if figure.wide else 3.25))
        assert before[f"{stem}.pdf"].startswith(b"%PDF-")
        with Image.open(folder.path / f"{stem}.png") as picture:
            assert picture.size[0] == pytest.approx(300 * width / 72, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_letters_are_of_seven_points_and_lie_inside(name, runs):
    plan, folder = runs(name, seeds=[0])
    for number in range(len(plan.description.figures)):
        figure = drawn(plan, folder, number)
        written = [text for text in figure.findobj(match=lambda artist: hasattr(artist, "get_fontsize"))]
        written = [text for text in written if text.get_visible() and text.get_text()]
        assert min(text.get_fontsize() for text in written) >= 7
        page = figure.bbox
        for text in (text for axis in figure.axes for text in (axis.title, axis.xaxis.label, axis.yaxis.label)):
            box = text.get_window_extent()
            assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0
        assert all(box.y1 < axis.xaxis.label.get_window_extent().y0 for axis in figure.axes[-1:])


def test_one_seed_has_no_interval(runs):
    figure = drawn(*runs("experts", seeds=[3]))
    assert bands(figure.axes[0]) == []
    assert len(lines(figure.axes[0])["M = 200"]) == 8
    assert texts(figure)[-1] == "One seed, so no interval."


def test_wide_intervals_do_not_squeeze_accuracies(store, tmp_path):
    """Of 20 and 80 % the interval is far wider than all accuracies."""
    plan, folder = Plan("experts", [0, 1]), SweepFolder(tmp_path)
    store(folder, plan.cells, lambda config, classifier, expert: np.tri(10) * (0.2 + 0.6 * config.seed))
    acc, _ = drawn(plan, folder).axes
    assert lines(acc)["M = 200"][0] == (1, pytest.approx(50))
    assert bands(acc)[0][1] == (pytest.approx(50 - 12.7062 * 30, abs=0.1), pytest.approx(50 + 12.7062 * 30, abs=0.1))
    assert acc.get_ylim() == (-2, 102)


def test_what_is_missing_is_said(runs):
    def lost(config):
        return config.train_on == "final_memory" or config.epochs == 8 or (config.method, config.epochs) == ("scr", 4)

    plan, folder = runs("dilemma", without=lost)
    figure = drawn(plan, folder)
    assert [x for x, _ in lines(figure.axes[0])["SCR + aug"]] == [1, 2]
    assert lines(figure.axes[3]) == {}
    missing = texts(figure)[-1].replace("\n", " ")
    assert missing == (
        "Missing: ER, ER + aug at 8 in (a) to (c); SCR + aug at 4, 8 in (a) to (c); joint, joint + aug in (d)."
    )
    assert {"joint", "joint + aug"} < set(texts(figure))


def test_failed_runs_are_left_out(runs):
    plan, folder = runs("experts")
    figure = drawn(plan, folder, failures=failed(cell for cell in plan.cells if cell.config.seed == 2))
    assert texts(figure)[-1] == "95 % interval, n = 2"
    assert lines(figure.axes[0])["M = 1k"][0] == (1, pytest.approx(45.5))


@pytest.mark.parametrize(("name", "figures"), [("dilemma", 1), ("cost", 0)])
def test_nothing_is_there(runs, name, figures):
    plan, folder = runs(name, without=lambda config: True)
    folder.path.mkdir()
    svgs, files = written(plan, folder)
    assert (len(svgs), len(files)) == (figures, figures * len(KINDS))


def test_an_interval_without_neighbours_is_drawn(runs):
    """A band has no width at a point alone."""
    plan, folder = runs("experts", seeds=[0, 1])
    others = [cell for cell in plan.cells if cell.config.options.experts != 3 and cell.config.seed == 1]
    figure = drawn(plan, folder, failures=failed(others))
    half = 12.7062 / 2  # of two values a point apart: 12.7062 * sqrt(0.5) / sqrt(2)
    for ends, points in zip(bands(figure.axes[0])[1::2], lines(figure.axes[0]).values(), strict=True):
        mean = dict(points)[3]
        assert ends == {3: (pytest.approx(mean - half), pytest.approx(mean + half))}
