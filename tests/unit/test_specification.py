"""docs/specification: every citation of it names a page and a section that exist, and its tables of
settings and costs say what the code says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mose_fast.methods import METHODS
from mose_fast.methods.mose import MOSE_PRESETS, MoseOptions
from tests.paths import ROOT

PAGES = ROOT / "docs" / "specification"
FOLDERS = ("mose_fast", "csrc", "bench", "build_tools", "docs", "tests")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".sh", ".toml"}

#: ``docs/specification/mose.md section 9.3``, ``sections 3, 4 and 8``, ``appendix G.3``.
NUMBER = r"\d+(?:\.\d+)*"
PLACE = re.compile(rf" (?:section {NUMBER}|sections {NUMBER}(?:, {NUMBER})* and {NUMBER}|appendix [A-Z](?:\.\d+)?)")
#: The next line of a comment or docstring continues the text of the line before.
LINE_BREAK = re.compile(r"\s*\n\s*(?:#:|//|\*|#)?\s*")


def numbers(page: str) -> list[str]:
    """The numbers of a page's headings, and of the points of its appendices, in order."""
    return re.findall(rf"^(?:#+ (?:Appendix )?|- \*\*)({NUMBER}|[A-Z](?:\.\d+)?)(?:\.|\*\*)? ", page, re.MULTILINE)


SECTIONS = {path.name: numbers(path.read_text(encoding="utf-8")) for path in PAGES.glob("*.md")}


def wrong_citations(text: str) -> list[str]:
    """What is wrong with the citations of the specification in a text, a line each."""
    flat = LINE_BREAK.sub(" ", text)
    # On the specification's own pages a citation of the other page is a link.
    flat = re.sub(r"\[(\w+\.md)\]\(\1\),? (?=section)", r"docs/specification/\1 ", flat)
    wrong = []
    for cited in re.finditer(r"(\]\()?docs/specification/(\w+\.md)", flat):
        link, page = cited.groups()
        place = PLACE.match(flat, cited.end())
        if page not in SECTIONS:
            wrong.append(f"{page}: there is no such page")
        elif place:
            missing = [n for n in re.findall(rf"{NUMBER}|\b[A-Z](?:\.\d+)?\b", place[0]) if n not in SECTIONS[page]]
            wrong += [f"{page}: there is no section {number}" for number in missing]
        elif not link:
            wrong.append(f"{page}: no section is named in {flat[cited.start() : cited.end() + 20]!r}")
    return wrong


def pages_outside(text: str, folder: Path) -> list[str]:
    """Pages of the design that a text in this folder names and the repository does not hold."""
    names = re.findall(r"[\w./-]*\b(?:mose|baselines|kernels|performance|layout|craft)\.md", text)

    def inside(path: Path) -> bool:
        return path.is_file() and path.resolve().is_relative_to(ROOT)

    return [name for name in names if not inside(folder / name) and not inside(ROOT / name)]


def texts() -> Iterator[Path]:
    """Every file that may cite the specification, except this one."""
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path != Path(__file__))


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_every_citation_names_a_page_and_a_section_that_exist(folder):
    inside = [p for p in texts() if p.relative_to(ROOT).parts[0] == folder or (folder == "." and p.parent == ROOT)]
    found = {path: path.read_text(encoding="utf-8") for path in inside}
    wrong = [f"{path.relative_to(ROOT)}: {line}" for path, text in found.items() for line in wrong_citations(text)]
    wrong += [
        f"{path.relative_to(ROOT)}: {name} is not in the repository"
        for path, text in found.items()
        for name in pages_outside(text, path.parent)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docs/specification/baselines.md sections 0.2 and 0.9", ["baselines.md: there is no section 0.9"]),
        ("[mose.md](mose.md), sections 3, 44 and 8", ["mose.md: there is no section 44"]),
    ],
)
def test_a_wrong_citation_is_seen(text, expected):
    assert wrong_citations(text) == expected


@pytest.mark.parametrize("page", SECTIONS)
def test_no_number_is_used_twice_and_lines_have_at_most_100_columns(page):
    assert len(set(SECTIONS[page])) == len(SECTIONS[page])
    assert max(map(len, (PAGES / page).read_text(encoding="utf-8").splitlines())) <= 100


def table(page: str, start: str, end: str) -> list[list[str]]:
    """The cells of all rows of tables between two headings of a page."""
    text = (PAGES / page).read_text(encoding="utf-8")
    part = text[text.index(f"\n{start}") : text.index(f"\n{end}")]
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", part, re.MULTILINE)]


def test_the_settings_of_the_presets_are_those_of_the_code():
    def show(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    rows = {row[0]: row[1:] for row in table("mose.md", "## 13. ", "## 14. ")}
    released, paper = MoseOptions(), MOSE_PRESETS["paper"]
    for name, value in paper.items():
        assert rows.pop(name)[:2] == [show(getattr(released, name)), show(value)], name
    others = [name for name in rows if name not in ("setting", "---")]
    assert len(others) >= 9
    for name in others:
        assert rows[name][0].split(" ")[0] == show(getattr(released, name)), name


def test_the_costs_are_those_of_the_code():
    names = {"A-GEM": "agem", "ER-AML": "er-aml", "DER++": "derpp", "SS-IL": "ssil", "fine-tuning": "finetune"}
    costs = {
        names.get(row[0], row[0].lower()): row[-1]
        for row in table("baselines.md", "### 0.1 ", "### 0.2 ")
        if len(row) == 6
    }
    costs = {name: cost for name, cost in costs.items() if name not in ("method", "---")}
    assert costs == {name: f"{method.about.cost:.2f}" for name, method in METHODS.items() if name != "mose"}
