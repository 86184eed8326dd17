"""SSF: the output of every layer is scaled and shifted.

Source: Lian et al., Scaling and Shifting Your Features, 2022, equation 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.train.peft.base import EVERY, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class SSF(SiteMethod):
    """gamma * (W x + b) + beta, which merges into W and b.

    Differs: only linear layers are changed; the shift of a norm without a bias could not be merged.

    Args:
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    targets: str = EVERY
    name: ClassVar[str] = "ssf"

    def count(self, rows: int, columns: int) -> float:
        return 2 * rows

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.scales import ScaleShift

        return ScaleShift(site)
