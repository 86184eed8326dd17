"""[86] FastSwitch: are switches cheap when copies are few, beside the computation and of news only?

Source: Shen et al., FastSwitch: Optimizing Context Switching Efficiency in Fairness-aware Large
Language Model Serving, 2024.

Conversations on a real engine whose cache is too small, with fair priorities that change. Host
memory and copies are real; the link is emulated: 100 us a copy and 4 GB/s. Answers are the trace's,
so that all variants serve the same tokens. The A/A run has the first variant, served in another
round; the quick run counts in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import serve_job
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part, table
from shoal.cost.serving.simulator import SimulatedRunner
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.ir import Arrival, HostLink, Output, Runner, SchedulerLimits, ServeJob, Step, StepResult
from shoal.plan.batching.schedulers.fair import Policy

if TYPE_CHECKING:
    from shoal.serve.engine.loop import Engine

_DROPPED = {"name": "swap", "keep_host_copies": False}
_BLOCKS = "per-block synchronous swap"
_GROUPS = "groups"
_ASYNCHRONOUS = "groups, asynchronous"
_ALL = "groups, asynchronous, kept"
# Variant -> bookkeeping of the cache, preemption.
_VARIANTS: dict[str, tuple[Any, Any]] = {
    _BLOCKS: (
        {"name": "paged", "prefix_reuse": False},
        {**_DROPPED, "asynchronous": "never", "join": False},
    ),
    _GROUPS: ("groups", {**_DROPPED, "asynchronous": "never"}),
    _ASYNCHRONOUS: ("groups", _DROPPED),
    _ALL: ("groups", "swap"),
}
_COPY_S, _BYTES_PER_S = 1e-4, 4e9
_POSITIONS, _MAX_RUNNING, _STEP_TOKENS, _BLOCK = 2048, 24, 128, 16

# Lengths of the trace are divided by this.
_SCALE = 2.0
# Steps of shoal-4m on one core of the machine of the results, for the quick run; and its cache.
_STEPS = FittedStepCost(
    step=1.0e-3, token=5.0e-5, prompt_pair=4.6e-8, decode_key=7.0e-7, chunk=3.2e-5
)
_LAYERS, _TOKEN_BYTES, _VOCAB = 4, 4096, 4096


@dataclass(slots=True)
class _Seen:
    """What serving the trace once gave."""

    copies: float = 0.0
    blocks: float = 0.0
    switches: float = 0.0
    switch_s: float = 0.0
    ttft_p95: float = 0.0
    tbt_p99: float = 0.0
    tokens_per_s: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def take(self, output: Output, now: float) -> None:
        """Tokens have come."""
        before = self.last.get(output.request_id)
        if before is not None:
            self.gaps.append(now - before)
        self.last[output.request_id] = now


class _VirtualTime:
    """A runner that computes nothing and moves a clock by what a step is said to take."""

    def __init__(self, link: HostLink) -> None:
        self._inner, self._now = SimulatedRunner(_STEPS, link), 0.0

    def now(self) -> float:
        """See :func:`~shoal.serve.bench.replay.replay`."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self._now += seconds

    def execute(self, step: Step) -> StepResult:
        """See :class:`~shoal.ir.engine.Runner`."""
        result = self._inner.execute(step)
        self._now += result.seconds
        return result


class _Said:
    """A runner whose answers are those of the trace, as the next turns have them."""

    def __init__(self, inner: Runner, answers: Mapping[str, Sequence[int]]) -> None:
        self._inner, self._answers = inner, answers

    def execute(self, step: Step) -> StepResult:
        """Compute, and say what the trace says."""
        result = self._inner.execute(step)
        said = {
            chunk.request.id: (self._answers[chunk.request.id][chunk.request.n_generated],)
            for chunk in step.chunks
            if chunk.request.id in result.tokens
        }
        return StepResult(said, result.infos, result.seconds, result.done)


@part
class FastSwitch(BaseClaim, row=86, needs=("torch",)):
    """Context switches of conversations under fair priorities.

    Args:
        model: model of the zoo, with random weights.
        requests: turns served.
        rate: turns a second.
        turns: turns of a conversation.
        think_s: mean time between turns, s.
        kv_tokens: tokens of the cache.
        group: blocks of a group.
        frequency: updates of the priorities a step.
        policy: policy of the priorities; drawn ones do not depend on what was served when.
        rounds: times that each variant is served; the second one, whose copies are counted, once.
    """

    model: str = "shoal-4m"
    requests: Annotated[int, Ge(1)] = 80
    rate: Annotated[float, Gt(0)] = 24.0
    turns: Annotated[int, Ge(1)] = 20
    think_s: Annotated[float, Gt(0)] = 0.7
    kv_tokens: Annotated[int, Ge(1)] = 4096
    group: Annotated[int, Ge(1)] = 16
    frequency: Annotated[float, Gt(0), Le(1)] = 0.07
    policy: Policy = "uniform"
    rounds: Annotated[int, Ge(1)] = 5

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        seen: dict[str, list[_Seen]] = {name: [] for name in _VARIANTS}
        for turn in range(self.rounds):
            names = [name for name in _VARIANTS if turn == 0 or name != _GROUPS]
            # The one that goes first changes with each round.
            for place, name in enumerate(names[:: 1 if turn % 2 == 0 else -1]):
                run.progress(name, (turn + place / len(names)) / self.rounds)
                ran, when = name, turn
                if run.as_baseline and name != _BLOCKS:
                    ran, when = _BLOCKS, (turn + 1) % self.rounds
                seen[name].append(self._remembered(run, ran, when))
        first, last = seen[_BLOCKS], seen[_ALL]

        run.put("copies_with_groups", seen[_GROUPS][0].copies, first[0].copies)
        without = seen[_ASYNCHRONOUS]
        run.put("bytes_with_reuse", (o.blocks for o in last), (o.blocks for o in without))
        run.put("switches_per_request", (one.switches for found in seen.values() for one in found))
        if not run.quick:
            pairs = list(zip(last, first, strict=True))
            run.put("tbt_p99", (one.tbt_p99 / ours.tbt_p99 for ours, one in pairs))
            run.put("ttft_p95", (one.ttft_p95 / ours.ttft_p95 for ours, one in pairs))
            run.put("throughput", (ours.tokens_per_s / one.tokens_per_s for ours, one in pairs))
        run.profile = "; ".join(
            f"{name}: {found[0].switch_s:.1f} s under way in {found[0].copies:.0f} copies"
            for name, found in seen.items()
        )

    def _remembered(self, run: ClaimRun, name: str, turn: int) -> _Seen:
        """Serve with a variant, once a round; the A/A run compares rounds of the first one."""
        if run.quick:  # all rounds of one trace would be the same
            return run.remember(f"{name} {turn} True", lambda: self._virtual(run.seed + turn, name))
        return run.remember(f"{name} {turn} False", lambda: self._real(run.context, name))

    def _job(self, name: str) -> ServeJob:
        kv, preempt = _VARIANTS[name]
        # Room to grow: a request that joins leaves a fifth of the cache to the others.
        fair = {"policy": self.policy, "frequency": self.frequency, "watermark": 0.2}
        return serve_job(
            self.model,
            kv={"name": "blockgroups", "init": self.group} if kv == "groups" else kv,
            kv_tokens=self.kv_tokens,
            host_tokens=8 * self.kv_tokens,
            preempt=preempt,
            scheduler={"name": "fair", **fair},
            max_running=_MAX_RUNNING,
            max_step_tokens=_STEP_TOKENS,
            max_position=_POSITIONS,
        )

    def _arrivals(self, seed: int, vocab_size: int) -> list[Arrival]:
        workload = {
            "name": "multiturn", "requests": self.requests, "rate": self.rate, "scale": _SCALE,
            "turns": self.turns, "think_s": self.think_s,
        }  # fmt: skip
        trace: list[Arrival] = (
            table("workload")
            .build(workload)
            .arrivals(
                count=self.requests, vocab_size=vocab_size, max_position=_POSITIONS, seed=seed
            )
        )
        return trace

    def _real(self, context: ExperimentContext, name: str) -> _Seen:
        """Serve the trace once, in real time."""
        from shoal.serve.cache.paged import token_bytes
        from shoal.serve.engine.build import engine_of, prepare
        from shoal.train import zoo

        job = self._job(name)
        model = context.remember("model", lambda: prepare(job, zoo.random(job.model, context.seed)))
        config = model.config
        link = _link(config.num_layers, token_bytes(config, model.embed.weight.dtype))
        engine, _, runner = engine_of(job, model, link=link)
        arrivals = self._arrivals(context.seed, config.vocab_size)
        try:
            return _watch(engine, runner, arrivals, config.num_layers)
        finally:
            engine.close()

    def _virtual(self, seed: int, name: str) -> _Seen:
        """Serve a trace once, in virtual time."""
        from shoal.serve.cache.host import HostCopyHook
        from shoal.serve.engine.loop import Engine

        job = self._job(name)
        link = _link(_LAYERS, _TOKEN_BYTES)
        kv = table("kv").build(job.kv).build(self.kv_tokens)
        limits = SchedulerLimits(
            max_running=_MAX_RUNNING, max_step_tokens=_STEP_TOKENS, max_position=_POSITIONS
        )
        how: dict[str, Any] = {"host_tokens": job.host_tokens, "link": link}
        preemption = table("preempt").build(job.preempt).build(kv, limits, **how)
        scheduler = table("scheduler").build(job.scheduler).build(kv, limits, preemption)
        time = _VirtualTime(link)
        engine = Engine(scheduler, time, kv=kv, hooks=[HostCopyHook()], clock=time.now)
        arrivals = self._arrivals(seed, _VOCAB)
        return _watch(engine, time, arrivals, _LAYERS, clock=time.now, sleep=time.sleep)


def _link(layers: int, token_bytes: int) -> HostLink:
    block_bytes = float(_BLOCK * token_bytes)
    return HostLink(
        copy_s=_COPY_S, bytes_per_s=_BYTES_PER_S, block_bytes=block_bytes, layers=layers
    )


def _watch(
    engine: Engine, runner: Runner, arrivals: Sequence[Arrival], layers: int, **time: Any
) -> _Seen:
    """Serve the trace; the answers are the trace's own."""
    from shoal.serve.bench.replay import replay

    engine.runner = _Said(runner, _answers(arrivals))
    seen = _Seen()
    served = replay(engine, arrivals, watch=seen.take, **time)
    stats = engine.stats()
    seen.copies = layers * stats["swap_copies_total"]
    seen.blocks = stats["swap_out_blocks_total"] + stats["swap_in_blocks_total"]
    seen.switches = stats["preemptions_total"] / len(arrivals)
    seen.switch_s = stats["switch_seconds_total"]
    seen.ttft_p95 = float(np.percentile([one.ttft for one in served], 95))
    seen.tbt_p99 = float(np.percentile(seen.gaps, 99))
    seen.tokens_per_s = sum(one.n_output for one in served) / max(one.finish for one in served)
    return seen


def _answers(arrivals: Sequence[Arrival]) -> dict[str, Sequence[int]]:
    """What each turn is answered: what its conversation goes on with, or else zeros."""
    following: dict[str, Arrival] = {}
    result: dict[str, Sequence[int]] = {}
    for number, turn in reversed(list(enumerate(arrivals))):
        after, start = following.get(turn.session), len(turn.prompt)
        result[str(number)] = (0,) * turn.output_tokens
        if after is not None:
            result[str(number)] = after.prompt[start : start + turn.output_tokens]
        following[turn.session] = turn
    return result
