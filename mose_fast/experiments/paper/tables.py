"""The tables and figures that ``mose-fast paper`` knows, and here those of ablation and analysis.

Each is described for a preset of MOSE. Augmentation is that of the submission: ``simclr`` (flip,
gray, crop), which the paper describes and the code had then; today the code's default leaves the
flip out (docs/specification/mose.md section 5.3). Standard deviations are the paper's,
over 15 runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mose_fast.experiments.paper import measures
from mose_fast.experiments.paper.description import (
    BASELINE_PRESETS,
    DEFAULT_PRESETS,
    MAIN_MEMORIES,
    NO_NUMBER,
    SMALL_MEMORIES,
    TASKS,
    Entry,
    Figure,
    Panel,
    PaperTable,
    Part,
    Presets,
    by_memory,
    by_task,
    final_by_task,
    mose,
    thousands,
)
from mose_fast.experiments.paper.dilemma_tables import bof, dilemma
from mose_fast.experiments.paper.main_tables import beyond, cost, small_buffers, table1_cifar, table1_tiny, time
from mose_fast.present.published import Published, numbers
from mose_fast.settings.run import ConfigError, method_settings, near_matches

_SECTION = "Ablation and analysis"
_AVERAGE, _FINAL = "average accuracy (%)", "final accuracy (%)"
_NO_AVERAGES = f"Average accuracies after each task: {NO_NUMBER} Their last points are the averages of the final ones."

# A row by task: its name, runs, classifier and expert, and the paper's final accuracies.
_Row = tuple[str, dict[str, Any], str, str, Mapping[str, Published]]


def describe(name: str, presets: Presets = DEFAULT_PRESETS) -> PaperTable:
    """The description of a table.

    Raises:
        ConfigError: There is no such name or preset; the message has near matches.
    """
    if name not in TABLES:
        raise ConfigError(f"there is no table {name!r}{near_matches(name, list(TABLES))}")
    if presets.mose != DEFAULT_PRESETS.mose:  # to ask the method imports torch, and a list of tables needs none
        method_settings("mose").preset(presets.mose)
    if presets.baselines not in BASELINE_PRESETS:
        raise ConfigError(
            f"baselines is {presets.baselines!r}{near_matches(presets.baselines, list(BASELINE_PRESETS))}"
        )
    return TABLES[name](presets)


def _ablation(presets: Presets) -> PaperTable:
    entries = []
    for row, number in numbers("tab:ablation", "last expert").items():
        supervision, losses = row.split(": ")
        # Without multi-level supervision only the last layer is trained: one expert.
        options: dict[str, Any] = {"experts": 1} if supervision == "w/o MLS" else {}
        options |= {
            name: "off"
            for name, loss in (("distillation", "RSD"), ("cross_entropy", "CE"), ("contrastive", "SCL"))
            if loss not in losses
        }
        entries.append(Entry(row, "ACC", mose(presets, 5000, **options), measures.average_accuracy(), number["ACC"]))
    note = (
        "All rows are classified by the nearest class mean, also those without a contrastive loss; the paper"
        " names no other for them."
    )
    return PaperTable(
        "Building blocks of MOSE, Split CIFAR-100, M = 5k (tab:ablation)",
        [Part("ACC of the last expert", "tab:ablation", tuple(entries))],
        {note: ()},
        section=_SECTION,
        caption=(
            "What each part of MOSE adds to ACC, in percent: cross-entropy (CE), supervised contrastive loss (SCL),"
            " their use at all experts instead of the last one (multi-level supervision, MLS), and reverse"
            " self-distillation (RSD). In the paper every part adds to the ones before."
        ),
    )


def _taskwise(presets: Presets) -> PaperTable:
    parts = []
    for title, options in (("w/o RSD", {"distillation": "off"}), ("w/ RSD", {})):
        runs, theirs = mose(presets, 5000, **options), numbers("tab:moe_acc", title)
        entries: list[Entry] = []
        for expert in ("1", "2", "3", "4"):
            entries += final_by_task(f"E{expert}", runs, "ncm", expert, theirs[f"E{expert}"])
        entries += by_task("MAX", runs, measures.best_final_accuracy, measures.best_final_accuracy(), theirs["MAX"])
        entries += final_by_task("MOE", runs, "ncm", "mean", theirs["MOE"])
        parts.append(Part(title, "tab:moe_acc", tuple(entries)))
    return PaperTable(
        "Accuracy by task and expert, Split CIFAR-100, M = 5k (tab:moe_acc)",
        parts,
        {"MAX: on each task the single expert whose mean over the seeds is highest, as in the paper's table.": ()},
        section=_SECTION,
        caption=(
            "Accuracy on each task after the last one, in percent, of the four experts, of the best of them on each"
            " task (MAX) and of their mean (MOE). In the paper RSD makes the last expert the best on every task, and"
            " their mean is still better."
        ),
    )


def _sd_vs_rsd(presets: Presets) -> PaperTable:
    entries = [
        Entry(row, thousands(int(memory)), mose(presets, int(memory), **options), measures.average_accuracy(), number)
        for row, options in (("SD", {"distillation": "sd"}), ("RSD", {}))
        for memory, number in numbers("tab:sd_vs_rsd", "last expert")[row].items()
    ]
    return PaperTable(
        "Self-distillation against reverse self-distillation, Split CIFAR-100 (tab:sd_vs_rsd)",
        [Part("ACC of the last expert", "tab:sd_vs_rsd", tuple(entries), 1)],
        {},
        section=_SECTION,
        caption=(
            "ACC of the last expert, in percent, if the shallow experts learn from the deepest (SD), and if the deepest"
            " learns from the shallow ones (RSD). In the paper RSD leads at all sizes of the memory."
        ),
    )


def _student(presets: Presets) -> PaperTable:
    def rows(memory: int, *, moe: bool) -> Iterable[_Row]:
        for expert in ("1", "2", "3", "4"):
            # The fourth is the deepest, which is the default.
            runs = mose(presets, memory, **({} if expert == "4" else {"student": int(expert)}))
            theirs = numbers("tab:rsd_final", memory)[f"E{expert}"]
            yield f"E{expert}", runs, "ncm", "mean" if moe else expert, {} if moe else theirs

    average, final = _average_and_final(
        lambda memory: rows(memory, moe=False), ("fig:rsd_avg", "tab:rsd_final"), " of the student"
    )
    moe_average, moe_final = _average_and_final(
        lambda memory: rows(memory, moe=True), ("fig:rsd_avg", "fig:rsd_final"), " of the mean of experts (MOE)"
    )
    about = "One of the experts, E1 to E4, as the student of reverse self-distillation, at three memory sizes:"
    panels = "(a) to (c) of the student, (d) to (f) of the mean of all experts (MOE)."
    return PaperTable(
        "Reverse self-distillation into another expert, Split CIFAR-100 (tab:rsd_final, fig:rsd_avg, fig:rsd_final)",
        [*final, *moe_final, *average, *moe_average],
        {f"fig:rsd_final, mean of experts: {NO_NUMBER}": (), _NO_AVERAGES: ()},
        section=_SECTION,
        caption=(
            "Accuracy on each task after the last one, in percent, if expert E1, E2, E3 or E4 is the one that learns"
            " from the others: of that expert, and of the mean of all experts; and the average over the tasks so far,"
            " after each task. In the paper the mean of experts hardly depends on the student."
        ),
        figures=[
            Figure(
                "fig:rsd_avg",
                f"{about} average accuracy over the tasks so far, after each task; {panels}",
                "task",
                (*by_memory(average, _AVERAGE, "student, ", ends=final), *by_memory(moe_average, _AVERAGE, "MOE, ")),
                name="average",
            ),
            Figure(
                "fig:rsd_final",
                f"{about} final accuracy on each task, after the last one; {panels}",
                "task",
                (*by_memory(final, _FINAL, "student, "), *by_memory(moe_final, _FINAL, "MOE, ")),
                name="final",
            ),
        ],
    )


def _experts(presets: Presets) -> PaperTable:
    parts = []
    for metric in (measures.average_accuracy(), measures.forgetting()):
        entries = []
        for memory in SMALL_MEMORIES:
            for experts in range(1, 9):
                options: dict[str, Any] = {} if experts == 4 else {"experts": experts}
                if experts == 1:
                    options["distillation"] = "off"  # there is nobody to learn from
                entries.append(Entry(thousands(memory), f"n = {experts}", mose(presets, memory, **options), metric))
        title = f"{metric.name} of the last expert by number of experts"
        parts.append(Part(title, "fig:num_of_exp", tuple(entries), 1))
    note = (
        f"fig:num_of_exp: {NO_NUMBER} It has four memory sizes without naming them; ours are those of"
        ' tab:sd_vs_rsd. Its text: "n = 4 balances both sides, w/o increasing too much complexity or cost".'
    )
    return PaperTable(
        "Number of experts, Split CIFAR-100 (fig:num_of_exp)",
        parts,
        {note: ()},
        section=_SECTION,
        caption=(
            "ACC and AF of the last expert, in percent, if the network is divided into one to eight experts, for four"
            " sizes of the memory."
        ),
        figures=[
            Figure(
                "fig:num_of_exp",
                "MOSE with one to eight experts, at four memory sizes: accuracy after the last task, and forgetting.",
                "number of experts",
                (Panel(parts[0], "higher is better", "ACC (%)"), Panel(parts[1], "lower is better", "AF (%)")),
                columns=2,
                wide=False,
            )
        ],
    )


def _augmentation(presets: Presets) -> PaperTable:
    # The colour jitter of the code behind these numbers clamped normalised images to [0, 1].
    views = {"SCR": {"augment": "scr", "jitter_domain": "normalised"}, "SimCLR": {}}

    def rows(memory: int) -> Iterable[_Row]:
        for row, theirs in numbers("tab:da_final", memory).items():
            options = dict(views[row.removesuffix(" w/o flip")])
            if row.endswith("w/o flip"):
                options["inner_views"] = 1
            yield row, mose(presets, memory, **options), "ncm", "last", theirs

    average, final = _average_and_final(rows, ("fig:da", "tab:da_final"))
    note = (
        "w/o flip: without the fixed mirrored copy that doubles the rows (inner_views = 1). SCR: with the"
        " colour jitter that clamps normalised images, as in the code behind the paper's numbers (jitter_domain"
        " = normalised); unit would be the repaired one."
    )
    what = "MOSE with the augmentation of SCR and of SimCLR, with and without the mirrored copy of every row (flip)"
    return PaperTable(
        "Augmentation and the fixed mirrored copy of every row, Split CIFAR-100 (tab:da_final, fig:da)",
        [*final, *average],
        {note: (), _NO_AVERAGES: ()},
        section=_SECTION,
        caption=(
            "Accuracy on each task after the last one, in percent, with the augmentation of SCR and of SimCLR, each"
            " with and without the mirrored copy of every row; and the average over the tasks so far, after each task."
            " In the paper SimCLR's with the copy is best."
        ),
        figures=[_two_rows("fig:da", what, average, final)],
    )


def _classifier(presets: Presets) -> PaperTable:
    views = {
        "linear": ("linear", "last"),
        "NCM": ("ncm", "last"),
        "linear(MOE)": ("linear", "mean"),
        "NCM(MOE)": ("ncm", "mean"),
    }

    def rows(memory: int) -> Iterable[_Row]:
        for row, theirs in numbers("tab:ncm_final", memory).items():
            yield row, mose(presets, memory), *views[row], theirs

    average, final = _average_and_final(rows, ("fig:ncm", "tab:ncm_final"))
    what = "Nearest class mean (NCM) and linear classifier of MOSE's last expert and of the mean of its experts (MOE)"
    return PaperTable(
        "Nearest class mean against linear classifier, Split CIFAR-100 (tab:ncm_final, fig:ncm)",
        [*final, *average],
        {_NO_AVERAGES: ()},
        section=_SECTION,
        caption=(
            "Accuracy on each task after the last one, in percent, by the linear classifier and by the nearest class"
            " mean (NCM), of the last expert and of the mean of experts (MOE); and the average over the tasks so far,"
            " after each task. In the paper NCM is better; the linear classifier prefers the newest task."
        ),
        figures=[_two_rows("fig:ncm", what, average, final)],
    )


def _two_rows(source: str, what: str, average: list[Part], final: list[Part]) -> Figure:
    caption = (
        f"{what}, at three memory sizes: (a) to (c) average accuracy over the tasks so far, after each task; (d) to (f)"
        " final accuracy on each task, after the last one."
    )
    panels = (*by_memory(average, _AVERAGE, ends=final), *by_memory(final, _FINAL))
    return Figure(source, caption, "task", panels)


def _average_and_final(
    rows: Callable[[int], Iterable[_Row]], sources: tuple[str, str], of: str = ""
) -> tuple[list[Part], list[Part]]:
    """By memory size: average accuracy after each task, and final accuracy by task."""
    average, final = [], []
    for memory in MAIN_MEMORIES:
        found, size = list(rows(memory)), thousands(memory)
        so_far = tuple(
            Entry(row, f"task {task + 1}", runs, measures.accuracy_after(task, None, classifier, expert))
            for row, runs, classifier, expert, _ in found
            for task in range(TASKS)
        )
        average.append(Part(f"{size}: average accuracy{of} after each task", sources[0], so_far))
        at_end = tuple(entry for row in found for entry in final_by_task(*row))
        final.append(Part(f"{size}: final accuracy{of} by task", sources[1], at_end))
    return average, final


#: By name, in the order of their page, a function from the presets to the description.
TABLES: dict[str, Callable[[Presets], PaperTable]] = {
    "table1-cifar": table1_cifar,
    "table1-tiny": table1_tiny,
    "small-buffers": small_buffers,
    "ablation": _ablation,
    "taskwise": _taskwise,
    "sd-vs-rsd": _sd_vs_rsd,
    "student": _student,
    "experts": _experts,
    "augmentation": _augmentation,
    "classifier": _classifier,
    "cost": cost,
    "time": time,
    "dilemma": dilemma,
    "bof": bof,
    "beyond": beyond,
}
