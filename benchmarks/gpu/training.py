"""Training 1 B parameters: bf16, and products in fp8 by torchao, with the share of the peak (MFU).

Shoal's loop runs its own plan; beside it a bare PyTorch loop trains the same model on as many
tokens, compiled and with the fused AdamW. fp8 stands beside bf16.
Prediction: the plan's step time; for fp8 that of torchtitan, whose products these are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from gpu.frame import ROOT, Case, NotHereError
from gpu.models import DeviceWeights
from gpu.place import Place
from gpu.timing import elapsed, in_turn, judged
from gpu.training_peers import bare, to_fp8
from shoal.core.meter import Meter
from shoal.corpora.tokens import TokenSet, prepare
from shoal.ir import TrainJob, TrainPlan
from shoal.parallel.comm.collectives import TorchComm
from shoal.parallel.tensor.rows import WeightSource
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
    if precision == "fp8" and importlib.util.find_spec("torchao") is None:
        raise NotHereError("torchao is not installed")
    made = plan_job(job(place.pick(FULL, TINY)), place.machine)
    weights = DeviceWeights(weights_of(made.job).config, place.device)
    with contextlib.ExitStack() as undo:
        ours = undo.enter_context(contextlib.closing(trainer(place, made, weights)))
        if precision == "bf16":
            methods = {"shoal": steps(place, ours), "bare loop": bare(place, made)}
        else:
            low = undo.enter_context(contextlib.closing(trainer(place, made, weights)))
            to_fp8(low.engine.whole)
            methods = {"fp8": steps(place, low), "bf16": steps(place, ours)}
        result = judged(in_turn(place, methods, rounds=7, warmup=3))
    tokens = made.job.global_batch * made.job.seq_len
    return {
        **result,
        "mfu": mfu(place, made, result["seconds"], precision),
        "tokens_per_s": tokens / result["seconds"],
        "what": f"{made.job.model}, {tokens} tokens a step",
    }


def tokens_of(place: Place) -> TokenSet:
    """Text of this repository."""
    path, vocab = place.pick((ROOT / "docs", 4096), (ROOT / "README.md", 512))
    return prepare({"name": "text", "path": str(path)}, vocab_size=vocab, cache=place.scratch)


def trainer(place: Place, made: TrainPlan, weights: WeightSource) -> RankTrainer:
    """Our loop on one rank, as planned."""
    return RankTrainer(
        made.job, 10_000, weights, tokens_of(place), TorchComm(Meter([]), device=place.device),
        device=place.device, place=place.scratch, machine=made.machine,
    )  # fmt: skip


def steps(place: Place, ours: RankTrainer) -> Callable[[], float]:
    """Seconds of its next step."""
    number = iter(range(10_000))
    return lambda: elapsed(place, lambda: ours.step(next(number)))
