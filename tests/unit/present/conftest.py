"""Run folders with made-up accuracies: read like real ones, made in milliseconds."""

import copy
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from mose_fast.present.report import write_report
from mose_fast.train import run
from tests.made_up import write_run

EXPERTS = {"ncm": ("1", "2", "3", "4", "mean_distance"), "linear": ("1", "2", "3", "4", "mean_logit")}


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """The results of a real run; tests take copies."""
    return run(stream={"name": "digits", "limit_per_task": 20}, width=1, memory=64, device="cpu")


def maker(template, runs):
    """A function that writes a run folder below ``runs`` and returns its results.

    ``make(seed, memory=64, preset="released", tasks=5, after=None, changes={}, resolved={},
    **config)``: accuracies are drawn from the seed and the settings; ``after`` lists the tasks
    after which there was an evaluation, None for all; ``images_seen``, when the accuracy at any
    time was measured, and tasks have 100 images.
    """
    made = []

    def folder(
        seed,
        *,
        memory=64,
        preset="released",
        tasks=5,
        after=None,
        changes=None,
        stream=None,
        resolved=None,
        images_seen=None,
        **config,
    ):
        results = copy.deepcopy(template)
        changes = changes or {}
        results["config"] |= {"memory": memory, "preset": preset, "seed": seed, **config}
        results["config"]["options"] |= changes
        results["config"]["stream"] |= stream or {}
        results["resolved"] |= resolved or {}
        results["changes_from_preset"] |= changes
        random = np.random.default_rng([seed, memory, tasks, len(preset), len(str(changes))])
        test, stored = ({classifier: {} for classifier in EXPERTS} for _ in range(2))
        for classifier, experts in EXPERTS.items():
            for expert in experts:
                matrix = np.tril(random.uniform(0.2, 0.9, (tasks, tasks)))
                matrix[[after is not None and t not in after for t in range(tasks)]] = 0
                test[classifier][expert] = matrix
                stored[classifier][expert] = np.tril(random.uniform(0.5, 1, (tasks, tasks)))
        results["confusion_by_task"] = random.integers(1, 20, (tasks, tasks)).tolist()
        phases = {"train": 2.0 + seed, "capture": 0.0, "evaluate": 1.0, "checkpoint": 0.5}
        results["seconds"] |= phases | {"total": 3.5 + seed}
        if images_seen is not None:
            accuracy = {c: {e: random.random(len(images_seen)).tolist() for e in names} for c, names in EXPERTS.items()}
            results["anytime"] = {
                "images_seen": images_seen,
                "ends_task": [n % 100 == 0 for n in images_seen],
                "accuracy": accuracy,
                "average": {c: {e: float(np.mean(v)) for e, v in by.items()} for c, by in accuracy.items()},
            }
        path = runs / f"run-{len(made):03d}"
        write_run(path, results, test, stored, after)
        made.append(path)
        return results

    return folder


@pytest.fixture
def make(template, tmp_path):
    """See :func:`maker`; the folders lie below ``tmp_path / "runs"``."""
    return maker(template, tmp_path / "runs")


@pytest.fixture
def no_figures(monkeypatch):
    """For tests of words and tables: drawing takes seconds."""
    monkeypatch.setattr("mose_fast.present.report.figures", lambda groups: [])


@pytest.fixture(scope="session")
def sweep(template, tmp_path_factory):
    """Two presets, two memory sizes, three seeds: results by (preset, memory), and the page of
    their report.
    """
    runs = tmp_path_factory.mktemp("sweep") / "runs"
    make = maker(template, runs)
    results = {
        (preset, memory): [make(seed, memory=memory, preset=preset) for seed in range(3)]
        for preset in ("released", "paper")
        for memory in (64, 128)
    }
    page, skipped = write_report([runs])
    assert page == runs / "report" / "report.html"
    assert skipped == []
    return results, page


class Page(HTMLParser):
    """What a reader of the page sees.

    Attributes:
        tables: Rows of cell texts by id, headings first.
        captions: Texts of all ``figcaption``.
        links: Values of all ``src`` and ``href``.
        tags: Every tag.
    """

    def __init__(self, text):
        super().__init__()
        self.tables, self.captions, self.links, self.tags = {}, [], [], []
        self._inside = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.links += [
            value for name, value in attributes.items() if name in ("src", "href", "data", "srcset", "action", "poster")
        ]
        if tag == "table":
            self._rows = self.tables.setdefault(attributes["id"], [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._inside = tag
        elif tag == "figcaption":
            self.captions.append("")
            self._inside = tag

    def handle_endtag(self, tag):
        if tag in ("td", "th", "figcaption"):
            self._inside = None

    def handle_data(self, data):
        if self._inside == "figcaption":
            self.captions[-1] += data
        elif self._inside:
            self._rows[-1][-1] += data


@pytest.fixture(scope="session")
def read_page():
    """A function from a page's path to what a reader sees."""
    return lambda path: Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def numbers():
    """A function from a text to the numbers in it."""
    return lambda text: [float(n.replace(",", "")) for n in re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)]
