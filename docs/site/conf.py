"""Settings of the documentation site, which ``make docs`` builds with Sphinx.

The source is the whole checkout, so that the links between README, docs and tests are the ones that
a reader of the repository follows.
"""

import shutil
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.logging import getLogger
from sphinx.util.nodes import make_refnode

from mose_fast import __version__

HERE = Path(__file__).parent
LOGGER = getLogger(__name__)

project = "mose-fast"
version = release = __version__
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**", "tests/README.md", "tests/*/README.md"]
exclude_patterns = [".*", "bench", "build", "csrc", "dist", "mose_fast", "mutants", "runs", "docs/site"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# The sidebar: pages below a page, in groups.
NAVIGATION = {
    "README": {
        "Start": [
            "Home <self>",
            *sorted(f"docs/notebooks/{path.stem}" for path in HERE.parent.glob("notebooks/*.ipynb")),
            "docs/methods",
            "docs/settings",
            "docs/command_line",
        ],
        "Your own data": ["docs/own_data", "docs/streams", "docs/augmentation"],
        "Your own loop": ["docs/your_own_loop", "docs/integrations", "docs/scikit_learn", "docs/export"],
        "Many runs": ["docs/sweeps", "docs/tuning", "docs/reports"],
        "The paper": ["docs/paper", "docs/beyond", "docs/specification/README"],
        "Speed": ["docs/performance", "docs/captured_step", "docs/benchmarks"],
        "Reference": ["docs/reference/index", "CHANGELOG"],
        "For contributors": [
            "docs/architecture",
            "docs/adding_a_method",
            "docs/adding_a_setting",
            "docs/adding_an_op",
            "docs/building",
            "tests/README",
            "docs/releasing",
        ],
    },
    "docs/paper": {"Tables": ["paper/README"]},
    "docs/specification/README": {"Specification": ["mose", "baselines"]},
    "tests/README": {"Tests": ["kernels/README", "races/README", "golden/README"]},
}

# Markdown, and notebooks with the outputs that were committed.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4

# Docstrings
autodoc_member_order = "bysource"
autodoc_mock_imports = ["avalanche", "capymoa"]  # docs/reference/integrations.rst
autodoc_inherit_docstrings = False
napoleon_attr_annotations = False  # the signature has them
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"mose-fast {version}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_use_index = html_domain_indices = False
html_math_renderer = "mathml"


def add_navigation(app, docname, source):
    """Tables of contents are no part of the pages: a reader of the repository has its folders."""
    for caption, pages in NAVIGATION.get(docname, {}).items():
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def skip_fields(app, what, name, obj, skip, options):
    """The fields of a NamedTuple, whose class describes them."""
    return str(obj.__doc__).startswith("Alias for field number") or None


def keep_colon(app, what, name, obj, options, lines):
    """Napoleon takes what stands before a colon for the type of an attribute, in the first line."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, r"\ ")  # which is nothing


def find_elsewhere(app, env, node, text):
    """Docstrings name things as their modules do; they are listed where users import them from."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if " " in target:
        LOGGER.warning("%r is taken for a name: is a line of a docstring not indented?", target, location=node)
    parts = target.split(".")
    ending = "." + ".".join(parts[-2:] if node["reftype"] in ("meth", "attr") else parts[-1:])
    domain = env.domains.python_domain
    found = [name for name, entry in domain.objects.items() if name.endswith(ending) and not entry.aliased]
    if len(found) != 1:
        return None
    entry = domain.objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text, found[0])


def write_mathml(self, node):
    """Browsers show MathML by themselves: no script, and no host to fetch one from."""
    if isinstance(node, nodes.math_block):
        self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    else:
        self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def copy_first_page(app, error):
    if not error:
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app):
    renderer = (write_mathml, None)
    app.add_html_math_renderer("mathml", inline_renderers=renderer, block_renderers=renderer)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", keep_colon, priority=400)
    app.connect("missing-reference", find_elsewhere)
    app.connect("build-finished", copy_first_page)
