"""The method ``qqt``: pools are probed, the best union is kept, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from own_home import own_home

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import pyarrow.parquet as pq

from shoal.core.errors import DataError
from shoal.fields.data.curate.job import CurateJob, CurateReport
from shoal.fields.data.curate.kind import CurateKind
from shoal.machine import load


def run(place: Path, data: str, **method: Any) -> CurateReport:
    values = {"data": data, "method": {"name": "qqt", **method}}
    (plan,) = CurateKind().plan(CurateJob.model_validate(values), load("laptop"))
    return CurateKind().run(plan, place)


@pytest.mark.slow
def test_it_keeps_whole_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    report = run(tmp_path / "run", "digits", samples=3000)
    scores = pq.read_table(tmp_path / "run" / "scores.parquet")
    order = np.argsort(scores["score"].to_numpy(), kind="stable")
    pools = np.array_split(order, 4)
    wanted = np.zeros(1797, bool)
    wanted[np.concatenate([pools[at] for at in report.details["pools"]])] = True
    assert np.array_equal(scores["kept"].to_numpy(zero_copy_only=False), wanted)
    assert report.measured["kept_share"] == wanted.mean()
    assert all(b < 0 for b in report.details["utilities"])
    sizes = [len(one["pools"]) for one in report.details["frontier"]]
    assert sizes[0] <= sizes[-1]


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    with pytest.raises(DataError, match="too few for a probe"):
        run(tmp_path / "a", "digits", pools=50)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(300, 4)))
    with pytest.raises(DataError, match="name their column"):
        run(tmp_path / "b", str(tmp_path / "x.npy"), scorer="ssl_prototypes")
