"""The GPU, where there is one: what NVML and torch say, and what torch reaches on it."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from shoal.core.errors import MachineError, MissingExtraError, install, require
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine.protocols import ProbeContext


@part
class GpuProbe:
    """Matrix products by type, memory and host bandwidth, and launch overhead of the first GPU.

    Args:
        sizes: edges of the square products.
        repeats: samples; 0 for 7 (fast) or 25.
    """

    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    repeats: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        require(
            bool(self.sizes) and all(16 <= size <= 32768 for size in self.sizes),
            "probe.gpu.sizes",
            self.sizes,
            expected="edges of 16 to 32768",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities ``matmul_DTYPE`` (FLOP/s, at the edge), ``memory`` and the copies.

        Copies ``host_to_device`` and ``device_to_host`` are in byte/s; ``op_overhead`` and
        ``op_overhead_train`` in s. Facts go to ``context.facts["gpu"]``.
        """
        if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
            context.skip("gpu", "no NVIDIA driver on this machine")
            return []
        repeats = self.repeats or (7 if context.fast else 25)
        try:
            worker = context.worker()
            facts = worker.call("gpu_facts")
        except (MissingExtraError, MachineError) as cause:
            context.skip("gpu", str(cause))
            return []
        if facts is None:
            context.skip("gpu", "torch sees no CUDA device; install a CUDA build of torch")
            return []
        context.facts["gpu"] = {**facts, **nvml_facts(context)}
        results = []
        for dtype in ("fp32", "bf16", "fp16"):
            for size in self.sizes:
                seconds = worker.call(
                    "matmul",
                    m=size,
                    n=size,
                    k=size,
                    dtype=dtype,
                    threads=1,
                    repeats=repeats,
                    device="cuda",
                )
                rates = [2 * size**3 / s for s in seconds]
                results.append(context.measured("gpu", f"matmul_{dtype}", "FLOP/s", rates, at=size))
        size = 2**30
        seconds = worker.call("elementwise", bytes_=size, threads=1, repeats=repeats, device="cuda")
        rates = [3 * size / s for s in seconds]
        results.append(context.measured("gpu", "memory", "B/s", rates, at=size))
        for name, there in (("host_to_device", True), ("device_to_host", False)):
            seconds = worker.call("copy", bytes_=2**28, to_device=there, repeats=repeats)
            rates = [2**28 / s for s in seconds]
            results.append(context.measured("gpu", name, "B/s", rates, at=2**28))
        overheads = worker.call("overhead", threads=1, repeats=repeats, device="cuda")
        train = overheads.pop("train")
        mean = [sum(turn) / len(turn) for turn in zip(*overheads.values(), strict=True)]
        results.append(context.measured("gpu", "op_overhead", "s", mean))
        results.append(context.measured("gpu", "op_overhead_train", "s", train))
        return results


def nvml_facts(context: ProbeContext) -> dict[str, Any]:
    """Power limit and driver of the first GPU through NVML, if its package is there."""
    try:
        import pynvml
    except ImportError:
        context.skip("gpu.nvml", f"nvidia-ml-py is not installed; {install('gpu')}")
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as cause:
        context.skip("gpu.nvml", str(cause))
        return {}
    result: dict[str, Any] = {}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        result["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        # Some virtual GPUs do not report their power limit.
        with contextlib.suppress(pynvml.NVMLError):
            result["power_watts"] = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    finally:
        pynvml.nvmlShutdown()
    return result
