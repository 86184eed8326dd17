"""(IA)^3: keys, values and the hidden layer of the feed-forward are scaled.

Source: Liu et al., Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context
Learning, 2022, section 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.train.peft.base import SiteMethod, matches

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class IA3(SiteMethod):
    """Trained factors of keys, values and hidden units: a few thousandths of a percent of weights.

    Args:
        targets: linear layers that it changes: patterns of names joined by a bar.
        inputs: those of ``targets`` whose inputs are scaled instead of their outputs.
    """

    targets: str = "*.k_proj|*.v_proj|*.down_proj"
    inputs: str = "*.down_proj"
    name: ClassVar[str] = "ia3"

    def count(self, rows: int, columns: int) -> float:
        """A factor for each output; of feed-forward layers see :meth:`parameters`."""
        return rows

    def parameters(self, shape: ModelShape) -> float:
        from shoal.train.peft.base import shape_sites

        return sum(
            columns if matches(name, self.inputs) else rows
            for name, rows, columns in shape_sites(shape)
            if matches(name, self.targets)
        )

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.scales import InputScale, OutputScale

        return InputScale(site) if matches(site.name, self.inputs) else OutputScale(site)
