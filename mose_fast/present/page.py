"""Pages: HTML files that need no other, filled in from the templates beside this module."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mose_fast.present.table import counted

if TYPE_CHECKING:
    from jinja2 import Environment


def environment() -> Environment:
    """What reads the templates; texts are escaped."""
    # Comes with torch; only pages need it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.filters |= {
        "as_class": lambda kind: Markup(f' class="{kind}"') if kind else "",
        "counted": counted,
        "data_uri": lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}",
        # ``M = 1k`` in one line.
        "unbroken": lambda text: text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"),
    }
    return found


def fill(template: str, **values: Any) -> str:
    """The HTML of a page.

    Args:
        template: Name of the template, which extends ``layout.html``.
        **values: What the template names; for the layout ``title``, ``heading`` and ``mark``, the
            name and content of what tells the page from other files in its head.
    """
    return environment().get_template(template).render(**values)
