"""What a matrix product of torch really reaches, by type, size and threads.

Runs in a child process, so the caller's thread settings stay. Without torch, NumPy's
fp32 product is measured instead, with the threads that its BLAS chooses.
"""

from __future__ import annotations

import time
from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine.protocols import ProbeContext

# A fast probe multiplies nothing larger than what it expects to take so long.
_LONG_S = 0.3


@part
class Matmul:
    """Rates of square products, one thread and all.

    Args:
        sizes: edges of the matrices; empty for the powers of two from 64 to 2048; with fast, only
            those whose products take less than a fraction of a second (without bf16 units large
            ones take long and add no information).
        dtypes: ``fp32`` and ``bf16``.
        repeats: samples; 0 for 5 (fast) or 15.
    """

    sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    repeats: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        require(
            all(16 <= size <= 32768 for size in self.sizes),
            "probe.matmul.sizes",
            self.sizes,
            expected="edges of 16 to 32768",
        )
        require(
            bool(self.dtypes) and set(self.dtypes) <= {"fp32", "bf16", "fp16"},
            "probe.matmul.dtypes",
            self.dtypes,
            expected="some of fp32, bf16, fp16",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities ``matmul_DTYPE`` and ``matmul_DTYPE_1core`` in FLOP/s, at the edge.

        The note has the threads.
        """
        sizes = self.sizes or (64, 128, 256, 512, 1024, 2048)
        repeats = self.repeats or (5 if context.fast else 15)
        try:
            worker = context.worker()
            worker.call("hello")
        except MissingExtraError as cause:
            context.skip("matmul.torch", str(cause))
            return self._numpy(context, sizes, repeats)
        except MachineError as cause:
            context.skip("matmul.torch", str(cause))
            return []
        results = []
        counts = {"": len(context.cpus)}
        if len(context.cpus) > 1:
            counts["_1core"] = 1
        else:
            context.skip("matmul.1core", "one core: the rates of all cores are those of one")
        for dtype in self.dtypes:
            for suffix, threads in counts.items():
                expected_s = 0.0
                for size in sizes:
                    few = 3 if size >= 2048 and context.fast else repeats
                    if context.fast and expected_s > _LONG_S:
                        break
                    seconds = worker.call(
                        "matmul", m=size, n=size, k=size, dtype=dtype, threads=threads, repeats=few
                    )
                    expected_s = 8 * min(seconds)
                    results.append(
                        context.measured(
                            "matmul",
                            f"matmul_{dtype}{suffix}",
                            "FLOP/s",
                            [2 * size**3 / s for s in seconds],
                            at=size,
                            note=f"threads={threads}",
                        )
                    )
        return results

    def _numpy(
        self, context: ProbeContext, sizes: tuple[int, ...], repeats: int
    ) -> list[Measurement]:
        import numpy as np

        results = []
        for size in sizes:
            a = np.ones((size, size), dtype=np.float32)
            out = np.empty_like(a)
            np.matmul(a, a, out=out)
            batch = max(1, round(2e8 / size**3))
            rates = []
            for _ in range(repeats):
                begin = time.perf_counter()
                for _ in range(batch):
                    np.matmul(a, a, out=out)
                rates.append(2 * size**3 * batch / (time.perf_counter() - begin))
            results.append(
                context.measured(
                    "matmul", "matmul_fp32", "FLOP/s", rates, at=size, note="numpy, without torch"
                )
            )
        return results
