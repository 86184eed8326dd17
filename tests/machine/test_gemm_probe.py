"""The sweep of matrix products: the own kernel, what is drawn, the table, going on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ConfigError, MachineError, StoreError
from shoal.core.random import generator
from shoal.machine.probes.gemm import Gemm, drawn, moved_elements, own_product
from shoal.machine.probes.gemm_power import Sensor, draw
from shoal.machine.probes.gemm_table import TILES, GemmPoint, GemmShape, GemmTable, telling
from shoal.machine.protocols import ProbeContext


def point(**changes: object) -> GemmPoint:
    usual = {"M": 8, "N": 8, "K": 8, "seconds": 1e-5, "low": 9e-6, "high": 2e-5, "repeats": 5}
    return GemmPoint.model_validate({**usual, **changes})


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 33, 5), (130, 65, 300), (32, 2060, 257)])
def test_own_kernel_is_numpy(tile: int, sizes: tuple[int, int, int]) -> None:
    M, N, K = sizes
    random = generator(0, purpose="test gemm", index=M)
    a = random.standard_normal((M, K), dtype=np.float32)
    b = random.standard_normal((K, N), dtype=np.float32)
    np.testing.assert_allclose(own_product(a, b, tile), a @ b, rtol=1e-4, atol=1e-4)


def test_own_kernel_refuses_what_it_cannot() -> None:
    a = np.ones((2, 3), dtype=np.float32)
    with pytest.raises(ConfigError, match=r"gemm\.tile = 3"):
        own_product(a, a.T, 3)
    with pytest.raises(ConfigError, match=r"gemm\.operands"):
        own_product(a, a, 4)


def test_moved_elements_are_what_the_loops_move() -> None:
    # One tile of 4 x 4 over K = 8: packing reads and writes 2 * 8 * 4 twice, the tile reads
    # 8 * 8 and writes 16.
    assert moved_elements(GemmShape(M=4, N=4, K=8, tile=4)) == 2 * 8 * 8 + 8 * 8 + 16
    # A tile of 8 pads the same product: reads 4, writes 8 a row of each panel.
    assert moved_elements(GemmShape(M=4, N=4, K=8, tile=8)) == 2 * 8 * 12 + 8 * 16 + 16


def test_draws_are_a_function_of_their_number() -> None:
    for index in range(9):
        shapes = drawn(0, index, threads=2, largest=512)
        assert shapes == drawn(0, index, threads=2, largest=512)
        if index % 3 == 0:
            assert [shape.tile for shape in shapes] == list(TILES)
        else:
            assert [shape.dtype for shape in shapes] == ["fp32", "bf16", "int8"]
        assert len({shape.group for shape in shapes}) == 1
        assert all(16 <= size <= 512 for size in shapes[0].group)
    assert len({drawn(0, index, threads=1)[0].group for index in range(30)}) == 30


def test_table_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "gemm.jsonl"
    points = (point(), point(M=9, dtype="bf16", layout="nt", threads=2), point(tile=4, watts=50.0))
    table = GemmTable(fingerprint=telling(), points=points)
    table.write(path)
    assert GemmTable.read(path) == table
    assert len(path.read_text().splitlines()) == 4
    table.check_here(path)


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (0, "[]", "line 1: its first line has no format"),
        (1, '{"M": 8', "line 2: .*no point of a sweep"),
        (1, json.dumps({**point().model_dump(), "M": 0}), r"line 2: point\.M = 0"),
        (1, json.dumps({**point().model_dump(), "dtype": "fp4"}), r"line 2: .*gemm\.dtype = 'fp4'"),
    ],
)
def test_damaged_table_names_the_line(tmp_path: Path, line: int, text: str, message: str) -> None:
    path = tmp_path / "gemm.jsonl"
    GemmTable(fingerprint=telling(), points=(point(),)).write(path)
    lines = path.read_text().splitlines()
    lines[line] = text
    path.write_text("\n".join(lines))
    with pytest.raises((StoreError, ConfigError), match=message):
        GemmTable.read(path)


def test_missing_and_empty_tables(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="shoal probe gemm"):
        GemmTable.read(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(StoreError, match="it is empty"):
        GemmTable.read(tmp_path / "empty")


def test_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "gemm.jsonl"
    with ProbeContext(home=tmp_path) as context:
        probe = Gemm(budget_s=0.15, path=str(path), largest=48, dtypes=(), watts=100.0)
        first = probe.sweep(context)
        second = probe.sweep(context)
    assert 0 < len(first.points) < len(second.points)
    assert second.points[: len(first.points)] == first.points
    shapes = [one.shape for one in second.points]
    assert len(set(shapes)) == len(shapes)
    wanted = itertools.chain.from_iterable(
        drawn(0, index, threads=1, largest=48) for index in range(0, 3000, 3)
    )
    assert shapes == list(itertools.islice(wanted, len(shapes)))
    assert GemmTable.read(path) == second
    for one in second.points:
        assert one.repeats == 5
        assert one.low <= one.seconds <= one.high
        assert one.power in ("modelled", "rapl")


def test_table_of_another_machine_is_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "gemm.jsonl"
    elsewhere = {**telling(), "cpu": "another"}
    GemmTable(fingerprint=elsewhere, points=(point(),)).write(path)
    with (
        ProbeContext(home=tmp_path) as context,
        pytest.raises(MachineError, match="cpu was 'another'"),
    ):
        Gemm(budget_s=0.1, path=str(path), dtypes=()).sweep(context)


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget_s": 0.0},
        {"largest": 8},
        {"dtypes": ("fp8",)},
        {"watts": -1.0},
    ],
)
def test_impossible_options(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"probe.gemm.{next(iter(wrong))}"):
        Gemm(**wrong)  # type: ignore[arg-type]


def test_sensor_reads_counters_and_says_when_there_are_none(tmp_path: Path) -> None:
    sensor = Sensor(tmp_path)
    sensor.start()
    assert (sensor.stop(), sensor.source) == (None, "")
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    counter.parent.mkdir()
    counter.write_text("1000000\n")
    sensor = Sensor(tmp_path)
    sensor.start()
    assert sensor._begin is not None
    sensor._begin = (sensor._begin[0] - 2.0, sensor._begin[1])  # two seconds ago
    counter.write_text("101000000\n")
    assert sensor.stop() == pytest.approx(50.0, rel=0.01)
    counter.write_text("0\n")  # wrapped around
    assert sensor.stop() is None
    assert sensor.source == "rapl"


def test_modelled_draw_is_between_idle_and_load() -> None:
    assert draw(100.0, 0.0) == 50.0
    assert draw(100.0, 1.0) == 100.0
    assert 75.0 < draw(100.0, 0.5) < 100.0
    with pytest.raises(ConfigError, match=r"gemm\.watts"):
        draw(0.0, 0.5)
