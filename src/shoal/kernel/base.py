"""What all kernels have in common: what they need of a machine, and what they cost there.

A kernel's time is the larger of two, and a little for the call itself: the bytes it moves
over the bandwidth it reaches, and its operations over the rate it reaches. What it reaches
is measured on the probed machine (probe ``kernels``), at several numbers of rows; where it
was not, a share of the machine's own bandwidth and rate that the kernel states is taken.

Source: Williams et al., Roofline: An Insightful Visual Performance Model, 2009.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from shoal.core.errors import KernelError
from shoal.core.native import compiler, cpu_flags
from shoal.ir import Estimate, Interval, Machine
from shoal.ir.machine import Measurement
from shoal.kernel.protocols import Call, Ready

# Of an estimate whose kernel was measured here, and of one that was not.
_MEASURED, _STATED = 0.15, 0.6
# Outputs and inputs of the weights with which kernels of products are probed.
PROBED_EDGE = 4096
# FLOP/s of one core where a machine does not say: any CPU of today does more.
_SOME_RATE = 1e10
_SOME_BANDWIDTH = 1e10


class BaseKernel:
    """Base of the parts of kind ``kernel``.

    Attributes:
        op: what it computes.
        backend: how.
        invariant: rows do not depend on each other's presence, bit for bit.
        devices: where it runs.
        dtypes: short names of the types it takes.
        activations: kinds of rounding of its input that it knows, such as bipolar.
        needs: flags of the CPU without which it must not be run.
        compiled: it needs a C++ compiler.
        gates: it computes products of which half gate the others.
        packs: it repacks its constants, so the originals need not be kept.
        rate: key of ``Device.peak_flops`` that bounds it.
        memory_share: of the read bandwidth that it reaches, if not measured.
        compute_share: of that rate that it reaches, if not measured.
        call_s: of one call, or of each of its rounds.
    """

    op: ClassVar[str]
    backend: ClassVar[str]
    invariant: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    activations: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset()
    compiled: ClassVar[bool] = False
    gates: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    rate: ClassVar[str | None] = None
    memory_share: ClassVar[float] = 0.5
    compute_share: ClassVar[float] = 0.3
    call_s: ClassVar[float] = 5e-6

    def refuses(self, call: Any) -> str | None:
        """Why it cannot compute that here, or None if it can.

        Reasons that hold on every machine come before those of this machine.
        """
        if call.device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        dtype = getattr(call, "dtype", None)
        if dtype is not None and dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}"
        rounded = getattr(call, "activations", "")
        if rounded and rounded.rstrip("0123456789") not in self.activations:
            return f"does not round its input to {rounded}"
        if getattr(call, "gated", False) and not self.gates:
            return "does not support gated outputs"
        reason = self._refuses(call)
        if reason is not None:
            return reason
        missing = sorted(self.needs - cpu_flags()) if call.device == "cpu" else []
        if missing:
            return f"needs a CPU with {', '.join(missing)}"
        if self.compiled and compiler() is None:
            return "needs a C++ compiler (apt install g++)"
        return None

    def estimate(self, call: Any, machine: Machine) -> Estimate:
        """Time of one call whose operands lie in main memory."""
        seconds = _measured_s(f"{self.op}.{self.backend}", call, machine)
        spread = _MEASURED
        if seconds is None:
            spread = _STATED
            memory, compute = _roofs(
                call, machine, self.rate or str(getattr(call, "dtype", "fp32"))
            )
            seconds = max(memory / self.memory_share, compute / self.compute_share)
        seconds += self.rounds(call) * self.call_s
        return Estimate(
            step_s=Interval.around(seconds, spread),
            terms_s={"memory": seconds},
            flops=call.flops,
            bound="memory" if call.flops < 16 * call.moved_bytes else "compute",
        )

    def rounds(self, call: Any) -> int:
        """How often it does one thing after another in a call: rows, where it goes row by row."""
        return 1

    def interpreted(self, call: Any) -> bool:
        """Whether it would run in an interpreter there: right, but never fast."""
        return False

    def prepare(self, call: Any, *constants: Any) -> Ready:
        """The kernel for calls like this one.

        Raises:
            KernelError: it refuses the call, or a constant is not what the call says.
        """
        self._require(call)
        return self._prepare(call, *constants)

    def _require(self, call: Any) -> None:
        reason = self.refuses(call)
        if reason is not None:
            raise KernelError(
                f"kernel.{self.op}: {self.backend} cannot compute {call}: it {reason}; "
                "choose another backend"
            )

    def _refuses(self, call: Any) -> str | None:
        return None

    def _prepare(self, call: Any, *constants: Any) -> Ready:
        raise TypeError(f"{type(self).__name__} cannot run")


@functools.cache
def _triton() -> bool:
    return find_spec("triton") is not None


class TritonKernel(BaseKernel):
    """Base of the kernels in Triton: on a GPU, and for tests in its interpreter.

    Named before the base of an operator's kernels, where there is one.
    """

    backend: ClassVar[str] = "triton"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    memory_share: ClassVar[float] = 0.6
    compute_share: ClassVar[float] = 0.3
    call_s: ClassVar[float] = 3e-5

    def refuses(self, call: Any) -> str | None:
        reason = super().refuses(call)
        if reason is None and not _triton():
            return "needs Triton (pip install triton)"
        if reason is None and call.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "runs on a GPU, and on a CPU in Triton's interpreter only (TRITON_INTERPRET=1)"
        return reason

    def interpreted(self, call: Any) -> bool:
        """On a CPU."""
        return bool(call.device == "cpu")

    def estimate(self, call: Any, machine: Machine) -> Estimate:
        """Interpreted on a CPU, nothing is slower."""
        estimate = super().estimate(call, machine)
        if not self.interpreted(call):
            return estimate
        return estimate.model_copy(update={"step_s": Interval.around(1.0, _STATED)})


def roof_s(call: Call, machine: Machine, rate: str | None = None) -> float:
    """Seconds below which no kernel can compute the call on this machine."""
    return max(_roofs(call, machine, rate or str(getattr(call, "dtype", "fp32"))))


def _roofs(call: Call, machine: Machine, rate: str) -> tuple[float, float]:
    device = machine.device
    bandwidth = device.main_memory.read_bandwidth or _SOME_BANDWIDTH
    flops = device.peak_flops.get(rate) or device.matmul_flops.get(rate)
    if flops is None:
        flops = device.peak_flops.get("fp32") or device.matmul_flops.get("fp32") or _SOME_RATE
    return call.moved_bytes / bandwidth, call.flops / flops


def _measured_s(name: str, call: Any, machine: Machine) -> float | None:
    """Seconds by what the probe measured of this kernel at fewer and at more rows.

    Of as many rows a product takes time in proportion to its weights, whether their bytes or the
    operations with them bound it; beyond the last number of rows, in proportion to rows as well.
    """
    points = _points(machine.measurements, name, getattr(call, "dtype", ""))
    if not points:
        return None
    last = points[-1][0]
    rows = min(max(1.0, float(call.m)), last)
    at, rates = np.log(points).T
    rate = math.exp(np.interp(math.log(rows), at, rates))
    probed = dataclasses.replace(call, m=round(rows), n=PROBED_EDGE, k=PROBED_EDGE)
    weights = call.n * call.k / PROBED_EDGE**2
    return float(probed.moved_bytes / rate * weights * max(1.0, call.m / last))


@functools.lru_cache(maxsize=256)
def _points(
    measurements: tuple[Measurement, ...], name: str, dtype: str
) -> tuple[tuple[float, float], ...]:
    """(rows, B/s) of a kernel, by rising rows."""
    result = {
        m.at: m.median
        for m in measurements
        if m.probe == "kernels" and m.quantity == name and m.note == dtype and m.at is not None
    }
    return tuple(sorted(result.items()))
