"""The state of ``torch.optim`` optimizers by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["TorchUpdater", "local"]


def local(tensor: Any) -> Tensor:
    """The local part of a DTensor, or the tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


class TorchUpdater:
    """See :class:`~shoal.train.protocols.Updater`.

    Args:
        optimizers: torch optimizers, each over disjoint parameters; their groups'
            ``lr`` are the peak rates.
        names: parameter -> name.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        self._optimizers = [o for o in optimizers if o.param_groups]
        self._names = dict(names)
        self._peak = [[group["lr"] for group in o.param_groups] for o in self._optimizers]

    def step(self, factor: float) -> None:
        """Update every parameter from its gradient."""
        for optimizer, peaks in zip(self._optimizers, self._peak, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> state name -> local tensor."""
        return {
            self._names[parameter]: {key: local(value) for key, value in entries.items()}
            for optimizer in self._optimizers
            for parameter, entries in optimizer.state.items()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a saved state."""
        import torch

        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names[parameter]
                    if name not in state:
                        raise CheckpointError(
                            f"the checkpoint has no optimizer state of {name}; it was saved "
                            "with another optimizer; resume with that one"
                        )
                    entries = optimizer.state[parameter]
                    for key, value in state[name].items():
                        if value.dim() == 0:
                            entries[key] = value.clone()
                            continue
                        entry = torch.empty_like(parameter, dtype=value.dtype)
                        local(entry).copy_(value)
                        entries[key] = entry
