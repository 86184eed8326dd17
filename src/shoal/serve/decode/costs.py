"""What rows and guesses cost on this machine: measured when an engine that guesses starts.

Steps of one request with chains of guesses under its last token stand for steps of as many rows of
any requests: the products see rows, whoever's they are, and they are what a step consists of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from shoal.ir import MAX_NODES, Chunk, Limits, Request, SamplingParams
from shoal.plan.trees.drafting import RowCosts
from shoal.serve.cache import PagedCache
from shoal.serve.decode.protocols import Guess, Seen, TokenTree, branches
from shoal.serve.decode.runner import SpeculativeRunner

__all__ = ["measure_costs"]

_ROWS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
_ROUNDS, _SECONDS = 15, 2.0
_CONTEXT = 256
# Nodes of trees that may take less time to draft than the largest.
_FEWER = (1, 2, 3, 4, 6, 8)


def measure_costs(
    runner: SpeculativeRunner,
    limits: Limits,
    *,
    rows: Sequence[int] = _ROWS,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> RowCosts:
    """Seconds of steps by their rows, and of guesses, interleaved; medians.

    Args:
        runner: whose model and drafter are measured; its cache is not touched.
        limits: of its scheduler.
        rows: numbers of rows to measure.
        seconds: about how long to measure; at least three rounds are made.
        clock: s.
    """
    cache = runner.cache
    room = limits.max_position
    context = max(1, min(_CONTEXT, room - MAX_NODES - 2))
    blocks = -(-(context + MAX_NODES + 1) // cache.block_size)
    config = runner.model.config
    own = PagedCache(
        config, blocks, cache.block_size, dtype=cache.dtype, device=cache.device, form=cache.form
    )
    measured = runner.over(own)
    tokens = [(7 * place) % config.vocab_size for place in range(context)]
    request = Request("measured", tokens, context, SamplingParams(max_tokens=1))
    request.blocks = list(range(blocks))
    chunk = Chunk(request, context - 1, 1, MAX_NODES)
    most = min(room - context, MAX_NODES + 1)
    counts = [count for count in rows if count <= most]
    trees = {
        count: {
            request.id: TokenTree(
                np.array(tokens[:1] * count), branches(tuple(range(-1, count - 1)))
            )
        }
        if count > 1
        else {}
        for count in counts
    }

    def timed(work: Callable[[], object]) -> float:
        began = clock()
        work()
        return clock() - began

    hidden = torch.zeros(context, config.hidden, dtype=cache.dtype, device=cache.device)
    others = [
        Request(f"measured {number}", list(tokens), context, SamplingParams(max_tokens=64))
        for number in range(4)
    ]

    def guess(count: int, nodes: int = MAX_NODES) -> None:
        asked = others[:count]
        needs = runner.drafter.needs
        of = {"nothing": None, "last": hidden[:1], "all": hidden[:1]}[needs]
        runner.drafter.observe(
            [Seen(one, context - 2, tokens[-2:-1], of, tokens[-1]) for one in asked]
        )
        runner.drafter.propose([Guess(one, nodes) for one in asked])

    if runner.drafter.needs == "all":
        runner.drafter.observe(
            [Seen(one, 0, tokens[:-2], hidden[:-2], tokens[-2]) for one in others]
        )
        # It reads all but the last place now, so that every guess that is timed reads that one.
        for other in others:
            other.tokens.pop()
        runner.drafter.propose([Guess(other, MAX_NODES) for other in others])
        for other in others:
            other.tokens.append(tokens[-1])
    works: list[Callable[[], object]] = [
        *(lambda held=trees[count]: measured.forward([chunk], held) for count in counts),
        *(lambda nodes=nodes: guess(1, nodes) for nodes in _FEWER),
        lambda: guess(1),
        lambda: guess(4),
    ]
    taken: list[list[float]] = [[] for _ in works]
    with torch.inference_mode():
        for _ in range(3):  # the first prepares kernels, the second records
            began = clock()
            for work in works:
                work()
            round_s = clock() - began
        for _ in range(max(3, min(_ROUNDS, int(seconds / max(round_s, 1e-9))))):
            for times, work in zip(taken, works, strict=True):
                times.append(timed(work))
    *steps, one, four = map(statistics.median, taken)
    steps, fewer = steps[: len(counts)], steps[len(counts) :]
    each = max(0.0, (four - one) / 3)
    return RowCosts(
        rows=tuple(counts),
        seconds_of=tuple(steps),
        draft_s=max(0.0, one - each),
        draft_request_s=each,
        draft_less=tuple(
            (nodes, max(0.0, one - took)) for nodes, took in zip(_FEWER, fewer, strict=True)
        ),
    )
