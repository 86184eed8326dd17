"""The state of ``torch.optim`` optimizers by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.errors import CheckpointError
from shoal.kernel.tensors import local

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# Long enough for the kernel that updates it, short enough to begin while others are copied.
_PART_BYTES = 2**25


def _parts(groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The groups in parts of some parameters each, in their order."""
    for group in groups:
        part: list[Tensor] = []
        for parameter in group["params"]:
            part.append(parameter)
            if sum(local(p).nbytes for p in part) >= _PART_BYTES:
                yield {**group, "params": part}
                part = []
        if part:
            yield {**group, "params": part}


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

    def step(self, factor: float, ready: Callable[[Collection[str]], None] | None = None) -> None:
        """Update every parameter from its gradient.

        Args:
            factor: scales the learning rate.
            ready: called with names of parameters before those and their state change; one
                call for all of an update that is not made in groups.
        """
        for optimizer, peaks in zip(self._optimizers, self._peak, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            if ready is None:
                optimizer.step()
                continue
            whole = optimizer.param_groups
            try:
                for part in _parts(whole):
                    ready([self._names[p] for p in part["params"]])
                    optimizer.param_groups = [part]
                    optimizer.step()
            finally:
                optimizer.param_groups = whole

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
