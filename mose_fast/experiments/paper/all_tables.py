"""All tables of the paper together: their plans, and what they cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mose_fast.experiments.forecast import Forecast, duration
from mose_fast.experiments.paper.plan import Plan, methods_of
from mose_fast.experiments.paper.rows import Presets
from mose_fast.experiments.paper.tables import TABLES, describe
from mose_fast.present.table import Table
from mose_fast.settings.run import ConfigError, near_matches

__all__ = ["all_plans", "listing"]


def all_plans(
    seeds: Sequence[int],
    presets: Presets,
    changes: Mapping[str, Any],
    methods: Sequence[str] | None,
    without: Collection[str] = (),
) -> list[Plan]:
    """The plans of all tables that have rows of the methods on the data sets.

    Args:
        seeds: The runs' seeds.
        presets: The presets of MOSE and of the baselines.
        changes: Settings by dotted name for all runs.
        methods: The methods; None: all.
        without: The data sets to leave out.

    Raises:
        ConfigError: No table has one of the methods, or a setting is unusable.
    """
    there = {name: methods_of(describe(name, presets), without) for name in TABLES}
    known = list(dict.fromkeys(method for found in there.values() for method in found))
    for method in methods or ():
        if method not in known:
            raise ConfigError(f"methods has {method!r}, of which no table has a row{near_matches(method, known)}")
    plans = []
    for name, found in there.items():
        own = [method for method in (found if methods is None else methods) if method in found]
        if own:
            plans.append(Plan(name, seeds, presets, changes, methods and own, without))
    if not plans:
        nothing = "methods are ''; wanted at least one"
        raise ConfigError(nothing if methods is not None else f"without is {','.join(without)}: no table remains")
    return plans


def listing(plans: Sequence[Plan], forecast: Forecast) -> str:
    """The tables with their runs and what they take; a run that several tables share is counted in
    the first of them.
    """
    table = Table("tables", "", ["table", "runs", "shared", "to do", "computing", "content"])
    earlier: set[str] = set()
    for plan in plans:
        names = {cell.name for cell in plan.cells}
        left = [forecast.costs[name].seconds for name in names - earlier if name in forecast.costs]
        content = plan.description.title
        table.rows.append([plan.name, len(names), len(names & earlier), len(left), duration(sum(left)), content])
        earlier |= names
    table.rows.append(
        ["all", len(earlier), None, len(forecast.costs), duration(forecast.compute_seconds), "each run once"]
    )
    return (
        f"\n{table.markdown().rstrip()}\nshared: runs that an earlier table has, too; to do: the others that are not"
        " finished"
    )
