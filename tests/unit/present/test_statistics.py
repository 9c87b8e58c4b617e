"""Statistics against numbers worked by hand, against scipy, and by their properties."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from mose_fast.present.statistics import (
    MADE,
    PROTOCOL,
    TASK,
    IncomparableRuns,
    check_comparable,
    code_warnings,
    compare,
    compare_all,
    correct,
    holm,
    summarise,
)

# Quantile 0.975 of Student's t, from printed tables.
T_2, T_4 = 4.302653, 2.776445


def test_summary_by_hand():
    found = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.n, found.mean) == (5, 3.0)
    assert found.sd == pytest.approx(math.sqrt(2.5))
    half = T_4 * math.sqrt(2.5) / math.sqrt(5)
    assert found.t_interval == pytest.approx((3 - half, 3 + half), abs=1e-5)
    low, high = found.bootstrap_interval
    assert 1.0 <= low < 3.0 < high <= 5.0
    assert found == summarise([1.0, 2.0, 3.0, 4.0, 5.0])


def test_intervals_cover_the_mean_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr("mose_fast.present.statistics._RESAMPLES", 499)
    rng = np.random.default_rng(0)
    samples = rng.normal(0.5, 0.1, (400, 8))
    covered = [
        [low <= 0.5 <= high for low, high in (s.t_interval, s.bootstrap_interval)]
        for s in (summarise(sample) for sample in samples)
    ]
    t, bootstrap = np.mean(covered, axis=0)
    assert 0.92 < t < 0.98  # 0.95 and three standard errors
    assert 0.85 < bootstrap < 0.98  # known to be narrow for eight values


def test_one_value_and_equal_values():
    one = summarise([0.4])
    assert (one.n, one.mean) == (1, 0.4)
    assert all(map(math.isnan, (one.sd, *one.t_interval, *one.bootstrap_interval)))
    equal = summarise([0.4, 0.4, 0.4])
    assert equal.sd == pytest.approx(0.0, abs=1e-12)
    assert equal.bootstrap_interval == pytest.approx((0.4, 0.4))


@pytest.mark.parametrize("values", [[], [0.1, math.nan], [math.inf]])
def test_unusable_values(values):
    with pytest.raises(ValueError, match="wanted at least one number, and all of them finite"):
        summarise(values)


def test_paired_comparison_by_hand():
    # Differences 0.01, 0.02, 0.03 over the common seeds 1, 2, 3: mean 0.02, standard deviation
    # 0.01.
    a, b = {0: 0.9, 1: 0.51, 2: 0.62, 3: 0.43}, {1: 0.50, 2: 0.60, 3: 0.40, 4: 0.1}
    found = compare(a, b, names=("mose", "er"))
    assert found.seeds == (1, 2, 3)
    assert found.difference == pytest.approx(0.02)
    assert found.effect_size == pytest.approx(2.0)
    half = T_2 * 0.01 / math.sqrt(3)
    assert found.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-6)
    # t = 2 sqrt(3) with 2 degrees of freedom; p = 1 - t / sqrt(t^2 + 2).
    t = 2 * math.sqrt(3)
    assert found.t_p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    # All three ranks are positive: 2 of 2^3 sign patterns are as extreme.
    assert found.wilcoxon_p == pytest.approx(0.25)
    assert (found.holm_p, found.holm_interval) == (found.t_p, found.interval)
    assert found.warnings == ["mose and er have 3 seeds in common; fewer than 6 are too few to show much"]


def test_paired_comparison_against_scipy():
    rng = np.random.default_rng(1)
    a, b = rng.normal(0.5, 0.02, 15), rng.normal(0.49, 0.02, 15)
    found = compare(dict(enumerate(a)), dict(enumerate(b)))
    assert found.t_p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert found.wilcoxon_p == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue)
    interval = stats.ttest_rel(a, b).confidence_interval()
    assert found.interval == pytest.approx((interval.low, interval.high))
    assert found.warnings == []
    swapped = compare(dict(enumerate(b)), dict(enumerate(a)))
    assert swapped.difference == pytest.approx(-found.difference)
    assert swapped.t_p == pytest.approx(found.t_p)


def test_sentences():
    seeds = range(15)
    # Differences of 0.019 and around it, such that the interval ends 0.007 from their mean: 14 of
    # 15 lie one deviation away.
    deviation = 0.007 * math.sqrt(15) / float(stats.t.ppf(0.975, 14))
    pattern = np.array([-1, 1] * 7 + [0]) * deviation
    a = {s: 0.5 + 0.019 + pattern[s] for s in seeds}
    b = dict.fromkeys(seeds, 0.5)
    assert compare(a, b).sentence() == "better by 1.9 points, 95 % interval 1.2 to 2.6, 15 common seeds"
    assert compare(b, a).sentence() == "worse by 1.9 points, 95 % interval 1.2 to 2.6, 15 common seeds"
    assert (
        compare({0: 0.5, 1: 0.4}, {0: 0.4, 1: 0.5})
        .sentence()
        .startswith("no clear difference (+0.0 points, 95 % interval -")
    )
    assert compare({0: 0.51}, {0: 0.5}).sentence() == "difference +1.0 points, 1 common seed: no interval"
    assert compare({0: 0.51}, {1: 0.5}).sentence() == "no common seeds"


def test_a_sentence_follows_the_corrected_p():
    # Differences -0.25, -0.28, -0.275: t is -28.9 with 2 degrees of freedom, p 0.0012. Among 60
    # alike, Holm's p is 60 times that.
    found = compare({0: 0.25, 1: 0.22, 2: 0.225}, dict.fromkeys(range(3), 0.5))
    assert found.t_p == pytest.approx(0.0012, abs=5e-5)
    assert found.sentence() == "worse by 26.8 points, 95 % interval 22.8 to 30.8, 3 common seeds"
    corrected = dataclasses.replace(found, holm_p=holm([found.t_p] * 60)[0])
    assert (
        corrected.sentence()
        == "no clear difference (-26.8 points, 95 % interval -30.8 to -22.8, p 0.0716 after Holm's correction, 3 common"
        " seeds)"
    )
    for p, verdict in ((0.0499, "worse by 26.8 points"), (0.05, "no clear difference")):
        assert dataclasses.replace(found, holm_p=p).sentence().startswith(verdict)


def test_two_seeds_have_no_effect_size():
    assert math.isnan(compare({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.65}).effect_size)
    assert math.isnan(compare({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6}).effect_size)


def test_same_difference_everywhere():
    none = compare({0: 0.5, 1: 0.25, 2: 0.5}, {0: 0.5, 1: 0.25, 2: 0.5})
    assert (none.difference, none.t_p, none.wilcoxon_p, none.effect_size) == (0.0, 1.0, 1.0, 0.0)
    same = compare({0: 0.5, 1: 0.75, 2: 0.25}, {0: 0.25, 1: 0.5, 2: 0.0})
    assert (same.difference, same.t_p, same.effect_size) == (0.25, 0.0, math.inf)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, never decreasing.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    found = holm([0.01, math.nan, 0.02])
    assert found[0::2] == pytest.approx([0.02, 0.02])
    assert math.isnan(found[1])
    assert holm([]) == []


def test_holm_intervals_by_hand():
    """Four differences over three seeds, each with standard deviation 0.01, so a standard error of
    0.01 / sqrt(3) = 0.0057735, and t by the mean: 0.20 is t = 34.6, 0.06 is 10.4, 0.04 is 6.9.
    """

    def about(mean):
        return compare({0: mean - 0.01, 1: mean, 2: mean + 0.01}, dict.fromkeys(range(3), 0.0))

    # p is 1 - t / sqrt(t^2 + 2): 0.00083, 0.0091, 0.0202, 0.38; Holm's 0.0033, 0.0274, 0.0404,
    # 0.38. The steps have levels 1 - 0.05 / 4, / 3, / 2, / 1: upper tails q of 0.00625, 0.0083333,
    # 0.0125, 0.025, at which t with 2 degrees of freedom is (1 - 2 q) / sqrt(2 q (1 - q)).
    quantiles = [8.860, 7.649, 6.205, 4.303]
    means = [0.20, 0.06, 0.04, 0.0065]
    found = correct(map(about, [means[2], means[0], means[3], means[1]]))
    found = [found[1], found[3], found[0], found[2]]
    assert [c.holm_p < 0.05 for c in found] == [True, True, True, False]
    for c, mean, quantile in zip(found, means, quantiles, strict=True):
        half = quantile * 0.01 / math.sqrt(3)
        assert c.holm_interval == pytest.approx((mean - half, mean + half), abs=2e-5)
        assert c.interval == pytest.approx((mean - T_2 * 0.0057735, mean + T_2 * 0.0057735), abs=2e-5)

    # The test stops at its second step, since p = 0.0276 > 0.05 / 3: the others keep its level.
    found = correct(map(about, [0.20, 0.034, 0.034, 0.0065]))
    for c, quantile in zip(found, [8.860, 7.649, 7.649, 7.649], strict=True):
        assert c.holm_interval[1] - c.difference == pytest.approx(quantile * 0.0057735, abs=2e-5)
    # A comparison without an interval does not count.
    assert correct([about(0.2), compare({0: 0.1}, {0: 0.2})])[0].holm_interval == about(0.2).interval


def test_holm_intervals_exclude_zero_where_the_corrected_p_is_small():
    rng = np.random.default_rng(3)
    excluded = 0
    for _ in range(200):
        found = correct(
            compare(dict(enumerate(rng.normal(mean, 1, n))), dict.fromkeys(range(n), 0.0))
            for mean, n in zip(rng.choice([0, 0.8, 2], 5), rng.integers(3, 9, 5), strict=True)
        )
        outside = [not c.holm_interval[0] <= 0 <= c.holm_interval[1] for c in found]
        assert outside == [c.holm_p < 0.05 for c in found]
        assert all(c.holm_interval[0] <= c.interval[0] + 1e-12 for c in found)
        excluded += sum(outside)
    assert 100 < excluded < 900


def test_table_of_comparisons():
    groups = {"mose": {0: 0.6, 1: 0.7, 2: 0.65}, "er": {0: 0.5, 1: 0.65, 2: 0.6}, "scr": {0: 0.55, 1: 0.6, 2: 0.64}}
    pairs = compare_all(groups)
    assert [(c.a, c.b) for c in pairs] == [("mose", "er"), ("mose", "scr"), ("er", "scr")]
    assert [c.holm_p for c in pairs] == pytest.approx(holm([c.t_p for c in pairs]))
    against = compare_all(groups, "er")
    assert [(c.a, c.b) for c in against] == [("mose", "er"), ("scr", "er")]
    with pytest.raises(ValueError, match="baseline is 'agem'; wanted one of mose, er, scr"):
        compare_all(groups, "agem")


def row(**changes):
    same = dict.fromkeys([*TASK, *PROTOCOL, *MADE, "commit_id", "code", "data", "mose_fast", "method"], "x")
    own = {"folder": "one", "class_order": "[0, 1]", "device": "cpu", "threads": 1, "method_version": None}
    return {**same, **own, **changes}


def test_protocols_that_differ_are_told_with_a_run_of_each():
    rows = [row(), row(folder="two", epochs=3), row(folder="three", epochs=3)]
    assert check_comparable(rows) == ["the number of epochs differs: x (one), 3 (two, three)"]
    assert check_comparable(rows, varied=["epochs"]) == []
    assert set(PROTOCOL) >= {"epochs", "class_order", "augment"}
    for column in PROTOCOL:
        (warning,) = check_comparable([row(), row(folder="two", **{column: "y"})])
        assert warning.endswith("y (two)")


def test_code_and_machines_that_differ_are_told_with_their_runs():
    assert set(MADE) == {"torch", "gpu", "precision", "kernels", "native_backend"}
    assert code_warnings([row(gpu=None), row(gpu=math.nan), row(folder="two", gpu=None)]) == []
    for column in MADE:
        runs = [row(folder=f"run-{n}") for n in range(5)] + [row(folder="other", **{column: "y"})]
        (warning,) = code_warnings(runs)
        assert warning.endswith(" differs: x (run-0, run-1, run-2 and 2 more), y (other)")
        assert check_comparable(runs) == [warning]
        assert code_warnings(runs, varied=[column]) == []


def test_code_is_told_apart_by_its_hash():
    def made(folder, commit, code, version="0.1.0"):
        return row(folder=folder, commit_id=commit, code=code, mose_fast=version)

    # Commits that differ in other files alone.
    assert code_warnings([made("one", "a" * 40, "1" * 16), made("two", "b" * 40, "1" * 16)]) == []
    dirty = f"{'a' * 40}+dirty"
    assert code_warnings([made("one", dirty, "1" * 16), made("two", dirty, "2" * 16)]) == [
        "the code of mose-fast differs: 0.1.0, commit aaaaaaaaaaaa+dirty, code 11111111 (one), 0.1.0, commit"
        " aaaaaaaaaaaa+dirty, code 22222222 (two)"
    ]
    (warning,) = code_warnings([made("one", "a" * 40, "1" * 16), made("two", None, "2" * 16, "0.2.0")])
    assert warning == (
        "the code of mose-fast differs: 0.1.0, commit aaaaaaaaaaaa, code 11111111 (one), 0.2.0, commit unknown, code"
        " 22222222 (two)"
    )


def test_threads_matter_on_the_cpu_alone():
    def made(device, threads):
        return row(folder=f"{device} {threads}", device=device, threads=threads)

    assert code_warnings([made("cuda:0", 1), made("cuda:1", 8), made("cpu", 1)]) == []
    assert code_warnings([made("cpu", 1), made("cpu", 2)]) == [
        "the number of CPU threads differs: 1 (cpu 1), 2 (cpu 2)"
    ]


def test_versions_of_a_method_are_compared_with_those_of_the_same_method():
    def made(folder, method, version):
        return row(folder=folder, method=method, method_version=version)

    rows = [made("one", "er", None), made("two", "/a/ema.py:Ema", "abc"), made("three", "/a/kd.py:Kd", "def")]
    assert code_warnings(rows) == []
    assert code_warnings([*rows, made("four", "/a/ema.py:Ema", "123")]) == [
        "the version of method '/a/ema.py:Ema' differs: abc (two), 123 (four)"
    ]


def test_long_class_orders_are_cut():
    (warning,) = check_comparable(
        [row(class_order=str(list(range(100)))), row(class_order=str(list(range(100))[::-1]))]
    )
    assert warning == "the order of classes differs: [0, 1, 2, 3, 4, 5, ...] (one), [99, 98, 97, 96, 95, 94, ...] (one)"


@pytest.mark.parametrize("column", list(TASK))
def test_different_problems_are_refused_unless_forced(column):
    rows = [row(), row(folder="two", **{column: "y"}), row(folder="three", epochs=3)]
    with pytest.raises(IncomparableRuns, match=r"do not belong in one table: .*x \(one, three\), y \(two\)"):
        check_comparable(rows)
    forced = check_comparable(rows, force=True)
    assert len(forced) == 2
    assert "y (two)" in forced[0]
    assert check_comparable(rows, varied=[column]) == ["the number of epochs differs: x (one, two), 3 (three)"]
