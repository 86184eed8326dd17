"""Where a run goes on: from memory, from a checkpoint of its own, or from another run's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.core.errors import CheckpointError
from shoal.train.memory import version_in_memory
from shoal.train.start import open_start, take_over

if TYPE_CHECKING:
    from shoal.checkpoint.loading import LoadReport
    from shoal.ir import TrainJob
    from shoal.train.layout import RunDir
    from shoal.train.loop import Trainer
    from shoal.train.saving import Saves

__all__ = ["Resumed", "identity", "meta_of", "resumed"]


@dataclass(frozen=True, kw_only=True)
class Resumed:
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
        """The report as an event tells it."""
        if self.report is None:
            return {}
        return {
            "load_s": self.report.seconds,
            "wanted_bytes": self.report.wanted_bytes,
            "read_bytes": self.report.read_bytes,
        }


def resumed(
    trainer: Trainer,
    saves: Saves,
    directory: RunDir,
    *,
    resume: bool,
    from_step: int | None,
) -> Resumed:
    """Load a checkpoint if asked, the newest or a named one; called by all ranks.

    A run that has saved none begins where its ``start.json`` says.

    Raises:
        CheckpointError: what there is, is damaged or of another run.
    """
    version = version_in_memory() if resume and from_step is None else None
    if version is not None and version.step >= max(saves.store.steps(), default=0):
        with contextlib.closing(version):
            _expect_run(trainer, version.meta, saves.store.where)
            trainer.load(version)
        return Resumed(step=version.step, level="memory" if version.step else "disk")
    saved = None
    if from_step is not None:
        saved = saves.store.open(from_step, verify=False)
    elif resume:
        saved = saves.store.latest(verify=False)  # what is loaded is verified on the way
    if saved is not None:
        saved.require_model(identity(trainer))
        _expect_run(trainer, saved.meta, saves.store.where)
        return Resumed(step=saved.step, report=trainer.load(saved))
    other = open_start(directory.root)
    if other is not None:
        return Resumed(step=take_over(trainer, other, identity(trainer), _run_of(trainer)))
    return Resumed()


def identity(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued by this run."""
    found = dict(trainer.engine.config.model_dump(mode="json", exclude={"name"}))
    tuned, job = trainer.tuned, trainer.job
    if tuned is not None and job.finetune is not None:
        found |= {"finetune": job.finetune.model_dump(mode="json"), "base": tuned.base}
    return found


def meta_of(trainer: Trainer, job: TrainJob, step: int) -> dict[str, Any]:
    """What is kept beside the tensors; order of the data and random numbers follow from it."""
    return {
        "step": step,
        "model": identity(trainer),
        "run": _run_of(trainer),
        "job": job.model_dump(mode="json"),
    }


def _run_of(trainer: Trainer) -> dict[str, Any]:
    """What must stay when a run goes on."""
    job = trainer.job
    return {
        "data": trainer.tokens.fingerprint,
        "seed": job.seed,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "optimizer": job.optimizer.name,
    }


def _expect_run(trainer: Trainer, meta: Mapping[str, Any], where: str) -> None:
    """Refuse to continue on other data, with another seed or another batch."""
    then = meta["run"]
    for key, value in _run_of(trainer).items():
        if then.get(key) != value:
            raise CheckpointError(
                f"{where}: saved with {key} = {then.get(key)!r}, and the run has {value!r}; "
                "set it back, or start a new run under another name"
            )
