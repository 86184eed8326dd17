"""A sweep of matrix products over shapes, types, layouts, threads and tiles.

Two kernels: torch's products, and Shoal's own one with a square register tile, which is
measured at every tile. The sweep draws shapes until its time is over, keeps every point in
a table on disk and goes on where it stopped. What is learnt from it is in
:mod:`shoal.cost.gemm.predictor`.

Source: Huynh-Tran et al., Understanding GEMM Performance and Energy on NVIDIA Ada Lovelace,
2024 (what is swept).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.ir.machine import Measurement
from shoal.machine.native import library
from shoal.machine.probes.gemm_power import Sensor, draw
from shoal.machine.probes.gemm_table import (
    DTYPE_BYTES,
    LAYOUTS,
    TILES,
    GemmPoint,
    GemmShape,
    GemmTable,
    table_path,
    telling,
)
from shoal.machine.protocols import ProbeContext

REPEATS = 5
SMALLEST = 16
# Shoal's own kernel with a tile of one takes a second for the product of two such squares.
LARGEST_OWN = 768
_SAVE_EVERY_S = 5.0
_BATCH_S = 1.5e-3


def own_product(a_MK: np.ndarray, b_KN: np.ndarray, tile: int) -> np.ndarray:
    """The product of two fp32 matrices by Shoal's own kernel, [M, N].

    Raises:
        ConfigError: matrices that do not fit, or a tile that there is not.
        BuildError: there is no compiler.
    """
    return _own(a_MK, b_KN, tile, 1)[0]


def _own(a_MK: np.ndarray, b_KN: np.ndarray, tile: int, calls: int) -> tuple[np.ndarray, float]:
    """(product, seconds of ``calls`` products)."""
    require(
        a_MK.ndim == b_KN.ndim == 2 and a_MK.shape[1] == b_KN.shape[0],
        "gemm.operands",
        (a_MK.shape, b_KN.shape),
        expected="[M, K] and [K, N]",
    )
    require(tile in TILES, "gemm.tile", tile, expected=f"one of {', '.join(map(str, TILES))}")
    a = np.ascontiguousarray(a_MK, dtype=np.float32)
    b = np.ascontiguousarray(b_KN, dtype=np.float32)
    out = np.empty((a.shape[0], b.shape[1]), dtype=np.float32)
    seconds = library("gemm").gemm_run(
        tile, *out.shape, a.shape[1], a.ctypes.data, b.ctypes.data, out.ctypes.data, calls
    )
    if seconds < 0:
        raise MachineError("gemm: no memory for packed panels of 2.2 MB; end other programs")
    return out, float(seconds)


def moved_elements(shape: GemmShape) -> int:
    """Elements that Shoal's own kernel moves for a product, counted by its own loops."""
    return int(library("gemm").gemm_moved(shape.tile, shape.M, shape.N, shape.K))


def drawn(
    seed: int, index: int, *, threads: int, largest: int = 4096, dtypes: tuple[str, ...] = ()
) -> list[GemmShape]:
    """What the sweep measures in its turn number ``index``: one shape, several ways.

    Sizes are log-uniform; half of the shapes have round sizes (multiples of 16), as
    models have, the others have whatever comes.

    Args:
        seed: seed of the sweep.
        index: every third turn is of the own kernel at every tile, the others of torch.
        threads: torch runs with 1 to so many.
        largest: largest size.
        dtypes: types of torch's products; all if empty.
    """
    random = generator(seed, purpose="gemm sweep", index=index)
    own = index % 3 == 0
    top = min(largest, LARGEST_OWN) if own else largest
    sizes = np.exp(random.uniform(np.log(SMALLEST), np.log(top), 3))
    if random.random() < 0.5:
        sizes = np.maximum(16, np.round(sizes / 16) * 16)
    M, N, K = (int(min(top, max(SMALLEST, round(size)))) for size in sizes)
    if own:
        return [GemmShape(M=M, N=N, K=K, tile=tile) for tile in TILES]
    return [
        GemmShape(
            M=M,
            N=N,
            K=K,
            dtype=dtype,
            layout=LAYOUTS[int(random.integers(len(LAYOUTS)))],
            threads=1 + int(random.integers(threads)),
        )
        for dtype in (dtypes or tuple(DTYPE_BYTES))
    ]


@part
class Gemm:
    """Sweep matrix products for the learned predictor; ``shoal probe gemm`` runs it.

    Args:
        budget_s: seconds of the sweep; earlier measurements are kept.
        path: path of the table; empty for that of the machine.
        largest: largest M, N and K of torch's products.
        dtypes: types of torch's products: fp32, bf16 and int8.
        watts: power of this host under load in W, if it has no energy counters; 0 if unknown.
        repeats: samples per shape, after warm-up; at least 5.
        seed: seed of the shapes.
    """

    budget_s: float = 180.0
    path: str = ""
    largest: Annotated[int, Ge(32), Le(32768)] = 4096
    dtypes: tuple[str, ...] = ("fp32", "bf16", "int8")
    watts: float = 0.0
    repeats: Annotated[int, Ge(REPEATS), Le(1000)] = REPEATS
    seed: int = 0

    on_request: ClassVar[bool] = True
    """Takes minutes and is of no use to the description of a machine: only when asked for."""

    def __post_init__(self) -> None:
        require(
            0 < self.budget_s <= 86400,
            "probe.gemm.budget_s",
            self.budget_s,
            expected="seconds above 0, up to a day",
        )
        require(
            set(self.dtypes) <= set(DTYPE_BYTES),
            "probe.gemm.dtypes",
            self.dtypes,
            expected=f"some of {', '.join(DTYPE_BYTES)}",
        )
        require(
            0 <= self.watts <= 100_000,
            "probe.gemm.watts",
            self.watts,
            expected="watts of the whole host, or 0",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities ``sweep_DTYPE`` in FLOP/s: the best rate of torch's products of the sweep."""
        table = self.sweep(context)
        results = []
        for dtype in DTYPE_BYTES:
            points = [p for p in table.points if p.dtype == dtype and p.tile == 0]
            if points:
                best = max(points, key=lambda p: p.flops / p.seconds)
                rates = [best.flops / s for s in (best.high, best.seconds, best.low)]
                note = f"threads={best.threads}, {len(points)} products in all"
                results.append(
                    context.measured("gemm", f"sweep_{dtype}", "FLOP/s", rates, note=note)
                )
        return results

    def sweep(
        self,
        context: ProbeContext,
        progress: Callable[[float, float, str], None] | None = None,
    ) -> GemmTable:
        """Measure until the budget is over, and save now and then.

        Raises:
            MachineError: the table is of another machine.
            BuildError: there is no compiler.
        """
        path = Path(self.path) if self.path else table_path()
        table = GemmTable(fingerprint=telling())
        if path.exists():
            table = GemmTable.read(path)
            table.check_here(path)
        known = {point.shape for point in table.points}
        begin = saved = time.monotonic()
        fresh: list[GemmPoint] = []
        for shape, measure in self._turns(context, known):
            point = measure(shape)
            if point is not None:
                fresh.append(point)
            now = time.monotonic()
            if progress is not None:
                progress(
                    min(now - begin, self.budget_s),
                    self.budget_s,
                    f"{len(table.points) + len(fresh)} products",
                )
            if now - saved > _SAVE_EVERY_S or now - begin > self.budget_s:
                table, saved = table.plus(fresh), now
                fresh.clear()
                table.write(path)
            if now - begin > self.budget_s:
                break
        return table

    def _turns(
        self, context: ProbeContext, known: set[GemmShape]
    ) -> Iterator[tuple[GemmShape, Callable[[GemmShape], GemmPoint | None]]]:
        """What to measure and how, without end."""
        torch = _Torch(self, context) if self.dtypes else None
        own = _Own(self, context)
        index = 0
        while True:
            shapes = drawn(
                self.seed,
                index,
                threads=len(context.cpus),
                largest=self.largest,
                dtypes=self.dtypes,
            )
            index += 1
            if shapes[0].tile == 0 and (torch is None or torch.absent):
                continue
            for shape in shapes:
                if shape not in known:
                    yield shape, own if shape.tile else torch  # type: ignore[misc]

    @property
    def most_s(self) -> float:
        """Seconds that one point may take."""
        return max(0.25, 0.02 * self.budget_s)

    def point(
        self,
        shape: GemmShape,
        samples: list[float],
        *,
        clock_hz: float,
        watts: float | None,
        power: str,
        cores: int,
    ) -> GemmPoint:
        """The point of a shape's samples; without a sensor its draw follows from ``watts``."""
        if watts is None and self.watts:
            watts, power = draw(self.watts, min(1.0, shape.threads / cores)), "modelled"
        low, middle, high = (float(x) for x in np.percentile(samples, (5, 50, 95)))
        return GemmPoint.model_validate(
            {
                **shape.model_dump(),
                "seconds": middle,
                "low": low,
                "high": high,
                "repeats": len(samples),
                "clock_hz": clock_hz,
                "watts": watts,
                "power": power if watts is not None else "",
            }
        )


def _clock() -> float:
    """Hz of this core, now."""
    return 1.0 / float(library("units").unit_clock(2000))


class _Torch:
    """Measures torch's products in the context's child process."""

    def __init__(self, sweep: Gemm, context: ProbeContext) -> None:
        self._sweep, self._context = sweep, context
        self._refused: set[tuple[str, str]] = set()
        self.absent = False
        try:
            context.worker().call("hello")
        except MissingExtraError as cause:
            context.skip("gemm.torch", str(cause))
            self.absent = True

    def __call__(self, shape: GemmShape) -> GemmPoint | None:
        way = (shape.dtype, shape.layout)
        if way in self._refused:
            return None
        answer: dict[str, Any] = self._context.worker().call(
            "shoal.machine.probes.gemm_torch:gemm",
            timeout_s=120.0,
            m=shape.M,
            n=shape.N,
            k=shape.K,
            dtype=shape.dtype,
            layout=shape.layout,
            threads=shape.threads,
            repeats=self._sweep.repeats,
            most_s=self._sweep.most_s,
        )
        if "refused" in answer:
            self._refused.add(way)
            self._context.skip(f"gemm.{shape.dtype}_{shape.layout}", str(answer["refused"]))
        if "seconds" not in answer:
            return None
        return self._sweep.point(
            shape,
            answer["seconds"],
            clock_hz=_clock(),
            watts=answer["watts"],
            power=answer["power"],
            cores=len(self._context.cpus),
        )


class _Own:
    """Measures Shoal's own kernel, on one thread of this process."""

    def __init__(self, sweep: Gemm, context: ProbeContext) -> None:
        self._sweep, self._cores = sweep, len(context.cpus)
        self._sensor = Sensor()
        self._operands: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, shape: GemmShape) -> GemmPoint | None:
        if shape.group not in self._operands:
            random = generator(self._sweep.seed, purpose="gemm operands")
            a = random.random((shape.M, shape.K), dtype=np.float32)
            b = random.random((shape.K, shape.N), dtype=np.float32)
            self._operands = {shape.group: (a, b)}
        a, b = self._operands[shape.group]
        _own(a, b, shape.tile, 1)
        once = max(_own(a, b, shape.tile, 1)[1], 1e-7)
        batch = max(1, min(10_000, round(_BATCH_S / once)))
        if once * batch * self._sweep.repeats > self._sweep.most_s:
            return None
        self._sensor.start()
        taken = (_own(a, b, shape.tile, batch)[1] for _ in range(self._sweep.repeats))
        samples = [seconds / batch for seconds in taken]
        return self._sweep.point(
            shape,
            samples,
            clock_hz=_clock(),
            watts=self._sensor.stop(),
            power=self._sensor.source,
            cores=self._cores,
        )
