"""Shapley values against their definition, and the memory that replays and keeps by them."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from mose_fast.memory import ShapleyMemory
from mose_fast.memory.shapley import adversarial_scores, knn_shapley


def worth(chosen: list[int], distances: torch.Tensor, matches: torch.Tensor, k: int) -> float:
    """Matches among the k nearest of a set of candidates, over k."""
    nearest = sorted(chosen, key=lambda c: distances[c].item())[:k]
    return sum(matches[c].item() for c in nearest) / k


def brute_force(candidates, candidate_labels, points, point_labels, k) -> torch.Tensor:
    """Mean contribution over all orders in which candidates can join."""
    values = torch.zeros(len(points), len(candidates))
    orders = list(permutations(range(len(candidates))))
    for e, point in enumerate(points):
        distances = (candidates - point).norm(dim=1)
        matches = candidate_labels == point_labels[e]
        for order in orders:
            for place, candidate in enumerate(order):
                before, after = list(order[:place]), list(order[: place + 1])
                values[e, candidate] += worth(after, distances, matches, k) - worth(before, distances, matches, k)
    return values / len(orders)


def problem(candidates: int, points: int, size: int = 3, classes: int = 3, seed: int = 0) -> tuple:
    g = torch.Generator().manual_seed(seed)
    x, e = torch.randn(candidates, size, generator=g), torch.randn(points, size, generator=g)
    return (
        x,
        torch.randint(0, classes, (candidates,), generator=g),
        e,
        torch.randint(0, classes, (points,), generator=g),
    )


@pytest.mark.parametrize("count", [1, 2, 4, 5])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_values_are_those_of_the_definition(count, k):
    x, y, e, label = problem(count, 2, seed=count)
    assert torch.allclose(knn_shapley(x, y, e, label, k), brute_force(x, y, e, label, k), atol=1e-6)


def test_a_hand_worked_case():
    """k = 1, on a line: the point at 0 of class 1; candidates at 1 (class 1), 2 (class 0), 3 (class
    1).

    From afar: s3 = 1/3, s2 = 1/3 - 1/2 = -1/6, s1 = -1/6 + 1 = 5/6.
    """
    x = torch.tensor([[3.0], [1.0], [2.0]])
    values = knn_shapley(x, torch.tensor([1, 1, 0]), torch.zeros(1, 1), torch.tensor([1]), 1)
    assert values.tolist()[0] == pytest.approx([1 / 3, 5 / 6, -1 / 6])


def test_no_candidates_and_no_points():
    x, y, e, label = problem(4, 3)
    assert knn_shapley(x[:0], y[:0], e, label, 3).shape == (3, 0)
    assert knn_shapley(x, y, e[:0], label[:0], 3).shape == (0, 4)


def test_scores():
    cooperative, adversarial = torch.tensor([[0.1, 0.4], [0.3, 0.0]]), torch.tensor([[0.2, -0.1], [0.0, 0.5]])
    assert adversarial_scores(cooperative, adversarial, "asvm").tolist() == pytest.approx([0.2 - 0.1, 0.2 - 0.2])
    assert adversarial_scores(cooperative, adversarial, "asv").tolist() == pytest.approx([0.3 - 0.0, 0.4 + 0.1])
    assert adversarial_scores(cooperative, adversarial, "neg_sv").tolist() == pytest.approx([-0.2, -0.4])


@pytest.mark.parametrize("kind", ["asvm", "asv", "neg_sv"])
def test_a_term_without_points_is_zero(kind):
    none, some = torch.zeros(0, 2), torch.tensor([[0.2, -0.1]])
    assert adversarial_scores(none, some, kind).tolist() == pytest.approx([-0.2, 0.1])
    assert adversarial_scores(some, none, kind).tolist() == pytest.approx([0, 0] if kind == "neg_sv" else [0.2, -0.1])


# The memory


def feature(images: torch.Tensor) -> torch.Tensor:
    """Brightness and one pixel, so that features are cheap and telling."""
    return torch.stack([images.float().mean((1, 2, 3)), images[:, 0, 0, 0].float()], 1) / 255


def batch(labels, start: int) -> tuple:
    """Images whose brightness tells their class, more or less."""
    y = torch.as_tensor(labels)
    noise = torch.randint(0, 90, (len(y), 8, 8, 3), generator=torch.Generator().manual_seed(start))
    return (noise + 40 * y.view(-1, 1, 1, 1)).to(torch.uint8), y, torch.arange(start, start + len(y))


def memory_of(labels, classes: int = 4, per_class: float = 2, seed: int = 0, task: int = 0) -> ShapleyMemory:
    memory = ShapleyMemory(len(labels), (8, 8), classes=classes, neighbours=3, per_class=per_class, seed=seed)
    x, y, index = batch(labels, 0)
    memory.offer(x, y, task, index, feature)
    return memory


def test_a_memory_that_is_not_full_takes_everything():
    memory = ShapleyMemory(25, (8, 8), classes=4, neighbours=3, per_class=2, seed=0)
    for start in (0, 10):
        x, y, index = batch([0, 1] * 5, start)
        assert memory.offer(x, y, 0, index, feature).tolist() == list(range(start, start + 10))
    x, y, index = batch([2] * 10, 20)
    slots = memory.offer(x, y, 1, index, feature)
    assert memory.filled == 25 and memory.seen == 30 and memory.state[2] == 30
    held = slots[slots >= 0]
    assert torch.equal(memory.indices[held], index[slots >= 0]) and len(set(held.tolist())) == len(held)
    assert set(memory.indices[20:].tolist()) <= set(range(20, 30))


def test_each_class_gives_the_same_number_and_points_are_no_candidates():
    """One image for a class with one sample, at most ``per_class`` for the others, and every sample
    has its turn.
    """
    memory = memory_of([0] * 9 + [1] * 4 + [2] * 3 + [3])
    seen_candidates = torch.zeros(17)
    for sequence in range(60):
        asked = []
        x, y, _ = batch([1, 2], 500 + sequence)
        memory.retrieve(
            x, y, 99, "asvm", lambda images, asked=asked: (asked.append(images), feature(images))[1], sequence
        )
        images = asked[0][:-2]
        slots = [int((memory.images == image).flatten(1).all(1).nonzero()) for image in images]
        assert len(set(slots)) == len(slots)
        labels = memory.labels[slots]
        assert labels[:7].bincount(minlength=4).tolist() == [2, 2, 2, 1]  # candidates
        assert labels[7:].bincount(minlength=4).tolist() == [2, 2, 1, 0]  # points
        seen_candidates[slots[:7]] += 1
    assert (seen_candidates > 0).all() and seen_candidates[16] == 60


@pytest.mark.parametrize("kind", ["asvm", "asv", "neg_sv"])
def test_the_most_valuable_candidates_are_retrieved(kind):
    """Against scores computed candidate by candidate, with the candidates and points that the
    memory drew.
    """
    memory = memory_of([0] * 9 + [1] * 9 + [2] * 9)
    for sequence in range(5):
        asked = []
        x, y, _ = batch([1, 2] * 5, 500 + sequence)
        slots = memory.retrieve(
            x, y, 3, kind, lambda images, asked=asked: (asked.append(images), feature(images))[1], sequence
        )
        drawn = [int((memory.images == image).flatten(1).all(1).nonzero()) for image in asked[0][:12]]
        candidates, points = drawn[:6], drawn[6:]
        scores = {}
        found = feature(memory.images[candidates])
        for n, slot in enumerate(candidates):
            at = [
                brute_value(found, memory.labels[candidates], feature(memory.images[[p]])[0], memory.labels[p])[n]
                for p in points
            ]
            by = [brute_value(found, memory.labels[candidates], feature(x[[i]])[0], y[i])[n] for i in range(10)]
            scores[slot] = {"asvm": sum(at) / 6 - sum(by) / 10, "asv": max(at) - min(by), "neg_sv": -sum(by)}[kind]
        limit = sorted(scores.values())[-3]
        assert len(slots) == 3 and all(scores[slot] >= limit - 1e-6 for slot in slots.tolist())


def brute_value(x, labels, point, label) -> list[float]:
    """The recursion for one point, in plain Python."""
    order = sorted(range(len(x)), key=lambda n: (x[n] - point).norm().item())
    match = [float(labels[n] == label) for n in order]
    values = [0.0] * len(x)
    value = match[-1] / len(x)
    values[order[-1]] = value
    for m in range(len(x) - 1, 0, -1):
        value += (match[m - 1] - match[m]) / 3 * min(3, m) / m
        values[order[m - 1]] = value
    return values


def test_retrieval_keeps_to_other_tasks_where_asked():
    memory = ShapleyMemory(20, (8, 8), classes=4, neighbours=3, per_class=2, seed=0)
    for task in range(2):
        x, y, index = batch([2 * task, 2 * task + 1] * 5, 10 * task)
        memory.offer(x, y, task, index, feature)
    x, y, _ = batch([2, 3], 99)
    assert set(memory.labels[memory.retrieve(x, y, 9, "asvm", feature, 0, others=1)].tolist()) == {0, 1}
    memory.tasks.fill_(1)
    for kind in ("asvm", "asv", "neg_sv"):
        assert memory.retrieve(x, y, 9, kind, feature, 0, others=1).tolist() == []


def test_a_full_memory_keeps_what_is_worth_more_in_sum():
    """Against a slow loop over candidates that reads the drawn samples off the images asked for."""
    taken = 0
    for seed in range(8):
        memory = memory_of([0] * 8 + [1] * 8 + [2] * 8 + [3] * 2, seed=seed)
        before, old_labels, asked = memory.images.clone(), memory.labels.clone(), []
        x, y, index = batch([3, 0, 3, 1], 700 + seed)
        slots = memory.offer(x, y, 1, index, lambda images, asked=asked: (asked.append(images), feature(images))[1])
        drawn = [int((before == image).flatten(1).all(1).nonzero()) for image in asked[0][:-4]]
        points, candidates = drawn[:8], drawn[8:]
        assert old_labels[points].bincount().tolist() == [2, 2, 2, 2]
        assert len(candidates) == 8 and not set(candidates) & set(points)
        pool, pool_labels = feature(torch.cat([before[candidates], x])), torch.cat([old_labels[candidates], y])
        # Class 3 holds 2 of 26 slots, less than the threshold for some draws: its items are points,
        # too, then.
        options = []
        for minority in ([], [0, 2]):
            evaluated = [(feature(before[[p]])[0], old_labels[p]) for p in points] + [
                (feature(x[[i]])[0], y[i]) for i in minority
            ]
            totals = torch.tensor([brute_value(pool, pool_labels, *one) for one in evaluated]).sum(0)
            kept = set(torch.sort(totals, descending=True, stable=True).indices[:8].tolist())
            options.append(([i for i in range(4) if 8 + i in kept], {candidates[n] for n in range(8) if n not in kept}))
        winners = (slots >= 0).nonzero().flatten().tolist()
        assert (winners, set(slots[slots >= 0].tolist())) in options
        assert torch.equal(memory.images[slots[winners]], x[winners]) and memory.seen == 30
        taken += len(winners)
    assert taken > 0


def test_new_classes_enter_through_the_minority_rule():
    """Far from everything, a new class is worth little to the others: it enters because its own
    items are evaluated.
    """
    x, y, index = torch.full((2, 8, 8, 3), 255, dtype=torch.uint8), torch.tensor([3, 3]), torch.arange(90, 92)
    for seed in range(5):
        memory = memory_of([0] * 20 + [1] * 20, seed=seed)
        slots = memory.offer(x, y, 1, index, feature)
        assert (slots >= 0).all() and memory.labels[slots].tolist() == [3, 3]


def test_a_restored_memory_continues():
    memory, copy = memory_of([0] * 10 + [1] * 10, seed=3), memory_of([2] * 20, seed=99)
    copy.load({name: tensor.clone() for name, tensor in memory.tensors().items()})
    for step in range(5):
        x, y, index = batch([1, 2] * 3, 100 + step)
        first, second = (m.retrieve(x, y, 4, "asvm", feature, step) for m in (memory, copy))
        assert torch.equal(first, second)
        assert torch.equal(memory.offer(x, y, 1, index, feature), copy.offer(x, y, 1, index, feature))
    assert torch.equal(memory.indices, copy.indices) and copy.seen == 50


def test_the_memory_may_be_smaller_than_the_batch_or_hold_one_class():
    memory = memory_of([1, 1], classes=2)
    for start in range(10, 60, 10):
        x, y, index = batch([1] * 10, start)
        assert memory.retrieve(x, y, 4, "asvm", feature, start).shape[0] <= 2
        slots = memory.offer(x, y, 0, index, feature)
        assert slots.shape == (10,) and torch.equal(memory.indices[slots[slots >= 0]], index[slots >= 0])
