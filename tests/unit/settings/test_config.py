"""Settings: presets, validation, round trips, and docs/settings.md."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

import mose_fast
from build_tools.settings_page import PAGE, page
from mose_fast.methods.mose import MOSE_PRESETS, MoseOptions
from mose_fast.settings.knob import as_text, settings_of
from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig


def test_presets_differ_where_paper_and_released_code_do():
    """docs/specification/mose.md section 13: what "paper-literal" means."""
    paper = RunConfig.create("paper").options
    released = RunConfig.create("released").options
    assert released == MoseOptions() == RunConfig().options
    assert (released.rsd_reduction, paper.rsd_reduction) == ("frobenius", "mean_of_norms")
    assert (released.buffer_weight, paper.buffer_weight) == (2, 1)
    assert (released.attention, released.adapter, paper.attention, paper.adapter) == (True, True, False, False)
    assert (released.new_extra, paper.new_extra, released.per_class_cap, paper.per_class_cap) == (22, 0, 7, None)
    assert (released.augment, paper.augment) == ("ocm", "simclr")
    assert (released.mean_of_experts, paper.mean_of_experts) == ("distance", "logit")
    assert released.inner_views == paper.inner_views == 2


def test_the_page_of_settings_is_what_the_declarations_say():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(), "run: python -m build_tools.settings_page"
    for setting in (*settings_of(RunConfig).values(), *settings_of(StreamConfig).values()):
        assert f"| `{setting.name}` | {as_text(setting.default)} |" in text
    presets = [dataclasses.asdict(RunConfig.create(preset).options) for preset in MOSE_PRESETS]
    for setting in settings_of(MoseOptions).values():
        values = " | ".join(as_text(preset[setting.field]) for preset in presets)
        assert f"| `{setting.field}` | {values} | {setting.full_meaning.replace('|', chr(92) + '|')} |" in text


def test_changes_from_the_preset_are_visible():
    config = RunConfig.create("paper", options={"augment": "ocm", "adapter": False})
    assert config.changes_from_preset() == {"augment": "ocm"}
    assert config.options.attention is False


@pytest.mark.parametrize("suffix", ["json", "toml"])
@pytest.mark.parametrize("preset", MOSE_PRESETS)
def test_round_trip_through_files(tmp_path, as_toml, suffix, preset):
    config = RunConfig.create(
        preset,
        stream={"name": "split-cifar100", "limit_per_task": 100, "class_order_seed": 3},
        memory=200,
        options={"student": 2},
        seed=7,
    )
    path = tmp_path / f"config.{suffix}"
    path.write_text(config.to_json() if suffix == "json" else as_toml(config))
    assert RunConfig.load(path) == config


def test_a_file_may_hold_only_what_differs(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('preset = "paper"\nmemory = 300\n[options]\ntemperature = 0.1\n')
    config = RunConfig.load(path)
    assert config == RunConfig.create("paper", memory=300, options={"temperature": 0.1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 0}, "memory is 0; wanted an integer of at least 1"),
        ({"memory": 63}, "memory is 63, smaller than options.buffer_batch, 64"),
        ({"feed": "gpu"}, "feed is 'gpu'; wanted one of 'auto', 'dali', 'fused', 'torch'"),
        ({"feed": "ocm"}, "feed is 'ocm', which is a recipe"),
        ({"device": "cuda:x"}, "device is 'cuda:x'"),
        ({"preset": "papper"}, "did you mean 'paper'"),
        ({"memroy": 5}, "memroy is not a setting; did you mean 'memory'"),
        ({"options": {"augmnet": "ocm"}}, "options.augmnet is not a setting; did you mean 'augment'"),
        ({"augmnet": "ocm"}, "augmnet is not a setting; did you mean 'augment'"),
        ({"learning_rate": 0.1}, "learning_rate is not a setting; did you mean 'lr'"),
        ({"lr": 0.1, "options": {"lr": 0.2}}, "lr is given by itself and in options; wanted it in one of them"),
        ({"lr": -1.0}, "options.lr is -1.0; wanted a number above 0"),
        ({"method": "er", "temperature": 0.1}, "temperature is not a setting"),
        ({"options": {"cross_entropy": "off", "contrastive": "off"}}, "at least one loss"),
    ],
)
def test_unusable_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.create(**settings)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.toml", "memory =", "not valid TOML"),
        ("a.json", "[1]", "table of settings"),
        ("a.json", '{"memory": 0}', "a.json"),
    ],
)
def test_unusable_files_are_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        RunConfig.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        RunConfig.load(tmp_path / "nothing.json")


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().memory = 5
    assert StreamConfig("digits") == StreamConfig()


def test_options_may_stand_beside_the_other_settings():
    bare = RunConfig.create("paper", memory=500, lr=0.01, augment="scr", options={"temperature": 0.1})
    assert bare == RunConfig.create("paper", memory=500, options={"lr": 0.01, "augment": "scr", "temperature": 0.1})
    assert RunConfig.create(method="er", lr=0.2).options.lr == 0.2
    assert RunConfig.from_dict({"lr": 0.01}) == RunConfig.create(lr=0.01)
    learner = mose_fast.create_learner(classes=4, width=1, memory=64, lr=0.02, device="cpu")
    assert learner.config.options.lr == 0.02


@pytest.mark.parametrize("function", [mose_fast.run, mose_fast.create_learner])
def test_help_explains_the_main_arguments(function):
    told = " ".join(inspect.getdoc(function).split())
    for name in ("method", "preset", "memory", "width", "seed", "device", "options"):
        assert f"``{name}`` (" in told, name


def test_types_are_installed_with_the_package():
    root = Path(mose_fast.__file__).parent
    assert (root / "py.typed").is_file()
    project = root.parent / "pyproject.toml"
    assert (
        '"py.typed"'
        in project.read_text(encoding="utf-8")
        .partition("[tool.setuptools.package-data]")[2]
        .partition("[tool.ruff]")[0]
    )
