"""The predictor of matrix products, on a sweep that was made up: no clock is read here."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ConfigError, MachineError, StoreError
from shoal.core.random import generator
from shoal.cost.gemm.features import FEATURES, Roofs, features, roofs
from shoal.cost.gemm.predictor import (
    GemmPredictor,
    by_rates,
    fit,
    grouped_folds,
    predictor_path,
    stored,
)
from shoal.cost.gemm.validate import held_out, importance, tile_choices
from shoal.ir import Measurement
from shoal.machine.described import load
from shoal.machine.probes.gemm import drawn
from shoal.machine.probes.gemm_table import TILES, GemmPoint, GemmShape, GemmTable, telling


def seconds(shape: GemmShape) -> float:
    """A machine of 10 GFLOP/s a thread and 10 GB/s, whose tiles are padded and fit registers."""
    tile = shape.tile or 16
    padded = math.prod(-(-size // tile) * tile for size in shape.group[:2]) * shape.K
    speed = {0: 1.0, 1: 0.05, 2: 0.1, 4: 0.3, 8: 0.7, 16: 0.9, 32: 0.6}[shape.tile]
    rate = 1e10 * speed * shape.threads * 4 / {"fp32": 4, "bf16": 2, "int8": 1}[shape.dtype]
    return 2e-6 + max(2.0 * padded / rate, shape.bytes / 1e10)


@pytest.fixture(scope="module")
def table() -> GemmTable:
    random = generator(0, purpose="test gemm noise")
    points = []
    for index in range(110):
        for shape in drawn(0, index, threads=2, largest=1024):
            took = seconds(shape) * float(np.exp(0.03 * random.standard_normal()))
            watts = 40.0 + 20.0 * shape.threads
            points.append(
                GemmPoint(
                    **shape.model_dump(),
                    seconds=took,
                    low=0.98 * took,
                    high=1.05 * took,
                    repeats=5,
                    watts=watts,
                    power="modelled",
                )
            )
    return GemmTable(fingerprint=telling(), points=tuple(points))


@pytest.fixture(scope="module")
def predictor(table: GemmTable) -> GemmPredictor:
    return fit(table, trees=30)


def test_features_by_hand() -> None:
    limits = Roofs(
        compute={"4/fp32/1": 1e9},
        bandwidth={"1": 1e9},
        caches={"l1d": 1024, "l2": 2048, "l3": 4096},
    )
    row = dict(zip(FEATURES, features([GemmShape(M=8, N=6, K=16, tile=4)], limits)[0], strict=True))
    flops, size = 2 * 8 * 6 * 16, 4 * (8 * 16 + 16 * 6 + 8 * 6)
    assert row["log_M"] == 3
    assert row["log_flops"] == pytest.approx(math.log2(flops))
    assert row["log_bytes"] == pytest.approx(math.log2(size))
    assert row["log_intensity"] == pytest.approx(math.log2(flops / size), rel=1e-5)
    assert row["compute_bound"] == 1
    assert row["log_roofline_s"] == pytest.approx(math.log2(flops / 1e9), rel=1e-6)
    assert [row[f"log_tiles_{a}"] for a in "mnk"] == [1, 1, 2]
    assert [row[f"remainder_{a}"] for a in "mnk"] == [0, 2, 0]
    assert row["padding"] == pytest.approx(8 * 8 / (8 * 6))
    assert row["log_over_l2"] == pytest.approx(math.log2(size / 2048), rel=1e-5)
    assert (row["a_transposed"], row["b_transposed"]) == (0, 1)


def test_rooflines_are_the_best_that_was_seen(table: GemmTable) -> None:
    limits = roofs(table.points)
    for one in table.points:
        assert limits.seconds(one) <= one.seconds * (1 + 1e-12)
    assert limits.flops(GemmShape(M=1, N=1, K=1, threads=8)) == limits.compute["0/fp32/2"]
    with pytest.raises(ConfigError, match="no product of tile 0 and dtype bf16"):
        roofs([p for p in table.points if p.dtype == "fp32"]).flops(
            GemmShape(M=1, N=1, K=1, dtype="bf16")
        )


def test_knows_shapes_that_it_had_not_seen(predictor: GemmPredictor) -> None:
    unseen = [s for i in range(500, 540) for s in drawn(0, i, threads=2, largest=1024)]
    result = predictor.seconds(unseen)
    error = np.abs(result / [seconds(shape) for shape in unseen] - 1)
    assert (result > 0).all()
    assert np.median(error) < 0.08
    assert 0.85 <= predictor.errors["coverage"] <= 0.95


def test_longer_products_take_longer(predictor: GemmPredictor) -> None:
    shapes = [s for i in range(300, 340) for s in drawn(0, i, threads=2, largest=512)]
    longer = [shape.model_copy(update={"K": 2 * shape.K}) for shape in shapes]
    assert (predictor.seconds(longer) >= 0.9 * (1 - 1e-12) * predictor.seconds(shapes)).all()


def test_same_seed_same_predictor(table: GemmTable) -> None:
    first, second = (fit(table, trees=5, calibrate=False).forest.arrays() for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_reads_what_it_saved(predictor: GemmPredictor, tmp_path: Path) -> None:
    path = tmp_path / "gemm.safetensors"
    predictor.save(path)
    again = GemmPredictor.load(path)
    shapes = drawn(0, 1, threads=2)
    assert again.facts == predictor.facts
    assert np.array_equal(again.seconds(shapes), predictor.seconds(shapes))
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(StoreError, match="copy it again"):
        GemmPredictor.load(path)


def test_stored_is_that_of_this_machine(
    predictor: GemmPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert stored() is None
    predictor.save(predictor_path())
    result = stored()
    assert result is not None and result.points == predictor.points
    assert stored(load("H100")) is None


def test_another_machine_widens_or_refuses(predictor: GemmPredictor) -> None:
    shape = GemmShape(M=256, N=256, K=256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (here,) = predictor.predict([shape])
    with pytest.warns(UserWarning, match="another machine"):
        (there,) = predictor.predict([shape], machine=load("H100"))
    assert there.seconds.high > 1.9 * here.seconds.high
    assert "another machine" in there.note
    with pytest.raises(MachineError, match="shoal probe gemm"):
        predictor.predict([shape], machine=load("H100"), strict=True)


def test_draw_is_said_to_be_modelled(predictor: GemmPredictor) -> None:
    (one,) = predictor.predict([GemmShape(M=256, N=256, K=256, threads=2)])
    assert one.power == "modelled"
    assert one.watts is not None and one.joules is not None
    assert one.watts.value == 80.0
    assert one.joules.value == pytest.approx(80.0 * one.seconds.value)
    assert one.tflops.value == pytest.approx(2 * 256**3 / one.seconds.value / 1e12)


def test_measured_draw_is_learnt(table: GemmTable) -> None:
    sensed = tuple(point.model_copy(update={"power": "rapl"}) for point in table.points)
    predictor = fit(table.model_copy(update={"points": sensed}), trees=10)
    (one,) = predictor.predict([GemmShape(M=256, N=256, K=256, threads=2, dtype="bf16")])
    assert one.power == "sensor"
    assert one.watts is not None and one.watts.value == pytest.approx(80.0, rel=0.05)
    assert predictor.errors["watts_error"] < 0.05


def test_without_draw_there_is_no_energy(table: GemmTable) -> None:
    bare = tuple(p.model_copy(update={"watts": None, "power": ""}) for p in table.points)
    predictor = fit(table.model_copy(update={"points": bare}), trees=5, calibrate=False)
    (one,) = predictor.predict([GemmShape(M=64, N=64, K=64)])
    assert (one.watts, one.joules, one.power) == (None, None, "")
    with pytest.raises(ConfigError, match="--watts"):
        predictor.best_tile(64, 64, 64, objective="energy")


def test_tiles_are_ranked(predictor: GemmPredictor) -> None:
    ranked = predictor.best_tile(512, 512, 512)
    assert ranked[0].shape.tile == 16
    assert {one.shape.tile for one in ranked} == set(TILES)
    times = [one.seconds.value for one in ranked]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"M": 0}, "M"),
        ({"K": -3}, "K"),
        ({"dtype": "fp4"}, r"gemm\.dtype = 'fp4'"),
        ({"layout": "xx"}, r"gemm\.layout"),
        ({"tile": 3}, r"gemm\.tile"),
    ],
)
def test_impossible_products(wrong: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        GemmShape.model_validate({"M": 8, "N": 8, "K": 8, **wrong})


def test_splits_hold_out_what_they_say(table: GemmTable) -> None:
    fold = grouped_folds(table.points, 5, 0)
    groups = [
        {p.group for p, f in zip(table.points, fold, strict=True) if f == n} for n in range(5)
    ]
    assert sum(map(len, groups)) == len(set.union(*groups))
    result = {
        split: held_out(table, split, trees=10, folds=2) for split in ("random", "extrapolate")
    }
    assert len(result["random"].seconds) == len(table.points)
    assert 0.1 < len(result["extrapolate"].seconds) / len(table.points) < 0.7
    assert result["random"].r2("forest") > 0.97
    for split in result.values():
        assert set(split.summary()) == {"forest", "roofline", "linear", "boosting"}
    forest, roofline = (np.median(result["random"].errors(n)) for n in ("forest", "roofline"))
    assert forest < roofline / 2
    with pytest.raises(ConfigError, match="split = 'none'"):
        held_out(table, "none")


def test_tiles_of_unseen_shapes(table: GemmTable) -> None:
    chosen = tile_choices(table, trees=20, folds=3)
    assert len(chosen) == len({p.group for p in table.points if p.tile})
    assert np.mean([one.loss <= 1.1 for one in chosen]) > 0.8
    by_roofline = tile_choices(table, trees=20, folds=3, roofline=True)
    assert {one.chosen for one in by_roofline} == {1}


def test_importance_names_what_matters(table: GemmTable) -> None:
    result = importance(table, trees=10)
    assert set(result) == set(FEATURES)
    assert next(iter(result)) in ("tile", "padding", "log_roofline_s", "log_flops", "log_intensity")


def test_too_few_products(table: GemmTable) -> None:
    with pytest.raises(ConfigError, match="at least 60"):
        fit(table.model_copy(update={"points": table.points[:10]}))


def test_a_machine_that_nobody_swept() -> None:
    shape = GemmShape(M=8192, N=8192, K=8192, dtype="bf16")
    rates = by_rates(shape, load("H100"))
    assert 1e-3 < rates.seconds.value < 3e-3
    assert rates.roofline_s < rates.seconds.value
    assert "not swept" in rates.note
    assert rates.power == "modelled"


def test_a_probed_machine_waits_for_its_memory() -> None:
    """A thin product takes as long as its bytes, whatever rate elementwise operators had."""
    probed = load("laptop")
    measured = Measurement(
        probe="framework", quantity="elementwise_bandwidth", unit="B/s", median=1e12, low=1e12,
        high=1e12, repeats=5, at=1e8,
    )  # fmt: skip
    slow = probed.model_copy(
        update={
            "measurements": (measured,),
            "device": probed.device.model_copy(
                update={
                    "memory": tuple(
                        tier.model_copy(update={"read_bandwidth": 1e9, "write_bandwidth": 1e9})
                        for tier in probed.device.memory
                    )
                }
            ),
        }
    )
    shape = GemmShape(M=1, N=20_000, K=20_000, threads=probed.device.num_cores or 1)
    assert by_rates(shape, slow).seconds.value >= shape.bytes / 1e9
    fast = by_rates(shape, probed.model_copy(update={"measurements": (measured,)}))
    assert fast.seconds.value < 0.5 * by_rates(shape, slow).seconds.value
