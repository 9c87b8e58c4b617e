"""Fonts of figures, for names in scripts that matplotlib's own font lacks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["lettering"]


@contextmanager
def lettering(texts: Iterable[str]) -> Iterator[None]:
    """A context in which matplotlib takes letters that its font lacks from other fonts, for the
    texts that users have named. One warning names the letters that no font of the machine has.
    """
    # Imported here, because it takes half a second that other commands do not need.
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
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    missing = _lacking(findfont(FontProperties()), letters)
    families: list[str] = []
    if not missing:
        return families, missing
    # One font may lack few letters of a script, so all are tried: upright ones of usual weight, in
    # a fixed order. Matplotlib's own Last Resort has a box for every letter.
    candidates = {
        font.name: font.fname
        for font in sorted(fontManager.ttflist, key=lambda font: (font.name, font.fname))
        if font.style == "normal"
        and font.weight in (400, "normal", "regular", "book")
        and not font.name.startswith("Last Resort")
    }
    for name, path in candidates.items():
        left = _lacking(path, missing)
        if len(left) < len(missing):
            families.append(name)
            missing = left
        if not missing:
            break
    return families, missing


def _lacking(path: str, letters: set[str]) -> set[str]:
    from matplotlib.font_manager import get_font

    try:
        known = get_font(path).get_charmap()
    except (OSError, RuntimeError):  # a damaged file among the machine's fonts
        return letters
    return {letter for letter in letters if ord(letter) not in known}
