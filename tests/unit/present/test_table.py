"""One table in four formats."""

import csv
import io
import re

import pytest

from mose_fast.present.page import environment
from mose_fast.present.table import Interval, Number, Spread, Table


def table():
    rows = [
        ["a & b", 1234, Number(-1.25, 2), Spread(35.06, 0.44), Interval(-0.04, 2.6)],
        ["50 %_x|y", None, None, Spread(9.96, None), None],
    ]
    return Table(
        "t", "All <n> = 2.", ["name", "count", "value", "ACC", "95 %"], rows, spreads=["ACC"], intervals=["95 %"]
    )


def test_csv_has_a_column_a_number():
    heading, first, second = csv.reader(io.StringIO(table().csv()))
    assert heading == ["name", "count", "value", "ACC", "ACC sd", "95 % low", "95 % high"]
    assert first == ["a & b", "1234", "-1.25", "35.1", "0.4", "0.0", "2.6"]
    assert second == ["50 %_x|y", "", "", "10.0", "", "", ""]


def test_columns_of_a_csv_do_not_depend_on_its_rows():
    bare = table()
    bare.rows = [["a", 1, None, Spread(1.0, None), None]]
    heading, row = csv.reader(io.StringIO(bare.csv()))
    assert heading == next(csv.reader(io.StringIO(table().csv())))
    assert row == ["a", "1", "", "1.0", "", "", ""]
    bare.rows = []
    assert bare.csv().splitlines() == [",".join(heading)]
    bare.spreads = []
    bare.rows = [["a", 1, None, Spread(1.0, 0.5), None]]
    with pytest.raises(
        ValueError, match=r"column 'ACC' of table 't' holds Spread.*; wanted it among spreads or intervals"
    ):
        bare.csv()


def test_thousands_are_separated_for_people_only():
    cells = [123456, Number(-12345.678, 2), Spread(1000.04, 2345.6), Interval(999.94, 1000000.0), True]
    big = Table("t", "", list("abcde"), [cells], spreads="c", intervals="d")
    assert (
        big.markdown().splitlines()[2] == "| 123,456 | -12,345.68 | 1,000.0 ± 2,345.6 | 999.9 to 1,000,000.0 | True |"
    )
    assert big.csv().splitlines()[1] == "123456,-12345.68,1000.0,2345.6,999.9,1000000.0,True"


def test_markdown_aligns_numbers_right_and_escapes_bars():
    assert table().markdown().splitlines() == [
        "| name | count | value | ACC | 95 % |",
        "|---|---:|---:|---:|---:|",
        "| a & b | 1,234 | -1.25 | 35.1 ± 0.4 | 0.0 to 2.6 |",
        "| 50 %_x\\|y | - | - | 10.0 | - |",
        "",
        "All <n> = 2.",
    ]


def test_latex_is_escaped():
    lines = table().latex().splitlines()
    assert r"\caption{All $<$n$>$ = 2.}" in lines
    assert r"\begin{tabular}{lrrrr}" in lines
    assert r"a \& b & 1,234 & $-$1.25 & 35.1 $\pm$ 0.4 & 0.0 to 2.6 \\" in lines
    assert r"50 \%\_x|y & - & - & 10.0 & - \\" in lines


def test_html_is_escaped_and_aligned():
    text = str(environment().get_template("parts.html").module.table(table()))
    assert '<figcaption id="about-t">All &lt;n&gt; = 2.</figcaption>' in text
    cells = re.findall(r"<td.*?</td>", text)
    number = '<td class="number">'
    assert cells[:4] == ["<td>a &amp; b</td>", f"{number}1,234</td>", f"{number}-1.25</td>", f"{number}35.1 ± 0.4</td>"]
    assert cells[4] == '<td class="number interval"><span>0.0 to</span> 2.6</td>'
    assert text.count("<tr>") == 3
