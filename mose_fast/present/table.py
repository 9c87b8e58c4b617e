"""One table, shown on pages and written as Markdown, LaTeX and CSV with the same digits in each."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_NOTHING = "-"


class Number(NamedTuple):
    """A number, shown with ``digits`` decimals."""

    value: float
    digits: int = 1


class Spread(NamedTuple):
    """A mean and its standard deviation, which is None for a single value."""

    mean: float
    sd: float | None
    digits: int = 1


class Interval(NamedTuple):
    """The lower and the upper end of an interval."""

    low: float
    high: float
    digits: int = 1


Cell = str | int | Number | Spread | Interval | None


@dataclass
class Table:
    """A table.

    Attributes:
        name: Name of its files and of its anchor on the page.
        caption: What it shows, of how many runs, in which unit.
        columns: Headings; empty: the first :meth:`add` sets them.
        spreads: Columns that may hold a :class:`Spread`. Each gives two columns of the CSV,
            whatever the rows hold.
        intervals: Columns that may hold an :class:`Interval`; two columns of the CSV likewise.
    """

    name: str
    caption: str
    columns: Sequence[str] = ()
    rows: list[Sequence[Cell]] = field(default_factory=list)
    spreads: Sequence[str] = ()
    intervals: Sequence[str] = ()

    def add(self, cells: Mapping[str, Cell]) -> None:
        """Adds a row, given by heading. All rows have the same headings."""
        self.columns = self.columns or list(cells)
        self.rows.append([cells[heading] for heading in self.columns])

    @property
    def kinds(self) -> list[str]:
        """By column, what cells are on a page: text, ``number`` or ``number interval``."""
        return [
            "" if text else "number interval" if name in self.intervals else "number"
            for name, text in zip(self.columns, self._textual(), strict=True)
        ]

    @property
    def texts(self) -> list[list[str]]:
        """The rows as a reader sees them."""
        return [[cell_text(cell) for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """As a table of GitHub's Markdown, the caption below it."""

        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = "|" + "|".join("---" if text else "---:" for text in self._textual()) + "|"
        rows = [line(texts) for texts in self.texts]
        return "\n".join([line(self.columns), rule, *rows, "", self.caption, ""])

    def latex(self) -> str:
        """As a LaTeX ``table`` for the package booktabs."""
        kinds = "".join("l" if text else "r" for text in self._textual())
        rows = [" & ".join(map(_latex, texts)) + r" \\" for texts in self.texts]
        return "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{_latex(self.caption)}}}",
                rf"\label{{tab:{self.name}}}",
                rf"\begin{{tabular}}{{{kinds}}}",
                r"\toprule",
                " & ".join(map(_latex, self.columns)) + r" \\",
                r"\midrule",
                *rows,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def csv(self) -> str:
        """As CSV with one number per column: a spread gives two columns (``ACC``, ``ACC sd``), and
        so does an interval (``... low``, ``... high``). Numbers have no thousands separators.

        Raises:
            ValueError: A column holds a spread or an interval that :attr:`spreads` and
                :attr:`intervals` do not name.
        """
        suffixes = [
            ("", " sd") if name in self.spreads else (" low", " high") if name in self.intervals else ("",)
            for name in self.columns
        ]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([name + suffix for name, ends in zip(self.columns, suffixes, strict=True) for suffix in ends])
        for row in self.rows:
            values: list[str] = []
            for name, cell, ends in zip(self.columns, row, suffixes, strict=True):
                parts = _numbers(cell)
                if len(parts) > len(ends):
                    raise ValueError(
                        f"column {name!r} of table {self.name!r} holds {cell!r}; wanted it among spreads or intervals"
                    )
                values += parts + [""] * (len(ends) - len(parts))
            writer.writerow(values)
        return text.getvalue()

    def _textual(self) -> list[bool]:
        return [any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]


def _numbers(cell: Cell, separator: str = "") -> list[str]:
    """The numbers of a cell, with a thousands separator; a missing number is empty."""
    if cell is None:
        return [""]
    if isinstance(cell, Number):
        return [_decimal(cell.value, cell.digits, separator)]
    if isinstance(cell, Spread | Interval):
        return ["" if part is None else _decimal(part, cell.digits, separator) for part in cell[:2]]
    return [f"{cell:{separator}d}" if type(cell) is int else str(cell)]


def _decimal(value: float, digits: int, separator: str) -> str:
    text = f"{value:{separator}.{digits}f}"
    # No "-0.0".
    return text.lstrip("-") if round(value, digits) == 0 else text


def cell_text(cell: Cell) -> str:
    """A cell as a reader sees it, with thousands separators; ``-`` if there is no value."""
    parts = _numbers(cell, ",")
    if isinstance(cell, Spread):
        return " ± ".join(filter(None, parts))
    if isinstance(cell, Interval):
        return f"{parts[0]} to {parts[1]}"
    return parts[0] or _NOTHING


def counted(n: int, noun: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"±": r"$\pm$", "<": "$<$", ">": "$>$"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _latex(text: str) -> str:
    # A hyphen before a digit at the start of a word is a minus sign.
    escaped = "".join(_LATEX.get(c, c) for c in text)
    return " ".join(
        f"$-${word[1:]}" if word[:1] == "-" and word[1:2].isdigit() else word for word in escaped.split(" ")
    )
