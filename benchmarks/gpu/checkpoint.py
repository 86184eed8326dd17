"""How long a save holds training on a GPU up: our modes beside torch.distributed.checkpoint.

As ``benchmarks/checkpointing.py``, whose model and methods these are; every turn is a save and ten
steps, all waited for. A method's stall is by how much its turn is longer than one without a save.
Prediction: the mode's own estimate.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import checkpointing
import torch
import torch.distributed as dist

from gpu.frame import Case
from gpu.place import Place
from gpu.timing import elapsed, in_turn, judged
from shoal.checkpoint import SAVE_MODES
from shoal.ir import TrainJob, Work

NEEDS = ("torch",)
TOKENS = 2048


def cases(place: Place) -> Iterator[Case]:
    """A case a mode that saves beside training."""
    for mode in ("lazy", "snapshot"):
        yield Case(f"stall of a save, {mode}", 90.0, functools.partial(_predict, place, mode),
                   functools.partial(_measure, place, mode))  # fmt: skip


def _predict(place: Place, mode: str) -> dict[str, Any]:
    # Of the job only its split counts: one rank.
    work = Work(shape=checkpointing.SHAPE.shape(), job=TrainJob())
    estimate = SAVE_MODES.build(mode).estimate(work, place.machine)
    return {"seconds": sum(estimate.terms_s.values())}


def _measure(place: Place, mode: str) -> dict[str, Any]:
    steps, shape = place.pick((10, checkpointing.SHAPE), (1, checkpointing.SHAPE.model_copy(
        update={"hidden": 64, "num_layers": 1, "vocab_size": 64, "num_heads": 1,
                "num_kv_heads": 1, "ffn_hidden": 64})))  # fmt: skip
    trained = checkpointing.Trained(place.pick(TOKENS, 8), shape, place.device)
    size = sum(tensor.nbytes for tensor in trained.tensors().values())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with checkpointing.methods(mode, "none", *checkpointing.PEERS, device=place.device) as made:
            turns = {name: _turn(place, trained, one, steps) for name, one in made.items()}
            result = judged(in_turn(place, turns, rounds=5, warmup=1))
    finally:
        dist.destroy_process_group()
    samples = result.pop("samples")
    stalls = {
        name: [a - b for a, b in zip(taken, samples["none"], strict=True)]
        for name, taken in samples.items()
        if name != "none"
    }
    middle = {name: statistics.median(taken) for name, taken in stalls.items()}
    # The stall of the mode is what was predicted; ratios are of whole turns.
    return {
        "seconds": middle[mode],
        "turn_s": result["seconds"],
        "beside": result["beside"],
        "stalls": middle,
        "samples": samples,
        "what": f"{size / 1e9:.2f} GB of state, {steps} steps of {TOKENS} tokens a save",
    }


def _turn(place: Place, trained: Any, method: Any, steps: int) -> Callable[[], float]:
    number = iter(range(1, 10_000))

    def work() -> None:
        trained.before_update = method.before_update
        method.save(next(number), trained.tensors())
        for _ in range(steps):
            trained.step()

    def run() -> float:
        seconds = elapsed(place, work)
        method.drain()
        if not place.dry:
            torch.cuda.synchronize()
        return seconds

    return run
