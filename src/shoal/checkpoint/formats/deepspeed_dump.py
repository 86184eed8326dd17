"""What a training run's ranks hold, dumped as it lies: DeepSpeed-style files, a few for each rank.

Nothing is gathered. A rank writes the weights and moments that it updates, as flat buffers, with
a table of where each parameter lies. Another tool puts them together later.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.formats.deepspeed_files import (
    BufferSlice,
    Group,
    flat_share,
    flat_slices,
    group_of,
    layer_files,
    model_file,
    model_states,
    optim_file,
    optim_states,
    step_folder,
)
from shoal.checkpoint.universal.convert import beside
from shoal.checkpoint.universal.protocols import FP32, Coord, RankLayout
from shoal.checkpoint.universal.spec import default_spec
from shoal.core.errors import CheckpointError
from shoal.core.files import fsync_dir, write_atomic
from shoal.core.parts import table

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.engine import ParallelEngine

_TAG = "global_step"

State = Mapping[str, Mapping[str, "Tensor"]]


def layout_of(engine: ParallelEngine) -> RankLayout:
    """The mesh of a run: context-parallel ranks share buffers as the replicas do."""
    ranks = engine.ranks
    return RankLayout(dp=ranks.data.world, tp=ranks.tp.world, pp=ranks.pp.world)


def dump(
    root: Path,
    step: int,
    engine: ParallelEngine,
    state: State,
    meta: Mapping[str, Any],
    barrier: Callable[[], None],
    *,
    keep: int = 1_000_000,
    tables: bool = True,
) -> Path:
    """Write this rank's files of a step; all ranks call it.

    Args:
        root: directory of the steps; the new one appears in it by a rename.
        step: steps done.
        engine: the model in training, on this rank.
        state: the optimizer's, by parameter; local parts.
        meta: plain data that our own checkpoints keep, without the step.
        barrier: waits for all ranks; called three times.
        keep: newest steps kept.
        tables: write where parameters lie and how they combine, which conversion needs.

    Returns:
        The directory of the step.

    Raises:
        CheckpointError: it cannot be written, or another rank could not write.
    """
    import torch

    layout = layout_of(engine)
    at = Coord(engine.ranks.pp.rank, 0, engine.ranks.tp.rank, engine.ranks.data.rank)
    divides = table("shard").build(engine.job.shard).divides
    stage = 3 if "weights" in divides else 2 if "gradients" in divides else 1
    folder, final = root / f".{step_folder(step)}.tmp", root / step_folder(step)
    chief = engine.ranks.world.rank == 0
    failure: OSError | None = None
    try:
        if chief:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    except OSError as cause:
        failure = cause
    barrier()
    try:
        slices, shares = _slices(engine, state, cut=not divides)
        packed = optim_states(slices, layout, stage, shares=shares, tables=tables)
        _save(packed, folder / optim_file(at, layout))
        if stage == 3 or at.dp == 0:
            _save_model(folder, engine, at, layout, stage, {**meta, "step": step}, tables)
    except (OSError, RuntimeError) as cause:  # torch's writer raises RuntimeError on a full disk
        failure = failure or OSError(str(cause))
    ok = torch.tensor([0.0 if failure else 1.0], device=engine.ranks.world.device)
    engine.ranks.world.all_reduce(ok, tag="checkpoint").wait()
    barrier()
    whole = float(ok) == engine.ranks.world.world
    if chief:
        if whole:
            shutil.rmtree(final, ignore_errors=True)
            fsync_dir(folder)
            os.rename(folder, final)
            write_atomic(root / "latest", final.name)
            _retain(root, keep)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    barrier()
    if not whole:
        raise CheckpointError(
            f"{final}: not dumped: {failure or 'another rank could not write; its error says why'}"
        )
    return final


def _retain(root: Path, keep: int) -> None:
    steps = {
        int(path.name.removeprefix(_TAG)): path
        for path in root.glob(f"{_TAG}*")
        if path.name.removeprefix(_TAG).isdecimal()
    }
    for step in sorted(steps)[:-keep]:
        shutil.rmtree(steps[step])
        # What was put together of it would be no use without it.
        shutil.rmtree(beside(steps[step]), ignore_errors=True)


def _save(value: Any, path: Path) -> None:
    import torch

    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _slices(
    engine: ParallelEngine, state: State, *, cut: bool
) -> tuple[list[BufferSlice], dict[Group, int]]:
    """What this rank writes of every parameter that it updates.

    Args:
        engine: the model.
        state: the optimizer's.
        cut: all dp ranks hold everything, so each writes its slice of the flat groups.
    """
    held, owned = engine.sharded.held(), engine.sharded.owned()
    layout, dp = layout_of(engine), engine.ranks.data.rank
    tensors: dict[str, dict[str, Tensor]] = {}
    scalars: dict[str, dict[str, float]] = {}
    for name in owned:
        if not cut and not engine.sharded.writes(name):
            continue
        tensors[name] = {FP32: held[name].tensor}
        scalars[name] = {}
        for key, value in state.get(name, {}).items():
            if value.dim() == 0:
                scalars[name][key] = float(value)
            elif value.shape == held[name].tensor.shape:
                tensors[name][key] = value
            else:
                raise CheckpointError(
                    f"{name}: the optimizer's {key} has the shape {list(value.shape)} and the "
                    f"parameter {list(held[name].tensor.shape)}; only state of the parameter's own "
                    "shape can be dumped"
                )
    runs: dict[str, tuple[int, int]] = {}
    shares: dict[Group, int] = {}
    if cut:
        groups: dict[Group, dict[str, int]] = {}
        for name in tensors:
            group = group_of(tensors[name], scalars[name])
            groups.setdefault(group, {})[name] = held[name].tensor.numel()
        for group, sizes in groups.items():
            runs |= flat_slices(sizes, layout, dp)
            shares[group] = flat_share(sizes, layout)
    else:
        runs = {name: (0, held[name].tensor.numel()) for name in tensors}
    results = []
    for name, (start, stop) in runs.items():
        part = held[name]
        # Rows of the local tensor: what is before them comes first in memory order, too.
        before = part.offset[0] * math.prod(part.shape[1:]) if part.offset else 0
        cuts = {key: value.reshape(-1)[start:stop] for key, value in tensors[name].items()}
        results.append(BufferSlice(name, tuple(part.shape), before + start, cuts, scalars[name]))
    return results, shares


def _save_model(
    folder: Path,
    engine: ParallelEngine,
    at: Coord,
    layout: RankLayout,
    stage: int,
    meta: Mapping[str, Any],
    tables: bool,
) -> None:
    held = engine.sharded.held()
    shapes = {name: tuple(part.shape) for name, part in held.items()}
    weights = {} if stage == 3 else {name: part.tensor for name, part in held.items()}
    if layout.pp > 1:
        layer_files(
            weights,
            at.tp,
            engine.config.num_layers,
            lambda value, name: _save(value, folder / name),
        )
        weights = {}
    split = engine.job.parallel.vocab_split
    spec = default_spec(engine.config, vocab_axis="" if split == "none" else split)
    plain = spec.plain() if tables else None
    contents = model_states(shapes, weights, layout, meta, plain)
    _save(contents, folder / model_file(at, layout, stage))
