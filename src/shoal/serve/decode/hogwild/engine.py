"""The engine of concurrent workers: all workers of all requests in one forward pass.

A request with W workers comes as W requests with the same prompt, the later ones forks of the
first; they are one session. Sessions come first, first served, while workers and slots last.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ServeError, require
from shoal.core.parts import table
from shoal.ir import Output, Request, ServeJob
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer
from shoal.serve.decode.hogwild.blocks import BlockStore
from shoal.serve.decode.hogwild.forward import Forward
from shoal.serve.decode.hogwild.inspect import inspected
from shoal.serve.decode.hogwild.part import Hogwild
from shoal.serve.decode.hogwild.protocols import HogwildLayout
from shoal.serve.decode.hogwild.session import HogwildSession, HogwildWorker, WorkerFeed
from shoal.serve.decode.hogwild.words import WorkerWords
from shoal.serve.engine.adjust import Adjuster
from shoal.serve.engine.failure import failure
from shoal.serve.engine.params import check_params, check_tokens
from shoal.serve.engine.token_choice import choose_rows
from shoal.serve.text.grammar import Grammars, vocabulary
from shoal.serve.text.pieces import TextModel

log = logging.getLogger("shoal.serve")


class HogwildEngine:
    """Requests in, tokens of all their workers out.

    Args:
        part: how workers work together.
        words: number of workers -> the words between them.
        kv_tokens: tokens that the cache holds.
        max_position: most tokens of a view.
        max_running: most workers at a time.
        max_step_tokens: most tokens of a prompt in a step.
        adjust: changes scores before tokens are chosen by them.
        clock: s; what arrival times are given in.

    Raises:
        ServeError: the model's positions are not rotations, or there is no memory.
    """

    def __init__(
        self,
        model: Transformer,
        part: Hogwild,
        words: Callable[[int], WorkerWords],
        *,
        kv_tokens: int,
        max_position: int,
        max_running: int = 64,
        max_step_tokens: int = 512,
        adjust: Adjuster | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers = part.workers
        self.facts = {"workers": part.workers}
        self.answers = {"views": self.views}
        self._part, self._words = part, words
        self._layout: HogwildLayout = table("hogwild_layout").build(part.layout)
        self._vocab_size = model.config.vocab_size
        self._kv_tokens = kv_tokens
        self._max_running, self._max_step_tokens = max_running, max_step_tokens
        self.store = BlockStore(
            model, kv_tokens, longest=max_position, num_blocks=10 * max_running + 8
        )
        self.forward = Forward(model, self.store, realise=part.realise)
        self._adjust = adjust or Adjuster()
        self._clock = clock
        self._gathered: dict[str, list[Request]] = {}
        self._waiting: deque[HogwildSession] = deque()
        self.sessions: list[HogwildSession] = []
        self._told: list[dict[str, Any]] = []
        self._prompt_tokens = self._new_tokens = self._steps = 0
        self._seconds = 0.0

    def add(self, request: Request) -> None:
        """Queue a worker; its session begins when all of its workers are there.

        Raises:
            ServeError: its parameters or tokens are wrong, or it can never run.
        """
        params = request.params
        check_params(params)
        require(
            1 <= params.workers <= self.workers,
            f"request {request.id}: workers",
            params.workers,
            expected=f"1 to {self.workers}, the workers of this server",
            error=ServeError,
        )
        for what, value in (
            ("an adapter", request.adapter),
            ("a vector", params.pooling),
            ("log probabilities of its prompt", params.prompt_logprobs),
        ):
            if value is not None:
                raise ServeError(
                    f"request {request.id} wants {what}: concurrent workers have none; serve with "
                    "decode=autoregressive"
                )
        check_tokens(request, self._vocab_size)
        request.arrival = self._clock()
        leader = request.fork_of or request.id if params.workers > 1 else request.id
        gathered = self._gathered.setdefault(leader, [])
        gathered.append(request)
        if len(gathered) < params.workers:
            return
        session = self._session(self._gathered.pop(leader))
        self._waiting.append(session)

    def _session(self, requests: list[Request]) -> HogwildSession:
        number = len(requests)
        part = self._part
        alone = number == 1
        require(
            number <= self._max_running,
            f"request {requests[0].id}: workers",
            number,
            expected=f"at most max_running = {self._max_running}",
            error=ServeError,
        )
        return HogwildSession(
            self.store,
            self._layout,
            self._words(number),
            requests,
            [part.name_of(worker) for worker in range(number)],
            probe_every=0 if alone else part.probe_every,
            answer_tokens=part.answer_tokens,
        )

    def abort(self, request_id: str) -> Output | None:
        for leader, requests in list(self._gathered.items()):
            if any(one.id == request_id for one in requests):
                del self._gathered[leader]
                return Output(request_id, (), (), "abort")
        for session in (*self.sessions, *self._waiting):
            for worker in session.running:
                if worker.request.id == request_id:
                    worker.finish, worker.reported = "abort", True
                    self._end()
                    return Output(request_id, (), (), "abort")
        return None

    def _end(self) -> None:
        """Release sessions of which no worker runs any more."""
        for session in self.sessions:
            if not session.running:
                session.drop()
        self.sessions = [one for one in self.sessions if one.running]
        self._waiting = deque(one for one in self._waiting if one.running)

    @property
    def busy(self) -> bool:
        return bool(self.sessions or self._waiting)

    def _admit(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            running = sum(len(one.workers) for one in self.sessions)
            held = sum(one.room for one in self.sessions)
            blocks = sum(one.num_blocks for one in self.sessions)
            if (
                running + len(first.workers) > self._max_running
                or held + first.room > self._kv_tokens
                or blocks + first.num_blocks > len(self.store.slots)
            ):
                return
            self.sessions.append(self._waiting.popleft())
            first.begin()
            ids = [worker.request.id for worker in first.workers]
            self._told.append({"kind": "began", "ids": ids, "at": self._clock()})
            self._prompt_tokens += first.workers[0].request.n_prompt

    def step(self) -> list[Output]:
        started = self._clock()
        self._admit()
        requests = [
            one for session in self.sessions for one in session.feeds(self._max_step_tokens)
        ]
        chosen = self._contained(requests) if requests else {}
        outputs = []
        for session in self.sessions:
            for worker in session.workers:
                if worker in chosen and worker.finish is None:
                    token, infos = chosen[worker]
                    session.take(worker, token, infos)
            outputs += session.settle()
        self._end()
        self._steps += 1
        self._seconds += self._clock() - started
        self._new_tokens += sum(len(output.tokens) for output in outputs)
        return outputs

    def _compute(self, asked: list[WorkerFeed]) -> dict[HogwildWorker, tuple[int, Any]]:
        """The next token of each worker that is asked for one."""
        logits = self.forward([one.feed for one in asked])
        yielding = [one for one in asked if one.feed.yields]
        workers = [worker for one in yielding for worker in one.workers]
        if not workers:
            return {}
        rows = [row for row, one in enumerate(yielding) for _ in one.workers]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        requests = [worker.request for worker in workers]
        with torch.inference_mode():
            chosen = choose_rows(self._adjust, logits, requests)
        self._fail("refused", chosen.failed)
        self._fail("error", chosen.errors)
        return {
            worker: (chosen.tokens[worker.request.id][0], chosen.infos.get(worker.request.id, ()))
            for worker in workers
        }

    def _fail(self, kind: str, reasons: Mapping[str, str]) -> None:
        for request_id, reason in reasons.items():
            self.abort(request_id)
            self._told.append({"kind": kind, "id": request_id, "message": reason})

    def _contained(self, asked: list[WorkerFeed]) -> dict[HogwildWorker, tuple[int, Any]]:
        """The same; an unexpected error ends the workers of the step, whose blocks are closed."""
        try:
            return self._compute(asked)
        except ServeError:
            raise
        except Exception as cause:
            log.exception("a step of %d workers failed", len(asked))
            # What was read of a session and not computed is lost with it.
            workers = [worker for session in self.sessions for worker in session.running]
            self._fail("error", {worker.request.id: failure(cause) for worker in workers})
            return {}

    def drain_events(self) -> list[dict[str, Any]]:
        """Messages ``refused``, ``error`` and ``began`` of the last steps."""
        drain_events, self._told = self._told, []
        return drain_events

    def views(self) -> list[dict[str, Any]]:
        """What the workers of each session see now; see :func:`inspected`."""
        return [inspected(session) for session in self.sessions]

    def stats(self) -> Mapping[str, float]:
        """Gauges of now, and counters since the start, for metrics."""
        return {
            "requests_running": sum(len(one.running) for one in self.sessions),
            "requests_waiting": sum(len(one.running) for one in self._waiting),
            "tokens_prompt_total": self._prompt_tokens,
            "tokens_generated_total": self._new_tokens,
            "steps_total": self._steps,
            "step_seconds_total": self._seconds,
            "blocks_used": self._kv_tokens - self.store.num_free,
            "blocks_total": self._kv_tokens,
        }


# Keys of a job that are about requests of their own, each with a cache of pages.
_OTHERS = (
    "scheduler", "disagg", "parallel", "kv", "preempt", "host_tokens", "kv_format", "memory",
    "exact", "adapters", "max_adapters",
)  # fmt: skip


def build_engine(job: ServeJob) -> tuple[HogwildEngine, ModelConfig]:
    """The engine of a job whose requests have concurrent workers, and the model's configuration.

    Raises:
        ShoalError: the model cannot be read, or another key of the job does not go with workers.
    """
    from shoal.serve.engine.build import concrete, load_model

    part: Hogwild = table("decode").build(job.decode, where="decode")
    for key in _OTHERS:
        value, plain = getattr(job, key), ServeJob.model_fields[key].default
        require(
            value == plain,
            key,
            value,
            expected=f"{plain} with decode = hogwild, whose workers share blocks of their own",
            hint="leave it out",
            error=ServeError,
        )
    model = load_model(job)
    job = concrete(job, model.config, model.weight.dtype)
    assert job.kv_tokens is not None and job.max_position is not None
    text = TextModel(Path(job.model))
    engine = HogwildEngine(
        model,
        part,
        lambda workers: WorkerWords.of(
            part, workers, lambda words: text.encode(words, special=False), text.token_bytes
        ),
        kv_tokens=job.kv_tokens,
        max_position=job.max_position,
        max_running=job.max_running,
        max_step_tokens=job.max_step_tokens,
        adjust=Adjuster(Grammars(lambda: vocabulary(job, model.config.vocab_size))),
    )
    return engine, model.config
