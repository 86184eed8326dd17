"""Where a run goes on: from memory, from a checkpoint of its own, or from another run's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.levels import LevelReport, nearest
from shoal.checkpoint.peers import call_on_first
from shoal.core.errors import CheckpointError
from shoal.train.finite import non_finite
from shoal.train.memory import version_in_memory
from shoal.train.start import open_start, take_over

if TYPE_CHECKING:
    from shoal.checkpoint.loading import LoadReport
    from shoal.checkpoint.store import Store
    from shoal.ir import TrainJob
    from shoal.train.layout import RunDir
    from shoal.train.loop import RankTrainer
    from shoal.train.saving import RunSaver

# How ranks agreed in runs that do not say it.
_EVERY_STEP = "every_step"


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run begins.

    Args:
        step: the first step.
        level: where the state came from: ``disk``, ``memory``, or the address of a farther level.
        report: what loading has cost, where a checkpoint of the run was loaded.
    """

    step: int = 0
    level: str = "disk"
    report: LoadReport | None = None

    def cost(self) -> dict[str, Any]:
        """The report in the form of an event."""
        if self.report is None:
            return {}
        return {
            "load_s": self.report.seconds,
            "wanted_bytes": self.report.wanted_bytes,
            "read_bytes": self.report.read_bytes,
        }


def resumed(
    trainer: RankTrainer,
    saves: RunSaver,
    directory: RunDir,
    *,
    resume: bool,
) -> ResumePoint:
    """Load the newest checkpoint of the run's newest branch if asked; called by all ranks.

    A run that has saved none begins where its ``start.json`` says.

    Raises:
        CheckpointError: what there is, is damaged or of another run.
    """
    if resume:
        step, stores = _nearest(saves)
        version = version_in_memory()
        if version is not None and version.step >= (step or 0):
            with contextlib.closing(version):
                _expect_run(trainer, version.meta, saves.store.where)
                trainer.load(version)
            return ResumePoint(step=version.step, level="memory" if version.step else "disk")
        if step is not None:
            return _loaded(trainer, saves, step, stores)
    other = open_start(directory.root)
    if other is not None:
        return ResumePoint(step=take_over(trainer, other, identity(trainer), _run_of(trainer)))
    return ResumePoint()


def _nearest(saves: RunSaver) -> tuple[int | None, list[Store]]:
    """The newest step of the branch, or its first, and the stores that have it, as rank 0 sees it.

    Raises:
        CheckpointError: the first step is nowhere, or what there is cannot be listed.
    """
    origin = saves.origin

    def ask() -> tuple[int | None, list[int], bool]:
        step, levels, silent = nearest(saves.stores)
        begins = step is None and origin is not None
        if begins and origin is not None:
            step, levels, silent = nearest(origin[1], origin[0])
        saves.tell_levels(silent)
        return step, levels, begins

    step, levels, begins = call_on_first(saves.peers, ask)
    stores: Sequence[Store] = origin[1] if begins and origin is not None else saves.stores
    if step is not None and not levels:
        stores[0].open(step)  # says which there are
    return step, [stores[number] for number in levels]


def _loaded(
    trainer: RankTrainer, saves: RunSaver, step: int, stores: Sequence[Store]
) -> ResumePoint:
    """Load a step from the nearest of some stores that has it whole.

    What is loaded is verified on the way, so a damaged one is known when some of it was loaded; the
    next one then fills everything anew.
    """
    first: CheckpointError | None = None
    for store in stores:
        failure: CheckpointError | None = None
        saved = report = None
        try:
            saved = store.open(step, verify=False)
        except CheckpointError as cause:
            failure = cause
        # Ranks that could open it must not load without those that could not.
        notes = [said.decode() for said in saves.peers.gather(str(failure or "").encode())]
        words = next(filter(None, notes), "")
        if words and failure is None:
            failure = CheckpointError(words)
        if saved is not None and failure is None:
            saved.require_model(identity(trainer))
            _expect_run(trainer, saved.meta, store.where)
            try:
                report = trainer.load(saved)
            except CheckpointError as cause:  # the same on all ranks
                failure = cause
            failure = failure or _not_finite(trainer, saves, step, store)
        if failure is None:
            near = [saves.store, *([] if saves.origin is None else saves.origin[1][:1])]
            level = "disk" if store in near else store.where
            return ResumePoint(step=step, level=level, report=report)
        first = first or failure
        if len(stores) > 1:
            saves.tell_levels([LevelReport(step, store.where, "passed_over", message=str(failure))])
    assert first is not None
    raise first


def _not_finite(
    trainer: RankTrainer, saves: RunSaver, step: int, store: Store
) -> CheckpointError | None:
    """What is wrong with a state that was loaded, the same on all ranks; None if it is finite."""
    notes = [said.decode() for said in saves.peers.gather(non_finite(trainer.pieces()).encode())]
    for rank, words in enumerate(notes):
        if words:
            return CheckpointError(
                f"{store.where}: step {step} cannot be continued: {words}, on rank {rank}; "
                f"continue from an earlier step with --from-step, and a lower optimizer.lr"
            )
    return None


def identity(trainer: RankTrainer) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued by this run."""
    result = dict(trainer.engine.config.model_dump(mode="json", exclude={"name"}))
    for hook in trainer.hooks:
        result |= hook.identity()
    return result


def meta_of(trainer: RankTrainer, job: TrainJob, step: int) -> dict[str, Any]:
    """What is kept beside the tensors; order of the data and random numbers follow from it."""
    return {
        "step": step,
        "model": identity(trainer),
        "run": _run_of(trainer),
        "job": job.model_dump(mode="json"),
    }


def _run_of(trainer: RankTrainer) -> dict[str, Any]:
    """What must stay when a run goes on."""
    job = trainer.job
    return {
        "data": trainer.tokens.fingerprint,
        "seed": job.seed,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "optimizer": job.optimizer.name,
        **({} if trainer.engine.ranks.outer is None else {"sync": _sync_of(job)}),
    }


def _sync_of(job: TrainJob) -> str:
    """How workers agree, and who they are: each has a state of its own."""
    split = job.parallel.model_dump(mode="json", exclude_defaults=True)
    degrees = " ".join(f"{axis}={size}" for axis, size in sorted(split.items()))
    return f"{job.sync} with parallel {degrees or 'dp=1'} and shard {job.shard}"


def _expect_run(trainer: RankTrainer, meta: Mapping[str, Any], where: str) -> None:
    """Refuse to continue on other data, with another seed or another batch."""
    then = {"sync": _EVERY_STEP, **meta["run"]}
    for key, value in {"sync": _EVERY_STEP, **_run_of(trainer)}.items():
        if then.get(key) != value:
            raise CheckpointError(
                f"{where}: saved with {key} = {then.get(key)!r}, and the run has {value!r}; "
                "restore that value, or start a new run under another name"
            )
