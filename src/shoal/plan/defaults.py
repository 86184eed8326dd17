"""What a job is where its user has left it open, for all ways in: flags, YAML, Python, pages.

The defaults of :class:`~shoal.ir.TrainJob` and :class:`~shoal.ir.ServeJob` suit a small model on a
CPU. On accelerators these hold in their place.
"""

from __future__ import annotations

from typing import Any

from shoal.core.config import completed
from shoal.core.traits import traits
from shoal.cost.arithmetic import parameters
from shoal.cost.shapes import resolve, shape_of
from shoal.cost.training.totals import steps_of
from shoal.ir import Machine, ServeJob, TrainJob
from shoal.plan.length import DEFAULT_STEPS

REASON = "default for this machine"

_SEQ_LEN = 4096
_BATCH = 128
# A batch is smaller where its tokens would make fewer steps than these.
_LEAST_STEPS, _LEAST_BATCH = 100, 8
# Of Llama 3: 3e-4 for 8 B; the power meets 1.5e-4 for 70 B and 8e-5 for 405 B within 5 %.
_LR, _LR_SIZE, _LR_POWER = 3e-4, 8e9, 0.34
_MOST_LR, _FINETUNE_LR = 3e-3, 2e-4


def training_defaults(job: TrainJob, machine: Machine) -> dict[str, Any]:
    """Dotted path -> value of what a training job on a machine usually is.

    A job without a length takes 1,000 steps. Sequences are as long as the model reads, 4,096 tokens
    at most. A batch has 128 of them, or one a device where there are more devices; it is halved
    while the tokens of the job make fewer than 100 steps. AdamW's peak learning rate is that of
    Llama 3 for its 8, 70 and 405 B and a power of the size between (Grattafiori et al., The Llama 3
    Herd of Models, 2024, table 3); 2e-4 where a model is fine-tuned (Dettmers et al., QLoRA, 2023,
    table 9).
    """
    length: dict[str, Any] = {} if steps_of(job) or job.minutes else {"steps": DEFAULT_STEPS}
    if machine.device.kind != "gpu":
        names = ("seq_len", "global_batch")
        return length | {name: TrainJob.model_fields[name].default for name in names}
    given = job.model_fields_set
    longest = shape_of(job).max_position
    seq_len = job.seq_len if "seq_len" in given else min(_SEQ_LEN, longest)
    batch = max(_BATCH, machine.num_devices)
    if job.tokens is not None:
        while batch > _LEAST_BATCH and job.tokens < _LEAST_STEPS * batch * seq_len:
            batch //= 2
    usual = {
        **length,
        "seq_len": seq_len,
        "global_batch": batch,
        "checkpoint.every": "auto",
        "checkpoint.mode": "snapshot",
    }
    if "lr_by_size" in traits("optimizer", job.optimizer):
        usual["optimizer.lr"] = _FINETUNE_LR if job.finetune is not None else _lr(job)
    return usual


def _lr(job: TrainJob) -> float:
    """Peak learning rate of a model that is trained from the start, to two digits."""
    lr = min(_MOST_LR, _LR * (_LR_SIZE / parameters(shape_of(job))) ** _LR_POWER)
    return float(f"{lr:.1e}")


def serving_defaults(job: ServeJob, machine: Machine) -> dict[str, Any]:
    """Dotted path -> value of what a serving job on a machine usually is.

    An accelerator needs more tokens in a step than a CPU to be busy, and holds weights in the
    format in which the model is published.
    """
    if machine.device.kind != "gpu":
        return {}
    return {"max_step_tokens": 8192, "max_running": 256, "weights": resolve(job.model).weights}


def settled_training(job: TrainJob, machine: Machine) -> TrainJob:
    """The job with everything that its user has left to the defaults of a machine."""
    return completed(job, training_defaults(job, machine))


def settled_serving(job: ServeJob, machine: Machine) -> ServeJob:
    """The job with everything that its user has left to the defaults of a machine."""
    return completed(job, serving_defaults(job, machine))
