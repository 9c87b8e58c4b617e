"""Settings: presets, validation, round trips, and docs/settings.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import mose_fast
from build_tools.settings_page import PAGE, page
from mose_fast.methods.mose import MOSE_PRESETS, MoseOptions
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
        ({"feed": "gpu"}, "feed is 'gpu'; wanted one of 'auto', 'dali', 'fused', 'torch'"),
        ({"memroy": 5}, "memroy is not a setting; did you mean 'memory'"),
        ({"augmnet": "ocm"}, "augmnet is not a setting; did you mean 'augment'"),
        ({"lr": 0.1, "options": {"lr": 0.2}}, "lr is given by itself and in options; wanted it in one of them"),
        ({"lr": -1.0}, "options.lr is -1.0; wanted a number above 0"),
        ({"method": "er", "temperature": 0.1}, "temperature is not a setting"),
        ({"options": {"cross_entropy": "off", "contrastive": "off"}}, "at least one loss"),
    ],
)
def test_unusable_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.create(**settings)


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
