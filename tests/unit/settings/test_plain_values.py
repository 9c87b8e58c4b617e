"""Numbers and texts of numpy, scalars of torch, paths and devices are taken wherever a number or a
text of Python is, and stored as the plain type.

What is tried follows from the declarations of the settings and from the functions' signatures.
"""

import dataclasses
import inspect
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import mose_fast
from mose_fast.evaluate import evaluate_learner
from mose_fast.experiments import sweep as scheduler
from mose_fast.experiments.place import Place
from mose_fast.experiments.tune import tuning as tuning
from mose_fast.export import export_run
from mose_fast.learner.named_settings import dotted, with_changes
from mose_fast.memory import ReplayMemory
from mose_fast.methods import Er, create_learner, method_names, resolve_device
from mose_fast.settings.run import METHOD_SETTINGS, ConfigError, RunConfig, StreamConfig
from mose_fast.streams import from_arrays, from_batches, locate
from tests.declared import SETTINGS, sample

METHODS = method_names()


def disguises(value):
    """What stands for a plain value, and the plain value that it stands for."""
    if isinstance(value, Path | str):
        text = str(value)
        found = [np.str_(text), np.array(text)]
        found += [Path(text)] if str(Path(text)) == text else []
        found += [torch.device(text)] if re.fullmatch(r"cpu|cuda(:\d)?", text) else []
        return [(one, text) for one in found]
    if isinstance(value, bool):
        return [(kind(value), value) for kind in (np.bool_, np.array, torch.tensor)]
    if isinstance(value, int):
        return [(kind(value), value) for kind in (np.int64, np.int32, np.uint16, np.array, torch.tensor)]
    exact = [np.float64(value), np.longdouble(value), np.array(value), torch.tensor(value, dtype=torch.float64)]
    return [(np.float32(value), float(np.float32(value))), *((one, value) for one in exact)]


def disguised(value):
    """A value of a call, with every number and text in it replaced."""
    if isinstance(value, bool | int | float | str | Path):
        return disguises(value)[0][0]
    if isinstance(value, dict):
        return {name: disguised(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list | range):
        return [disguised(inner) for inner in value]
    return value


def plain_types(value):
    """The types of all leaves of nested dictionaries and sequences."""
    if isinstance(value, dict):
        return set().union(*map(plain_types, value.values()))
    if isinstance(value, tuple | list):
        return set().union(set(), *map(plain_types, value))
    return {type(value)}


PLAIN = {bool, int, float, str, type(None)}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_takes_what_stands_for_a_value_of_its_own(setting):
    for given, wanted in disguises(sample(setting)):
        found = setting.check(given)
        assert type(found) is type(wanted) and found == wanted, given


@pytest.mark.parametrize("method", METHODS)
def test_a_configuration_holds_plain_values(method):
    usual = RunConfig.create(method=method)
    for choice in range(5):
        changes = {}
        for name, value in dotted(usual.to_dict()).items():
            exact = [None] if value is None else [given for given, plain in disguises(value) if plain == value]
            changes[name] = exact[choice % len(exact)]
        config = with_changes(None, changes)
        assert config == usual and config.to_json() == usual.to_json()
        assert plain_types(config.to_dict()) <= PLAIN


NUMBERS = [setting for setting in SETTINGS if setting.type in ("int", "float") and setting.choices is None]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_what_is_no_number_of_the_kind_is_refused_as_its_plain_value_is(setting):
    wrong = [True, np.bool_(True), np.array(True), torch.tensor(True), math.nan, np.float64("nan"), np.float32("nan")]
    wrong += [torch.tensor(math.nan), np.zeros(2), torch.zeros(1), "1", Path("1"), 1j, np.ma.masked, np.ma.array(1)]
    wrong += [np.float64(16.0), torch.tensor(16.0)] if setting.type == "int" else []
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^{setting.name} is "):
            setting.check(value)


# Public functions: a valid call of each, with every parameter that takes a number or a text.

IMAGES, LABELS = np.zeros((24, 8, 8, 3), np.uint8), np.arange(24) % 4


def small_learner(**settings):
    return create_learner(method="er", classes=4, image_size=(8, 8), width=1, memory=64, device="cpu", **settings)


def observed(**how):
    learner = small_learner()
    learner.observe(IMAGES[:4], LABELS[:4], **how)
    return learner.data.values()


def began(**how):
    learner = small_learner(options={"memory_policy": "balanced"})
    learner.begin_task(**how)
    return learner.data.values()


def predicted(**how):
    learner = small_learner()
    learner.observe(IMAGES[:4], LABELS[:4], 0)
    return learner.predict(IMAGES[:4], **how).tolist()


def evaluated(part):
    stream = from_arrays(IMAGES, LABELS, IMAGES, LABELS)
    learner = small_learner()
    learner.observe(IMAGES[:4], LABELS[:4], 0)
    return evaluate_learner(learner, stream, part)


def drawn(task, **how):
    memory = ReplayMemory(8, (8, 8), seed=1)
    memory.insert(torch.from_numpy(IMAGES[:6]), torch.from_numpy(LABELS[:6]), task, torch.arange(6))
    memory.insert(torch.from_numpy(IMAGES[:2]), torch.from_numpy(LABELS[:2]), 5, torch.arange(2))
    return memory.draw(**how).tolist()


IMAGES_AND_LABELS = ("x_train", "y_train", "x_test", "y_test")


def made(stream):
    """What a stream is and in which order it comes, without its images."""
    about = {f.name: getattr(stream, f.name) for f in dataclasses.fields(stream) if f.name not in IMAGES_AND_LABELS}
    about |= {"order": [rows.tolist() for part in range(stream.parts) for rows in stream.batches(part, seed=3)]}
    held = about.pop("held_out")
    return about | {"held": held and (held.share, held.seed, held.rows.tolist()), "arrival": None}


def learner_made(**how):
    learner = create_learner(**how)
    return (learner.config, learner.classes, learner.image_size, learner.mean, learner.std, learner.mirrored)


STREAM = {
    "tasks": 2,
    "first_tasks": 2,
    "batch": 4,
    "class_order_seed": 1,
    "validation": 0.5,
    "validation_seed": 2,
    "limit_per_task": 4,
    "evaluate_on": "validation",
    "kind": "blurry",
    "kind_seed": 1,
    "disjoint": 0.5,
    "blur": 0.25,
    "imbalance": 1.0,
    "drift": 0.5,
    "name": "mine",
    "normalisation": "half",
    "mirror_safe": False,
    "labels": [0, 1, 2, 3],
    "class_names": ["a", "b", "c", "d"],
    "source": "file.npz",
    "content": "0a1b",
}
CALLS = {
    create_learner: (
        learner_made,
        {"classes": 4, "image_size": (16, 8), "mean": (0.5, 0.25, 1.0), "std": (1.0, 2.0, 0.5), "mirror_safe": True}
        | {name: value for name, value in RunConfig().to_dict().items() if name not in ("stream", "options", "device")}
        | {"device": "cpu", "width": 1, "lr": 0.25, "options": {"eps": 0.5, "temperature": 0.125}},
    ),
    from_arrays: (lambda **how: made(from_arrays(IMAGES, LABELS, **how)), STREAM),
    from_batches: (
        lambda **how: made(from_batches([(IMAGES[:12], LABELS[:12] % 2), (IMAGES, LABELS % 2 + 2)], **how)),
        {
            "test": (IMAGES, LABELS),
            "class_tasks": [[0, 1], [2, 3]],
            "name": "mine",
            "normalisation": "half",
            "mirror_safe": False,
            "class_names": ["a", "b", "c", "d"],
        },
    ),
    Er.observe: (observed, {"task": 3}),
    Er.begin_task: (began, {"task": 3, "classes": [1, 2]}),
    Er.predict: (predicted, {"classifier": "ncm", "expert": 1}),
    evaluate_learner: (evaluated, {"part": 1}),
    ReplayMemory.insert: (lambda task: drawn(task, count=3, only=4), {"task": 4}),
    ReplayMemory.draw: (
        lambda count, only, others: (drawn(4, count=count, only=only), drawn(4, count=count, others=others)),
        {"count": 3, "only": 4, "others": 5},
    ),
    resolve_device: (resolve_device, {"name": "cpu"}),
    locate: (locate, {"name": "digits", "data_dir": "."}),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_functions_take_what_stands_for_numbers_and_texts(function):
    call, arguments = CALLS[function]
    parameters = inspect.signature(function).parameters.values()
    takes = {p.name for p in parameters if re.search(r"\b(int|float|str|Path)\b", str(p.annotation))}
    takes -= {name for name, p in inspect.signature(function).parameters.items() if re.search("Tensor", str(p))}
    assert takes - {"stream", *(name for name, v in RunConfig().to_dict().items() if v is None)} <= arguments.keys()
    images = {name: value for name, value in arguments.items() if name == "test"}
    assert call(**{name: disguised(value) for name, value in arguments.items()} | images) == call(**arguments)


class Captured(Exception):
    """What a function would have done."""


@pytest.fixture
def capture(monkeypatch):
    """Replaces a function by one that raises what it was given."""

    def replace(place, name):
        def captured(*arguments, **named):
            raise Captured(*arguments, *named.values())

        monkeypatch.setattr(place, name, captured)

    return replace


GRID = {"memory": (100, 200), "student": (2, 4), "lr": (0.25, 0.5), "method": ("mose",), "seed": range(3)}
PLACE = {"workers": 1, "per_gpu": 2, "gpus": ("0", "1"), "engine": "local", "address": "auto"}


@pytest.mark.parametrize("array", [list, np.array, torch.tensor], ids=lambda kind: kind.__name__)
def test_a_sweep_takes_them_in_its_grid_and_for_all_runs(capture, tmp_path, array):
    capture(scheduler, "run_grid")
    arguments = {"stream": "mine/photos", "options": {"eps": 0.5}, "width": 1, "device": "cpu", "preset": "released"}

    def planned(grid, **how):
        with pytest.raises(Captured) as captured:
            mose_fast.run_sweep(grid, out=tmp_path, **how)
        made, _, place = captured.value.args
        return [(cell.name, cell.config, cell.values) for cell in made], place

    texts = {name for name, values in GRID.items() if isinstance(values[0], str)}
    grid = {n: [*map(np.str_, v)] if n in texts else array([*v]) for n, v in GRID.items()}
    cells, place = planned(grid, **disguised({**arguments, **PLACE}))
    assert (cells, place) == planned(GRID, **arguments, **PLACE)
    assert plain_types([values for _, _, values in cells]) <= PLAIN
    assert place == Place(**PLACE)


def test_a_study_takes_them(capture, tmp_path):
    capture(tuning, "_Tuning")
    arguments = {"method": "er", "trials": 2, "seeds": (0, 1), "changes": {"width": 1, "memory": 64, "device": "cpu"}}

    def planned(**how):
        with pytest.raises(Captured) as captured:
            tuning.tune(out=tmp_path, **how)
        return captured.value.args[:4]

    assert planned(**disguised(arguments) | {"seeds": np.arange(2)}) == planned(**arguments)
    for trials in (True, np.bool_(True), 1.5, np.float64(1), 0):
        with pytest.raises(ConfigError, match=r"trials is .*; wanted an integer of at least 1"):
            tuning.tune(**{**arguments, "trials": trials}, out=tmp_path)


@pytest.mark.slow
def test_folders_may_be_texts_or_paths(tmp_path):
    settings = {"stream": {"name": "digits", "limit_per_task": 20}, "width": 1, "memory": 64, "device": "cpu"}
    settings |= {"method": "er", "checkpoint_every": 3}
    first = mose_fast.run(out=np.str_(tmp_path / "a"), **disguised(settings))
    second = mose_fast.run(out=tmp_path / "b", **settings)
    assert first["weights_sha256"] == second["weights_sha256"] and first["config"] == second["config"]
    folders = [export_run(kind(tmp_path / name)) for kind, name in ((np.str_, "a"), (Path, "b"))]
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def test_tasks_and_classes_that_are_no_integers_are_refused_and_nothing_has_changed():
    learner = small_learner()
    before = learner.data.values()
    for task, wrong in itertools.product((1.5, np.float32(1), math.nan, True, "1", None, np.zeros(2)), (0, 1)):
        with pytest.raises(ValueError, match=r"^task is .*; wanted an integer"):
            learner.observe(IMAGES[:4], LABELS[:4], task) if wrong else learner.begin_task(task)
    for classes in ([0, 4], [-1], [0.5], [True]):
        with pytest.raises(ValueError, match=r"a class of the task is .*; wanted an integer of at least 0"):
            learner.begin_task(0, classes)
    assert learner.data.values() == before


def test_a_stream_may_be_named_by_its_path(tmp_path):
    path = tmp_path / "mine.npz"
    assert RunConfig.create(stream=path) == RunConfig.create(stream=str(path))
    assert StreamConfig(path, data_dir=tmp_path) == StreamConfig(str(path), data_dir=str(tmp_path))
    assert METHOD_SETTINGS["er"].preset(np.str_("table")) == "table"
