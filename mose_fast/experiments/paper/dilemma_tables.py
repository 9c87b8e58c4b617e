"""The paper's figures of the overfitting-underfitting dilemma: section 3.3, and its appendix."""

from __future__ import annotations

from typing import Any

from mose_fast.experiments.paper import measures
from mose_fast.experiments.paper.description import (
    MAIN_MEMORIES,
    NO_NUMBER,
    TASKS,
    Entry,
    Figure,
    Panel,
    PaperTable,
    Part,
    Presets,
    baseline,
    by_memory,
    by_task,
    mose,
    thousands,
)

_SECTION = "The overfitting-underfitting dilemma"
_EPOCHS = (1, 2, 4, 8)


def dilemma(presets: Presets) -> PaperTable:
    """More epochs over each task."""
    learners = {
        "ER": ("er", "none", "linear"),
        "ER + aug": ("er", "simclr", "linear"),
        "SCR + aug": ("scr", "simclr", "ncm"),
    }
    parts = []
    for title, task in (
        ("test accuracy of task 1 when t = 2", 0),
        ("test accuracy of task 2 when t = 2", 1),
        ("mean over both tasks when t = 2", None),
    ):
        entries = []
        for row, (method, augment, classifier) in learners.items():
            for epochs in _EPOCHS:
                runs = baseline(presets, method, 1000, epochs=epochs, augment=augment)
                entries.append(Entry(row, f"epochs {epochs}", runs, measures.accuracy_after(1, task, classifier)))
        parts.append(Part(title, "fig:epoch_acc_plot", tuple(entries), 1))
    joint = []
    for row, augment in (("joint", "none"), ("joint + aug", "simclr")):
        for epochs in _EPOCHS:
            runs = baseline(presets, "er", 1000, epochs=epochs, augment=augment) | {"train_on": "final_memory"}
            joint.append(Entry(row, f"epochs {epochs}", runs, measures.overfitting("linear")))
    parts.append(Part("BOF of ER trained on the final memory alone", "fig:joint_bof", tuple(joint)))
    about_all = (
        f"{NO_NUMBER} It names the epochs 1, 2 and 8 in the text; 4 is ours. Runs go through all ten tasks, of"
        " which the first two are read. BOF: mean over the tasks."
    )
    about_er = (
        "What the text says of it: with more epochs ER does better on the current task and worse on the first"
        ' one, "even with augmentation, replaying exemplars from a fixed buffer only twice (epoch=2) yields a'
        ' substantial BOF".'
    )
    return PaperTable(
        "The overfitting-underfitting dilemma, Split CIFAR-100, M = 1k (section 3.3, fig:epoch_acc_plot)",
        parts,
        {about_all: (), about_er: ["er"]},
        section=_SECTION,
        caption=(
            "ER and SCR trained for one to eight epochs on each of the first two tasks: accuracy on the old task, on"
            " the new one and on both, in percent; and buffer overfitting (BOF) of a network trained on the final"
            " memory alone."
        ),
        figures=[
            Figure(
                "fig:epoch_acc_plot",
                "More epochs over each task: accuracy on (a) task 1, (b) task 2 and (c) both, just after task 2 was"
                " learned; (d) buffer overfitting of networks that are trained on the final memory alone. M = 1k.",
                "epochs",
                (
                    Panel(parts[0], "task 1, t = 2", "accuracy (%)"),
                    Panel(parts[1], "task 2, t = 2", "accuracy (%)"),
                    Panel(parts[2], "both tasks, t = 2", "accuracy (%)"),
                    Panel(parts[3], "final memory alone", "BOF"),
                ),
                columns=4,
            )
        ],
    )


def bof(presets: Presets) -> PaperTable:
    """New tasks and buffer overfitting of old ones."""
    parts = []

    def add(title: str, sources: tuple[str, str], rows: list[tuple[str, dict[str, Any], str, str]]) -> None:
        new, old = [], []
        for row, runs, *view in rows:
            average = measures.new_task_accuracy(None, *view)
            new += by_task(row, runs, lambda task, view=view: measures.new_task_accuracy(task, *view), average)
            for task in range(1, TASKS):
                old.append(Entry(row, f"task {task + 1}", runs, measures.overfitting_of_old_tasks(task, *view)))
            old.append(Entry(row, "average", runs, measures.overfitting_of_old_tasks(None, *view)))
        parts.append(Part(f"{title}: accuracy on each new task, in percent", sources[0], tuple(new), 1))
        parts.append(Part(f"{title}: mean BOF of the old tasks after each task", sources[1], tuple(old)))

    methods = [
        ("MOSE", mose(presets, 1000), "ncm", "last"),
        ("ER + aug", baseline(presets, "er", 1000, augment="simclr"), "linear", "last"),
        ("SCR + aug", baseline(presets, "scr", 1000, augment="simclr"), "ncm", "last"),
    ]
    add("M = 1k, MOSE and baselines", ("fig:test", "fig:bof"), methods)
    for memory in MAIN_MEMORIES:
        for title, options in (("without RSD", {"distillation": "off"}), ("with RSD", {})):
            runs = mose(presets, memory, **options)
            experts = [(f"E{expert}", runs, "ncm", expert) for expert in ("1", "2", "3", "4")]
            add(f"{thousands(memory)}, {title}", ("fig:new_expert", "fig:bof_expert"), experts)
    figures = [
        Figure(
            "fig:over-under",
            "MOSE, ER and SCR at M = 1k: (a) accuracy on each new task just after it was learned; (b) mean buffer"
            " overfitting of the old tasks then.",
            "task",
            (Panel(parts[0], "new task", "accuracy (%)"), Panel(parts[1], "old tasks", "mean BOF")),
            columns=2,
            wide=False,
            name="over-under",
        )
    ]
    for source, what, y, first, name in (
        ("fig:new_expert", "accuracy on each new task", "new-task accuracy (%)", 2, "new-task"),
        ("fig:bof_expert", "mean buffer overfitting of the old tasks", "mean BOF", 3, "old-tasks"),
    ):
        caption = (
            "MOSE's experts, E1 to E4, at three memory sizes, (a) to (c) without and (d) to (f) with reverse"
            f" self-distillation (RSD): {what}."
        )
        # Memory sizes vary slowest; for each there are four parts.
        panels = *by_memory(parts[first::4], y, "without RSD, "), *by_memory(parts[first + 2 :: 4], y, "with RSD, ")
        figures.append(Figure(source, caption, "task", panels, name=name))
    about_all = (
        f"{NO_NUMBER} BOF: (accuracy on the samples in memory - accuracy on test images) / accuracy on test"
        " images, mean over the old tasks."
    )
    about_mose = (
        'What the text says of it: deeper experts learn new tasks better, shallower ones overfit less, and "the'
        ' average BOF value of the last expert E4 is significantly improved with the help of RSD".'
    )
    return PaperTable(
        "New tasks and buffer overfitting, Split CIFAR-100 (fig:over-under, fig:new_expert, fig:bof_expert)",
        parts,
        {about_all: (), about_mose: ["mose"]},
        section=_SECTION,
        caption=(
            "How well each new task is learned just after it was seen, in percent, and how much more accurate the"
            " network is on stored samples of old tasks than on their test images (BOF): of MOSE beside ER and SCR, and"
            " of MOSE's experts with and without RSD."
        ),
        figures=figures,
    )
