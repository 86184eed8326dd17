"""``shoal explain stream``: what memory gives, to our loops, to plain C, and by the probe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from shoal.core.measure import check_quiet
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.ir import Explanation, Machine, Progress


@part
class StreamStudy:
    """Measure STREAM: copy, scale, add and triad by the parallel algorithms and by C with OpenMP.

    Both take turns, with the same flags and threads. The bandwidth of the probe is shown for
    comparison. Arrays must be larger than the caches.

    **Examples**

        shoal explain stream

        shoal explain stream --quick -o json

    Args:
        elements: numbers (fp64) of each of the three arrays.
        quick: three rounds.
        anyway: measure on a busy machine too.
    """

    machine: ClassVar = None

    elements: PositiveInt = 1 << 25
    quick: bool = False
    anyway: bool = False

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        from shoal.kernel.algorithms.stream import rates
        from shoal.kernel.dispatch import here

        if not self.anyway:
            check_quiet(wait_s=60.0, hint="measure anyway with --set anyway=true")
        result = rates(self.elements, pairs=3 if self.quick else 15)
        probed = here().device.main_memory.read_bandwidth
        return Explanation(
            blocks=(
                Table(
                    title="GB/s",
                    columns=("", "algorithms", "OpenMP C", "ratio", "of the probe"),
                    rows=tuple(
                        (
                            name,
                            f"{of['algorithms'] / 1e9:.1f}",
                            f"{of['openmp_c'] / 1e9:.1f}",
                            f"{of['ratio']:.2f}",
                            "" if not probed else f"{of['algorithms'] / probed:.0%}",
                        )
                        for name, of in result.items()
                    ),
                    right=" rrrr",
                ),
            ),
            data={
                "bytes_per_s": result,
                "probed_bytes_per_s": probed,
                "elements": self.elements,
            },
        )
