"""The self-check: whether the native ops compute on this GPU what PyTorch does, before the first
run depends on them.

:func:`settle` is what a learner calls; :mod:`rows` is the table of the check, and
:mod:`mose_fast.train.self_check` the process that computes it, with the steps of a tiny network.
"""

from mose_fast.self_check.verdict import SWITCH, Verdict, check, settle, stored

__all__ = ["SWITCH", "Verdict", "check", "settle", "stored"]
