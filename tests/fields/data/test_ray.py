"""Jobs whose shards a Ray cluster processes give what one process gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import pyarrow.parquet as pq

import shoal
from own_home import own_home
from shoal.core.pool.ray import RayPool

pytestmark = [pytest.mark.slow, pytest.mark.multi]

JOBS: dict[str, dict[str, Any]] = {
    "curate": {"method": "filters"},
    "dedupe": {"threshold": 0.7},
    "mine": {"min_support": 0.1, "sharded": True},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One cluster for all jobs; the pools of the jobs join it."""
    with RayPool(workers=2).open():
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences, some of them twice, and baskets, in four files each."""
    place = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    words = ["the", "of", "to", "and", "that", "have", "with", "be", "in", "it", "for", "on", "as"]
    for at in range(4):
        texts = [" ".join(draw.choice(words, 80)) + f" {row % 30}." for row in range(50)]
        texts += texts[:5]
        rows = [{"text": one} for one in texts]
        baskets = [{"items": draw.choice(words, 5, replace=False).tolist()} for _ in range(200)]
        for name, some in (("texts", rows), ("baskets", baskets)):
            (place / name).mkdir(exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in some)
            (place / name / f"{at}.jsonl").write_text(lines)
    return place


def outputs(place: Path) -> dict[str, Any]:
    """Tables that a run has written."""
    return {
        str(path.relative_to(place)): pq.read_table(path).to_pylist()
        for path in sorted(place.rglob("*.parquet"))
    }


@pytest.mark.parametrize("kind", JOBS)
def test_ray_gives_the_same(
    kind: str, cluster: None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    where = str(data / ("baskets" if kind == "mine" else "texts"))
    found = {}
    for pool in (None, "ray"):
        settings = JOBS[kind] | ({"pool": pool, "workers": 2} if pool else {})
        plan = shoal.plan(kind=kind, data=where, machine="laptop", **settings).best
        shoal.run(plan, directory=tmp_path / str(pool), anyway=True)
        found[pool] = outputs(tmp_path / str(pool))
    assert found[None] and found["ray"] == found[None]
