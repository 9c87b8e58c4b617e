"""Files and folders may have any name that the system takes, in every locale: no command fails at
one, and what it writes is UTF-8.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.tune.outcome import _toml, check_writable
from mose_fast.experiments.tune.study import Study
from mose_fast.learner.named_settings import with_changes
from mose_fast.output import readable
from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig
from mose_fast.streams import create

# What Python takes file names and standard output for: UTF-8, or ASCII.
LOCALES = {"utf-8": {"PYTHONUTF8": "1"}, "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}}
# Folders of classes and the classes' names: Latin-1, which is no UTF-8, and UTF-8 of two to four
# bytes a letter.
CLASSES = {b"caf\xe9": "caf\\xe9", b"caf\xc3\xa9 $x$": "café $x$", "日本".encode(): "日本", "😀".encode(): "😀"}
FOLDER = b"donn\xe9es $x$"


@pytest.fixture
def photos(tmp_path):
    """An image folder with these classes, in a folder that is no UTF-8."""
    root = os.fsencode(tmp_path) + b"/" + FOLDER
    rng = np.random.default_rng(0)
    for part, name in ((part, name) for part in (b"train", b"test") for name in CLASSES):
        os.makedirs(b"/".join([root, part, name]))
        for number in range(3):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(file, "PNG")
            with open(b"/".join([root, part, name, b"im\xe9%d.png" % number]), "wb") as opened:
                opened.write(file.getvalue())
    return Path(os.fsdecode(root))


_SCRIPT = """
import json, os, sys
from mose_fast.app.cli import main
data, out = map(os.fsdecode, (sys.argv[1], sys.argv[2]))
sizes = "--width 1 --memory 8 --set buffer_batch=4 --set stream.tasks=2 --device cpu".split()
commands = {
    "run": ["--stream", data, *sizes, "--resize", "8", "--out", out],
    "report": [out],
    "export": [out],
    "predict": [os.path.join(out, "export"), os.path.join(data, "test")],
    "collect": [out],
    "resume": [out],
    "missing": [os.path.join(data, "no")],
}
codes = {name: main([name.replace("missing", "report"), *rest]) for name, rest in commands.items()}
print(json.dumps(codes))
"""


@pytest.fixture
def ends(photos):
    """The processes that ran all commands in each locale, at the same time: their output, and the
    folder of their run.
    """
    started = {}
    for locale, settings in LOCALES.items():
        out = os.fsencode(photos.parent) + b"/r\xe9sultats \xc3\xa9 " + locale.encode()
        command = [sys.executable, "-c", _SCRIPT, os.fsencode(photos), out]
        environment = {**os.environ, **settings}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        started[locale] = (process, Path(os.fsdecode(out)))
    return [(process, *process.communicate(), folder) for process, folder in started.values()]


@pytest.mark.slow
def test_every_command_copes_with_every_name_in_every_locale(photos, ends):
    found = set()
    for process, out, errors, folder in ends:
        assert process.returncode == 0 and b"Traceback" not in errors, errors.decode(errors="replace")
        *shown, codes = out.splitlines()
        succeed = dict.fromkeys(("run", "report", "export", "predict", "collect"), 0)
        assert json.loads(codes) == {**succeed, "resume": 2, "missing": 2}
        assert sum(line.count(b"\t") == 3 for line in shown) == 12  # of predict
        results = json.loads((folder / "results.json").read_text())
        assert os.fsencode(results["config"]["stream"]["name"]) == os.fsencode(photos)
        texts = [path for path in folder.rglob("*") if path.suffix in (".html", ".csv", ".md", ".tex", ".json")]
        assert len(texts) > 20 and all(path.read_bytes().decode() for path in texts)
        found.add((results["config"]["stream"]["fingerprint"], *results["class_names"]))
    # The same data, whatever the locale: the names of the classes, too, and their order.
    stream = create(StreamConfig(str(photos), resize=8))
    assert found == {(stream.fingerprint, *stream.class_names)}
    assert list(stream.class_names) == [CLASSES[name] for name in sorted(CLASSES)]


def test_readable_text():
    for text in ("", "plain", "café 日本 😀", "a\\xe9"):
        assert readable(text) == text
    assert readable("caf\udce9") == "caf\\xe9"
    assert readable("caf\udcc3\udca9") == "café"  # as an ASCII locale gives it
    assert readable("\ud800\udce9").encode()  # no name of a file


def test_a_study_of_a_folder_of_any_name(tmp_path, photos):
    """``best.toml`` holds what UTF-8 can, and is refused before the study what it cannot; trials
    are kept in a folder of any name.
    """
    there = {"stream.validation": 0.1, "evaluate_on": "validation"}
    trial = type("Trial", (), {"params": {"options.lr": 0.5}, "value": 0.5})
    for name in ("/données", "/😀 100%", '/a"b\\c'):
        config = with_changes(None, {**there, "stream.name": name})
        check_writable(config)
        (tmp_path / "best.toml").write_text(_toml(config, trial, 1, (0,), ()), encoding="utf-8")
        assert RunConfig.load(tmp_path / "best.toml").stream.name == name
    with pytest.raises(ConfigError, match=r"stream.name is .*, which best.toml cannot hold; wanted a path in UTF-8"):
        check_writable(with_changes(None, {**there, "stream.name": str(photos)}))
    folder = SweepFolder(photos / "a?b#c%20")
    folder.create()
    for _ in range(2):
        assert Study(folder.path / "study.sqlite", {}, {}).trials == []
    assert (folder.path / "study.sqlite").is_file()
