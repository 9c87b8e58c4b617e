"""The replay memory's insert and draw: native against reference, both against sequential Python,
and their distributions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from mose_fast import _loader
from mose_fast.ops import reservoir as ops
from mose_fast.ops.reservoir import SlotFilter
from mose_fast.reference import reservoir as reference

needs_native = pytest.mark.skipif(_loader.native is None, reason="the native library is not built")
BACK_ENDS = [pytest.param(ops, id="ops"), pytest.param(reference, id="reference")]


def make_memory(
    slots: int, seed: int, *, counter: int = 0, seen: int = 0, size: tuple[int, int] = (2, 3)
) -> list[torch.Tensor]:
    """images, labels, tasks, indices, state."""
    images = torch.full((slots, *size, 3), 7, dtype=torch.uint8)
    return [images, *(torch.full((slots,), -9) for _ in range(3)), torch.tensor([seed, counter, seen])]


def make_batch(count: int, seed: int, *, first: int = 0, size: tuple[int, int] = (2, 3)) -> tuple[torch.Tensor, ...]:
    """x, y, index."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, *size, 3), dtype=torch.uint8, generator=generator)
    return x, torch.randint(0, 50, (count,), generator=generator), torch.arange(first, first + count)


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            product1 >> 32 ^ counter[1] ^ key[0],
            product1 % 2**32,
            product0 >> 32 ^ counter[3] ^ key[1],
            product0 % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def words_in_python(seed: int, sequence: int, item: int, purpose: int) -> list[int]:
    return philox_in_python([sequence % 2**32, sequence >> 32, item, purpose], [seed % 2**32, seed >> 32])


def place_in_python(seed: int, position: int, slots: int) -> int | None:
    """Algorithm R for one item."""
    if position < slots:
        return position
    r = words_in_python(seed, position, 0, 1)
    slot = (r[0] << 32 | r[1]) * (position + 1) >> 64
    return slot if slot < slots else None


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(
    ("slots", "count", "start"), [(1, 3, 0), (7, 10, 0), (7, 20, 0), (20, 7, 13), (20, 64, 2**40), (5, 1, 3)]
)
def test_insert_equals_sequential_python(back_end, slots, count, start):
    seed = 2**35 + slots
    memory, wanted = (make_memory(slots, seed, seen=start) for _ in range(2))
    for step in range(6):
        batch = make_batch(count, step, first=1000 * step)
        given = [tensor.clone() for tensor in batch]
        x, y, index = batch
        where = back_end.insert(*memory, x, y, step, index)
        wanted_where = [-1] * count
        for i in range(count):
            slot = place_in_python(seed, start + step * count + i, slots)
            if slot is None:
                continue
            if slot in wanted_where:
                wanted_where[wanted_where.index(slot)] = -1
            wanted_where[i] = slot
            for tensor, value in zip(wanted, (x[i], y[i], step, index[i]), strict=False):
                tensor[slot] = value
        wanted[4][2] += count
        assert where.dtype == torch.int64
        assert where.tolist() == wanted_where
        assert all(torch.equal(a, b) for a, b in zip(memory, wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(batch, given, strict=True))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_batches_do_not_change_what_is_kept(back_end):
    x, y, index = make_batch(300, 0)
    kept = []
    for size in (300, 64, 10, 1):
        memory = make_memory(23, 5)
        for first in range(0, 300, size):
            part = slice(first, first + size)
            back_end.insert(*memory, x[part], y[part], 0, index[part])
        kept.append(memory)
    assert all(torch.equal(a, b) for memory in kept[1:] for a, b in zip(memory, kept[0], strict=True))
    assert sorted(kept[0][3].tolist()) != list(range(23))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("slots", [1, 2, 13, 100, 5000])
@pytest.mark.parametrize("count", [1, 10, 33, 64])
def test_native_equals_reference(slots, count):
    for seed in range(6):
        start = seed * slots // 2
        native, pure = (make_memory(slots, seed << 40 | seed, counter=seed, seen=start) for _ in range(2))
        for step in range(4):
            x, y, index = make_batch(count, step, first=step * count)
            assert torch.equal(
                ops.insert(*native, x, y, step % 3, index), reference.insert(*pure, x, y, step % 3, index)
            )
            filled = min(int(pure[4][2]), slots)
            for k in (0, 1, count, slots + 1):
                for chosen in SlotFilter:
                    ours = ops.draw(native[2][:filled], native[4], k, chosen, 1)
                    assert torch.equal(ours, reference.draw(pure[2][:filled], pure[4], k, chosen, 1))
        assert all(torch.equal(a, b) for a, b in zip(native, pure, strict=True))


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(
    ("chosen", "eligible"), [(SlotFilter.ALL, range(30)), (SlotFilter.ONLY, range(1, 30, 3)), (SlotFilter.OTHERS, None)]
)
def test_draw_equals_sorted_keys_in_python(back_end, chosen, eligible):
    eligible = [slot for slot in range(30) if slot % 3 != 1] if eligible is None else list(eligible)
    seed, counter = 2**34 + 5, 2**33 + 1
    tasks = torch.arange(30) % 3
    state = torch.tensor([seed, counter, 77])
    for k in (0, 1, 8, 25, 30, 99):
        keys = {}
        for slot in eligible:
            r = words_in_python(seed, counter, slot, 2)
            keys[slot] = (r[0] << 32 | r[1]) >> 1
        wanted = sorted(eligible, key=lambda slot, keys=keys: (keys[slot], slot))[:k]
        drawn = back_end.draw(tasks, state, k, chosen, 1)
        assert drawn.dtype == torch.int64
        assert drawn.tolist() == wanted + [-1] * (min(k, 30) - len(wanted))
        counter += 1
        assert state.tolist() == [seed, counter, 77]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_draw_from_nothing(back_end):
    state = torch.tensor([3, 0, 0])
    tasks = torch.zeros(5, dtype=torch.int64)
    assert back_end.draw(tasks[:0], state, 4, SlotFilter.ALL, 0).tolist() == []
    assert back_end.draw(tasks, state, 4, SlotFilter.ONLY, 1).tolist() == [-1] * 4
    assert back_end.draw(tasks, state, 0, SlotFilter.ALL, 0).tolist() == []
    assert state.tolist() == [3, 3, 0]
    assert sorted(back_end.draw(tasks, state, 9, SlotFilter.OTHERS, 1).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_an_empty_batch_changes_nothing(back_end):
    memory = make_memory(4, 1, counter=2, seen=9)
    before = [tensor.clone() for tensor in memory]
    assert back_end.insert(*memory, *make_batch(0, 0)[:2], 0, torch.arange(0)).tolist() == []
    assert all(torch.equal(a, b) for a, b in zip(memory, before, strict=True))


def test_restored_state_continues():
    def steps(memory: list[torch.Tensor], numbers: range) -> list[list[int]]:
        drawn = []
        for step in numbers:
            x, y, index = make_batch(10, step)
            ops.insert(*memory, x, y, step % 2, index)
            filled = min(int(memory[4][2]), 12)
            drawn.append(ops.draw(memory[2][:filled], memory[4], 6, SlotFilter.OTHERS, step % 2).tolist())
        return drawn

    unbroken, broken = make_memory(12, 8), make_memory(12, 8)
    wanted = steps(unbroken, range(10))
    first = steps(broken, range(4))
    restored = [tensor.clone() for tensor in broken]
    assert first + steps(restored, range(4, 10)) == wanted
    assert len({tuple(draw) for draw in wanted}) > 5


STREAM, SLOTS, BATCH, SEEDS = 60, 7, 10, 2000


def inclusion_p(counts: np.ndarray) -> float:
    """p of a chi-square test that all items of the stream are kept equally often.

    A memory holds exactly SLOTS items, so a count's variance is smaller than a Poisson variable's
    by 1 - SLOTS / STREAM.
    """
    expected = SEEDS * SLOTS / STREAM
    statistic = ((counts - expected) ** 2 / expected).sum() / (1 - SLOTS / STREAM)
    return float(stats.chi2.sf(statistic, STREAM - 1))


def test_reservoir_keeps_every_item_equally_often():
    x, y, index = make_batch(STREAM, 0, size=(1, 1))
    counts = np.zeros(STREAM)
    for seed in range(SEEDS):
        memory = make_memory(SLOTS, seed, size=(1, 1))
        for first in range(0, STREAM, BATCH):
            part = slice(first, first + BATCH)
            ops.insert(*memory, x[part], y[part], 0, index[part])
        counts[memory[3].numpy()] += 1
    assert counts.sum() == SEEDS * SLOTS
    assert inclusion_p(counts) > 0.01


def test_draw_is_uniform_in_what_and_in_which_order():
    slots, k, draws = 40, 9, 4000
    tasks = torch.arange(slots) % 4
    state = torch.tensor([11, 0, slots])
    drawn = np.array([ops.draw(tasks, state, k, SlotFilter.OTHERS, 2).tolist() for _ in range(draws)])
    eligible = [slot for slot in range(slots) if slot % 4 != 2]
    n = len(eligible)
    assert set(np.unique(drawn)) == set(eligible)
    assert all(len(set(row)) == k for row in drawn)
    included = np.bincount(drawn.ravel(), minlength=slots)[eligible]
    expected = draws * k / n
    # Without replacement the counts have variance expected (1 - k/n) and correlation -1 / (n - 1).
    statistic = ((included - expected) ** 2 / expected).sum() / (1 - k / n) * (n - 1) / n
    assert stats.chi2.sf(statistic, n - 1) > 0.01
    assert stats.chi2.cdf(statistic, n - 1) > 0.001  # nor suspiciously even
    for place in (0, k - 1):
        assert stats.chisquare(np.bincount(drawn[:, place], minlength=slots)[eligible]).pvalue > 0.01


def with_change(name: str, value: object) -> dict[str, object]:
    images, labels, tasks, indices, state = make_memory(4, 0)
    x, y, index = make_batch(2, 0)
    fitting = {
        "images": images,
        "labels": labels,
        "tasks": tasks,
        "indices": indices,
        "state": state,
        "x": x,
        "y": y,
        "task": 0,
        "index": index,
    }
    return {**fitting, name: value}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            "x",
            torch.zeros(2, 2, 2, 3, dtype=torch.uint8),
            ValueError,
            r"x has shape \(2, 2, 2, 3\); wanted \[images, 2, 3, 3\]",
        ),
        ("y", torch.zeros(3, dtype=torch.int64), ValueError, r"y has shape \(3,\); wanted \(2,\)"),
        ("index", torch.zeros(1, dtype=torch.int64), ValueError, r"index has shape \(1,\); wanted \(2,\)"),
        ("labels", torch.zeros(5, dtype=torch.int64), ValueError, r"labels has shape \(5,\); wanted \(4,\)"),
        ("tasks", torch.zeros(8, dtype=torch.int64)[::2], ValueError, r"tasks has strides \(2,\); wanted contiguous"),
        (
            "images",
            torch.zeros(0, 2, 3, 3, dtype=torch.uint8),
            ValueError,
            r"images has shape \(0, 2, 3, 3\); wanted .* at least one slot",
        ),
        ("state", torch.zeros(2, dtype=torch.int64), ValueError, r"state has shape \(2,\); wanted \(3,\)"),
        ("task", 1.0, ValueError, r"task is 1.0; wanted an integer"),
    ],
)
def test_insert_refuses(name, value, error, message):
    arguments = with_change(name, value)
    with pytest.raises(error, match=message):
        ops.insert(**arguments)
    fitting = with_change("task", 0)
    assert ops.insert(**fitting).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": -1}, "k is -1; wanted an integer of at least 0"),
        ({"k": 2.0}, "k is 2.0; wanted an integer"),
        ({"filter": 3}, "filter is 3; wanted ALL, ONLY or OTHERS"),
        ({"task": None}, "task is None; wanted an integer"),
    ],
)
def test_draw_refuses(change, message):
    state = torch.tensor([1, 2, 3])
    arguments = {
        "tasks": torch.zeros(4, dtype=torch.int64),
        "state": state,
        "k": 2,
        "filter": SlotFilter.ALL,
        "task": 0,
    }
    with pytest.raises(ValueError, match=message):
        ops.draw(**{**arguments, **change})
    assert state.tolist() == [1, 2, 3]


@needs_native
def test_slots_beyond_two_gibibytes():
    """200,000 slots of 64 x 64 images: slot offsets need 64 bits.

    Memory that is not touched is never mapped.
    """
    slots, count, seen = 200_000, 10, 199_990
    images = torch.empty(slots, 64, 64, 3, dtype=torch.uint8)
    memory = [images, *(torch.full((slots,), -1) for _ in range(3)), torch.tensor([5, 0, seen])]
    x, y, index = make_batch(count, 0, first=seen, size=(64, 64))
    assert ops.insert(*memory, x, y, 4, index).tolist() == list(range(seen, slots))
    assert torch.equal(images[seen:], x)
    assert torch.equal(memory[1][seen:], y)
    drawn = ops.draw(memory[2], memory[4], 86, SlotFilter.ONLY, 4)
    assert sorted(drawn[:count].tolist()) == list(range(seen, slots))
    assert drawn[count:].tolist() == [-1] * (86 - count)
    others = ops.draw(memory[2], memory[4], 2048, SlotFilter.OTHERS, 4)
    assert torch.equal(others, reference.draw(memory[2], torch.tensor([5, 1, slots]), 2048, SlotFilter.OTHERS, 4))


@needs_native
def test_opcheck():
    memory, (x, y, index) = make_memory(6, 3, seen=4), make_batch(5, 0)
    for op, arguments in (
        (torch.ops.mose_fast.reservoir_insert, (*memory, x, y, 1, index)),
        (torch.ops.mose_fast.reservoir_draw, (memory[2], memory[4], 9, 2, 1)),
    ):
        assert set(torch.library.opcheck(op.default, arguments).values()) == {"SUCCESS"}


@needs_native
def test_compiles_without_a_graph_break():
    def step(images, labels, tasks, indices, state, x, y, index):
        slots = ops.insert(images, labels, tasks, indices, state, x, y, 2, index)
        return slots, ops.draw(tasks, state, 4, SlotFilter.OTHERS, 1)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, wanted = make_memory(6, 3), make_memory(6, 3)
    for number in range(3):
        batch = make_batch(5, number)
        assert all(torch.equal(a, b) for a, b in zip(compiled(*ours, *batch), step(*wanted, *batch), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
