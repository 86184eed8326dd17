"""``shoal explain stride``: which sub-groups of an optimizer's state does the device update?"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.ir import Explanation, Progress
from shoal.plan.memory.stride import HOST_ONLY, UpdateRates, choose, steady_stride

_RESOURCES = ("host", "device", "in", "out")
_Rate = Annotated[float, Gt(0), Lt(1e18)]


@part
class StrideStudy:
    """Choose which sub-groups of a host-offloaded optimizer the device updates.

    Every stride is simulated over host, device and link (Deep Optimizer States).

    **Examples**

        shoal explain stride --host 1.5e9 --device 25e9 --link 12e9

        shoal explain stride --host 1.5e9 --device 25e9 --link 12e9 --residents 4 -o json

    Args:
        host: parameters per second that the host updates.
        device: parameters per second that the device updates.
        link: fp32 words per second of the link in each direction.
        convert: parameters per second that the host converts to low precision.
        parameters: parameters of this rank.
        sub_group: parameters of a sub-group.
        residents: sub-groups that stay on the device.
        half_duplex: the link transfers in one direction at a time.
    """

    machine: ClassVar = None

    host: _Rate
    device: _Rate
    link: _Rate
    convert: _Rate = 8e9
    parameters: Annotated[float, Ge(1), Lt(1e18)] = 2e9
    sub_group: Annotated[float, Ge(1), Lt(1e18)] = 1e8
    residents: int = 0
    half_duplex: bool = False

    def explain(self, machine: None, progress: Progress) -> Explanation:
        """The eight best patterns of updates, and the one that a formula says."""
        require(
            self.parameters / self.sub_group <= 2000,
            "--sub-group",
            self.sub_group,
            expected="at most 2,000 of them in all",
        )
        rates = UpdateRates(
            host=self.host,
            device=self.device,
            convert=self.convert,
            link=self.link,
            duplex=not self.half_duplex,
        )
        whole, size = int(self.parameters), int(self.sub_group)
        sizes = [min(size, whole - at) for at in range(0, whole, size)]
        best, played = choose(rates, sizes, residents=self.residents)
        alone = next(one for one in played if one.pattern.stride == HOST_ONLY)
        ranked = sorted(played, key=lambda one: one.seconds)
        formula = steady_stride(rates, size)
        shown = Table(
            title=f"{whole:,} parameters in {len(sizes)} sub-groups",
            columns=(
                *("who updates", "update", "over host only"),
                *(f"{name} busy" for name in _RESOURCES),
            ),
            rows=tuple(
                (
                    one.pattern.describe(),
                    f"{1e3 * one.seconds:,.1f} ms",
                    f"{alone.seconds / one.seconds:.2f}x",
                    *(f"{100 * one.busy_s.get(r, 0) / one.flushed_s:.0f} %" for r in _RESOURCES),
                )
                for one in ranked[:8]
            ),
            right=" rrrrrr",
        )
        return Explanation(
            blocks=(
                shown,
                f"{best.pattern.describe()}: {alone.seconds / best.seconds:.2f}x the host alone; "
                "the "
                f"formula 1 + ceil(t_device / t_host) says {formula}",
            ),
            data={
                "chosen": best.model_dump(mode="json"),
                "host_only_s": alone.seconds,
                "stride_of_the_formula": formula,
                "played": [one.model_dump(mode="json") for one in ranked],
            },
        )
