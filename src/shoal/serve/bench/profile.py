"""How long steps take: a spread of shapes, measured on the real model.

The shapes are interleaved and repeated, and each is given the median of its times. The
cost of a step is fitted to them (:mod:`shoal.cost.step_cost`), and the simulator predicts
whole workloads with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from shoal.core.errors import ServeError, require
from shoal.core.random import generator
from shoal.cost.step_cost.fitted import FittedStepCost, StepSample
from shoal.ir import Chunk, Request, SamplingParams, SchedulerLimits, Step
from shoal.serve.engine.runner import LocalRunner

Shape = tuple[tuple[int, int], ...]
"""(tokens before it, tokens in it) of each chunk of a step."""

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 40


def spread(limits: SchedulerLimits, num_tokens: int, *, seed: int = 0) -> list[Shape]:
    """Shapes of steps that a scheduler with these limits can plan.

    Decodes of few and many requests with short and long contexts, prompts whole and
    continued, several prompts, and both kinds together.
    """
    source = generator(seed, purpose="profile lengths")
    budget = min(limits.max_step_tokens, num_tokens)
    longest = min(limits.max_position, num_tokens) - 1
    running = min(limits.max_running, budget)

    def decodes(count: int, typical: int) -> Shape:
        # As uneven as the contexts of real requests are.
        drawn = [int(typical * source.lognormal(0, 0.6)) for _ in range(count)]
        return tuple((max(1, min(longest, one)), 1) for one in drawn)

    counts = sorted({1, *(running * share // 16 for share in (1, 2, 4, 8, 12, 16))} - {0})
    contexts = [one for one in (16, 64, 192, 512, 1536, 6144) if one <= longest] or [longest]
    lengths = sorted({max(1, min(budget, longest) * share // 16) for share in (1, 4, 8, 16)})
    starts = sorted({0, longest // 8, longest // 3})
    shapes = [decodes(count, typical) for count in counts for typical in contexts]
    for length in lengths:
        for start in starts:
            prompt = (start - start % 16, length)
            if sum(prompt) <= longest + 1:
                shapes.append((prompt,))
                beside = min(running // 2, budget - length)
                if beside > 0:
                    shapes.append(
                        (*decodes(beside, contexts[source.integers(len(contexts))]), prompt)
                    )
        for count in (2, 4):
            if length // count > 1:
                shapes.append(((0, length // count),) * count)
    return [
        shape
        for shape in dict.fromkeys(shapes)
        if sum(start + length + 64 for start, length in shape) <= num_tokens
    ]


def profile(
    runner: LocalRunner,
    shapes: Sequence[Shape],
    *,
    seconds: float = 5.0,
    progress: Callable[[float, float, str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepSample]:
    """Measure steps of these shapes; the cache of ``runner`` is not touched.

    Args:
        runner: whose model is measured, with a cache of the same blocks.
        shapes: of the steps.
        seconds: about how long to measure; at least three rounds are made.
        progress: called with (done, total, text).
        clock: s.

    Raises:
        ServeError: no shapes, or no memory for a second cache as large as the largest step.
    """
    require(
        bool(shapes),
        "profile shapes",
        len(shapes),
        expected="at least one",
        hint="the cache is too small for any step; give a larger kv_tokens",
        error=ServeError,
    )
    cache = runner.cache
    size = cache.block_size
    blocks = max(sum(_blocks(part, size) for part in shape) for shape in shapes)
    own = cache.sized(blocks)
    measured = runner.beside(own, clock=clock)
    vocab_size = runner.model.config.vocab_size
    steps = [_step(shape, size, vocab_size) for shape in shapes]
    began = clock()
    for step in steps:
        measured.execute(step)
    round_s = max(1e-9, clock() - began)
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / round_s)))
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        order = generator(0, purpose="profile order", step=turn).permutation(len(steps))
        for place in order.tolist():
            times[place].append(measured.execute(steps[place]).seconds)
        if progress is not None:
            progress(turn + 1, rounds, f"{len(steps)} shapes of a step")
    return [
        StepSample(chunks=shape, seconds=statistics.median(taken))
        for shape, taken in zip(shapes, times, strict=True)
    ]


def warm(runner: LocalRunner) -> None:
    """Compute a prompt and two single tokens: a first request waits for no library.

    The steps of single tokens are recorded where they can be. Nothing is in the cache yet, and
    what they write there is nobody's.
    """
    size, vocab_size = runner.cache.block_size, runner.model.config.vocab_size
    for shape in (((0, 2),), ((0, 1),), ((0, 1),)):
        runner.execute(_step(shape, size, vocab_size))


def quick_cost(
    runner: LocalRunner, limits: SchedulerLimits, *, clock: Callable[[], float] = time.perf_counter
) -> FittedStepCost:
    """Seconds of a step and of a token of a prompt, from a few steps; for coarse choices."""
    size = runner.cache.block_size
    room = runner.cache.num_blocks * size
    most = max(2, min(256, limits.max_step_tokens, limits.max_position - 1, room))
    times = {
        sample.chunks[0][1]: sample.seconds
        for sample in profile(runner, [((0, 1),), ((0, most),)], seconds=0.0, clock=clock)
    }
    token = max(1e-9, (times[most] - times[1]) / (most - 1))
    return FittedStepCost(
        step=max(0.0, times[1] - token), token=token, prompt_pair=0.0, decode_key=0.0, chunk=0.0
    )


def _blocks(part: tuple[int, int], block_size: int) -> int:
    return -(-sum(part) // block_size)


def _step(shape: Shape, block_size: int, vocab_size: int) -> Step:
    """A step of this shape whose requests hold blocks scattered over the cache."""
    needed = [_blocks(part, block_size) for part in shape]
    free = generator(0, purpose="profile blocks").permutation(sum(needed)).tolist()
    chunks = []
    for number, ((start, length), count) in enumerate(zip(shape, needed, strict=True)):
        tokens = [(7 * number + place) % vocab_size for place in range(start + length)]
        request = Request(str(number), tokens, len(tokens), SamplingParams(max_tokens=1))
        request.blocks = [free.pop() for _ in range(count)]
        chunks.append(Chunk(request, start, length))
    return Step(tuple(chunks))
