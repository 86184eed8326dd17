"""What a step takes beside the model, and what equal bits cost: rows of ``serving.py``."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from common import Row
from torch import Tensor

from shoal.core.measure import bootstrap, interleave
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.model.config import ModelConfig
from shoal.serve.engine import runner as runners
from shoal.serve.engine.build import engine_of, prepare
from shoal.train import zoo

# The shape of the comparison with other engines.
SHAPE = ModelConfig(
    vocab_size=8192,
    hidden=1024,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden=2816,
    max_position=2048,
)
RUNNING, PROMPT, STEPS = 64, 256, 300


class Instant:
    """A model that computes nothing: what remains of a step is the engine's own work."""

    def __init__(self, model: Any) -> None:
        self.config, self.weight = model.config, model.weight
        self._hidden_RD = torch.zeros(RUNNING, model.config.hidden)
        self._logits_RV = torch.randn(RUNNING, model.config.vocab_size)

    def flat(self, tokens: Tensor, positions: Tensor, mixer: Any, rows: Tensor | None) -> Tensor:
        """See :class:`~shoal.serve.engine.runner.FlatModel`."""
        return self._hidden_RD[: len(tokens)]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See :class:`~shoal.serve.engine.runner.FlatModel`."""
        return self._logits_RV[: len(hidden_RD)]


def scheduling() -> list[Row]:
    """Planning, tensors and committing of steps in which 64 requests generate."""
    job = ServeJob(model="instant", kv_tokens=RUNNING * 1024, max_step_tokens=512, threads=1)
    model = zoo.random(SHAPE.model_copy(update={"num_layers": 1}))
    engine, _, runner = engine_of(job, prepare(job, model))
    runner.model = Instant(model)
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            spent[name] += time.perf_counter() - begin
            return result

        return run

    scheduler: Any = engine.scheduler
    scheduler.plan = timed("plan", scheduler.plan)
    scheduler.commit = timed("commit", scheduler.commit)
    runner.execute = timed("execute", runner.execute)  # type: ignore[method-assign]
    choose = runners.choose
    runners.choose = timed("choose", choose)
    try:
        for number in range(RUNNING):
            prompt = [(7 * number + place) % SHAPE.vocab_size for place in range(PROMPT)]
            params = SamplingParams(max_tokens=STEPS + 50)
            engine.add(Request(str(number), prompt, PROMPT, params))
        while sum(chunk.length == 1 for chunk in engine.last_chunks) < RUNNING:
            engine.step()
        samples: dict[str, list[float]] = {name: [] for name in ("all", "plan", "commit", "choose")}
        for _ in range(STEPS):
            spent.clear()
            begin = time.perf_counter()
            engine.step()
            spent["all"] = time.perf_counter() - begin - spent["choose"]
            for name, taken in samples.items():
                taken.append(1e3 * spent[name])
    finally:
        runners.choose = choose
    middle = {name: statistics.median(taken) for name, taken in samples.items()}
    every = bootstrap(samples["all"])
    tensors = middle["all"] - middle["plan"] - middle["commit"]
    return [
        Row(
            name="scheduling overhead of a step, 64 requests generate",
            value=every.value,
            low=every.low,
            high=every.high,
            unit="ms",
            comparison="<=",
            threshold=1.0,
            note=f"the real engine's loop with a model that computes nothing: planning "
            f"{middle['plan']:.3f} ms, committing {middle['commit']:.3f} ms, the tensors of the "
            f"step and all the rest {tensors:.3f} ms; choosing tokens, {middle['choose']:.3f} ms, "
            f"is the model's side and not in it; fcfs, paged, contexts of {PROMPT} to "
            f"{PROMPT + STEPS} tokens; median of {STEPS} steps",
            samples={f"{name}_ms": taken for name, taken in samples.items()},
        )
    ]


def _decoding(model: ModelConfig | str, precision: str, batch: int, *, exact: bool) -> Any:
    """A run of so many steps with so many requests."""
    job = ServeJob.model_validate(
        {"model": "m", "kv_tokens": 8192, "precision": precision, "exact": exact}
    )
    engine, _, _ = engine_of(job, prepare(job, zoo.random(model)))
    turn = 0

    def run() -> None:
        nonlocal turn
        turn += 1
        for number in range(batch):
            prompt = [(7 * number + 31 * turn + place) % 4096 for place in range(32)]
            engine.add(Request(f"{turn}.{number}", prompt, 32, SamplingParams(max_tokens=33)))
        while engine.busy:
            engine.step()

    return run


def exact(rounds: int) -> list[Row]:
    """Time of the exact mode over that of the fastest kernels, alone and with eight at once."""
    rows = []
    for name, model, precision in (
        ("205.6 M, bf16", SHAPE, "bf16"),
        ("shoal-16m, fp32", "shoal-16m", "fp32"),
    ):
        for batch in (1, 8):
            paired = interleave(
                {
                    "fast": _decoding(model, precision, batch, exact=False),
                    "exact": _decoding(model, precision, batch, exact=True),
                },
                rounds,
            )
            price = paired.ratio("exact", "fast")
            speed = {one: 33 * batch / paired.median(one).value for one in ("fast", "exact")}
            rows.append(
                Row(
                    name=f"time of the exact mode, {name}, batch {batch}",
                    value=price.value,
                    low=price.low,
                    high=price.high,
                    unit="x",
                    comparison="<=",
                    threshold=3.0,
                    note=f"prompts of 32 and answers of 33 tokens: {speed['exact']:,.0f} tokens/s "
                    f"exact, {speed['fast']:,.0f} with the fastest kernels; {rounds} rounds",
                    samples={f"{key}_s": list(value) for key, value in paired.seconds.items()},
                )
            )
    return rows
