"""The space of a study: declared ranges, space files, what is refused before anything starts."""

import dataclasses
import json

import numpy as np
import pytest

from mose_fast.app.cli import main
from mose_fast.experiments.tune.space import Axis, check_values, declared_space, read_space
from mose_fast.learner.named_settings import all_settings, with_changes
from mose_fast.methods import METHODS, BaselineOptions
from mose_fast.settings.knob import Search
from mose_fast.settings.run import METHOD_SETTINGS, BeyondOptions, ConfigError, RunConfig

SMALL = ("--width", "1", "--memory", "64", "--limit-per-task", "20", "--device", "cpu")


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("method", METHODS)
def test_declared_ranges_are_usable_and_hold_the_usual_values(method):
    axes = declared_space(method)
    assert {"options.lr", "options.weight_decay"} & axes.keys()
    base = check_values(axes, {"method": method})
    for name, axis in axes.items():
        assert axis.search.low < axis.search.high and axis.setting.role == "method" and axis.search.source
        if axis.search.log:
            assert axis.search.low > 0
        assert axis.holds(getattr(base.options, name.removeprefix("options.")))
    assert METHOD_SETTINGS[method].options is type(base.options)
    of_many = [field.name for kind in (BaselineOptions, BeyondOptions) for field in dataclasses.fields(kind)]
    shared = {f"options.{name}" for name in of_many}
    own = {name for name, s in all_settings(method).items() if name.startswith("options.") and s.type == "float"}
    assert axes.keys() & (own - shared) or not own - shared


def test_a_file_gives_ranges_and_values(tmp_path):
    text = '[space]\nlr = { low = 1e-3, high = 0.1, log = true }\naugment = ["ocm", "none"]\n'
    text += '"options.buffer_batch" = { low = 8, high = 64 }\nclassifier = ["ncm", "linear"]\n'
    axes = read_space(write(tmp_path / "space.toml", text), "er")
    assert axes["options.lr"].search == Search(1e-3, 0.1, True) and axes["options.lr"].choices == ()
    assert axes["options.buffer_batch"].search == Search(8, 64, False)
    assert axes["options.augment"].choices == ("ocm", "none") and axes["options.augment"].corners() == ("ocm", "none")
    assert len(axes) == 4
    same = {"space": {name: axis.described() for name, axis in axes.items()}}
    assert read_space(write(tmp_path / "space.json", json.dumps(same)), "er") == axes


def test_an_axis_holds_what_is_in_it():
    setting = all_settings("er")["options.lr"]
    assert [v for v in (0.1, 0.5, 0.05, 0.6, "ocm") if Axis(setting, Search(0.1, 0.5)).holds(v)] == [0.1, 0.5]
    assert [v for v in (1, "a", 2) if Axis(setting, choices=(1, "a")).holds(v)] == [1, "a"]


BAD = [
    ("", "wanted a table [space], and nothing else"),
    ("width = 3\n[space]\nlr = [0.1, 0.2]", "wanted a table [space], and nothing else"),
    ("[space]", "the space is empty"),
    ("[space]\nlearning_rate = [0.1, 0.2]", "learning_rate is not a setting; did you mean 'lr'?"),
    ("[space]\nmemory = [100, 200]", "memory is in the space; wanted switches of the method alone"),
    ("[space]\nseed = [1, 2]", "seed is in the space; wanted switches of the method alone"),
    ("[space]\nlr = [0.1]", "options.lr is [0.1]; wanted {low = ..., high = ..., log = true or false}, or a list of"),
    ("[space]\nlr = { low = 0.1, high = 1, scale = 2 }", "wanted {low = ..."),
    ("[space]\nlr = { low = 0, high = 0.1 }", "options.lr is 0; wanted a number above 0"),
    ("[space]\nlr = { low = 0.2, high = 0.1 }", "options.lr has the range"),
    ("[space]\nweight_decay = { low = 0, high = 0.1, log = true }", "and above 0 where log is true"),
    ('[space]\nlr = { low = 0.1, high = 0.2, log = "yes" }', "options.lr has the range"),
    ("[space]\nlr = [0.1, -1]", "options.lr is -1; wanted a number above 0"),
    ('[space]\naugment = ["ocm", "rotate"]', "options.augment is 'rotate'"),
    ("[space]\naugment = { low = 1, high = 2 }", "options.augment is given a range; wanted a list of values"),
    ('[space]\nlr = [0.1, 0.2]\n"options.lr" = [0.1, 0.2]', "options.lr is in the space twice"),
    ("[space", "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_spaces_are_refused_in_one_line_and_nothing_is_touched(tmp_path, capsys, text, message):
    space, out = write(tmp_path / "space.toml", text), tmp_path / "out"
    command = ["tune", "--method", "er", "--trials", "2", *SMALL, "--space", str(space), "--out", str(out)]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and str(space) in line and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", "0"), "trials is 0; wanted an integer of at least 1"),
        (("--seeds", "1,1"), "seeds are [1, 1]; wanted at least one, and each once"),
        (("--set", "seed=3"), "seed is set to 3 for all trials; wanted --seeds"),
        (("--set", "evaluate_on=test"), "evaluate_on is 'test', but settings are chosen on held-out training images"),
        (("--set", "lr=0.1"), "options.lr is set to 0.1 and is searched, too; wanted one of them"),
        (("--set", "stream.validation=null"), "stream.validation is None"),
        (("--validation", "0.001"), "validation is 0.001, which holds out 0 of the"),
        (("--first-tasks", "9"), "first_tasks is 9, and digits has 5 tasks"),
        (("--space", "nowhere.toml"), "cannot read the space nowhere.toml"),
        (
            ("--set", "per_class_cap=null", "--method", "mose"),
            "options.per_class_cap is null, which best.toml cannot hold",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line_and_nothing_is_touched(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["tune", "--method", "er", "--trials", "2", *SMALL, "--out", str(out), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not out.exists()


def test_without_optuna_there_is_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert main(["tune", "--method", "er", "--trials", "2", *SMALL, "--out", str(tmp_path / "out")]) == 2
    assert "first: pip install 'mose-fast[tune]'" in capsys.readouterr().err


def test_a_corner_that_no_run_could_have_is_found(tmp_path):
    axes = read_space(write(tmp_path / "s.toml", "[space]\nbuffer_batch = { low = 8, high = 500 }"), "er")
    with pytest.raises(ConfigError, match=r"memory is 64, smaller than options.buffer_batch, 500"):
        check_values(axes, {"method": "er", "memory": 64})
    assert with_changes(None, {"method": "er"}) == RunConfig.create(method="er")
    assert np.isfinite(check_values(axes, {"method": "er"}).options.lr)
