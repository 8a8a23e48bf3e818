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
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    last = [code for code in source(notebook) if "assert " in code]
    assert last, "no cell asserts a claim"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()


def test_there_are_six_notebooks_without_long_functions():
    assert len(NOTEBOOKS) == 6
    for path in NOTEBOOKS:
        for code in source(nbformat.read(path, as_version=4)):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.FunctionDef):
                    assert node.end_lineno - node.lineno < 40
