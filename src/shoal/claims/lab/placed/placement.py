"""Tensors that lie on a mesh of ranks, and their transitions between placements.

::

    mesh = RankMesh(comm, (2, 2))
    x = to_global(x, mesh, "S(0),B")     # every rank has x and keeps its piece
    y = apply("matmul", [x, w], "P(sum),B")
    y.to("S(1),B").whole()

Transitions are those of :mod:`shoal.cost.price.boxing`, step by step, and the meter counts the
bytes of its table under the tag ``boxing``. :func:`execute` carries out a plan of
:mod:`shoal.plan.sbp.search`.

Source: Yuan et al., OneFlow, 2021 (global tensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.core.boxes import Box
from shoal.core.errors import PlanError, require
from shoal.cost.price.boxing import BoxingStep, boxing
from shoal.ir.layout import Layout
from shoal.ir.placement import (
    Broadcast,
    Mesh,
    Partial,
    Placement,
    Split,
    check_placement,
    coordinates,
    local_box,
    parse_placement,
    show_placement,
)
from shoal.ir.signatures import legal, result_shape

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm
    from shoal.plan.sbp.search import OpGraph, SbpPlan

# Under this tag the meter counts what boxing sends.
TAG = "boxing"


class RankMesh:
    """The ranks of a communicator as a mesh.

    Args:
        comm: all ranks of the mesh; every one of them makes it.
        sizes: ranks of each axis, slowest first.

    Raises:
        PlanError: the communicator has another number of ranks.
    """

    def __init__(self, comm: Comm, sizes: Mesh) -> None:
        require(
            math.prod(sizes) == comm.world,
            "mesh",
            "x".join(map(str, sizes)),
            expected=f"as many ranks as the communicator has, {comm.world}",
            error=PlanError,
        )
        self.comm = comm
        self.sizes = tuple(sizes)
        self.layout = Layout(tuple((str(a), size) for a, size in enumerate(sizes)))
        self.coord = tuple(self.layout.coord(comm.rank).values())
        self.axes = [comm.split(self.layout.groups(str(a))) for a in range(len(sizes))]


@dataclass(frozen=True, eq=False)
class GlobalTensor:
    """A tensor of which every rank of a mesh holds a part, ``local``."""

    local: Tensor
    shape: tuple[int, ...]
    placement: Placement
    mesh: RankMesh
    _copies: dict[Placement, GlobalTensor] = field(default_factory=dict, repr=False)

    @property
    def box(self) -> Box:
        """Where the local part lies in the whole."""
        return local_box(self.shape, self.placement, self.mesh.sizes, self.mesh.coord)

    def to(self, placement: str | Placement) -> GlobalTensor:
        """This tensor in another placement, by the cheapest transition; all ranks call it.

        A tensor that was brought there before is not sent again.

        Raises:
            PlanError: no placement of this tensor.
        """
        target = _read(placement, self.shape, self.mesh)
        if target == self.placement:
            return self
        if target not in self._copies:
            result = self
            table = boxing(self.shape, self.mesh.sizes)
            for step in table.route(self.placement, target):
                result = _step(result, step)
            self._copies[target] = result
        return self._copies[target]

    def whole(self) -> Tensor:
        """The whole tensor, on every rank; all ranks call it."""
        return self.to((Broadcast(),) * len(self.mesh.sizes)).local


def _read(placement: str | Placement, shape: Sequence[int], mesh: RankMesh) -> Placement:
    read = parse_placement(placement) if isinstance(placement, str) else placement
    return check_placement(read, shape, mesh.sizes)


def to_global(x: Tensor, mesh: RankMesh, placement: str | Placement) -> GlobalTensor:
    """Place ``x``, equal on every rank, on a mesh; nothing is sent.

    Args:
        x: the whole tensor.
        mesh: where it shall lie.
        placement: such as ``S(0),B``.

    Raises:
        PlanError: no placement of this tensor.
    """
    shape = tuple(x.shape)
    target = _read(placement, shape, mesh)
    whole = GlobalTensor(x, shape, (Broadcast(),) * len(mesh.sizes), mesh)
    return whole.to(target)


def from_local(
    x: Tensor, mesh: RankMesh, placement: str | Placement, shape: Sequence[int]
) -> GlobalTensor:
    """The tensor of which every rank holds ``x``.

    Args:
        x: what this rank holds.
        mesh: the ranks.
        placement: where it lies.
        shape: of the whole tensor.

    Raises:
        PlanError: no placement of this tensor, or a part of another shape.
    """
    global_tensor = GlobalTensor(x, tuple(shape), _read(placement, shape, mesh), mesh)
    require(
        tuple(x.shape) == global_tensor.box.shape,
        "from_local: shape of the part",
        list(x.shape),
        expected=f"{list(global_tensor.box.shape)}, the part {global_tensor.box} of {list(shape)} "
        f"in {show_placement(global_tensor.placement)}",
        error=PlanError,
    )
    return global_tensor


def _step(x: GlobalTensor, step: BoxingStep) -> GlobalTensor:
    axes = step.axes
    axis = axes[0]
    old, new = step.source[axis], step.target[axis]
    made = GlobalTensor(x.local, x.shape, step.target, x.mesh)
    if isinstance(old, Partial):
        local = _reduce(x, made, axis, old, new)
    elif isinstance(new, Partial):
        local = _fill(x, made, axis, old, new)
    else:
        local = _exchange(x, made)
    return GlobalTensor(local, x.shape, step.target, x.mesh)


def _reduce(
    x: GlobalTensor, made: GlobalTensor, axis: int, old: Partial, new: Broadcast | Split | Partial
) -> Tensor:
    """A sum or a maximum over one axis of the mesh."""
    import torch

    comm = x.mesh.axes[axis]
    if isinstance(new, Broadcast):
        out = x.local.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(out, tag=TAG, op=old.op).wait()
        return out
    # Pieces that may be uneven go to their owner, which reduces them in rank order.
    boxes = [
        local_box(x.shape, made.placement, x.mesh.sizes, _with(x.mesh.coord, axis, i))
        for i in range(comm.world)
    ]
    parts = [x.local[box.slices(x.box)].contiguous() for box in boxes]
    if old.op == "sum" and len({tuple(part.shape) for part in parts}) == 1:
        out = torch.empty_like(parts[0])
        comm.reduce_scatter(out, torch.stack(parts), tag=TAG).wait()
        return out
    outs = [torch.empty_like(parts[comm.rank]) for _ in parts]
    comm.all_to_all(outs, parts, tag=TAG).wait()
    stacked = torch.stack(outs)
    return stacked.sum(0).to(x.local.dtype) if old.op == "sum" else stacked.amax(0)


def _fill(
    x: GlobalTensor, made: GlobalTensor, axis: int, old: Broadcast | Split, new: Partial
) -> Tensor:
    """This rank's share of a sum or maximum: what it has, and nothing elsewhere."""
    if isinstance(old, Broadcast):
        if new.op == "max" or x.mesh.coord[axis] == 0:
            return x.local
        return x.local.new_zeros(x.local.shape)
    out = x.local.new_full(made.box.shape, _nothing(x.local, new))
    out[x.box.slices(made.box)] = x.local
    return out


def _nothing(x: Tensor, partial: Partial) -> float:
    """What leaves a sum or a maximum as it is."""
    import torch

    if partial.op == "sum":
        return 0
    return -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min


def _exchange(x: GlobalTensor, made: GlobalTensor) -> Tensor:
    """Pieces between all ranks whose partial axes agree; a slice where all is here."""
    import torch

    mesh, comm = x.mesh, x.mesh.comm
    source, target = x.box, made.box
    if all(_inside(x, made, coord) for coord in coordinates(mesh.sizes)):
        return x.local[target.slices(source)].contiguous()
    gathered = _gather(x, made)
    if gathered is not None:
        return gathered
    sends: list[Tensor] = [x.local.new_empty(0) for _ in range(comm.world)]
    receives = [x.local.new_empty(0) for _ in range(comm.world)]
    places: list[list[Box]] = [[] for _ in range(comm.world)]
    for rank, coord in enumerate(coordinates(mesh.sizes)):
        if any(
            isinstance(axis, Partial) and coord[a] != mesh.coord[a]
            for a, axis in enumerate(x.placement)
        ):
            continue
        pieces = _pieces(x, made, coord)
        mine = [x.local[piece.slices(source)].reshape(-1) for piece in pieces.get(comm.rank, [])]
        if mine and rank != comm.rank:
            sends[rank] = torch.cat(mine)
        if rank == comm.rank:
            places = [pieces.get(owner, []) for owner in range(comm.world)]
    out = x.local.new_empty(target.shape)
    for owner, boxes in enumerate(places):
        if owner != comm.rank:
            receives[owner] = x.local.new_empty(sum(box.volume for box in boxes))
    comm.all_to_all(receives, sends, tag=TAG).wait()
    for owner, boxes in enumerate(places):
        start = 0
        for box in boxes:
            inside = box.slices(target)
            if owner == comm.rank:
                out[inside] = x.local[box.slices(source)]
            else:
                part = receives[owner][start : start + box.volume]
                out[inside] = part.view(box.shape)
                start += box.volume
    return out


def _gather(x: GlobalTensor, made: GlobalTensor) -> Tensor | None:
    """An all-gather along one axis, where that is what it is and all pieces are equal."""
    import torch

    changed = BoxingStep(x.placement, made.placement, 0).axes
    old, new = x.placement[changed[0]], made.placement[changed[0]]
    if len(changed) > 1 or not isinstance(old, Split) or not isinstance(new, Broadcast):
        return None
    axis, dim = changed[0], old.dim
    parts = [n for entry, n in zip(x.placement, x.mesh.sizes, strict=True) if entry == old]
    if old in x.placement[axis + 1 :] or x.shape[dim] % math.prod(parts):
        # Pieces that are uneven, or not behind each other; bytes are the same either way.
        return None
    comm = x.mesh.axes[axis]
    part = x.local.movedim(dim, 0).contiguous()
    out = torch.empty(
        (part.shape[0] * comm.world, *part.shape[1:]), dtype=part.dtype, device=part.device
    )
    comm.all_gather(out, part, tag=TAG).wait()
    return out.movedim(0, dim).contiguous()


def _inside(x: GlobalTensor, made: GlobalTensor, coord: Sequence[int]) -> bool:
    """Whether the rank at ``coord`` has all that it will hold."""
    wanted = local_box(x.shape, made.placement, x.mesh.sizes, coord)
    return not wanted.subtract(local_box(x.shape, x.placement, x.mesh.sizes, coord))


def _pieces(x: GlobalTensor, made: GlobalTensor, coord: Sequence[int]) -> dict[int, list[Box]]:
    """Owner -> boxes that the rank at ``coord`` takes from it; its own come first.

    What several ranks hold is taken from the one that shares most coordinates with it, and
    the next in a circle, so that no rank sends everything.
    """
    sizes = x.mesh.sizes
    here = x.mesh.layout.rank({str(a): c for a, c in enumerate(coord)})
    world = math.prod(sizes)
    partial = [a for a, axis in enumerate(x.placement) if isinstance(axis, Partial)]
    owners = [
        (rank, other)
        for rank, other in enumerate(coordinates(sizes))
        if all(other[a] == coord[a] for a in partial)
    ]
    owners.sort(
        key=lambda entry: (
            -sum(a == b for a, b in zip(entry[1], coord, strict=True)),
            (entry[0] - here) % world,
        )
    )
    left = [local_box(x.shape, made.placement, sizes, coord)]
    pieces: dict[int, list[Box]] = {}
    for rank, other in owners:
        held = local_box(x.shape, x.placement, sizes, other)
        common = [box for part in left if (box := part.intersect(held)) is not None]
        if common:
            pieces[rank] = common
            left = [rest for part in left for rest in part.subtract(held)]
    return pieces


def _with(coord: Sequence[int], axis: int, index: int) -> tuple[int, ...]:
    return (*coord[:axis], index, *coord[axis + 1 :])


def apply(
    kind: str,
    inputs: Sequence[GlobalTensor],
    output: str | Placement | None = None,
    **attributes: object,
) -> GlobalTensor:
    """Do one operation; inputs are boxed into the cheapest signature.

    Args:
        kind: a row of :data:`~shoal.ir.signatures.OPERATIONS`.
        inputs: on one mesh.
        output: placement of the result; without it whatever costs least boxing.
        attributes: options of the operation.

    Raises:
        PlanError: no such operation, or its inputs or placements do not fit.
    """
    from shoal.claims.lab.placed.kernels import run

    mesh = inputs[0].mesh
    require(
        all(x.mesh is mesh for x in inputs),
        f"{kind}: inputs",
        "tensors of several meshes",
        expected="all on one mesh; bring them there first",
        error=PlanError,
    )
    shapes = [x.shape for x in inputs]
    out = result_shape(kind, shapes, attributes)
    target = None if output is None else _read(output, out, mesh)
    last = boxing(out, mesh.sizes)
    tables = [boxing(x.shape, mesh.sizes) for x in inputs]

    best: tuple[float, int] | None = None
    result = legal(kind, shapes, attributes, mesh.sizes)
    for number, signature in enumerate(result):
        cost = float(
            sum(
                table.cost(x.placement, wanted) * x.local.element_size()
                for table, x, wanted in zip(tables, inputs, signature.inputs, strict=True)
            )
        )
        if target is not None:
            cost += last.cost(signature.output, target) * inputs[-1].local.element_size()
        if best is None or (cost, number) < best:
            best = cost, number
    require(best is not None, kind, shapes, expected="a legal signature", error=PlanError)
    signature = result[best[1] if best else 0]
    ready = [x.to(wanted) for x, wanted in zip(inputs, signature.inputs, strict=True)]
    made = run(kind, ready, attributes, out, signature.output)
    return made if target is None else made.to(target)


def execute(
    graph: OpGraph,
    plan: SbpPlan,
    mesh: RankMesh,
    tensors: Mapping[str, Tensor | GlobalTensor],
    *,
    watch: Callable[[str, GlobalTensor], None] | None = None,
) -> dict[str, GlobalTensor]:
    """Carry out a plan.

    Args:
        graph: what is computed.
        plan: of this graph, for a mesh of these sizes.
        mesh: the ranks.
        tensors: leaf -> the whole tensor, equal on every rank; or already in its placement.
        watch: called with every result, before its pin and after.

    Returns:
        Every tensor in the placement that the plan gives it.

    Raises:
        PlanError: the plan is for another mesh, or a leaf is missing or of another shape.
    """
    from shoal.claims.lab.placed.kernels import run

    require(
        plan.mesh == mesh.sizes,
        "plan.mesh",
        plan.mesh,
        expected=f"{mesh.sizes}, the ranks that there are",
        error=PlanError,
    )
    global_tensors: dict[str, GlobalTensor] = {}
    for leaf in graph.leaves:
        given = tensors.get(leaf.name)
        require(
            given is not None and tuple(given.shape) == tuple(leaf.shape),
            f"tensors: {leaf.name}",
            None if given is None else list(given.shape),
            expected=f"a tensor of shape {list(leaf.shape)}",
            error=PlanError,
        )
        if isinstance(given, GlobalTensor):
            global_tensors[leaf.name] = given.to(plan.placements[leaf.name])
        elif given is not None:
            global_tensors[leaf.name] = to_global(given, mesh, plan.placements[leaf.name])
    for op in graph.ops:
        wanted = [parse_placement(text) for text in plan.inputs[op.name]]
        ready = [global_tensors[name].to(p) for name, p in zip(op.inputs, wanted, strict=True)]
        result = parse_placement(plan.results[op.name])
        made = run(op.kind, ready, op.attributes, graph.shapes[op.name], result)
        global_tensors[op.name] = made.to(plan.placements[op.name])
        if watch is not None:
            watch(op.name, global_tensors[op.name])
    return global_tensors
