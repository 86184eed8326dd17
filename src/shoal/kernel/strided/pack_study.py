"""``shoal explain pack``: what a strided type becomes, and what packs it here."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeInt

from shoal.core.parts import part
from shoal.ir import Explanation, Machine, Progress
from shoal.kernel.strided.explain import explain


@part
class PackStudy:
    """Explain a strided datatype: its canonical form, rule by rule, and the kernel that packs it.

    Constructors are named, contiguous, vector, hvector, subarray, resized, indexed, hindexed
    and struct, as in MPI.

    **Examples**

        shoal explain pack "vector(13, 100, 128, float32)"

        shoal explain pack "hvector(47, 1, 131072, vector(13, 100, 128, byte))" --count 2

        shoal explain pack "float32[256, 256, 256][:, 0, ::2]"

    Args:
        datatype: a type such as vector(13, 100, 128, float32), or a slice.
        count: number of consecutive items of the type.
    """

    subject: ClassVar = "datatype"
    machine: ClassVar = None

    datatype: str
    count: NonNegativeInt = 1

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        text = explain(self.datatype, count=self.count)
        return Explanation(blocks=(text,), data=text)
