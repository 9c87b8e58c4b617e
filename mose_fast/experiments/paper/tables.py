"""The tables and figures that ``mose-fast paper`` knows, by name.

Each is described for a preset of MOSE. Augmentation is that of the submission: ``simclr`` (flip,
gray, crop), which the paper describes and the code had then; today the code's default leaves the
flip out (docs/specification/mose.md section 5.3). Standard deviations are the paper's,
over 15 runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mose_fast.experiments.paper import measures
from mose_fast.experiments.paper.appendix_tables import augmentation, classifier, student
from mose_fast.experiments.paper.description import Entry, Figure, Panel, PaperTable, Part
from mose_fast.experiments.paper.dilemma_tables import bof, dilemma
from mose_fast.experiments.paper.main_tables import table1_cifar, table1_tiny, time
from mose_fast.experiments.paper.rows import (
    BASELINE_PRESETS,
    CIFAR,
    DEFAULT_PRESETS,
    NO_NUMBER,
    SMALL_MEMORIES,
    TINY,
    Presets,
    by_task,
    final_by_task,
    mose,
    table,
    thousands,
)
from mose_fast.present.published import numbers
from mose_fast.settings.run import ConfigError, method_settings, near_matches

__all__ = ["TABLES", "describe"]


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


def _small_buffers(presets: Presets) -> PaperTable:
    entries = [
        Entry(
            "MOSE",
            f"{name} {thousands(int(memory))}",
            mose(presets, int(memory), stream, tasks=tasks),
            measures.average_accuracy(),
            number,
        )
        for stream, name, tasks in ((CIFAR, "CIFAR-100", None), (TINY, "Tiny-ImageNet", 10))
        for memory, number in numbers("tab:small", stream)["MOSE"].items()
    ]
    return table(
        "MOSE with small memories, both data sets in 10 tasks (tab:small)",
        [Part("ACC", "tab:small", tuple(entries), 1)],
        section="Main results",
        caption="ACC, in percent, where the memory holds only two to five images of each class.",
    )


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
    return table(
        "Building blocks of MOSE, Split CIFAR-100, M = 5k (tab:ablation)",
        [Part("ACC of the last expert", "tab:ablation", tuple(entries))],
        "All rows are classified by the nearest class mean, also those without a contrastive loss; the paper"
        " names no other for them.",
        section="Ablation and analysis",
        caption=(
            "What each part of MOSE adds to ACC, in percent: cross-entropy (CE), supervised contrastive loss (SCL),"
            " their use at all experts instead of the last one (multi-level supervision, MLS), and reverse"
            " self-distillation (RSD). In the paper every part adds to the ones before."
        ),
    )


def _taskwise(presets: Presets) -> PaperTable:
    parts = []
    for title, options in (("w/o RSD", {"distillation": "off"}), ("w/ RSD", {})):
        runs = mose(presets, 5000, **options)
        theirs = numbers("tab:moe_acc", title)
        entries: list[Entry] = []
        for expert in ("1", "2", "3", "4"):
            entries += final_by_task(f"E{expert}", runs, "ncm", expert, theirs[f"E{expert}"])
        entries += by_task("MAX", runs, measures.best_final_accuracy, measures.best_final_accuracy(), theirs["MAX"])
        entries += final_by_task("MOE", runs, "ncm", "mean", theirs["MOE"])
        parts.append(Part(title, "tab:moe_acc", tuple(entries)))
    return table(
        "Accuracy by task and expert, Split CIFAR-100, M = 5k (tab:moe_acc)",
        parts,
        "MAX: on each task the single expert whose mean over the seeds is highest, as in the paper's table.",
        section="Ablation and analysis",
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
    return table(
        "Self-distillation against reverse self-distillation, Split CIFAR-100 (tab:sd_vs_rsd)",
        [Part("ACC of the last expert", "tab:sd_vs_rsd", tuple(entries), 1)],
        section="Ablation and analysis",
        caption=(
            "ACC of the last expert, in percent, if the shallow experts learn from the deepest (SD), and if the deepest"
            " learns from the shallow ones (RSD). In the paper RSD leads at all sizes of the memory."
        ),
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
        parts.append(
            Part(f"{metric.name} of the last expert by number of experts", "fig:num_of_exp", tuple(entries), 1)
        )
    return table(
        "Number of experts, Split CIFAR-100 (fig:num_of_exp)",
        parts,
        f"fig:num_of_exp: {NO_NUMBER} It has four memory sizes without naming them; ours are those of"
        ' tab:sd_vs_rsd. Its text: "n = 4 balances both sides, w/o increasing too much complexity or cost".',
        section="Ablation and analysis",
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


def _cost(presets: Presets) -> PaperTable:
    settings = {"SCR+CE": {"experts": 1, "distillation": "off"}, "w/ MLS": {"distillation": "off"}, "w/ MLS, RSD": {}}
    entries = []
    for row, theirs in numbers("tab:cost", "components").items():
        large, small = (mose(presets, memory, **settings[row]) for memory in (5000, 1000))
        columns = (
            (large, measures.minutes()),
            (large, measures.parameters()),
            (large, measures.macs()),
            (small, measures.average_accuracy()),
            (small, measures.forgetting()),
        )
        for (runs, metric), number in zip(columns, theirs.values(), strict=True):
            entries.append(Entry(row, metric.name, runs, metric, number))
    title = "minutes, parameters and multiply-accumulates at M = 5k, ACC and AF at M = 1k"
    return table(
        "What the components cost, Split CIFAR-100 (tab:cost)",
        [Part(title, "tab:cost", tuple(entries))],
        "The caption says M = 5k, but ACC and AF of the last row are those of MOSE at M = 1k in tab:acc_af, so"
        " ACC and AF are of runs with M = 1k. The paper's minutes are of an RTX 3090; they are shown, not"
        " judged. Its floating-point operations come from a profiler that counts more than the"
        " multiply-accumulates of convolutions and linear layers, which ours are.",
        section="Cost",
        caption=(
            "What multi-level supervision (MLS) and reverse self-distillation (RSD) cost in time, parameters and"
            " multiply-accumulates of training, and what they gain."
        ),
    )


#: By name, in the order of their page, a function from the presets to the description.
TABLES: dict[str, Callable[[Presets], PaperTable]] = {
    "table1-cifar": table1_cifar,
    "table1-tiny": table1_tiny,
    "small-buffers": _small_buffers,
    "ablation": _ablation,
    "taskwise": _taskwise,
    "sd-vs-rsd": _sd_vs_rsd,
    "student": student,
    "experts": _experts,
    "augmentation": augmentation,
    "classifier": classifier,
    "cost": _cost,
    "time": time,
    "dilemma": dilemma,
    "bof": bof,
}
