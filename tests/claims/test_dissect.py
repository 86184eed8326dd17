"""The experiment of claim [48]: its arithmetic, its quick run and its A/A run."""

import pytest

from shoal.claims import CLAIMS
from shoal.claims.experiments import dissect
from shoal.claims.experiments.dissect import (
    SHAPES,
    Dissect,
    adjacent_ratios,
    predict,
    repeat_errors,
    size_errors,
)
from shoal.claims.judge import judge
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError
from shoal.core.native import compiler
from shoal.ir.machine import Measurement
from shoal.machine import host


def number(probe, quantity, median, at=None, note="threads=1"):
    return Measurement(
        probe=probe,
        quantity=quantity,
        unit="1",
        median=median,
        low=median,
        high=median,
        repeats=1,
        at=at,
        note=note,
    )


def test_size_errors():
    chase = [
        number("memory_latency", "l1d.capacity", 48000.0),
        number("memory_latency", "l3.capacity", 1e7),
    ]
    assert size_errors(chase, {"l1d": 32000, "l2": 10**6, "l3": 10**7}) == (0.5, 1.0)


def test_adjacent_ratios():
    latencies = [number("m", f"{n}.latency", v) for n, v in (("l1d", 1.0), ("l2", 4.0))]
    assert adjacent_ratios(latencies) == (4.0, 1.0)  # two levels are too few to show anything
    assert adjacent_ratios([*latencies, number("m", "dram.latency", 80.0)]) == (4.0, 20.0)


def test_repeat_errors_compare_equal_things():
    first = [number("units", "fma_fp32", 10.0), number("matmul", "matmul_fp32", 8.0, at=64)]
    second = [number("units", "fma_fp32", 11.0), number("matmul", "matmul_fp32", 8.0, at=128)]
    assert repeat_errors(first, second) == pytest.approx((0.1,))
    crowd = [number("matmul", "matmul_fp32", 8.0, at=64, note="threads=2")]
    assert repeat_errors(crowd, crowd) == ()


def test_the_roofline_takes_the_slower_of_arithmetic_and_memory():
    products = [
        number("matmul", "matmul_fp32", 1e11, at=64),
        number("matmul", "matmul_fp32", 4e11, at=1024),
    ]
    fast = [number("memory_bandwidth", "read_2threads", 1e12, at=2**20)]
    slow = [number("memory_bandwidth", "read_2threads", 1e9, at=2**20)]
    products = [item.model_copy(update={"note": "threads=2"}) for item in products]
    cube = (256, 256, 256)  # half-way between the two probed edges, on logarithms
    assert predict(cube, "fp32", products, fast, 2) == pytest.approx(2 * 256**3 / 2e11)
    assert predict(cube, "fp32", products, slow, 2) == pytest.approx(3 * 4 * 256**2 / 1e9)
    with pytest.raises(ConfigError, match="probes of products"):
        predict(cube, "bf16", products, fast, 2)


def test_twenty_shapes_that_were_not_probed():
    assert len(set(SHAPES)) == 20
    assert not {(edge, edge, edge) for edge in (64, 128, 256, 512, 1024, 2048)} & set(SHAPES)


def test_bad_options():
    with pytest.raises(ConfigError, match=r"claim\.dissect\.largest_bytes"):
        Dissect(largest_bytes=4096)
    with pytest.raises(ConfigError, match=r"claim\.dissect\.threads"):
        Dissect(threads=-1)
    with pytest.raises(ConfigError, match=r"claim\.dissect\.repeats"):
        Dissect(repeats=1)


def test_refuses_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(dissect, "compiler", lambda: None)
    assert "compiler" in Dissect().refuses(ExperimentContext(work_dir=tmp_path))


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.skipif(not host.caches(), reason="the system reports no caches")
def test_the_quick_run_can_be_judged(tmp_path):
    claim = CLAIMS.build("dissect")
    context = ExperimentContext(work_dir=tmp_path)
    samples = claim.run(context, quick=True)
    assert set(samples.metrics) == {"prefetchable_steps"}
    aa = claim.run(context, quick=True, as_baseline=True)
    assert aa.metrics["prefetchable_steps"].method[0] > 0.99  # the trap: in order of addresses
    verdict = judge(claim.metrics, samples, aa=aa, quick=True)
    assert [(metric.name, metric.holds) for metric in verdict.metrics] == [
        ("prefetchable_steps", True)
    ]
