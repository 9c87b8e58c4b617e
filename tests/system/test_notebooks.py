"""The notebooks run from start to end, and are kept with what they printed and drew."""

import json
import re

import matplotlib.pyplot as plt
import pytest

from tests.paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook, kind):
    return [c for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.close("all")))
    names = {}
    for number, cell in enumerate(cells(notebook, "code"), 1):
        exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec"), names)
    assert drawn


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_run_in_order_and_its_links_lead_somewhere(notebook):
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(line for cell in cells(notebook, "markdown") for line in cell["source"])
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((notebook.parent / link).exists() for link in links)
