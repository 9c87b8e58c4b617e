"""What a wrong flag, name or value is told: one line, with what was probably meant."""

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "--lr", "0.1"), "mose-fast run: --lr is not an argument; wanted --set lr=VALUE"),
        (
            ("sweep", "--out", "x", "--learning_rate", "1"),
            "mose-fast sweep: --learning_rate is not an argument; wanted --set lr=VALUE",
        ),
        (("run", "--mem", "100"), "mose-fast run: --mem is not an argument; did you mean --memory?"),
        (("run", "--batch-size", "10"), "mose-fast run: --batch-size is not an argument; did you mean --batch?"),
        (("run", "--dataset", "digits"), "mose-fast run: --dataset is not an argument; did you mean --stream?"),
        (
            ("run", "--temprature", "1"),
            "mose-fast run: --temprature is not an argument; wanted --set temperature=VALUE",
        ),
        (("run", "--overwite"), "mose-fast run: --overwite is not an argument; did you mean --overwrite?"),
        (("resume", "x", "--lr", "1"), "mose-fast resume: --lr is not an argument"),
        (("resume", "x", "y"), "mose-fast resume: y is not an argument"),
        (("--sedd",), "mose-fast: the following arguments are required: COMMAND"),
        (("run", "--memory", "many"), "mose-fast run: argument --memory: invalid int value: 'many'"),
        (("export",), "mose-fast export: the following arguments are required: RUN"),
    ],
)
def test_a_wrong_flag_takes_a_line(call, arguments, line):
    code, out, err = call(*arguments)
    command = line.partition(":")[0]
    assert (code, out, err) == (2, "", f"{line}; see {command} --help\n")


@pytest.mark.parametrize(
    ("assigned", "meant"),
    [
        ("learning_rate=1", "lr"),
        ("batch_size=5", "stream.batch"),
        ("mem_size=5", "memory"),
        ("dataset=x", "stream.name"),
    ],
)
def test_names_of_other_software_are_known(call, assigned, meant):
    code, _, err = call("run", "--set", assigned)
    assert code == 2
    assert err == f"mose-fast: --set {assigned.partition('=')[0]} is not a setting; did you mean {meant!r}?\n"


@pytest.mark.parametrize("values", ["[1,2]", "{a=1}", '"a,b"', "'x'"])
def test_values_of_a_grid_that_are_not_plain_point_to_a_file(call, tmp_path, values):
    code, _, err = call("sweep", "--grid", f"per_class_cap={values}", "--out", tmp_path / "sweep")
    assert code == 2
    assert (
        err.startswith(f"mose-fast: --grid per_class_cap is {values!r}; wanted plain values")
        and "[grid] of a .toml file" in err
    )
    assert not (tmp_path / "sweep").exists()


def test_a_path_with_a_comma_in_a_grid_points_to_a_file(call, tmp_path):
    (tmp_path / "a,b.npz").touch()
    code, _, err = call("sweep", "--grid", f"stream.name={tmp_path / 'a,b.npz'}", "--out", tmp_path / "sweep")
    assert code == 2 and "a value that itself has a comma" in err


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (
            np.array(["cat", "dog"] * 4),
            "is <U3; wanted integer labels: names, y = numpy.unique(y, return_inverse=True) numbers names",
        ),
        (
            np.array([0, 1, np.nan, 1, 0, np.nan, 0, 1]),
            "contains NaN, first at row 2 (2 in all); wanted integer labels: leave these",
        ),
        (np.array([0.0, 1.0] * 4), "is float64; wanted integer labels: y.astype('int64') converts whole numbers"),
        (np.full(8, 3), "y_train holds only one class, 3; wanted at least two classes"),
    ],
)
def test_unusable_labels_of_a_file_are_told_with_its_name(call, tmp_path, labels, told):
    images = np.zeros((8, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    code, _, err = call("run", "--stream", tmp_path / "mine.npz", "--out", tmp_path / "run")
    assert code == 2
    assert err.startswith(f"mose-fast: {tmp_path / 'mine.npz'}: y_train ") and told in err
    assert not (tmp_path / "run").exists()
