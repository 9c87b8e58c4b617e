"""Benchmarks: docs/benchmarks.md."""

import mose_fast  # noqa: F401  (before torch: it settles for how long threads spin)
