"""Joint training in one pass: what a learner reaches that need not fear forgetting."""

from __future__ import annotations

from mose_fast.learner.about import table_preset
from mose_fast.learner.registry import method
from mose_fast.methods.er import Er, ErOptions


@method(
    "joint",
    options=ErOptions,
    presets={"table": table_preset()},
    year=2019,
    reference="Upper bound; one pass over independent, identically distributed batches",
    cost=1.0,
)
class Joint(Er):
    """Upper bound: ER, but the data of all tasks come shuffled together, as one task."""

    joint_stream = True
