"""The notebooks run from their first cell to their last, and are stored without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from own_home import own_home

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
BOOKS = sorted((ROOT / "examples").glob("*/*.ipynb"))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home of Shoal with a description of this machine, so that no notebook has to probe it."""
    from shoal.ir import Device, Link, Machine, MemoryTier

    place = tmp_path_factory.mktemp("home")
    tier = MemoryTier(name="dram", capacity_bytes=16 * 2**30, read_bandwidth=2e10)
    device = Device(
        name="two cores",
        kind="cpu",
        num_cores=2,
        peak_flops={"bf16": 1e12, "fp32": 2e11},
        matmul_flops={"bf16": 6e11, "fp32": 1.5e11},
        memory=(tier,),
    )
    links = (Link(scope="loopback", bandwidth=1.5e9, latency_s=1e-4),)
    Machine(name="local", device=device, links=links).save(place / "machine.yaml")
    return place


def test_none_is_missed():
    assert [book.stem for book in BOOKS] == [
        "choose-text",
        "group-and-mine",
        "read-logs",
        "does-this-paper-pay",
        "plan-a-cluster",
        "serve-and-measure",
        "train-and-resume",
    ]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_no_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert len(book.cells) <= 14
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            compile(cell.source, str(path), "exec")


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, home, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    pytest.importorskip("torch")
    monkeypatch.setenv("SHOAL_HOME", own_home(home))
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:  # other tests keep the cores busy: measure all the same
        cell.source = cell.source.replace('"runs/serving")', '"runs/serving", anyway=True)')
    client = nbclient.NotebookClient(
        book, timeout=280, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    assert any("text/html" in out.get("data", {}) for out in shown)
