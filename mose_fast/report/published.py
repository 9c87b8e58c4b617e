"""The paper's numbers, to be shown beside one's own.

Source: Yan et al., "Orchestrate Latent Expertise: Advancing Online Continual Learning with
Multi-Level Supervision and Reverse Self-Distillation", CVPR 2024: table 1 (methods), the small
buffers, the table of experts and that of classifiers; means of 15 runs of one pass in batches of 10
over Split CIFAR-100 (10 tasks) and Split Tiny-ImageNet (100 tasks). All in percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["RUNS", "Published", "dataset", "deviations", "experts", "linear", "lookup", "methods"]

#: Runs behind each of the paper's means.
RUNS = 15


class Published(NamedTuple):
    """A number of the paper with its standard deviation, None where the paper gives none here."""

    mean: float
    sd: float | None = None


_MEMORY = {"split-cifar100": (1000, 2000, 5000), "split-tiny-imagenet": (2000, 4000, 10000)}

# ACC by method: CIFAR-100 at 1k, 2k, 5k, then Tiny-ImageNet at 2k, 4k, 10k.
_ACC = {
    "A-GEM": (5.8, 5.9, 6.1, 0.9, 2.0, 3.9),
    "ER": (15.7, 21.3, 28.8, 4.7, 10.1, 11.7),
    "MIR": (16.0, 19.0, 24.1, 6.1, 11.7, 13.5),
    "GSS": (11.1, 13.3, 17.4, 3.3, 10.0, 10.5),
    "ASER": (16.4, 12.2, 27.1, 5.3, 8.2, 10.3),
    "ER-AML": (16.1, 17.6, 22.6, 5.4, 7.1, 10.1),
    "GDumb": (17.1, 25.1, 38.6, 12.6, 12.7, 15.7),
    "SCR": (27.3, 30.8, 36.5, 12.6, 18.2, 21.1),
    "OCM": (28.1, 35.0, 42.4, 15.7, 21.2, 27.0),
    "OnPro": (30.0, 35.9, 41.3, 16.9, 22.1, 29.8),
    "GSA": (31.4, 39.7, 49.7, 18.4, 26.0, 33.2),
    "DER++": (15.3, 19.7, 27.0, 4.5, 10.1, 17.6),
    "IL2A": (18.2, 19.7, 22.4, 5.5, 8.1, 11.6),
    "Co2L": (17.1, 24.2, 32.2, 10.1, 15.8, 22.5),
    "LUCIR": (8.6, 19.5, 16.9, 7.6, 9.6, 12.5),
    "CCIL": (18.5, 19.1, 20.5, 5.6, 7.0, 15.2),
    "BiC": (21.2, 36.1, 42.5, 10.2, 18.9, 25.2),
    "SS-IL": (26.0, 33.1, 39.5, 9.6, 15.2, 21.1),
    "MOSE": (35.1, 45.1, 54.8, 19.4, 28.0, 38.7),
    "MOE-MOSE": (37.4, 47.0, 55.6, 21.4, 29.8, 39.3),
}
_ACC_SD = {"MOSE": (0.4, 0.3, 0.4, 0.5, 0.8, 0.4), "MOE-MOSE": (0.3, 0.4, 0.4, 0.4, 0.5, 0.8)}
_AF = {"MOSE": (36.9, 25.4, 13.5, 45.7, 29.5, 15.5), "MOE-MOSE": (34.7, 23.6, 12.7, 40.6, 26.3, 13.9)}
_AF_SD = {"MOSE": (0.3, 0.4, 0.5, 1.0, 0.8, 0.3), "MOE-MOSE": (0.3, 0.4, 0.4, 0.6, 0.5, 0.6)}

# MOSE with small memories; Tiny-ImageNet in 10 tasks here, which is another protocol than the
# table's 100.
_SMALL = {"split-cifar100": {200: Published(20.2, 0.5), 500: Published(28.3, 0.7)}}

# By name of our methods: the paper's name of the method by the expert that classifies.
_NAMES = {
    "mose": {"last": "MOSE", "mean": "MOE-MOSE"},
    "er": {"last": "ER"},
    "agem": {"last": "A-GEM"},
    "derpp": {"last": "DER++"},
    "scr": {"last": "SCR"},
}
_CLASSIFIER = {"mose": "ncm", "er": "linear", "agem": "linear", "derpp": "linear", "scr": "ncm"}

_LINEAR = {1000: (30.1, 31.1), 2000: (41.0, 42.1), 5000: (51.5, 53.8)}
_EXPERTS = {"1": 47.1, "2": 51.0, "3": 53.5, "4": 54.6, "mean": 55.6}
_TASKS = {"split-cifar100": 10, "split-tiny-imagenet": 100}
_PROTOCOL = {"epochs": 1, "train_on": "stream", "width": 64}
_STREAM = {"batch": 10, "limit_per_task": None, "class_order_seed": None}


def dataset(config: Mapping[str, Any]) -> str | None:
    """The paper's data set that a run's stream has, None for any other."""
    name = config["stream"]["name"]
    return name if name in _MEMORY else None


def deviations(config: Mapping[str, Any], tasks: int) -> list[str]:
    """How a run's protocol differs from the paper's, ``name value instead of value``; empty where
    the numbers can be compared.

    Args:
        config: Of a run, as in ``results.json``, on one of the paper's data sets.
        tasks: Number of its tasks.
    """
    wanted = {**_PROTOCOL, **{f"stream.{k}": v for k, v in _STREAM.items()}, "tasks": _TASKS[config["stream"]["name"]]}
    found = {**config, **{f"stream.{k}": v for k, v in config["stream"].items()}, "tasks": tasks}
    return [f"{name} {found[name]} instead of {value}" for name, value in wanted.items() if found[name] != value]


def lookup(
    method: str, classifier: str, expert: str, data: str, memory: int
) -> tuple[str, Published | None, Published | None] | None:
    """The paper's name, ACC and AF for one of our classifiers.

    Args:
        method: Our name of the method.
        classifier: ``ncm`` or ``linear``.
        expert: ``last`` or ``mean``.
        data: As :func:`dataset` gives it.
        memory: Size of the replay memory.

    Returns:
        None where the paper has no such row.
    """
    name = _NAMES.get(method, {}).get(expert)
    if name is None or _CLASSIFIER[method] != classifier:
        return None
    sizes = _MEMORY[data]
    if memory in sizes:
        place = sizes.index(memory) + (0 if data == "split-cifar100" else len(sizes))
        af = Published(_AF[name][place], _AF_SD[name][place]) if name in _AF else None
        return name, Published(_ACC[name][place], _ACC_SD[name][place] if name in _ACC_SD else None), af
    small = _SMALL.get(data, {}).get(memory) if name == "MOSE" else None
    return name, small, None


def methods(data: str) -> dict[str, dict[int, tuple[Published, Published | None]]]:
    """Every row of the paper's main table for a data set: ACC and AF by method and memory."""
    first = 0 if data == "split-cifar100" else len(_MEMORY["split-cifar100"])
    table: dict[str, dict[int, tuple[Published, Published | None]]] = {}
    for name, acc in _ACC.items():
        table[name] = {}
        for place, memory in enumerate(_MEMORY[data], start=first):
            sd = _ACC_SD[name][place] if name in _ACC_SD else None
            af = Published(_AF[name][place], _AF_SD[name][place]) if name in _AF else None
            table[name][memory] = Published(acc[place], sd), af
    return table


def experts(data: str, memory: int) -> dict[str, float] | None:
    """ACC by expert of nearest-class-mean classifiers and of their mean, for MOSE with reverse
    self-distillation.
    """
    return dict(_EXPERTS) if (data, memory) == ("split-cifar100", 5000) else None


def linear(data: str, memory: int) -> dict[str, float] | None:
    """ACC of the linear classifier: of the last expert and of the mean of experts."""
    return (
        dict(zip(("last", "mean"), _LINEAR[memory], strict=True))
        if data == "split-cifar100" and memory in _LINEAR
        else None
    )
