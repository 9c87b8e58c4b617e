"""The figure of a run, accuracy against task, and fonts for names in any script."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mose_fast.evaluate import running_accuracy
from mose_fast.output import readable
from mose_fast.settings.run import STANDARD

# Okabe-Ito colours can be distinguished by colour-blind readers, markers in print.
_COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#0072B2", "#F0E442", "#999999")
_MARKERS = "osD^vP*X"
_LABELS = {"mean": "mean of experts", "all": "all experts' features"}


def accuracy_figure(results: dict[str, Any]) -> bytes:
    """Draws, as a PNG, the mean accuracy over the tasks seen so far against the tasks, for every
    expert and their mean, with one panel each for class means, linear heads and the classifier of
    ``predict()``. Without task boundaries, it is the
    accuracy on the classes seen against the images seen.
    """
    config = results["config"]
    kind = config["stream"]["kind"]
    title = (
        f"{config['method']} ({config['preset']}) on {config['stream']['name']}"
        f"{'' if kind == 'tasks' else f' ({kind})'}, "
        f"M = {config['memory']}, width {config['width']}, seed {config['seed']}, {config['evaluate_on']} images"
    )
    title = readable(title)
    with lettering([title]):
        return _drawn(results, title)


def _drawn(results: dict[str, Any], title: str) -> bytes:
    # Imported here, because it takes half a second that a run without a figure does not need.
    from matplotlib.figure import Figure

    evaluated = results["evaluated_after"]
    points = results["evaluation_points"]
    ticks = np.array(evaluated) + 1 if points is None else np.array(points["images_seen"])
    own = results["resolved"]["classifier"]
    panels = {own: own} | {"ncm": "nearest class mean", "linear": "linear"}
    figure = Figure(figsize=(5.1 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, classifier in zip(axes, sorted(panels, key=[*STANDARD, own].index), strict=True):
        for i, (expert, matrix) in enumerate(results["accuracy"][classifier].items()):
            mean = expert.startswith("mean")
            axis.plot(
                ticks,
                100 * running_accuracy(matrix)[evaluated],
                label=_LABELS.get(expert.partition("_")[0], f"expert {expert}"),
                color="black" if mean else _COLOURS[i % len(_COLOURS)],
                linestyle="--" if mean else "-",
                marker=_MARKERS[i % len(_MARKERS)],
                markersize=4,
                linewidth=1.5,
            )
        seen = np.cumsum([len(t) for t in results["tasks"]])[evaluated] if points is None else points["classes_seen"]
        axis.plot(ticks, 100 / np.array(seen), color="0.6", linewidth=1, linestyle=":", label="chance")
        axis.set(title=panels[classifier], xlabel="tasks seen" if points is None else "images seen")
        if len(ticks) <= 20 and points is None:
            axis.set_xticks(ticks)
        axis.grid(alpha=0.3, linewidth=0.5)
    # The axis begins at 0 and leaves room above the highest curve, which may be low (100 classes,
    # a small network).
    highest = max(axis.dataLim.ymax for axis in axes)
    axes[0].set_ylim(0, min(100, 1.1 * highest) if highest > 0 else 100)
    axes[0].set_ylabel(f"accuracy on the {'tasks' if points is None else 'classes'} seen (%)")
    # The legend is beside the panels, since curves may run anywhere inside them.
    figure.legend(*axes[1].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(title, fontsize=10, parse_math=False)  # a dollar may be part of a file's name
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


@contextmanager
def lettering(texts: Iterable[str]) -> Iterator[None]:
    """A context in which matplotlib takes letters that its font lacks from other fonts, for the
    texts that users have named. One warning names the letters that no font of the machine has.
    """
    from matplotlib import rc_context, rcParams

    families, missing = _families({letter for text in texts for letter in text if not letter.isspace()})
    if missing:
        warnings.warn(
            f"no font of this machine has the letters {''.join(sorted(missing)[:20])}, so figures show boxes for them;"
            " install a font that has them, for example fonts-noto-cjk, and write the figures again",
            stacklevel=3,
        )
    # Fonts for other scripts are often of a kind that type 42 cannot hold.
    style = {"font.family": [*rcParams["font.family"], *families], "pdf.fonttype": 3} if families else {}
    with rc_context(style), warnings.catch_warnings():
        # One warning for each letter and size; the one above says it once.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from", category=UserWarning)
        yield


def _families(letters: set[str]) -> tuple[list[str], set[str]]:
    """Fonts that have the letters that matplotlib's own lacks, and the letters that no font has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    missing = letters - set(map(chr, get_font(findfont(FontProperties())).get_charmap()))
    families: list[str] = []
    # One font may lack few letters of a script, so all are tried: upright ones of usual weight, in
    # a fixed order. Matplotlib's own Last Resort has a box for every letter.
    for font in sorted(fontManager.ttflist, key=lambda font: (font.name, font.fname)) if missing else ():
        usual = font.style == "normal" and font.weight in (400, "normal", "regular", "book")
        if not missing or not usual or font.name.startswith("Last Resort") or font.name in families:
            continue
        try:
            left = missing - set(map(chr, get_font(font.fname).get_charmap()))
        except (OSError, RuntimeError):  # a damaged file among the machine's fonts
            continue
        if len(left) < len(missing):
            families.append(font.name)
            missing = left
    return families, missing
