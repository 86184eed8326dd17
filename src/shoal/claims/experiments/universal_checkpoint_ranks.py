"""What the ranks of claim [7] Universal Checkpointing do: train, dump, resume, time saves."""

from __future__ import annotations

import functools
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.formats.deepspeed import DeepSpeedDumps
from shoal.checkpoint.formats.deepspeed_dump import dump
from shoal.checkpoint.store import MODEL, OPTIMIZER
from shoal.checkpoint.universal.atomic import UniversalCheckpoint
from shoal.checkpoint.universal.extract import extract
from shoal.checkpoint.universal.protocols import Fragment
from shoal.claims.experiments.arch_training import windows
from shoal.claims.lab.same_as_one import assemble
from shoal.claims.lab.session import RankSession
from shoal.claims.ranks import in_turn
from shoal.core.random import generator
from shoal.parallel.tensor.slices import whole_shapes
from shoal.train.build import FreshWeights
from shoal.train.state import fill

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm

_CORPUS_BYTES = 4 * 2**20


def corpus() -> np.ndarray:
    """The source of Python's standard library, as bytes above 0."""
    result, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        result.append(np.frombuffer(path.read_bytes(), dtype=np.uint8))
        size += len(result[-1])
        if size > _CORPUS_BYTES:
            break
    return np.concatenate(result).astype(np.int64) + 1


class RankTraining:
    """A model in training on one rank."""

    def __init__(self, comm: Comm, job: TrainJob, config: ModelConfig, text: np.ndarray) -> None:
        self.comm, self.config, self.text = comm, config, text
        self.session = RankSession(comm, job, config, FreshWeights(config, job.seed))
        self.engine, self.updater = self.session.engine, self.session.updater

    def steps(self, first: int, last: int) -> list[float]:
        """Train steps ``first`` to ``last``; the mean loss of each."""
        return [self._step(step) for step in range(first, last)]

    def _step(self, step: int) -> float:
        job = self.session.job
        source = generator(job.seed, purpose="claim universal_checkpoint", step=step)
        starts = source.integers(0, len(self.text) - job.seq_len - 1, job.global_batch)
        both = windows(self.text, starts, job.seq_len)
        loss = self.session.step(self.session.rows(*both, step))
        self.comm.all_reduce(loss, tag="loss").wait()
        return float(loss) / (job.global_batch * job.seq_len)

    def truth(self) -> dict[str, Tensor]:
        """Every weight and moment, gathered: what a universal checkpoint has to hold."""
        shapes = whole_shapes(self.config)
        # Copies are summed and divided by their number, which is exact in fp64.
        weights = assemble(self.engine.held(), shapes, self.comm, torch.float64)
        result = {MODEL + name: whole.float() for name, whole in weights.items()}
        state = self.updater.state()
        for key in ("exp_avg", "exp_avg_sq"):
            held = self.engine.boxes({name: entries[key] for name, entries in state.items()})
            whole = assemble(held, shapes, self.comm, torch.float64)
            result |= {f"{OPTIMIZER}{name}.{key}": value.float() for name, value in whole.items()}
        return result

    def dump(self, root: Path, step: int, *, tables: bool = True) -> Path:
        """Write this rank's files."""
        meta = {"model": self.config.model_dump(mode="json")}
        barrier = self.comm.barrier
        state = self.updater.state()
        return dump(root, step, self.engine, state, meta, barrier, tables=tables)


def sources(
    comm: Comm,
    *,
    jobs: Mapping[str, TrainJob],
    config: ModelConfig,
    root: str,
    steps: int,
    after: int,
) -> dict[str, list[float]]:
    """Train under every layout, dump, write the truth, go on; layout -> losses after the dump."""
    from safetensors.torch import save_file

    text = corpus()
    losses = {}
    for name, job in jobs.items():
        run = RankTraining(comm, job, config, text)
        run.steps(0, steps)
        run.dump(Path(root) / name, steps)
        truth = run.truth()
        if comm.rank == 0:
            save_file(truth, Path(root) / f"{name}.truth.safetensors")
        losses[name] = run.steps(steps, steps + after)
    return losses


def resume(
    comm: Comm, *, pairs: Sequence[tuple[str, str, TrainJob]], config: ModelConfig, after: int
) -> dict[str, list[float]]:
    """Go on from universal checkpoints in other layouts; name of a pair -> losses."""
    text = corpus()
    result = {}
    for name, place, job in pairs:
        run = RankTraining(comm, job, config, text)
        saved = UniversalCheckpoint(Path(place))
        fill(run.engine, run.updater, saved)
        result[name] = run.steps(saved.step, saved.step + after)
    return result


def time_saves(
    comm: Comm, *, job: TrainJob, config: ModelConfig, root: str, rounds: int, gathered: bool
) -> dict[str, list[float]]:
    """Seconds of saves with and without what conversion needs, in turns; this rank's.

    ``gathered``: instead of writing tables, gather everything on rank 0 and let it save.
    """
    from safetensors.torch import save_file

    run = RankTraining(comm, job, config, corpus())
    run.steps(0, 1)
    folder = Path(root)

    def save(tables: bool) -> None:
        if tables and gathered:
            truth = run.truth()
            if comm.rank == 0:
                folder.mkdir(exist_ok=True)
                save_file(truth, folder / "whole.safetensors")
            comm.barrier()
            return
        run.dump(folder, 1, tables=tables)

    # The first of each kind, not timed, makes files that the others replace.
    arms = {"with": functools.partial(save, True), "without": functools.partial(save, False)}
    times = in_turn(comm, arms, rounds)
    run.dump(folder, 1)
    return times


def extract_memory(comm: Comm, *, place: str, folder: str, at_once: bool) -> dict[str, float]:
    """Peak memory of taking rank files apart, or all at once, beyond what was there before."""
    source = DeepSpeedDumps(Path(place))
    files = source.files()
    target = Path(folder)
    target.mkdir()
    # Once with the smallest file: what torch loads and keeps for itself is no part of the state.
    (target / "warm").mkdir()
    extract([min(files, key=lambda file: file.path.stat().st_size)], target / "warm")
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    if at_once:
        kept = [list(file.contents()) for file in files]
        whole = [one.tensor.clone() for file in kept for one in file if isinstance(one, Fragment)]
        del kept, whole
    else:
        extract(files, target, workers=1)
    peak = _status("VmHWM")
    shutil.rmtree(target)
    largest = max(file.path.stat().st_size for file in files)
    return {"peak": float(peak - before), "largest": float(largest)}


def _status(key: str) -> int:
    """A size out of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
