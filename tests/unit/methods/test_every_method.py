"""What holds for every method: state, resuming, the loop, small memories, vanished classes, low
precision, presets.
"""

from __future__ import annotations

import json
import re
import warnings

import jsonschema
import numpy as np
import pytest
import torch

from mose_fast.methods import METHODS, BaselineOptions, Planning
from mose_fast.runs.results import schema
from mose_fast.settings.knob import settings_of
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams import from_arrays
from mose_fast.train import Listener, resume, run
from tests.listeners import StopAt
from tests.unit.methods.by_hand import bits

NAMES = tuple(METHODS)
PRESETS = [(name, preset) for name in NAMES for preset in METHODS[name].about.presets]
#: Options that keep the tests of a method short.
SHORT = {"gdumb": {"passes": 4, "passes_before": 2}}
every = pytest.mark.parametrize("name", NAMES)


def settings(name: str, **changes) -> RunConfig:
    """A run of a few seconds."""
    given = {
        "width": 1,
        "memory": 24,
        "device": "cpu",
        "options": {"buffer_batch": 8, **SHORT.get(name, {})},
        **changes,
    }
    return RunConfig.create(method=name, **given)


@pytest.fixture(scope="module")
def stream():
    """Two tasks of two classes that differ in brightness, 21 images each: the last batch of a task
    holds two.
    """
    random = np.random.default_rng(0)
    parts = []
    for per_class in (21, 6):
        y = random.permutation(np.repeat(np.arange(4), per_class))
        x = random.integers(0, 90, (len(y), 8, 8, 3)) + 50 * y[:, None, None, None]
        parts += [x.astype(np.uint8), y]
    return from_arrays(*parts, tasks=2)


class AtOnce(Listener):
    """Stops a run before it trains."""

    def on_start(self, *arguments):
        raise KeyboardInterrupt


# Entries and presets


@pytest.mark.parametrize("name", ["bic", "ccil", "gsa", "il2a", "lucir", "ocm", "onpro", "ssil"])
def test_it_starts_from_the_weights_of_er(name, make):
    """But for what its head has of its own."""
    er, found = (dict(make(each, seed=4).network.named_parameters()) for each in ("er", name))
    assert er.keys() - found.keys() <= {"classifier1.bias"}
    shared = {p for p in found if p != "classifier1.scale" and not p.startswith("projection1")}
    assert all(torch.equal(found[p], er[p]) for p in shared)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_presets_are_valid_and_every_switch_has_a_source(name, preset):
    config = RunConfig.create(preset, method=name)
    assert config.preset == preset and config.changes_from_preset() == {}
    assert RunConfig.from_dict(config.to_dict()) == config
    assert all(setting.source and setting.doc for setting in settings_of(type(config.options)).values())


@pytest.mark.parametrize(
    "name", [n for n in NAMES if issubclass(type(RunConfig.create(method=n).options), BaselineOptions)]
)
def test_the_table_preset_is_the_shared_protocol(name):
    """docs/specification/baselines.md section 0.2: Adam 1e-3, weight decay 1e-4, batches of 10, 64
    replayed rows.
    """
    config = RunConfig.create("table", method=name)
    o = config.options
    assert next(iter(METHODS[name].about.presets)) == "table"
    assert (o.optimiser, o.lr, o.weight_decay, o.beta1, o.beta2, o.buffer_batch) == ("adam", 1e-3, 1e-4, 0.9, 0.999, 64)
    assert config.stream.batch == METHODS[name].about.presets["table"].batch == 10


@pytest.mark.parametrize("name", [name for name, preset in PRESETS if preset == "sources"])
def test_the_sources_preset_is_the_shared_protocol_with_the_methods_own_values(name):
    """Optimiser, replayed rows and augmentation are those of ``table``; every value that differs
    is in its source's text.
    """
    preset = METHODS[name].about.presets["sources"]
    table, sources = (RunConfig.create(each, method=name).options for each in ("table", "sources"))
    shared = {"augment", "buffer_batch", "lr", "weight_decay", "optimiser", "init", "mirror"}
    assert not shared & preset.changes.keys() and preset.batch == 10 and preset.epochs == 1
    for switch, value in preset.changes.items():
        assert getattr(table, switch) != value == getattr(sources, switch)
        written = json.dumps(value).removesuffix(".0").strip('"')
        assert f"{switch} {written}" in preset.source


def starts_uniform(name: str) -> bool:
    """Whether convolutions start from PyTorch's uniform weights; He's normal ones exceed them."""
    config = RunConfig.create("official", method=name, width=4, memory=1000, device="cpu")
    stem = METHODS[name](config, classes=4, image_size=(8, 8)).network.stem.conv.weight
    return bool(stem.abs().max() <= stem[0].numel() ** -0.5)


def test_official_presets_start_from_the_weights_of_their_code():
    """docs/specification/baselines.md section 0.3."""
    uniform = {"er", "mir", "gss", "aser", "er-aml", "er-ace", "scr", "ocm", "onpro", "gsa", "derpp"}
    assert all(starts_uniform(name) for name in uniform)
    assert not starts_uniform("co2l") and not starts_uniform("gdumb")


def test_the_nine_baselines_have_the_sources_preset():
    nine = {"agem", "er", "mir", "gss", "aser", "er-aml", "er-ace", "gdumb", "scr", "derpp"}
    assert nine <= {name for name, preset in PRESETS if preset == "sources"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epochs": 2}, r"epochs is 2, the preset's 1"),
        ({"stream": {"name": "digits", "batch": 5}}, "stream.batch is 5, the preset's 10"),
    ],
)
def test_a_preset_for_another_protocol_warns(stream, changes, says):
    with (
        pytest.warns(UserWarning, match=f"preset 'table' of 'er' is meant for another protocol: {says}"),
        pytest.raises(KeyboardInterrupt),
    ):
        run(settings("er", **changes), listeners=[AtOnce()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "switch", "value"),
    [(name, *key) for name in NAMES if not METHODS[name].needs_boundaries for key in METHODS[name].without_boundaries],
)
def test_one_constant_task_number_is_warned_of_once(name, switch, value, make, batch):
    """Once more than half of the classes came in it, which no one of several equal tasks has."""
    effect = METHODS[name].without_boundaries[switch, value]
    expected = f"options.{switch} of method {name!r} is {value!r}, .* 4 of 6 classes came in task 7, .* {effect}"
    # Only the first switch that needs boundaries is named.
    known = settings_of(type(RunConfig.create(method=name).options))
    off = {
        s: not v if v is True else next(c for c in known[f"options.{s}"].choices if c != v)
        for s, v in METHODS[name].without_boundaries
    }
    learner = make(name, options={**off, switch: value})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for label in range(6):
            learner.observe(*batch([label] * 4, seed=label), task=7)
    assert [bool(re.match(expected, str(w.message))) for w in caught if "task boundaries" in str(w.message)] == [True]


@pytest.fixture
def needing(monkeypatch):
    """ER as a method that needs task boundaries."""
    monkeypatch.setattr(METHODS["er"], "needs_boundaries", "distils from the task before")


def test_a_method_that_needs_boundaries_refuses_one_constant_task_number(needing, make, teach, batch):
    learner = make("er")
    learner.observe(*batch([0, 1, 2]), task=7)
    before = bits(learner)
    with pytest.raises(
        ConfigError, match="method 'er' distils from the task before, but 4 of 6 classes came in task 7"
    ):
        learner.observe(*batch([2, 3]), task=7)
    assert bits(learner) == before
    learner.observe(*batch([3]), task=8)  # a boundary
    learner.observe(*batch([4, 5]), task=8)
    with pytest.raises(ConfigError, match="4 of 6 classes came in task 0"):
        make("er").observe(*batch([0, 1, 2, 3]), task=0)
    told = make("er")
    told.begin_task(0, classes=range(4))
    told.observe(*batch([0, 1, 2, 3]), task=0)
    teach(make("er"), tasks=(0, 1, 2), steps=1)


def test_a_method_that_needs_boundaries_refuses_a_stream_of_one_task_before_the_run(needing, stream, tmp_path):
    with pytest.raises(
        ConfigError, match=r"distils from the task before, but the stream has one; wanted .* several tasks"
    ):
        run(settings("er"), stream=stream.as_one_task(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(settings("er"), stream=stream)["steps"] > 0


@every
def test_several_tasks_are_not_warned_of(name, make, teach):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*task boundaries")
        teach(make(name, options=SHORT.get(name, {})), tasks=(0, 1, 2), steps=1)


def test_a_stream_of_one_task_is_warned_of_before_the_run(stream):
    whole = stream.as_one_task()
    joint = {"buffer_batch": 8, "replay_from": "others"}

    for name, given, options, said in (
        ("agem", whole, None, "but the stream has one: without task boundaries the method has no reference batch"),
        (
            "joint",
            stream,
            joint,
            "but the stream is presented as one: without task boundaries the method replays nothing",
        ),
        ("agem", stream, None, None),
        ("er", whole, None, None),
        ("finetune", whole, joint, None),
    ):
        config = settings(name, **({} if options is None else {"options": options}))
        with warnings.catch_warnings(record=True) as caught, pytest.raises(KeyboardInterrupt):
            warnings.simplefilter("always")
            run(config, stream=given, listeners=[AtOnce()])
        found = [str(w.message) for w in caught if "task boundaries" in str(w.message)]
        assert len(found) == (said is not None) and all(said in message for message in found)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (9, "memory is 9, fewer than two for each of the 5 classes"),
        (10, None),
        (105, None),
        (106, "memory is 106, more than the stream has images, 105"),
    ],
)
def test_a_memory_that_is_thin_or_larger_than_the_stream_is_warned_of(memory, says):
    y = np.arange(105) % 5
    stream = from_arrays(np.zeros((105, 8, 8, 3), np.uint8), y, np.zeros((10, 8, 8, 3), np.uint8), y[:10], tasks=1)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(KeyboardInterrupt):
        warnings.simplefilter("always")
        run(settings("er", memory=memory), stream=stream, listeners=[AtOnce()])
    found = [str(w.message) for w in caught if "memory is" in str(w.message)]
    assert len(found) == (says is not None) and all(message.startswith(says) for message in found)


@every
def test_a_memory_too_small_names_the_least_size(name):
    with pytest.raises(ConfigError, match=r"memory is 7, .* at least one buffer batch"):
        RunConfig.create(method=name, memory=7, options={"buffer_batch": 8})


def has_a_policy_of_its_own(name: str) -> bool:
    setting = settings_of(type(RunConfig.create(method=name).options)).get("options.memory_policy")
    return setting is None or "reservoir" not in setting.choices


@pytest.mark.parametrize("name", [name for name in NAMES if has_a_policy_of_its_own(name)])
def test_methods_with_a_policy_of_their_own_refuse_another(name):
    with pytest.raises(ConfigError, match="memory_policy"):
        RunConfig.create(method=name, options={"memory_policy": "reservoir"})


# The learner by itself


@pytest.mark.slow
@every
def test_weights_depend_on_the_seeds_alone_and_nothing_touches_the_global_generator(name, make, teach):
    def start(**seeds):
        return make(name, options=SHORT.get(name, {}), **seeds)

    assert start(seed=5, init_seed=6).weights_hash() == start(seed=6).weights_hash() != start(seed=5).weights_hash()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    learner = teach(start(seed=5), steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, others = teach(start(seed=5), steps=2), teach(start(seed=5, init_seed=6), steps=2)
    by_model = learner.planning is Planning.LOOKS_AT_MODEL or getattr(learner.memory, "selection", "") == "herding"
    if not by_model:  # what the memory holds depends on the data's seed alone
        assert torch.equal(learner.memory.indices, others.memory.indices)
    for one in (learner, again, others):
        one.prepare_evaluation()
    assert again.weights_hash() == learner.weights_hash() != others.weights_hash()


@pytest.mark.slow
@every
def test_predictions(name, make, teach, batch):
    learner = teach(make(name))
    learner.end_task()
    x, _ = batch(list(range(6)) * 2, seed=7)
    learner.prepare_evaluation()
    before = bits(learner)
    for classifier in (None, "ncm", "linear"):
        labels = learner.predict(x, classifier)
        assert labels.shape == (12,) and labels.dtype == torch.int64 and set(labels.tolist()) <= set(range(6))
    assert set(learner.predict(x, "ncm").tolist()) <= set(range(4))
    assert torch.equal(learner.predict(x), torch.cat([learner.predict(part) for part in x.split(5)]))
    assert bits(learner) == before


@pytest.mark.slow
@every
def test_a_memory_smaller_than_the_batch(name, make, teach, batch):
    learner = teach(make(name, memory=4))
    learner.end_task()
    assert learner.memory.filled == 4 and learner.memory.seen == 80
    assert learner.predict(batch([0, 1, 2, 3])[0]).shape == (4,)


@pytest.mark.slow
@every
def test_a_class_that_vanished_from_memory(name, make, teach, batch):
    learner = teach(make(name))
    learner.memory.labels[learner.memory.labels == 0] = 1
    teach(learner, tasks=(2,), steps=2)
    learner.end_task()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert 0 not in learner.predict(batch([0] * 8)[0], "ncm").tolist()
    assert all(t.isfinite().all() for t in learner.model.state().values())


@every
def test_batches_of_a_single_image(name, make, batch):
    """8x8 images leave one value a channel in the last stage, which batch norm refuses for a single
    view.
    """
    learner = make(name)
    for step, label in enumerate([0, 0, 1, 0, 2]):
        learner.observe(*batch([label], seed=step), task=label // 2)
        if step < 2 and learner.memory.filled:
            assert learner.predict(batch([1])[0], "ncm").tolist() == [0]  # the only class
    learner.end_task()
    assert learner.memory.seen == 5 and all(t.isfinite().all() for t in learner.model.state().values())


@pytest.mark.slow
@every
def test_steps_in_bf16_stay_finite(name, make, batch):
    learner = make(name, precision="bf16")
    for step in range(20):
        task = step // 10
        losses = learner.observe(*batch([2 * task, 2 * task + 1] * 5, seed=step), task=task)
        assert losses is None or all(value.isfinite() for value in losses.values())
    assert all(t.isfinite().all() for t in learner.model.state().values())
    assert all(p.dtype == torch.float32 for p in learner.network.parameters())


@pytest.mark.slow
@every
def test_losses_have_no_side_effect(name, make, teach, batch):
    """Computed twice from the same outputs, they are the same numbers, and nothing has changed."""
    learner, calls = teach(make(name), steps=2), []

    def twice(*inputs):
        before, random_state = bits(learner), torch.get_rng_state()
        first, second = losses(*inputs), losses(*inputs)
        values = [[*terms.values()] if isinstance(terms, dict) else [terms] for terms in (first, second)]
        assert all(map(torch.equal, *values)) and bits(learner) == before
        assert torch.equal(torch.get_rng_state(), random_state)
        calls.append(len(values[0]))
        return first

    losses, learner.losses = learner.losses, twice
    teach(learner, steps=2, tasks=(2,))
    learner.rehearse(torch.arange(12))
    # The step of GDumb has its loss inside, and so has that of A-GEM with a reference batch.
    assert len(calls) == {"agem": 1, "gdumb": 0}.get(name, 3)


# The loop


@pytest.mark.slow
@every
def test_a_run_and_its_resumption(name, stream, tmp_path):
    config = settings(name, checkpoint_every=2)
    whole = run(config, stream=stream, out=tmp_path / "whole")
    errors = [f"{e.json_path}: {e.message}" for e in jsonschema.Draft202012Validator(schema()).iter_errors(whole)]
    assert errors == []
    assert whole["config"]["method"] == name and whole["steps"] > 0
    with pytest.raises(RuntimeError, match="broken off"):
        run(config, stream=stream, out=tmp_path / "part", listeners=[StopAt(7, RuntimeError("broken off"))])
    resumed = resume(tmp_path / "part", stream=stream)
    assert resumed["resumed"] == 1
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["accuracy"] == whole["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mose", "derpp", "mir", "gss"])
def test_a_run_with_the_switches_of_all_methods_and_its_resumption(name, stream, tmp_path):
    """Two steps a batch, a review at the end of a task, and a balanced memory."""
    own = {} if name == "gss" else {"memory_policy": "balanced"}
    config = settings(name, checkpoint_every=2, options={"buffer_batch": 8, "iterations": 2, "review": True, **own})
    whole = run(config, stream=stream, out=tmp_path / "whole")
    # 5 batches a task, of which MOSE only stores the first; 24 slots in the review of each task.
    assert whole["steps"] == 2 * (10 - (name == "mose")) + 2 * 3
    with pytest.raises(RuntimeError, match="broken off"):
        run(config, stream=stream, out=tmp_path / "part", listeners=[StopAt(7, RuntimeError("broken off"))])
    resumed = resume(tmp_path / "part", stream=stream)
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["steps"] == whole["steps"]


@pytest.mark.slow
@every
def test_training_on_the_final_memory(name, stream):
    results = run(settings(name, train_on="final_memory", epochs=2), stream=stream)
    assert results["evaluated_after"] == [1]
    assert results["steps"] >= 2 * 3  # 24 slots in batches of 8, twice
