"""Statistics over seeds: what a mean is worth, whether one setting beats another, and whether two
runs may be compared at all.

Everything works on plain numbers by seed and on rows of the store (:mod:`mose_fast.runs.store`),
in whatever unit they come; the sentences take fractions in [0, 1] and speak of points, which are
percent of all images. scipy does the mathematics.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from mose_fast.present.table import counted
from mose_fast.runs.files import RunError
from mose_fast.runs.store import COLUMNS

__all__ = [
    "FEW_SEEDS",
    "MADE",
    "PROTOCOL",
    "TASK",
    "Comparison",
    "IncomparableRuns",
    "Summary",
    "check_comparable",
    "code_warnings",
    "compare",
    "compare_all",
    "holm",
    "summarise",
]

#: Below this many common seeds a comparison carries a warning: with fewer than six, the Wilcoxon
#: test cannot fall below 0.05.
FEW_SEEDS = 6

#: Columns of the store that say which problem was solved: runs that differ in one of them belong in
#: different tables.
TASK = tuple(name for name, column in COLUMNS.items() if column.compared == "problem")

#: Columns that say how it was solved: runs that differ in one of them are compared with a warning.
PROTOCOL = tuple(name for name, column in COLUMNS.items() if column.compared == "protocol")

#: Columns that say what computed it, likewise.
MADE = tuple(name for name, column in COLUMNS.items() if column.compared == "made")

# Confidence level of all intervals.
_LEVEL = 0.95

# Runs that a warning names for each value.
_NAMED = 3


class IncomparableRuns(RunError):
    """Runs of different problems were to be put into one table."""


@dataclass(frozen=True)
class Summary:
    """What n values say about their mean.

    Attributes:
        sd: Sample standard deviation (n - 1); NaN for one value.
        t_interval: Ends of the interval of the mean by Student's t; NaN for one value.
        bootstrap_interval: Ends of the bias-corrected and accelerated bootstrap interval of the
            mean; NaN for one value or where none was asked for, both the mean where all values are
            equal.
    """

    n: int
    mean: float
    sd: float
    t_interval: tuple[float, float]
    bootstrap_interval: tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """Setting ``a`` against setting ``b`` over the seeds that both have.

    Attributes:
        seeds: The common seeds, ascending.
        difference: Mean of a - b.
        interval: Ends of the t interval of the difference; NaN with fewer than two seeds.
        t_p: Two-sided p value of the paired t test; NaN with fewer than two seeds.
        wilcoxon_p: Two-sided p value of Wilcoxon's signed-rank test, exact for up to 50 differences
            without ties or zeros; NaN with fewer than two seeds.
        effect_size: Cohen's d of the paired differences: their mean over their standard deviation;
            infinite where they are all the same and not 0; NaN with fewer than three seeds, since
            two differences hardly tell their deviation.
        holm_p: ``t_p`` after Holm's correction over the comparisons of one table; equal to ``t_p``
        for a comparison alone.
    """

    a: str
    b: str
    seeds: tuple[int, ...]
    difference: float
    interval: tuple[float, float] = (math.nan, math.nan)
    t_p: float = math.nan
    wilcoxon_p: float = math.nan
    effect_size: float = math.nan
    holm_p: float = math.nan

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing it, each a sentence."""
        if len(self.seeds) >= FEW_SEEDS:
            return []
        return [
            f"{self.a} and {self.b} have {len(self.seeds)} seeds in common; fewer than {FEW_SEEDS} are too few to show"
            " much"
        ]

    def sentence(self) -> str:
        """The comparison in words, where a larger value is better: ``"better by 1.9 points, 95 %
        interval 1.2 to 2.6, 15 common seeds"``.

        Where :attr:`holm_p` is not below 0.05, the sentence says that there is no clear difference:
        of many comparisons, some intervals miss 0 by chance.
        """
        common = counted(len(self.seeds), "common seed")
        if not self.seeds:
            return "no common seeds"
        if len(self.seeds) == 1:
            return f"difference {100 * self.difference:+.1f} points, {common}: no interval"
        low, high = (100 * end for end in self.interval)
        if 1 - self.holm_p <= _LEVEL:
            corrected = f", p {self.holm_p:.4f} after Holm's correction" if self.holm_p != self.t_p else ""
            return (
                f"no clear difference ({100 * self.difference:+.1f} points, 95 % interval {low:.1f} to"
                f" {high:.1f}{corrected}, {common})"
            )
        verdict = "better" if self.difference > 0 else "worse"
        if self.difference < 0:
            low, high = -high, -low
        return f"{verdict} by {abs(100 * self.difference):.1f} points, 95 % interval {low:.1f} to {high:.1f}, {common}"


def summarise(values: Iterable[float], *, resamples: int = 9999) -> Summary:
    """Mean, standard deviation and both 95 % intervals of the mean.

    The bootstrap draws from a fixed seed, so the same values give the same interval.

    Args:
        values: One number a seed.
        resamples: Resamples of the bootstrap; 0 leaves its interval NaN, and is 100 times faster.

    Raises:
        ValueError: There is no value, or one is not finite.
    """
    x = _finite(values)
    mean = float(x.mean())
    if len(x) == 1:
        return Summary(1, mean, math.nan, (math.nan, math.nan), (math.nan, math.nan))
    bootstrap = (mean, mean) if resamples else (math.nan, math.nan)
    if resamples and np.ptp(x) > 0:
        rng = np.random.default_rng(0)
        found = stats.bootstrap((x,), np.mean, confidence_level=_LEVEL, n_resamples=resamples, rng=rng)
        bootstrap = (float(found.confidence_interval.low), float(found.confidence_interval.high))
    return Summary(len(x), mean, float(x.std(ddof=1)), _t_interval(x), bootstrap)


def compare(a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compares two settings, given as values by seed, over their common seeds.

    Raises:
        ValueError: A value is not finite.
    """
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        return Comparison(*names, seeds, math.nan)
    differences = _finite(a[s] for s in seeds) - _finite(b[s] for s in seeds)
    mean = float(differences.mean())
    if len(seeds) == 1:
        return Comparison(*names, seeds, mean)
    if np.ptp(differences) == 0:
        # No spread: Student's t is 0 / 0 or infinite.
        t_p, effect = (1.0, 0.0) if mean == 0 else (0.0, math.copysign(math.inf, mean))
    else:
        t_p = float(stats.ttest_1samp(differences, 0.0).pvalue)
        effect = mean / float(differences.std(ddof=1))
    effect = effect if len(seeds) > 2 else math.nan
    wilcoxon_p = float(stats.wilcoxon(differences).pvalue) if np.any(differences) else 1.0
    return Comparison(*names, seeds, mean, _t_interval(differences), t_p, wilcoxon_p, effect, t_p)


def compare_all(groups: Mapping[str, Mapping[int, float]], baseline: str | None = None) -> list[Comparison]:
    """Compares settings, each with a baseline or with every other, and corrects their p values over
    the whole table by Holm's method.

    Args:
        groups: Value by seed, by name.
        baseline: The name that all others are compared with; None: every pair, in order.

    Raises:
        ValueError: ``baseline`` is no name in ``groups``, or a value is not finite.
    """
    if baseline is not None and baseline not in groups:
        raise ValueError(f"baseline is {baseline!r}; wanted one of {', '.join(groups)}")
    pairs = itertools.combinations(groups, 2) if baseline is None else ((n, baseline) for n in groups if n != baseline)
    found = [compare(groups[a], groups[b], (a, b)) for a, b in pairs]
    return [replace(c, holm_p=p) for c, p in zip(found, holm([c.t_p for c in found]), strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Scand. J. Statist. 6, 1979).

    The k-th smallest of m is multiplied by m - k + 1; none is smaller than the one before it or
    above 1. NaN stays NaN and does not count.
    """
    counted = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(counted):
        highest = max(highest, min(1.0, (len(counted) - rank) * p))
        adjusted[i] = highest
    return adjusted


def check_comparable(
    rows: Iterable[Mapping[str, Any]], varied: Iterable[str] = (), *, force: bool = False
) -> list[str]:
    """Refuses to put runs of different problems into one table, and tells what else differs.

    Args:
        varied: Columns that differ on purpose, since the table shows them.
        force: Turn the refusal into a warning.

    Returns:
        Warnings, each a sentence; empty where the runs were made alike.

    Raises:
        IncomparableRuns: A column of :data:`TASK` or the data behind a stream differ and ``force``
            is False; the message names what, its values and a run of each.
    """
    rows = list(rows)
    differing = _differences(rows, TASK, varied) + _data_differences(rows)
    if differing and not force:
        raise IncomparableRuns(
            f"these runs do not belong in one table: {'; '.join(differing)}. "
            "Report them separately, or use --force to see them side by side"
        )
    return differing + _switched_off(rows) + _differences(rows, PROTOCOL, varied) + code_warnings(rows, varied)


def code_warnings(rows: Iterable[Mapping[str, Any]], varied: Iterable[str] = ()) -> list[str]:
    """What differs in the code and in the machine that computed runs, whatever problem they solve:
    a sentence each on this package's code, the versions of a method of one's own, each column of
    :data:`MADE`, and, for runs on the CPU, the number of threads.

    Args:
        varied: Columns that differ on purpose, since the table shows them.
    """
    rows, found = list(rows), []
    if shown := _values(_with_code(rows), "code"):
        found.append(f"the code of mose-fast differs: {shown}")
    for method, same in _by(rows, "method").items():
        if shown := _values(same, "method_version"):
            found.append(f"the version of method {method!r} differs: {shown}")
    found += _differences(rows, MADE, varied)
    # On a GPU it changes nothing.
    if shown := _values([row for row in rows if row["device"] == "cpu"], "threads"):
        found.append(f"the {COLUMNS['threads'].label} differs: {shown}")
    return found


def _with_code(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with version and first commit of a code: commits may differ in other files."""
    told: dict[str, str] = {}
    found = []
    for row in rows:
        commit = row["commit_id"] if isinstance(row["commit_id"], str) else "unknown"
        short = commit[:12] + "+dirty" * commit.endswith("+dirty")
        text = f"{row['mose_fast']}, commit {short}, code {row['code'][:8]}"
        found.append({**row, "code": told.setdefault(row["code"], text)})
    return found


def _differences(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], varied: Iterable[str]) -> list[str]:
    rows, expected = list(rows), set(varied)
    return [
        f"the {COLUMNS[column].label} differs: {shown}"
        for column in columns
        if column not in expected and (shown := _values(rows, column))
    ]


def _data_differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The streams whose runs saw different data under the same name."""
    return [
        f"the data of stream {stream!r} differ: {shown}"
        for stream, same in _by(rows, "stream").items()
        if (shown := _values(same, "data"))
    ]


def _by(rows: Iterable[Mapping[str, Any]], column: str) -> dict[Any, list[Mapping[str, Any]]]:
    """The rows by their value of a column."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[column], []).append(row)
    return found


def _switched_off(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    concerned = [row for row in rows if row.get("switched_off")]
    what = "; ".join(dict.fromkeys(row["switched_off"] for row in concerned))
    return [
        f"the self-check of the native library had switched something off in {len(concerned)} of {len(rows)} runs:"
        f" {what}"
    ] * bool(concerned)


def _values(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """The values of a column, each with its runs; empty where all agree."""
    folders: dict[str, list[str]] = {}
    for row in rows:
        text = str(row[column])
        # What is missing comes as None from a table of SQLite, as NaN or NA from a data frame.
        text = "none" if text in ("None", "nan", "<NA>") else text
        folders.setdefault(text, []).append(str(row["folder"]))
    if len(folders) < 2:
        return ""
    shown = [f"{_short(value)} ({_some(runs)})" for value, runs in list(folders.items())[:4]]
    more = f" and {len(folders) - 4} more" if len(folders) > 4 else ""
    return ", ".join(shown) + more


def _some(runs: Sequence[str]) -> str:
    """The first runs of some, and how many more there are."""
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return ", ".join(runs[:_NAMED]) + more


def _short(value: str) -> str:
    """A class order of 100 numbers is cut."""
    try:
        numbers = json.loads(value)
    except ValueError:
        return value
    if isinstance(numbers, list) and len(numbers) > 6:
        return f"[{', '.join(map(str, numbers[:6]))}, ...]"
    return value


def _t_interval(x: np.ndarray) -> tuple[float, float]:
    half = float(stats.t.ppf((1 + _LEVEL) / 2, len(x) - 1)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - half, float(x.mean()) + half


def _finite(values: Iterable[float]) -> np.ndarray:
    x = np.array(list(values), dtype=np.float64)
    if x.size == 0 or not np.isfinite(x).all():
        raise ValueError(f"values are {x.tolist()}; wanted at least one number, and all of them finite")
    return x
