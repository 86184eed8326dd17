"""DDP, FSDP2 and tensor parallel DTensors, saved and loaded into each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.parallel.comm.processes import run_processes


@pytest.mark.slow
def test_torchs_own_ways_load_what_each_of_them_saved(tmp_path: Path) -> None:
    ranks = Path(__file__).with_name("framework_ranks.py")
    assert run_processes(f"{ranks}:every_kind", 4, {"place": str(tmp_path)}) == [[]] * 4
