"""BitFit: biases alone are trained.

Source: Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based
Masked Language-models, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import ConfigError
from shoal.core.parts import part
from shoal.train.peft.base import EVERY, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class BitFit(SiteMethod):
    """A change of the bias of each linear layer.

    Args:
        add: add a zero bias to layers without one; otherwise they are not trained.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    add: bool = True
    targets: str = EVERY
    name: ClassVar[str] = "bitfit"

    def count(self, rows: int, columns: int) -> float:
        return rows

    def prepare(self, handle: ModelPeftHandle, sites: list[Site], seed: int) -> None:
        """Leave out layers without a bias, if so wanted.

        Raises:
            ConfigError: none has one.
        """
        if not self.add:
            sites[:] = [site for site in sites if handle.rows(site).bias is not None]
            if not sites:
                raise ConfigError(
                    "finetune.bitfit.add = False: no target of the model has a bias; leave it True"
                )

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.scales import Shift

        return Shift(site)
