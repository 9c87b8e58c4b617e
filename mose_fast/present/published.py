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

from mose_fast.settings.knob import settings_of
from mose_fast.settings.run import RunConfig, StreamConfig, read_table

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
# Names in full, and of methods that the paper does not have.
_OTHER_NAMES = {"er": "experience replay", "finetune": "fine-tuning", "joint": "joint training"}

#: Our names of the paper's baselines, in the order of its main table.
BASELINES = tuple(name for name in _NAMES if name != "mose")

# Methods whose row is the nearest class mean's; the others' is the linear classifier's.
_NEAREST_CLASS_MEAN = ("mose", "scr")

_TASKS = {"split-cifar100": 10, "split-tiny-imagenet": 100}
# Settings of the problem that differ between the paper's tables, or that a table says.
_VARIED = ("memory", "stream.name", "stream.tasks")


@functools.cache
def numbers(table: str, panel: str | int) -> Mapping[str, Mapping[str, Published]]:
    """The numbers of one panel of a table.

    Args:
        table: The table's LaTeX label, such as ``tab:acc_af``; or ``since``, of other papers.
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


def best(data: str, memory: int) -> tuple[str, Published]:
    """The method with the highest ACC that the paper or others since have published, and that ACC.

    Raises:
        ValueError: None is known for this size of the memory.
    """
    found = {name: row.get(f"ACC-{memory}") for name, row in numbers("tab:acc_af", data).items()}
    found |= {name: row.get(str(memory)) for name, row in numbers("since", data).items()}
    return max(((name, acc) for name, acc in found.items() if acc), key=lambda named: named[1].mean)


@functools.cache
def doubts(panel: str) -> Mapping[tuple[str, str], str]:
    """Why numbers in a panel of the main table cannot be right, by row and column."""
    found = _tables()["tab:acc_af"]["doubts"]
    return {(doubt["row"], doubt["column"]): doubt["why"] for doubt in found if doubt["panel"] == panel}


def own_row(method: str) -> tuple[str, str]:
    """The paper's name of one of its methods, and its row's classifier: ``ncm``, ``linear``."""
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
    """
    settings = {**settings_of(RunConfig), **settings_of(StreamConfig)}
    # Our defaults are the paper's protocol.
    wanted = {
        name: setting.default
        for name, setting in settings.items()
        if name == "width" or (setting.role == "problem" and setting.changes_results and name not in _VARIED)
    }
    wanted["tasks"] = _TASKS[config["stream"]["name"]]
    of_stream = {f"stream.{name}": value for name, value in config["stream"].items()}
    found = {**wanted, **config, **of_stream, "tasks": tasks}
    return [f"{name} {found[name]} instead of {value}" for name, value in wanted.items() if found[name] != value]


def lookup(
    method: str, classifier: str, expert: str, data: str, memory: int
) -> tuple[Published | None, Published | None]:
    """The paper's ACC and AF for one of our classifiers, None where it has none.

    Args:
        classifier: ``ncm`` or ``linear``.
        expert: ``last`` or ``mean``.
    """
    if method not in _NAMES or own_row(method)[1] != classifier:
        return None, None
    name = "MOE-MOSE" if expert == "mean" and method == "mose" else _NAMES[method]
    row = numbers("tab:acc_af", data)[name]
    acc, af = row.get(f"ACC-{memory}"), row.get(f"AF-{memory}")
    # The small memories on Tiny-ImageNet are of another protocol than the table's 100 tasks.
    if acc is None and data == "split-cifar100":
        acc = numbers("tab:small", data).get(name, {}).get(str(memory))
    return acc, af


def experts(data: str, memory: int) -> dict[tuple[str, str], float]:
    """ACC of MOSE that the paper prints, to one decimal, by classifier and expert as results name
    them.
    """
    rows = {}
    if data == "split-cifar100" and memory == 5000:
        theirs = numbers("tab:moe_acc", "w/ RSD")
        names = {"1": "E1", "2": "E2", "3": "E3", "4": "E4", "mean_distance": "MOE"}
        rows |= {("ncm", expert): theirs[name] for expert, name in names.items()}
    if data == "split-cifar100" and memory in (1000, 2000, 5000):
        theirs = numbers("tab:ncm_final", memory)
        rows |= {("linear", "4"): theirs["linear"], ("linear", "mean_logit"): theirs["linear(MOE)"]}
    return {view: round(row["average"].mean, 1) for view, row in rows.items()}
