"""Construction of a model that never exists in one place.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 7.2 (model partitioning during
initialisation).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import _disable_current_modes

from shoal.memory.tiers.disk import DiskTier
from shoal.memory.tiers.offloaded_parameter import ParameterShard


class PartialParameter:
    """Part of a parameter during the initialization of its model.

    Args:
        cut: this rank's part.
        values: its elements, in a file.
    """

    def __init__(self, cut: ParameterShard, values: Tensor, rank: int, world: int) -> None:
        self.cut, self.values, self.rank, self.world = cut, values, rank, world


def part_of(parameter: nn.Parameter) -> PartialParameter | None:
    """The part that :func:`init_sharded` has kept."""
    value: PartialParameter | None = getattr(parameter, "_shoal_part", None)
    return value


@contextlib.contextmanager
def init_sharded(
    place: Path | str, capacity: int, *, rank: int = 0, world: int = 1
) -> Iterator[None]:
    """Modules that are built in here keep this rank's part of their parameters, on disk.

    A module's parameters go as soon as it is given to the module that it is part of; so at no time
    there is more in memory than the largest of them. What a module does to the parameters of its
    own is done by then; others cannot change them any more.

    Raises:
        MachineError: the directory cannot be written.
        TierFullError: the parameters are more.
    """
    tier = DiskTier(place, capacity)

    def keep(_parent: nn.Module, name: str, child: nn.Module | None) -> None:
        with _disable_current_modes(), torch.no_grad():
            for leaf, parameter in () if child is None else child.named_parameters(name):
                if part_of(parameter) is None and not parameter.is_meta:
                    _keep(tier, leaf, parameter, rank, world)

    handle: Any = register_module_module_registration_hook(keep)
    try:
        yield
    finally:
        handle.remove()
        tier.flush()
        tier.close()  # what is kept of it lives in its mapping


def _keep(tier: DiskTier, name: str, parameter: nn.Parameter, rank: int, world: int) -> None:
    cut = ParameterShard(tuple(parameter.shape), rank, world)
    block = tier.alloc(max(1, cut.numel * parameter.element_size()), name)
    values = tier.mapped(block).view(torch.uint8)[: cut.numel * parameter.element_size()]
    values = values.view(parameter.dtype)
    values.copy_(cut.of(parameter.detach()))
    parameter._shoal_part = PartialParameter(cut, values, rank, world)  # type: ignore[attr-defined]
    nothing = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device)
    parameter.data = nothing.expand(cut.shape)
