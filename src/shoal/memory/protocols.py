"""What the parts of kind ``offload`` promise.

A job with ``offload`` keeps the state of its model in tiers. The engine asks the part to ``apply``
itself in the place of the part of kind ``shard``; what it gets back is the engine's
:class:`~shoal.ir.comm.ShardedModel` and the loop's updater at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shoal.ir import Estimate, Machine, TrainJob, Work
from shoal.ir.comm import Comm, ShardedModel, Updater

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.memory.streaming.tiling import Tile
    from shoal.memory.tiers.places import Tiers


class TieredModel(ShardedModel, Updater, Protocol):
    """A model in training whose state lies in tiers.

    Attributes:
        tiers: where everything is; ``tiers.used()`` and ``tiers.peaks()`` count bytes by tier.
        tiles: parameter -> the box of another one that it is, by whose name it is saved.
    """

    tiers: Tiers
    tiles: Mapping[str, Tile]

    def passes(self, name: str, *inputs: Tensor | None) -> AbstractContextManager[None]:
        """Around all passes of a step (``train``) or those that score (``score``).

        Args:
            name: of the kind.
            inputs: tensors made outside that the passes use.
        """

    def lend(self, names: Collection[str]) -> dict[str, Tensor]:
        """Parameters of these names that have elements here, with gradients on the device.

        For code that must change gradients before the update; :meth:`take_back` keeps what they are
        then. The parameters themselves are empty.
        """

    def squares(self, name: str) -> Tensor:
        """Sum of the squares of what this rank has of the gradient of ``name``; a scalar, fp64."""

    def take_back(self, lent: Mapping[str, Tensor]) -> None:
        """Keep the gradients of what was lent."""

    def close(self) -> None:
        """End what runs and give the places back."""


@runtime_checkable
class EarlyUpdater(Protocol):
    """An offloaded model that has used a gradient before the backward pass is over."""

    def begin(self, factor: float, ready: Callable[[], None] | None = None) -> None:
        """A step begins, whose update has this factor of the learning rate.

        Args:
            factor: scales the learning rate.
            ready: called before anything changes; returns when weights and state may change. It
                may be called again.
        """


class Offload(Protocol):
    """A part of kind ``offload``."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes by tier (device, host, disk) and the seconds of a step that are not hidden.

        Of its ``terms_s``, ``memory`` comes on top of a step and ``optimizer`` is there in the
        place of the optimizer's own seconds.
        """

    def notes(self, work: Work, machine: Machine) -> tuple[str, ...]:
        """What a plan should say about it."""

    def check(self, job: TrainJob) -> None:
        """Refuse what this part does not compose with.

        Raises:
            ConfigError: names the option and what would do.
        """

    def apply(
        self,
        model: nn.Module,
        comm: Comm,
        optimizer: object,
        *,
        place: Path,
        device: torch.device | str = "cpu",
        values: Callable[[str], Tensor] | None = None,
    ) -> TieredModel:
        """Move a model's state into tiers.

        Args:
            model: its parameters are emptied, one after the other.
            comm: the ranks that share the parameters.
            optimizer: a part of kind ``optimizer``.
            place: directory for what lies on disk.
            device: where passes compute.
            values: the values of parameters on ``meta``, by name.

        Raises:
            TierFullError: a budget is too small; says what would do.
            MachineError: the place cannot be written.
        """
