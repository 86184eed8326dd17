"""``shoal explain gemm``: how long does a matrix product take, and on which tile?"""

from __future__ import annotations

import warnings
from typing import ClassVar, Literal

from pydantic import PositiveInt

from shoal.core.errors import ConfigError, require
from shoal.core.parts import part
from shoal.core.tables import Table, digits
from shoal.cost.gemm.predictor import GemmPrediction, GemmPredictor, by_rates, predictor_path
from shoal.ir import Explanation, Interval, Machine, Progress
from shoal.machine import host
from shoal.machine.probes.gemm_table import GemmShape


@part
class GemmStudy:
    """Predict time, rate and energy of one product, from the sweep of `shoal probe gemm`.

    For a described machine without a sweep, its rates are used.

    **Examples**

        shoal explain gemm 4096 4096 4096 --dtype bf16

        shoal explain gemm 1000 1000 1000 --tiles

        shoal explain gemm 8192 8192 8192 --dtype bf16 --machine H100

    Args:
        m: rows of the result.
        n: columns of the result.
        k: inner size.
        dtype: fp32, bf16 or int8.
        layout: nn, nt, tn or tt: A and B stored as they are or transposed.
        threads: all cores, if not given.
        tiles: rank the tiles of Shoal's own kernel (fp32).
        objective: objective of tiles: time or energy.
        strict: refuse a predictor that was measured on another machine.
    """

    subject: ClassVar = ("m", "n", "k")
    machine: ClassVar = ""

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    dtype: str = "fp32"
    layout: str = "nt"
    threads: int | None = None
    tiles: bool = False
    objective: Literal["time", "energy"] = "time"
    strict: bool = False

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """The product by the sweep of this machine, or by the rates of the one that is named."""
        result, said = self._swept() if machine is None else self._described(machine)
        blocks = [said]
        if any(one.power == "modelled" for one in result):
            blocks.append("draw and energy are modelled from the declared draw, not measured")
        blocks += [f"note: {note}" for note in dict.fromkeys(one.note for one in result) if note]
        products = Table(
            title=f"[{self.m}, {self.k}] x [{self.k}, {self.n}] {result[0].shape.dtype}",
            columns=("tile", "time", "TFLOP/s", "roofline", "draw", "energy"),
            rows=tuple(_row(one, "" if machine else "torch") for one in result),
            right=" rrrrr",
        )
        return Explanation(
            blocks=(products, *blocks),
            data=[one.model_dump(mode="json", exclude_none=True) for one in result],
        )

    def _shape(self, cores: int) -> GemmShape:
        return GemmShape(
            M=self.m,
            N=self.n,
            K=self.k,
            dtype=self.dtype,
            layout=self.layout,
            threads=self.threads or cores,
        )

    def _swept(self) -> tuple[list[GemmPrediction], str]:
        """Predictions of what was learnt here, and from how much."""
        path = predictor_path()
        require(
            path.exists(),
            "machine",
            "local",
            expected=f"a predictor at {path}",
            hint="run: shoal probe gemm",
            error=ConfigError,
        )
        predictor = GemmPredictor.load(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a note of the prediction
            if self.tiles:
                result = predictor.best_tile(
                    self.m, self.n, self.k, objective=self.objective, strict=self.strict
                )
            else:
                result = predictor.predict([self._shape(len(host.cpus()))], strict=self.strict)
        error = predictor.errors.get("median_error")
        said = f"learnt from {predictor.points} products"
        if error is not None:
            said += f"; shapes it had not seen are off by {100 * error:.0f} % in the median"
        return result, said

    def _described(self, machine: Machine) -> tuple[list[GemmPrediction], str]:
        """The prediction by a machine's rates."""
        require(
            not self.tiles,
            "--tiles",
            machine.name,
            expected="this machine, whose kernel was swept",
            hint="leave --machine out",
        )
        gpu = machine.device.kind == "gpu"
        cores = 1 if gpu else machine.device.num_cores or 1
        require(
            self.threads is None or self.threads <= cores,
            "--threads",
            self.threads,
            expected=f"nothing: {machine.name} computes on a GPU"
            if gpu
            else f"at most {cores}, the cores of {machine.name}",
        )
        said = f"by the rates that {machine.name} is described with; it was not swept"
        return [by_rates(self._shape(cores), machine)], said


def _row(one: GemmPrediction, other: str) -> tuple[str, ...]:
    return (
        str(one.shape.tile or other),
        _span(one.seconds, 1e6, "us"),
        _span(one.tflops, 1.0, ""),
        f"{digits(1e6 * one.roofline_s)} us",
        _span(one.watts, 1.0, "W") if one.watts else "unknown",
        _span(one.joules, 1e3, "mJ") if one.joules else "unknown",
    )


def _span(interval: Interval, scale: float, unit: str) -> str:
    """Value and 90 % interval."""
    low, value, high = (digits(scale * x) for x in (interval.low, interval.value, interval.high))
    return f"{value} {unit}".rstrip() + f" ({low} .. {high})"
