"""What several emitters need: refusals, ranks of a node, headers and shell words."""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from shoal.core.errors import PlanError, require
from shoal.core.files import expanded
from shoal.core.parts import Choice, table
from shoal.core.sizes import human_bytes
from shoal.core.traits import traits
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.step import Pricer
from shoal.cost.training.totals import steps_of
from shoal.ir import Job, ServePlan, TrainJob, TrainPlan, Work

_P = TypeVar("_P", TrainPlan, ServePlan)


def allowed(plan: TrainPlan | ServePlan, kind: type[_P], name: str, reasons: Iterable[str]) -> _P:
    """The plan, if it is of the kind that the engine runs and nothing of it is refused.

    Raises:
        PlanError: it is not; the message lists every reason.
    """
    if not isinstance(plan, kind):
        given, does = ("serving", "trains") if kind is TrainPlan else ("training", "serves")
        raise PlanError(
            f"--emit {name}: this is a {given} plan, and {name} {does}; shoal plan train emits "
            "torchtitan, megatron, deepspeed and accelerate, shoal plan serve vllm, sglang and "
            "llamacpp"
        )
    result = list(reasons)
    if not plan.fits:
        result.append("fits = False: no rank has the memory; see the plan's notes for what would")
    if result:
        raise PlanError(f"--emit {name}: {name} cannot run this plan: {'; '.join(result)}")
    return plan


def check_host(name: str, host: str) -> None:
    """Refuse what is no address to listen on.

    Raises:
        ConfigError: it is empty, or has characters that no address has.
    """
    require(
        re.fullmatch(r"[A-Za-z0-9.:_-]+", host) is not None,
        f"emit.{name}.host",
        host,
        expected="an address: 127.0.0.1 for this host alone, 0.0.0.0 for all that reach it",
    )


def unexpressed(
    job: Job, expresses: Mapping[str, Sequence[str]], reasons: Mapping[str, str] | None = None
) -> list[str]:
    """What an engine has no word for.

    Args:
        job: what was planned.
        expresses: path of a choice of the job -> parts that the engine has a word for.
        reasons: path -> why it has these alone.
    """
    results = []
    for path, names in expresses.items():
        chosen: Choice = functools.reduce(getattr, path.split("."), job)  # type: ignore[assignment]
        if chosen.name not in names:
            because = f"{reasons[path]}; " if reasons and path in reasons else ""
            others = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            results.append(f"{path} = {chosen.name}: {because}use {others}")
    return results


def refuses_train(
    plan: TrainPlan,
    expresses: Mapping[str, Sequence[str]],
    *,
    selective: bool = False,
    products: Sequence[str] = (),
    overlaps: Sequence[str] = ("none", "tile"),
) -> list[str]:
    """What no foreign trainer can express, and what this one has no word for.

    Args:
        plan: the plan.
        expresses: see :func:`unexpressed`; a schedule matters to pipelines alone, a context to
            shared sequences.
        selective: it can compute a part of a block again.
        products: types of products that it has beside those of the job's precision.
        overlaps: communication that may overlap with computation.
    """
    job, split = plan.job, plan.job.parallel
    results = []
    if plan.shape.architecture.says:
        kind = plan.shape.architecture.name or "moe"
        results.append(f"architecture: {kind}: use a plain model of its family")
    if job.layers:
        results.append("layers: groups of blocks with their own layout; plan without them")
    requests = {"sync": ("every_step",), "optimizer": ("adamw",), **expresses}
    if split.pp == 1:
        requests.pop("parallel.schedule", None)
    if split.cp == 1:
        requests.pop("parallel.context", None)
    elif "parallel.context" not in requests:
        results.append(f"parallel.cp = {split.cp}: use 1")
    if "learns_answers" in traits("corpus", job.data):
        results.append(f"data = {job.data.name}: its loss is on every token; give engine shoal")
    if job.finetune is not None:
        results.append(f"finetune = {job.finetune.name}: leave it out, or give engine shoal")
    if job.batching is not None:
        results.append(f"batching = {job.batching.name}: leave it out")
    if split.vocab_split == "pp":
        results.append("parallel.vocab = pp: use tp or none")
    if job.recompute == "stage" or (job.recompute == "selective" and not selective):
        results.append(f"recompute = {job.recompute}: use full or none")
    if job.products not in ("same", *products):
        results.append(f"products = {job.products}: use {' or '.join(('same', *products))}")
    if split.overlap not in overlaps:
        results.append(f"parallel.overlap = {split.overlap}: use {' or '.join(overlaps)}")
    results += unexpressed(job, requests)
    if max(split.chunks) > 1:
        results.append(f"parallel.expert_chunks = {split.chunks}: use 1")
    if split.expert_dispatch != "flat":
        results.append(f"parallel.expert_dispatch = {split.expert_dispatch}: use flat")
    if split.slices:
        results.append("parallel.gradient_slices: leave them out")
    if split.tp > 1 and split.vocab_split != "tp":
        results.append("parallel.vocab = none with tp > 1: use tp")
    results += _refuses_chunks(plan)
    return results


def _refuses_chunks(plan: TrainPlan) -> list[str]:
    """What is wrong with the stages of each rank: a plan by hand may have what no schedule has."""
    split = plan.job.parallel
    if split.pp == 1:
        return [] if split.vpp == 1 else [f"parallel.vpp = {split.vpp} with pp = 1: use 1"]
    # A part that is registered elsewhere may not say how many stages of a rank it orders.
    chunks = getattr(table("schedule").build(split.schedule), "chunks", None)
    result = []
    if chunks is not None and split.vpp != chunks:
        result.append(
            f"parallel.vpp = {split.vpp} with schedule = {split.schedule.name}: use {chunks}"
            + (", or schedule = interleaved" if chunks == 1 else "")
        )
    if split.stages and len(split.stages) != split.pp * split.vpp:
        result.append(
            f"parallel.stages = {len(split.stages)} numbers: give pp vpp = {split.pp * split.vpp}"
        )
    return result


def adamw(job: TrainJob) -> dict[str, float]:
    """Options of the job's AdamW by name."""
    part = table("optimizer").build(job.optimizer, where="optimizer")
    return {key: getattr(part, key) for key in ("lr", "beta1", "beta2", "eps", "weight_decay")}


def save_every(plan: TrainPlan) -> int:
    """Steps between two saves, as the plan was priced; 0 for one at the end."""
    every = plan.job.checkpoint.every
    if every != "auto":
        return every
    work, pricer = Work(shape=plan.shape, job=plan.job), Pricer(plan.machine)
    cost = plan.estimate or pricer.estimate(work)
    return pricer.saving(work, cost.step_s.value).every


def saves_behind(plan: TrainPlan) -> bool:
    """Whether saves go to disk while training goes on."""
    return "saves_behind" in traits("save_mode", plan.job.checkpoint.mode)


def rate_course(job: TrainJob) -> dict[str, float | str]:
    """Options of the learning rate's course, with its ``name``."""
    part = table("lr_schedule").build(job.lr_schedule, where="lr_schedule")
    keys = [key for key in ("warmup", "floor", "decay") if hasattr(part, key)]
    return {"name": job.lr_schedule.name, **{key: getattr(part, key) for key in keys}}


def warmup_steps(job: TrainJob) -> int:
    """Steps in which the learning rate rises."""
    return round(float(rate_course(job)["warmup"]) * (steps_of(job) or 0))


def accumulation(job: TrainJob) -> int:
    """Micro-batches of a rank in one step."""
    return job.global_batch // job.parallel.dp // microbatch_of(job)


def even_stages(layers: int, chunks: int) -> tuple[int, ...]:
    """Blocks of each stage, those with one more last but for the very last."""
    base, more = divmod(layers, chunks)
    # The last stage has the output layer beside its blocks.
    return tuple(base + (1 if chunks - 1 - more <= i < chunks - 1 else 0) for i in range(chunks))


def nodes_of(plan: TrainPlan | ServePlan) -> tuple[int, int]:
    """(nodes, ranks of each) on which the ranks run."""
    world = plan.job.parallel.world
    if plan.machine.device.kind == "cpu":
        each = math.ceil(world / plan.machine.nodes)
    else:
        each = min(world, plan.machine.devices_per_node)
    return math.ceil(world / each), each


def header(plan: TrainPlan | ServePlan, mark: str = "# ") -> str:
    """Comment lines: what this is and what was predicted."""
    lines = [f"{plan.job.model} on {plan.machine.name}, written by shoal plan."]
    if isinstance(plan, TrainPlan):
        split = plan.job.parallel
        lines.append(
            f"Split: dp={split.dp} tp={split.tp} pp={split.pp} cp={split.cp} ep={split.ep} "
            f"vpp={split.vpp}, shard {plan.job.shard}, recompute {plan.job.recompute}."
        )
        if plan.estimate is not None:
            step = plan.estimate.step_s
            lines.append(
                f"Predicted: {step.value:.4g} s a step (90 %: {step.low:.4g} to {step.high:.4g}), "
                f"{human_bytes(plan.estimate.memory_total)} a rank."
            )
    elif "tokens_per_s" in plan.predicted:
        rate = plan.predicted["tokens_per_s"]
        lines.append(
            f"Predicted: {rate.value:.4g} output tokens a second "
            f"(90 %: {rate.low:.4g} to {rate.high:.4g}) for the workload {plan.job.workload.name}."
        )
    lines.append("Measured: shoal score --import LOG --plan plan.yaml")
    return "".join(f"{mark}{line}\n" for line in lines)


def option(name: str, value: object = None) -> str:
    """One option as shell words, quoted where needed."""
    return name if value is None else f"{name} {shlex.quote(str(value))}"


def script(comment: str, words: Sequence[str], *, before: str = "") -> str:
    """A shell script that runs one command, one word group a line."""
    return f"#!/bin/sh\n{comment}set -eu\n{before}exec " + " \\\n  ".join(words) + "\n"


def torchrun(plan: TrainPlan) -> list[str]:
    """The words that start one process for each rank of a node.

    The script takes the node's number and the first node's address. Lost ranks are started again
    by torchrun, as often as ``RESTARTS`` says, and the trainer goes on from its last checkpoint.
    """
    nodes, ranks = nodes_of(plan)
    return [
        f'torchrun --nnodes {nodes} --nproc-per-node {ranks} --max-restarts "${{RESTARTS:-3}}"',
        '--node-rank "${1:-0}" --master-addr "${2:-127.0.0.1}" --master-port "${3:-29500}"',
    ]


def model_word(plan: TrainPlan | ServePlan) -> str:
    """A shell word for the model: its directory, or a variable that the user sets."""
    model, held = plan.job.model, ""
    if expanded(model).is_dir():
        return '"${MODEL:-' + model + '}"'
    published = ("plain", plan.shape.weights)
    if isinstance(plan, ServePlan) and plan.job.weights not in published and not quantized(plan):
        held = f", whose files hold the weights in {plan.job.weights}"
    return '"${MODEL:?set MODEL to the directory or Hugging Face name of ' + model + held + '}"'


def quantized(plan: ServePlan) -> dict[str, str]:
    """The option by which a server makes 8 bits of 16; other formats are read as they lie."""
    made = plan.job.weights == "fp8" and plan.shape.weights == "plain"
    return {"quantization": "fp8"} if made else {}
