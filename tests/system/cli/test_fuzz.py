"""Hundreds of generated bad inputs: none ends in a traceback, and none changes a folder that was
there.

Inputs are valid ones, changed at random by a seed. Those that turn out valid are stopped where the
command would first write.
"""

import contextlib
import io
import json
import random
import shutil
import string
import traceback
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import mose_fast
from mose_fast.app.cli import main
from mose_fast.errors import MoseFastError
from mose_fast.export import Classifier
from mose_fast.learner.named_settings import all_settings
from mose_fast.settings.run import RunConfig
from mose_fast.streams import from_arrays
from tests.declared import outside
from tests.tiny import TINY

DECLARED = all_settings("mose").values()
FLAGS = ("--config", *(f"--{setting.flag}" for setting in DECLARED if setting.flag and setting.type != "bool"))
OPTIONS = tuple(setting.field for setting in DECLARED if setting.name.startswith("options."))
SETTINGS = (*OPTIONS, "evaluation_batch", "init_seed", "stream.resize")
NUMBERS = ("-1", "0", "1", "3", "007", "1e3", "1e300", "-1e300", "nan", "inf", "9" * 30, "9" * 400, "9" * 5000)
NAMES = ("../nowhere", ".", "nowhere/at/all", "file.npz", "file.py:Name", "auto", "none", "mosse", "er", "gdumb")
LISTS = ("0-", "0-3", "3-0", "0-99999999999", "a,b", ",", "0.1,0.1", "a=b=c", "--", "%s %d {}")
LETTERS = ("", " ", "x" * 300, "x" * 5000, "[" * 100_000, "²", "日本", "cuda", "cuda:0", "cuda:-1", "cuda:²")
TEXTS = (*NUMBERS, *NAMES, *LISTS, *LETTERS, "paper", "null", "true", "[1, 2]", "{}", '"a')
# What a setting of any kind does not hold, and what none does.
UNFIT = {repr(value): value for setting in DECLARED for value, _ in outside(setting)}
VALUES = (*UNFIT.values(), 1, 2, 3, -0.0, 1e-320, -float("inf"), -(2**63), 10**400, " ", "auto", "mose", "er", "last")
VALUES += (False, "日本", "../no", "cuda:999", [], {}, [1], [[[]]], {"a": 1}, {"name": "digits"})
OBJECTS = (
    *VALUES,
    b"bytes",
    object(),
    np.zeros(3),
    np.float64(1.5),
    np.int64(2),
    torch.zeros(2),
    lambda: 1,
    1j,
    range(3),
    10**5000,
)


class Accepted(BaseException):
    """The input was valid, and the command would begin to write now."""


def accept(*arguments, **named):
    raise Accepted


@pytest.fixture(scope="module")
def house(finished, as_toml, tmp_path_factory):
    """Folders that are in use, with everything that commands read."""
    house = tmp_path_factory.mktemp("house")
    shutil.copytree(finished, house / "finished")
    shutil.copytree(finished, house / "unfinished")
    (house / "unfinished" / "results.json").unlink()
    assert main(["export", str(house / "finished"), "--out", str(house / "export")]) == 0
    config = RunConfig.create(
        stream={"name": "digits", "limit_per_task": 20}, width=1, memory=64, device="cpu", options={}
    )
    (house / "run.json").write_text(config.to_json())
    (house / "run.toml").write_text(as_toml(config))
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            folder = house / "pets" / part / name
            folder.mkdir(parents=True)
            for number in range(2):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / f"{number}.png")
    return house


@pytest.fixture
def case(house, tmp_path, monkeypatch):
    """Runs a command, or a function, and notes what is wrong with its end; valid input is stopped
    before anything is written.
    """
    for place in (
        "train.loop.RunFolder.make",
        "train.loop.Loop.run",
        "experiments.folder.SweepFolder.create",
        "present.report.render_page",
        "app.bench.benchmark",
        "export.from_run._write",
        "runs.store.tempfile.mkstemp",
    ):
        monkeypatch.setattr(f"mose_fast.{place}", accept)
    # The same on every machine, and small, so that valid networks are small, too.
    monkeypatch.setattr("mose_fast.learner.room._ALWAYS", 0)
    monkeypatch.setattr("mose_fast.learner.room.available_bytes", lambda: 10**8)
    monkeypatch.chdir(tmp_path)
    before = contents(house)

    def run(action, folder=None):
        """Gives ``refused``, ``accepted`` or ``done``; fails otherwise.

        ``folder`` must stay as it is beside the house.
        """
        own = {} if folder is None else contents(folder)
        out, err = io.StringIO(), io.StringIO()
        code = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                code = main([str(a) for a in action]) if isinstance(action, list) else action()
            except Accepted:
                end = "accepted"
            except SystemExit as stop:
                code = stop.code
            except MoseFastError as error:
                assert not isinstance(action, list)
                code, _ = 2, print(f"mose-fast: {error}", file=err)
        shown = err.getvalue()
        assert "Traceback" not in shown, shown
        if isinstance(action, list) and code is not None:
            assert code in (0, 2), (code, shown)
        if code == 2 and isinstance(code, int):
            end = "refused"
            message = shown[f"\n{shown}".rindex("\nmose-fast") :].strip()
            assert len(message) > len("mose-fast: "), shown
            # Argparse repeats what it was given.
            assert message.count("\n") == 0 or any("\n" in str(a) for a in action), message
        elif code is not None or not isinstance(action, list):
            end = "done" if code is not None else "accepted"
        assert contents(house) == before, "a folder that was there has changed"
        assert folder is None or contents(folder) == own, "the folder has changed"
        return end

    return run


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(name, cases, make, case, least):
    """Runs ``make(random)`` for so many seeds; at least ``least`` of them are to be refused, else
    they are no bad input.
    """
    failures, ends = [], []
    for number in range(cases):
        action, folder = make(random.Random(f"{name}, draw {number}"), number)
        try:
            ends.append(case(action, folder))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            shown = (
                [text if len(text) < 200 else f"{text[:200]}..." for text in map(str, action)]
                if isinstance(action, list)
                else action
            )
            trace = "".join(traceback.format_exception(error)[-4:])
            failures.append(f"{name} {number}: {shown}\n{trace[-1500:]}")
    assert not failures, f"{len(failures)} of {cases}:\n" + "\n".join(failures[:10])
    assert ends.count("refused") >= least, {end: ends.count(end) for end in set(ends)}


def garbled(rng, text):
    """A text with a piece of it deleted, doubled or replaced."""
    if not text:
        return text
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.choice((1, 1, 2, 5, 40)))
    middle = rng.choice(
        ("", text[start:end] * 2, rng.choice(string.printable), "[" * 3000, "9" * 400, '"', "\n", "日本")
    )
    return text[:start] + middle + text[end:]


def damaged(rng, raw):
    """Bytes of a file that was cut off, has wrong bytes, or more than it had."""
    what = rng.randrange(5)
    start = rng.randrange(len(raw))
    if what == 0:
        return raw[:start]
    if what == 1:
        return raw + rng.randbytes(10)
    if what == 2:
        return raw[:start] + bytes(min(100, len(raw) - start)) + raw[start + 100 :]
    flipped = bytearray(raw)
    for _ in range(rng.choice((1, 1, 5, 50))):
        # The header is where most is decided.
        place = rng.randrange(min(200, len(raw)) if what == 3 else len(raw))
        flipped[place] ^= 1 << rng.randrange(8)
    return bytes(flipped)


@pytest.mark.slow
def test_flags(house, case):
    used = ["--out", house / "finished", "--overwrite"]

    def make(rng, number):
        def some():
            if rng.random() < 0.3:
                return ["--set", f"{rng.choice(SETTINGS)}={rng.choice(TEXTS)}"]
            flag = rng.choice(FLAGS)
            files = (house / "run.json", house / "run.toml", house, house / "pets")
            return [flag, rng.choice(files if flag == "--config" and rng.random() < 0.5 else TEXTS)]

        more = [part for _ in range(rng.choice((1, 1, 2, 3))) for part in some()]
        others = ("sweep", "resume", "export", "predict", "report", "collect", "bench", "list", "noise")
        command = rng.choice(("run", "run", "run", *others))
        if command == "run":
            action = ["run", *TINY, *more, *used]
        elif command == "sweep":
            flag, text = rng.choice((("--seeds", ""), ("--grid", f"{rng.choice(SETTINGS)}="), ("--grid", "")))
            vary = [flag, text + rng.choice(TEXTS)]
            flags = rng.choice(((), ("--workers",), ("--per-gpu",), ("--engine",)))
            place = [part for name in flags for part in (name, rng.choice(TEXTS))]
            action = ["sweep", *TINY, *vary, *place, *(more if rng.random() < 0.5 else []), "--out", house / "finished"]
        elif command == "bench":
            setting = f"{rng.choice(SETTINGS)}={rng.choice(TEXTS)}"
            action = ["bench", "--width", "1", "--seconds", rng.choice(TEXTS), "--set", setting]
        elif command == "noise":
            tokens = ["run", *TINY, *used]
            place = rng.randrange(len(tokens))
            tokens[place] = garbled(rng, str(tokens[place])) if "house" not in str(tokens[place]) else tokens[place]
            action = tokens
        else:
            path = rng.choice((*TEXTS, house, house / "finished", house / "run.json", house / "pets"))
            action = [command, path, *([rng.choice(TEXTS)] if command == "predict" else [])]
            action += ["--format", rng.choice(TEXTS), "--overwrite"] if command == "export" else []
        return action, None

    check("flags", 120, make, case, least=70)


@pytest.mark.slow
def test_configuration_files(house, case, tmp_path):
    def make(rng, number):
        kind = rng.choice(("json", "json", "toml"))
        text = (house / f"run.{kind}").read_text()
        if kind == "json" and rng.random() < 0.6:
            values = json.loads(text)
            for _ in range(rng.choice((1, 1, 2, 4))):
                table = rng.choice((values, values.get("stream"), values.get("options")))
                if not isinstance(table, dict) or not table:
                    continue
                key = rng.choice(sorted(table))
                if rng.random() < 0.1:
                    table[garbled(rng, key)] = table.pop(key)
                else:
                    table[key] = rng.choice(VALUES)
            text = json.dumps(values)
        else:
            for _ in range(rng.choice((1, 1, 3))):
                text = garbled(rng, text)
        file = tmp_path / f"{number}.{kind}"
        file.write_bytes(damaged(rng, text.encode()) if rng.random() < 0.2 else text.encode())
        if rng.random() < 0.15:
            return ["sweep", file, "--seeds", "0-1", "--out", house / "finished"], None
        return ["run", "--config", file, "--device", "cpu", "--out", house / "finished", "--overwrite"], None

    check("configuration", 70, make, case, least=35)


def test_data_files(house, case, tmp_path):
    def arrays(rng):
        shape = rng.choice(
            ((8, 8), (8, 8, 8, 3), (8, 8, 8, 1), (8, 3, 8, 8), (8, 9, 8, 3), (0, 8, 8, 3), (8, 0, 0, 3), (8,), ())
        )
        x = np.zeros(shape, rng.choice((np.uint8, np.uint8, np.float32, np.int64, bool, object, "U3", "M8[s]")))
        y = (
            np.arange(8)
            .astype(rng.choice((np.int64, np.float64, np.uint64, "U3", object)))
            .reshape(rng.choice(((8,), (8, 1), (2, 4))))
        )
        if y.dtype == np.float64 and rng.random() < 0.5:
            y[..., 0] = np.nan
        good = {"x_train": np.zeros((8, 8, 8, 3), np.uint8), "y_train": np.arange(8) % 2}
        good |= {"x_test": good["x_train"], "y_test": good["y_train"]}
        for name in rng.sample(sorted(good), rng.choice((0, 1, 2))):
            good[name] = rng.choice((x if name[0] == "x" else y, good[name][: rng.randrange(8)], good[name][::-1]))
        if rng.random() < 0.1:
            del good[rng.choice(sorted(good))]
        if rng.random() < 0.1:
            good["y_train"] = good["y_train"] + np.uint64(2**63)
        return good

    def make(rng, number):
        what = rng.random()
        stream = tmp_path / f"{number}.npz"
        if what < 0.7:
            np.savez(stream, **arrays(rng))
            if rng.random() < 0.4:
                stream.write_bytes(damaged(rng, stream.read_bytes()))
            return ["run", *TINY, "--stream", stream, "--out", house / "finished", "--overwrite"], None
        stream = tmp_path / str(number)
        shutil.copytree(house / "pets", stream)
        file = rng.choice(sorted(stream.rglob("*.png")))
        file.write_bytes(damaged(rng, file.read_bytes()))
        if what < 0.85:
            return ["predict", house / "export", stream], stream
        if rng.random() < 0.3:
            shutil.rmtree(rng.choice([path for path in sorted(stream.rglob("*")) if path.is_dir()]))
        return ["run", *TINY, "--stream", stream, "--out", house / "finished", "--overwrite"], stream

    check("data", 45, make, case, least=25)


@pytest.mark.slow
def test_checkpoints_and_other_files_of_a_folder(house, case, tmp_path):
    def make(rng, number):
        of = rng.choice(("unfinished", "unfinished", "finished", "export"))
        folder = tmp_path / str(number)
        shutil.copytree(house / of, folder)
        files = {
            "unfinished": ["config.json", *["checkpoints/*.safetensors"] * 4],
            "finished": ["config.json", "results.json", "accuracy.csv", "checkpoints/*.safetensors"],
            "export": ["card.json", "model.safetensors"],
        }
        file = sorted(folder.glob(rng.choice(files[of])))[-1]
        if file.suffix == ".json" and rng.random() < 0.7:
            values = json.loads(file.read_text())
            table = values
            for _ in range(3):
                key = rng.choice(sorted(table))
                if not isinstance(table[key], dict) or not table[key]:
                    break
                table = table[key]
            table[key] = rng.choice(VALUES)
            file.write_text(json.dumps(values))
        elif rng.random() < 0.1:
            file.unlink()
            if rng.random() < 0.5:
                file.mkdir()
        elif rng.random() < 0.2:
            others = [path for path in sorted(house.rglob("*")) if path.is_file() and path.name != file.name]
            file.write_bytes(rng.choice(others).read_bytes())
        else:
            file.write_bytes(damaged(rng, file.read_bytes()))
        commands = {
            "unfinished": [["resume", folder]],
            "finished": [
                ["export", folder, "--out", tmp_path / "e"],
                ["report", folder, "--out", tmp_path / "r"],
                ["resume", folder],
            ],
            "export": [["predict", folder, house / "pets" / "train" / "cat"]],
        }
        return rng.choice(commands[of]), folder

    check("files", 45, make, case, least=25)


def test_arguments_in_python(house, case):
    classifier = Classifier.load(house / "export")
    learner = mose_fast.create_learner(classes=2, width=1, memory=64, device="cpu", image_size=(8, 8))
    names = tuple(RunConfig().to_dict())
    of_stream = tuple(RunConfig().to_dict()["stream"])

    def make(rng, number):
        value = rng.choice(OBJECTS)
        settings = {"width": 1, "memory": 64, "device": "cpu", "stream": "digits", rng.choice(names): value}
        if rng.random() < 0.3:
            settings["options"] = {rng.choice(OPTIONS): value}
        elif rng.random() < 0.3:
            settings["stream"] = {rng.choice(of_stream): value}
        images, labels = np.zeros((8, 8, 8, 3), np.uint8), np.arange(8) % 2
        unseen = rng.choice((images.astype(float), images[:, :4], images[0], images[..., :1], np.zeros(3, np.uint8)))

        def learner_of_settings():
            given = {"classes": 10, rng.choice(("image_size", "mean", "std", "mirror_safe", "classes")): value}
            mose_fast.create_learner(width=1, memory=64, device="cpu", **given)

        def stream_of_arrays():
            given = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
            given |= {"tasks": 1, "batch": 2, "mirror_safe": True}
            from_arrays(**{**given, rng.choice(sorted(given)): value})

        def documented(call):
            # These say ValueError, as PyTorch's own functions do.
            try:
                call()
            except ValueError as error:
                raise MoseFastError(error) from error

        calls = (
            lambda: mose_fast.run(**settings, out=house / "finished", overwrite=True),
            lambda: RunConfig.create(**settings) and None,
            learner_of_settings,
            stream_of_arrays,
            lambda: documented(lambda: learner.predict(unseen)),
            lambda: documented(
                lambda: learner.observe(images, rng.choice((labels - 1, labels + 1, labels[:3], labels / 2)), task=0)
            ),
            lambda: documented(lambda: classifier.predict(unseen)),
        )
        return rng.choice((*calls, *calls[:4])), None

    check("python", 45, make, case, least=25)


# What these draws have found.


def test_a_number_too_long_to_be_written_is_no_method():
    with pytest.raises(MoseFastError):
        RunConfig.create(method=10**5000)


def test_a_deviation_beyond_all_floats_in_an_export(house, tmp_path):
    shutil.copytree(house / "export", tmp_path / "export")
    file = tmp_path / "export" / "card.json"
    card = json.loads(file.read_text())
    card["normalisation"]["std"] = 10**400
    file.write_text(json.dumps(card))
    with pytest.raises(MoseFastError):
        Classifier.load(tmp_path / "export")
