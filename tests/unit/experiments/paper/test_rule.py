"""Pass and miss, on values worked out by hand."""

import pytest

from mose_fast.experiments.paper.description import Entry
from mose_fast.experiments.paper.measures import Metric
from mose_fast.present.published import Published
from mose_fast.present.statistics import summarise

ACCURACY, FORGETTING, SIZE, FREE = (Metric(kind, kind, list) for kind in ("accuracy", "forgetting", "size", "free"))


def entry(metric, paper, **more):
    return Entry("row", "column", {}, metric, paper, **more)


# Of 54.0, 54.2 and 54.4: mean 54.2, deviation 0.2, half the interval 4.303 * 0.2 / sqrt(3) = 0.497.
CLOSE = [54.0, 54.2, 54.4]


@pytest.mark.parametrize(
    ("metric", "paper", "values", "verdict"),
    [
        (ACCURACY, 54.8, CLOSE, "pass, not sure"),  # the target 53.8 lies in 53.70 to 54.70
        (ACCURACY, 54.6, CLOSE, "pass"),
        (ACCURACY, 55.2, CLOSE, "pass, not sure"),
        (ACCURACY, 55.3, CLOSE, "miss, not sure"),
        (ACCURACY, 55.8, CLOSE, "miss"),
        (ACCURACY, 20.0, CLOSE, "pass"),
        (ACCURACY, 54.8, [53.8] * 3, "pass"),  # just so, and the same for every seed
        (ACCURACY, 54.8, [53.79] * 3, "miss"),
        (ACCURACY, 54.8, [60.0], "pass, not sure"),  # one seed has no interval
        (FORGETTING, 54.0, CLOSE, "pass"),
        (FORGETTING, 53.1, CLOSE, "miss, not sure"),
        (FORGETTING, 52.0, CLOSE, "miss"),
        (SIZE, 12.81, [12.80, 12.80], "pass"),
        (SIZE, 12.81, [12.93], "pass"),  # 12.81 * 1.01 = 12.9381
        (SIZE, 12.81, [12.94], "miss"),
    ],
)
def test_by_hand(metric, paper, values, verdict):
    assert str(entry(metric, Published(paper)).judge(summarise(values))) == verdict


def test_interval_of_the_example():
    low, high = summarise(CLOSE).t_interval
    assert (low, high) == (pytest.approx(53.703, abs=1e-3), pytest.approx(54.697, abs=1e-3))


def test_targets():
    kinds = (ACCURACY, FORGETTING, SIZE, FREE)
    assert [entry(metric, Published(50.0, 0.4)).target for metric in kinds] == [49.0, 51.0, 50.5, None]


def test_nothing_is_judged_without_a_number_that_can_be_right():
    for unjudged in (
        entry(ACCURACY, None),
        entry(ACCURACY, Published(54.8), doubt="a misprint"),
        entry(FREE, Published(17.5)),
    ):
        assert unjudged.target is None and unjudged.judge(summarise(CLOSE)) is None
