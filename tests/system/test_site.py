"""What ``make docs`` has built: every public name is found by its search, and links lead to it."""

from __future__ import annotations

import dataclasses
import json
import pkgutil
import pydoc
import re
from importlib import import_module

import pytest

import mose_fast
from tests.paths import ROOT

SITE = ROOT / "build" / "site"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "searchindex.js").exists(), reason="there is no build/site; make docs builds it"),
]


@pytest.fixture(scope="module")
def listed():
    """What the search lists: the page and the anchor of each dotted name."""
    index = json.loads((SITE / "searchindex.js").read_text(encoding="utf-8")[len("Search.setIndex(") : -1])
    found = {}
    for prefix, entries in index["objects"].items():
        for page, _kind, _priority, anchor, name in entries:
            full = f"{prefix}.{name}" if prefix else name
            # "" stands for the full name, "-" for the kind and the full name
            anchor = {"": full, "-": f"module-{full}"}.get(anchor, anchor)
            found[full] = SITE / f"{index['docnames'][page]}.html", anchor
    return found


def rooms():
    """The package, and the packages and modules directly below it that say what is public."""
    below = (import_module(f"mose_fast.{m.name}") for m in pkgutil.iter_modules(mose_fast.__path__) if m.name[0] != "_")
    return [mose_fast, *(room for room in below if hasattr(room, "__all__"))]


def test_every_public_name_is_found(listed):
    public = [(room, name) for room in rooms() for name in room.__all__]
    missing = [
        f"{room.__name__}.{name}"
        for room, name in public
        if not any(full.rpartition(".")[2] == name and pydoc.locate(full) is getattr(room, name) for full in listed)
    ]
    assert len(public) > 100 and not missing


@pytest.mark.parametrize("kind", ["RunConfig", "StreamConfig", "MoseOptions"])
def test_every_setting_is_found(listed, kind):
    names = [f"mose_fast.{kind}.{field.name}" for field in dataclasses.fields(getattr(mose_fast, kind))]
    assert names and not [name for name in names if name not in listed]


def test_every_function_of_a_learner_is_found(listed):
    missing = [
        name
        for name, value in vars(mose_fast.Learner).items()
        if name[0] != "_" and value.__doc__ and f"mose_fast.Learner.{name}" not in listed
    ]
    assert not missing


def test_what_is_found_is_there(listed):
    anchors = {page: set(re.findall(r'id="([^"]+)"', page.read_text(encoding="utf-8"))) for page, _ in listed.values()}
    assert not [name for name, (page, anchor) in listed.items() if anchor not in anchors[page]]


def test_pages_fetch_nothing_from_elsewhere():
    loaded = re.compile(r'<(?:script|img|iframe|source)[^>]* src="(https?:)?//|<link[^>]* href="(https?:)?//')
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 40 and not [page for page in pages if loaded.search(page.read_text(encoding="utf-8"))]
