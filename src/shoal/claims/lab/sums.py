"""A mini-model of workers who share out sums: claim an unclaimed one, write its result.

A prompt has k sums of two digits. Workers write at once; each claims a sum by its label, writes
the digits of its result, and goes on with another. Which one is left to chance, so that a worker
who sees no other claims what others have claimed, too. In training they write at own speeds
and see what the others have written so far; some of the texts have a single worker.

There are few sums at first: a model that has to look for two digits among two learns addition in
some steps, and then to look among more.

Source of the task: Rodionov et al., Hogwild! Inference, 2025, section 4, made small.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.files import shoal_home, write_json
from shoal.core.random import generator
from shoal.model.config import ModelConfig

if TYPE_CHECKING:
    from shoal.claims.lab.concurrent import ConcurrentText
    from shoal.model.transformer import Transformer

MOST = 8
"""Most sums of a prompt."""

_BEGIN, _GO, END = 0, 1, 4
TAGS = (2, 3)
"""The tokens that workers begin with."""

# A label for each sum, ten digits, and the addends: which sum, first or second, which digit.
_LABEL = 5
_DIGIT = _LABEL + MOST
_ADDEND = _DIGIT + 10

CONFIG = ModelConfig(
    name="shoal-sums-3m",
    vocab_size=_ADDEND + 20 * MOST,
    hidden=192,
    num_layers=6,
    num_heads=6,
    num_kv_heads=6,
    head_dim=32,
    ffn_hidden=512,
    max_position=256,
    tied=True,
    eos_token_id=END,
)

# Three minutes on two quiet cores.
_STEPS, _TOKENS, _LR, _WARM = 800, 1900, 2e-3, 50
_ALONE = 0.25


@dataclass(frozen=True, slots=True)
class SumsProblem:
    """Tokens of a prompt; label of each sum -> what is written for it, label and digits."""

    prompt: tuple[int, ...]
    results: dict[int, tuple[int, ...]]


def problem(source: np.random.Generator, number: int) -> SumsProblem:
    """A prompt with so many sums, at most :data:`MOST`."""
    prompt, results = [_BEGIN], {}
    for place in source.permutation(MOST)[:number].tolist():
        a, b = source.integers(0, 10, 2).tolist()
        prompt += [_ADDEND + 20 * place + a, _ADDEND + 20 * place + 10 + b]
        digits = [_DIGIT + int(digit) for digit in str(a + b)]
        results[_LABEL + place] = (_LABEL + place, *digits)
    return SumsProblem((*prompt, _GO), results)


def read(given: SumsProblem, tokens: list[int]) -> list[tuple[int, int]]:
    """The sums that a worker has done right: label, and how many tokens it had written then."""
    done = []
    for place, token in enumerate(tokens):
        result = given.results.get(token)
        if result is not None and tuple(tokens[place : place + len(result)]) == result:
            done.append((token, place + len(result)))
    return done


def written(
    source: np.random.Generator, given: SumsProblem, workers: tuple[int, ...]
) -> ConcurrentText:
    """What these of the two workers write, each at a speed of its own.

    A worker chooses its next token when it has written one, by all that is written then.
    """
    from shoal.claims.lab.concurrent import ConcurrentText

    tokens: list[list[int]] = [[] for _ in TAGS]
    steps: list[list[int]] = [[] for _ in TAGS]
    coming: dict[int, list[int]] = {worker: [TAGS[worker]] for worker in workers}
    speed = source.uniform(0.4, 1.0, len(TAGS)) if source.random() < 0.5 else np.ones(len(TAGS))
    begins = source.integers(0, 4, len(TAGS))
    claimed: set[int] = set()
    now = 0
    while coming:
        writing = [w for w in coming if now >= begins[w] and source.random() < speed[w]]
        for worker in writing:
            token = coming[worker].pop(0)
            tokens[worker].append(token)
            steps[worker].append(now)
            claimed.add(token)
        for worker in writing:
            if tokens[worker][-1] == END:
                del coming[worker]
            elif not coming[worker]:
                left = [label for label in given.results if label not in claimed]
                chosen = given.results[left[source.integers(len(left))]] if left else (END,)
                coming[worker] = list(chosen)
        now += 1
    return ConcurrentText(given.prompt, tokens, steps)


def _train(seed: int, tell: Callable[[str], None]) -> Transformer:
    import torch

    from shoal.claims.lab.concurrent import batch_of, loss_of
    from shoal.train.zoo import random

    model = random(CONFIG, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    for step in range(_STEPS):
        source = generator(seed, purpose="sums", step=step)
        share = step / _STEPS
        most = min(MOST, 1 + int(2 * MOST * share))
        number = MOST if share > 0.6 else int(source.integers(1, most + 1))
        texts = []
        for _ in range(_TOKENS // (8 + 8 * number)):
            alone = (int(source.integers(2)),) if source.random() < _ALONE else (0, 1)
            texts.append(written(source, problem(source, number), alone))
        for group in optimizer.param_groups:
            course = 0.5 * (1 + np.cos(np.pi * share)) * 0.95 + 0.05
            group["lr"] = _LR * min(1.0, (step + 1) / _WARM) * course
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch_of(texts))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            tell(f"{CONFIG.name}: step {step} of {_STEPS}, loss {loss.item():.3f}")
    return model.requires_grad_(False).eval()


def _place(seed: int) -> Path:
    recipe = (CONFIG.model_dump_json(), _STEPS, _TOKENS, _LR, _WARM, _ALONE, seed)
    digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    return shoal_home() / "zoo" / f"{CONFIG.name}-{digest}"


def trained(seed: int = 0, *, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The directory of the trained model; trains it if it is not there yet.

    Args:
        seed: of weights and texts.
        progress: receives how far it is, and how long it took, which ``training.json`` beside the
            weights says too.
    """
    from shoal.model import huggingface

    place = _place(seed)
    if (place / "config.json").is_file():
        return place
    started = time.perf_counter()
    model = _train(seed, progress)
    took = time.perf_counter() - started
    huggingface.write(place, model)
    write_json(place / "training.json", {"seconds": took})
    progress(f"{CONFIG.name}: trained in {took:.0f} s")
    return place
