"""Claim [19]: what is counted, and how timings become samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.claims.experiments.tempi import Tempi, _timings, objects, random_nest
from shoal.claims.frame import ClaimRun
from shoal.claims.judge import judge
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError
from shoal.core.random import generator


def test_quick_run_counts(tmp_path: Path) -> None:
    context = ExperimentContext(work_dir=tmp_path)
    experiment = Tempi(nests=10)
    samples = experiment.run(context, quick=True)
    aa = experiment.run(context, quick=True, as_baseline=True)
    verdict = judge(experiment.metrics, samples, aa=aa, quick=True)
    assert verdict.status == "works"
    assert len(samples.metrics["one_form"].method) == len(objects())
    assert aa.metrics["wrong_types"].method[0] > 0
    assert sum(aa.metrics["one_form"].method) == 0


def test_nests_are_small_and_of_every_kind() -> None:
    nests = [random_nest(generator(0, purpose="t", index=i)) for i in range(60)]
    assert max(nest.size for nest in nests) < 200_000
    assert max(nest.depth for nest in nests) >= 4


def test_objects_name_the_same_bytes() -> None:
    for spelled in objects():
        assert len(spelled) >= 5
        for other in spelled[1:]:
            np.testing.assert_array_equal(other.typemap(), spelled[0].typemap())


def packed(**changes: Any) -> dict[str, Any]:
    seconds = {
        "face_4B": {
            "pack": [1.0, 1.0],
            "contiguous": [2.0, 2.0],
            "loop": [300.0, 300.0],
            "mpi": [4.0, 4.0],
        },
        "tiny_4B": {"pack": [1.0, 1.0], "contiguous": [1.5, 1.5], "mpi": [5.0, 5.0]},
        "whole": {"pack": [1.0, 1.0], "contiguous": [1.0, 1.0], "memcpy": [0.95, 0.95]},
    }
    return {
        "seconds": seconds,
        "bytes": dict.fromkeys(seconds, 8),
        "skipped": "",
        "moved": dict.fromkeys(seconds, 16),
        "wrong": 0,
        **changes,
    }


def test_the_worst_case_counts(tmp_path: Path) -> None:
    context = ExperimentContext(work_dir=tmp_path)
    timings, aa = ClaimRun(context), ClaimRun(context, as_baseline=True)
    _timings(timings, packed())
    assert timings.details["worst_case"] == {
        "mpi_speedup": "face_4B",
        "contiguous_speedup": "tiny_4B",
        "loop_speedup": "face_4B",
        "memcpy_speedup": "whole",
    }
    assert timings.metrics["contiguous_speedup"].baseline == (1.5, 1.5)
    assert timings.metrics["mpi_wrong_bytes"].method == (0.0,)
    _timings(aa, packed())
    assert aa.metrics["contiguous_speedup"].method == aa.metrics["contiguous_speedup"].baseline


def test_without_mpi_its_metrics_are_skipped_with_the_reason(tmp_path: Path) -> None:
    raw = packed(skipped="no MPI here")
    for taken in raw["seconds"].values():
        taken.pop("mpi", None)
    timings = ClaimRun(ExperimentContext(work_dir=tmp_path))
    _timings(timings, raw)
    assert set(timings.skipped) == {"mpi_speedup", "mpi_wrong_bytes"}
    assert "mpi_speedup" not in timings.metrics


@pytest.mark.parametrize("option", ["edge", "arrays", "pairs", "nests", "repeats"])
def test_bad_options(option: str) -> None:
    with pytest.raises(ConfigError, match=f"claim.tempi.{option}"):
        Tempi(**{option: 0})
