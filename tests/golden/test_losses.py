"""Losses, gradient norms, states and bytes of every part of training, as they were recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from losses_rows import DRAFTERS, KINDS, PROCESSES, ROWS, Row, tolerance_of  # noqa: E402
from losses_runs import draft, rounded, routers, simple, together, train  # noqa: E402
from recorded import HERE, settle  # noqa: E402

from shoal.core.parts import table  # noqa: E402
from shoal.parallel.comm.processes import run_processes  # noqa: E402

pytestmark = [pytest.mark.slow]

CASES = [
    pytest.param(
        row, dtype, f"{name} {dtype}", marks=[pytest.mark.multi] if "fuyou" in name else []
    )
    for name, row in ROWS.items()
    for dtype in row.dtypes
]

SIMPLE: dict[str, dict[str, int]] = {"alone": {}, "dp2": {"dp": 2}, "tp2": {"dp": 1, "tp": 2}}

OTHERS = [
    *(f"drafter {name}" for name in DRAFTERS),
    *(f"simple {name}" for name in SIMPLE),
    "quantisation-aware",
    "routers",
]


def agree(name: str, dtype: str, found: dict[str, Any]) -> None:
    """As it was recorded; digests of weights are compared where their bits are the same."""
    bits = ["weights", "state"]
    if "bf16" in name:  # in which tokens may choose other experts, and travel
        bits.append("sent")
    tolerance = tolerance_of(name, dtype)
    settle("losses", f"{name} {dtype}", found, tolerance=tolerance, bits=bits)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("row", "dtype", "name"), CASES, ids=[case.values[2] for case in CASES])
def test_training_is_as_recorded(row: Row, dtype: str, name: str, tmp_path: Path) -> None:
    agree(name.removesuffix(f" {dtype}"), dtype, train(row, dtype, tmp_path))


SELECTIVE = {
    "alone": {"dropout": 0.1},
    "alone bf16": {},
    "tp2 sp": {},
    "pp2": {"dropout": 0.1},
    "schedule zbv": {},
    "cp2": {},
    "shard zero3": {},
    "moe ep2": {},
    "peft lora": {},
    "peft qlora": {},
}


@pytest.mark.parametrize("name", SELECTIVE)
def test_what_is_kept_of_a_block_changes_no_bit(name: str, tmp_path: Path) -> None:
    row = next(one for known, one in ROWS.items() if known.startswith(name))
    plain, selective = (
        train(row._replace(job={**row.job, **SELECTIVE[name], "recompute": way}), "fp32", tmp_path)
        for way in ("none", "selective")
    )
    # What is computed again sends again.
    for run in (plain, selective):
        run.pop("sent", None)
    assert selective == plain


@pytest.mark.multi
@pytest.mark.parametrize("world", PROCESSES)
def test_processes_train_as_recorded(world: int, tmp_path: Path) -> None:
    target = f"{Path(__file__).with_name('losses_runs.py')}:processes"
    given = {"rows": list(PROCESSES[world]), "dtype": "fp64", "place": str(tmp_path)}
    ranks = run_processes(target, world, given, timeout_s=200)
    for name in PROCESSES[world]:
        agree(f"{name} processes", "fp64", together([rank[name] for rank in ranks]))


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_are_as_recorded(name: str, tmp_path: Path) -> None:
    agree(f"drafter {name}", "fp32", draft(name, tmp_path))


@pytest.mark.parametrize("name", SIMPLE)
def test_three_functions_train_as_recorded(name: str) -> None:
    agree(f"simple {name}", "fp64", simple(SIMPLE[name]))


def test_rounding_in_training_is_as_recorded() -> None:
    agree("quantisation-aware", "fp32", rounded())


def test_routers_are_as_recorded() -> None:
    agree("routers", "fp32", routers())


def test_every_part_has_a_row() -> None:
    names = [*ROWS, *(f"drafter {name}" for name in DRAFTERS)]
    for kind in KINDS:
        for part in table(kind):
            assert any(name.startswith(f"{kind} {part}") for name in names), f"{kind} {part}"


def test_the_file_has_no_other_rows() -> None:
    rows = {f"{name} {dtype}" for name, row in ROWS.items() for dtype in row.dtypes}
    rows |= {f"{name} processes fp64" for names in PROCESSES.values() for name in names}
    rows |= {f"{name} {'fp64' if name.startswith('simple') else 'fp32'}" for name in OTHERS}
    stored = json.loads((HERE / "losses.json").read_text())["rows"]
    assert sorted(stored) == sorted(rows)
