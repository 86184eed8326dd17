"""Off-site tuning: blocks at the ends are trained beside a thinned-out middle.

Source: Xiao et al., Offsite-Tuning: Transfer Learning without Full Model, 2023, sections 3.2 and
3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.errors import require
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import nn

    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class Offsite:
    """Train the first and last blocks; an emulator replaces the blocks between them.

    The owner of the data needs only the first and last blocks and the emulator, and the owner of
    the model needs no data: merging puts the trained blocks around all others. The emulator changes
    the initial output, because blocks are missing, and merging changes it again.

    Differs: the emulator keeps evenly spaced blocks and is not distilled.

    Args:
        first: blocks at the beginning that are trained.
        last: blocks at the end that are trained.
        keep: share of the blocks between that the emulator keeps.
    """

    first: Annotated[int, Ge(0)] = 1
    last: Annotated[int, Ge(0)] = 1
    keep: float = 0.5
    traits: ClassVar[frozenset[str]] = frozenset({"own_blocks", "replaces_base"})
    name: ClassVar[str] = "offsite"
    advice: ClassVar[str] = "needs no more than some blocks of the base while it trains"
    mergeable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            self.first + self.last >= 1,
            "finetune.offsite.first",
            self.first,
            expected="1 or more where last is 0, or nothing is trained",
        )
        require(
            0 <= self.keep < 1,
            "finetune.offsite.keep",
            self.keep,
            expected="a fraction in [0, 1)",
        )

    def parameters(self, shape: ModelShape) -> float:
        from shoal.cost.arithmetic import parameters

        ends = min(self.first + self.last, shape.num_layers - 1)
        rest = shape.model_copy(update={"num_layers": shape.num_layers - ends})
        return float(parameters(shape) - parameters(rest))

    def inject(
        self, model: nn.Module, targets: str | None = None, *, seed: int = 0
    ) -> ModelPeftHandle:
        """See :class:`~shoal.train.peft.protocols.PeftMethod`.

        Raises:
            ConfigError: there is nothing to target, or no block between the ends.
        """
        from shoal.train.peft.run.offsite import OffsiteEmulator

        require(
            targets is None,
            "finetune.offsite.targets",
            targets,
            expected="none: the method works on whole blocks",
        )
        return OffsiteEmulator(model, self)
