"""Statistics over seeds: what a mean is worth, whether one setting beats another, and whether two
runs may be compared at all. Sentences take fractions in [0, 1] and speak of points, percent of all
images.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

from mose_fast.present.table import counted
from mose_fast.runs.files import RunError
from mose_fast.runs.store import COLUMNS

#: Below this many common seeds a comparison carries a warning: with fewer than six, the Wilcoxon
#: test cannot fall below 0.05.
FEW_SEEDS = 6

#: Columns of the store that say which problem was solved, how it was solved, and what computed it:
#: runs that differ in one of the first belong in different tables; the others are warned of.
TASK, PROTOCOL, MADE = (
    tuple(name for name, column in COLUMNS.items() if column.compared == what)
    for what in ("problem", "protocol", "made")
)

# Confidence level of all intervals, and resamples of the bootstrap.
_LEVEL, _RESAMPLES = 0.95, 9999


class IncomparableRuns(RunError):
    """Runs of different problems were to be put into one table."""


@dataclass(frozen=True)
class Summary:
    """What values say about their mean."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @cached_property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @cached_property
    def sd(self) -> float:
        """Sample standard deviation (n - 1); NaN for one value."""
        return float(np.std(self.values, ddof=1)) if self.n > 1 else math.nan

    @cached_property
    def t_interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of the mean by Student's t; NaN for one value."""
        if self.n == 1:
            return math.nan, math.nan
        half = float(stats.t.ppf((1 + _LEVEL) / 2, self.n - 1)) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    @cached_property
    def bootstrap_interval(self) -> tuple[float, float]:
        """Ends of the bias-corrected and accelerated 95 % bootstrap interval of the mean; NaN for
        one value, both the mean where all values are equal. Equal values have equal intervals.
        """
        if self.n == 1:
            return math.nan, math.nan
        if np.ptp(self.values) == 0:
            return self.mean, self.mean
        rng = np.random.default_rng(0)
        found = stats.bootstrap((self.values,), np.mean, confidence_level=_LEVEL, n_resamples=_RESAMPLES, rng=rng)
        return float(found.confidence_interval.low), float(found.confidence_interval.high)


@dataclass(frozen=True)
class Comparison:
    """Setting ``a`` against setting ``b`` over the seeds that both have.

    Attributes:
        seeds: The common seeds, ascending; with fewer than two all that follows is NaN.
        difference: Mean of a - b.
        interval: Ends of the 95 % t interval of the difference.
        t_p: Two-sided p value of the paired t test.
        wilcoxon_p: Two-sided p value of Wilcoxon's signed-rank test, exact for up to 50 differences
            without ties or zeros.
        effect_size: Cohen's d of the paired differences: their mean over their standard deviation;
            infinite where they are all the same and not 0; NaN with fewer than three seeds, since
            two differences hardly tell their deviation.
        holm_p: ``t_p`` after Holm's correction over the comparisons of one table; equal to ``t_p``
            for a comparison alone.
        holm_interval: Ends of the interval of the difference that excludes 0 exactly where
            ``holm_p`` is below 0.05 (:func:`correct`); equal to ``interval`` for a comparison
            alone.
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
    holm_interval: tuple[float, float] = (math.nan, math.nan)

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


def summarise(values: Iterable[float]) -> Summary:
    """Mean, standard deviation and intervals of the mean of values, one for each seed.

    Raises:
        ValueError: There is no value, or one is not finite.
    """
    found = tuple(map(float, values))
    if not found or not all(map(math.isfinite, found)):
        raise ValueError(f"values are {list(found)}; wanted at least one number, and all of them finite")
    return Summary(found)


def compare(a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compares two settings, given as values by seed, over their common seeds.

    Raises:
        ValueError: A value is not finite.
    """
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        return Comparison(*names, seeds, math.nan)
    found = summarise(a[seed] - b[seed] for seed in seeds)
    if found.n == 1:
        return Comparison(*names, seeds, found.mean)
    if np.ptp(found.values) == 0:
        # No spread: Student's t is 0 / 0 or infinite.
        t_p, effect = (1.0, 0.0) if found.mean == 0 else (0.0, math.copysign(math.inf, found.mean))
    else:
        t_p, effect = float(stats.ttest_1samp(found.values, 0.0).pvalue), found.mean / found.sd
    effect = effect if found.n > 2 else math.nan
    wilcoxon_p = float(stats.wilcoxon(found.values).pvalue) if any(found.values) else 1.0
    interval = found.t_interval
    return Comparison(*names, seeds, found.mean, interval, t_p, wilcoxon_p, effect, t_p, interval)


def compare_all(groups: Mapping[str, Mapping[int, float]], baseline: str | None = None) -> list[Comparison]:
    """Compares settings, each with a baseline or with every other, and corrects their p values and
    intervals over the whole table by Holm's method.

    Args:
        groups: Value by seed, by name.
        baseline: The name that all others are compared with; None: every pair, in order.

    Raises:
        ValueError: ``baseline`` is no name in ``groups``, or a value is not finite.
    """
    if baseline is not None and baseline not in groups:
        raise ValueError(f"baseline is {baseline!r}; wanted one of {', '.join(groups)}")
    pairs = itertools.combinations(groups, 2) if baseline is None else ((n, baseline) for n in groups if n != baseline)
    return correct(compare(groups[a], groups[b], (a, b)) for a, b in pairs)


def correct(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The comparisons of one table with p values and intervals after Holm's correction over all.

    The comparison with the k-th smallest p value of m has the t interval of level
    1 - 0.05 / (m - k + 1), that of the k-th step of Holm's test; all that the test does not reject
    have the level of the step at which it stops. So an interval excludes 0 exactly where ``holm_p``
    is below 0.05, and the chance that any excludes a difference of 0 is at most 5 %. The chance
    that all of them together contain the true differences may be below 95 %: that would take m in
    the place of m - k + 1. Comparisons over fewer than two seeds do not count.
    """
    found = list(comparisons)
    corrected = holm([c.t_p for c in found])
    number, rejected = sum(not math.isnan(p) for p in corrected), sum(p < 1 - _LEVEL for p in corrected)
    by_p = sorted(range(len(found)), key=lambda i: (math.isnan(found[i].t_p), found[i].t_p))
    for rank, i in enumerate(by_p[:number]):
        c, miss = found[i], (1 - _LEVEL) / (number - min(rank, rejected))
        usual, wider = stats.t.isf([(1 - _LEVEL) / 2, miss / 2], len(c.seeds) - 1)
        half = (c.interval[1] - c.difference) * float(wider / usual)
        found[i] = replace(c, holm_p=corrected[i], holm_interval=(c.difference - half, c.difference + half))
    return found


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
    rows: Iterable[Mapping[str, Any]], varied: Collection[str] = (), *, force: bool = False
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
    differing = _differences(rows, TASK, varied)
    for stream, same in _by(rows, "stream").items():
        differing += _difference(f"the data of stream {stream!r} differ", same, "data")
    if differing and not force:
        raise IncomparableRuns(
            f"these runs do not belong in one table: {'; '.join(differing)}. "
            "Report them separately, or use --force to see them side by side"
        )
    if concerned := [row for row in rows if row.get("switched_off")]:
        differing.append(
            f"the self-check of the native library had switched something off in {len(concerned)} of {len(rows)} runs:"
            f" {'; '.join(dict.fromkeys(row['switched_off'] for row in concerned))}"
        )
    return differing + _differences(rows, PROTOCOL, varied) + code_warnings(rows, varied)


def code_warnings(rows: Iterable[Mapping[str, Any]], varied: Collection[str] = ()) -> list[str]:
    """What differs in the code and in the machine that computed runs, whatever problem they solve:
    a sentence each on this package's code, the versions of a method of one's own, each column of
    :data:`MADE`, and, for runs on the CPU, the number of threads.

    Args:
        varied: Columns that differ on purpose, since the table shows them.
    """
    rows = list(rows)
    # Version and first commit of each code: commits may differ in other files.
    codes: dict[str, str] = {}
    for row in rows:
        commit = row["commit_id"] if isinstance(row["commit_id"], str) else "unknown"
        short = commit[:12] + "+dirty" * commit.endswith("+dirty")
        codes.setdefault(row["code"], f"{row['mose_fast']}, commit {short}, code {row['code'][:8]}")
    told = [{**row, "code": codes[row["code"]]} for row in rows]
    found = _difference("the code of mose-fast differs", told, "code")
    for method, same in _by(rows, "method").items():
        found += _difference(f"the version of method {method!r} differs", same, "method_version")
    on_cpu = [row for row in rows if row["device"] == "cpu"]  # on a GPU their threads change nothing
    return found + _differences(rows, MADE, varied) + _differences(on_cpu, ["threads"], ())


def _differences(rows: Sequence[Mapping[str, Any]], columns: Iterable[str], varied: Collection[str]) -> list[str]:
    """A sentence for each column whose values differ, but for those that do so on purpose."""
    found: list[str] = []
    for column in columns:
        if column not in varied:
            found += _difference(f"the {COLUMNS[column].label} differs", rows, column)
    return found


def _difference(what: str, rows: Iterable[Mapping[str, Any]], column: str) -> list[str]:
    """A sentence with the values of a column, each with its runs; none where all agree."""
    folders: dict[str, list[str]] = {}
    for row in rows:
        text = str(row[column])
        # What is missing comes as None from a table of SQLite, as NaN or NA from a data frame.
        text = "none" if text in ("None", "nan", "<NA>") else text
        folders.setdefault(text, []).append(str(row["folder"]))
    if len(folders) < 2:
        return []
    shown = [f"{_short(value)} ({_first(runs, 3)})" for value, runs in folders.items()]
    return [f"{what}: {_first(shown, 4)}"]


def _first(texts: Sequence[str], most: int) -> str:
    """The first of some texts, and how many more there are."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _by(rows: Iterable[Mapping[str, Any]], column: str) -> dict[Any, list[Mapping[str, Any]]]:
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[column], []).append(row)
    return found


def _short(value: str) -> str:
    """A class order of 100 numbers is cut."""
    try:
        numbers = json.loads(value)
    except ValueError:
        return value
    if isinstance(numbers, list) and len(numbers) > 6:
        return f"[{', '.join(map(str, numbers[:6]))}, ...]"
    return value
