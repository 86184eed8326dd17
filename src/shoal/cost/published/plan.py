"""A replayed row's prediction: what its open choices become, and what that gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.cost.gpu.device import GpuCalibration
from shoal.cost.published.fits import memory_bytes
from shoal.cost.published.quantity import reported
from shoal.cost.published.rows import TrainReplay
from shoal.cost.published.runs import PublishedRun, engine_as_run, job_of, machine_of
from shoal.cost.training.step import Pricer
from shoal.ir import Estimate, Work

_TENSOR = (1, 2, 4, 8)
_PIPELINE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MICRO = (1, 2, 4, 8, 16, 32, 64)
_CHUNKS = (1, 2, 3, 4)


@dataclass(frozen=True)
class PublishedPrediction:
    """What the model says of a row.

    Args:
        value: in the row's quantity.
        run: with every choice made.
        step: seconds by cause.
    """

    value: float
    run: PublishedRun
    step: Estimate


def _options(replay: TrainReplay) -> Iterator[PublishedRun]:
    run = replay.run
    shape, world = run.shape, run.devices
    splits = [run]
    if "degrees" in replay.open:
        splits = [
            replace(
                run,
                tp=tp,
                pp=pp,
                dp=world // tp // pp,
                sp=tp > 1 and run.engine.name[-4:] != "2021",
            )
            for tp in _TENSOR
            for pp in _PIPELINE
            if world % (tp * pp) == 0
            and shape.num_layers % pp == 0
            and shape.num_heads % tp == 0
            and run.global_batch % (world // tp // pp) == 0
        ]
    wide = "vpp" in replay.open or "degrees" in replay.open
    for split in splits:
        share = max(1, split.global_batch // split.dp)
        sizes = [m for m in _MICRO if share % m == 0] if "micro_batch" in replay.open else ()
        for size in sizes or (split.micro_batch,):
            for vpp in _CHUNKS if wide and split.pp > 1 else (split.vpp,):
                if vpp == 1 or shape.num_layers % (split.pp * vpp) == 0 or not wide:
                    yield replace(split, micro_batch=size, vpp=vpp)


def predict(replay: TrainReplay, k: GpuCalibration) -> PublishedPrediction:
    """The prediction for a row; open choices are the fastest that fit, or the nearest to fitting.

    It is the price of a plan by the same function, for the engine of the row.
    """
    options = list(_options(replay))
    if len(options) > 1:
        need = {option: memory_bytes(option) for option in options}
        fitting = [o for o in options if need[o] <= replay.gpu.capacity]
        options = fitting or [min(options, key=lambda o: need[o])]
    pricer = Pricer(
        machine_of(replay.gpu, replay.run.devices), engine_as_run(replay.run), constants=k
    )
    step, run = min(
        ((pricer.estimate(Work(shape=one.shape, job=job_of(one))), one) for one in options),
        key=lambda priced: priced[0].step_s.value,
    )
    peak = dict(replay.gpu.peak)["bf16"]
    return PublishedPrediction(reported(replay.row, run, step.step_s.value, peak), run, step)
