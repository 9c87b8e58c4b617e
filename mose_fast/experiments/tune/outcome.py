"""What a study leaves: the best settings, the table of its trials, plots, and how sure it is."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mose_fast.experiments.folder import SweepFolder
from mose_fast.learner.named_settings import dotted, with_changes
from mose_fast.output import readable
from mose_fast.present.drawing import COLOURS, STYLE, files, grid
from mose_fast.present.statistics import code_warnings, compare, summarise
from mose_fast.present.table import Interval, Number, Spread, Table
from mose_fast.runs.files import RunError, write_atomically
from mose_fast.settings.knob import as_text, shown
from mose_fast.settings.run import ConfigError, RunConfig

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# Of a study alone: the run that measures on test images has all tasks and images.
_OF_STUDY = {
    "evaluate_on",
    "seed",
    "stream.fingerprint",
    "stream.first_tasks",
    "stream.validation",
    "stream.validation_seed",
    "tuned",
}

_STATES = {"COMPLETE": "complete", "PRUNED": "stopped", "FAIL": "failed", "RUNNING": "unfinished"}


class NothingTuned(RunError):
    """No trial of a study came to its end."""

    exit_code = 1


@dataclass(frozen=True)
class Tuned:
    """What a study found.

    Attributes:
        best: The best trial's settings, by dotted name.
        accuracy: Its ACC on the held-out images, mean over the seeds, in [0, 1].
        config: The file ``best.toml``, for ``mose-fast run --config``.
        sure: What the trials say about the best one, a sentence each.
    """

    best: Mapping[str, Any]
    accuracy: float
    trials: int
    config: Path
    sure: tuple[str, ...]
    cautions: tuple[str, ...]


def check_writable(config: RunConfig) -> None:
    """ConfigError for a setting that ``best.toml`` could not hold: one that is null, which TOML
    does not have, and by itself is not; or a path that is no UTF-8.
    """
    for name, value in _changes(config).items():
        if value is None:
            raise ConfigError(f"{name} is null, which best.toml cannot hold; wanted a value")
        if isinstance(value, str) and readable(value).encode() != value.encode(errors="surrogateescape"):
            raise ConfigError(f"{name} is {shown(value)}, which best.toml cannot hold; wanted a path in UTF-8")


def conclude(
    trials: Sequence[FrozenTrial],
    rows: Mapping[int, Sequence[Mapping[str, Any]]],
    base: RunConfig,
    seeds: Sequence[int],
    folder: SweepFolder,
    say: Callable[[str], None],
) -> Tuned:
    """Writes ``best.toml``, ``trials.csv``, ``trials.md`` and the plots, and says what was found.
    ``rows``: those of the store, of the runs of each complete trial, by its number.
    """
    states = [_STATES[trial.state.name] for trial in trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in _STATES.values() if state in states)
    if not rows:
        raise NothingTuned(
            f"none of the {len(trials)} trials came to its end ({counts}), so nothing was tuned; the logs are in"
            f" {folder.logs}"
        )
    values = {number: {row["seed"]: row["acc"] for row in runs} for number, runs in rows.items()}
    order = sorted(values, key=lambda number: (-trials[number].value, number))
    best = trials[order[0]]
    cautions = [f"caution: {warning}" for warning in code_warnings(row for runs in rows.values() for row in runs)]
    table = _table(trials, values, cautions)
    config = folder.path / "best.toml"
    files_of = {"trials.csv": table.csv(), "trials.md": table.markdown()}
    files_of["best.toml"] = _toml(base, best, len(trials), seeds, cautions)
    for name, content in {**files_of, **_plots([trials[number] for number in rows])}.items():
        write_atomically(folder.path / name, content)
    sure = []
    for other, what in ((order[1:2], "the second best"), ([0] if 0 in values else [], "the method's own settings")):
        for number in other:
            if number != best.number:
                found = compare(values[best.number], values[number])
                sure.append(f"trial {best.number}, the best, against trial {number}, {what}: {found.sentence()}")
    say(f"{len(trials)} trials: {counts}")
    told = ", ".join(f"{name} {as_text(value)}" for name, value in best.params.items())
    say(f"best: trial {best.number}, ACC {100 * best.value:.1f} on held-out images: {told}")
    for line in (*sure, *cautions):
        say(line)
    say("It was chosen as the best of these trials on these images, so its accuracy there is a little too good.")
    say(f"measure it on test images with: mose-fast run --config {config}")
    return Tuned(best.params, best.value, len(trials), config, tuple(sure), tuple(cautions))


def _changes(config: RunConfig) -> dict[str, Any]:
    """What a configuration sets otherwise than its method's preset, for a run on test images."""
    usual = dotted(RunConfig.create(config.preset, method=config.method).to_dict())
    found = dotted(config.to_dict())
    return {
        name: value
        for name, value in found.items()
        if name not in _OF_STUDY and (value != usual[name] or name in ("method", "preset", "stream.name"))
    }


def _toml(base: RunConfig, best: FrozenTrial, trials: int, seeds: Sequence[int], cautions: Sequence[str]) -> str:
    stream = base.stream
    kind = "" if stream.kind == "tasks" else f", {stream.kind}"
    first = "" if stream.first_tasks is None else f", first {stream.first_tasks} tasks"
    tuned = (
        f"{trials} trials of {len(seeds)} seeds on {100 * stream.validation:g} % of the training images of"
        f" {Path(stream.name).name}{kind}{first}"
    )
    lines = [
        f"# Chosen by mose-fast tune: {tuned}.",
        f"# ACC on these held-out images: {100 * best.value:.1f} %. Not measured on test images.",
        *(f"# {caution}" for caution in cautions),
    ]
    tables: dict[str, list[str]] = {"": lines, "stream": ["", "[stream]"], "options": ["", "[options]"]}
    for name, value in {**_changes(with_changes(base, best.params)), "tuned": tuned}.items():
        owner, _, field = name.rpartition(".")
        # TOML has no pairs of surrogates, by which JSON writes what is not ASCII.
        tables[owner].append(f"{field} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(line for table in tables.values() if len(table) > 2 for line in table) + "\n"


def _table(trials: Sequence[FrozenTrial], values: Mapping[int, Mapping[int, float]], cautions: Sequence[str]) -> Table:
    table = Table(
        "trials",
        "Every trial: ACC in percent of held-out training images, mean ± standard deviation over the seeds, and its 95"
        " % interval by Student's t; the tasks after which accuracies were compared; the settings. The best seed"
        " of a stopped trial was worse than the median of earlier trials after its last task."
        + "".join(f" {caution[:1].upper()}{caution[1:]}." for caution in cautions),
        spreads=("ACC",),
        intervals=("95 % interval",),
    )
    for trial in trials:
        s = summarise(values[trial.number].values()) if trial.number in values else None
        several = s is not None and s.n > 1
        table.add(
            {
                "trial": trial.number,
                "state": _STATES[trial.state.name],
                "ACC": s and Spread(100 * s.mean, 100 * s.sd if several else None),
                "95 % interval": Interval(*(100 * end for end in s.t_interval)) if several else None,
                "tasks": len(trial.intermediate_values),
                **{name: _cell(value) for name, value in trial.params.items()},
            }
        )
    return table


def _cell(value: Any) -> Any:
    if isinstance(value, float) and value:
        return Number(value, max(1, 3 - math.floor(math.log10(abs(value)))))
    return value if isinstance(value, int | float) and not isinstance(value, bool) else as_text(value)


def _plots(done: Sequence[FrozenTrial]) -> dict[str, bytes]:
    """SVG files of the complete trials: over time, by setting, and how much each matters."""
    # Imported here, because it takes half a second.
    from matplotlib import rc_context

    numbers, accuracy = [trial.number for trial in done], [100 * trial.value for trial in done]
    names = list(done[0].params)
    best = accuracy.index(max(accuracy))
    label = "ACC on held-out images (%)"
    with rc_context(STYLE):
        history, (axis,) = grid(1)
        axis.plot(numbers, accuracy, "o", color=COLOURS["blue"], label="trial")
        highest = list(itertools.accumulate(accuracy, max))
        axis.step(numbers, highest, where="post", color=COLOURS["red"], label="best so far")
        axis.set(xlabel="trial", ylabel=label)
        axis.legend()

        slices, axes = grid(len(names), columns=len(names), width=3 * len(names) + 0.5)
        for name, axis in zip(names, axes, strict=True):
            values = [trial.params[name] for trial in done]
            numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
            values = values if numeric else [as_text(value) for value in values]
            axis.plot(values, accuracy, "o", color=COLOURS["blue"])
            axis.plot(values[best : best + 1], accuracy[best : best + 1], "D", color=COLOURS["red"])
            distribution = done[0].distributions[name]
            if hasattr(distribution, "low"):
                axis.set(xscale="log" if distribution.log else "linear", xlim=(distribution.low, distribution.high))
            axis.set(xlabel=name, ylabel="" if axis is not axes[0] else label)
        figures = {"history": history, "slices": slices}
        if importance := _importance(done):
            figures["importance"], (axis,) = grid(1, height=0.8 + 0.4 * len(names))
            axis.barh(list(importance)[::-1], list(importance.values())[::-1], color=COLOURS["blue"])
            axis.set(xlabel="share of the variance of ACC (fANOVA)", xlim=(0, 1))
        return {f"{name}.svg": files(figure, ["svg"])["svg"] for name, figure in figures.items()}


def _importance(done: Sequence[FrozenTrial]) -> dict[str, float]:
    """Share of the variance of ACC that each setting explains; empty where that is not defined."""
    if len(done) < 3 or len({trial.value for trial in done}) < 2:
        return {}
    import optuna

    study = optuna.create_study(direction="maximize")
    study.add_trials(done)
    return optuna.importance.get_param_importances(study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0))
