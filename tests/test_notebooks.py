"""Notebooks: each runs from top to bottom without a GPU, in under a minute, and its last cell asserts its claim."""

import ast

import pytest
from scripts import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

SLOW = ("02", "03", "04", "05")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def source(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem[:2] in SLOW)) for path in NOTEBOOKS],
)
def test_notebook_runs_and_asserts_its_claim(path):
    notebook = nbformat.read(path, as_version=4)
    last = [code for code in source(notebook) if "assert " in code]
    assert last, "no cell asserts a claim"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_notebook_is_saved_with_what_it_prints_and_draws(path):
    """As ``python notebooks/save.py`` leaves it: run from top to bottom, figures as pictures."""
    assert path.stat().st_size < 300_000
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert all(one.output_type != "error" and one.get("name") != "stderr" for one in outputs)
    kinds = [kind for one in outputs for kind in one.get("data", {})]
    assert "application/vnd.plotly.v1+json" not in kinds
    plots = any("px." in code or "go.Figure" in code for code in source(nbformat.read(path, as_version=4)))
    assert plots == ("image/png" in kinds)


def test_there_are_six_notebooks_without_long_functions():
    assert len(NOTEBOOKS) == 6
    for path in NOTEBOOKS:
        for code in source(nbformat.read(path, as_version=4)):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.FunctionDef):
                    assert node.end_lineno - node.lineno < 40
