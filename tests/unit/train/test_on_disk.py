"""Runs on images that stay on the disk: bit by bit those on images in memory; damaged files."""

from __future__ import annotations

import json

import pytest

from build_tools.image_folder import write_folder
from mose_fast.runs.results import schema
from mose_fast.streams import StreamError
from mose_fast.train import Interrupted, resume, run
from tests.listeners import Losses, StopAt
from tests.unit.train.small import outcome

SETTINGS = {"width": 1, "memory": 24, "buffer_batch": 8, "device": "cpu", "evaluate_every": 3, "anytime_images": 8}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two tasks of three batches; 12 test images."""
    return write_folder(tmp_path_factory.mktemp("data") / "photos", classes=4, train=12, test=3, side=16)


@pytest.fixture
def damaged(tmp_path):
    """The same with two damaged training images and a damaged test image, and their paths."""
    made = write_folder(tmp_path / "damaged", classes=4, train=12, test=3, side=16)
    files = ["test/class0000/0001.jpg", "train/class0000/0003.jpg", "train/class0003/0011.jpg"]
    for name in files:
        (made / name).write_bytes((made / name).read_bytes()[:300])
    return made, files


def stream(folder, **how):
    return {"name": str(folder), "tasks": 2, "batch": 8, "resize": 8, **how}


# MOSE's views, herded exemplars, and the joint stream.
@pytest.mark.parametrize("method", ["mose", "lucir", "joint"])
@pytest.mark.filterwarnings("ignore")
def test_disk_and_memory_give_the_same_bits(photos, method):
    there, here = (run(stream=stream(photos, load=load), method=method, **SETTINGS) for load in ("disk", "memory"))
    assert outcome(there) == outcome(here) and there["skipped"] == []


@pytest.mark.filterwarnings("ignore:memory is")
def test_damaged_files_stop_a_run_that_may_go_on_without_them(tmp_path, damaged):
    made, files = damaged
    out = tmp_path / "run"
    with pytest.raises(StreamError, match=r"train/class0000/0003.jpg is a damaged or truncated image"):
        run(stream=stream(made, load="disk"), method="er", out=out, checkpoint_every=1, **SETTINGS)
    config = json.loads((out / "config.json").read_text())
    config["stream"]["on_error"] = "skip"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="left out"):
        assert resume(out)["skipped"] == files


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:memory is")
@pytest.mark.parametrize("batch", [8, 1])
def test_a_resumed_run_leaves_out_the_same_files(tmp_path, damaged, batch):
    made, files = damaged
    settings = {**SETTINGS, "method": "er", "memory": 48, "stream": stream(made, on_error="skip", batch=batch)}
    settings["evaluate_every"] = 16 // batch  # within a task
    losses = Losses()
    with pytest.warns(UserWarning, match="left out") as said:
        whole = run(**settings, listeners=[losses])
    assert sorted(files) == sorted(name for name in files if any(name in str(w.message) for w in said))
    assert whole["skipped"] == files
    # Each image that is left fills a slot once; a batch without an image trains nothing.
    assert whole["kept"]["images"] == 46
    trained = [loss for _, loss in losses.told if loss is not None]
    assert len(losses.told) == 48 // batch and whole["steps"] == len(trained) == (46 if batch == 1 else 6)
    counted = [sum(row) for row in whole["confusion_by_task"]]
    assert counted == [5, 6]
    classifier, expert = whole["resolved"]["classifier"], whole["resolved"]["expert"]
    right = sum(row.get(str(label), 0) for label, row in enumerate(whole["confusion_by_class"]))
    assert whole["sample_acc"][classifier][expert] == pytest.approx(right / 11)
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(whole, schema())
    for stop in range(1, 48 // batch, 2 if batch == 8 else 30):
        out = tmp_path / f"stopped {stop}"
        with pytest.raises(Interrupted), pytest.warns(UserWarning, match="left out|memory"):
            run(**settings, out=out, listeners=[StopAt(stop)])
        with pytest.warns(UserWarning, match="left out|memory"):
            resumed = resume(out)
        assert resumed["resumed"] == 1 and outcome(resumed) == outcome(whole)


@pytest.mark.filterwarnings("ignore")
def test_a_task_without_a_test_image_that_can_be_read_is_refused(tmp_path):
    made = write_folder(tmp_path / "damaged", classes=2, train=4, test=2, side=16)
    for file in (made / "test").rglob("*.jpg"):
        file.write_bytes(b"no image")
    with pytest.raises(StreamError, match=r"all of the 4 images that are needed are damaged"):
        run(stream={"name": str(made), "on_error": "skip"}, method="er", width=1, memory=8, buffer_batch=8)
