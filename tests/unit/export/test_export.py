"""An export classifies as the trained learner does, says what it is, and refuses what it cannot
use.
"""

import errno
import itertools
import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mose_fast import streams, train
from mose_fast.app.cli import main
from mose_fast.export import Classifier, DeployedNetwork, ExportError, classify_files, export_run
from mose_fast.export.from_run import _programs, restore
from mose_fast.methods import METHODS
from mose_fast.runs.files import LOCK
from mose_fast.settings.run import RunConfig
from mose_fast.train import Listener


class Keep(Listener):
    """Holds on to the learner of a run, which an export must equal."""

    def on_start(self, config, stream, learner, batch, batches):
        self.learner = learner


class Finished:
    """A finished run: its folder, results, stream and trained learner."""

    def __init__(self, folder, **settings):
        stream = {"name": "digits", "limit_per_task": 20, "class_order_seed": 1}
        config = RunConfig.create(stream=stream, width=2, memory=64, device="cpu", **settings)
        keep = Keep()
        self.folder, self.results = folder, train.run(config, out=folder, listeners=[keep])
        self.stream, self.learner = streams.create(config.stream), keep.learner


@pytest.fixture(scope="module")
def finished(tmp_path_factory, one_thread_a_module):
    """A function from a method's name to a finished run of it, the same for every test."""
    runs = {}

    def get(method="mose", **options):
        key = (method, *options.items())
        if key not in runs:
            folder = tmp_path_factory.mktemp("runs") / method
            runs[key] = Finished(folder, method=method, options={"buffer_batch": 12, **options})
        return runs[key]

    return get


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    """An export of MOSE that holds safetensors alone."""
    return export_run(finished().folder, tmp_path_factory.mktemp("export") / "mose")


@pytest.fixture
def copy(exported, tmp_path):
    """The export once more, to be damaged."""
    return shutil.copytree(exported, tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "which"), [("mose", "mean"), ("er", "teacher")])
def test_an_export_has_the_weights_that_predict(method, which, finished):
    run = finished(method, predict_with=which, teacher_rate=0.3, teacher_statistics="running")
    found = Classifier.load(export_run(run.folder)).predict(run.stream.x_test)
    assert torch.equal(found.head_index, run.learner.predict(run.stream.x_test))
    stem = run.learner.network.stem.conv.weight
    (average,) = (a for n, a in run.learner.model.teacher.tensors().items() if n == "stem.conv.weight")
    wanted = average if which == "teacher" else (stem + average) / 2
    assert torch.equal(Classifier.load(run.folder / "export").network.backbone.stem.conv.weight, wanted)


def true_distances(run):
    """Squared distances of the last expert by the training network, [N, K], and what it predicts,
    of all test images.
    """
    features = run.learner.outputs(run.stream.x_test)[0]
    return run.learner.class_means().distances(features)[-1], run.learner.predict(run.stream.x_test)


def margins(distances):
    return distances.topk(2, largest=False).values.diff(dim=1)[:, 0]


def test_a_run_of_a_card_is_restored_here(finished, tmp_path):
    """In the precision that it had there, and although its steps were captured and its views
    DALI's.
    """
    folder = shutil.copytree(finished().folder, tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    results["config"] |= {"device": "cuda", "step": "captured", "feed": "dali"}
    results["resolved"] |= {"device": "cuda", "precision": "bf16", "step": "captured"}
    assert restore(folder, results).precision == ("bf16", "")
    results["resolved"]["precision"] = "fp32"
    assert restore(folder, results).precision == ("fp32", "")


# What an export computes


def test_distances_and_labels_are_those_of_the_trained_learner(finished, exported):
    run = finished()
    distances, predicted = true_distances(run)
    found = Classifier.load(exported).predict(run.stream.x_test)
    torch.testing.assert_close(found.scores.double(), distances, rtol=0, atol=1e-4)
    assert torch.equal(found.head_index, predicted)
    assert torch.equal(found.label, run.stream.original_label(predicted))
    assert not torch.equal(found.label, found.head_index)
    torch.testing.assert_close(found.margin.double(), margins(distances), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "head"), [("er", "linear"), ("er-aml", "cosine"), ("bic", "linear"), ("lucir", "scaled_cosine")]
)
def test_methods_that_predict_by_a_head_export_it(finished, tmp_path, method, head):
    run = finished(method)
    classifier = Classifier.load(export_run(run.folder, tmp_path))
    assert classifier.card["head"] == head
    found = classifier.predict(run.stream.x_test)
    torch.testing.assert_close(found.scores, run.learner.outputs(run.stream.x_test)[1][-1], rtol=0, atol=1e-4)
    assert torch.equal(found.head_index, run.learner.predict(run.stream.x_test))
    assert (found.margin >= 0).all()


def test_files_are_resized_as_in_training(tmp_path):
    rng = np.random.default_rng(0)
    for label, name in enumerate(("dark", "bright")):
        for part, count in (("train", 6), ("test", 3)):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number in range(count):
                size = (*rng.integers(17, 60, 2), 3)
                pixels = (rng.integers(0, 128, size) + 128 * label).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{number}.png")
    stream = {"name": str(tmp_path / "photos"), "resize": 16, "tasks": 1, "batch": 4}
    how = {"method": "er", "width": 2, "memory": 12, "device": "cpu", "options": {"buffer_batch": 4}}
    config = RunConfig.create(stream=stream, **how)
    keep = Keep()
    train.run(config, out=tmp_path / "run", listeners=[keep])
    classifier = Classifier.load(export_run(tmp_path / "run", classifier="ncm"))
    assert classifier.card["resize"] == 16 and classifier.image_size == (16, 16)
    images = streams.create(config.stream).x_test
    found = list(classify_files(classifier, [tmp_path / "photos" / "test"]))
    assert [row["head_index"] for row in found] == keep.learner.predict(images, classifier="ncm").tolist()
    wanted = classifier.predict(images).scores.min(1).values.tolist()
    assert [row["score"] for row in found] == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"resize is 32 and image_size \(16, 16\)"):
        Classifier(classifier.card | {"resize": 32}, {})


@pytest.mark.parametrize(
    ("classifier", "expert"),
    [
        *itertools.product(("ncm", "lda_adjusted"), ("last", "mean", "all")),
        *(("lda", "all"), ("ridge", "mean"), ("ncm_linear", "last"), ("linear", "mean"), ("adjusted", "last")),
    ],
)
def test_every_classifier_is_exported(finished, tmp_path, classifier, expert):
    run = finished(test_mirror=True, mirror="on")
    found = Classifier.load(export_run(run.folder, tmp_path, classifier=classifier, expert=expert))
    assert found.card["accuracy"] == run.results["acc"].get(classifier, {}).get(found.card["expert"])
    predicted = found.predict(run.stream.x_test)
    wanted = run.learner.scores(run.stream.x_test, classifier, expert)
    same = -predicted.scores if classifier == "ncm" else predicted.scores
    torch.testing.assert_close(same.double(), wanted.double(), rtol=1e-4, atol=1e-3)
    assert (predicted.head_index == wanted.argmax(-1)).double().mean() > 0.99


class _Pixels(torch.nn.Module):
    """In place of the backbone, whose conversion to ONNX takes long."""

    def features(self, x):
        flat = x.flatten(1)
        return torch.stack([flat[:, e : e + 16].abs() for e in range(4)])


@pytest.mark.slow
def test_all_experts_with_mirrors_in_onnx(finished, tmp_path):
    pytest.importorskip("onnxscript")
    run = finished(test_mirror=True, mirror="on")
    classifier = Classifier.load(export_run(run.folder, tmp_path, classifier="lda_adjusted", expert="all"))
    classifier.network.backbone = _Pixels()
    (tmp_path / "model.onnx").write_bytes(_programs(classifier, ["onnx"])["model.onnx"])
    images = run.stream.x_test[:32]
    wanted = classifier.predict(images)
    head_index, _, scores = _onnx_program(tmp_path, "logits")(images)
    torch.testing.assert_close(scores, wanted.scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(head_index, wanted.head_index)
    assert not torch.equal(scores, classifier.predict(images[:16].flip(2).repeat(2, 1, 1, 1)).scores)


def test_any_method_exports_class_means(finished, tmp_path):
    run = finished("er")
    found = Classifier.load(export_run(run.folder, tmp_path, classifier="ncm")).predict(run.stream.x_test)
    torch.testing.assert_close(found.scores.double(), true_distances(run)[0], rtol=0, atol=1e-4)
    assert torch.equal(found.head_index, run.learner.predict(run.stream.x_test, classifier="ncm"))


def test_predictions_of_a_methods_own_are_refused(finished, tmp_path, monkeypatch):
    """An export would predict otherwise than the run."""
    monkeypatch.setattr(METHODS["mose"], "outputs", lambda self, x: self.model.outputs(x, self.after_step))
    with pytest.raises(ExportError, match=r"method 'mose' predicts by outputs\(\) or predict\(\) of its own"):
        export_run(finished().folder, tmp_path / "export")


def test_a_class_without_a_sample_is_never_predicted(exported):
    classifier = Classifier.load(exported)
    head = classifier.network.head
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8))
    best = int(classifier.predict(images).head_index[0])
    head.known[best] = False
    found = classifier.predict(images)
    assert torch.isinf(found.scores[:, best]).all()
    assert best not in found.head_index.tolist()
    head.known[:] = False
    head.known[3] = True
    found = classifier.predict(images)
    assert found.head_index.tolist() == [3] * 5
    assert torch.isinf(found.margin).all()


def _torch_program(folder):
    return torch.export.load(folder / "model.pt2").module()


def _onnx_program(folder, scores="distances"):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession((folder / "model.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["head_index", "label", scores]
    return lambda images: map(torch.from_numpy, session.run(None, {"images": images.numpy()}))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "load"), [("torch", _torch_program), ("onnx", _onnx_program)])
def test_programs_give_the_same_for_any_number_of_images(finished, tmp_path, name, load):
    if name == "onnx":
        pytest.importorskip("onnxscript")
    run = finished()
    program = load(export_run(run.folder, tmp_path, formats=[name]))
    distances, predicted = true_distances(run)
    for count in (1, 2, 7, len(predicted)):
        head_index, label, scores = program(run.stream.x_test[:count])
        torch.testing.assert_close(scores.double(), distances[:count], rtol=0, atol=1e-4)
        assert torch.equal(head_index, predicted[:count])
        assert torch.equal(label, run.stream.original_label(predicted[:count]))


# What it says about itself


def test_card_says_what_the_classifier_is(finished, exported):
    run, card = finished(), json.loads((exported / "card.json").read_text())
    results = run.results
    predicted = true_distances(run)[1]
    hits = (predicted == run.stream.y_test).double()
    right = [float(hits[run.stream.test_rows(task)].mean()) for task in range(5)]
    assert card["accuracy_by_task"] == pytest.approx(right)
    assert card["accuracy"] == pytest.approx(sum(right) / 5)
    assert card["parameters"] == {"backbone": results["parameters"]["deployed"], "head": 0}
    # Ten float32 means of 16 numbers, and ten flags.
    assert card["bytes"]["head"] == 10 * 16 * 4 + 10
    assert card["class_order"] == list(run.stream.class_order)
    assert card["class_names"] == list(run.stream.class_names)
    assert card["run"]["weights_sha256"] == run.learner.weights_hash()
    assert card["run"]["commit"] == results["commit"]
    assert set(card["files"]) == {"model.safetensors"} and card["expert"] == "4"
    assert card["files"]["model.safetensors"]["bytes"] == (exported / "model.safetensors").stat().st_size


def test_full_width_has_the_parameters_of_the_paper():
    network = DeployedNetwork(64, "ncm", range(100), (0.5,) * 3, (0.5,) * 3)
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_168_832
    assert sum(buffer.numel() for buffer in network.head.buffers()) == 100 * 512 + 100


def test_nothing_but_card_and_tensors_is_read(exported, finished, monkeypatch):
    monkeypatch.setattr("pickle.Unpickler", None)
    monkeypatch.setattr(torch, "load", None)
    images = finished().stream.x_test[:3]
    assert len(Classifier.load(exported).predict(images).label) == 3
    assert sorted(os.listdir(exported)) == ["card.json", "model.safetensors"]


# The commands


def test_commands_export_and_predict(finished, tmp_path, capsys):
    run = finished()
    assert main(["export", str(run.folder), "--out", str(tmp_path / "e")]) == 0
    assert f"{run.results['parameters']['deployed']:,} parameters" in capsys.readouterr().out
    (tmp_path / "images" / "deeper").mkdir(parents=True)
    files = [tmp_path / "single.png", tmp_path / "images" / "a.bmp", tmp_path / "images" / "deeper" / "b.png"]
    for row, file in enumerate(files):
        Image.fromarray(run.stream.x_test[row].numpy()).save(file)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    distances, predicted = true_distances(run)

    assert main(["predict", str(tmp_path / "e"), str(files[0]), str(tmp_path / "images")]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [str(file) for file in files]
    assert [line[1] for line in lines] == [run.stream.class_names[h] for h in predicted[:3].tolist()]
    assert [int(line[2]) for line in lines] == run.stream.original_label(predicted[:3]).tolist()
    assert [float(line[3]) for line in lines] == pytest.approx(margins(distances[:3]).tolist(), abs=2e-4)

    assert main(["predict", "--json", str(tmp_path / "e"), str(files[0])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"path", "name", "label", "head_index", "score", "margin"}
    assert (found["path"], found["head_index"]) == (str(files[0]), int(predicted[0]))
    assert found["score"] == pytest.approx(float(distances[0].min()), abs=1e-4)


def test_overwrite_replaces_the_export_and_nothing_else(finished, copy, capsys):
    run = finished().folder
    (copy / "mine.txt").write_text("kept")
    before = (copy / "card.json").read_text()
    assert main(["export", str(run), "--out", str(copy), "--format", "torch"]) == 2
    assert f"{copy} is already used" in capsys.readouterr().err
    assert (copy / "card.json").read_text() == before
    assert main(["export", str(run), "--out", str(copy), "--format", "torch", "--overwrite"]) == 0
    assert sorted(os.listdir(copy)) == ["card.json", "mine.txt", "model.pt2"]
    assert main(["predict", str(copy), "x.png"]) == 2
    assert "no model.safetensors; export again with --format safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["card.json", "model.safetensors"])
def test_what_a_killed_export_was_writing_does_not_keep_the_next_out(finished, tmp_path, name):
    folder = tmp_path / "e"
    folder.mkdir()
    (folder / f".{name}.ab0_xyz9").touch()
    (folder / LOCK).touch()
    export_run(finished().folder, folder)
    assert sorted(os.listdir(folder)) == ["card.json", "model.safetensors"]
    (folder / "card.json").unlink()
    (folder / "model.safetensors").unlink()
    (folder / f".{name}.backup").touch()
    with pytest.raises(ExportError, match="already used"):
        export_run(finished().folder, folder)


# What it refuses


def test_unusable_runs_are_refused(finished, tmp_path, capsys):
    def refused(run, *more):
        assert main(["export", str(run), "--out", str(tmp_path / "out"), *more]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    run = finished().folder
    (tmp_path / "foreign").mkdir()
    assert "no run (no config.json)" in refused(tmp_path / "foreign")
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "results.json").unlink()
    assert "not finished (no results.json)" in refused(unfinished)
    without = shutil.copytree(run, tmp_path / "without")
    shutil.rmtree(without / "checkpoints")
    assert "holds no checkpoint" in refused(without)
    mixed = shutil.copytree(run, tmp_path / "mixed")
    for checkpoint in (mixed / "checkpoints").iterdir():
        checkpoint.unlink()
    first = min((run / "checkpoints").iterdir())
    shutil.copy(first, mixed / "checkpoints")
    assert f"{first.name} does not hold the weights" in refused(mixed)
    (mixed / "checkpoints" / first.name).write_bytes(first.read_bytes()[:-100])
    assert "truncated, damaged or not a checkpoint" in refused(mixed)
    assert "format is 'onxx'; did you mean 'onnx'" in refused(run, "--format", "safetensors,onxx")
    assert "classifier is 'mean'" in refused(run, "--classifier", "mean")


def test_a_run_whose_methods_file_is_gone_says_so(finished, tmp_path, capsys):
    run = shutil.copytree(finished().folder, tmp_path / "run")
    for name in ("config.json", "results.json"):
        values = json.loads((run / name).read_text())
        (values if name == "config.json" else values["config"])["method"] = "/gone/ema.py:Ema"
        (run / name).write_text(json.dumps(values))
    assert main(["export", str(run)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"mose-fast: {run}: config.json: method is '/gone/ema.py:Ema', but there is no file /gone/ema.py"
    )
    assert "truncated" not in told and len(told.splitlines()) == 1


def test_the_folder_of_a_run_is_told_from_that_of_an_export(finished, tmp_path, capsys):
    run = shutil.copytree(finished().folder, tmp_path / "run")
    assert main(["predict", str(run), "x.png"]) == 2
    told = capsys.readouterr().err
    assert (
        f"the folder of a run without an export; make one with: mose-fast export {run}; then name {run}/export" in told
    )
    export_run(run)
    assert main(["predict", str(run), "x.png"]) == 2
    assert f"{run} is the folder of a run; wanted that of its export, {run}/export\n" in capsys.readouterr().err


def test_a_file_is_no_folder(finished, exported, capsys):
    card = exported / "card.json"
    assert main(["export", str(finished().folder), "--out", str(card)]) == 2
    assert f"cannot write the export into {card}: Not a directory" in capsys.readouterr().err
    assert main(["predict", str(card), "x.png"]) == 2
    assert f"{card} is a file; wanted the folder of an export" in capsys.readouterr().err


def test_inner_experts_and_stored_samples_are_refused(finished, tmp_path):
    run = finished()
    with pytest.raises(ExportError, match=r"by ncm of expert 2; an export holds neither .*--classifier and --expert"):
        export_run(run.folder, tmp_path, expert=2)
    with pytest.raises(ExportError, match="by residual of expert 4; an export holds neither stored samples"):
        export_run(run.folder, tmp_path, classifier="residual")
    with pytest.raises(ExportError, match="expert is 'all' for classifier 'linear'; known: last, mean"):
        export_run(run.folder, tmp_path, classifier="linear", expert="all")
    assert Classifier.load(export_run(run.folder, tmp_path, classifier="linear")).card["head"] == "linear"


def test_a_cosine_head_is_not_averaged(finished, tmp_path):
    with pytest.raises(ExportError, match="a cosine head cannot be averaged with class means"):
        export_run(finished("er-aml").folder, tmp_path, classifier="ncm_linear")


def test_missing_onnx_is_told_with_its_remedy(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ExportError, match=r"pip install 'mose-fast\[onnx\]'"):
        export_run(finished().folder, tmp_path / "out", formats=["onnx"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_leaves_the_earlier_export_or_says_that_this_one_is_broken_off(finished, copy, monkeypatch, writes):
    done = []

    def full(descriptor):
        if len(done) == writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr("mose_fast._files.os.fsync", full)
        with pytest.raises(ExportError, match=f"cannot write the export into {copy}: No space left on device"):
            export_run(finished().folder, copy, overwrite=True)
    if writes == 0:
        Classifier.load(copy)
        return
    with pytest.raises(ExportError, match=f"the export in {copy} was broken off; make it again"):
        Classifier.load(copy)
    export_run(finished().folder, copy)
    Classifier.load(copy)


def test_overwrite_deletes_nothing_that_no_export_wrote(finished, tmp_path):
    for name in ("model.onnx", "card.json"):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text('{"mine": 1}')
        with pytest.raises(ExportError, match=f"{out} holds {name}, but no card.json of an export of mose-fast"):
            export_run(finished().folder, out, overwrite=True)
        assert os.listdir(out) == [name]
        assert (out / name).read_text() == '{"mine": 1}'


def _flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def _change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda e: _flip(e / "model.safetensors"), "model.safetensors is damaged"),
        (lambda e: (e / "model.safetensors").unlink(), "cannot read .*model.safetensors"),
        (lambda e: (e / "card.json").unlink(), "there is no export in .*mose-fast export RUN"),
        (lambda e: (e / "card.json").write_text('{"mose_'), "card.json is truncated or no JSON"),
        (lambda e: (e / "card.json").write_text("[1]"), "card.json is not the card of an export"),
        (lambda e: _change(e / "card.json", mose_fast_export=2), "format 2; .* update mose-fast"),
        (lambda e: _change(e / "card.json", width=3), "is damaged .*another network"),
        (lambda e: _change(e / "card.json", class_names=["a"]), "is damaged .*class_names has 1 entries; wanted 10"),
        (lambda e: _change(e / "card.json", normalisation={}), "is damaged .*mean"),
    ],
)
def test_damaged_exports_are_refused(copy, damage, message):
    damage(copy)
    with pytest.raises(ExportError, match=message):
        Classifier.load(copy)


def test_unusable_images_are_refused(exported, tmp_path, capsys):
    def refused(*paths):
        assert main(["predict", str(exported), *map(str, paths)]) == 2
        return capsys.readouterr().err

    Image.new("RGB", (24, 28)).save(tmp_path / "small.png")
    assert f"{tmp_path / 'small.png'} is 28x24 (height x width); wanted 32x32" in refused(tmp_path / "small.png")
    assert "cannot read nowhere.png: No such file" in refused("nowhere.png")
    (tmp_path / "empty").mkdir()
    assert "holds no images (.jpg, .jpeg, .png, .bmp, .webp, .tif, .tiff)" in refused(tmp_path / "empty")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    assert "broken.png is a damaged or truncated image" in refused(tmp_path / "broken.png")
    Image.new("I;16", (32, 32)).save(tmp_path / "deep.png")
    assert "wanted 8 bits a channel" in refused(tmp_path / "deep.png")


def test_unusable_arrays_are_refused(exported):
    classifier = Classifier.load(exported)
    with pytest.raises(ValueError, match=r"float32 of shape \[1, 32, 32, 3\]; wanted torch.uint8 \[N, 32, 32, 3\]"):
        classifier.predict(torch.zeros(1, 32, 32, 3))
    with pytest.raises(ValueError, match=r"shape \[1, 3, 32, 32\]"):
        classifier.predict(np.zeros((1, 3, 32, 32), np.uint8))
    with pytest.raises(ValueError, match="images is a masked array; wanted a plain one"):
        classifier.predict(np.ma.array(np.zeros((1, 32, 32, 3), np.uint8)))
    assert len(classifier.predict(np.zeros((0, 32, 32, 3), np.uint8)).label) == 0
    assert list(classify_files(classifier, [])) == []
