"""The files that DeepSpeed's ranks write: their names, what is in them, and how flat buffers lie.

A rank's optimizer file has one flat fp32 buffer for each group of parameters, and one for each
moment, of which the dp ranks hold a slice each; a table says where in the slice each parameter
lies. With ZeRO 1 and 2 the group is cut as a whole, so a cut may fall inside a parameter; with
ZeRO 3 every parameter is cut by itself.

::

    latest                                              the newest tag
    global_step100/mp_rank_00_model_states.pt           shapes, sizes of the mesh, weights
    global_step100/zero_pp_rank_0_mp_rank_00_model_states.pt      the same with ZeRO 3
    global_step100/layer_01-model_00-model_states.pt    weights of one layer, with a pipeline
    global_step100/zero_pp_rank_0_mp_rank_00_optim_states.pt

Source: Rajbhandari et al., ZeRO, 2020; the names are those of DeepSpeed 0.14 to 0.17.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.universal.protocols import FP32, Coord, RankLayout, Shape

if TYPE_CHECKING:
    from torch import Tensor

OPTIM = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
STATES = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
# NCCL wants slices of whole words; DeepSpeed pads a group to this times the dp ranks.
_ALIGN = 2


Group = tuple[tuple[str, ...], tuple[tuple[str, float], ...]]
"""Parameters in one buffer have the same moments and the same numbers."""


def group_of(tensors: Iterable[str], scalars: Mapping[str, float]) -> Group:
    """The group of a parameter with these moments and numbers."""
    return (tuple(sorted({FP32, *tensors})), tuple(sorted(scalars.items())))


@dataclass(frozen=True)
class BufferSlice:
    """What one rank's buffer holds of one parameter.

    Args:
        name: the parameter.
        shape: of this model-parallel rank's whole tensor.
        start: first element of the run in there.
        tensors: ``fp32``, ``exp_avg`` ... -> the elements, flat; all of one length.
    """

    name: str
    shape: Shape
    start: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of the run."""
        return self.tensors[FP32].numel()

    @property
    def group(self) -> Group:
        """Its group."""
        return group_of(self.tensors, self.scalars)


def step_folder(step: int) -> str:
    """The tag of a step."""
    return f"global_step{step}"


def mp_rank(at: Coord, layout: RankLayout) -> int:
    """The model-parallel rank: pipeline stages first."""
    return at.pp * layout.tp + at.tp


def optim_file(at: Coord, layout: RankLayout) -> str:
    """Name of a rank's optimizer file."""
    return f"zero_pp_rank_{at.dp}_mp_rank_{mp_rank(at, layout):02d}_optim_states.pt"


def model_file(at: Coord, layout: RankLayout, stage: int) -> str:
    """Name of a rank's model file; with ZeRO 3 each dp rank has one."""
    name = f"mp_rank_{mp_rank(at, layout):02d}_model_states.pt"
    return f"zero_pp_rank_{at.dp}_{name}" if stage == 3 else name


def flat_share(sizes: Mapping[str, int], layout: RankLayout) -> int:
    """Elements of one dp rank's slice of a group, padding included."""
    total = sum(sizes.values())
    return (total + -total % (_ALIGN * layout.dp)) // layout.dp


def flat_slices(
    sizes: Mapping[str, int], layout: RankLayout, dp: int
) -> dict[str, tuple[int, int]]:
    """Which run of every parameter of a group lies in the slice of one dp rank.

    Args:
        sizes: name -> elements, in the order of the buffer.
        layout: its dp ranks share the buffer.
        dp: which of them.

    Returns:
        name -> (first element, one past the last), of those that have any.
    """
    share = flat_share(sizes, layout)
    low, high = dp * share, (dp + 1) * share
    flat_slices, begin = {}, 0
    for name, size in sizes.items():
        first, last = max(low - begin, 0), min(high - begin, size)
        if first < last:
            flat_slices[name] = (first, last)
        begin += size
    return flat_slices


def optim_states(
    slices: Sequence[BufferSlice],
    layout: RankLayout,
    stage: int,
    *,
    shares: Mapping[Group, int] | None = None,
    tables: bool = True,
) -> dict[str, Any]:
    """What an optimizer file holds.

    Args:
        slices: of this rank.
        layout: of all ranks.
        stage: of ZeRO, 1 to 3.
        shares: elements of the rank's slice of each group, where groups are cut as a whole.
        tables: write where the parameters lie, which conversion needs and a plain resume does not.
    """
    import torch

    groups: dict[Group, list[BufferSlice]] = {}
    for one in slices:
        groups.setdefault(one.group, []).append(one)
    flats: list[Tensor] = []
    paddings: list[int] = []
    states: dict[int, dict[str, Any]] = {}
    mappings: list[dict[str, tuple[int, int, int]]] = []
    for number, (group, held) in enumerate(groups.items()):
        filled = sum(one.numel for one in held)
        padding = (shares or {}).get(group, filled) - filled
        table, begin = {}, 0
        for one in held:
            table[one.name] = (begin, one.numel, one.start)
            begin += one.numel
        buffers = {
            key: torch.cat(
                [one.tensors[key].detach().reshape(-1).float().cpu() for one in held]
                + [torch.zeros(padding)]
            )
            for key in held[0].tensors
        }
        flats.append(buffers.pop(FP32))
        paddings.append(padding)
        states[number] = {**buffers, **held[0].scalars}
        mappings.append(table)
    flat_name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    result: dict[str, Any] = {
        "zero_stage": stage,
        "partition_count": layout.dp,
        flat_name: flats,
        "group_paddings": paddings,
        "base_optimizer_state": {
            "state": states,
            "param_groups": [{"params": [number]} for number in states],
        },
    }
    if tables:
        result["param_slice_mappings"] = mappings
    return {"optimizer_state_dict": result, "ds_version": "0.16.0", "ds_config": {}}


def model_states(
    shapes: Mapping[str, Shape],
    weights: Mapping[str, Tensor],
    layout: RankLayout,
    meta: Mapping[str, Any],
    spec: Sequence[Any] | None,
) -> dict[str, Any]:
    """What a model file holds.

    Args:
        shapes: of every parameter of this model-parallel rank.
        weights: those that lie in this file.
        layout: of all ranks.
        meta: what our own checkpoints keep beside the tensors.
        spec: how the fragments combine; None to leave it out.
    """
    own: dict[str, Any] = {"layout": layout.model_dump(), "meta": dict(meta)}
    if spec is not None:
        own["spec"] = list(spec)
    return {
        "module": {name: tensor.detach().cpu() for name, tensor in weights.items()},
        "param_shapes": [{name: tuple(shape) for name, shape in shapes.items()}],
        "dp_world_size": layout.dp,
        "mp_world_size": layout.tp * layout.pp,
        "global_steps": int(meta.get("step", 0)),
        "ds_version": "0.16.0",
        "ds_config": {},
        "shoal": json.dumps(own),
    }


def layer_files(
    weights: Mapping[str, Tensor], tp: int, num_layers: int, save: Callable[[Any, str], None]
) -> None:
    """Write the weights of a pipeline stage, a file for each layer.

    Args:
        weights: of the stage, by our names.
        tp: the tensor-parallel rank.
        num_layers: blocks of the whole model.
        save: called with what a file holds and its name.
    """
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        first, _, rest = name.partition(".")
        number = {"embed": 0, "norm": num_layers + 1, "output": num_layers + 2}.get(first)
        if number is None:
            block, _, rest = rest.partition(".")
            number = int(block) + 1
        layers.setdefault(number, {})[rest] = tensor.detach().cpu()
    for number, held in sorted(layers.items()):
        save(held, f"layer_{number:02d}-model_{tp:02d}-model_states.pt")
