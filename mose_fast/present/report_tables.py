"""The tables of a report: accuracies and forgetting in percent, statistics over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mose_fast.present import published
from mose_fast.present.report_runs import Group, View
from mose_fast.present.statistics import Comparison, compare_all, correct, summarise
from mose_fast.present.table import Cell, Interval, Number, Spread, Table, counted

# Up to this many tasks, the table by task has one column per task, as the paper's; otherwise one
# row per task.
_WIDE = 20

_METRICS = {"acc": "ACC", "af_paper": "AF"}
_NO_METRICS = (
    "A dash marks values that a run without an evaluation after every task, or a stream without task boundaries, does"
    " not have, or that the paper lacks."
)


def tables(groups: Sequence[Group]) -> list[Table]:
    """All tables but the comparisons, in the order of the page."""
    return [make(groups) for make in (_main, _estimates, _experts, _tasks, _cost, _size, _runs)]


def _main(groups: Sequence[Group]) -> Table:
    """ACC and AF by method and memory in the paper's form, any of its rows for the stream below."""
    data = _paper_data(groups)
    sizes = sorted({g.memory for g in groups})
    about = f"The paper has no numbers for {images(groups)} images of {streams(groups)}"
    if data:
        about = f"Rows 'paper' are the paper's numbers, means of {published.RUNS} runs"
    if any(g.first.config["method"] == "mose" for g in groups):
        about += "; its MOSE is the NCM classifier of the last expert, its MOE-MOSE that of the mean of experts"
    columns = [f"{name} M={m}" for name in _METRICS.values() for m in sizes]
    table = Table(
        "main",
        "ACC and AF (the paper's definition) in percent by memory M, mean ± standard deviation over"
        f" {seeds(groups)}. {about}. {_NO_METRICS}",
        ["method", "classifier", *columns],
        spreads=columns,
    )
    by_label: dict[str, dict[int, Group]] = {}
    for g in groups:
        by_label.setdefault(g.label, {})[g.memory] = g
    for label, by_memory in by_label.items():
        for view in dict.fromkeys(v for g in by_memory.values() for v in g.shown_views()):
            cells = [_spread(by_memory[m], name, view) if m in by_memory else None for name in _METRICS for m in sizes]
            table.rows.append([label, str(view), *cells])
    for name, printed in published.numbers("tab:acc_af", data).items() if data else ():
        row = [printed.get(f"{metric}-{m}") for metric in _METRICS.values() for m in sizes]
        if any(row):
            table.rows.append([name, "paper", *map(_published, row)])
    return table


def _estimates(groups: Sequence[Group]) -> Table:
    data = _paper_data(groups)
    theirs = "Paper: its numbers for the same data set and memory; difference: our ACC minus the paper's, where "
    shown = ("ACC", "AF", "AF released", "anytime (task ends)", "anytime (stream)", "untrained")
    table = Table(
        "estimates",
        f"Each mean with its 95 % intervals by Student's t and by bootstrap over n seeds ({seeds(groups)}), in percent."
        " AF released: over all T tasks with the last included, as the released code counts. Anytime: ACC averaged"
        f" over the ends of {part_name(groups)}s, and accuracy on the classes seen averaged over the stream where it"
        " was measured every few batches (evaluate_every). Untrained: ACC of the network before training, with the same"
        " memory. " + (f"{theirs}protocols agree. " if data else "") + _NO_METRICS,
        spreads=(*shown, "paper ACC", "paper AF"),
        intervals=("ACC 95 % t", "ACC 95 % bootstrap", "AF 95 % t"),
    )
    for g in groups:
        for view in g.shown_views():
            acc, af = ([100 * v for v in g.values(metric, view).values()] for metric in _METRICS)
            several, s = len(acc) > 1, summarise(acc)
            row: dict[str, Cell] = {
                "method": g.label,
                "classifier": str(view),
                "M": g.memory,
                "n": g.n,
                "ACC": _plain(acc),
                "ACC 95 % t": Interval(*s.t_interval) if several else None,
                "ACC 95 % bootstrap": Interval(*s.bootstrap_interval) if several else None,
                "AF": _plain(af),
                "AF 95 % t": Interval(*summarise(af).t_interval) if len(af) > 1 else None,
                "AF released": _spread(g, "af_released", view),
                "anytime (task ends)": _spread(g, "average_anytime_accuracy", view),
                "anytime (stream)": _plain(100 * run.anytime.average[view] for run in g.runs if run.anytime),
                "untrained": _plain(100 * run.untrained[view] for run in g.runs),
            }
            if data:
                their_acc = their_af = None
                if expert := {g.mean: "mean", g.last: "last"}.get(view.expert):
                    method = g.first.config["method"]
                    their_acc, their_af = published.lookup(method, view.classifier, expert, data, g.memory)
                fair = their_acc is not None and not deviations(g)
                difference = Number(s.mean - their_acc.mean) if fair else None
                row |= {"paper ACC": _published(their_acc), "paper AF": _published(their_af), "difference": difference}
            table.add(row)
    return table


def _experts(groups: Sequence[Group]) -> Table:
    names = [str(e + 1) for e in range(max(g.experts for g in groups))]
    views: dict[str, View] = {}
    for kind, classifier, mean in (("NCM", "ncm", "mean_distance"), ("linear", "linear", "mean_logit")):
        views |= {f"{kind} E{e}": View(classifier, e) for e in names} | {f"{kind} MOE": View(classifier, mean)}
    table = Table(
        "experts",
        "ACC in percent of every single expert (E1 is the shallowest) and of the mean of experts (MOE), for"
        f" nearest-class-mean (NCM) and linear classifiers; mean ± standard deviation over {seeds(groups)}. A dash"
        " marks experts that the method does not have.",
        ["method", "M", "n", *views],
        spreads=tuple(views),
    )
    theirs: dict[int, list[Cell]] = {}
    for g in groups:
        table.rows.append([g.label, g.memory, g.n, *(_spread(g, "acc", view) for view in views.values())])
        data = published.dataset(g.first.config)
        if data and g.first.config["method"] == "mose" and (printed := published.experts(data, g.memory)):
            theirs[g.memory] = [Number(printed[view]) if view in printed else None for view in views.values()]
    table.rows += [["MOSE, paper", memory, published.RUNS, *cells] for memory, cells in sorted(theirs.items())]
    return table


def _tasks(groups: Sequence[Group]) -> Table:
    """Accuracy by task of every expert, their best and their mean: the paper's task-wise table."""
    most = max(g.first.tasks for g in groups)
    by_group = [(g, _by_task(g)) for g in groups]
    table = Table(
        "tasks",
        "Accuracy in percent on each task after the last one"
        + ("" if part_name(groups) == "task" else "; a stream without task boundaries is one task")
        + f", means over {seeds(groups)}, classifiers of the kind that predict() uses. E: each single expert; MAX: the"
        " best single expert of each task and seed; MOE: the mean of experts; new: the classifier of predict() just"
        " after the task was learned.",
    )
    if most <= _WIDE:
        table.columns = ["method", "M", "n", "expert", *(f"task {t + 1}" for t in range(most)), "mean"]
        for g, by_expert in by_group:
            for expert, values in by_expert.items():
                *by_task, mean = map(Number, values)
                by_task += [None] * (most - len(by_task))
                table.rows.append([g.label, g.memory, g.n, expert, *by_task, mean])
    else:
        experts = list(dict.fromkeys(expert for _, by_expert in by_group for expert in by_expert))
        table.columns = ["method", "M", "n", "task", *experts]
        for g, by_expert in by_group:
            for i, task in enumerate([*map(str, range(1, g.first.tasks + 1)), "mean"]):
                cells = [Number(by_expert[e][i]) if e in by_expert else None for e in experts]
                table.rows.append([g.label, g.memory, g.n, task, *cells])
    return table


def _by_task(g: Group) -> dict[str, list[float]]:
    """Means over the seeds in percent by expert, for each of T tasks and over all of them."""
    kind = g.view.classifier
    single = [v for v in g.first.final if v.classifier == kind and v.expert.isdigit()]
    columns = {f"E{v.expert}": np.array([run.final[v] for run in g.runs]) for v in single}
    if g.mean:
        columns["MAX"] = np.max(list(columns.values()), axis=0)
        columns["MOE"] = np.array([run.final[View(kind, g.mean)] for run in g.runs])
    if all(run.complete for run in g.runs):
        columns["new"] = np.array([np.diagonal(run.matrix) for run in g.runs])
    return {name: (100 * np.append(values.mean(0), values.mean())).tolist() for name, values in columns.items()}


def _cost(groups: Sequence[Group]) -> Table:
    phases = [f"{part} s" for part in ("train", "capture", "evaluate", "checkpoint", "other", "wall")]
    table = Table(
        "cost",
        f"What a run costs, means ± standard deviation over {seeds(groups)}: seconds of each phase, in no phase (other)"
        " and of the whole (wall), training steps per second, how many steps"
        " on a GPU were not replayed from a CUDA graph (eager), peak memory in MiB of the process and on the GPU as"
        " torch allocates it.",
        spreads=(*phases, "steps/s", "eager", "host MiB", "GPU MiB"),
    )
    for g in groups:
        rows = [run.row for run in g.runs]
        where = (row["gpu"] or f"{row['processor']} ({counted(row['threads'], 'thread')})" for row in rows)
        table.add(
            {
                "method": g.label,
                "M": g.memory,
                "n": g.n,
                **{phase: _of_column(g, f"seconds_{phase.removesuffix(' s')}") for phase in phases},
                "steps/s": _plain(row["steps"] / row["seconds_train"] for row in rows if row["seconds_train"] > 0),
                "eager": _of_column(g, "eager_steps"),
                "host MiB": _of_column(g, "peak_bytes", 2**20),
                "GPU MiB": _of_column(g, "peak_bytes_device", 2**20),
                "computed on": ", ".join(dict.fromkeys(where)),
            }
        )
    return table


def _size(groups: Sequence[Group]) -> Table:
    table = Table(
        "size",
        f"What a method keeps and trains, over {seeds(groups)}: the most images that it kept, MiB of all that it kept"
        " beside network and optimiser (mean ± standard deviation), parameters of the trained and of the deployed"
        " model, multiply-accumulates per image in training.",
        spreads=("kept MiB",),
    )
    for g in groups:
        row = g.first.row
        table.add(
            {
                "method": g.label,
                "M": g.memory,
                "images kept": row["images_kept"],
                "kept MiB": _of_column(g, "bytes_kept", 2**20),
                "parameters": row["parameters"],
                "deployed": row["parameters_deployed"],
                "MACs": row["macs"],
            }
        )
    return table


def _runs(groups: Sequence[Group]) -> Table:
    table = Table(
        "runs",
        f"The {sum(g.n for g in groups)} runs behind this page: ACC and AF in percent of the classifier of predict(),"
        " folders as given.",
    )
    for g in groups:
        for run in g.runs:
            row = run.row
            table.add(
                {
                    "method": g.label,
                    "M": g.memory,
                    "seed": str(run.seed),
                    "ACC": Number(100 * row["acc"]),
                    "AF": None if row["af_paper"] is None else Number(100 * row["af_paper"]),
                    "seconds": Number(row["seconds_wall"] or row["seconds_total"]),
                    "resumed": row["resumed"],
                    "torch": row["torch"],
                    "mose-fast": row["mose_fast"],
                    "commit": (row["commit_id"] or "")[:12] or None,
                    "folder": str(run.folder),
                }
            )
    return table


def comparisons(groups: Sequence[Group], against: str | None = None) -> list[tuple[int, Comparison]]:
    """Compares, at each memory size, every setting with the one of label ``against``, or with the
    one that has the highest mean ACC, over common seeds and with the classifier of predict().

    Holm's correction covers all comparisons, since they stand in one table.
    """
    found: list[tuple[int, Comparison]] = []
    for memory in sorted({g.memory for g in groups}):
        alike = {g.label: g for g in groups if g.memory == memory}
        baseline = against or max(alike, key=lambda label: alike[label].acc.mean)
        if baseline in alike:
            values = {label: g.values("acc", g.view) for label, g in alike.items()}
            found += [(memory, c) for c in compare_all(values, baseline)]
    return list(zip([memory for memory, _ in found], correct(c for _, c in found), strict=True))


def comparison_table(found: Sequence[tuple[int, Comparison]], against: str | None = None) -> Table:
    chosen = "" if against else " The best setting was chosen by these same runs, so a small lead means little."
    table = Table(
        "comparisons",
        f"At each memory, every setting against {against or 'the one with the highest mean ACC'}: difference in points"
        " over the common seeds (n), its 95 % t interval, p values of the paired t test, of Wilcoxon's signed-rank"
        " test, and of the t test after Holm's correction over this table; Holm interval: that of the difference which"
        " excludes 0 exactly where this p is below 0.05; effect size: Cohen's d of the paired differences, from three"
        f" seeds on.{chosen}",
        intervals=("95 % interval", "Holm interval"),
    )
    for memory, c in found:
        several = len(c.seeds) > 1
        table.add(
            {
                "M": memory,
                "setting": c.a,
                "against": c.b,
                "n": len(c.seeds),
                "difference": Number(100 * c.difference) if c.seeds else None,
                "95 % interval": Interval(*(100 * end for end in c.interval)) if several else None,
                "p (t)": Number(c.t_p, 4) if several else None,
                "p (Wilcoxon)": Number(c.wilcoxon_p, 4) if several else None,
                "p (Holm)": Number(c.holm_p, 4) if several else None,
                "Holm interval": Interval(*(100 * end for end in c.holm_interval)) if several else None,
                "effect size": None if math.isnan(c.effect_size) else Number(c.effect_size, 2),
            }
        )
    return table


def deviations(g: Group) -> list[str]:
    """How protocol and options differ from the paper's; empty if it has no numbers for the data."""
    run = g.first
    if published.dataset(run.config) is None:
        return []
    return [*published.deviations(run.config, run.tasks), *(f"{name} {value}" for name, value in run.changes.items())]


def seeds(groups: Iterable[Group]) -> str:
    """The number of seeds behind each number: ``3 seeds`` or ``2 to 15 seeds``."""
    numbers = sorted({g.n for g in groups})
    return counted(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"


def streams(groups: Iterable[Group]) -> str:
    """The names of the streams, without the paths of the user's own data, and their kinds."""
    rows = [g.first.row for g in groups]
    names = {Path(row["stream"]).name + ("" if row["kind"] == "tasks" else f", {row['kind']}") for row in rows}
    return ", ".join(sorted(names))


def images(groups: Iterable[Group]) -> str:
    """What accuracies are of: ``test`` or ``validation`` images, or both in a forced report."""
    return " or ".join(sorted({run.row["evaluate_on"] for g in groups for run in g.runs}))


def part_name(groups: Iterable[Group]) -> str:
    """What runs were evaluated after: a ``task``, or a ``part`` of a stream without boundaries."""
    return "task" if all(run.boundaries for g in groups for run in g.runs) else "part"


def _paper_data(groups: Sequence[Group]) -> str | None:
    """The data set of all groups, if it is the same and the paper has numbers for it."""
    data = {published.dataset(g.first.config) for g in groups}
    return data.pop() if len(data) == 1 else None


def _published(value: published.Published | None) -> Cell:
    return None if value is None else Spread(*value)


def _spread(g: Group, metric: str, view: View) -> Cell:
    return _plain(100 * v for v in g.values(metric, view).values())


def _of_column(g: Group, column: str, unit: int = 1) -> Cell:
    return _plain(run.row[column] / unit for run in g.runs if run.row[column] is not None)


def _plain(values: Iterable[float]) -> Cell:
    values = list(values)
    if not values:
        return None
    s = summarise(values)
    return Spread(s.mean, s.sd if s.n > 1 else None)
