"""Keeps benchmark results: appends the rows of ``pytest bench --rows`` to one CSV file per GPU or
CPU, and prints a table.

    python -m pytest bench --rows=build/rows
    python -m bench.store build/rows/cpu.csv

Results on the CPU go to bench/results/cpu.csv, those on a GPU to bench/results/<its name>.csv. A
row is one benchmark; rows are only ever added. Columns: :data:`COLUMNS`; times are microseconds per
call; on a GPU they are taken by CUDA events, inside a captured graph if ``graph`` is yes.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
#: From ``graph`` to ``copy_bytes_per_us`` for GPUs only. Peak memory is that of one call in bytes,
#: outputs included, inputs not; the three after the target are there where an op is bound by bytes,
#: and its inputs then were not in the GPU's cache. ``processor`` names the GPU or the CPU.
COLUMNS = (
    *("op", "impl", "direction", "shape", "dtype", "device", "median_us", "p20_us", "p80_us"),
    *("graph", "peak_bytes", "launches", "target_us", "bytes_needed", "bytes_moved", "copy_bytes_per_us"),
    *("processor", "torch", "cuda", "python", "threads", "commit", "date"),
)

Row = dict[str, str]


def row_of(info: Mapping[str, Any]) -> Row:
    """What the fixture ``measure`` recorded of one benchmark, as a row."""
    return {name: "" if info.get(name) is None else str(info[name]) for name in COLUMNS}


def read_csv(text: str) -> list[Row]:
    """The rows of a CSV file of the store; a last line that was cut off is left out. Raises
    ValueError if the text has other columns.
    """
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
    if not lines or lines[0].strip() != ",".join(COLUMNS):
        raise ValueError(f"the columns are {lines[0].strip() if lines else 'none'!r}; wanted {','.join(COLUMNS)!r}")
    return list(csv.DictReader(lines))


def file_name(row: Row) -> str:
    """The name of a row's file: ``cpu.csv``, or the GPU's name in lower case with hyphens."""
    return (
        "cpu.csv"
        if row["device"] == "cpu"
        else re.sub(r"[^a-z0-9]+", "-", row["processor"].lower()).strip("-") + ".csv"
    )


def append(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Appends rows to their files in ``folder``, which it returns; a new file gets a header. Raises
    ValueError, and writes nothing, if a file has other columns.
    """
    by_file: dict[Path, list[Row]] = {}
    for row in rows:
        by_file.setdefault(folder / file_name(row), []).append(row)
    header = ",".join(COLUMNS)
    for path in by_file:
        first = path.read_text().partition("\n")[0] if path.exists() else header
        if first != header:
            raise ValueError(f"{path} has the columns {first!r}; wanted {header!r}")
    for path, new in by_file.items():
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            writer.writeheader()
        writer.writerows(new)
        with open(path, "a") as file:
            file.write(text.getvalue())
    return list(by_file)


def table(rows: Sequence[Row]) -> str:
    """A table with one line per op, direction, shape, dtype and device; of two rows for one cell,
    the later one is used.

    The speedup is that of the native code over the reference; launches, peak memory and megabytes
    (needed, moved) are the native code's. ``of copy`` is the time to copy the needed bytes divided
    by the time of the native code.
    """
    names = ("op", "direction", "shape", "dtype", "device")
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in names), {})[row["impl"]] = row
    head = ("reference us", "compiled us", "native us", "speedup", "target us", "launches", "peak KiB", "MB", "of copy")
    cells = [(*names, *head)]
    for key, by_impl in lines.items():
        median = {impl: float(row["median_us"]) for impl, row in by_impl.items()}
        native = by_impl.get("native", {})
        target = native.get("target_us", "")
        cells.append(
            (
                *key,
                *(f"{median[impl]:.1f}" if impl in median else "-" for impl in ("reference", "compiled", "native")),
                f"{median['reference'] / median['native']:.2f}" if {"reference", "native"} <= set(median) else "-",
                f"{float(target):g} {'met' if median['native'] <= float(target) else 'MISSED'}" if target else "-",
                native.get("launches") or "-",
                f"{int(native['peak_bytes']) / 1024:.0f}" if native.get("peak_bytes") else "-",
                *_bytes(native),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [str.ljust] * len(names) + [str.rjust] * (len(widths) - len(names))
    return "\n".join(
        "  ".join(map(lambda align, cell, width: align(cell, width), aligned, line, widths)) for line in cells
    )


def _bytes(row: Row) -> tuple[str, str]:
    """Megabytes needed and moved, and the share of the copy rate."""
    if not row.get("bytes_needed") or not row.get("bytes_moved"):
        return "-", "-"
    needed, moved = int(row["bytes_needed"]), int(row["bytes_moved"])
    return (
        f"{needed / 1e6:.1f} {moved / 1e6:.1f}",
        f"{needed / float(row['copy_bytes_per_us']) / float(row['median_us']):.2f}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Appends rows to the store and prints their table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__.partition("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="CSV that pytest --rows wrote")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the CSV files (default: bench/results)"
    )
    parser.add_argument("--show", action="store_true", help="print the table, add nothing")
    options = parser.parse_args(arguments)
    rows = []
    for path in options.files:
        try:
            rows += read_csv(path.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    if not rows:
        parser.error(f"{', '.join(map(str, options.files))}: no benchmark in it")
    if not options.show:
        try:
            files = append(rows, options.results)
        except ValueError as error:
            parser.error(str(error))
    first = rows[0]
    print(table(rows))
    print(
        f"\n{first['processor']}; torch {first['torch']}, CUDA {first['cuda'] or 'none'}; commit {first['commit']};"
        f" {first['date']}"
    )
    if not options.show:
        print(f"{len(rows)} rows added to {', '.join(map(str, files))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
