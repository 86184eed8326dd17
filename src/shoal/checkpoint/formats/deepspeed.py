"""DeepSpeed-style directories: flat ZeRO buffers of every rank, with tables of what lies where.

Read through the universal form. Written for any mesh, each rank's file from the ranges that this
rank would read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from shoal.checkpoint.formats import pickles
from shoal.checkpoint.formats.deepspeed_files import (
    OPTIM,
    STATES,
    BufferSlice,
    Group,
    flat_share,
    flat_slices,
    group_of,
    layer_files,
    model_file,
    model_states,
    mp_rank,
    optim_file,
    optim_states,
    step_folder,
)
from shoal.checkpoint.formats.huggingface import model_of
from shoal.checkpoint.formats.ranks import FileOf, RankFormat
from shoal.checkpoint.store import MODEL, OPTIMIZER
from shoal.checkpoint.universal.generate import local_of, read_local, stage_names
from shoal.checkpoint.universal.protocols import FP32, Coord, Fragment, RankFile, RankLayout, Scalar
from shoal.checkpoint.universal.spec import UniversalSpec, default_spec
from shoal.core.config import parse
from shoal.core.errors import CheckpointError, CorruptError, require
from shoal.core.files import write_atomic, write_dir_atomic
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.formats.protocols import Contents

# What DeepSpeed itself keeps of how fragments combine.
_INFO = "universal_checkpoint_info"


class DeepSpeedDumps:
    """The rank files of one step.

    Args:
        path: a ``global_stepN`` directory, or one whose ``latest`` names it.

    Raises:
        CheckpointError: there are none, or one is missing.
        CorruptError: a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = _folder(path)
        names = {file.name: file for file in sorted(self.path.iterdir())}
        self._optim = {
            (int(m.group(1)), int(m.group(2))): file
            for name, file in names.items()
            if (m := OPTIM.match(name))
        }
        self._states: dict[int, Path] = {}
        for name, file in names.items():
            match = STATES.match(name)
            if match:
                self._states.setdefault(int(match.group(2)), file)
        if not self._states:
            raise CheckpointError(
                f"{self.path}: no mp_rank_XX_model_states.pt; it is no checkpoint of DeepSpeed, or "
                "its model files were not copied"
            )
        first = pickles.load(next(iter(self._states.values())))
        if not isinstance(first, Mapping):
            raise CorruptError(f"{self.path}: its model files hold no mapping")
        self._info = first.get(_INFO)
        self._own = pickles.own_description(first.get("shoal"), self.path)
        self.layout = _layout(first, self._own, self.path)
        self.meta: dict[str, Any] = dict(self._own.get("meta", {}))
        self.meta.setdefault("step", int(first.get("global_steps") or 0))

    def files(self) -> Sequence[RankFile]:
        """Every rank's optimizer file.

        Raises:
            CheckpointError: one is missing.
        """
        layout = self.layout
        files: list[RankFile] = []
        for mp in range(layout.tp * layout.pp):
            if mp not in self._states:
                at = Coord(mp // layout.tp, 0, mp % layout.tp)
                raise CheckpointError(
                    f"{self.path / model_file(at, layout, 1)}: this rank's file is missing; the "
                    f"mesh is {layout}, so there are {layout.tp * layout.pp} of them; copy it too"
                )
            for dp in range(layout.dp):
                at = Coord(mp // layout.tp, 0, mp % layout.tp, dp)
                file = self._optim.get((dp, mp))
                if file is None:
                    raise CheckpointError(
                        f"{self.path / optim_file(at, layout)}: this rank's file is missing; the "
                        f"mesh is {layout}, so there are {layout.dp} for each model-parallel rank; "
                        "copy it too"
                    )
                files.append(FileOf(file, functools.partial(self._read, at=at)))
        return files

    def spec(self) -> UniversalSpec | None:
        """Our own, or what DeepSpeed's lists of patterns say."""
        if "spec" in self._own:
            return UniversalSpec.parse(self._own["spec"], f"{self.path}: spec")
        if isinstance(self._info, Mapping):
            return _translated(self._info, self.path)
        return None

    def paths(self) -> list[Path]:
        """Every file of ``torch.save`` in the directory."""
        return sorted(self.path.glob("*.pt"))

    def _read(self, path: Path, at: Coord) -> Iterator[Fragment | Scalar]:
        states = pickles.load(path)
        shapes = self._shapes(mp_rank(at, self.layout))
        state = states["optimizer_state_dict"]
        flats, stage = _flats(state), int(state["zero_stage"])
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        inner = base["state"] if isinstance(base, Mapping) else dict(enumerate(base))
        tables = state.get("param_slice_mappings")
        if not tables:
            tables = _tables(shapes, at.dp, self.layout.dp, stage, flats)
            if stage == 3:
                flats, inner = _joined(flats, inner)
        for number, table in enumerate(tables):
            yield from _group(path, at, shapes, flats[number], inner.get(number, {}), table)

    def _shapes(self, mp: int) -> dict[str, tuple[int, ...]]:
        groups = pickles.load(self._states[mp]).get("param_shapes")
        if not isinstance(groups, (list, tuple)):
            groups = [groups or {}]
        return {name: tuple(shape) for group in groups for name, shape in group.items()}


@part
class DeepSpeedFormat(RankFormat):
    """Rank files with flat buffers, as DeepSpeed names and fills them.

    Args:
        zero: ZeRO stage of the buffers: 1 and 2 partition parameter groups, 3 partitions every
            parameter.
    """

    zero: Annotated[int, Ge(1), Le(3)] = 1

    def marked(self, path: Path) -> bool:
        return any(STATES.match(file.name) for file in _folder(path).iterdir())

    def dumps(self, path: Path) -> DeepSpeedDumps:
        return DeepSpeedDumps(path)

    def write(self, out: Path, contents: Contents, *, mesh: RankLayout) -> None:
        """Every rank's files for ``mesh``."""
        import torch

        require(mesh.ep == 1, "mesh: ep", mesh.ep, expected="1: experts are cut by their width")
        config = model_of(contents)
        spec = default_spec(config)
        names = [n.removeprefix(MODEL) for n in contents.names() if n.startswith(MODEL)]
        state: dict[str, list[str]] = {}
        for entry in contents.names():
            if entry.startswith(OPTIMIZER):
                own, _, key = entry.removeprefix(OPTIMIZER).rpartition(".")
                state.setdefault(own, []).append(key)
        stages = stage_names(names, config.num_layers, mesh.pp, config.tied)
        tag = step_folder(contents.step)
        with write_dir_atomic(out, error=CheckpointError) as place:
            folder = place / tag
            folder.mkdir()
            for pp, held in enumerate(stages):
                for tp in range(mesh.tp):
                    rank = _Rank(contents, spec, held, state, mesh, Coord(pp, 0, tp))
                    for dp in range(mesh.dp):
                        at = Coord(pp, 0, tp, dp)
                        packed = rank.packed(dp, self.zero)
                        torch.save(packed, folder / optim_file(at, mesh))
                    rank.save_weights(folder, self.zero, config.num_layers)
            write_atomic(place / "latest", tag)


class _Rank:
    """One model-parallel rank of a mesh for which a checkpoint is written."""

    def __init__(
        self,
        contents: Contents,
        spec: UniversalSpec,
        names: Sequence[str],
        state: Mapping[str, Sequence[str]],
        mesh: RankLayout,
        at: Coord,
    ) -> None:
        self.contents = contents
        self.spec = spec
        self.mesh = mesh
        self.at = at
        self.locals = {
            name: local_of(spec, name, contents.shape(MODEL + name), mesh, at) for name in names
        }
        self.tensors: dict[str, list[str]] = {}
        self.scalars: dict[str, dict[str, float]] = {}
        for name in names:
            keys = {key: contents.shape(f"{OPTIMIZER}{name}.{key}") for key in state.get(name, ())}
            self.tensors[name] = [key for key, shape in keys.items() if shape]
            self.scalars[name] = {
                key: float(contents.tensor(f"{OPTIMIZER}{name}.{key}"))
                for key, shape in keys.items()
                if not shape
            }

    def packed(self, dp: int, zero: int) -> dict[str, Any]:
        """The optimizer file of one dp rank."""
        sizes = {name: math.prod(local.shape) for name, local in self.locals.items()}
        runs: dict[str, tuple[int, int]] = {}
        shares: dict[Group, int] = {}
        if zero == 3:
            for name, size in sizes.items():
                share = -(-size // self.mesh.dp)
                runs[name] = (min(dp * share, size), min((dp + 1) * share, size))
        else:
            groups: dict[Group, dict[str, int]] = {}
            for name, size in sizes.items():
                key = group_of(self.tensors[name], self.scalars[name])
                groups.setdefault(key, {})[name] = size
            for key, group in groups.items():
                runs |= flat_slices(group, self.mesh, dp)
                shares[key] = flat_share(group, self.mesh)
        slices = [
            BufferSlice(
                name,
                self.locals[name].shape,
                start,
                {key: self._run(name, key, start, stop) for key in (FP32, *self.tensors[name])},
                self.scalars[name],
            )
            for name, (start, stop) in runs.items()
            if start < stop
        ]
        return optim_states(slices, self.mesh, zero, shares=shares)

    def _run(self, name: str, key: str, start: int, stop: int) -> Tensor:
        stored = MODEL + name if key == FP32 else f"{OPTIMIZER}{name}.{key}"
        local = self.locals[name].run(start, stop)
        return read_local(self.contents, stored, local).reshape(-1)[start:stop].float()

    def save_weights(self, folder: Path, zero: int, num_layers: int) -> None:
        """The model files of this model-parallel rank."""
        import torch

        shapes = {name: local.shape for name, local in self.locals.items()}
        weights: dict[str, Tensor] = {}
        if zero < 3:
            weights = {
                name: read_local(self.contents, MODEL + name, local)
                for name, local in self.locals.items()
            }
        if self.mesh.pp > 1:
            layer_files(
                weights, self.at.tp, num_layers, lambda held, name: torch.save(held, folder / name)
            )
            weights = {}
        meta = {**self.contents.meta, "step": self.contents.step}
        held = model_states(shapes, weights, self.mesh, meta, self.spec.plain())
        for dp in range(self.mesh.dp if zero == 3 else 1):
            torch.save(held, folder / model_file(self.at._replace(dp=dp), self.mesh, zero))


def _folder(path: Path) -> Path:
    latest = path / "latest"
    if latest.is_file() and latest.stat().st_size < 4096:
        tag = latest.read_text(errors="replace").strip()
        if Path(tag).name == tag and (path / tag).is_dir():
            return path / tag
        raise CheckpointError(f"{latest}: names {tag!r}, which is no directory beside it")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; give a global_stepN directory")
    return path


def _layout(first: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> RankLayout:
    if "layout" in own:
        return parse(RankLayout, own["layout"], where=f"{path}: layout")
    dp, mp = first.get("dp_world_size") or 1, first.get("mp_world_size") or 1
    if not (isinstance(dp, int) and isinstance(mp, int) and dp > 0 and mp > 0):
        raise CorruptError(f"{path}: its model files name no numbers of ranks; they are damaged")
    # With a pipeline there are files of layers, which number the tensor-parallel ranks.
    numbers = {
        name.name.partition("-model_")[2][:2]
        for name in path.glob("layer_*-model_*-model_states.pt")
    }
    tp = len(numbers) or mp
    if mp % tp:
        raise CheckpointError(
            f"{path}: {mp} model-parallel ranks and layer files of {tp} tensor-parallel ranks; a "
            "file is missing"
        )
    return RankLayout(dp=dp, tp=tp, pp=mp // tp)


def _flats(state: Mapping[str, Any]) -> list[Tensor]:
    for key in ("single_partition_of_fp32_groups", "fp32_flat_groups"):
        if key in state:
            return list(state[key])
    raise KeyError("single_partition_of_fp32_groups")


def _joined(flats: list[Tensor], inner: Mapping[int, Any]) -> tuple[list[Tensor], dict[int, Any]]:
    """ZeRO 3 without tables: its sub-groups lie behind each other."""
    import torch

    states = [inner.get(number, {}) for number in range(len(flats))]
    joined: dict[str, Any] = {}
    for key, value in states[0].items():
        whole = isinstance(value, torch.Tensor) and value.dim() == 1
        joined[key] = torch.cat([state[key] for state in states]) if whole else value
    return [torch.cat(flats)], {0: joined}


def _tables(
    shapes: Mapping[str, tuple[int, ...]], dp: int, world: int, stage: int, flats: list[Tensor]
) -> list[dict[str, tuple[int, int, int]]]:
    """Where parameters lie, of files that do not say it: in the order of their shapes."""
    table: dict[str, tuple[int, int, int]] = {}
    begin = 0
    if stage == 3:
        for name, shape in shapes.items():
            size = math.prod(shape)
            share = -(-size // world)
            first = min(dp * share, size)
            table[name] = (begin, min(share, size - first), first)
            begin += share
        return [table]
    if len(flats) > 1:
        raise KeyError("param_slice_mappings, which several groups need")
    low, high = dp * flats[0].numel(), (dp + 1) * flats[0].numel()
    for name, shape in shapes.items():
        size = math.prod(shape)
        first, last = max(low - begin, 0), min(high - begin, size)
        if first < last:
            table[name] = (begin + first - low, last - first, first)
        begin += size
    return [table]


def _group(
    path: Path,
    at: Coord,
    shapes: Mapping[str, tuple[int, ...]],
    flat: Tensor,
    state: Mapping[str, Any],
    table: Mapping[str, Any],
) -> Iterator[Fragment | Scalar]:
    """The fragments of one group of a rank's buffers."""
    import torch

    buffers = {FP32: flat}
    scalars: dict[str, float] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() == flat.numel() and value.dim() == 1:
            buffers[key] = value
        elif isinstance(value, (int, float)) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            scalars[key] = float(value)
        else:
            raise CheckpointError(
                f"{path}: its optimizer has {key}, which is neither a buffer as long as the "
                "weights nor a number; such state cannot be moved to another split"
            )
    for name, entry in table.items():
        begin, size, *start = entry
        if name not in shapes:
            raise CheckpointError(
                f"{path}: its table names {name}, and the model file has no such parameter; the "
                "files are of different runs"
            )
        if begin < 0 or size < 0 or begin + size > flat.numel():
            raise CorruptError(
                f"{path}: its table puts {name} at {begin} to {begin + size} of a buffer of "
                f"{flat.numel()}; the file is damaged or of another run"
            )
        for key, buffer in buffers.items():
            yield Fragment(
                name,
                key,
                at,
                shapes[name],
                start[0] if start else None,
                buffer[begin : begin + size],
            )
        for key, number in scalars.items():
            yield Scalar(name, key, number)


def _translated(info: Mapping[str, Any], path: Path) -> UniversalSpec:
    """DeepSpeed's own lists of patterns, which match from the beginning of a name."""

    def listed(key: str) -> list[str]:
        return [f"(?:{pattern}).*" for pattern in info.get(key) or ()]

    if listed("parameter_with_2_sub_params_cat_dim_0") or info.get("parameter_with_sub_params"):
        raise CheckpointError(
            f"{path}: it has fused parameters, whose parts it does not say; give a spec with "
            "fused(dim=0, parts=[...]) for them, with --spec"
        )
    vocabulary: dict[str, Any] = {"name": "fragment", "dim": 0}
    if info.get("original_vocab_size"):
        vocabulary["size"] = int(info["original_vocab_size"])
    rules: list[tuple[str, Any]] = [
        *((match, "replicated") for match in listed("tp_replicated_parameter_patterns")),
        *((match, "average") for match in listed("parameter_to_average_patterns")),
        *((match, vocabulary) for match in listed("vocabulary_parameter_patterns")),
        *(
            (match, {"name": "fragment", "dim": 1})
            for match in listed("parameter_with_row_parallelism_patterns")
        ),
        (".*", {"name": "fragment", "dim": 0}),
    ]
    return UniversalSpec.parse([{"match": match, "rule": rule} for match, rule in rules])
