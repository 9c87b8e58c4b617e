"""Streams from images that are already in memory: arrays, or batches that arrive one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mose_fast.output import readable
from mose_fast.settings.knob import MASKED, is_masked, plain, whole_number
from mose_fast.settings.run import WITHOUT_BOUNDARIES, ConfigError, StreamConfig, near_matches, shown
from mose_fast.streams.image_files import ImageFiles
from mose_fast.streams.kinds import Kind, arrival_order, long_tail
from mose_fast.streams.stream import (
    CLASS_ORDER,
    HELD_OUT,
    NORMALISATIONS,
    HeldOut,
    Normalisation,
    Stream,
    StreamError,
    draw_order,
    fingerprint,
)

# The batches of each task: images and labels.
_Recorded = list[list[tuple[np.ndarray, np.ndarray]]]


def check_images(x: Any, what: str) -> np.ndarray | ImageFiles:
    """Images, an array or tensor called ``what`` in messages, as uint8 [N, H, W, 3]; grey images
    [N, H, W] are repeated to three channels; images in files stay as they are. Raises StreamError,
    which says how to convert, if type, number of channels or size cannot be used.
    """
    if isinstance(x, ImageFiles):  # which were looked at when their folder was
        return x
    x = _unmasked(x, what)
    if not isinstance(x, np.ndarray):
        raise StreamError(f"{what} is a {type(x).__name__}; wanted a numpy array or a tensor, uint8 [N, H, W, 3]")
    if x.dtype != np.uint8:
        raise StreamError(f"{what} is {x.dtype}{_not_uint8(x)}")
    shape = list(x.shape)
    if x.ndim not in (3, 4):
        raise StreamError(f"{what} has shape {shape}; wanted [N, H, W, 3], or [N, H, W] for grey images")
    if x.ndim == 4 and shape[3] != 3:
        hint = ""
        if shape[1] == 3:
            hint = (
                "; it looks channels-first: x.transpose(0, 2, 3, 1) (numpy) or x.permute(0, 2, 3, 1) (torch)"
                " converts it"
            )
        elif shape[3] == 4:
            hint = "; [..., :3] drops the alpha channel"
        elif 1 in (shape[1], shape[3]):
            hint = "; drop the channel axis of grey images: [N, H, W]"
        raise StreamError(f"{what} has shape {shape}; wanted [N, H, W, 3] with three colour channels last{hint}")
    if not len(x):
        raise StreamError(f"{what} holds no images")
    height, width = shape[1:3]
    if not height or not width or height % 8 or width % 8:
        raise StreamError(
            f"{what} holds images of {height}x{width}; wanted sides divisible by 8: pad them (numpy.pad) or resize them"
        )
    return np.repeat(x[..., None], 3, axis=3) if x.ndim == 3 else x


def _not_uint8(x: np.ndarray) -> str:
    """What images of another type hold, and what converts them."""
    wanted = "; wanted uint8 in [0, 255]"
    if not x.size or x.dtype.kind not in "fiu":
        return wanted
    if np.isnan(x).any():
        return f" and contains NaN{wanted}"
    low, high, real = x.min(), x.max(), x.dtype.kind == "f"
    told = f" from {low:g} to {high:g}{wanted}"
    if np.isinf([low, high]).any():
        return told
    if real and low >= 0 and high <= 1:
        return f"{told}: (x * 255).round().astype('uint8') converts it"
    if low >= 0 and high <= 255:
        return f"{told}: x{'.round()' if real else ''}.astype('uint8') converts it"
    return f"{told}; it looks normalised or scaled: take the images as they were before"


def _labels(y: Any, what: str) -> np.ndarray:
    """Labels as int64 [N], a copy. Raises StreamError if they are no integers, do not fit into
    int64, or have more than one axis.
    """
    y = _unmasked(y, what)
    try:
        y = np.asarray(y)
    except ValueError as error:
        raise StreamError(f"{what} is no array of labels ({error}); wanted [N], one integer an image") from error
    if y.dtype.kind not in "iu":
        if y.dtype.kind == "f" and np.isnan(y).any():
            missing = np.flatnonzero(np.isnan(y))
            raise StreamError(
                f"{what} is {y.dtype} and contains NaN, first at row {missing[0]} ({missing.size} in all); "
                "wanted integer labels: leave these images out, or give them a label"
            )
        hint = "y.astype('int64') converts whole numbers"
        if y.dtype.kind in "USO":
            hint = "names, y = numpy.unique(y, return_inverse=True) numbers names, of training and test together"
        raise StreamError(f"{what} is {y.dtype}; wanted integer labels: {hint}")
    if y.ndim != 1:
        raise StreamError(f"{what} has shape {list(y.shape)}; wanted [N], one label an image")
    if y.size and y.max() > np.iinfo(np.int64).max:
        raise StreamError(f"{what} reaches {y.max()}; wanted labels below 2**63")
    return y.astype(np.int64)


def _unmasked(values: Any, what: str) -> Any:
    """A tensor as a numpy array; anything else as it is. Raises StreamError if it is masked."""
    if is_masked(values):
        raise StreamError(f"{what} is {MASKED}")
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    tasks: int | None = None,
    first_tasks: int | None = None,
    name: str = "arrays",
    batch: int = 10,
    class_order_seed: int | None = None,
    normalisation: str | Normalisation | None = None,
    mirror_safe: bool = True,
    limit_per_task: int | None = None,
    validation: float | None = None,
    validation_seed: int = 0,
    evaluate_on: str = "test",
    kind: str = StreamConfig.kind,
    kind_seed: int = StreamConfig.kind_seed,
    disjoint: float = StreamConfig.disjoint,
    blur: float = StreamConfig.blur,
    imbalance: float = StreamConfig.imbalance,
    drift: float = StreamConfig.drift,
    labels: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    source: str = "",
    content: str = "",
) -> Stream:
    """Makes a stream of your own arrays, which are not copied unless they must be converted.

    Args:
        x_train: Images, uint8 [N, H, W, 3] or grey [N, H, W], numpy or torch; sides divisible by 8.
        y_train: Labels, any integers [N]. Sorted, they are the natural class order.
        x_test: Test images of the same size; None with ``evaluate_on`` ``validation``.
        y_test: Their labels, all of which occur in ``y_train``.
        tasks: Number of equal tasks; None: as many as give each at least two classes (10 classes: 5
            tasks).
        first_tasks: The stream ends after this many of the tasks, and has their classes alone;
            None: all.
        batch: Incoming images a step.
        class_order_seed: Seed of the order of classes; None: the natural order.
        normalisation: A name in :data:`NORMALISATIONS` or your own constants; None: ``half``.
        mirror_safe: Whether a mirrored image keeps its label.
        limit_per_task: Keep at most this many training images a task, balanced over its classes:
            the first of every class, then the second, and so on in data order, whatever the seeds;
            held-out images do not count.
        validation: Share of each class's training images that are held out: never trained on, never
            in the memory. Rounded to whole images, a half upwards. None: none.
        validation_seed: Seed that they are drawn from, class by class, independently of all else.
        evaluate_on: ``test``, or ``validation`` for the held-out images.
        kind, kind_seed, disjoint, blur, imbalance, drift: See docs/streams.md. A kind without task
            boundaries is drawn on the classes of the first tasks.
        labels: All labels of the data set, sorted; None: those in ``y_train``.
        class_names: Names in the order of the sorted labels; None: the labels as text.
        source: The file that the arrays come from, for messages.
        content: A hash, in hex digits, that the fingerprint has in place of the images' pixels;
            empty: their pixels.

    StreamError: an array or argument cannot be used; ConfigError: a setting of the kind is out of
    range.
    """
    settings = Kind(kind, kind_seed, disjoint, blur, imbalance, drift)
    kind, evaluate_on, name, mirror_safe = settings.kind, plain(evaluate_on), plain(name), plain(mirror_safe)
    content = plain(content)
    batch, tasks, first_tasks = _count("batch", batch), _count("tasks", tasks), _count("first_tasks", first_tasks)
    limit_per_task = _count("limit_per_task", limit_per_task)
    prefix = f"{source}: " if source else ""
    x_train, y_train = _pair(x_train, y_train, f"{prefix}x_train", f"{prefix}y_train")
    tested = evaluate_on == "test"
    if not tested and (evaluate_on != "validation" or validation is None):
        raise StreamError(
            f"evaluate_on is {evaluate_on!r} with validation {validation!r}; wanted 'test', or 'validation' and a share"
        )
    if tested:
        x_test, y_test = _pair(x_test, y_test, f"{prefix}x_test", f"{prefix}y_test")
        if x_train.shape[1:] != x_test.shape[1:]:
            raise StreamError(
                f"{prefix}x_train holds images of {_size(x_train)} and x_test of {_size(x_test)}; wanted one size for"
                " training and test"
            )

    known = np.unique(y_train) if labels is None else np.asarray(labels, np.int64)
    _refuse_unknown(y_train, known, f"{prefix}y_train", "the data set")
    if tested:
        _refuse_unknown(y_test, known, f"{prefix}y_test", "the data set" if labels is not None else "y_train")
    for label in np.setdiff1d(known, y_train):
        raise StreamError(
            f"{prefix}y_train has no image of class {label}; wanted training images of all {len(known)} classes"
        )
    if len(known) < 2:
        raise StreamError(
            f"{prefix}y_train holds only one class, {known[0]}; wanted at least two classes to tell apart"
        )
    names = _names(class_names, known)
    # Before class order and limit are applied: they are settings, not properties of the data.
    of_data = [x_train, y_train, *((x_test, y_test) if tested else ())]
    if content:
        of_data = [np.frombuffer(bytes.fromhex(content), np.uint8), *of_data[1::2]]
    of_data = fingerprint(of_data, names)

    if tasks is None:
        tasks = next((t for t in range(len(known) // 2, 1, -1) if len(known) % t == 0), 1)
    if len(known) % tasks:
        possible = ", ".join(str(t) for t in range(1, len(known) + 1) if len(known) % t == 0)
        raise StreamError(
            f"tasks is {tasks}, and the {len(known)} classes of {source or name} cannot be split into {tasks} equal"
            f" tasks; wanted tasks to be one of {possible}"
        )
    each = len(known) // tasks
    first_tasks = tasks if first_tasks is None else first_tasks
    if first_tasks > tasks or first_tasks * each < 2:
        least = 2 if each == 1 else 1
        raise StreamError(
            f"first_tasks is {first_tasks}, and {source or name} has {tasks} tasks of {each} classes; wanted {least} to"
            f" {tasks}"
        )
    if limit_per_task is not None and limit_per_task < each:
        raise StreamError(
            f"limit_per_task is {limit_per_task}, fewer than the {each} classes of a task; wanted at least one image a"
            " class"
        )

    order = np.arange(len(known)) if class_order_seed is None else draw_order(len(known), class_order_seed, CLASS_ORDER)
    order = order[: first_tasks * each]
    head = np.full(len(known), -1)  # classes of later tasks
    head[order] = np.arange(len(order))
    # Rows of the images that the stream has. The images themselves are taken once, at the end.
    train, held_out = np.arange(len(y_train)), None
    if validation is not None:
        held_out = _hold_out(np.searchsorted(known, y_train), known, validation, validation_seed)
        if not tested:
            x_test, y_test = x_train, y_train
        train = np.delete(train, held_out.rows)
    test = np.arange(len(y_test)) if tested else held_out.rows.numpy()
    y_train, y_test = head[np.searchsorted(known, y_train[train])], head[np.searchsorted(known, y_test[test])]
    if first_tasks < tasks:
        train, y_train = train[y_train >= 0], y_train[y_train >= 0]
        test, y_test = test[y_test >= 0], y_test[y_test >= 0]
    if limit_per_task is not None:
        kept = _limit(y_train, each, limit_per_task)
        train, y_train = train[kept], y_train[kept]
    if kind == "imbalanced":
        kept = long_tail(y_train, known[order], known, settings)
        train, y_train = train[kept], y_train[kept]
    split = tuple(tuple(range(t * each, (t + 1) * each)) for t in range(first_tasks))
    _refuse_untested(y_test, split, known[order], prefix)
    arrives = None
    if kind in WITHOUT_BOUNDARIES:
        arrives = arrival_order(y_train, first_tasks, settings)
        split = (tuple(range(len(order))),)
        if len(y_train) <= (first_tasks - 1) * batch:
            raise StreamError(
                f"tasks is {first_tasks} with kind {kind!r}, but {len(y_train)} training images make"
                f" {-(-len(y_train) // batch)} batches of {batch}; wanted at least one batch in each part"
            )
    return Stream(
        name=name,
        x_train=_chosen(x_train, train),
        y_train=_tensor(y_train),
        x_test=_chosen(x_test, test),
        y_test=_tensor(y_test),
        tasks=split,
        class_order=tuple(known[order].tolist()),
        class_names=tuple(names[i] for i in order),
        normalisation=_normalisation(normalisation or "half"),
        mirror_safe=mirror_safe,
        batch=batch,
        fingerprint=of_data,
        split=evaluate_on,
        held_out=held_out,
        kind=settings,
        order=arrives,
        points=first_tasks if arrives else 0,
    )


def from_batches(
    tasks: Iterable,
    test: Any,
    *,
    class_tasks: Sequence[Sequence[int]] | None = None,
    name: str = "batches",
    normalisation: str | Normalisation | None = None,
    mirror_safe: bool = True,
    class_names: Sequence[str] | None = None,
) -> Stream:
    """Records a stream from any Python iterable, with its own batches in their own order.

    Classes are numbered task by task, within a task by label; a class belongs to one task.

    Args:
        tasks: An iterable of tasks, each an iterable of batches ``(x, y)`` with x as in
            :func:`from_arrays`. With ``class_tasks``: one flat iterable of batches. It is read
            once, and each batch is copied.
        test: Test images and labels ``(x, y)``, or an iterable of such batches.
        class_tasks: The labels of each task. A batch belongs to the task with its labels; the tasks
            follow one another even if their batches alternate.

    The others are those of :func:`from_arrays`. Raises StreamError if a batch cannot be used, mixes
    tasks, or a task has no images; the message counts tasks and batches from 0.
    """
    recorded = _record_tasks(tasks) if class_tasks is None else _record_flat(tasks, class_tasks)
    for t, batches in enumerate(recorded):
        if not batches:
            raise StreamError(f"task {t} has no batches; wanted at least one image in every task")
    if not recorded:
        raise StreamError("tasks is empty; wanted at least one task")
    if _is_batch(test):
        test = [test]
    tested = [_record(b, f"test batch {i}") for i, b in enumerate(_iterate(test, "test"))]
    if not tested:
        raise StreamError("test holds no batches; wanted test images and labels")

    everything = [*(b for batches in recorded for b in batches), *tested]
    for x, _ in everything:
        if x.shape[1:] != everything[0][0].shape[1:]:
            raise StreamError(
                f"batches hold images of {_size(everything[0][0])} and of {_size(x)}; wanted one size for training and"
                " test"
            )

    seen: dict[int, int] = {}
    split = []
    for t, batches in enumerate(recorded):
        labels = np.unique(np.concatenate([y for _, y in batches])).tolist()
        for label in labels:
            if label in seen:
                raise StreamError(
                    f"label {label} occurs in tasks {seen[label]} and {t}; wanted every class in one task"
                )
        split.append(tuple(range(len(seen), len(seen) + len(labels))))
        seen.update(dict.fromkeys(labels, t))
    class_order = np.array(list(seen))
    known = np.sort(class_order)
    head = np.argsort(class_order)  # of the i-th label in sorted order

    sizes = [len(y) for batches in recorded for _, y in batches]
    rows = iter(torch.arange(sum(sizes)).split(sizes))
    arrival = tuple(tuple(next(rows) for _ in batches) for batches in recorded)
    y_test = np.concatenate([y for _, y in tested])
    _refuse_unknown(y_test, known, "test labels", "the tasks")
    y_train = np.concatenate([y for batches in recorded for _, y in batches])
    y_train, y_test = head[np.searchsorted(known, y_train)], head[np.searchsorted(known, y_test)]
    _refuse_untested(y_test, split, class_order, "")
    names = _names(class_names, known)
    return Stream(
        name=plain(name),
        x_train=_tensor(np.concatenate([x for batches in recorded for x, _ in batches])),
        y_train=_tensor(y_train),
        x_test=_tensor(np.concatenate([x for x, _ in tested])),
        y_test=_tensor(y_test),
        tasks=tuple(split),
        class_order=tuple(class_order.tolist()),
        class_names=tuple(names[i] for i in np.argsort(head)),
        normalisation=_normalisation(normalisation or "half"),
        mirror_safe=plain(mirror_safe),
        batch=max(sizes),
        arrival=arrival,
    )


def _count(name: str, value: Any) -> int | None:
    try:
        return whole_number(name, value, none="the default")
    except ConfigError as error:
        raise StreamError(str(error)) from error


def _record_tasks(tasks: Iterable) -> _Recorded:
    recorded = []
    for t, task in enumerate(_iterate(tasks, "tasks")):
        if _is_batch(task):
            raise StreamError(
                f"task {t} is a batch (x, y), not an iterable of batches; a flat iterable of batches needs class_tasks"
            )
        recorded.append([_record(b, f"task {t}, batch {i}") for i, b in enumerate(_iterate(task, f"task {t}"))])
    return recorded


def _record_flat(batches: Iterable, class_tasks: Sequence[Sequence[int]]) -> _Recorded:
    class_tasks = [[*map(plain, labels)] for labels in class_tasks]
    counts = Counter(label for labels in class_tasks for label in labels)
    for label, count in counts.items():
        if count > 1:
            raise StreamError(f"class_tasks names label {label} {count} times; wanted every class in one task")
    task_of = {label: t for t, labels in enumerate(class_tasks) for label in labels}
    arrived: set[int] = set()
    recorded: _Recorded = [[] for _ in class_tasks]
    for i, batch in enumerate(_iterate(batches, "tasks")):
        x, y = _record(batch, f"batch {i}")
        for label in y.tolist():
            if label not in task_of:
                raise StreamError(f"batch {i} holds label {label}, which class_tasks does not name")
        arrived.update(y.tolist())
        owners = sorted({task_of[label] for label in y.tolist()})
        if len(owners) > 1:
            raise StreamError(
                f"batch {i} mixes labels of tasks {', '.join(map(str, owners))}; wanted the labels of one task"
            )
        recorded[owners[0]].append((x, y))
    for label, t in task_of.items():
        if label not in arrived:
            raise StreamError(
                f"label {label} of class_tasks[{t}] occurs in no batch; wanted at least one image of every class"
            )
    return recorded


def _record(batch: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise StreamError(f"{what} is {_kind(batch)}; wanted a pair (x, y) of images and labels")
    x, y = _pair(*batch, f"x of {what}", f"y of {what}")
    # Loaders may reuse one buffer. The labels are copied already.
    return x.copy(), y


def _is_batch(value: Any) -> bool:
    """Whether this is a pair whose first half is an array of images, not itself a batch."""
    return isinstance(value, tuple | list) and len(value) == 2 and getattr(value[0], "ndim", 0) >= 3


def _iterate(value: Any, what: str) -> Iterable:
    try:
        return iter(value)
    except TypeError:
        raise StreamError(f"{what} is {_kind(value)}; wanted an iterable") from None


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def _pair(x: Any, y: Any, what_x: str, what_y: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = check_images(x, what_x), _labels(y, what_y)
    if len(x) != len(y):
        raise StreamError(f"{what_x} holds {len(x)} images and {what_y} {len(y)} labels; wanted one label an image")
    return x, y


def _size(x: np.ndarray) -> str:
    return f"{x.shape[1]}x{x.shape[2]}"


def _names(class_names: Sequence[str] | None, known: np.ndarray) -> list[str]:
    names = [str(label) for label in known] if class_names is None else [*map(_name, class_names)]
    if len(names) != len(known):
        raise StreamError(f"class_names holds {len(names)} names; wanted one for each of the {len(known)} classes")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise StreamError(f"class_names holds {shown(name)} {count} times; wanted a name of its own for each class")
    return names


def _name(given: Any) -> str:
    name = plain(given)
    if not isinstance(name, str | int | float) or isinstance(name, bool):
        raise StreamError(f"class_names holds {shown(given)}; wanted texts")
    return readable(str(name))


def _normalisation(value: str | Normalisation) -> Normalisation:
    value = plain(value)
    if isinstance(value, Normalisation):
        return value
    if not isinstance(value, str) or value not in NORMALISATIONS:
        raise StreamError(f"normalisation is {value!r}, which is unknown{near_matches(value, list(NORMALISATIONS))}")
    return NORMALISATIONS[value]


def _refuse_unknown(y: np.ndarray, known: np.ndarray, what: str, where: str) -> None:
    wrong = np.flatnonzero(~np.isin(y, known))
    if len(wrong):
        few = ", ".join(map(str, known[:10])) + (f", ... {known[-1]}" if len(known) > 10 else "")
        raise StreamError(
            f"{what} holds label {y[wrong[0]]} (row {wrong[0]}), which is outside the classes of {where}: {few}"
        )


def _refuse_untested(
    y_test: np.ndarray, split: Sequence[tuple[int, ...]], class_order: np.ndarray, prefix: str
) -> None:
    for heads in split:
        if not np.isin(y_test, heads).any():
            raise StreamError(
                f"{prefix}the task of labels {', '.join(str(class_order[h]) for h in heads)} has no test images"
            )


def _limit(y: np.ndarray, classes_per_task: int, limit: int) -> np.ndarray:
    """Rows to keep, in data order: per task each class's first, second, ... up to ``limit``."""
    rank = np.empty(len(y), np.int64)
    for head in range(int(y.max()) + 1):
        rows = np.flatnonzero(y == head)
        rank[rows] = np.arange(len(rows))
    kept = []
    for task in range((int(y.max()) + 1) // classes_per_task):
        rows = np.flatnonzero(y // classes_per_task == task)
        kept.append(rows[np.argsort(rank[rows], kind="stable")[:limit]])
    return np.sort(np.concatenate(kept))


def _hold_out(y: np.ndarray, known: np.ndarray, share: float, seed: int) -> HeldOut:
    """Draws the held-out images of each class; ``y`` are positions among the sorted labels
    ``known``, int64 [N]. Raises StreamError if a class would have no image to train on, or none
    held out.
    """
    share, seed = plain(share), plain(seed)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise StreamError(f"validation is {share!r}; wanted a share above 0 and below 1")
    held = []
    for position, label in enumerate(known):
        rows = np.flatnonzero(y == position)
        count = int(share * len(rows) + 0.5)
        if not 0 < count < len(rows):
            raise StreamError(
                f"validation is {share}, which holds out {count} of the {len(rows)} training images of class {label};"
                " wanted at least one image held out and one to train on"
            )
        held.append(rows[draw_order(len(rows), seed, HELD_OUT + position)[:count]])
    return HeldOut(share, seed, torch.from_numpy(np.sort(np.concatenate(held))))


def _chosen(images: np.ndarray | ImageFiles, rows: np.ndarray) -> Tensor | ImageFiles:
    """Some images, in the order of their rows, int64 [n]; not copied where these are all."""
    if isinstance(images, ImageFiles):
        return images.subset(rows)
    return _tensor(images if np.array_equal(rows, np.arange(len(images))) else images[rows])


def _tensor(array: np.ndarray) -> Tensor:
    # torch refuses negative strides and warns about read-only memory.
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
