"""An engine without a model: it says the prompt again and again, one token a step.

Some tokens of a prompt make it do what engines should not do.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

from shoal.core.errors import ServeError
from shoal.ir.serving import Output, TokenInfo

VOCAB = 300
MAX_POSITION = 4000
CRASH, HANG, SLOW, REFUSE, EXIT = 290, 291, 292, 293, 294


class FakeEngine:
    def __init__(self):
        self.requests = {}
        self.vectors = []
        self.facts, self.answers = {}, {}
        self.steps = 0
        self.aborts = 0
        self.generated = 0

    @property
    def busy(self):
        return bool(self.requests)

    def add(self, request):
        if REFUSE in request.tokens:
            raise ServeError(f"request {request.id}: longer than the cache; shorten it")
        self.requests[request.id] = request
        self.vectors.append({"kind": "began", "ids": [request.id], "at": time.monotonic()})

    def abort(self, request_id):
        self.aborts += self.requests.pop(request_id, None) is not None

    def step(self):
        self.steps += 1
        outputs = []
        for request in list(self.requests.values()):
            prompt = request.tokens[: request.n_prompt]
            if CRASH in prompt:
                raise ValueError("a step that fails")
            if EXIT in prompt and request.n_generated >= 3:
                os._exit(7)
            if HANG in prompt:
                time.sleep(600)
            if SLOW in prompt:
                time.sleep(0.02)
            params = request.params
            if params.pooling and request.n_generated == 0:
                values = [float(sum(prompt)), 0.0, -1.0]
                self.vectors.append({"kind": "vector", "id": request.id, "values": values})
            if params.prompt_logprobs is not None and request.n_generated == 0:
                best = [(t, -1.0 - t) for t in range(params.prompt_logprobs)]
                infos = [(-0.25 * t, best) for t in range(1, len(prompt))]
                told = {"kind": "prompt_logprobs", "id": request.id, "first": 1, "infos": infos}
                self.vectors.append(told)
            token = prompt[request.n_generated % len(prompt)]
            request.tokens.append(token)
            self.generated += 1
            infos = ()
            if params.logprobs is not None:
                top = tuple((t, -1.0 - t) for t in range(params.logprobs))
                infos = (TokenInfo(-0.5 if token else float("-inf"), top),)
            finish = None
            if token in params.stop_ids:
                finish = "stop"
            elif request.n_generated >= params.max_tokens:
                finish = "length"
            if finish:
                del self.requests[request.id]
            outputs.append(Output(request.id, (token,), infos, finish))
        return outputs

    def drain_events(self):
        drain_events, self.vectors = self.vectors, []
        return drain_events

    def stats(self):
        return {
            "requests_running": float(len(self.requests)),
            "requests_waiting": 0.0,
            "tokens_prompt_total": 0.0,
            "tokens_generated_total": float(self.generated),
            "steps_total": float(self.steps),
            "step_seconds_total": 0.0,
            "preemptions_total": 0.0,
            "blocks_used": 0.0,
            "blocks_total": 10.0,
            "prefix_hit_tokens": 0.0,
            "prefix_query_tokens": 0.0,
            "aborts_total": float(self.aborts),
        }


def build(job):
    config = SimpleNamespace(vocab_size=VOCAB, max_position=MAX_POSITION, eos_ids=frozenset({0}))
    return FakeEngine(), config


def build_nothing(job):
    raise ServeError(f"{job.model}: no weights; fetch them")


def build_badly(job):
    raise RuntimeError("the shelf is empty")


def build_never(job):
    time.sleep(600)
