"""The quickstart notebook runs, with its two processes, and learns."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def results(notebook):
    """What cells show as their values."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [each["data"]["text/plain"] for each in outputs if each.output_type == "execute_result"]


def test_it_trains_on_two_processes(tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert results(notebook) == []  # kept without outputs
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
    metrics, right, same = results(notebook)
    assert "'grad_norm'" in metrics and "'loss_epoch'" in metrics
    assert float(right) > 0.9 and same == "True"
    printed = str([cell.get("outputs") for cell in notebook.cells])
    assert "zero3: 2 ranks on 1 node, gloo, by " in printed
