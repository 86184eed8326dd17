"""From a model to one whose state lies in tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, TierFullError
from shoal.core.sizes import human_bytes
from shoal.machine.host import memory_total
from shoal.memory.streaming.initial import part_of
from shoal.memory.streaming.needs import INCOMING, OUTGOING, SMALL, UPDATING, Staging
from shoal.memory.streaming.offloaded import OffloadedModel
from shoal.memory.streaming.stream import ParameterStream
from shoal.memory.streaming.subgroups import ElementwiseOptimizer, SubGroups, elementwise
from shoal.memory.streaming.tiling import Tile, tile
from shoal.memory.tiers.disk import SECTOR
from shoal.memory.tiers.mover import EmulatedLink
from shoal.memory.tiers.offloaded_parameter import OffloadedParameter, ParameterShard
from shoal.memory.tiers.places import StagingRing, TierRow, Tiers, chunks, make_row

if TYPE_CHECKING:
    from shoal.ir.comm import Comm

# A parameter on the device while it is used backward: itself, its gradient, and one more of it.
_COPIES = 3
# A layer is cut where its operator would take more than this part of the device.
_SHARE = 4
# Layers that are used by their weight, not by their forward pass.
_BY_WEIGHT = ("output", "embed", "router")


@dataclass(frozen=True)
class TierAssignment:
    """Where everything should be.

    Args:
        param: tier of parameters.
        optim: tier of gradients and optimizer state.
        act: tier of what autograd saves.
        sub_group_numel: most elements updated at once.
        prefetch_numel: elements fetched ahead.
        owner: one rank has all of a parameter, instead of each its part.
        path: directory of the disk's file.
        tiles: tiles of every linear layer; 0 to cut those that the device has no room for.
        links: mover -> what holds it to a rate.
        strict: operators may only use what lies on the device.
        disk_links: hold reading and writing of the disk to a rate.
        small: elements below which a parameter stays on the host.
    """

    device_bytes: int
    host_bytes: int | None
    param: Literal["host", "disk"]
    optim: Literal["host", "disk"]
    act: Literal["device", "host"]
    sub_group_numel: int
    prefetch_numel: int
    owner: bool
    path: Path
    tiles: int = 1
    links: Mapping[str, EmulatedLink] = field(default_factory=dict)
    strict: bool = True
    disk_links: tuple[EmulatedLink | None, EmulatedLink | None] = (None, None)
    small: int = SMALL


def offloaded(
    model: nn.Module,
    comm: Comm,
    optimizer: object,
    wanted: TierAssignment,
    *,
    device: torch.device | str = "cpu",
    values: Callable[[str], Tensor] | None = None,
) -> OffloadedModel:
    """Move a model's state into tiers, one parameter after the other.

    Raises:
        ConfigError: the optimizer looks at several elements in its update.
        TierFullError: a budget is too small; says what would do.
    """
    rule = elementwise(optimizer, "offload")
    tiles: dict[str, Tile] = {}
    if wanted.tiles != 1:
        size = max(p.element_size() for p in model.parameters())
        most = max(1, wanted.device_bytes // (_COPIES * _SHARE * size))
        tiles = tile(model, most, tiles=wanted.tiles or None, keep=_BY_WEIGHT)
    named = dict(model.named_parameters())
    check_device(model, named, wanted, tiles)
    cuts = _cuts({name: tuple(p.shape) for name, p in named.items()}, comm, owner=wanted.owner)
    itemsize = max(p.element_size() for p in named.values())
    largest = max(cut.numel for cut in cuts.values())
    staging = Staging.of(largest, itemsize, len(rule.states), wanted.sub_group_numel)
    disk, rows = 0, 0
    for name, cut in cuts.items():
        size = -(-max(1, cut.numel * named[name].element_size()) // SECTOR) * SECTOR
        kept = (1 + len(rule.states)) if named[name].requires_grad else 0
        slow = size * ((wanted.param == "disk") + kept * (wanted.optim == "disk"))
        disk += slow if cut.numel >= wanted.small else 0
        rows += size * (1 + kept) - (slow if cut.numel >= wanted.small else 0)
    host_bytes = wanted.host_bytes
    if host_bytes is None:
        host_bytes = staging.nbytes + rows
        if wanted.act == "host":
            host_bytes = max(host_bytes, memory_total() * 3 // 4)
    if staging.nbytes > host_bytes:
        raise TierFullError(
            f"offload: staging buffers take {human_bytes(staging.nbytes)} and host_budget is "
            f"{human_bytes(host_bytes)}; give more, or a smaller sub_group_numel"
        )
    tiers = Tiers(
        device=device,
        device_bytes=wanted.device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk,
        path=wanted.path,
        links=wanted.links,
        strict=wanted.strict,
        disk_links=wanted.disk_links,
    )
    try:
        incoming = StagingRing(tiers.host, INCOMING, staging.incoming, "staged parameters")
        homes = [
            move(model, name, cut, rule, tiers, wanted, incoming, _cut_from(values, tiles))
            for name, cut in cuts.items()
        ]
        stream = ParameterStream(
            model,
            homes,
            tiers,
            comm,
            incoming=incoming,
            outgoing=StagingRing(tiers.host, OUTGOING, staging.outgoing, "staged gradients"),
            scratch=StagingRing(tiers.host, 1, staging.outgoing, "staged gradients"),
            prefetch_numel=wanted.prefetch_numel,
            act=wanted.act,
        )
        ring = StagingRing(tiers.host, UPDATING, staging.update, "staged optimizer state")
        for buffer in model.buffers():
            buffer.data = tiers.scope.adopt(buffer.data.to(tiers.device.device), "buffer")
    except BaseException:
        tiers.close()
        raise
    update = SubGroups(homes, rule, tiers, staging.sub_group, ring)
    return OffloadedModel(model, homes, tiers, stream, update, comm, tiles)


def check_device(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    wanted: TierAssignment,
    tiles: Mapping[str, Tile],
) -> None:
    """Refuse a device that has no room for one of the operators."""
    name, largest = max(named.items(), key=lambda item: item[1].nbytes)
    need = _COPIES * largest.nbytes
    if need <= wanted.device_bytes:
        return
    owner = name.rpartition(".")[0]
    plain = type(model.get_submodule(owner)) is nn.Linear
    if name in tiles or (plain and owner.rpartition(".")[2] not in _BY_WEIGHT):
        size = ParameterShard(tiles[name].shape, 0, 1).numel if name in tiles else largest.numel()
        fits = -(-_COPIES * size * largest.element_size() // wanted.device_bytes)
        how = f"cut it: tiling: {2 * fits}"
    else:
        how = f"give device_budget at least {human_bytes(need)}"
    raise TierFullError(
        f"offload: {name} {list(largest.shape)} needs {human_bytes(need)} of the device (itself, "
        f"its gradient and a copy of it) and device_budget is {human_bytes(wanted.device_bytes)}; "
        f"{how}"
    )


def _cut_from(
    values: Callable[[str], Tensor] | None, tiles: Mapping[str, Tile]
) -> Callable[[str], Tensor] | None:
    """The values of tiles, from those of the parameters that they are cut from."""
    if values is None or not tiles:
        return values

    def value(name: str) -> Tensor:
        if name not in tiles:
            return values(name)
        box = tiles[name]
        part = values(box.whole).view(box.shape)
        for dim, (start, size) in enumerate(zip(box.offset, box.size, strict=True)):
            part = part.narrow(dim, start, size)
        return part.contiguous()

    return value


def _cuts(
    shapes: Mapping[str, tuple[int, ...]], comm: Comm, *, owner: bool
) -> dict[str, ParameterShard]:
    """What this rank has of every parameter."""
    owners: dict[str, int] = {}
    if owner and comm.world > 1:
        load = [0] * comm.world
        for name in sorted(shapes, key=lambda n: -ParameterShard(shapes[n], 0, 1).numel):
            owners[name] = load.index(min(load))
            load[owners[name]] += ParameterShard(shapes[name], 0, 1).numel
    return {
        name: ParameterShard(shape, comm.rank, comm.world, owners.get(name))
        for name, shape in shapes.items()
    }


def move(
    model: nn.Module,
    name: str,
    cut: ParameterShard,
    rule: ElementwiseOptimizer,
    tiers: Tiers,
    wanted: TierAssignment,
    ring: StagingRing,
    values: Callable[[str], Tensor] | None,
) -> OffloadedParameter:
    """Give one parameter its home, and leave nothing of it in the model but its shape."""
    parameter = model.get_parameter(name)
    dtype, device = parameter.dtype, tiers.device.device
    begun = part_of(parameter)
    if begun is not None:
        if begun.cut != cut:
            raise ConfigError(
                f"offload: {name} was built for rank {begun.rank} of {begun.world} by rows; build "
                "the model under init_sharded with the ranks that train it, placement: sharded"
            )
        mine = begun.values
    else:
        whole = values(name) if parameter.is_meta and values is not None else parameter.detach()
        mine = cut.of(whole.to("cpu", dtype))
    param, optim = wanted.param, wanted.optim
    if cut.numel < wanted.small:
        param = optim = "host"
    weight = make_row(tiers, param, cut.numel, dtype, name)
    _fill(weight, mine, ring)
    nothing = torch.full((1,), float("nan"), dtype=dtype, device=device).expand(cut.shape)
    if parameter.is_meta:
        fresh = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        for module in model.modules():
            for leaf, result in module._parameters.items():
                if result is parameter:
                    module._parameters[leaf] = fresh
        parameter = fresh
    else:
        parameter.data = nothing
    gradient: TierRow | None = None
    states: dict[str, TierRow] = {}
    if parameter.requires_grad:
        gradient = make_row(tiers, optim, cut.numel, dtype, f"gradient of {name}")
        for state in rule.states:
            states[state] = make_row(tiers, optim, cut.numel, dtype, f"{state} of {name}")
    return OffloadedParameter(name, parameter, cut, weight, gradient, states)


def _fill(row: TierRow, values: Tensor, ring: StagingRing) -> None:
    """Write all elements of a row."""
    slot = ring.get()
    try:
        for first, count in chunks(values.numel(), ring.nbytes // values.element_size()):
            part = slot[: count * values.element_size()].view(values.dtype)
            part.copy_(values[first : first + count])
            row.give(first, part, slot)
    finally:
        ring.put(slot)
