"""What the kernels of ``spgemm`` have in common: their cost is a count of products."""

from __future__ import annotations

from typing import ClassVar

from shoal.ir import Estimate, Interval, Machine
from shoal.kernel.base import BaseKernel, roof_s
from shoal.kernel.spgemm.call import Semiring, SpGemm

_SPREAD = 0.6


class SparseKernel(BaseKernel):
    """Base of the kernels ``spgemm.*``.

    Attributes:
        semirings: those it knows.
        masks: it can compute only the entries that a mask has.
        multiply_s: of one product on one core, all that belongs to it included.
        parallel: it uses all cores.
        counted: its call takes the products of each row as the last argument, if they are known.
    """

    op: ClassVar[str] = "spgemm"
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "int64")
    semirings: ClassVar[tuple[Semiring, ...]] = ("plus_times",)
    masks: ClassVar[bool] = False
    multiply_s: ClassVar[float] = 1e-8
    parallel: ClassVar[bool] = True
    counted: ClassVar[bool] = False

    def work(self, call: SpGemm) -> float:
        """Products that it looks at."""
        return float(call.multiplies)

    def estimate(self, call: SpGemm, machine: Machine) -> Estimate:
        """Time of one call, by its products; never below what memory allows."""
        cores = machine.device.num_cores or 1
        seconds = self.work(call) * self.multiply_s / (cores if self.parallel else 1)
        seconds = max(seconds, roof_s(call, machine)) + self.call_s
        return Estimate(
            step_s=Interval.around(seconds, _SPREAD),
            terms_s={"compute": seconds},
            flops=call.flops,
            bound="compute",
        )

    def _refuses(self, call: SpGemm) -> str | None:
        if call.semiring not in self.semirings:
            return f"knows {', '.join(self.semirings)} only"
        if call.masked and not self.masks:
            return "takes no mask"
        if call.keep and not self.masks:
            return "does not support a mask whose entries are all stored"
        return None
