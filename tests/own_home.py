"""A home of a test's own that shares what has been compiled with the homes of all others."""

from __future__ import annotations

from pathlib import Path

from shoal.core.files import shoal_home


def own_home(place: Path) -> str:
    """Make ``place`` one, for ``SHOAL_HOME``: kernels are the same in each, and take minutes."""
    compiled = shoal_home() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "native").exists():
        (place / "native").symlink_to(compiled)
    return str(place)
