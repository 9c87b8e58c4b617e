"""Grids expand to the runs that were meant, or are refused before anything starts."""

import pytest

from mose_fast.experiments.grid import axes_of, grid_cells, read_axes, read_file, read_seeds
from mose_fast.settings.run import ConfigError, RunConfig


def test_product_with_the_seed_slowest_and_last_in_the_name():
    found = grid_cells(
        read_axes(["memory=200,500", "preset=released,paper"], ["mose"]) | {"seed": (0, 1)}, {"width": 8}
    )
    assert [cell.name for cell in found[:5]] == [
        "memory-200_preset-released_seed-0",
        "memory-200_preset-paper_seed-0",
        "memory-500_preset-released_seed-0",
        "memory-500_preset-paper_seed-0",
        "memory-200_preset-released_seed-1",
    ]
    assert len(found) == 8
    assert found[5].config == RunConfig.create("paper", memory=200, seed=1, width=8)
    assert found[5].label == "memory=200 preset=paper"


def test_values_are_read_as_set_reads_them():
    axes = read_axes(["per_class_cap=7,null", "expert=1,mean", "lr=1e-3,0.01", "stream.batch=5"], ["mose"])
    assert axes == {
        "options.per_class_cap": (7, None),
        "options.expert": ("1", "mean"),
        "options.lr": (0.001, 0.01),
        "stream.batch": (5,),
    }
    assert axes_of({"stream": {"batch": [5]}, "seed": "0-2", "student": ["null", 2]}, ["mose"], "grid") == {
        "stream.batch": (5,),
        "seed": (0, 1, 2),
        "options.student": (None, 2),
    }


@pytest.mark.parametrize(("text", "seeds"), [("0-3", (0, 1, 2, 3)), ("5", (5,)), ("0,2,7-8", (0, 2, 7, 8))])
def test_seeds(text, seeds):
    assert read_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "0-"])
def test_seeds_that_mean_nothing(text):
    with pytest.raises(ConfigError, match="wanted numbers and ranges"):
        read_seeds(text)


def test_preset_axis_keeps_what_the_base_changes_and_takes_the_rest_from_the_preset():
    base = RunConfig.create("released", options={"temperature": 0.5})
    released, paper = grid_cells({"preset": ("released", "paper")}, {}, base)
    assert released.config == base
    assert paper.config == RunConfig.create("paper", options={"temperature": 0.5})


def test_methods_have_their_own_options():
    found = grid_cells(read_axes(["method=er,mose"], ["er", "mose"]), {"memory": 100})
    assert [cell.config.method for cell in found] == ["er", "mose"]
    assert type(found[0].config.options) is not type(found[1].config.options)


def test_file(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text('width = 8\n[stream]\nlimit_per_task = 60\n[grid]\nmemory = [100, 200]\nseed = "0-1"\n')
    values, grid = read_file(path)
    assert values == {"width": 8, "stream": {"limit_per_task": 60}}
    assert axes_of(grid, ["mose"], "[grid]") == {"memory": (100, 200), "seed": (0, 1)}


def test_file_that_is_none(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text("grid = 3")
    with pytest.raises(ConfigError, match=r"sweep.toml: wanted settings and a table \[grid\]"):
        read_file(path)
    with pytest.raises(ConfigError, match=r"cannot read the sweep .*missing\.toml"):
        read_file(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("axes", "changes", "message"),
    [
        ({}, {}, "the grid is empty"),
        ({"memory": ()}, {}, "no values for memory"),
        ({"memory": (64, 64)}, {}, "memory = 64 twice"),
        ({"memory": (64,)}, {"memory": 70}, "memory is set to 70 and is in the grid"),
        ({"memory": (64, 0), "seed": (3,)}, {}, "in the cell memory=0 seed=3: memory is 0; wanted an integer"),
        ({"preset": ("released", "papper")}, {}, "did you mean 'paper'"),
        ({"device": ("cpu", "cuda")}, {}, "device is in the grid"),
    ],
)
def test_unusable_grids(axes, changes, message):
    with pytest.raises(ConfigError, match=message):
        grid_cells(axes, changes)


@pytest.mark.parametrize(
    ("texts", "message"), [(["memory"], "wanted NAME=VALUE"), (["memory=64", "memory=128"], "names memory twice")]
)
def test_unusable_axes(texts, message):
    with pytest.raises(ConfigError, match=message):
        read_axes(texts, ["mose"])
    with pytest.raises(ConfigError, match="memory is 64; wanted a list"):
        axes_of({"memory": 64}, ["mose"], "grid")


def test_folders_of_the_same_name_are_told_apart(tmp_path):
    names = [str(tmp_path / "a" / "digits.npz"), str(tmp_path / "b" / "digits.npz")]
    assert [cell.name for cell in grid_cells({"stream.name": tuple(names)}, {})] == [
        "stream-digits_1",
        "stream-digits_2",
    ]
