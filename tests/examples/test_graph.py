"""The example of graphs, as it is in ``examples/graph``."""

from __future__ import annotations

import runpy
from pathlib import Path

PLACE = Path(__file__).parents[2] / "examples" / "graph"


def test_modules_that_import_alike(tmp_path: Path) -> None:
    main = runpy.run_path(str(PLACE / "similar_modules.py"))["main"]
    nearest = main(tmp_path, ask=("tarfile", "not a module"))
    assert set(nearest) == {"tarfile"} and len(nearest["tarfile"]) == 3


def test_modules_that_are_imported_alike(tmp_path: Path) -> None:
    main = runpy.run_path(str(PLACE / "module_communities.py"))["main"]
    found = main(tmp_path, seeds=("socket",), size=6)
    assert "socket" in found and 1 < len(found) <= 6
