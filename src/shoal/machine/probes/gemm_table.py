"""The table of a sweep of matrix products: one line of JSON a point, after a header.

The header says whose numbers they are. Points of another machine, or of other versions
of the library, never come into one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from shoal.core.config import Value
from shoal.core.errors import ConfigError, MachineError, StoreError, require
from shoal.core.files import shoal_home, write_atomic
from shoal.core.parts import explain
from shoal.machine.fingerprint import fingerprint, versions

TILES = (1, 2, 4, 8, 16, 32)
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
LAYOUTS = ("nn", "nt", "tn", "tt")
# What decides how fast a product is, of everything that a fingerprint says.
_TELLING = ("cpu", "isa", "cores", "caches", "torch")
_FORMAT = "shoal gemm table 1"


def table_path() -> Path:
    """Where the sweep of this machine is kept."""
    return shoal_home() / "gemm.jsonl"


def telling(found: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of a fingerprint that makes two sweeps comparable; of this machine if none is given.

    Args:
        found: a fingerprint, its package versions among the keys.
    """
    if found is None:
        found = {**fingerprint(), **versions()}
    # A probed machine's file has its versions with a prefix.
    return {key: found.get(key) or found.get(f"version.{key}", "") for key in _TELLING}


class GemmShape(Value):
    """One product [M, K] x [K, N] and how it is computed.

    Args:
        M: rows of the result.
        N: columns of the result.
        K: inner size.
        dtype: fp32, bf16 or int8 (with int32 sums).
        layout: whether A and B are stored as they are (n) or transposed (t); a linear layer is nt.
        threads: threads that compute it.
        tile: register tile of Shoal's own kernel; 0 for torch.
    """

    M: PositiveInt
    N: PositiveInt
    K: PositiveInt
    dtype: str = "fp32"
    layout: str = "nt"
    threads: PositiveInt = 1
    tile: NonNegativeInt = 0

    @model_validator(mode="after")
    def _known(self) -> Self:
        require(
            self.dtype in DTYPE_BYTES,
            "gemm.dtype",
            self.dtype,
            expected=f"one of {', '.join(DTYPE_BYTES)}",
        )
        require(
            self.layout in LAYOUTS,
            "gemm.layout",
            self.layout,
            expected=f"one of {', '.join(LAYOUTS)}",
        )
        require(
            self.tile == 0 or self.tile in TILES,
            "gemm.tile",
            self.tile,
            expected=f"0 for torch, or a tile of {', '.join(map(str, TILES))}",
        )
        return self

    @property
    def flops(self) -> float:
        """Floating-point operations: a multiplication and an addition a term."""
        return 2.0 * self.M * self.N * self.K

    @property
    def bytes(self) -> float:
        """Bytes of the three matrices, each touched once; int8 sums are int32."""
        size = DTYPE_BYTES[self.dtype]
        result = 4 if self.dtype == "int8" else size
        return float(size * (self.M * self.K + self.K * self.N) + result * self.M * self.N)

    @property
    def group(self) -> tuple[int, int, int]:
        """(M, N, K): what a grouped split keeps together."""
        return self.M, self.N, self.K


class GemmPoint(GemmShape):
    """A measured product.

    Args:
        seconds: median of the repeats.
        low: 5th percentile of the repeats.
        high: 95th percentile of the repeats.
        repeats: how often it was measured, after warming up.
        clock_hz: clock of a core at the time.
        watts: mean draw while it ran; None without a sensor.
        power: where ``watts`` comes from: rapl, nvml, or modelled from a declared draw.
    """

    seconds: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    repeats: PositiveInt
    clock_hz: PositiveFloat | None = None
    watts: PositiveFloat | None = None
    power: Literal["", "rapl", "nvml", "modelled"] = ""

    @property
    def shape(self) -> GemmShape:
        """What was measured."""
        return GemmShape.model_construct(
            M=self.M,
            N=self.N,
            K=self.K,
            dtype=self.dtype,
            layout=self.layout,
            threads=self.threads,
            tile=self.tile,
        )


class GemmTable(Value):
    """Measured products of one machine.

    Args:
        fingerprint: see :func:`telling`.
        points: what was measured, in that order.
    """

    fingerprint: dict[str, str]
    points: tuple[GemmPoint, ...] = ()

    @classmethod
    def read(cls, path: Path) -> GemmTable:
        """Read a table.

        Raises:
            StoreError: the file is missing or damaged; names the line.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as cause:
            raise StoreError(
                f"{path}: no table of matrix products can be read "
                f"({getattr(cause, 'strerror', None) or cause}); run: shoal probe gemm"
            ) from cause
        points, head = [], {}
        for number, line in enumerate(lines, 1):
            try:
                raw = json.loads(line)
                if number == 1:
                    if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
                        raise ValueError(f"its first line has no format {_FORMAT!r}")
                    head = {str(key): str(value) for key, value in raw["fingerprint"].items()}
                else:
                    points.append(GemmPoint.model_validate(raw))
            except ValidationError as cause:
                raise StoreError(f"{path}, line {number}: {explain(cause, 'point')}") from None
            except ConfigError as cause:
                raise StoreError(f"{path}, line {number}: {cause}") from None
            except (ValueError, KeyError, AttributeError) as cause:
                raise StoreError(
                    f"{path}, line {number}: {cause}; it is no point of a sweep; "
                    "remove the line, or the file and sweep again"
                ) from None
        if not head:
            raise StoreError(f"{path}: it is empty; remove it and run: shoal probe gemm")
        return cls(fingerprint=head, points=tuple(points))

    def write(self, path: Path) -> None:
        """Write the table, atomically."""
        lines = [json.dumps({"format": _FORMAT, "fingerprint": self.fingerprint})]
        lines += [
            json.dumps(point.model_dump(mode="json", exclude_defaults=True), separators=(",", ":"))
            for point in self.points
        ]
        write_atomic(path, "\n".join(lines) + "\n", error=StoreError)

    def plus(self, points: Iterable[GemmPoint]) -> GemmTable:
        """The table with further points."""
        return self.model_copy(update={"points": (*self.points, *points)})

    def check_here(self, path: Path) -> None:
        """Refuse to go on with a table of another machine.

        Raises:
            MachineError: says what differs.
        """
        here = telling()
        other = [key for key in here if here[key] != self.fingerprint.get(key, "")]
        if other:
            what = "; ".join(
                f"{key} was {self.fingerprint.get(key, '')!r} and is {here[key]!r}" for key in other
            )
            raise MachineError(
                f"{path}: these products were measured elsewhere ({what}); "
                "give another file with --out, or move this one away"
            )
