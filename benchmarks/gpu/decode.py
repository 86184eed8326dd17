"""Decoding: Shoal's engine with recorded steps beside ``transformers`` with a static cache.

Both have random weights of one shape in bf16, prompts of one length and greedy choice, and both
give every token to their host. ``transformers`` compiles its forward pass for a static cache on a
GPU by itself. Times are those between two tokens of all requests, in the middle of the answers.
Prediction: the price of a serving step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu.frame import Case
from gpu.models import random_model
from gpu.place import Place
from gpu.timing import in_turn, judged
from gpu.transformers_peer import decoder, middle
from shoal.cost.shapes import find
from shoal.cost.step_cost.predicted import predicted_step_cost
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.model.config import ModelConfig
from shoal.serve.engine.build import engine_of, prepare

NEEDS = ("torch", "transformers")
BATCHES = (1, 256)


def sizes(place: Place) -> tuple[str, int, int]:
    """Shape, tokens of a prompt and of an answer."""
    return place.pick(("Llama-3.2-1B", 512, 64), ("shoal-1m", 6, 8))


def cases(place: Place) -> Iterator[Case]:
    """A case a size of batch."""
    for batch in place.pick(BATCHES, (2,)):
        yield Case(f"decode, batch {batch}", 240.0, functools.partial(_predict, place, batch),
                   functools.partial(_measure, place, batch))  # fmt: skip


def _predict(place: Place, batch: int) -> dict[str, Any]:
    name, prompt, answer = sizes(place)
    cost = predicted_step_cost(place.machine, find(name), "bf16")
    step_s = cost.seconds([(prompt + answer // 2, 1)] * batch)
    return {"seconds": step_s, "tokens_per_s": batch / step_s}


def _measure(place: Place, batch: int) -> dict[str, Any]:
    from transformers import __version__

    name, prompt, answer = sizes(place)
    methods = {
        "shoal": engine(place, batch),
        "transformers": decoder(place, find(name), batch, prompt, answer),
    }
    result = judged(in_turn(place, methods, rounds=5, warmup=2))
    rate = batch / result["seconds"]
    what = f"{name}, {prompt} + {answer} tokens, transformers {__version__}"
    return {**result, "tokens_per_s": rate, "what": what}


def engine(place: Place, batch: int) -> Callable[[], float]:
    """Median seconds of a step of single tokens of our engine."""
    name, prompt, answer = sizes(place)
    config = ModelConfig.from_shape(find(name))
    room = prompt + answer + 1
    job = ServeJob(
        model=name,
        precision="bf16",
        max_running=batch,
        max_position=room,
        max_step_tokens=batch * prompt,
        kv_tokens=batch * (room + 32),
    )
    config = config.model_copy(update={"max_position": max(room, 64)})
    model = random_model(config, place.device, torch.bfloat16)
    ours, _, runner = engine_of(job, prepare(job, model))
    number = 0

    def run() -> float:
        nonlocal number
        for row in range(batch):
            number += 1
            tokens = [(7 * number + 11 * at + row) % config.vocab_size for at in range(prompt)]
            params = SamplingParams(max_tokens=answer, temperature=0.0)
            ours.add(Request(id=str(number), tokens=tokens, n_prompt=prompt, params=params))
        seconds = []
        while ours.busy:
            begin = time.perf_counter()
            ours.step()
            seconds.append(time.perf_counter() - begin)
        # On a GPU steps of single tokens must be recorded: what is measured is that.
        captured = runner.hooks["recording"] if not place.dry else None
        if captured is not None and captured.reasons:
            raise RuntimeError(f"steps are not recorded: {captured.reasons}")
        return middle(seconds)

    return run
