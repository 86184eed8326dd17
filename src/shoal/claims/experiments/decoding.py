"""What the claims of speculative decoding share: the target, its prompts, answers compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.claims.bench.decode import DecodeBatchResult, distinct_runs, held_out_prompts, regular
from shoal.claims.experiments import tiny
from shoal.claims.protocols import ExperimentContext, PairedSamples
from shoal.core.errors import require
from shoal.core.parts import Choice

TARGET = "shoal-27m"


def target_of(context: ExperimentContext) -> Path:
    """The directory of the target: the user's, or the mini-model, trained if it is not there."""
    from shoal.train import zoo

    def make() -> Path:
        if context.model is not None:
            return Path(context.model)
        return zoo.trained(TARGET, lambda line: context.progress(line, 0.05))

    return context.remember("target", make)


def corpus_of(context: ExperimentContext) -> Choice:
    """The text that prompts are taken from."""
    from shoal.train import zoo

    if context.data is None and context.model is None:
        return zoo.corpus(TARGET)
    return tiny.corpus_of(context.data)


def prompts_of(context: ExperimentContext, count: int, length: int, after: int) -> list[list[int]]:
    """Held-out prompts for the target."""
    return context.remember(
        f"prompts {count} {length} {after}",
        lambda: held_out_prompts(
            target_of(context), corpus_of(context), count, length, after=after, seed=context.seed
        ),
    )


def seconds_per_token(
    method: Sequence[Sequence[DecodeBatchResult]], plain: Sequence[Sequence[DecodeBatchResult]]
) -> tuple[PairedSamples, list[int]]:
    """Seconds a token of whole rounds, method and plain, loops left out; and which were kept.

    Raises:
        ConfigError: every answer is a loop.
    """
    places = regular(plain[0])
    require(
        bool(places),
        "--model",
        "a model whose every answer repeats itself",
        expected="one with answers that do not, whose tokens can be timed",
    )

    def each(rounds: Sequence[Sequence[DecodeBatchResult]]) -> tuple[float, ...]:
        return tuple(
            sum(one[place].seconds for place in places) / sum(one[place].count for place in places)
            for one in rounds
        )

    return PairedSamples(method=each(method), baseline=each(plain)), places


def drafter_of(
    context: ExperimentContext,
    kind: str,
    *,
    tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Path:
    """The directory of a drafter for the target, trained if it is not there."""
    from shoal.train.zoo.drafters import drafter

    def make() -> Path:
        say = lambda line: context.progress(line, 0.1)  # noqa: E731
        return drafter(kind, target_of(context), tokens=tokens, seed=seed, say=say, **options)

    return context.remember(f"drafter {kind} {tokens} {seed} {sorted(options.items())}", make)


def summarize(answers: Sequence[DecodeBatchResult]) -> dict[str, float]:
    """What answers of one method were like, over all of them."""
    steps = sum(one.steps for one in answers)
    return {
        "tokens_per_step": sum(one.count - len(one.tokens) for one in answers) / max(1, steps),
        "tokens_per_s": sum(one.count for one in answers) / sum(one.seconds for one in answers),
        "nodes_per_step": sum(one.nodes for one in answers) / max(1, steps),
        "distinct_4_grams": float(
            np.mean([distinct_runs(tokens) for one in answers for tokens in one.tokens])
        ),
    }


def peer_rates(
    target: Path, prompts: Sequence[Sequence[int]], new_tokens: int, ours: Callable[[int], float]
) -> PairedSamples:
    """Tokens per s of plain greedy decoding by our engine and by transformers, prompt by prompt."""
    import time

    import torch
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()

    def theirs(prompt: Sequence[int]) -> float:
        fed = torch.tensor([list(prompt)])
        began = time.perf_counter()
        with torch.no_grad():
            peer.generate(
                fed,
                attention_mask=torch.ones_like(fed),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    theirs(prompts[0])
    pairs = [(ours(place), theirs(prompt)) for place, prompt in enumerate(prompts)]
    return PairedSamples(
        method=tuple(new_tokens / mine for mine, _ in pairs),
        baseline=tuple(new_tokens / other for _, other in pairs),
    )


def root_path(tokens: np.ndarray, parent: Sequence[int], row: int) -> list[int]:
    """Tokens from the root's child down to a row of a tree."""
    numbers: list[int] = []
    while row > 0:
        numbers.append(int(tokens[row]))
        row = parent[row]
    return numbers[::-1]
