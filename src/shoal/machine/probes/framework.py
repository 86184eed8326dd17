"""What torch costs where the arithmetic costs nothing: operators and memory traffic."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import MachineError, MissingExtraError
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine.protocols import ProbeContext


@part
class Framework:
    """Time to launch an eager operator, and bandwidth of an element-wise one.

    Args:
        bytes_each: size of each of the three arrays of the large addition.
        repeats: samples; 0 for 5 (fast) or 15.
    """

    bytes_each: Annotated[int, Ge(4096)] = 2**26
    repeats: Annotated[int, Ge(0)] = 0

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities: ``overhead.OP`` and ``op_overhead`` (s, mean over operators).

        ``op_overhead_train`` is seconds per forward operator with its backward pass;
        ``elementwise_bandwidth`` is byte/s at the bytes one call touches, all three arrays;
        its note has the threads.
        """
        repeats = self.repeats or (5 if context.fast else 15)
        try:
            worker = context.worker()
            overheads = worker.call("overhead", threads=1, repeats=2 * repeats + 1)
        except (MissingExtraError, MachineError) as cause:
            context.skip("framework", str(cause))
            return []
        train = overheads.pop("train")
        results = [
            context.measured("framework", f"overhead.{name}", "s", seconds)
            for name, seconds in overheads.items()
        ]
        mean = [sum(turn) / len(turn) for turn in zip(*overheads.values(), strict=True)]
        results.append(context.measured("framework", "op_overhead", "s", mean))
        results.append(context.measured("framework", "op_overhead_train", "s", train))
        for threads in sorted({1, len(context.cpus)}):
            for size in (2**16, 2**20, self.bytes_each):
                seconds = worker.call("elementwise", bytes_=size, threads=threads, repeats=repeats)
                results.append(
                    context.measured(
                        "framework",
                        "elementwise_bandwidth",
                        "B/s",
                        [3 * size / s for s in seconds],
                        at=3 * size,
                        note=f"threads={threads}",
                    )
                )
        return results
