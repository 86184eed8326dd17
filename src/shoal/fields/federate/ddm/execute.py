"""A training of diffusion experts from a plan to samples."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.files import write_atomic, write_json
from shoal.core.parts import table
from shoal.fields.federate.ddm.job import TrainExpertsJob, TrainExpertsPlan
from shoal.fields.federate.ddm.planning import examples_of, whole_task
from shoal.fields.federate.ddm.protocols import FlowData, FlowRun, FlowTraining, TrainedFlow
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.protocols import FederationError
from shoal.fields.kinds import method_of
from shoal.fields.running import RunOutcome, RunProgress

if TYPE_CHECKING:
    from shoal.fields.federate.ddm.ensemble import Ensemble

_SHOWN = 64


def execute(plan: TrainExpertsPlan, progress: RunProgress) -> RunOutcome:
    """Train, draw, and write ``islands/``, ``experts.json``, samples and a picture.

    Raises:
        ShoalError: the data cannot be read or divided, or an island failed and ``degrade`` is off.
    """
    from shoal.kernel.threads import torch_threads

    with torch_threads(1):
        return _execute(plan, progress)


def _execute(plan: TrainExpertsPlan, progress: RunProgress) -> RunOutcome:
    from shoal.fields.federate.ddm.ensemble import MANIFEST, load_ensemble

    job, directory = plan.job, progress.directory
    method: FlowTraining = table("flow_training").build(method_of(plan), where="method")
    train, test, image, low, high = scaled(*examples_of(job))
    task = whole_task(job, train.x.shape[1], train.classes)
    begun = time.perf_counter()
    run = FlowRun(
        directory=directory,
        data=train,
        task=task,
        at_once=job.processes or len(os.sched_getaffinity(0)),
        tick=lambda done, text: progress.tick(0.9 * done, text, {}),
    )
    trained = method.train(run)
    train_s = time.perf_counter() - begun
    _complain(trained, job)
    words = {"experts": len(trained.sizes), "image": image, "low": low, "high": high}
    write_json(directory / MANIFEST, {**words, "classes": task.shape.classes, "path": job.path})
    ensemble = load_ensemble(directory, degrade=job.degrade)
    measured = {
        "loss": ensemble.loss(test.x, path=job.path, seed=job.seed),
        "train_s": train_s,
        "network_bytes": trained.network_bytes,
        "shard_bytes": _shards(directory),
        "imbalance": trained.imbalance,
    }
    if job.distill:
        progress.say(0.9, "the student learns from the ensemble")
        measured["student_loss"] = _student(job, run, ensemble, test)
    progress.say(0.95, "drawing")
    drawn = ensemble.sample(job.samples, mode=job.mixture, steps=job.sample_steps, seed=job.seed)
    measured["frechet"] = _frechet(train, drawn, low, high, job.seed)
    files = _write(drawn, image, low, high, progress)
    return RunOutcome(
        measured={"total_s": progress.seconds, **measured},
        details={"sizes": list(trained.sizes), "failed": trained.failed, "files": files},
    )


def scaled(train: Examples, test: Examples) -> tuple[FlowData, FlowData, list[int], float, float]:
    """Both as rows of numbers in -1 to 1, the shape of a sample, and what -1 and 1 stand for."""
    low, high = float(train.x.min()), float(train.x.max())
    span = (high - low) or 1.0

    def flat(examples: Examples) -> FlowData:
        x = examples.x.reshape(len(examples), math.prod(examples.x.shape[1:]))
        moved = (2 * (x - low) / span - 1).astype(np.float32)
        return FlowData(x=moved, y=examples.y, classes=examples.classes)

    return flat(train), flat(test), list(train.x.shape[1:]), low, low + span


def _complain(trained: TrainedFlow, job: TrainExpertsJob) -> None:
    if trained.failed and (not job.degrade or "router" in trained.failed):
        folder, why = next(iter(trained.failed.items()))
        count = len(trained.failed)
        raise FederationError(
            f"{folder} has failed ({why})"
            + (f", and {count - 1} others" if count > 1 else "")
            + "; the others are trained. Continue with --resume, or set degrade=true to end "
            "without failed experts"
        )


def _shards(directory: Path) -> float:
    return float(sum(one.stat().st_size for one in directory.rglob("shard.safetensors")))


def _student(job: TrainExpertsJob, run: FlowRun, ensemble: Ensemble, test: FlowData) -> float:
    from shoal.fields.federate.ddm.distill import distill
    from shoal.fields.federate.ddm.ensemble import Ensemble, read_network

    shape = run.task.shape.model_copy(update={"classes": 0})
    task = run.task.model_copy(update={"steps": job.distill, "shape": shape})
    distill(run.directory, task, run.data, ensemble)
    network, _ = read_network(run.directory / "student" / "model.safetensors")
    alone = Ensemble([network], lambda x, t, labels: x.new_zeros((len(x), 1)), shape.features)
    return alone.loss(test.x, path=job.path, seed=job.seed)


def _frechet(train: FlowData, drawn: np.ndarray, low: float, high: float, seed: int) -> float:
    from shoal.fields.federate.ddm.quality import ClassifierFeatures

    flat = 2 * (drawn.reshape(len(drawn), -1) - low) / (high - low) - 1
    return ClassifierFeatures.of(train, seed).distance(flat)


def _write(
    drawn: np.ndarray, image: list[int], low: float, high: float, progress: RunProgress
) -> list[str]:
    from shoal.fields.federate.ddm.picture import image_grid
    from shoal.fields.federate.wire.messages import pack

    directory = progress.directory
    write_atomic(directory / "samples.safetensors", pack({"samples": drawn}, {}))
    if len(image) != 3:
        return ["samples.safetensors"]
    picture = image_grid(drawn[:_SHOWN].mean(1), low, high)
    write_atomic(directory / "samples.png", picture)
    return ["samples.safetensors", "samples.png"]
