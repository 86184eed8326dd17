"""[117] Marlin: do 4-bit weights make a linear layer as much faster as they are smaller?

Source: Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language
Models, 2024.

Three layer shapes, 1 to 64 rows, against PyTorch's bf16 and 4-bit products, over so many copies of
the weights that none is in a cache. A sample is the geometric mean over the shapes; the method is
what dispatch takes among kernels that round nothing. Counted: bytes, errors, inexact integer sums,
places of the GPU layout. The A/A run has the bf16 product.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab import marlin_layout
from shoal.claims.protocols import ExperimentContext
from shoal.core.measure import interleave
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.kernel.base import roof_s
from shoal.kernel.calls import LinearCall, LowbitLinearCall
from shoal.kernel.dispatch import candidates, here, kernels_of
from shoal.kernel.formats import weight_format

if TYPE_CHECKING:
    from shoal.kernel.protocols import PackedMatrix

FORMAT = "int4-g128"
# (outputs, inputs).
SHAPES: tuple[tuple[int, int], ...] = ((4096, 4096), (11008, 4096), (8192, 8192))
ROWS = (1, 2, 4, 8, 16, 32, 64)
_BF16, _OWN, _INT4, _W4A8, _PEER = "bf16", "own bf16", "int4", "int4 int8", "torch int4"
_EXACT = ("cpp_w4a16", "torch", "dequantised")


@part
class MarlinClaim(BaseClaim, row=117):
    """Speed at 1 to 64 rows, a decoder from end to end, and what the codes cost in quality.

    Args:
        cold_bytes: bytes of all copies of one method's weights, beyond every cache.
        pairs: rounds of each shape and number of rows.
        width: hidden size of the decoder.
        model: mini-model of the zoo whose quality is measured.
    """

    cold_bytes: Annotated[float, Ge(1e6)] = 1e9
    pairs: Annotated[int, Ge(3)] = 15
    width: Annotated[int, MultipleOf(128), Ge(256)] = 1024
    model: str = "shoal-4m-h128"

    def refuses(self, context: ExperimentContext) -> str | None:
        """Where the 4-bit kernels cannot run."""
        kernel = kernels_of("linear_lowbit")["cpp_w4a16"]
        reason = kernel.refuses(_call(1, 256, 256))
        return None if reason is None else f"the 4-bit kernel {reason}"

    def collect(self, run: ClaimRun) -> None:
        """Count; the full run then times products and a decoder, and measures quality."""
        run.put("weight_bytes", _bytes(1024, 1024, run.as_baseline), _bytes(1024, 1024, True))
        run.put("mean_error", _errors(run.seed))
        run.put("inexact_sums", _inexact(run.seed))
        run.put("lost_places", _lost(run.seed))
        if run.quick:
            return
        self._products(run)
        from shoal.claims.experiments.marlin_decoder import decoders, losses

        run.progress("a decoder", 0.8)
        plain, low = decoders(self.width, FORMAT, self.cold_bytes, run.seed)
        timed = run.race({"method": low, "baseline": plain}, self.pairs)
        run.put("decoder_m1", timed["method"], timed["baseline"])
        run.progress("quality", 0.9)
        plain_loss, nearest, gptq = run.remember(
            "quality", lambda: losses(self.model, FORMAT, run.context)
        )
        chosen = run.pick(gptq, nearest)
        run.put("perplexity_increase", math.exp(chosen - plain_loss) - 1)
        run.put("gptq_over_nearest", chosen, nearest)

    def _products(self, run: ClaimRun) -> None:
        # One shape shows that the baseline does not pass; its times would say no more.
        shapes = run.pick(SHAPES, SHAPES[:1])
        rows = run.pick(ROWS, (1, 4, 8, 16))
        seconds: dict[int, list[Mapping[str, tuple[float, ...]]]] = {m: [] for m in rows}
        for index, (n, k) in enumerate(shapes):
            layer = _Layer(n, k, self.cold_bytes, run.seed)
            for place, m in enumerate(rows):
                done = (index + place / len(rows)) / len(shapes)
                run.progress(f"{n} x {k}, {m} rows", 0.1 + 0.7 * done)
                methods = run.arms(layer.methods(m), {_INT4: _BF16, _W4A8: _BF16})
                taken = interleave(methods, self.pairs, warmup=2, seed=run.seed + m).seconds
                seconds[m].append(taken)
        pairs = {m: _means(each) for m, each in seconds.items()}
        gains = {m: _gain(pairs[m][_BF16], pairs[m][_INT4]) for m in rows}
        machine = run.context.machine or here()
        roofs = {m: _roofs(m, shapes, machine) for m in rows}
        shares = {m: gains[m] / (roofs[m][0] / roofs[m][1]) for m in rows}
        for m in (1, 4, 8, 16):
            bound = statistics.median(pairs[m][_BF16]) / roofs[m][1]
            run.put(f"speedup_m{m}", pairs[m][_INT4], pairs[m][_BF16], bound=bound)
        run.put("rounded_m16", pairs[16][_W4A8], pairs[16][_BF16])
        worst = min(
            (m for m in rows if m <= 16), key=lambda m: _gain(pairs[m][_PEER], pairs[m][_INT4])
        )
        run.put("over_torch_int4", pairs[worst][_INT4], pairs[worst][_PEER])
        # A gain is at most what this kernel's own roof leaves of the time that torch takes.
        least = min(shares, key=lambda m: shares[m])
        bound = statistics.median(pairs[least][_BF16]) / roofs[least][0]
        run.put("roofline_share", shares.values(), bound=bound)
        own = [m for m in rows if _OWN in pairs[m]]
        run.details["gain_over_own_bf16"] = {m: _gain(pairs[m][_OWN], pairs[m][_INT4]) for m in own}
        run.profile = "; ".join(
            f"{m} rows: {gains[m]:.2f} x, roof {roofs[m][0] / roofs[m][1]:.2f} x, "
            f"{1e6 * statistics.median(pairs[m][_INT4]):.0f} us, "
            f"roof {1e6 * roofs[m][1]:.0f} us"
            for m in rows
        )


class _Layer:
    """One shape, with cold copies of its weights for every method."""

    def __init__(self, n: int, k: int, cold_bytes: float, seed: int) -> None:
        import torch

        self.n, self.k = n, k
        self._seed = seed
        random = torch.Generator().manual_seed(seed)
        weight = torch.randn(n, k, generator=random) * 0.02
        packed = weight_format(FORMAT).quantize(weight)
        dense = weight.bfloat16()
        copies = max(2, math.ceil(cold_bytes / dense.nbytes))
        low = max(2, math.ceil(cold_bytes / packed.nbytes))
        self._ready = {
            _BF16: _each(
                "linear", "torch", _dense(1, n, k), [dense.clone() for _ in range(copies)]
            ),
            _INT4: _each("linear_lowbit", "cpp_w4a16", _call(1, n, k), _clones(packed, low)),
            _W4A8: _each("linear_lowbit", "cpp_w4a8", _call(1, n, k, "int8"), _clones(packed, low)),
            _PEER: _each("linear_lowbit", "torch", _call(1, n, k), _clones(packed, low)),
        }
        if kernels_of("linear")["cpp"].refuses(_dense(1, n, k)) is None:
            self._ready[_OWN] = _each(
                "linear", "cpp", _dense(1, n, k), [dense.clone() for _ in range(copies)]
            )

    def chosen(self, m: int) -> str:
        """What dispatch takes here among the kernels that round nothing."""
        return next(name for name, _ in candidates(_call(m, self.n, self.k)) if name in _EXACT)

    def methods(self, m: int) -> dict[str, Callable[[], object]]:
        """Each takes the next copy of its weights at every call."""
        import torch

        from shoal.kernel.planes.bench import turning

        x = torch.randn(m, self.k, generator=torch.Generator().manual_seed(self._seed)).bfloat16()
        # Some products in a row, each with the next of the copies.
        runs = {
            name: turning([functools.partial(one, x) for one in ready], 2)
            for name, ready in self._ready.items()
        }
        if m > 16:
            del runs[_PEER]  # it is claimed up to 16, and beyond takes most of the time
        if self.chosen(m) == "dequantised":
            runs[_INT4] = runs[_BF16]
        elif self.chosen(m) == "torch" and _PEER in runs:
            runs[_INT4] = runs[_PEER]
        return {**runs}


def _call(m: int, n: int, k: int, activations: str = "") -> LowbitLinearCall:
    bits = weight_format(FORMAT).bits
    return LowbitLinearCall(m, n, k, FORMAT, bits, "bf16", "cpu", activations)


def _dense(m: int, n: int, k: int) -> LinearCall:
    return LinearCall(m, n, k, "bf16")


def _each(op: str, backend: str, call: Any, weights: Sequence[Any]) -> list[Any]:
    kernel = kernels_of(op)[backend]
    return [kernel.prepare(call, weight) for weight in weights]


def _clones(packed: PackedMatrix, copies: int) -> list[PackedMatrix]:
    from shoal.kernel.protocols import PackedMatrix as Stored

    return [
        Stored(packed.format, packed.shape, {name: t.clone() for name, t in packed.tensors.items()})
        for _ in range(copies)
    ]


def _means(shapes: Sequence[Mapping[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    """Geometric means over the shapes, round by round."""
    return {
        name: tuple(np.exp(np.mean(np.log([shape[name] for shape in shapes]), axis=0)))
        for name in shapes[0]
    }


def _gain(baseline: Sequence[float], method: Sequence[float]) -> float:
    return float(np.median(np.divide(baseline, method)))


def _roofs(m: int, shapes: Sequence[tuple[int, int]], machine: Any) -> tuple[float, float]:
    """Seconds below which the two products of a sample cannot be, bf16 and 4-bit."""
    calls = 2
    means = []
    for make in (_dense, _call):
        each = [calls * roof_s(make(m, n, k), machine, "bf16") for n, k in shapes]
        means.append(math.exp(statistics.fmean(map(math.log, each))))
    return means[0], means[1]


def _bytes(n: int, k: int, dense: bool) -> float:
    """Bytes of the weights as the kernel reads them."""
    import torch

    if dense:
        return 2.0 * n * k
    from shoal.kernel.lowbit.marlin import blocks

    packed = weight_format(FORMAT).quantize(torch.zeros(n, k))
    return float(blocks(packed).memory.numel())


def _errors(seed: int) -> list[float]:
    """Mean error of the 4-bit product, of the mean magnitude, in fp32."""
    import torch

    errors = []
    for m, n, k in ((1, 256, 512), (3, 300, 1024), (16, 128, 2048), (40, 72, 640)):
        random = torch.Generator().manual_seed(seed + m)
        packed = weight_format(FORMAT).quantize(torch.randn(n, k, generator=random))
        x = torch.randn(m, k, generator=random).bfloat16().float()
        call = LowbitLinearCall(m, n, k, FORMAT, 4.125, "fp32")
        result = kernels_of("linear_lowbit")["cpp_w4a16"].prepare(call, packed)(x)
        wanted = x.double() @ weight_format(FORMAT).dequantize(packed).double().T
        errors.append(float((result - wanted).abs().mean() / wanted.abs().mean()))
    return errors


def _inexact(seed: int) -> int:
    """Sums of integers that the rounding kernel does not get exactly."""
    import torch

    from shoal.kernel.protocols import PackedMatrix as Stored

    wrong = 0
    for m, n, k in ((1, 64, 512), (5, 48, 1024), (16, 96, 256)):
        random = torch.Generator().manual_seed(seed + m)
        packed = weight_format(FORMAT).quantize(torch.randn(n, k, generator=random))
        ones = {"scales": torch.ones_like(packed.tensors["scales"])}
        packed = Stored(packed.format, packed.shape, {**packed.tensors, **ones})
        x = torch.randint(-127, 128, (m, k), generator=random).float()
        x[:, ::64] = 127.0  # so that the rows are their own codes
        call = LowbitLinearCall(m, n, k, FORMAT, 4.125, "fp32", "cpu", "int8")
        result = kernels_of("linear_lowbit")["cpp_w4a8"].prepare(call, packed)(x)
        wanted = x.double() @ weight_format(FORMAT).dequantize(packed).double().T
        wrong += int((result.double() != wanted).sum())
    return wrong


def _lost(seed: int) -> int:
    """Codes and scales that the GPU layout does not give back."""
    random = generator(seed, purpose="marlin layout")
    codes = random.integers(0, 16, (256, 512)).astype(np.uint8)
    scales = random.random((2, 512)).astype(np.float16)
    back = marlin_layout.unpack(marlin_layout.pack(codes))
    ordered = marlin_layout.restore_scales(marlin_layout.order_scales(scales))
    return int((back != codes).sum()) + int((ordered != scales).sum())
