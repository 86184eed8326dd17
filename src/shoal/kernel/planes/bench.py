"""Every engine that runs here, timed beside PyTorch's bf16 product and beside its estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.measure import interleave
from shoal.ir import Machine
from shoal.kernel.planes.engines import ENGINES, PlanesEngine, chosen
from shoal.kernel.planes.native import PlanesWeights, quantized, result, weights

# An engine that is estimated so many times slower than the best is not run.
_HOPELESS = 20.0


@dataclass(frozen=True)
class TimedEngine:
    """One line of the table.

    Args:
        m: rows.
        w: bits of the weights.
        a: bits of the activations.
        engine: its name, or ``torch bf16``.
        seconds: median.
        speedup: seconds of bf16 over it, median of the rounds.
        estimate: seconds that were expected; None for bf16.
        chosen: dispatch would take it.
    """

    m: int
    w: int
    a: int
    engine: str
    seconds: float
    speedup: float
    estimate: float | None = None
    chosen: bool = False


def held(
    codes_NK: Tensor, w: int, a: int, *, tiles: bool, dtype: torch.dtype = torch.bfloat16
) -> PlanesWeights:
    """A layer's weights with one scale for each output.

    Args:
        codes_NK: uint8 below 2^w.
        w: their bits.
        a: bits of the activations.
        tiles: for engines that take tiles; else for those that take masks.
        dtype: of rows in and out.
    """
    scale_NG = torch.full((codes_NK.shape[0], 1), 0.01)
    return weights(codes_NK, w, a, tiles=tiles, out=dtype, scale_NG=scale_NG)


def layer(engine: PlanesEngine, weights: PlanesWeights) -> Callable[[Tensor], Tensor]:
    """Rows in, rows out, rounded on the way."""

    def run(x_MK: Tensor) -> Tensor:
        out = result(weights, x_MK.shape[0])
        quantized(engine, weights, x_MK, out)
        return out

    return run


def turning(calls: Sequence[Callable[[], object]], times: int) -> Callable[[], None]:
    """So many calls at a time, each of the next one in turn."""
    place = 0

    def run() -> None:
        nonlocal place
        for _ in range(times):
            calls[place % len(calls)]()
            place += 1

    return run


def table(
    machine: Machine,
    *,
    size: int = 4096,
    rows: Sequence[int] = (1, 16, 256),
    widths: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (2, 8), (4, 4), (4, 8), (8, 8)),
    buffers: int = 20,
    pairs: int = 15,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> list[TimedEngine]:
    """Layers of ``size`` x ``size``, bf16 in and out; weights take turns.

    Args:
        machine: whose estimates.
        size: outputs and inputs.
        rows: numbers of rows.
        widths: (bits of the weights, bits of the activations).
        buffers: weights that take turns; together they should exceed the last cache.
        pairs: rounds.
        progress: called with (text, share done).
    """
    codes = [torch.randint(0, 256, (size, size), dtype=torch.uint8) for _ in range(buffers)]
    dense = [(torch.rand(size, size) - 0.5).to(torch.bfloat16) for _ in range(buffers)]
    table = []
    for index, (w, a) in enumerate(widths):
        few = [code & (2**w - 1) for code in codes]
        made: dict[bool, list[PlanesWeights]] = {}
        for m in rows:
            progress(f"{w} x {a} bits, {m} rows", index / len(widths))
            x = torch.randn(m, size).to(torch.bfloat16)
            best = chosen(m, size, size, w, a, size, machine)
            expected = {
                name: engine.seconds(m, size, size, w, a, machine)
                for name, engine in ENGINES.items()
                if engine.refuses() is None
            }
            able = [n for n, s in expected.items() if s <= _HOPELESS * min(expected.values())]
            methods = {"torch bf16": turning([lambda v=v, x=x: F.linear(x, v) for v in dense], 1)}  # type: ignore[misc]
            for name in able:
                engine = ENGINES[name]
                if engine.tiles not in made:
                    made[engine.tiles] = [held(c, w, a, tiles=engine.tiles) for c in few]
                layers = [layer(engine, weights) for weights in made[engine.tiles]]
                methods[name] = turning([lambda r=r, x=x: r(x) for r in layers], 1)  # type: ignore[misc]
            seconds = interleave(methods, pairs, warmup=1)
            for name in methods:
                table.append(
                    TimedEngine(
                        m,
                        w,
                        a,
                        name,
                        seconds.median(name).value,
                        seconds.ratio("torch bf16", name).value,
                        expected.get(name),
                        best is not None and best.name == name,
                    )
                )
    return table
