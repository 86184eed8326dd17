"""Half an hour of mixed load; SHOAL_SOAK_S makes it shorter, to see that it works."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = [pytest.mark.multi, pytest.mark.soak]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SECONDS = float(os.environ.get("SHOAL_SOAK_S", "1800"))


@pytest.mark.timeout(SECONDS + 300)
def test_nothing_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import soak

    rows = soak.rows(*soak.soak(tmp_path, SECONDS))
    assert [row for row in rows if not row.holds] == []
