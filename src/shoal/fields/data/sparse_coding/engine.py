"""Truncated expectation maximization: one engine for all models.

An iteration looks, for every point, at the states that can matter, adds up over all points what the
parameters are estimated from, and estimates them. Points lie in blocks, which one or several
processes go through; the sums of the blocks are added in their order, so the result does not depend
on how many processes there are.

Source: Luecke, Eggert, Expectation Truncation and the Benefits of Preselection in Training
Generative Models, 2010; Exarchakis et al., ProSper, 2019.

Differs: the points that are left out ("cut") are those that were explained worst in the iteration
before, so that one pass is enough; where nothing is annealed any more, a step that would lower the
free energy is halved.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shoal.core.parts import Choice, table
from shoal.core.pool import Actor
from shoal.core.random import generator, seed64
from shoal.fields.data.sparse_coding.models.common import SAMPLE, batch_points
from shoal.fields.data.sparse_coding.models.native import library
from shoal.fields.data.sparse_coding.protocols import (
    CodingParams,
    CodingSums,
    Floats,
    Ids,
    SparseCodeError,
    Superposition,
)
from shoal.fields.data.sparse_coding.schedule import AnnealSchedule
from shoal.fields.data.sparse_coding.states import StateSpace, truncated_prior

BLOCKS = 16
"""Blocks of points, at most; also of processes."""

# A free energy lower by less than this share is the same.
_SAME = 1e-10

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PosteriorBatch:
    """What is known of some points.

    Args:
        evidence: [B], log likelihood of each point, of the states that are looked at.
        posterior: [B, M], probabilities of the states.
        candidates: [B, H'].
        means: [B, H], expected causes.
    """

    evidence: Floats
    posterior: Floats
    candidates: Ids
    means: Floats


def infer(
    model: Superposition, space: StateSpace, params: CodingParams, data: Floats
) -> Iterator[PosteriorBatch]:
    """Posteriors of points, batch by batch, at the model's own temperature.

    Args:
        model: what was learned.
        space: its states.
        params: its parameters.
        data: [N, D].
    """
    ready = model.ready(params, space, 1.0)
    for piece in _batches(data, space):
        joint = model.joint(piece, ready, space)
        evidence, posterior = _posterior(joint.logp, 1.0)
        _, means = model.sums(piece, posterior, joint, ready, space)
        yield PosteriorBatch(evidence, posterior, joint.candidates, means)


def _batches(data: Floats, space: StateSpace) -> Iterator[Floats]:
    size = batch_points(space)
    for first in range(0, len(data), size):
        yield np.ascontiguousarray(data[first : first + size])


def _posterior(logp: Floats, temperature: float) -> tuple[Floats, Floats]:
    """Log likelihood of points, and probabilities of their states, in the place of ``logp``."""
    evidence = np.empty(len(logp))
    library().posteriors(logp, temperature, evidence)
    return evidence, logp


def _added(total: CodingSums, more: CodingSums) -> CodingSums:
    return {name: total[name] + value for name, value in more.items()} if total else more


class CodingBlocks:
    """Some blocks of points and what is to be done with them; it may live in another process.

    Args:
        model: what is learned.
        space: the states.
        blocks: [n, D] each.
    """

    def __init__(self, model: Superposition, space: StateSpace, blocks: Sequence[Floats]) -> None:
        self._model, self._space, self._blocks = model, space, blocks

    def expect(
        self, params: CodingParams, temperature: float, keep: Sequence[Mask | None]
    ) -> list[tuple[Floats, CodingSums]]:
        """Log likelihoods of the points, and the sums, of each block.

        Args:
            params: of the model.
            temperature: of the posterior.
            keep: of each block, [n]: the points that count; None for all.
        """
        ready = self._model.ready(params, self._space, temperature)
        results = []
        for block, mask in zip(self._blocks, keep, strict=True):
            evidence, total, at = [], CodingSums(), 0
            for piece in _batches(block, self._space):
                joint = self._model.joint(piece, ready, self._space)
                log_likelihood, posterior = _posterior(joint.logp, temperature)
                if mask is not None:
                    posterior *= mask[at : at + len(piece), None]
                sums, _ = self._model.sums(piece, posterior, joint, ready, self._space)
                total = _added(total, sums)
                evidence.append(log_likelihood)
                at += len(piece)
            results.append((np.concatenate(evidence), total))
        return results


Expect = Callable[[CodingParams, float, Sequence[Mask | None]], "list[tuple[Floats, CodingSums]]"]


@contextlib.contextmanager
def spread(
    model: Superposition, space: StateSpace, data: Floats, *, pool: Choice | None, workers: int
) -> Iterator[tuple[list[int], Expect]]:
    """The sizes of the blocks of the points, and what goes through them.

    Args:
        model: what is learned.
        space: the states.
        data: [N, D].
        pool: a choice of kind ``pool``; None for this process.
        workers: processes of the pool.
    """
    blocks = np.array_split(data, min(BLOCKS, len(data)))
    sizes = [len(block) for block in blocks]
    if pool is None:
        yield sizes, CodingBlocks(model, space, blocks).expect
        return
    shares = np.array_split(np.arange(len(blocks)), min(workers, len(blocks)))
    part = table("pool").build(pool, where="pool")
    with part.open() as opened:
        actors: list[Actor] = [
            opened.actor(CodingBlocks, model, space, [blocks[at] for at in share])
            for share in shares
        ]

        def expect(
            params: CodingParams, temperature: float, keep: Sequence[Mask | None]
        ) -> list[tuple[Floats, CodingSums]]:
            calls = [
                actor.call("expect", params, temperature, [keep[at] for at in share])
                for actor, share in zip(actors, shares, strict=True)
            ]
            return [result for call in calls for result in call.result()]

        yield sizes, expect


@dataclass(frozen=True)
class CodingState:
    """Where learning stands, between two iterations.

    Args:
        params: of the next iteration.
        iteration: iterations that are done.
        free_energy: of the iterations, for a point.
        keep: [N], the points that count next; None for all.
        explained: log likelihood of those points, in the mean; what starts are compared by, as the
            others have more causes than are looked at.
        last: parameters and free energy of the last step that was taken, where nothing was annealed
            in it.
    """

    params: CodingParams
    iteration: int = 0
    free_energy: tuple[float, ...] = ()
    keep: Mask | None = None
    explained: float = -math.inf
    last: tuple[CodingParams, float] | None = None


@dataclass(frozen=True)
class LearningSettings:
    """How a model is learned.

    Args:
        iterations: how many.
        schedule: how they are annealed.
        seed: of all that is random.
        deviation: of the data, the unit of the noise on the components.
        restarts: starts of which the best is taken.
    """

    iterations: int
    schedule: AnnealSchedule
    seed: int = 0
    deviation: float = 1.0
    restarts: int = 1


def begin(
    model: Superposition,
    space: StateSpace,
    data: Floats,
    settings: LearningSettings,
    watch: Callable[[int], None] = lambda done: None,
) -> CodingState:
    """The state before the first iteration over all points.

    With several starts, each is learned on a sample of the points, and the one that
    explains best goes on with all of them from where nothing is annealed any more.

    Args:
        model: what is learned.
        space: its states.
        data: [N, D].
        settings: iterations, annealing and starts.
        watch: called with the number of starts that are done.
    """
    if settings.restarts == 1:
        params = model.start(data.mean(0), data.var(0), space.num_components, settings.seed)
        return CodingState(params)
    draw = generator(settings.seed, purpose="sparse sample")
    sample = data
    if len(data) > SAMPLE:
        sample = data[np.sort(draw.choice(len(data), SAMPLE, replace=False))]
    best: CodingState | None = None
    sizes, expect = [len(sample)], CodingBlocks(model, space, [sample]).expect
    for at in range(settings.restarts):
        watch(at)
        seed = seed64(settings.seed, purpose="sparse starts", index=at)
        alone = replace(settings, seed=seed, restarts=1)
        state = learn(model, space, begin(model, space, sample, alone), alone, sizes, expect)
        if best is None or state.explained > best.explained:
            best = state
    assert best is not None
    done = int(settings.schedule.settled * settings.iterations)
    return CodingState(best.params, done, best.free_energy[:done])


def learn(
    model: Superposition,
    space: StateSpace,
    state: CodingState,
    settings: LearningSettings,
    sizes: Sequence[int],
    expect: Expect,
    tick: Callable[[CodingState], None] = lambda state: None,
) -> CodingState:
    """Iterate to the end.

    Args:
        model: what is learned.
        space: its states.
        state: where to begin.
        settings: iterations and annealing.
        sizes: of the blocks, of :func:`spread`.
        expect: goes through them.
        tick: called with the state after each iteration.

    Raises:
        SparseCodeError: a parameter has become infinite or NaN.
    """
    while state.iteration < settings.iterations:
        state = _iterate(model, space, state, settings, sizes, expect)
        tick(state)
    return state


def _iterate(
    model: Superposition,
    space: StateSpace,
    state: CodingState,
    settings: LearningSettings,
    sizes: Sequence[int],
    expect: Expect,
) -> CodingState:
    temperature, _, cut = settings.schedule.at(state.iteration / settings.iterations)
    places = np.cumsum([0, *sizes])
    keep = [None if state.keep is None else state.keep[a:b] for a, b in itertools.pairwise(places)]
    evidences, total = [], CodingSums()
    for evidence, sums in expect(state.params, temperature, keep):
        evidences.append(evidence)
        total = _added(total, sums)
    evidence = np.concatenate(evidences)
    energy = float(evidence.mean())
    if not np.isfinite(energy):
        raise SparseCodeError(
            f"iteration {state.iteration}: the free energy is {energy}; scale the data to a "
            "deviation near 1"
        )
    share = (state.iteration + 1) / settings.iterations
    warm, noise, next_cut = settings.schedule.at(share)
    plain = temperature == warm == 1 and noise == 0 and cut == next_cut == 0
    if state.last is not None and energy < state.last[1] - _SAME * abs(state.last[1]):
        before, best = state.last
        halved = {name: (before[name] + value) / 2 for name, value in state.params.items()}
        return replace(
            state,
            params=halved,
            iteration=state.iteration + 1,
            free_energy=(*state.free_energy, best),
        )
    params = model.maximize(total, state.params, space, temperature)
    if noise > 0:
        draw = generator(settings.seed, purpose="sparse annealing", step=state.iteration)
        wander = noise * settings.deviation * draw.standard_normal(params["W"].shape)
        params = {**params, "W": params["W"] + wander}
    counted = _kept(evidence, model.rates(params), space, next_cut)
    return CodingState(
        params=params,
        iteration=state.iteration + 1,
        free_energy=(*state.free_energy, energy),
        keep=counted,
        explained=energy if counted is None else float(evidence[counted].mean()),
        last=(state.params, energy) if plain else None,
    )


def _kept(evidence: Floats, rates: Floats, space: StateSpace, cut: float) -> Mask | None:
    """The points that gamma causes are likely to explain: the best explained of them."""
    mass = float(np.exp(truncated_prior(rates, space.num_active)[0]))
    left_out = min(round(len(evidence) * cut * (1 - mass)), len(evidence) - 1)
    if left_out == 0:
        return None
    result = np.ones(len(evidence), bool)
    result[np.argpartition(evidence, left_out - 1)[:left_out]] = False
    return result
