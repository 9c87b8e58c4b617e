"""The appendix's figures of MOSE's variants by task: average and final accuracy at three memory
sizes, and the tables of the final accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mose_fast.experiments.paper import measures
from mose_fast.experiments.paper.description import Entry, Figure, PaperTable, Part
from mose_fast.experiments.paper.rows import (
    MAIN_MEMORIES,
    NO_NUMBER,
    TASKS,
    Presets,
    by_memory,
    final_by_task,
    mose,
    table,
    thousands,
)
from mose_fast.present.published import Published, numbers

__all__ = ["augmentation", "classifier", "student"]

#: A row by task: its name, runs, classifier and expert, and the paper's final accuracies.
Row = tuple[str, dict[str, Any], str, str, Mapping[str, Published]]

_AVERAGE, _FINAL = "average accuracy (%)", "final accuracy (%)"
_NO_AVERAGES = f"Average accuracies after each task: {NO_NUMBER} Their last points are the averages of the final ones."


def student(presets: Presets) -> PaperTable:
    """Each expert as the student of reverse self-distillation."""

    def rows(memory: int, *, moe: bool) -> Iterable[Row]:
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
    return table(
        "Reverse self-distillation into another expert, Split CIFAR-100 (tab:rsd_final, fig:rsd_avg, fig:rsd_final)",
        [*final, *moe_final, *average, *moe_average],
        f"fig:rsd_final, mean of experts: {NO_NUMBER}",
        _NO_AVERAGES,
        section="Ablation and analysis",
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


def augmentation(presets: Presets) -> PaperTable:
    """Two kinds of augmentation, each with and without the mirrored copy of every row."""
    # The colour jitter of the code behind these numbers clamped normalised images to [0, 1].
    views = {"SCR": {"augment": "scr", "jitter_domain": "normalised"}, "SimCLR": {}}

    def rows(memory: int) -> Iterable[Row]:
        for row, theirs in numbers("tab:da_final", memory).items():
            options = dict(views[row.removesuffix(" w/o flip")])
            if row.endswith("w/o flip"):
                options["inner_views"] = 1
            yield row, mose(presets, memory, **options), "ncm", "last", theirs

    average, final = _average_and_final(rows, ("fig:da", "tab:da_final"))
    return table(
        "Augmentation and the fixed mirrored copy of every row, Split CIFAR-100 (tab:da_final, fig:da)",
        [*final, *average],
        "w/o flip: without the fixed mirrored copy that doubles the rows (inner_views = 1). SCR: with the"
        " colour jitter that clamps normalised images, as in the code behind the paper's numbers (jitter_domain"
        " = normalised); unit would be the repaired one.",
        _NO_AVERAGES,
        section="Ablation and analysis",
        caption=(
            "Accuracy on each task after the last one, in percent, with the augmentation of SCR and of SimCLR, each"
            " with and without the mirrored copy of every row; and the average over the tasks so far, after each task."
            " In the paper SimCLR's with the copy is best."
        ),
        figures=[
            _two_rows(
                "fig:da",
                "MOSE with the augmentation of SCR and of SimCLR, with and without the mirrored copy of every row"
                " (flip)",
                average,
                final,
            )
        ],
    )


def classifier(presets: Presets) -> PaperTable:
    """Nearest class mean and linear classifier, of the last expert and of the mean of experts."""
    views = {
        "linear": ("linear", "last"),
        "NCM": ("ncm", "last"),
        "linear(MOE)": ("linear", "mean"),
        "NCM(MOE)": ("ncm", "mean"),
    }

    def rows(memory: int) -> Iterable[Row]:
        for row, theirs in numbers("tab:ncm_final", memory).items():
            yield row, mose(presets, memory), *views[row], theirs

    average, final = _average_and_final(rows, ("fig:ncm", "tab:ncm_final"))
    return table(
        "Nearest class mean against linear classifier, Split CIFAR-100 (tab:ncm_final, fig:ncm)",
        [*final, *average],
        _NO_AVERAGES,
        section="Ablation and analysis",
        caption=(
            "Accuracy on each task after the last one, in percent, by the linear classifier and by the nearest class"
            " mean (NCM), of the last expert and of the mean of experts (MOE); and the average over the tasks so far,"
            " after each task. In the paper NCM is better; the linear classifier prefers the newest task."
        ),
        figures=[
            _two_rows(
                "fig:ncm",
                "Nearest class mean (NCM) and linear classifier of MOSE's last expert and of the mean of its experts"
                " (MOE)",
                average,
                final,
            )
        ],
    )


def _two_rows(source: str, what: str, average: list[Part], final: list[Part]) -> Figure:
    """A figure of average accuracies above final ones."""
    caption = (
        f"{what}, at three memory sizes: (a) to (c) average accuracy over the tasks so far, after each task; (d) to (f)"
        " final accuracy on each task, after the last one."
    )
    panels = (*by_memory(average, _AVERAGE, ends=final), *by_memory(final, _FINAL))
    return Figure(source, caption, "task", panels)


def _average_and_final(
    rows: Callable[[int], Iterable[Row]], sources: tuple[str, str], of: str = ""
) -> tuple[list[Part], list[Part]]:
    """By memory size: average accuracy after each task, and final accuracy by task."""
    average, final = [], []
    for memory in MAIN_MEMORIES:
        found, size = list(rows(memory)), thousands(memory)
        entries = tuple(
            Entry(row, f"task {task + 1}", runs, measures.accuracy_after(task, None, classifier, expert))
            for row, runs, classifier, expert, _ in found
            for task in range(TASKS)
        )
        average.append(Part(f"{size}: average accuracy{of} after each task", sources[0], entries))
        entries = tuple(entry for row in found for entry in final_by_task(*row))
        final.append(Part(f"{size}: final accuracy{of} by task", sources[1], entries))
    return average, final
