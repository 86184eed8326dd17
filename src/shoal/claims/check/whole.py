"""What a rank holds of a tensor, made whole.

Every rank makes its own view: where ranks hold copies of the same thing, a rank sees its own
copy, so that copies which should agree and do not are found. All ranks call :func:`whole_views`
together with the same kind of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.claims.check.program import CheckedProgram


def guess_split(
    held: tuple[int, ...], whole: tuple[int, ...], axes: Mapping[str, int]
) -> tuple[int, str] | None:
    """The dimension and the axis over which a plain tensor seems to be split evenly.

    Args:
        held: this rank's shape.
        whole: the shape in one process.
        axes: sizes; ``tp`` is preferred where several fit.
    """
    if len(held) != len(whole):
        return None
    apart = [dim for dim, (a, b) in enumerate(zip(held, whole, strict=True)) if a != b]
    if len(apart) != 1:
        return None
    dim = apart[0]
    for axis in sorted(axes, key=lambda name: name != "tp"):
        if axes[axis] > 1 and held[dim] * axes[axis] == whole[dim]:
            return dim, axis
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    if all(hasattr(value, name) for name in ("tensor", "offset", "shape")):
        return "part"
    return "dtensor" if hasattr(value, "full_tensor") else "plain"


def whole_views(
    values: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    mesh: Any,
    program: CheckedProgram,
) -> tuple[dict[str, Tensor | None], dict[str, str]]:
    """Every tensor as this rank sees it whole, and what is wrong with the others.

    Args:
        values: by one-process name; tensors, DTensors, parts or None.
        shapes: of the tensors in one process.
        mesh: the DeviceMesh.
        program: for its ``whole(name, tensor, mesh)``.

    Returns:
        Views (None is a gradient that is not there) and notes, by name. A name that this
        rank does not hold is in neither, one that no rank holds is noted.
    """
    kinds = {name: _kind(value) for name, value in values.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, kinds)
    views: dict[str, Tensor | None] = {}
    notes: dict[str, str] = {}
    axes = {name: mesh.size(index) for index, name in enumerate(mesh.mesh_dim_names)}
    for name in shapes:
        fields = {kind[name] for kind in everyone if name in kind}
        if not fields:
            notes[name] = "no rank holds it"
            continue
        if len(fields) > 1:
            # A collective would wait for ever for the ranks that have none.
            if name in kinds:
                lacking = [r for r, kind in enumerate(everyone) if kind.get(name) == "none"]
                notes[name] = f"no gradient on rank {', '.join(map(str, lacking))}, but on others"
            continue
        if fields == {"part"}:
            whole = _assemble(values.get(name), shapes[name])
            if name in values:
                views[name] = whole
            continue
        if name not in values:
            continue
        view, note = _view(name, values[name], shapes[name], mesh, axes, program)
        if note:
            notes[name] = note
        else:
            views[name] = view
    return views, notes


def _view(
    name: str,
    value: Any,
    shape: tuple[int, ...],
    mesh: Any,
    axes: Mapping[str, int],
    program: CheckedProgram,
) -> tuple[Tensor | None, str]:
    if value is None:
        return None, ""
    if program.has("whole"):
        made = program.call("whole", name, value, mesh)
        if made is not None:
            return made.detach(), ""
    if hasattr(value, "full_tensor"):
        return value.full_tensor().detach(), ""
    if tuple(value.shape) == shape:
        return value, ""
    split = guess_split(tuple(value.shape), shape, axes)
    if split is None:
        return None, (
            f"a rank holds {list(value.shape)} of {list(shape)}: define whole(name, tensor, mesh) "
            "to define how it is split"
        )
    dim, axis = split
    group = mesh.get_group(axis)
    parts = [torch.empty_like(value) for _ in range(axes[axis])]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, dim=dim), ""


def _assemble(held: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Parts of all ranks put together, this rank's own on top."""
    mine = None if held is None else (held.tensor.detach().clone(), tuple(held.offset))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole: Tensor | None = None
    for part in (*parts, mine):
        if part is None:
            continue
        tensor, offset = part
        if whole is None:
            whole = torch.full(shape, float("nan"), dtype=tensor.dtype)
        whole[tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))] = tensor
    return whole
