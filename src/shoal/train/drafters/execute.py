"""A drafter's training from a plan to a report.

The plan is written before the first step. What the target makes of the text is computed, or
found; then steps, each a function of its number alone, so that a run that goes on from a saved
state ends where it would have ended. At last the guesses are judged, and the drafter is written
with the table of how often they are right.
"""

from __future__ import annotations

import math
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError, ModelError, NonFiniteError
from shoal.core.files import write_json
from shoal.core.meter import SINKS, Meter
from shoal.core.parts import table
from shoal.core.random import Permutation
from shoal.cost.score import Score
from shoal.ir import DrafterJob, DrafterPlan, DrafterReport, errors_of
from shoal.kernel.threads import torch_threads
from shoal.model import huggingface
from shoal.model.drafters.files import (
    DrafterConfig,
    fingerprint,
    tokenizer_hash,
    write,
)
from shoal.plan.saved import check_device, read_report
from shoal.train.drafters.calibrate import calibrate
from shoal.train.drafters.features import Features, prepare_features
from shoal.train.drafters.protocols import DrafterLearner, DrafterPart
from shoal.train.drafters.states import load_state, save_state
from shoal.train.layout import RunDir
from shoal.train.optimizers.eager import EagerAdamW

Watch = Callable[[dict[str, Any]], None]

_STATE = "state.safetensors"
# The first steps pay for page faults and thread pools.
_WARM_UP = 3


def execute(
    plan: DrafterPlan,
    run_dir: Path,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    anyway: bool = False,
) -> DrafterReport:
    """Run a plan on this host.

    Args:
        plan: what to run.
        run_dir: directory of the run; the drafter is written to ``drafter`` in it.
        resume: go on from the state that lies there.
        watch: called with every event.
        anyway: run on the CPU what was planned for GPUs; nothing of it is scored.

    Raises:
        ShoalError: the run cannot start, or a file cannot be read or written.
    """
    job, directory = plan.job, RunDir(run_dir)
    check_device(plan.machine, "cpu", f"the plan of {job.name}", anyway=anyway)
    part: DrafterPart = table("drafter").build(job.drafter, where="drafter")
    part.check(job, plan.shape)
    if directory.plan.exists() and not resume:
        raise ConfigError(
            f"{run_dir}: already contains a run; continue it with --resume, or choose another "
            "name with --set name=..."
        )
    if resume and directory.plan.exists() and DrafterPlan.load(directory.plan).job != job:
        raise ConfigError(
            f"{run_dir}: contains a run of another job; give that job, or another --dir"
        )
    if resume and (before := read_report(directory.report, plan)) is not None:
        assert isinstance(before, DrafterReport)
        if watch is not None:
            watch({"kind": "finished", "step": job.steps})
        return before
    where = Path(job.model)
    if not where.is_dir():
        raise ModelError(
            f"model = {job.model}: no such directory; a drafter is trained for a model that is "
            "trained itself: give its Hugging Face directory"
        )
    Score().register(run_dir, "drafter", job.name, job.model)
    plan.save(directory.plan, header="The plan of the run, with its prediction.")
    with (
        torch_threads(job.threads),
        Meter([SINKS.build({"name": "jsonl", "path": str(directory.events)})]) as meter,
    ):

        def tell(kind: str, **fields: Any) -> None:
            meter.event(kind, **fields)
            if watch is not None:
                watch({"kind": kind, **fields})

        def progress(*state: Any) -> None:
            if watch is not None:
                watch({"kind": "prepare", "state": state})

        measured, calibration = _run(plan, part, directory, tell, progress, resume)
    return _conclude(plan, directory, measured, calibration)


def _run(
    plan: DrafterPlan,
    part: DrafterPart,
    directory: RunDir,
    tell: Callable[..., None],
    progress: Callable[..., None],
    resume: bool,
) -> tuple[dict[str, float], tuple[tuple[float, ...], ...]]:
    job, where = plan.job, Path(plan.job.model)
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    target = huggingface.read(where, dtype, packed=False).requires_grad_(False).eval()
    mark, words = fingerprint(where), tokenizer_hash(where)
    begun = time.perf_counter()
    features = prepare_features(job, target, fingerprint=mark, tokenizer=words, progress=progress)
    features_s = time.perf_counter() - begun
    tell(
        "features",
        path=str(features.path),
        seconds=features_s,
        sequences=features.index.train,
        target=mark,
    )
    learner = part.begin(target, job)
    config = target.config
    measured = train_steps(
        job, features, learner, state=directory.root / _STATE, resume=resume, tell=tell
    )
    learner.net.eval()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        calibration = calibrate(learner, features, dtype, part.levels(), progress)
    for level, shares in enumerate(calibration):
        tell("level", level=level, right=shares[0], among_first=sum(shares))
    new = learner.finish(directory.root)
    stored = DrafterConfig(
        name=job.drafter.name,
        options=job.drafter.options,
        target=mark if new is None else fingerprint(new),
        tokenizer=words,
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        calibration=calibration,
    )
    drafter = directory.root / "drafter"
    shutil.rmtree(drafter, ignore_errors=True)
    write(drafter, stored, {name: value.to(dtype) for name, value in learner.state().items()})
    measured["features_s"] = features_s
    if "total_s" in measured:
        measured["total_s"] += features_s
    measured["drafter_bytes"] = float((drafter / "drafter.safetensors").stat().st_size)
    tell("end", step=job.steps)
    return measured, calibration


def train_steps(
    job: DrafterJob,
    features: Features,
    learner: DrafterLearner,
    *,
    state: Path,
    resume: bool,
    tell: Callable[..., None],
) -> dict[str, float]:
    """All steps of a job, or those that are left of it.

    Args:
        job: how many, of what.
        features: what is read.
        learner: is trained.
        state: file to go on from.
        resume: go on from it if it is there.
        tell: called with every event.

    Returns:
        What was measured.

    Raises:
        NonFiniteError: the loss or a gradient is not; nothing is updated.
    """
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    groups = [{"params": list(given), "lr": lr} for given, lr in learner.groups()]
    optimizer = EagerAdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    course = table("lr_schedule").build(job.lr_schedule, where="lr_schedule")
    first = load_state(state, learner.net, optimizer) if resume and state.is_file() else 0
    count = sum(parameter.numel() for parameter in trained)
    tell("start", step=first, total=job.steps, resumed=first > 0, parameters=count, ranks=1)
    seconds: list[float] = []
    loss = float("nan")
    learner.net.train()
    step = first
    try:
        for step in range(first, job.steps):
            begun = time.perf_counter()
            rows = features.rows("train", _numbers(job, features.index.train, step), dtype)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * course.factor(step, job.steps)
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                value = learner.loss(rows, step=step, total=job.steps)
            value.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(trained, job.grad_clip or float("inf"))
            loss = float(value.detach())
            if not (math.isfinite(loss) and math.isfinite(float(norm))):
                raise NonFiniteError(
                    f"step {step}: the loss is {loss} and the norm of the gradients {float(norm)}; "
                    "lower the drafter's lr or use precision: fp32, and begin again"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - begun)
            tell(
                "step",
                step=step,
                loss=loss,
                grad_norm=float(norm),
                lr=optimizer.param_groups[0]["lr"],
                step_s=seconds[-1],
                tokens_per_s=job.batch * job.seq_len / seconds[-1],
                memory_bytes=_memory(),
            )
            if (step + 1) % job.save_every == 0 and step + 1 < job.steps:
                save_state(state, learner.net, optimizer, step + 1)
    except KeyboardInterrupt:
        save_state(state, learner.net, optimizer, step)
        raise
    save_state(state, learner.net, optimizer, job.steps)
    steady = seconds[_WARM_UP:] or seconds or [float("nan")]
    middle = statistics.median(steady)
    return {
        "step_s": middle,
        "tokens_per_s": job.batch * job.seq_len / middle,
        # Steps of an earlier start are not timed here.
        **({} if first else {"total_s": sum(seconds)}),
        "steps": float(len(seconds)),
        "loss": loss,
        "memory_bytes": float(_memory()),
    }


def _memory() -> int:
    """Peak bytes of the process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _numbers(job: DrafterJob, count: int, step: int) -> list[int]:
    """The sequences of a step: every one once an epoch, in an order of the epoch's own."""
    numbers = []
    for sample in range(step * job.batch, (step + 1) * job.batch):
        epoch, place = divmod(sample, count)
        numbers.append(int(Permutation(count, job.seed, epoch)(torch.tensor([place]).numpy())[0]))
    return numbers


def _conclude(
    plan: DrafterPlan,
    directory: RunDir,
    measured: dict[str, float],
    calibration: tuple[tuple[float, ...], ...],
) -> DrafterReport:
    from shoal.machine.fingerprint import versions

    report = DrafterReport(
        plan=plan,
        measured=measured,
        # A drafter is trained on the CPU, whatever the machine has.
        errors=errors_of(plan, measured) if plan.machine.device.kind == "cpu" else {},
        details={"calibration": [list(level) for level in calibration]},
        versions=versions(),
        device="cpu",
    )
    write_json(directory.report, report.model_dump(mode="json"))
    Score().append(report, directory.root)
    return report
