"""``shoal.bench_*`` and ``shoal.probe_*``: what the command line measures, from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import shoal
from shoal.core.errors import ConfigError, ServeError
from shoal.ir import ServeJob


def test_attention_takes_names_and_fields() -> None:
    report = shoal.bench_attention(
        kernels=["sdpa"], masks="causal", methods="none", lengths=[64], quick=True, heads=4
    )
    assert report.counts()["ok"] == 1
    assert (report.settings.heads, report.settings.repeats) == (4, 1)
    with pytest.raises(ConfigError, match="hedas"):
        shoal.bench_attention(kernels="none", masks="causal", methods="none", hedas=4)


def test_kernels_are_timed_when_all_is_ready() -> None:
    ready: list[bool] = []
    rows = shoal.bench_kernels(
        ["rms_norm"], rows=(1,), quick=True, on_ready=lambda: ready.append(True)
    )
    assert ready == [True]
    assert {row.op for row in rows} == {"rms_norm"}
    assert all(row.seconds.value > 0 for row in rows)
    with pytest.raises(ConfigError, match="--dtype = 'fp8'"):
        shoal.bench_kernels(dtype="fp8")


def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--goal = 'speed'"):
        shoal.bench_tune(goal="speed")
    with pytest.raises(ConfigError, match="--also = 'medusa'"):
        shoal.bench_decode(also={"medusa": tmp_path})
    with pytest.raises(ConfigError, match="speculative is not set"):
        shoal.probe_decode(ServeJob(model="shoal-0.3m"))
    with pytest.raises(ServeError, match="is a server running there"):
        shoal.bench_url(shoal.bench_job(workload="chat"), "http://127.0.0.1:9", requests=1)


@pytest.mark.slow
def test_rows_and_guesses_are_timed_and_kept(tmp_path: Path) -> None:
    job = ServeJob(model="shoal-0.3m", speculative="ngram", threads=1)
    costs = shoal.probe_decode(job, out=tmp_path / "costs.json")
    assert json.loads((tmp_path / "costs.json").read_text())["rows"] == list(costs.rows)
    assert len(list(costs.tables())) == 2
