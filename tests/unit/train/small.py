"""A small run of two tasks of six batches, and what must not depend on how it was computed."""

from __future__ import annotations

from typing import Any

__all__ = ["TWO_TASKS", "outcome"]

TWO_TASKS: dict[str, Any] = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 60},
    "options": {"experts": 2, "buffer_batch": 12, "new_extra": 4},
    "width": 1,
    "memory": 30,
    "device": "cpu",
}


def outcome(results: dict[str, Any]) -> dict[str, Any]:
    """Results without times, memory and what a resumed run says of itself."""
    left_out = ("seconds", "resumed", "peak_memory_bytes", "commit", "config")
    return {name: value for name, value in results.items() if name not in left_out}
