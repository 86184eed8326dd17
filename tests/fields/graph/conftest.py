"""A home of its own for each test, and a graph in files."""

import numpy as np
import pytest

from own_home import own_home


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


@pytest.fixture
def files(tmp_path):
    """Six communities of 60 nodes, with ids from 1000."""
    draw = np.random.default_rng(0)
    group = draw.integers(0, 6, 360)
    ends = draw.integers(0, 360, (2, 30_000))
    near = (group[ends[0]] == group[ends[1]]) & (draw.random(30_000) < 0.5)
    pairs = ends[:, near | (draw.random(30_000) < 0.01)].T + 1000
    (tmp_path / "edges.txt").write_text("".join(f"{a} {b}\n" for a, b in pairs))
    (tmp_path / "labels.txt").write_text(
        "".join(f"{node + 1000} group {one}\n" for node, one in enumerate(group))
    )
    return str(tmp_path / "edges.txt"), str(tmp_path / "labels.txt")
