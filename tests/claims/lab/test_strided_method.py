"""The tables and the choice of a method."""

from __future__ import annotations

import itertools

import pytest
import torch

from shoal.claims.lab.strided.method import LocalityTimes, MethodModel, TimeGrid, measure_packing
from shoal.core.errors import KernelError
from shoal.kernel.strided.canonical import canonical
from shoal.kernel.strided.datatype import hindexed, hvector, named


def linear(rate: float, start: float = 0.0) -> TimeGrid:
    sizes = tuple(2.0**k for k in range(0, 31, 2))
    return TimeGrid(rows=sizes, seconds=tuple((start + size / rate,) for size in sizes))


def blocks(each: float, rate: float) -> TimeGrid:
    numbers, sizes = (1.0, 64.0, 4096.0), tuple(2.0**k for k in range(0, 25, 4))
    return TimeGrid(
        rows=numbers,
        columns=sizes,
        seconds=tuple(tuple(n * (each + size / rate) for size in sizes) for n in numbers),
    )


def parts(**changes: TimeGrid | None) -> LocalityTimes:
    pack = TimeGrid(
        rows=(64.0, 2.0**24),
        columns=(1.0, 4096.0),
        seconds=((1e-6, 1e-6), (2.0**24 / 1e9, 2.0**24 / 1e10)),
    )
    return LocalityTimes.model_validate(
        {
            "pack": pack,
            "unpack": pack,
            "send": linear(1e10, 5e-6),
            "blocks": blocks(5e-6, 1e10),
            **changes,
        }
    )


def test_between_points_the_logarithm_is_bilinear() -> None:
    grid = TimeGrid(rows=(1.0, 4.0), columns=(1.0, 16.0), seconds=((1e-6, 1e-4), (1e-5, 1e-3)))
    assert grid.at(1, 1) == pytest.approx(1e-6)
    assert grid.at(4, 16) == pytest.approx(1e-3)
    assert grid.at(2, 1) == pytest.approx((1e-6 * 1e-5) ** 0.5)
    assert grid.at(2, 4) == pytest.approx((1e-6 * 1e-5 * 1e-4 * 1e-3) ** 0.25)
    # Beyond the last point it goes on as it ended.
    assert grid.at(16, 1) == pytest.approx(1e-4)
    assert grid.at(0.25, 1) == pytest.approx(1e-7)
    assert TimeGrid(rows=(8.0,), seconds=((2e-6,),)).at(100, 7) == pytest.approx(2e-6)


def test_a_line_is_followed_exactly_where_time_is_proportional() -> None:
    grid = linear(1e9)
    for size in (3, 1000, 5e6, 2.0**31):
        assert grid.at(size) == pytest.approx(size / 1e9)


def test_few_large_blocks_go_as_they_lie_and_many_small_ones_do_not() -> None:
    model = MethodModel({"node": parts()})
    large = canonical(hvector(2, 1, 2**23, named(2**22)))
    small = canonical(hvector(4096, 1, 64, named(16)))
    assert model.choose(large) == "blocks"
    assert model.choose(small) == "oneshot"
    seconds = model.seconds(small)
    assert set(seconds) == {"oneshot", "blocks"}
    assert seconds["oneshot"] < seconds["blocks"]
    assert set(model.seconds(canonical(hvector(2**20, 1, 64, named(16))))) == {"oneshot"}
    assert set(model.seconds(canonical(hindexed([1, 2], [0, 9], named(4))))) == {"oneshot"}
    assert set(model.seconds(canonical(named(4), 0))) == {"oneshot"}


def test_devices_and_copies_add_their_own_sums() -> None:
    fast, slow = linear(1e12, 1e-6), linear(1e9, 1e-6)
    layout = canonical(hvector(2**16, 1, 64, named(16)))
    seconds = MethodModel({"node": parts(copy_out=slow, copy_in=slow)}).seconds(layout)
    assert seconds["staged"] == pytest.approx(seconds["oneshot"] + 2 * slow.at(2**20))
    device = {"device_pack": fast, "device_unpack": fast, "device_send": fast}
    model = MethodModel({"node": parts(copy_out=slow, copy_in=slow, **device)})
    seconds = model.seconds(layout)
    assert seconds["device"] == pytest.approx(3 * fast.at(2**20))
    assert seconds["staged"] < seconds["oneshot"] + 2 * slow.at(2**20)
    assert model.choose(layout) == "device"


def test_choices_are_remembered() -> None:
    model = MethodModel({"node": parts(), "far": parts(send=linear(1e6))})
    layout = canonical(hvector(2, 1, 2**21, named(2**20)))
    first = model.choose(layout)
    model.parts["node"] = parts(blocks=blocks(1.0, 1.0))
    assert model.choose(layout) == first
    assert model.choose(layout, "far") == "blocks"
    with pytest.raises(KernelError, match="one of node, far"):
        model.choose(layout, "elsewhere")


@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        ((1.0, 2.0), ((1.0,),), "2 rows of 1"),
        ((2.0, 1.0), ((1.0,), (1.0,)), "rising"),
        ((0.0, 1.0), ((1.0,), (1.0,)), "rising"),
        ((1.0,), ((0.0,),), "more than 0"),
    ],
)
def test_bad_tables(
    rows: tuple[float, ...], seconds: tuple[tuple[float, ...], ...], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        TimeGrid(rows=rows, seconds=seconds)
    with pytest.raises(KernelError, match="at least one locality"):
        MethodModel({})


def test_packing_is_measured_on_the_whole_grid() -> None:
    ticks = itertools.count()
    torch.set_num_threads(1)
    packing, unpacking = measure_packing(largest=2**12, repeats=1, clock=lambda: next(ticks) * 1e-6)
    assert packing.rows == (64.0, 256.0, 1024.0, 4096.0)
    assert packing.columns[0] == 1.0
    assert packing.seconds[0][0] == pytest.approx(1e-6)
    assert unpacking.at(512, 7) == pytest.approx(1e-6)
