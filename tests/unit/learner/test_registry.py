"""Methods from outside the package: by file, by entry point, and what is wrong with those that
cannot be used.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint

import pytest

from mose_fast.app.cli import main
from mose_fast.learner import registry
from mose_fast.methods import METHODS, create_learner, find_method, method_names
from mose_fast.settings.run import ENTRY_POINTS, METHOD_SETTINGS, ConfigError, RunConfig
from tests.paths import ROOT
from tests.tiny import TINY

PAGE = ROOT / "docs" / "adding_a_method.md"


def page_example() -> str:
    """The method that docs/adding_a_method.md builds."""
    return re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)


@pytest.fixture(autouse=True)
def entered():
    """Methods entered by a test are forgotten after it."""
    methods, settings = dict(METHODS), dict(METHOD_SETTINGS)
    yield
    for table, before in ((METHODS, methods), (METHOD_SETTINGS, settings)):
        table.clear()
        table.update(before)


@pytest.fixture
def outside(tmp_path):
    """A function that writes a file with a method and returns ``path:Name``."""

    def write(text: str, name: str = "Mine") -> str:
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        return f"{path}:{name}"

    return write


def test_the_page_is_forty_lines_and_its_method_runs_and_resumes(outside, tmp_path, monkeypatch, capsys):
    example = page_example()
    assert len(example.splitlines()) <= 40
    name = re.search(r"^class (\w+)\(ReplayLearner\)", example, re.MULTILINE).group(1)
    outside(example)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    arguments = [*TINY, "--out", str(out)]
    option = re.search(r"--set (\w+=[\w.]+)", PAGE.read_text(encoding="utf-8")).group(1)
    assert main(["run", "--method", f"mine.py:{name}", *arguments, "--set", option]) == 0
    config = RunConfig.load(out / "config.json")
    assert config.method == f"{tmp_path / 'mine.py'}:{name}"  # absolute: resuming works from any folder
    assert str(getattr(config.options, option.split("=")[0])) == option.split("=")[1]
    (out / "results.json").unlink()
    assert main(["resume", str(out)]) == 0
    assert "results" in capsys.readouterr().out


def test_the_decorators_name_works_once_the_file_was_imported(outside):
    learner = find_method(
        outside(page_example(), re.search(r"^class (\w+)\(Re", page_example(), re.MULTILINE).group(1))
    )
    own = re.search(r'@method\(\n?\s*"([\w-]+)"', page_example()).group(1)
    assert METHODS[own] is learner
    assert isinstance(create_learner(classes=3, method=own, memory=64, width=1, device="cpu"), learner)


LACKS = """
from mose_fast.settings.run import MethodOptions
from mose_fast.methods import Learner, Preset, method


@method("mine", options=MethodOptions, presets={"table": Preset("none")}, year=2024, reference="nowhere", cost=1.0)
class Mine(Learner):
    def build_network(self): ...
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LACKS, "method 'mine' lacks plan, rehearsal, train_on; wanted Mine to define it"),
        (
            "from mose_fast.learner.planner import Planner\n"
            + LACKS.replace("(Learner)", "(Planner)")
            + "\n    plan = rehearsal = train_on = build_network",
            "Mine'>; wanted a subclass of mose_fast.methods.Learner",
        ),
        (
            "class Mine:\n    def train_batch(self): ...",
            r"Mine'>, which lacks build_network, plan, .*; wanted a subclass of",
        ),
        ("Mine = 3", "is 3, which lacks .*train_on; wanted a subclass"),
        ("from mose_fast.methods import Er\nclass Mine(Er): ...", "has no options and presets; wanted the decorator"),
        ("class Nine: ...", "has no 'Mine'; did you mean 'Nine'"),
        (
            "import nothing_like_this",
            r"mine.py cannot be imported: ModuleNotFoundError: No module named 'nothing_like_this'",
        ),
        ("def broken(:", "cannot be imported: SyntaxError"),
    ],
)
def test_unusable_files_are_refused_by_name(outside, text, says):
    with pytest.raises(ConfigError, match=says):
        RunConfig.create(method=outside(text))


@pytest.mark.parametrize("colon", ["", ":"])
def test_a_file_without_the_class_is_refused_with_the_form_that_works(outside, colon):
    name = re.search(r"^class (\w+)\(Re", page_example(), re.MULTILINE).group(1)
    path = outside(page_example(), name).rpartition(":")[0]
    with pytest.raises(ConfigError, match=rf"^method is '{path}{colon}', without .* wanted {path}:{name}$"):
        RunConfig.create(method=path + colon)


def test_an_unknown_name_is_refused_with_the_form_for_a_file():
    """It may be the name by which a file registers its method."""
    with pytest.raises(
        ConfigError, match=r"'my-method', which is unknown \(.*: path/to/file\.py:Name\); known: agem, aser"
    ):
        RunConfig.create(method="my-method")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"there is no file {tmp_path}/no.py"):
        RunConfig.create(method=f"{tmp_path}/no.py:Mine")


def test_a_name_is_entered_once(outside):
    text = page_example().replace('"smooth-er"', '"er"')
    with pytest.raises(ConfigError, match=r"'er' is already registered, by mose_fast.methods.er.Er"):
        RunConfig.create(method=outside(text, "SmoothEr"))


def entry_points(monkeypatch, value: str) -> None:
    entry = EntryPoint("theirs", value, ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group, name="theirs": [entry] if name == "theirs" else [])


def test_methods_of_installed_packages_are_found_by_entry_point(outside, monkeypatch, tmp_path):
    outside(page_example())
    name = re.search(r"^class (\w+)\(Re", page_example(), re.MULTILINE).group(1)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points(monkeypatch, f"mine:{name}")
    assert "theirs" in method_names()
    config = RunConfig.create(method="theirs")
    assert METHODS["theirs"].__name__ == name and type(config.options).__name__ == f"{name}Options"
    with pytest.raises(ConfigError, match="method is 'nobodys', which is unknown"):
        RunConfig.create(method="nobodys")


def test_an_entry_point_that_cannot_be_imported(monkeypatch):
    entry_points(monkeypatch, "no_such_module_of_theirs:Method")
    with pytest.raises(
        ConfigError, match="entry point no_such_module_of_theirs:Method, cannot be imported: ModuleNotFoundError"
    ):
        RunConfig.create(method="theirs")
