"""The figure of a run: where its legend stands, and names in any script."""

import io

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager, rcParams
from matplotlib.figure import Figure
from PIL import Image

from mose_fast.runs.figure import accuracy_figure, lettering

# A letter for private use, which no font of a machine should have.
LETTER = "\U000f0123"


def results(stream="digits", experts=4):
    names = [*map(str, range(1, experts + 1)), "mean_distance"]
    # Curves in every corner.
    rows = [[[0.9 * (e % 2) + 0.05] * (k + 1) + [0.0] * (4 - k) for k in range(5)] for e in range(len(names))]
    accuracy = dict(zip(names, rows, strict=True))
    return {
        "accuracy": {"ncm": accuracy, "linear": {n.replace("distance", "logit"): m for n, m in accuracy.items()}},
        "resolved": {"classifier": "ncm"},
        "evaluated_after": list(range(5)),
        "evaluation_points": None,
        "tasks": [[2 * t, 2 * t + 1] for t in range(5)],
        "config": {
            "method": "mose",
            "preset": "released",
            "stream": {"name": stream, "kind": "tasks"},
            "memory": 64,
            "width": 1,
            "seed": 0,
            "evaluate_on": "test",
        },
    }


@pytest.fixture
def own_font(tmp_path, monkeypatch):
    """A font of the machine that has LETTER alone, as a filled square."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 1000), (1000, 1000), (1000, 0)):
        pen.lineTo(corner)
    pen.closePath()
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap({ord(LETTER): "square"})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "square": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "square": (1000, 0)})
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "Own Script", "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    builder.save(tmp_path / "own.ttf")
    monkeypatch.setattr(font_manager.fontManager, "ttflist", list(font_manager.fontManager.ttflist))
    font_manager.fontManager.addfont(tmp_path / "own.ttf")


@pytest.mark.parametrize("experts", [1, 8])
def test_the_legend_covers_no_panel(monkeypatch, experts):
    seen = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *arguments, **named: (save(figure, *arguments, **named), seen.append(figure))
    )
    accuracy_figure(results(experts=experts))
    (figure,) = seen
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    (legend,) = legends
    assert len(legend.get_texts()) == experts + 2
    box = legend.get_window_extent()
    assert not any(box.overlaps(axis.get_window_extent()) for axis in figure.axes)
    assert figure.bbox.x1 >= box.x1 and figure.bbox.y1 >= box.y1 and box.y0 >= 0


def test_letters_come_from_another_font_where_the_own_one_lacks_them(own_font, recwarn):
    with lettering([f"mose on {LETTER}"]):
        assert rcParams["font.family"][-1] == "Own Script"
    assert "Own Script" not in rcParams["font.family"]
    # A hundred squares are a bar of black, as boxes are not.
    dark = [
        int((np.array(Image.open(io.BytesIO(accuracy_figure(results(s)))).convert("L"))[:40] < 50).sum())
        for s in ("", LETTER * 20)
    ]
    assert dark[1] - dark[0] > 20 * 100
    assert not recwarn.list


def test_letters_that_no_font_has_are_told_once():
    with pytest.warns(UserWarning) as caught:
        accuracy_figure(results(LETTER * 3 + "\U000f0124"))
    (warning,) = [str(w.message) for w in caught]
    assert warning.startswith(
        f"no font of this machine has the letters {LETTER}\U000f0124, so figures show boxes for them"
    )


def test_plain_names_change_no_font(recwarn):
    before = list(rcParams["font.family"])
    with lettering(["mose (released) ± é"]):
        assert rcParams["font.family"] == before
    assert not recwarn.list
