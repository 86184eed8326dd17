"""The engine: plan a step, execute it, commit what it gave.

It is one loop for every scheduler and every runner, and has no thread of its own: its owner calls
:meth:`Engine.step` while it is :attr:`Engine.busy`. What techniques do beside that, they do as
:mod:`~shoal.serve.engine.hooks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shoal.ir import Chunk, KVManager, Output, Request, Runner, Scheduler, Step, StepResult
from shoal.serve.engine.counters import CountersHook
from shoal.serve.engine.hooks import EngineHook, EngineHooks, ExecutedStep
from shoal.serve.engine.isolation import IsolationHook
from shoal.serve.engine.params import check_params, check_tokens


class EnginePlanner(Protocol):
    """What plans and commits steps: a scheduler, or what plans ahead for one."""

    def plan(self, now: float) -> Step:
        """See :class:`~shoal.ir.engine.Scheduler`."""

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """See :class:`~shoal.ir.engine.Scheduler`."""


class Engine:
    """Requests in, tokens out.

    Args:
        runner: computes it.
        kv: the scheduler's bookkeeping of blocks, for :meth:`stats`.
        vocab_size: tokens that the model knows; prompts are checked against it.
        hooks: of techniques, beside those that count and that contain failures.
        clock: s; what arrival times are given in.

    Attributes:
        hooks: of all techniques, in their order.
        facts: options that clients may request, from all hooks.
        answers: questions that are answered between two steps, by all hooks.
        last_chunks: of the last step that was planned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        kv: KVManager | None = None,
        vocab_size: int | None = None,
        hooks: Iterable[EngineHook] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.runner, self.kv = scheduler, runner, kv
        self.vocab_size, self.clock = vocab_size, clock
        self.last_chunks: tuple[Chunk, ...] = ()
        self._planner: EnginePlanner = scheduler
        self._told: list[dict[str, Any]] = []
        self.hooks: EngineHooks[EngineHook] = EngineHooks()
        for hook in (CountersHook(), IsolationHook(), *hooks):
            self.register(hook)

    def register(self, hook: EngineHook) -> None:
        """Let a technique act in this engine.

        Raises:
            ConfigError: see :meth:`~shoal.serve.engine.hooks.EngineHooks.add`.
        """
        self.hooks.add(hook)
        hook.engine = self
        self.facts = self.hooks.gather(EngineHook.facts)
        self.answers = self.hooks.gather(EngineHook.answers)

    def add(self, request: Request) -> None:
        """Queue a request; its arrival is now.

        Raises:
            ServeError: its parameters or tokens are wrong, or it can never run.
        """
        check_params(request.params, self.facts)
        check_tokens(request, self.vocab_size)
        request.arrival = self.clock()
        with self.hooks.within(EngineHook.guard):
            self.hooks(EngineHook.check, request)
            self.scheduler.add(request)
            self.hooks(EngineHook.admitted, request)

    def abort(self, request_id: str) -> Output | None:
        """Forget a request; None if there is none of that id (any more)."""
        with self.hooks.within(EngineHook.guard):
            self.hooks(EngineHook.ended, request_id)
            return self.scheduler.abort(request_id)

    @property
    def busy(self) -> bool:
        """Whether there is a request that is not finished."""
        return self.scheduler.num_running > 0 or self.scheduler.num_waiting > 0

    def step(self) -> list[Output]:
        """Plan, execute and commit one step; nothing when idle.

        Raises:
            ServeError: the engine cannot go on.
        """
        try:
            self.hooks(EngineHook.before_plan)
            started = self.clock()
            step = self._extended(self._plan(started))
            return self._commit(step, self.runner.execute(step), started) if step else []
        except Exception as cause:
            if not any(recovers(cause) for recovers in self.hooks.at(EngineHook.failed)):
                raise
            return []

    def _plan(self, now: float) -> Step:
        with self.hooks.within(EngineHook.guard):
            return self._planner.plan(now)

    def _extended(self, step: Step) -> Step:
        for extended in self.hooks.at(EngineHook.planned):
            step = extended(step)
        self.last_chunks = step.chunks
        return step

    def _commit(self, step: Step, result: StepResult, started: float) -> list[Output]:
        done = ExecutedStep(step, result, started, self.clock())
        with self.hooks.within(EngineHook.guard):
            self.hooks(EngineHook.executed, done)
            outputs = self._planner.commit(step, result, done.now)
            self.hooks(EngineHook.committed, done, outputs)
            for output in outputs:
                if output.finish is not None:
                    self.hooks(EngineHook.ended, output.request_id)
        return outputs

    def tell(self, kind: str, **words: Any) -> None:
        """Add a message to those that :meth:`told` gives."""
        self._told.append({"kind": kind, **words})

    def drain_events(self) -> list[dict[str, Any]]:
        """What the last steps gave besides tokens, once: failed and begun requests, and prompts.

        ``refused`` and ``error`` (id, message), ``began`` (ids, at), ``vector`` (id, values) or
        ``prompt_logprobs`` (id, first, infos), as messages of the process.
        """
        drain_events, self._told = self._told, []
        return drain_events

    def stats(self) -> dict[str, float]:
        """Gauges of now, and counters since the start, for metrics."""
        with self.hooks.within(EngineHook.guard):
            kept = self.kv.stats() if self.kv is not None else {}
            return {
                "requests_running": self.scheduler.num_running,
                "requests_waiting": self.scheduler.num_waiting,
                **self.hooks.gather(EngineHook.metrics),
                "blocks_used": kept.get("blocks_used", 0.0),
                "blocks_total": self.kv.num_blocks if self.kv is not None else 0.0,
                "prefix_hit_tokens": kept.get("prefix_hit_tokens", 0.0),
                "prefix_query_tokens": kept.get("prefix_query_tokens", 0.0),
                "forks_total": kept.get("forks", 0.0),
                "blocks_copied_total": kept.get("blocks_copied", 0.0),
            }

    def close(self) -> None:
        """End what hooks have begun."""
        self.hooks(EngineHook.close)
