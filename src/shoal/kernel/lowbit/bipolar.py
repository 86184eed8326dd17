"""Weights of few bits times activations of few bits, both bipolar integers.

``weights: bipolar2-g128`` with ``activations: bipolar4``. Weights in integer formats are taken as
they are: their codes are the codes of bipolar integers with another scale and an offset
(:func:`shoal.kernel.planes.layout.bipolar_of`).

Source: Ma et al., Efficient Arbitrary Precision Acceleration for Large Language Models on GPU
Tensor Cores, 2024.
"""

from __future__ import annotations

import bisect
import re
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.ir import Estimate, Interval, Machine
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.dispatch import here
from shoal.kernel.formats import weight_format
from shoal.kernel.lowbit.base import LowbitKernel, checked, require_rows
from shoal.kernel.planes.engines import PlanesEngine, chosen
from shoal.kernel.protocols import PackedMatrix, Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat

_FORMATS = ("bipolar", "int", "uint")
# Rows between which the choice of the engine is made anew.
_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 4096)


def _family(call: LowbitLinearCall) -> str:
    """``int`` of ``int4-g128``."""
    match = re.match(r"[a-z]+", call.format)
    return match[0] if match else ""


@part
class BipolarLinear(LowbitKernel):
    """Rounds rows to bipolar integers, multiplies exactly, and scales in the same pass.

    All engines sum groups in the same order, so the bits of a row's result do not depend on other
    rows.
    """

    backend: ClassVar[str] = "bipolar"
    invariant: ClassVar[bool] = True
    activations: ClassVar[tuple[str, ...]] = ("bipolar",)
    compiled: ClassVar[bool] = True

    def _refuses(self, call: LowbitLinearCall) -> str | None:
        if re.fullmatch(r"bipolar[1-8]", call.activations) is None:
            return "takes activations of bipolar1 to bipolar8 only"
        return super()._refuses(call)

    def _refuses_format(self, call: LowbitLinearCall, stored: BaseFormat, group: int) -> str | None:
        if _family(call) not in _FORMATS or stored.keeps_half:
            return f"takes weights in {', '.join(_FORMATS)} formats without sparsity"
        if group < call.k and group % 16:
            near = max(16, group // 16 * 16)
            return f"takes groups of a multiple of 16, not {group}; nearest {near}"
        if self._engine(call, here()) is None:
            return "needs a CPU with AVX-512 and vpopcntdq, VNNI or AMX"
        return None

    def _engine(
        self, call: LowbitLinearCall, machine: Machine, rows: int | None = None, masks: bool = False
    ) -> PlanesEngine | None:
        stored = weight_format(call.format)
        group, a = stored.group_of(call.k), int(call.activations[-1])
        m = call.m if rows is None else rows
        return chosen(m, call.n, call.k, stored.code_bits, a, group, machine, masks=masks)

    def estimate(self, call: LowbitLinearCall, machine: Machine) -> Estimate:
        """That of its engine, and one pass over the activations."""
        engine = self._engine(call, machine)
        w, a = weight_format(call.format).code_bits, int(call.activations[-1])
        seconds = 0.0 if engine is None else engine.seconds(call.m, call.n, call.k, w, a, machine)
        seconds += self.call_s
        return Estimate(
            step_s=Interval.around(seconds, 0.3),
            terms_s={"memory": seconds},
            flops=call.flops,
            bound="memory" if call.flops < 16 * call.moved_bytes else "compute",
        )

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch

        from shoal.kernel.formats.bits import unpack
        from shoal.kernel.planes.layout import bipolar_of
        from shoal.kernel.planes.native import quantized, result, weights
        from shoal.kernel.tensors import constant

        stored, k, n = checked(call, weight), call.k, call.n
        w, group, machine = stored.code_bits, stored.group_of(k), here()
        first = self._engine(call, machine)
        assert first is not None
        scale, offset = weight.tensors["scales"].float(), None
        if _family(call) == "int":
            scale, offset = bipolar_of(scale, -(2.0 ** (w - 1)) * scale, w)
        elif _family(call) == "uint":
            scale, offset = bipolar_of(scale, -weight.tensors["zeros"].float() * scale, w)
        dtype = torch.bfloat16 if call.dtype == "bf16" else torch.float32
        if bias_N is not None:
            bias_N = constant("bias", bias_N.float(), (n,), torch.float32)
        held = weights(
            unpack(weight.tensors["codes"], w, k),
            w,
            int(call.activations[-1]),
            tiles=first.tiles,
            out=dtype,
            group=group,
            scale_NG=scale,
            offset_NG=offset,
            bias_N=bias_N,
        )
        engines = [first] * len(_ROWS)
        if not first.tiles:
            engines = [self._engine(call, machine, rows, True) or first for rows in _ROWS]

        def run(x: Tensor) -> Tensor:
            require_rows(call, x, dtype)
            rows = x.reshape(-1, k).contiguous()
            out = result(held, rows.shape[0])
            engine = engines[bisect.bisect_right(_ROWS, rows.shape[0]) - 1]
            quantized(engine, held, rows, out)
            return out.view(*x.shape[:-1], n)

        run.weights = held  # type: ignore[attr-defined]
        return run
