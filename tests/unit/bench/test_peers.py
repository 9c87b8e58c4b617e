"""What bench.peers makes of its measurements: intervals, ratios, the table, and who is measured."""

import pytest

from bench import peers


def measurement(method="er", by="ours", seed=0, seconds=2.0, rows=640, **changes):
    given = {"steps": 10, "peak_bytes": 500e6, "accuracy": 0.125, "parameters": 1000, "macs": 2000}
    return {"method": method, "by": by, "seed": seed, "seconds": seconds, "rows": rows, **given, **changes}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    "values, wanted",
    [
        ([3.0], (3.0, 3.0, 3.0, 0.0)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], (3.0, 1.0, 5.0, 1 - 2 / 2**5)),
        (range(1, 9), (4.5, 1, 8, 1 - 2 / 2**8)),  # without 1 and 8: 1 - 2 * 9 / 256, less than 95 %
        (range(1, 10), (5, 2, 8, 1 - 2 * (1 + 9) / 2**9)),
    ],
)
def test_interval_of_the_median(values, wanted):
    assert peers.interval(values) == pytest.approx(wanted)


def test_ratios_are_of_the_same_round():
    ours = [measurement(seed=0, seconds=1.0), measurement(seed=1, seconds=4.0)]
    theirs = [measurement(seed=1, seconds=8.0, by="capymoa"), measurement(seed=0, seconds=3.0, by="capymoa")]
    assert peers.ratios(ours, theirs, "rows")[:3] == (2.5, 2.0, 3.0)


def test_table_has_a_line_for_each_contestant_and_names_what_is_slower():
    runs = [measurement(seed=seed, accuracy=0.1 + seed / 100) for seed in range(2)]
    runs += [measurement(by="avalanche", seed=seed, rows=480, seconds=1.0, peak_bytes=750e6) for seed in (1, 0)]
    runs += [measurement("scr", "avalanche", seed, seconds=4.0) for seed in range(2)]
    runs += [measurement("scr", seed=seed) for seed in range(2)]
    _, _, *lines = peers.table(runs).splitlines()
    assert [cells(line)[:2] for line in lines] == [
        ["ER", "avalanche"],
        ["ER", "ours"],
        ["SCR", "avalanche"],
        ["SCR", "ours"],
    ]
    assert cells(lines[0])[2:] == [
        *("480 (480 to 480)", "0.67 (0.67 to 0.67) **slower**", "10.00 (10.00 to 10.00)"),
        *("0.50 (0.50 to 0.50) **slower**", "480", "10", "750", "12.5, 12.5"),
    ]
    assert cells(lines[1])[2:] == [
        "320 (320 to 320)",
        "-",
        "5.00 (5.00 to 5.00)",
        "-",
        "640",
        "10",
        "500",
        "10.0, 11.0",
    ]
    assert cells(lines[2])[3] == "2.00 (2.00 to 2.00)"


def test_networks_that_differ_are_told_apart():
    runs = [measurement(seed=seed, by=by) for seed in range(2) for by in ("avalanche", "capymoa")]
    runs.append(measurement(macs=3000))
    assert peers.networks(runs) == (
        "- ER: 1,000 parameters, 2,000 multiply-accumulates (avalanche, capymoa); 1,000 parameters, 3,000"
        " multiply-accumulates (ours)"
    )


def test_we_run_only_beside_another(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: name == "capymoa" or None)
    assert peers.contestants([], mose=False) == [("er", "capymoa"), ("er", "ours")]
    assert peers.contestants([], mose=True)[2:] == [("mose", "authors"), ("mose", "ours")]
    assert peers.contestants(["mose", "capymoa"], mose=True) == [
        ("er", "capymoa"),
        ("mose", "authors"),
        ("mose", "ours"),
    ]


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--data", "nowhere", "--only", "er,mammoth"])
    assert "mammoth is no method and no library" in capsys.readouterr().err
