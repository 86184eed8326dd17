"""What rows and guesses cost on this machine: measured when an engine that guesses starts.

Steps of one request with chains of guesses under its last token stand for steps of as many rows of
any requests: the products see rows of any request, and they are what a step consists of.
What a guess takes beside its rows, to be made, stored, walked through and observed, is measured
as whole steps of one request and of four, with guesses and without.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch

from shoal.ir import MAX_NODES, Chunk, Request, SamplingParams, SchedulerLimits, Step
from shoal.plan.trees.drafting import RowCosts
from shoal.serve.decode.protocols import AcceptedTokens, Guess, Needs, TokenTree, branches
from shoal.serve.decode.runner import SpeculativeRunner

log = logging.getLogger("shoal.serve")

_ROWS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
_ROUNDS, _SECONDS = 15, 2.0
_CONTEXT = 256
# Nodes of trees that may take less time to draft than the largest.
_FEWER = (1, 2, 3, 4, 6, 8)
# Requests, and nodes of each, of the whole steps.
_SEVERAL, _NODES = 4, 3


class _Known:
    """A drafter that takes no time: the same chain for every request."""

    needs: ClassVar[Needs] = "nothing"

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        return [self._tree] * len(guesses)

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """Nothing."""

    def memory_bytes(self) -> int:
        return 0


def measure_costs(
    runner: SpeculativeRunner,
    limits: SchedulerLimits,
    *,
    rows: Sequence[int] = _ROWS,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> RowCosts:
    """Seconds of steps by their rows, and of guesses, interleaved; of each the lower quartile.

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
    own = cache.sized(blocks)
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
        for number in range(_SEVERAL)
    ]
    for one in others:  # what they write there is not used
        one.blocks = request.blocks
    nodes = min(_NODES, most - 1)
    chain = TokenTree(np.array(tokens[:1] * (nodes + 1)), branches(tuple(range(-1, nodes))))
    whole = runner.over(own)
    whole.drafter = _Known(chain)

    def step(count: int, nodes: int) -> None:
        chunks = tuple(Chunk(one, context - 1, 1, nodes) for one in others[:count])
        whole.execute(Step(chunks))

    def guess(count: int, nodes: int = MAX_NODES) -> None:
        request = others[:count]
        needs = runner.drafter.needs
        of = {"nothing": None, "last": hidden[:1], "all": hidden[:1]}[needs]
        runner.drafter.observe(
            [AcceptedTokens(one, context - 2, tokens[-2:-1], of, tokens[-1]) for one in request]
        )
        runner.drafter.propose([Guess(one, nodes) for one in request])

    if runner.drafter.needs == "all":
        runner.drafter.observe(
            [AcceptedTokens(one, 0, tokens[:-2], hidden[:-2], tokens[-2]) for one in others]
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
        lambda: guess(_SEVERAL),
        *(
            lambda count=count, guessed=guessed: step(count, guessed)
            for count in (1, _SEVERAL)
            for guessed in (0, nodes)
        ),
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
    # Whatever else a machine does adds to what is measured: the lower quartile says more than the
    # middle, and fewer rows take no longer than more.
    lows = [statistics.quantiles(times, n=4)[0] for times in taken]
    falls = RowCosts(rows=tuple(counts), seconds_of=tuple(lows[: len(counts)])).falls
    if falls:
        log.warning(
            "steps of %s rows took less time than steps of fewer rows: the machine is busy, or "
            "another kernel begins there; fewer rows are taken to cost no more",
            ", ".join(map(str, falls)),
        )
    for place in range(len(counts) - 2, -1, -1):
        lows[place] = min(lows[place], lows[place + 1])
    steps, lows = lows[: len(counts)], lows[len(counts) :]
    fewer, (alone, several, *wholes) = lows[: len(_FEWER)], lows[len(_FEWER) :]
    costs = RowCosts(rows=tuple(counts), seconds_of=tuple(steps))
    # A whole step with guesses over one without, less what its rows take more.
    beside = [
        max(0.0, on - off - costs.seconds(count * (1 + nodes)) + costs.seconds(count))
        for count, off, on in zip((1, _SEVERAL), wholes[::2], wholes[1::2], strict=True)
    ]
    each = max(0.0, several + beside[1] - alone - beside[0]) / (_SEVERAL - 1)
    return RowCosts(
        rows=costs.rows,
        seconds_of=costs.seconds_of,
        draft_s=max(0.0, alone + beside[0] - each),
        draft_request_s=each,
        draft_less=tuple(
            (nodes, max(0.0, alone - took)) for nodes, took in zip(_FEWER, fewer, strict=True)
        ),
    )
