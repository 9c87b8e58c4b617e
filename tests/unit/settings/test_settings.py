"""What follows from the declarations of settings: each place that asks which settings matter gets
its answer from their roles.
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import mose_fast
from mose_fast.experiments.forecast import cost_key
from mose_fast.experiments.grid import grid_cells
from mose_fast.experiments.paper.plan import _departures
from mose_fast.learner.named_settings import all_settings, with_changes
from mose_fast.runs.identity import check_identity
from mose_fast.settings.knob import settings_of
from mose_fast.settings.run import ConfigError, MethodOptions, RunConfig, knob
from mose_fast.train import RunError
from tests.declared import SETTINGS, outside

# Another value of every setting that neither problem nor method needs to be what it is.
BOOKKEEPING = {"stream.data_dir": "/data", "stream.decoder": "pil", "checkpoint_every": 3, "tuned": "by hand"}
BOOKKEEPING |= {"stream.load": "disk", "stream.on_error": "skip"}
EXECUTION = {
    "device": "cpu",
    "feed": "torch",
    "precision": "bf16",
    "kernels": "torch",
    "step": "eager",
    "deterministic": True,
    "evaluation_batch": 5,
    "evaluate_every": 5,
    "anytime_images": 5,
    "anytime_stored": 5,
    "classifiers": "all",
}
DATA = {"stream.fingerprint": "0123456789abcdef"}
OTHERS = {"memory": 500, "width": 8, "epochs": 2, "stream.name": "split-mnist", "options.lr": 0.5, "init_seed": 3}
OTHERS |= {"stream.first_tasks": 2, "stream.validation": 0.1, "stream.validation_seed": 1}
OTHERS |= {"stream.kind": "task_free", "stream.kind_seed": 1, "stream.disjoint": 0.0, "stream.blur": 0.2}
OTHERS |= {"stream.imbalance": 10, "stream.drift": 0.1}


def usual():
    return RunConfig()


def changed(name, value):
    return with_changes(usual(), {name: value})


def names_by_role(role):
    return {setting.name for setting in all_settings("mose").values() if setting.role == role}


def test_roles():
    assert names_by_role("bookkeeping") == BOOKKEEPING.keys()
    assert names_by_role("execution") == EXECUTION.keys()
    assert names_by_role("problem") == {
        *("stream.name", "stream.tasks", "stream.batch", "stream.limit_per_task", "stream.class_order_seed"),
        *("stream.normalisation", "stream.resize", "stream.fingerprint", "memory", "epochs", "train_on"),
        *("stream.first_tasks", "stream.validation", "stream.validation_seed", "evaluate_on"),
        *("stream.kind", "stream.kind_seed", "stream.disjoint", "stream.blur", "stream.imbalance", "stream.drift"),
    }


@pytest.mark.parametrize(("name", "value"), {**BOOKKEEPING, **EXECUTION, **DATA}.items())
def test_a_grid_does_not_vary_what_must_not_change_results(name, value):
    axes = {name: (value,), "seed": (0, 1)}
    if name == "precision":
        assert len(grid_cells(axes, {})) == 2
    else:
        with pytest.raises(ConfigError, match=f"{name} is in the grid; wanted it the same for all runs"):
            grid_cells(axes, {})


@pytest.mark.parametrize(("name", "value"), {**BOOKKEEPING, **EXECUTION, **DATA, "seed": 3, **OTHERS}.items())
def test_a_departure_from_the_paper_is_another_problem_or_method(name, value):
    departs = _departures(changed(name, value), usual()) != []
    assert departs == (name in OTHERS)


@pytest.mark.parametrize(("name", "value"), {**BOOKKEEPING, **EXECUTION, **DATA, "seed": 3, **OTHERS}.items())
def test_a_resumed_run_may_change_bookkeeping_and_device(name, value):
    same = {"code": "", "method_files": {}, "machine": {}}
    wrote, goes_on = ({"config": config.to_dict(), **same} for config in (usual(), changed(name, value)))
    if name in BOOKKEEPING or name == "device":
        check_identity(wrote, goes_on, Path("run/checkpoints/step-1"))
    else:
        with pytest.raises(RunError, match=f"{name} was .* and is .* now"):
            check_identity(wrote, goes_on, Path("run/checkpoints/step-1"))


@pytest.mark.parametrize(
    ("name", "value"),
    {
        **{name: value for name, value in BOOKKEEPING.items() if name != "stream.load"},
        **DATA,
        "seed": 3,
        "init_seed": 3,
        "stream.class_order_seed": 3,
        "stream.validation_seed": 3,
        "options.lr": 0.5,
        "options.expert": "mean",
    }.items(),
)
def test_what_changes_no_cost(name, value):
    assert cost_key(changed(name, value)) == cost_key(usual())


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("mose", "memory", 500),
        ("mose", "deterministic", True),
        ("mose", "precision", "bf16"),
        ("mose", "stream.load", "disk"),
        ("mose", "options.inner_views", 4),
        ("aser", "options.per_class", 3.0),
    ],
)
def test_what_changes_cost(method, name, value):
    base = RunConfig.create(method=method)
    assert cost_key(with_changes(base, {name: value})) != cost_key(base)


@pytest.mark.parametrize("function", [mose_fast.run, mose_fast.create_learner])
def test_the_signature_lists_every_setting_with_type_and_default(function):
    parameters = inspect.signature(function).parameters
    types = get_type_hints(RunConfig)
    for setting in settings_of(RunConfig).values():
        parameter = parameters[setting.name]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if setting.name != "preset":  # None means the method's first
            assert (parameter.annotation, parameter.default) == (types[setting.name], setting.default)
    assert {"stream", "options"} <= parameters.keys()
    told = " ".join(inspect.getdoc(function).split())
    for setting in settings_of(RunConfig).values():
        assert f"``{setting.name}`` (" in told and setting.meaning in told


def test_docstrings_list_the_fields():
    for kind in (RunConfig, type(RunConfig().stream), type(RunConfig().options)):
        for setting in settings_of(kind).values():
            assert f"\n    {setting.field}: {setting.full_meaning}." in kind.__doc__


def test_a_field_that_is_not_declared_is_named():
    @dataclasses.dataclass(frozen=True)
    class Options(MethodOptions):
        declared: int = knob(1, "a number", low=0)
        plain: int = 2

    with pytest.raises(TypeError, match=r"Options.plain is no setting; wanted plain: ... = knob\(...\)"):
        Options()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_refuses_what_it_cannot_hold(setting):
    setting.check(setting.default)
    for value, wanted in [(object(), ""), *outside(setting)]:
        with pytest.raises(ConfigError, match=rf"^{setting.name} is .*; wanted .*{re.escape(wanted)}"):
            setting.check(value)


@pytest.mark.parametrize("name", sorted(all_settings("mose").keys() - {"method", "preset"}))
def test_a_configuration_names_the_setting_whose_value_does_not_fit(name):
    value, wanted = outside(all_settings("mose")[name])[-1]
    with pytest.raises(ConfigError, match=rf"{name} is .*; wanted .*{re.escape(wanted)}"):
        with_changes(None, {name: value})
