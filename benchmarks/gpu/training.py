"""Training 1 B parameters: bf16, and products in fp8 by torchao, with the share of the peak (MFU).

Shoal's loop runs its own plan; beside it a bare PyTorch loop trains the same model on as many
tokens, compiled and with the fused AdamW. fp8 stands beside bf16.
Prediction: the plan's step time; for fp8 that of torchtitan, whose products these are.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu.frame import ROOT, Case, NotHereError
from gpu.models import DeviceWeights
from gpu.place import Place, free
from gpu.timing import elapsed, in_turn, judged
from gpu.training_peers import bare, to_fp8
from shoal.core.meter import Meter
from shoal.corpora.tokens import TokenSet, prepare
from shoal.ir import TrainJob, TrainPlan
from shoal.parallel.comm.collectives import TorchComm
from shoal.plan.strategy import PLANNERS
from shoal.train.build import weights_of
from shoal.train.loop import RankTrainer
from shoal.train.mfu import step_flops
from shoal.train.planning import plan_job

NEEDS = ("torch",)


FULL, TINY = ("Llama-3.2-1B", 2048, 8), ("shoal-1m", 16, 2)


def job(size: tuple[str, int, int], **more: Any) -> TrainJob:
    """The job of all methods: of a model, with so many tokens of so many sequences a step."""
    model, length, batch = size
    given = {"model": model, "seq_len": length, "global_batch": batch, "steps": 10_000}
    given |= {"precision": "bf16", "compile": size is FULL, "parallel": {"dp": 1}}
    return TrainJob.model_validate({**given, **more})


def cases(place: Place) -> Iterator[Case]:
    """bf16, then fp8."""
    for precision in ("bf16", "fp8"):
        yield Case(f"training, {precision}", 200.0, functools.partial(_predict, place, precision),
                   functools.partial(_measure, place, precision))  # fmt: skip


def _predict(place: Place, precision: str) -> dict[str, Any]:
    """Of the full size, in a dry run too."""
    made = plan_job(job(FULL), place.machine)
    if precision == "fp8":
        wanted = job(FULL, precision="fp8", engine="torchtitan")
        made = PLANNERS.build("search").plan(wanted, place.machine)[0]
    step_s = made.estimate.step_s
    share = mfu(place, made, step_s.value, precision)
    return {"seconds": step_s.value, "low": step_s.low, "high": step_s.high, "mfu": share}


def mfu(place: Place, made: TrainPlan, seconds: float, precision: str) -> float:
    """Useful operations over the data sheet's rate of the precision."""
    peak = place.machine.device.peak_flops
    return step_flops(made) / seconds / (peak.get(precision) or peak["bf16"])


def _measure(place: Place, precision: str) -> dict[str, Any]:
    made = plan_job(job(place.pick(FULL, TINY)), place.machine)
    if precision == "fp8":
        if importlib.util.find_spec("torchao") is None:
            raise NotHereError("torchao is not installed")
        methods = {"fp8": trainer(place, made, fp8=True), "bf16": trainer(place, made)}
    else:
        methods = {"shoal": trainer(place, made), "bare loop": bare(place, made)}
    result = judged(in_turn(place, methods, rounds=7, warmup=3))
    methods.clear()
    free()
    tokens = made.job.global_batch * made.job.seq_len
    more = {"mfu": mfu(place, made, result["seconds"], precision)}
    more["tokens_per_s"] = tokens / result["seconds"]
    if not place.dry:
        more["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated())
    return {**result, **more, "what": f"{made.job.model}, {tokens} tokens a step"}


def tokens_of(place: Place) -> TokenSet:
    """Text of this repository."""
    path, vocab = place.pick((ROOT / "docs", 4096), (ROOT / "README.md", 512))
    return prepare({"name": "text", "path": str(path)}, vocab_size=vocab, cache=place.scratch)


def trainer(place: Place, made: TrainPlan, *, fp8: bool = False) -> Callable[[], float]:
    """Seconds of a step of our loop on one rank."""
    comm = TorchComm(Meter([]), device=place.device)
    weights = DeviceWeights(weights_of(made.job).config, place.device)
    ours = RankTrainer(
        made.job, 10_000, weights, tokens_of(place), comm,
        device=place.device, place=place.scratch, machine=made.machine,
    )  # fmt: skip
    if fp8:
        to_fp8(ours.engine.whole)
    number = iter(range(10_000))
    return lambda: elapsed(place, lambda: ours.step(next(number)))
