"""How long a matrix product takes on the machine that swept some: a random forest.

The forest learns by what factor products miss the roofline of their kind, from sizes, tiles,
caches and threads (:mod:`shoal.cost.gemm.features`); so its times grow with the work also beyond
what was swept. Intervals are calibrated on shapes that the forest did not see. The draw of the
machine is learnt only where a sensor measured it.

Fitting needs scikit-learn; a stored predictor is asked with NumPy alone.

Sources: Huynh-Tran et al., Understanding GEMM Performance and Energy on NVIDIA Ada Lovelace, 2024
(a forest on shape features); Lei et al., Distribution-free Predictive Inference for Regression,
2018 (intervals from held-out residuals).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Value, parse
from shoal.core.errors import MachineError, StoreError, require
from shoal.core.files import shoal_home, write_atomic
from shoal.core.random import generator
from shoal.core.safetensors_header import encode_header, read_header
from shoal.cost.gemm.features import Roofs, features, roofs
from shoal.cost.gemm.forest import Forest, fit_forest
from shoal.cost.price.rates import RankRates
from shoal.ir import Interval, Machine, Parallel
from shoal.machine.probes.gemm_table import TILES, GemmPoint, GemmShape, GemmTable, telling

# Points below which a forest learns noise.
FEWEST = 60
# Points with measured watts from which the draw is learnt.
FEWEST_WATTS = 200
FOLDS = 5
COVERAGE = 0.90
# Times on another machine than the swept one are off by such a factor, either way.
FOREIGN = 2.0
# A product takes at least this share of the time of one with half its inner size: trees do not
# know that work takes time.
SHRINKS = 0.9
# Half-width of the interval where only rates are known, as a share.
UNSWEPT = 0.4
_SENSED = ("rapl", "nvml")


def predictor_path() -> Path:
    """Where the predictor of this machine is kept."""
    return shoal_home() / "gemm.safetensors"


class GemmPrediction(Value):
    """What a product costs.

    Args:
        seconds: time of one product, operands where the last call left them.
        tflops: 10^12 operations a second.
        watts: draw of the machine meanwhile; None when unknown.
        joules: watts times seconds.
        power: where ``watts`` comes from: sensor, modelled, or nowhere.
        roofline_s: time by the roofline alone.
        note: what a reader should know.
    """

    shape: GemmShape
    seconds: Interval
    tflops: Interval
    watts: Interval | None = None
    joules: Interval | None = None
    power: Literal["", "sensor", "modelled"] = ""
    roofline_s: PositiveFloat
    note: str = ""


class _Facts(Value):
    """What a predictor is besides its trees.

    Args:
        format: what kind of file it is.
        fingerprint: the machine that was swept.
        limits: its rooflines.
        mean: of the logarithm by how much products miss their roofline.
        deviation: of it; the trees learn the standardised one.
        spread: half-width of the 90 % interval of the logarithm of the time, in spreads of the
            trees.
        floor: smallest spread of the trees that counts.
        watts: threads, as text -> modelled watts; empty where the draw was measured or is unknown.
        points: how many products it was fitted to.
        errors: what was found on shapes that it had not seen.
    """

    format: Literal["shoal gemm predictor 1"] = "shoal gemm predictor 1"
    fingerprint: dict[str, str]
    limits: Roofs
    mean: float
    deviation: PositiveFloat
    spread: PositiveFloat
    floor: PositiveFloat
    watts: dict[str, PositiveFloat] = {}
    points: NonNegativeInt = 0
    errors: dict[str, float] = {}


@dataclass(frozen=True, eq=False)
class GemmPredictor:
    """A fitted forest with the facts around it; made by :func:`fit` or :meth:`load`.

    Args:
        facts: machine, rooflines, calibration.
        forest: the trees of the time.
        power: the trees of the logarithm of the draw, where a sensor measured it.
    """

    facts: _Facts
    forest: Forest
    power: Forest | None = None

    @property
    def errors(self) -> dict[str, float]:
        """``median_error`` and ``coverage`` on shapes that it had not seen."""
        return self.facts.errors

    @property
    def points(self) -> int:
        """Products that it was fitted to."""
        return self.facts.points

    def raw(self, shapes: Sequence[GemmShape]) -> tuple[np.ndarray, np.ndarray]:
        """Log seconds [N] and the half-width of their 90 % interval [N].

        Raises:
            ConfigError: a product of a tile or type that was not swept.
        """
        facts = self.facts
        # Also every product of half the inner size, and of half of that: see SHRINKS.
        chains = [_halves(shape) for shape in shapes]
        requests = [shape for chain in chains for shape in chain]
        trees = self.forest.trees(features(requests, facts.limits))[:, :, 0]
        trees = trees * facts.deviation + facts.mean
        middle = np.log([facts.limits.seconds(shape) for shape in requests]) + trees.mean(axis=0)
        spread = facts.spread * np.maximum(trees.std(axis=0), facts.floor)
        result, width = np.empty(len(shapes)), np.empty(len(shapes))
        begin = 0
        for n, chain in enumerate(chains):
            result[n] = middle[begin]
            for value in middle[begin + 1 : begin + len(chain)]:
                result[n] = max(result[n] + np.log(SHRINKS), value)
            begin += len(chain)
            width[n] = spread[begin - 1]
        return result, width

    def seconds(self, shapes: Sequence[GemmShape]) -> np.ndarray:
        """Predicted seconds, [N]; see :meth:`raw`."""
        return np.asarray(np.exp(self.raw(shapes)[0]))

    def predict(
        self,
        shapes: Sequence[GemmShape],
        *,
        machine: Machine | None = None,
        strict: bool = False,
    ) -> list[GemmPrediction]:
        """Time, rate, draw and energy of products.

        Args:
            shapes: the products.
            machine: the machine they will run on; this one if not given.
            strict: refuse another machine than the swept one, instead of widening the intervals.

        Raises:
            MachineError: with ``strict``, another machine; says what differs.
            ConfigError: a product of a tile or type that was not swept.
        """
        here = telling(machine.fingerprint if machine is not None else None)
        other = [key for key in here if here[key] != self.facts.fingerprint.get(key, "")]
        note = ""
        if other:
            note = f"swept on another machine: {', '.join(other)} differ"
            if strict:
                raise MachineError(
                    f"gemm: the predictor was {note} from the machine that is asked for; "
                    "run shoal probe gemm there, or ask without strict"
                )
            warnings.warn(f"gemm: {note}; intervals are {FOREIGN:g} times wider", stacklevel=2)
        middle, width = self.raw(shapes)
        width = width + (np.log(FOREIGN) if other else 0.0)
        return [self._one(shape, middle[n], width[n], note) for n, shape in enumerate(shapes)]

    def _one(self, shape: GemmShape, middle: float, width: float, note: str) -> GemmPrediction:
        value, share = float(np.exp(middle)), float(np.expm1(width))
        seconds = Interval.around(value, share)
        rate = Interval.around(shape.flops / value / 1e12, share)
        watts, power = self._watts(shape)
        return GemmPrediction(
            shape=shape,
            seconds=seconds,
            tflops=rate,
            watts=watts,
            joules=None
            if watts is None
            else Interval(
                value=watts.value * seconds.value,
                low=watts.low * seconds.low,
                high=watts.high * seconds.high,
            ),
            power=power,
            roofline_s=self.facts.limits.seconds(shape),
            note=note,
        )

    def _watts(self, shape: GemmShape) -> tuple[Interval | None, Literal["", "sensor", "modelled"]]:
        if self.power is not None:
            result = self.power.predict(features([shape], self.facts.limits))[0, 0]
            error = max(0.02, self.errors.get("watts_error", 0.1))
            return Interval.around(float(np.exp(result)), 2 * error), "sensor"
        if self.facts.watts:
            known = {int(threads): watts for threads, watts in self.facts.watts.items()}
            nearest = min(known, key=lambda threads: abs(threads - shape.threads))
            return Interval.around(known[nearest], 0.3), "modelled"
        return None, ""

    def best_tile(
        self,
        M: int,
        N: int,
        K: int,
        *,
        objective: Literal["time", "energy"] = "time",
        strict: bool = False,
    ) -> list[GemmPrediction]:
        """Shoal's own kernel at every tile, best first.

        Raises:
            ConfigError: impossible sizes, or energy where the draw is unknown.
        """
        shapes = [GemmShape(M=M, N=N, K=K, tile=tile) for tile in TILES]
        result = self.predict(shapes, strict=strict)
        require(
            objective == "time" or all(p.joules is not None for p in result),
            "gemm.objective",
            objective,
            expected="time, where no sensor and no declared draw tell the energy",
            hint="sweep with shoal probe gemm --watts DRAW",
        )

        def cost(one: GemmPrediction) -> float:
            return one.seconds.value if objective == "time" else one.joules.value  # type: ignore[union-attr]

        return sorted(result, key=cost)

    def curve(
        self, dtype: str, threads: int, edges: Sequence[int] = (64, 128, 256, 512, 1024, 2048)
    ) -> tuple[tuple[float, float], ...]:
        """(edge, FLOP/s) of square layers, as :class:`shoal.cost.price.rates.Curve` has them."""
        shapes = [
            GemmShape(M=e, N=e, K=e, dtype=dtype, layout="nt", threads=threads) for e in edges
        ]
        rates = [shape.flops for shape in shapes] / self.seconds(shapes)
        return tuple((float(e), float(rate)) for e, rate in zip(edges, rates, strict=True))

    def save(self, path: Path) -> None:
        """Write trees and facts into one safetensors file, atomically."""
        text = np.frombuffer(self.facts.model_dump_json().encode(), dtype=np.uint8)
        arrays = {"facts": text, **self.forest.arrays()}
        if self.power is not None:
            arrays |= {f"power.{name}": a for name, a in self.power.arrays().items()}
        names = {"uint8": "U8", "int32": "I32", "float64": "F64"}
        head = encode_header({n: (names[a.dtype.name], a.shape) for n, a in arrays.items()})
        whole = head + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())
        write_atomic(path, whole, error=StoreError)

    @classmethod
    def load(cls, path: Path) -> GemmPredictor:
        """Read what :meth:`save` wrote.

        Raises:
            StoreError: the file is missing or damaged.
            ConfigError: its trees do not fit each other.
        """
        head = read_header(path, error=StoreError)
        kinds = {"U8": "<u1", "I32": "<i4", "F64": "<f8"}
        raw = path.read_bytes()
        arrays = {}
        for name, place in head.tensors.items():
            if place.dtype not in kinds:
                raise StoreError(f"{path}: {name} has the type {place.dtype}; sweep again")
            result = np.frombuffer(raw[place.start : place.stop], dtype=kinds[place.dtype])
            arrays[name] = result.reshape(place.shape)
        if "facts" not in arrays:
            raise StoreError(
                f"{path}: it is not a predictor of matrix products; run: shoal probe gemm"
            )
        try:
            text = json.loads(arrays.pop("facts").tobytes().decode())
        except ValueError as cause:
            raise StoreError(f"{path}: its metadata is damaged; run: shoal probe gemm") from cause
        prefix = "power."
        power = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        return cls(
            parse(_Facts, text, where=str(path)),
            Forest.from_arrays(arrays),
            Forest.from_arrays(power) if power else None,
        )


def stored(machine: Machine | None = None) -> GemmPredictor | None:
    """The predictor that was fitted to sweeps of this machine, if there is one for ``machine``.

    Args:
        machine: the machine of the products; this one if not given.

    Raises:
        StoreError: its file is damaged.
    """
    path = predictor_path()
    if not path.exists():
        return None
    loaded = GemmPredictor.load(path)
    here = telling(machine.fingerprint if machine is not None else None)
    return loaded if here == loaded.facts.fingerprint else None


def by_rates(shape: GemmShape, machine: Machine) -> GemmPrediction:
    """A product on a machine that was not swept: its described or probed rates.

    Raises:
        MachineError: the machine has no rate for matrix products.
    """
    rates = RankRates(machine, Parallel(), shape.threads if machine.device.kind == "cpu" else 0)
    edge = (shape.M * shape.N * shape.K) ** (1 / 3)
    # A product waits for memory, not for the framework's elementwise operators.
    described = any(tier.read_bandwidth for tier in machine.device.own_memory)
    stream = rates.memory_curve() if described else rates.stream_curve()
    traffic_s = shape.bytes / stream(shape.bytes)
    value = max(shape.flops / rates.matmul_curve(shape.dtype)(edge), traffic_s)
    seconds = Interval.around(value, UNSWEPT)
    watts, joules = None, None
    if machine.device.power_watts is not None:
        watts = Interval.around(machine.device.power_watts, UNSWEPT)
        joules = seconds.scaled(machine.device.power_watts)
    peak = machine.device.peak_flops.get(shape.dtype)
    return GemmPrediction(
        shape=shape,
        seconds=seconds,
        tflops=Interval.around(shape.flops / value / 1e12, UNSWEPT),
        watts=watts,
        joules=joules,
        power="modelled" if watts is not None else "",
        roofline_s=max(shape.flops / peak, traffic_s) if peak else value,
        note=f"{machine.name} was not swept; its rates are {machine.provenance}",
    )


def grouped_folds(points: Sequence[GemmPoint], folds: int, seed: int) -> np.ndarray:
    """Fold number of each point, [N]; all products of one (M, N, K) are in the same fold."""
    groups = sorted({point.group for point in points})
    order = generator(seed, purpose="gemm folds").permutation(len(groups))
    fold = {groups[place]: number % folds for number, place in enumerate(order)}
    return np.array([fold[point.group] for point in points])


def fit(
    table: GemmTable,
    *,
    trees: PositiveInt = 100,
    depth: PositiveInt = 20,
    seed: int = 0,
    calibrate: bool = True,
) -> GemmPredictor:
    """Learn a predictor from a sweep.

    Args:
        table: the sweep.
        trees: trees of the forest.
        depth: their deepest level.
        seed: the same table and seed give the same predictor.
        calibrate: hold shapes out to find how wide the intervals must be; without, they have
            the width of the trees' own spread.

    Raises:
        ConfigError: fewer than 60 products.
        MissingExtraError: scikit-learn is not installed.
    """
    points = table.points
    require(
        len(points) >= FEWEST,
        "gemm.table",
        len(points),
        expected=f"at least {FEWEST} measured products",
        hint="sweep longer: shoal probe gemm --budget 60",
    )
    whole = _fit(table, points, trees, depth, seed)
    if not calibrate:
        return whole
    # Shapes that a forest did not see show how wide its intervals must be.
    fold = grouped_folds(points, FOLDS, seed)
    missed, spread, watts = [], [], []
    for number in range(FOLDS):
        seen = [p for p, f in zip(points, fold, strict=True) if f != number]
        unseen = [p for p, f in zip(points, fold, strict=True) if f == number]
        if not unseen or not seen:
            continue
        part = _fit(table, seen, max(10, trees // 2), depth, seed)
        unseen = [p for p in unseen if _covered(part.facts.limits, p)]
        if not unseen:
            continue
        middle, width = part.raw(unseen)
        missed.append(np.log([p.seconds for p in unseen]) - middle)
        spread.append(width)
        real = [p for p in unseen if p.watts and p.power in _SENSED]
        if part.power is not None and real:
            outcome = np.exp(part.power.predict(features(real, part.facts.limits))[:, 0])
            watts += [abs(t / p.watts - 1) for t, p in zip(outcome, real, strict=True) if p.watts]
    error, width = np.concatenate(missed), np.concatenate(spread)
    factor = float(np.quantile(np.abs(error) / width, COVERAGE))
    relative = np.abs(np.exp(-error) - 1)
    result = {
        "median_error": float(np.median(relative)),
        "mean_error": float(relative.mean()),
        "coverage": float(np.mean(np.abs(error) <= factor * width)),
    }
    if watts:
        result["watts_error"] = float(np.median(watts))
    facts = whole.facts.model_copy(
        update={"spread": max(factor, 1e-6) * whole.facts.spread, "errors": result}
    )
    return GemmPredictor(facts, whole.forest, whole.power)


def _halves(shape: GemmShape) -> list[GemmShape]:
    """The product after those of half its inner size, of half of that, and so on."""
    halves = [shape]
    while halves[0].K >= 32:
        halves.insert(0, halves[0].model_copy(update={"K": halves[0].K // 2}))
    return halves


def _covered(limits: Roofs, point: GemmPoint) -> bool:
    """Some product of this point's tile and type was seen."""
    kind = f"{point.tile}/{point.dtype}/"
    return any(known.startswith(kind) for known in limits.compute)


def _fit(
    table: GemmTable, points: Sequence[GemmPoint], trees: int, depth: int, seed: int
) -> GemmPredictor:
    limits = roofs(points, _caches(table.fingerprint))
    rows, late = features(points, limits), _late(points, limits)
    # A product that another process disturbed says nothing about products.
    late = np.clip(late, *np.percentile(late, (1, 99)))
    mean, deviation = float(late.mean()), max(float(late.std()), 1e-9)
    targets = (late[:, None] - mean) / deviation
    forest = fit_forest(rows, targets, trees=trees, depth=depth, seed=seed)
    sensed = [n for n, p in enumerate(points) if p.watts and p.power in _SENSED]
    power = None
    if len(sensed) >= FEWEST_WATTS:
        drawn = np.log([[points[n].watts or 1.0] for n in sensed])
        power = fit_forest(rows[sensed], drawn, trees=trees, depth=depth, seed=seed)
    facts = _Facts(
        fingerprint=table.fingerprint,
        limits=limits,
        mean=mean,
        deviation=deviation,
        spread=1.645,
        floor=0.02,
        watts={str(p.threads): p.watts for p in points if p.watts and p.power == "modelled"},
        points=len(points),
    )
    return GemmPredictor(facts, forest, power)


def _late(points: Sequence[GemmPoint], limits: Roofs) -> np.ndarray:
    """Logarithm of the factor by which each product misses its roofline, [N]."""
    return np.log([point.seconds / limits.seconds(point) for point in points])


def _caches(found: Mapping[str, str]) -> dict[str, float]:
    pairs = (word.partition("=") for word in found.get("caches", "").split())
    return {name: float(size) for name, _, size in pairs if size.isdigit()}
