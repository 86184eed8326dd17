"""From a model to one whose optimizer works while the backward pass goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.core.errors import TierFullError
from shoal.core.sizes import human_bytes
from shoal.machine.host import memory_total
from shoal.memory.activations.replay import ActivationReplay, units_of
from shoal.memory.activations.swapping import ActivationSwapping
from shoal.memory.fuyou.consumer import Consumer, held_bytes
from shoal.memory.fuyou.model import FuyouModel
from shoal.memory.fuyou.needs import staged_bytes
from shoal.memory.fuyou.optimizer_process import ParameterLocation
from shoal.memory.fuyou.stream import ConsumedGroups, ConsumedStream
from shoal.memory.streaming.build import TierAssignment, check_device, move
from shoal.memory.streaming.needs import BOUNCE, BOUNCED, INCOMING, OUTGOING, Staging
from shoal.memory.streaming.subgroups import ElementwiseOptimizer, elementwise
from shoal.memory.tiers.disk import SECTOR
from shoal.memory.tiers.offloaded_parameter import OffloadedParameter, ParameterShard
from shoal.memory.tiers.places import DiskRow, StagingRing, Tiers
from shoal.memory.tiers.readahead import DiskReadAhead, UpdatedRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.tiers.mover import EmulatedLink


@dataclass(frozen=True)
class FuyouAssignment:
    """Where everything should be.

    Args:
        device_bytes: budget of the device.
        host_bytes: budget of the host; None for three quarters of it.
        sub_group_numel: most elements updated at once.
        prefetch_numel: elements of parameters fetched ahead.
        swap: bytes of a micro-batch to offload; auto for the fastest step.
        swap_bytes: bytes on the disk for offloaded activations.
        path: directory of the disk's file.
        disk_links: hold reading and writing of the disk to a rate.
        strict: operators may only use what lies on the device.
    """

    device_bytes: int
    host_bytes: int | None
    sub_group_numel: int
    prefetch_numel: int
    swap: Literal["auto", "all", "none"] | int
    swap_bytes: int
    path: Path
    disk_links: tuple[EmulatedLink | None, EmulatedLink | None] = (None, None)
    strict: bool = True


def fuyou_model(
    model: nn.Module,
    comm: Comm,
    optimizer: object,
    wanted: FuyouAssignment,
    *,
    device: torch.device | str,
    values: Callable[[str], Tensor] | None,
) -> FuyouModel:
    """Move a model's state to the disk, and start the process that updates it.

    Raises:
        ConfigError: the optimizer looks at several elements in its update.
        ModelError: the model has no chain of blocks.
        TierFullError: a budget is too small; says what would do.
        MachineError: the path cannot be written, or the process cannot be started.
    """
    rule = elementwise(optimizer, "offload: fuyou")
    units = units_of(model)
    named = dict(model.named_parameters())
    where = TierAssignment(
        device_bytes=wanted.device_bytes,
        host_bytes=wanted.host_bytes,
        param="disk",
        optim="disk",
        act="device",
        sub_group_numel=wanted.sub_group_numel,
        prefetch_numel=wanted.prefetch_numel,
        owner=False,
        path=wanted.path,
        small=0,
    )
    check_device(model, named, where, {})
    cuts = {
        name: ParameterShard(tuple(p.shape), comm.rank, comm.world) for name, p in named.items()
    }
    itemsize = max(p.element_size() for p in named.values())
    sizes = Staging.of(max(cut.numel for cut in cuts.values()), itemsize, 0, wanted.sub_group_numel)
    piece = sizes.sub_group
    shared = held_bytes(piece, itemsize, len(rule.states))
    numels = [cut.numel for cut in cuts.values()]
    need = staged_bytes(
        numels, itemsize, len(rule.states), wanted.sub_group_numel, wanted.prefetch_numel
    )
    buffers = -(-min(wanted.prefetch_numel, sum(numels)) * itemsize // sizes.incoming)
    host_bytes = wanted.host_bytes or max(need, memory_total() * 3 // 4)
    if need > host_bytes:
        raise TierFullError(
            f"offload: staging buffers take {human_bytes(need)} and host_budget is "
            f"{human_bytes(host_bytes)}; give more, or a smaller sub_group_numel"
        )
    rows = sum(-(-p.nbytes // SECTOR) * SECTOR for p in named.values())
    tiers = Tiers(
        device=device,
        device_bytes=wanted.device_bytes,
        host_bytes=host_bytes,
        disk_bytes=rows * (2 + len(rule.states)) + wanted.swap_bytes,
        path=wanted.path,
        strict=wanted.strict,
        disk_links=wanted.disk_links,
    )
    try:
        tiers.host.reserve(shared, "gradients and state in work")
        incoming = StagingRing(tiers.host, INCOMING, sizes.incoming, "staged parameters")
        homes = [
            move(model, name, cut, rule, tiers, where, incoming, values)
            for name, cut in cuts.items()
        ]
        stream = ConsumedStream(
            model,
            homes,
            tiers,
            None,
            incoming=incoming,
            outgoing=StagingRing(tiers.host, OUTGOING, piece * itemsize, "staged gradients"),
            scratch=StagingRing(tiers.host, 1, piece * itemsize, "staged gradients"),
            prefetch_numel=wanted.prefetch_numel,
        )
        swapping = ActivationSwapping(
            tiers,
            stream._spare,
            StagingRing(tiers.host, BOUNCED, BOUNCE, "saved, on its way to the disk"),
            StagingRing(tiers.host, BOUNCED, BOUNCE, "saved, on its way from the disk"),
        )
        for buffer in model.buffers():
            buffer.data = tiers.scope.adopt(buffer.data.to(tiers.device.device), "buffer")
        ahead = StagingRing(tiers.host, buffers, sizes.incoming, "parameters read ahead")
        consumer = _consumer(homes, rule, tiers, piece, itemsize)
    except BaseException:
        tiers.close()
        raise
    early = DiskReadAhead(ahead, buffers, tiers.read)
    stream.prepare(consumer, swapping, ActivationReplay(units, swapping, stream.is_weight), early)
    for home in homes:
        pending = stream.pending[home.name]
        home.weight = UpdatedRow(home.weight, pending)
        home.states = {name: UpdatedRow(row, pending) for name, row in home.states.items()}
    update = ConsumedGroups(homes, rule, tiers, piece, incoming)
    update.stream = stream
    return FuyouModel(model, homes, tiers, stream, update, comm, wanted.swap)


def _consumer(
    homes: Sequence[OffloadedParameter],
    rule: ElementwiseOptimizer,
    tiers: Tiers,
    numel: int,
    itemsize: int,
) -> Consumer:
    """Start the process that updates."""
    assert tiers.disk is not None
    places = []
    for home in homes:
        rows = {"weight": home.weight, **home.states}
        blocks = {name: row.block for name, row in rows.items() if isinstance(row, DiskRow)}
        weight = blocks.pop("weight")
        places.append(ParameterLocation(weight, blocks, home.dtype, len(home.cut.shape) >= 2))
    return Consumer(
        rule,
        places,
        tiers.disk,
        numel=numel,
        itemsize=itemsize,
        # The trainer's thread has a core of its own.
        threads=max(1, (os.cpu_count() or 2) - 1),
    )
