"""The numbers that the paper prints, read from ``published.toml``, and the protocol behind them.

Source: Yan et al., "Orchestrate Latent Expertise: Advancing Online Continual Learning with
Multi-Level Supervision and Reverse Self-Distillation", CVPR 2024: means of 15 runs of one pass in
batches of 10 over Split CIFAR-100 (10 tasks) and Split Tiny-ImageNet (100 tasks). Accuracies and
forgetting are in percent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mose_fast.settings.run import read_table

__all__ = [
    "BASELINES",
    "RUNS",
    "Published",
    "dataset",
    "deviations",
    "doubts",
    "experts",
    "linear",
    "lookup",
    "method_name",
    "methods",
    "numbers",
    "own_row",
]

#: Runs behind each of the paper's means.
RUNS = 15


class Published(NamedTuple):
    """A number of the paper with its standard deviation, None where none is recorded."""

    mean: float
    sd: float | None = None


# The paper's name of each method, by ours: the row of its own classifier. MOSE has another row for
# the mean of its experts.
_NAMES = {
    "agem": "A-GEM",
    "er": "ER",
    "mir": "MIR",
    "gss": "GSS",
    "aser": "ASER",
    "er-aml": "ER-AML",
    "gdumb": "GDumb",
    "scr": "SCR",
    "ocm": "OCM",
    "onpro": "OnPro",
    "gsa": "GSA",
    "derpp": "DER++",
    "il2a": "IL2A",
    "co2l": "Co2L",
    "lucir": "LUCIR",
    "ccil": "CCIL",
    "bic": "BiC",
    "ssil": "SS-IL",
    "mose": "MOSE",
}
_MEAN_OF_EXPERTS = "MOE-MOSE"
# Names in full, and of methods that the paper does not have.
_OTHER_NAMES = {"er": "experience replay", "finetune": "fine-tuning", "joint": "joint training"}

#: Our names of the paper's baselines, in the order of its main table.
BASELINES = tuple(name for name in _NAMES if name != "mose")

# Methods whose row is the nearest class mean's; the others' is the linear classifier's.
_NEAREST_CLASS_MEAN = ("mose", "scr")

_TASKS = {"split-cifar100": 10, "split-tiny-imagenet": 100}
_PROTOCOL = {"epochs": 1, "train_on": "stream", "width": 64}
_STREAM = {"batch": 10, "limit_per_task": None, "class_order_seed": None, "validation": None}


@functools.cache
def numbers(table: str, panel: str | int) -> Mapping[str, Mapping[str, Published]]:
    """The numbers of one panel of a table.

    Args:
        table: The table's LaTeX label, such as ``tab:acc_af``.
        panel: The panel's name in ``published.toml``.

    Returns:
        By the row's name, the numbers by the column's heading, both in the paper's order. A number
        that the paper does not print is left out.

    Raises:
        KeyError: There is no such table or panel.
    """
    rows = dict(_tables()[table]["panels"][str(panel)])
    columns = (rows.pop("columns", None) or _tables()[table]["columns"]).split()
    return {
        row: {
            column: Published(*map(float, number.split("±")))
            for column, number in zip(columns, text.split(), strict=True)
            if number != "-"
        }
        for row, text in rows.items()
    }


@functools.cache
def doubts(panel: str) -> Mapping[tuple[str, str], str]:
    """Why numbers in a panel of the main table cannot be right, by row and column."""
    found = _tables()["tab:acc_af"]["doubts"]
    return {(doubt["row"], doubt["column"]): doubt["why"] for doubt in found if doubt["panel"] == panel}


def own_row(method: str) -> tuple[str, str]:
    """The paper's name of one of its methods, and the classifier of its row: ``ncm`` or
    ``linear``.
    """
    return _NAMES[method], "ncm" if method in _NEAREST_CLASS_MEAN else "linear"


def method_name(method: str) -> str:
    """The name of a method in tables and figures; of a file's method ``file.py:Name``."""
    return _OTHER_NAMES.get(method) or _NAMES.get(method) or Path(method).name


@functools.cache
def _tables() -> dict[str, Any]:
    return read_table(Path(__file__).parent / "published.toml", "the paper's numbers")


def dataset(config: Mapping[str, Any]) -> str | None:
    """The paper's data set that a run's stream has; None for any other, for accuracies on held-out
    training images, since the paper's are of test images, and for streams of other kinds.
    """
    name = config["stream"]["name"]
    same = config.get("evaluate_on", "test") == "test" and config["stream"].get("kind", "tasks") == "tasks"
    return name if name in _TASKS and same else None


def deviations(config: Mapping[str, Any], tasks: int) -> list[str]:
    """How a run's protocol differs from the paper's, ``name value instead of value``; empty where
    the numbers can be compared.

    Args:
        config: The run's configuration as in ``results.json``, on one of the paper's data sets.
        tasks: The number of its tasks.
    """
    wanted = {**_PROTOCOL, **{f"stream.{k}": v for k, v in _STREAM.items()}, "tasks": _TASKS[config["stream"]["name"]]}
    found = {**config, **{f"stream.{k}": v for k, v in config["stream"].items()}, "tasks": tasks}
    return [
        f"{name} {found.get(name)} instead of {value}" for name, value in wanted.items() if found.get(name) != value
    ]


def lookup(
    method: str, classifier: str, expert: str, data: str, memory: int
) -> tuple[str, Published | None, Published | None] | None:
    """The paper's name, ACC and AF for one of our classifiers.

    Args:
        method: Our name of the method.
        classifier: ``ncm`` or ``linear``.
        expert: ``last`` or ``mean``.
        data: The data set's name, as :func:`dataset` gives it.
        memory: The size of the replay memory.

    Returns:
        None where the paper has no such row.
    """
    if method not in _NAMES or own_row(method)[1] != classifier:
        return None
    name = _NAMES[method]
    if expert == "mean" and method == "mose":
        name = _MEAN_OF_EXPERTS
    acc, af = methods(data)[name].get(memory, (None, None))
    # The small memories on Tiny-ImageNet are of another protocol than the table's 100 tasks.
    if acc is None and data == "split-cifar100":
        acc = numbers("tab:small", data).get(name, {}).get(str(memory))
    return name, acc, af


def methods(data: str) -> dict[str, dict[int, tuple[Published, Published | None]]]:
    """ACC and AF by method and memory: the rows of the paper's main table for a data set."""
    forgetting = numbers("tab:acc_af", f"{data} AF")
    return {
        name: {int(memory): (acc, forgetting.get(name, {}).get(memory)) for memory, acc in by_memory.items()}
        for name, by_memory in numbers("tab:acc_af", f"{data} ACC").items()
    }


def experts(data: str, memory: int) -> dict[str, float] | None:
    """ACC by NCM expert and of their mean, MOSE with reverse self-distillation, to one decimal."""
    if (data, memory) != ("split-cifar100", 5000):
        return None
    rows = numbers("tab:moe_acc", "w/ RSD")
    names = {"1": "E1", "2": "E2", "3": "E3", "4": "E4", "mean": "MOE"}
    return {expert: round(rows[row]["average"].mean, 1) for expert, row in names.items()}


def linear(data: str, memory: int) -> dict[str, float] | None:
    """ACC of the linear classifier of the last expert and of the experts' mean, to one decimal."""
    if data != "split-cifar100" or memory not in (1000, 2000, 5000):
        return None
    rows = numbers("tab:ncm_final", memory)
    return {
        expert: round(rows[row]["average"].mean, 1) for expert, row in (("last", "linear"), ("mean", "linear(MOE)"))
    }
