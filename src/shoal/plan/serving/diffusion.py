"""What serving a masked-diffusion model costs: passes over windows, until blocks are text.

The scheduler is the one that the engine drives. How many passes a block takes depends on the model
and on what it is asked: it is an assumption, ``decode.expected`` tokens a pass, or what ``unmask``
fixed says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from shoal.core.errors import PlanError
from shoal.core.parts import Choice, table
from shoal.cost.serving.simulator import Simulation, simulate
from shoal.ir import Arrival, KVManager, Request, ServeJob, Step, StepCost, StepResult
from shoal.plan.batching.schedulers.masked import MaskedScheduler, block_of, full_length


class DiffusionDecoding(Protocol):
    """What a plan asks the part of kind ``decode`` that is called diffusion."""

    block: int
    unroll: int
    refresh: Choice

    def passes(self, size: int) -> int:
        """Passes that a block of so many places is taken to need."""


class PredictedPasses:
    """A runner that computes nothing: a pass takes as long as its windows, a block some passes.

    Args:
        cost: seconds of a step.
        decode: blocks, windows, and how many tokens a pass is taken to unmask.
        longest: most tokens and masks of a request.
    """

    def __init__(self, cost: StepCost, decode: DiffusionDecoding, longest: int) -> None:
        self._cost, self._decode, self._longest = cost, decode, longest
        self._refresh = table("refresh").build(decode.refresh)
        # Request -> the block that it works on, and passes over it.
        self._passed: dict[str, tuple[tuple[int, int], int]] = {}

    def execute(self, step: Step) -> StepResult:
        requests = [chunk.request for chunk in step.chunks]
        seconds = 0.0
        for _ in range(self._decode.unroll):
            seconds += self._cost.seconds([self._window(request) for request in requests])
        tokens = {}
        for request in requests:
            (start, stop), passes = self._passed[request.id]
            if passes >= self._decode.passes(stop - start):
                tokens[request.id] = (0,) * (stop - start)
                del self._passed[request.id]
        return StepResult(tokens, seconds=seconds)

    def _window(self, request: Request) -> tuple[int, int]:
        """One pass of a request: tokens that it reads from the cache, and that it computes."""
        block = block_of(request, self._decode.block, self._longest)
        before, passes = self._passed.get(request.id, (block, 0))
        passes = passes if before == block else 0
        self._passed[request.id] = (block, passes + 1)
        length = full_length(request, self._longest)
        first, stop = self._refresh.window(block, length, passes)
        return length - (stop - first), stop - first


def simulate_passes(job: ServeJob, cost: StepCost, arrivals: Sequence[Arrival]) -> Simulation:
    """Serve ``arrivals`` in virtual time, as a concrete job with ``decode`` diffusion says.

    Raises:
        PlanError: the job has replicas, which are not simulated together.
        ServeError: a request that can never run.
    """
    assert job.kv_tokens is not None
    assert job.max_position is not None
    if job.replicas > 1:
        raise PlanError(
            f"replicas = {job.replicas} with decode diffusion: plans are of one engine; give 1, "
            "and divide the rate of arrivals"
        )
    decode: DiffusionDecoding = table("decode").build(job.decode, where="decode")
    kv: KVManager = table("kv").build(job.kv, where="kv").build(job.kv_tokens)
    # No request of a simulation has a mask in its prompt.
    scheduler = MaskedScheduler(kv, job.limits, block=decode.block, mask_id=-1)
    runner = PredictedPasses(cost, decode, job.max_position)
    return simulate(scheduler, cost, arrivals, runner=runner)


def usual_pass(job: ServeJob, context: int) -> tuple[int, int]:
    """A pass over a block in the middle of a request of so many tokens: (cached, computed)."""
    decode: DiffusionDecoding = table("decode").build(job.decode, where="decode")
    start = max(0, (context - decode.block) // 2)
    block = (start, min(start + decode.block, context))
    first, stop = table("refresh").build(decode.refresh).window(block, context, 1)
    return context - (stop - first), max(1, math.ceil(stop - first))
