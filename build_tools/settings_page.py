"""Writes docs/settings.md from the declarations of the settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mose_fast.learner.about import TABLE
from mose_fast.methods import METHODS, BaselineOptions
from mose_fast.settings.knob import as_text, settings_of
from mose_fast.settings.run import METHOD_SETTINGS, RunConfig, StreamConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

_HEAD = """# Settings

Every setting of a run. `python -m build_tools.settings_page` writes this page from the declarations
in `mose_fast/settings/run.py` and `mose_fast/methods/`; [adding_a_setting.md](adding_a_setting.md) says
how to declare one.

A setting is given by its flag, where it has one, by `--set NAME=VALUE` (a method's switches also
without `options.`), in a `.toml` or `.json` file for `--config`, or as a keyword in Python. A value
is JSON or a bare word; `null` stands for none. In Python, numbers and texts of numpy, scalars of
torch, `pathlib.Path` and `torch.device` may stand for it; the plain value is stored. In the column
"source", *paper* is the text of the CVPR 2024 paper, *released* is the authors' code, and *choice*
is ours where neither decides.

The role says what depends on a setting. `problem` and `method` make two runs different experiments:
a report keeps them apart, a sweep may vary them, and in a reproduction of the paper they count as
departures. `execution` says where and how fast a run computes: results are equal up to rounding,
except for `precision`. `bookkeeping` changes no result, and may change when a run is resumed. A run
itself writes `stream.fingerprint`.
"""


def page() -> str:
    """The text of docs/settings.md."""
    parts = [_HEAD]
    for title, kind in (("The run", RunConfig), ("The stream", StreamConfig)):
        parts.append(f"\n## {title}\n\n{_table('setting', 'default', 'flag', 'meaning', 'role', 'source')}")
        for s in settings_of(kind).values():
            flag = f"`--{s.flag}`" if s.flag else ""
            parts.append(_row(f"`{s.name}`", as_text(s.default), flag, s.full_meaning, s.role, s.source))
    parts.append(
        "\n## Switches of MOSE\n\nThe presets pin all of them; a run records which ones differ from its preset.\n"
    )
    parts += _switches("mose")
    parts.append(f"\n## Switches that all baselines have\n\n{_table('switch', 'default', 'meaning', 'source')}")
    shared = settings_of(BaselineOptions)
    parts += [_row(f"`{s.field}`", as_text(s.default), s.full_meaning, s.source) for s in shared.values()]
    parts.append(
        "\n## What tune searches\n\nThe ranges that `mose-fast tune` searches by default ([tuning.md](tuning.md)); a"
        f" row without a method is for all others.\n\n{_table('method', 'setting', 'from', 'to', 'scale', 'source')}"
    )
    ranges = {}
    for name in METHODS:
        for s in settings_of(METHOD_SETTINGS[name].options).values():
            if s.search is not None:
                ranges.setdefault((s.field, s.search), []).append(name)
    for (field, search), names in ranges.items():
        who = "" if len(names) > len(METHODS) / 2 else ", ".join(names)
        scale = "logarithmic" if search.log else "linear"
        parts.append(_row(who, f"`{field}`", f"{search.low:g}", f"{search.high:g}", scale, search.source))
    parts.append(
        "\n## Switches of each baseline\n\nIts own switches, and those that its presets set otherwise than the defaults"
        " above. The preset `table` is the shared\nprotocol ([methods.md](methods.md)).\n"
    )
    for name in METHODS:
        baseline = issubclass(METHOD_SETTINGS[name].options, BaselineOptions)
        known = {s.field: s.default for s in shared.values()} if baseline else {}
        rows = _switches(name, known)
        if name != "mose":
            presets = METHODS[name].about.presets
            sources = [f"`{preset}`: {about.source}.\n" for preset, about in presets.items() if about.source != TABLE]
            parts += [f"\n### {name}\n", *sources, *(rows if len(rows) > 1 else ["No switch of its own."])]
    return "\n".join(parts) + "\n"


def _switches(method: str, known: dict[str, object] | None = None) -> list[str]:
    """The table of a method's switches by preset, without those that are as ``known`` in all."""
    settings = METHOD_SETTINGS[method]
    presets = {name: dataclasses.asdict(settings.options(**changes)) for name, changes in settings.presets.items()}
    rows = [_table("switch", *(f"`{name}`" for name in presets), "meaning", "source")]
    for s in settings_of(settings.options).values():
        values = [values[s.field] for values in presets.values()]
        if known is None or s.field not in known or any(value != known[s.field] for value in values):
            rows.append(_row(f"`{s.field}`", *map(as_text, values), s.full_meaning, s.source))
    return rows


def _table(*names: str) -> str:
    return f"{_row(*names)}\n|{'---|' * len(names)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
