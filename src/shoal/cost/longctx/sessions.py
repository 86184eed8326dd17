"""Sessions with a long document: how many an hour one device completes.

Every user reads a document, asks some questions about it, gets an answer of some tokens each, and
thinks before the next. When more users are there than the device holds, caches of those who think
go to the host and come back.

Two answers: a closed form, and the serving simulator with whatever scheduler and preemption it is
given. The closed form is that of operational analysis, and is a bound: the device, and the link in
each direction, complete no more than one session in the time that each is busy with one, and no
more come than users return.

Source: Fu, Challenges in Deploying Long-Context Transformers, 2024, section 2 (the model of
sessions); Denning and Buzen, The Operational Analysis of Queueing Network Models, 1978.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.errors import PlanError, require
from shoal.cost.longctx.peak import LongContext
from shoal.cost.serving.simulator import SimulatedRunner
from shoal.ir import HostLink, Request, SamplingParams, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Who comes, and what they do.

    Args:
        users: U, each with one session after another.
        document: S, tokens.
        rounds: r, questions of a session.
        answer: g, tokens of an answer.
        think_s: z, s before each question but the first.
        question: tokens of a question.
    """

    users: int
    document: int
    rounds: int = 5
    answer: int = 250
    think_s: float = 30.0
    question: int = 32

    def __post_init__(self) -> None:
        for name in ("users", "document", "rounds", "answer", "question"):
            value = getattr(self, name)
            require(value >= 1, f"sessions.{name}", value, expected="1 or more")
        require(self.think_s >= 0, "sessions.think_s", self.think_s, expected="0 or more")

    @property
    def longest(self) -> int:
        """Tokens of a session at its end."""
        return self.document + self.rounds * (self.question + self.answer)


def session_throughput(setting: LongContext, sessions: Sessions) -> float:
    """Completed sessions an hour, by the closed form.

    Raises:
        PlanError: not even one session fits.
    """
    tokens = sessions.document
    held = setting.concurrency(tokens)
    require(
        held >= 1,
        f"{setting.model.name} on {setting.device.name}",
        f"{setting.model.cache_bytes(tokens) / 1e9:,.1f} GB of cache for {tokens} tokens",
        expected=f"at most the {setting.room / 1e9:,.1f} GB that the weights leave",
        hint="use more devices (tp), a shorter context, or a way to reduce the cache",
        error=PlanError,
    )
    rounds, answer = sessions.rounds, sessions.answer
    # Those that generate at a time share the weights.
    batch = min(held, sessions.users)
    step = setting.step_s([tokens] * batch) / batch
    # Of those who think, the share that the device does not hold goes aside and comes back.
    away = (rounds - 1) * max(0.0, 1 - held / sessions.users) * setting.switch_s(tokens)
    busy = setting.prefill_s(tokens) + rounds * answer * step
    alone = (
        setting.prefill_s(tokens)
        + rounds * answer * setting.decode_s(tokens)
        + (rounds - 1) * sessions.think_s
        + 2 * away
    )
    return 3600.0 * min(1 / max(busy, away), sessions.users / alone)


@dataclass(frozen=True, slots=True)
class PeakCost:
    """A :class:`~shoal.ir.StepCost` of steps at the peak."""

    setting: LongContext

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        one, model = self.setting, self.setting.model
        flops = moved = 0.0
        for start, length in chunks:
            stop = start + length
            flops += model.prefill_flops(stop, one.attention)
            if start:
                flops -= model.prefill_flops(start, one.attention)
            moved += model.cache_bytes(stop)
        compute = flops / (one.compute_efficiency * one.device.flops)
        bandwidth = one.memory_efficiency * one.device.bandwidth
        return max(compute, (model.weight_bytes + moved) / bandwidth)


def host_link_of(setting: LongContext, block_size: int) -> HostLink:
    """The link between cache and host, for a scheduler that swaps."""
    return HostLink(
        copy_s=0.0,
        bytes_per_s=setting.device.link,
        block_bytes=setting.model.kv_bytes * block_size,
    )


def simulate_sessions(
    setting: LongContext,
    sessions: Sessions,
    scheduler: Scheduler,
    *,
    block_size: int,
    each: int = 2,
) -> float:
    """Completed sessions an hour, by simulation.

    Users are a closed loop: a question comes when its user has thought about the answer before.

    Args:
        setting: model and device.
        sessions: the users' sessions.
        scheduler: one without requests, whose cache holds what the device holds.
        block_size: tokens of a block of its cache.
        each: sessions of every user.

    Raises:
        ServeError: a session can never run.
    """
    runner = SimulatedRunner(PeakCost(setting), host_link_of(setting, block_size))
    # (when, user, session, round): the next thing that each user does.
    coming = [(0.0, user, 0, 0) for user in range(sessions.users)]
    heapq.heapify(coming)
    outcome: dict[str, tuple[int, int, int]] = {}
    texts: dict[int, list[int]] = {}
    now, ended = 0.0, 0
    requests: dict[str, Request] = {}
    while coming or outcome:
        while coming and coming[0][0] <= now:
            _, user, session, turn = heapq.heappop(coming)
            if turn == 0:
                # No other document begins with this number.
                mark = 1 + user + sessions.users * session
                texts[user] = [mark] * sessions.document
            texts[user] += [0] * sessions.question
            name = f"{user}.{session}.{turn}"
            prompt = list(texts[user])
            params = SamplingParams(max_tokens=sessions.answer)
            requests[name] = Request(name, prompt, len(prompt), params, arrival=now)
            outcome[name] = (user, session, turn)
            scheduler.add(requests[name])
        step = scheduler.plan(now)
        if not step:
            now = coming[0][0]
            continue
        result = runner.execute(step)
        now += result.seconds
        for output in scheduler.commit(step, result, now):
            if output.finish is None:
                continue
            user, session, turn = outcome.pop(output.request_id)
            texts[user] = requests.pop(output.request_id).tokens
            if turn + 1 < sessions.rounds:
                heapq.heappush(coming, (now + sessions.think_s, user, session, turn + 1))
            else:
                ended += 1
                if session + 1 < each:
                    heapq.heappush(coming, (now, user, session + 1, 0))
    return 3600.0 * ended / now
