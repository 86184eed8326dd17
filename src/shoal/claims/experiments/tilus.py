"""[109] Tilus: does one program serve every width from 1 to 8 bits, and does time follow bits?

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision Computation,
2025.

Counted: products of the one program's C++ beside the interpreter's bits for every type, and bytes
of weights. Timed: one row through 8192 x 8192 weights that no cache holds: 3 bits against 8; 4 bits
against PyTorch's bf16 product, the hand-written kernel, and extraction bit by bit. The A/A run has
a kernel of fixed widths (4 and 8 bits).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.measure import interleave
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.kernel.base import roof_s
from shoal.kernel.calls import LinearCall, LowbitLinearCall
from shoal.kernel.dispatch import here, kernels_of
from shoal.kernel.formats import weight_format
from shoal.kernel.tile.types import NARROW, TileType, tile_type

_QUICK = ("uint3", "float6_e3m2")
_EDGE = 32
_STEP = 16
_TOGETHER = 6  # types whose programs are compiled in one piece
_BF16, _HAND, _GENERIC = "torch bf16", "hand-written", "bit by bit"
_FORMATS = ("int3-g128", "int4-g128", "int8-g128")
# For the table: every width, and floats of four.
_OTHERS = (
    "int1-g128", "int2-g128", "int5-g128", "int6-g128", "int7-g128", "uint3-g128",
    "float3_e1m1-g128", "float4_e2m1-g128", "float6_e3m2-g128", "float8_e4m3-g128",
)  # fmt: skip


@part
class Tilus(BaseClaim, row=109):
    """Every type exact through one program; time that follows the bits.

    Args:
        edge: inputs and outputs of the layer.
        cold_bytes: bytes of all copies of one method's weights, beyond every cache.
        pairs: rounds of the timings.
    """

    edge: Annotated[int, MultipleOf(256), Ge(256)] = 8192
    cold_bytes: Annotated[float, Ge(1e6)] = 6e8
    pairs: Annotated[int, Ge(3)] = 25

    def refuses(self, context: ExperimentContext) -> str | None:
        """Where the program's C++ cannot run."""
        reason = kernels_of("linear_lowbit")["anybit"].refuses(_call("int4-g128", 256))
        return None if reason is None else f"the program's C++ {reason}"

    def collect(self, run: ClaimRun) -> None:
        """Compile types and compare; the full run compiles all of them, and times some."""
        types = [tile_type(name) for name in _QUICK] if run.quick else list(NARROW)
        wrong = run.remember("wrong", lambda: _wrong(types, run.context))
        # What has no width of its own has no product of its own.
        lacking = [dtype for dtype in types if run.as_baseline and dtype.bits not in (4, 8)]
        run.put("wrong_types", len(wrong) + len(lacking))
        run.put("stored_bytes", (_stored(dtype, run.as_baseline) for dtype in types))
        if not run.quick:
            self._time(run)

    def _time(self, run: ClaimRun) -> None:
        run.progress("weights", 0.4)
        layer = run.remember("layer", lambda: _Layer(self.edge, self.cold_bytes, run.seed))
        run.progress("products in turn", 0.5)
        pairs = {
            "bits3_over_bits8": ("int3-g128", "int8-g128"),
            "speedup_bf16": ("int4-g128", _BF16),
            "time_over_hand_written": ("int4-g128", _HAND),
            "speedup_over_generic": ("int4-g128", _GENERIC),
        }
        taken = run.versus(layer.methods, pairs, self.pairs)
        if run.as_baseline:
            return
        machine = run.context.machine or here()

        def roof(name: str) -> float:
            made = (
                LinearCall(1, self.edge, self.edge, "bf16")
                if name == _BF16
                else _call("int4-g128" if name in (_HAND, _GENERIC) else name, self.edge)
            )
            return roof_s(made, machine, "bf16")

        middle = {name: statistics.median(each) for name, each in taken.items()}
        roofs = {name: roof(name) for name in ("int3-g128", "int4-g128", "int8-g128")}
        four = roofs["int4-g128"]
        run.bounds |= {
            "bits3_over_bits8": roofs["int3-g128"] / roofs["int8-g128"],
            "speedup_bf16": middle[_BF16] / four,
            "time_over_hand_written": four / middle[_HAND],
            "speedup_over_generic": middle[_GENERIC] / four,
        }
        for index, name in enumerate(_OTHERS):
            run.progress(name, 0.8 + 0.2 * index / len(_OTHERS))
            # One after the other: together their copies would take more memory than many have.
            more = interleave({name: layer.made(name)}, max(5, self.pairs // 3)).seconds
            middle[name] = statistics.median(more[name])
        run.profile = "; ".join(
            f"{name}: {1e6 * seconds:.0f} us, roof {1e6 * roof(name):.0f} us"
            for name, seconds in middle.items()
        )


class _Layer:
    """One layer, with cold copies of its weights for every method."""

    def __init__(self, edge: int, cold_bytes: float, seed: int) -> None:
        import torch

        from shoal.kernel.lowbit.anybit import prepare

        random = torch.Generator().manual_seed(seed)
        self.edge, self._cold = edge, cold_bytes
        self._weight = torch.randn(edge, edge, generator=random) * 0.02
        self._x = torch.randn(1, edge, generator=random).bfloat16()
        dense = self._weight.bfloat16()
        kernels = kernels_of("linear_lowbit")
        four = weight_format("int4-g128").quantize(self._weight)
        call = _call("int4-g128", edge)
        hand = kernels["cpp_w4a16"]
        plain = kernels_of("linear")["torch"]
        self.methods: dict[str, Callable[[], None]] = {name: self.made(name) for name in _FORMATS}
        self.methods[_BF16] = self._turns(
            dense.nbytes, lambda: plain.prepare(LinearCall(1, edge, edge, "bf16"), dense.clone())
        )
        self.methods[_HAND] = self._turns(four.nbytes, lambda: hand.prepare(call, four))
        slow = prepare(call, four, None, "generic")
        self.methods[_GENERIC] = functools.partial(slow, self._x)

    def made(self, text: str) -> Callable[[], None]:
        """The program's product with these weights in a format."""
        packed = weight_format(text).quantize(self._weight)
        kernel = kernels_of("linear_lowbit")["anybit"]
        call = _call(text, self.edge)
        return self._turns(packed.nbytes, lambda: kernel.prepare(call, packed))

    def _turns(self, nbytes: int, make: Callable[[], Any]) -> Callable[[], None]:
        from shoal.kernel.planes.bench import turning

        copies = max(2, math.ceil(self._cold / nbytes))
        return turning([functools.partial(make(), self._x) for _ in range(copies)], 1)


def _call(text: str, edge: int) -> LowbitLinearCall:
    return LowbitLinearCall(1, edge, edge, text, weight_format(text).bits, "bf16")


def _stored(dtype: TileType, fixed: bool) -> float:
    """Bytes of the tiles of a matrix over those of its bits."""
    from shoal.kernel.tile.ir import LoadGlobal, walk
    from shoal.kernel.tile.programs import lowbit_matmul

    width = (4 if dtype.bits <= 4 else 8) if fixed else dtype.bits
    program = lowbit_matmul.trace(weight=f"uint{width}", step=_STEP)
    tile = next(
        one.out
        for one in walk(program.body)
        if isinstance(one, LoadGlobal) and one.source.pointer.name == "tiles"
    )
    return math.prod(tile.shape) / dtype.packed_bytes(_STEP * _EDGE)


def _wrong(types: Sequence[TileType], context: ExperimentContext) -> list[str]:
    """Names of the types of which a product is not what the interpreter says."""
    names: list[str] = []
    for first in range(0, len(types), _TOGETHER):
        context.progress(f"types, {types[first]} and after", 0.4 * first / len(types))
        names += _wrong_together(types[first : first + _TOGETHER], context.seed)
    return names


def _wrong_together(types: Sequence[TileType], seed: int) -> Iterable[str]:
    import torch

    from shoal.claims.lab.tile_interpreter import interpret
    from shoal.kernel.formats.bits import pack
    from shoal.kernel.tile.host import build_host
    from shoal.kernel.tile.programs import lowbit_matmul, lowbit_pack

    programs = []
    for dtype in types:
        programs.append(lowbit_pack.trace(weight=str(dtype), name=f"pack_{dtype}"))
        programs.append(
            lowbit_matmul.trace(weight=str(dtype), rows=4, out="fp32", name=f"product_{dtype}")
        )
    functions = build_host(programs, name="claim")
    for at, dtype in enumerate(types):
        draw = generator(seed, purpose="codes", index=at)
        good = np.flatnonzero(np.isfinite(dtype.values()))
        # Every code at least once: there are more places than codes.
        codes = np.resize(draw.permutation(good), (_EDGE, _EDGE)).astype(np.uint8)
        stream = pack(torch.from_numpy(codes), dtype.bits)
        small = torch.from_numpy(draw.integers(-2, 3, (4, _EDGE))).float()
        # Rows of the identity ask for every weight; sums of small numbers are exact but for
        # floats whose largest and smallest lie too far apart for any sum.
        rows = [torch.eye(_EDGE)] + ([small] if dtype.exponent <= 4 else [])
        x = torch.cat(rows).bfloat16()
        seen = []
        for native in (False, True):
            tiles = torch.zeros(_EDGE * _EDGE * dtype.bits // 8, dtype=torch.uint8)
            y = torch.zeros(len(x), _EDGE)
            first = {"codes": stream, "tiles": tiles}
            second = {
                "x": x,
                "tiles": tiles,
                "scales": torch.full((_EDGE,), 0.5, dtype=torch.float16),
                "bias": torch.zeros(_EDGE),
                "y": y,
            }
            steps = _EDGE // _STEP
            numbers = (
                {"n": _EDGE, "k": _EDGE, "row_bits": _EDGE * dtype.bits, "steps": steps},
                {"m": len(x), "n": _EDGE, "k": _EDGE, "groups": 1, "steps": steps},
            )
            for program, given, scalars in zip(
                programs[2 * at : 2 * at + 2], (first, second), numbers, strict=True
            ):
                if native:
                    places = [given[pointer.name].data_ptr() for pointer in program.pointers]
                    functions[program.name](*places, *scalars.values())
                else:
                    interpret(program, given, scalars)
            seen.append((tiles, y))
        exact = dtype.values()[codes].T.astype(np.float32) * np.float32(0.5)
        same = all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
        if not same or not np.array_equal(seen[1][1][:_EDGE].numpy(), exact):
            yield str(dtype)
