"""In how many chunks the tokens of a mixture's layer travel, forward and backward.

Three things work at once: the network between nodes (all-to-all of tokens, sums of gradients), the
links inside a node (all-gather and reduce-scatter of the ranks that share an expert) and the
device (products). Many chunks keep all three busy; each chunk pays what starts a task again. ::

    between nodes   D1 D2 D3 . . . slice . . . C1 C2 C3
    inside a node      G1 G2 S1 G3 S2 S3
    experts               E1 E2 E3

D sends a chunk to its experts' nodes, G gathers it, E multiplies, S sums, C sends back. So many
chunks as are ``ahead`` are gathered before one is summed: more where products are what takes long,
none where a chunk is done before the next one comes. The order
of each stream is written as a :class:`~shoal.ir.schedule.Schedule` whose ranks are the streams,
stages the tasks and micro-batches the chunks, so that the simulator of pipelines says how long it
takes. Whichever stream is the bottleneck gives a closed form; the largest of them at a real r is
made small by SLSQP, and both neighbours of that r are simulated.

The backward pass multiplies twice as much, and may carry a slice of the gradients' sum; its r is
another one.

Source: Pan et al., FSMoE, 2025, section 4; Shi et al., PipeMoE, 2023 (one r for both).
"""

from __future__ import annotations

import math
from itertools import repeat
from typing import NamedTuple

import numpy as np

from shoal.cost.pipeline.simulator import Timeline, simulate
from shoal.cost.training.moe_makespan import aheads, check_chunks, makespan, two_links
from shoal.cost.training.moe_tasks import MoePass
from shoal.ir.schedule import Op, OpCosts, Schedule

MOST = 32
"""Most chunks that are looked at."""
SLACK = 0.01
"""Of the least time, what fewer chunks may take more."""

STREAMS = ("between nodes", "inside a node", "experts")
TASKS = ("dispatch", "gather", "experts", "scatter", "combine", "gradients")
_SLICE = len(TASKS) - 1
# By task, the stream that does it: with links that work at once, and with one for all messages.
_PLACE = (0, 1, 2, 1, 0, 0)
_ONE_LINK = (0, 0, 2, 0, 0, 0)


class PassChunks(NamedTuple):
    """How a pass of a layer is cut.

    Args:
        r: chunks.
        ahead: chunks that are gathered before the first one is summed, less one.
        seconds: of the pass, simulated.
        bound: what holds it up: between nodes, inside a node, experts or latency.
        relaxed: the real r at which the closed forms are smallest.
    """

    r: int
    ahead: int
    seconds: float
    bound: str
    relaxed: float


def schedule(r: int, ahead: int = 1, *, slice_: bool = False, one_link: bool = False) -> Schedule:
    """Who does which task of which chunk in which order; the streams are the ranks.

    Args:
        r: chunks.
        ahead: chunks that go before the first sum, less one.
        slice_: a slice of the gradient reduction is sent after all chunks.
        one_link: everything that is sent waits for what was sent before, as where messages
            between nodes and inside them are not distinguished.
    """
    every = range(r)

    def each(stage: int) -> list[Op]:
        return [Op("F", stage, mb) for mb in every]

    def woven(before: tuple[int, ...], after: tuple[int, ...]) -> list[Op]:
        """Tasks before the experts, so many chunks ahead of those after them."""
        ops: list[Op] = []
        for step in range(r + ahead):
            ops += [Op("F", stage, step) for stage in before if step < r]
            ops += [Op("F", stage, step - ahead) for stage in after if step >= ahead]
        return ops

    extra = [Op("F", _SLICE, r)] if slice_ else []
    if one_link:
        between, inside = [*woven((0, 1), (3, 4)), *extra], []
    else:
        between, inside = [*each(0), *extra, *each(4)], woven((1,), (3,))
    routes = dict(zip(every, repeat(tuple(range(_SLICE))), strict=False))
    return Schedule(
        name=f"moe-overlap-{r}",
        ops=(tuple(between), tuple(inside), tuple(each(2))),
        place=_ONE_LINK if one_link else _PLACE,
        microbatches=r + slice_,
        routes={**routes, **({r: (_SLICE,)} if slice_ else {})},
    )


def timeline(
    pass_: MoePass,
    r: int,
    slice_s: float = 0.0,
    *,
    ahead: int | None = None,
    one_link: bool = False,
) -> Timeline:
    """When every task of a pass in r chunks begins and ends.

    Args:
        pass_: what tasks take.
        r: chunks.
        slice_s: s of the gradient reduction in the middle of the pass.
        ahead: see :func:`schedule`; None for what is best.
        one_link: see :func:`schedule`.

    Raises:
        PlanError: more chunks than tokens.
    """
    check_chunks(r, pass_.tokens)
    there, beside, work = pass_.at(r)
    cost = OpCosts(seconds={"F": (there, beside, work, beside, there, slice_s)})
    return min(
        (
            simulate(schedule(r, far, slice_=slice_s > 0, one_link=one_link), cost)
            for far in (aheads(r) if ahead is None else (ahead,))
        ),
        key=lambda one: one.makespan,
    )


def cases(pass_: MoePass, r: float, slice_s: float = 0.0, ahead: int = 1) -> dict[str, float]:
    """Seconds of a pass if one stream were the bottleneck all along; r need not be whole.

    Each is a lower bound: a stream's whole work, with what must come before its first task and
    after its last one; or the chunk that waits for all others to be sent, behind those that are
    gathered ahead of its sum.
    """
    there, beside, work = pass_.at(r)
    # Without chunks ahead, gather, experts and scatter of all chunks follow one another.
    idle = work if ahead == 0 or r <= 1 else 0.0
    first = max(beside + work, min(ahead, r - 1) * there + beside)
    return {
        STREAMS[0]: 2 * r * there + slice_s,
        STREAMS[1]: 2 * there + r * (2 * beside + idle),
        STREAMS[2]: 2 * there + 2 * beside + r * work,
        "latency": (r + 1) * there + first + beside,
    }


def relaxed(pass_: MoePass, slice_s: float = 0.0, ahead: int = 1, *, most: int = MOST) -> float:
    """The real r in [1, most] at which the largest of the closed forms is smallest.

    Minimises T, which is at least each of them, by sequential quadratic programming from the best
    power of two.
    """
    from scipy.optimize import NonlinearConstraint, minimize

    top = float(min(most, pass_.tokens))
    if top <= 1.0:
        return 1.0

    def worst(r: float) -> float:
        return max(cases(pass_, r, slice_s, ahead).values())

    powers = [2.0**i for i in range(int(math.log2(top)) + 1)]
    start = min(powers, key=worst)
    unit = worst(start) or 1.0

    def longest(x: np.ndarray) -> float:
        return float(x[1])

    def spare(x: np.ndarray) -> np.ndarray:
        r = min(max(math.exp(x[0]), 1.0), top)
        array: np.ndarray = x[1] - np.array(list(cases(pass_, r, slice_s, ahead).values())) / unit
        return array

    # The logarithm of r: chunks matter as shares of what there is.
    end = minimize(
        longest,
        np.array([math.log(start), 1.0]),
        bounds=[(0.0, math.log(top)), (0.0, None)],
        constraints=NonlinearConstraint(spare, 0.0, math.inf),
        method="SLSQP",
        options={"maxiter": 60, "ftol": 1e-6},
    )
    r = min(max(math.exp(end.x[0]), 1.0), top)
    return min(start, r, key=worst)


def choose(pass_: MoePass, slice_s: float = 0.0, *, most: int = MOST) -> PassChunks:
    """The chunks of a pass: the relaxed r of every order, and its whole neighbours simulated.

    The fewest that are within :data:`SLACK` of the least: a chunk has costs that no line includes.

    Args:
        pass_: what tasks take.
        slice_s: s of the gradient reduction that runs with it.
        most: chunks to look at.

    Raises:
        PlanError: no tokens.
    """
    check_chunks(1, pass_.tokens)
    top = min(most, pass_.tokens)
    reals = [relaxed(pass_, slice_s, ahead, most=most) for ahead in aheads(top)]
    tried: dict[int, tuple[float, int]] = {}

    def simulated(r: int) -> float:
        if r not in tried:
            times = {far: two_links(*pass_.at(r), r, far, slice_s) for far in aheads(r)}
            ahead = min(times, key=lambda far: times[far])
            tried[r] = timeline(pass_, r, slice_s, ahead=ahead).makespan, ahead
        return tried[r][0]

    r = min({end(real) for real in reals for end in (math.floor, math.ceil)}, key=simulated)
    # The closed forms leave out how streams wait for one another: a chunk more may hide that.
    while (near := min(r, max(1, r - 1), min(top, r + 1), key=simulated)) != r:
        r = near
    most_s = simulated(r) * (1 + SLACK)
    while r > 1 and simulated(r - 1) <= most_s:
        r -= 1
    seconds, ahead = tried[r]
    result = cases(pass_, r, slice_s, ahead)
    bound = max(result, key=lambda name: result[name])
    return PassChunks(r, ahead, seconds, bound, min(reals, key=lambda real: abs(real - r)))


def exhaustive(
    pass_: MoePass, slice_s: float = 0.0, *, most: int = MOST, one_link: bool = False
) -> list[float]:
    """Seconds of a pass in 1, 2, ... chunks, all that there may be."""
    tried = range(1, min(most, pass_.tokens) + 1)
    return [makespan(pass_, r, slice_s, one_link=one_link) for r in tried]


def room(pass_: MoePass, r: int) -> float:
    """Seconds that the network between nodes idles in the middle of a pass of r chunks.

    So long a slice of the gradients' sum makes the pass no longer.
    """
    there, _, _ = pass_.at(r)
    return max(0.0, makespan(pass_, r) - 2 * r * there)
