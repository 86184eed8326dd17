"""[95] Flover: does one generation step for all requests beat batches that run to their end?

Source: Yao et al., Flover: A Temporal Fusion Framework for Efficient Autoregressive Model Parallel
Inference, 2023.

Requests that come at random, served in turn by temporal fusion over slots; by dynamic batching as
FasterTransformer's users have it (what comes within a window is one batch that runs until its
longest answer ends); one by one; and by ``fcfs`` over pages. All use the same engine and kernels,
without padded prompts, and must give the same tokens. The quick run counts passes: requests come at
fixed steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Gt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import serve_job
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.ir import Arrival

if TYPE_CHECKING:
    from shoal.ir import Output
    from shoal.serve.engine.loop import Engine

_FUSED, _DYNAMIC, _SEQUENTIAL, _PAGED = "fusion", "dynamic batching", "sequential", "paged"
_JUDGED = (_FUSED, _DYNAMIC, _SEQUENTIAL, _PAGED)
_STATIC = "static"
_MAX_LEN = 512
_MODES: dict[str, dict[str, Any]] = {
    _FUSED: {"scheduler": "temporal_fusion", "kv": {"name": "slots", "max_len": _MAX_LEN}},
    _DYNAMIC: {"scheduler": "static", "kv": "contiguous"},
    _SEQUENTIAL: {"max_running": 1},
    _PAGED: {},
    _STATIC: {"scheduler": "static", "kv": "contiguous"},
}
# When requests ended, and their tokens, in the order in which they came.
_Ends = tuple[list[float], list[list[int]]]


@dataclass(slots=True)
class _Seen:
    """What serving the trace once gave; times in s, or in passes where those are counted."""

    makespan: float
    latency: float
    tokens: list[list[int]]
    passes: float
    moves: float
    step_s: float


class _Passes:
    """A clock that counts passes, and steps over the time in which there is nothing to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._skipped = engine, 0.0

    def now(self) -> float:
        """Passes so far."""
        return self._engine.stats()["steps_total"] + self._skipped

    def sleep(self, passes: float) -> None:
        """Nothing is computed for so long."""
        self._skipped += passes


@part
class Flover(BaseClaim, row=95, needs=("torch",)):
    """Requests that come at random, fused in time or in batches.

    Args:
        model: model of the zoo, with random weights.
        requests: requests served.
        rate: requests a second.
        batch: most requests at once, in every mode but the sequential one.
        window_s: how long dynamic batching waits for others after the first of a batch came.
        rounds: times that each mode is served.
    """

    model: str = "shoal-4m"
    requests: Annotated[int, Ge(1)] = 60
    rate: Annotated[float, Gt(0)] = 80.0
    batch: Annotated[int, Ge(1)] = 16
    window_s: Annotated[float, Ge(0)] = 0.05
    rounds: Annotated[int, Ge(1)] = 8

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        counted = {
            name: self._once(run, name, 0, counted=True) for name in (_FUSED, _DYNAMIC, _SEQUENTIAL)
        }
        fused, dynamic = counted[_FUSED], counted[_DYNAMIC]
        run.put("passes_vs_dynamic", fused.makespan, dynamic.makespan)
        run.put("moves_per_request", fused.moves / self.requests)
        run.put("wrong_answers", _wrong(*counted.values()))
        if run.quick:
            return
        seen: dict[str, list[_Seen]] = {}
        again: dict[str, list[_Seen]] = {}
        order = generator(run.seed, purpose="order of modes")
        for turn in range(self.rounds):
            for place in order.permutation(len(_MODES)):
                name = list(_MODES)[int(place)]
                if name == _STATIC and turn:
                    continue
                run.progress(name, turn / self.rounds)
                seen.setdefault(name, []).append(self._once(run, name, turn, counted=False))
            # In the A/A run each metric has its own baseline in the place of the method.
            for name in (_DYNAMIC, _SEQUENTIAL, _PAGED) if run.as_baseline else ():
                again.setdefault(name, []).append(self._serve(run.context, name, counted=False))
        for metric, what, baseline in (
            ("makespan_vs_dynamic", "makespan", _DYNAMIC),
            ("makespan_vs_sequential", "makespan", _SEQUENTIAL),
            ("latency_vs_dynamic", "latency", _DYNAMIC),
            # The same tokens in every mode: their throughputs are as their makespans.
            ("throughput_vs_paged", "makespan", _PAGED),
        ):
            pair = (again[baseline] if again else seen[_FUSED], seen[baseline])
            run.put(metric, *([getattr(one, what) for one in side] for side in pair))
        run.put("moves_per_request", (o.moves / self.requests for o in (fused, *seen[_FUSED])))
        run.put(
            "wrong_answers",
            (_wrong(*(seen[n][turn] for n in _JUDGED)) for turn in range(self.rounds)),
        )
        run.profile = "; ".join(
            f"{name}: {ran[0].passes:.0f} passes in {ran[0].step_s:.2f} s of {ran[0].makespan:.2f}"
            for name, ran in seen.items()
        )

    def _once(self, run: ClaimRun, name: str, turn: int, *, counted: bool) -> _Seen:
        """Serve with a mode; the A/A run serves the baseline again in the method's place."""
        again = run.as_baseline and name == _FUSED
        return run.remember(
            f"{name} {turn} {counted} {again}",
            lambda: self._serve(run.context, _DYNAMIC if again else name, counted=counted),
        )

    def _trace(self, context: ExperimentContext, vocab_size: int, rate: float) -> list[Arrival]:
        """Requests at random times: prompts of 16 to 128 tokens, answers of 16 to 256.

        Twice as long is as likely as half as long, as with answers that people get.
        """
        draw = generator(context.seed, purpose="requests that come at random")
        result, at = [], 0.0
        for _ in range(self.requests):
            at += float(draw.exponential(1 / rate))
            prompt = draw.integers(0, vocab_size, int(draw.integers(16, 129)))
            answer = round(16.0 * 16.0 ** float(draw.random()))
            result.append(Arrival(at, tuple(int(one) for one in prompt), answer))
        return result

    def _serve(self, context: ExperimentContext, name: str, *, counted: bool) -> _Seen:
        """Serve the trace once."""
        from shoal.serve.bench.replay import replay
        from shoal.serve.engine.build import engine_of, prepare
        from shoal.train import zoo

        zoo_name = "shoal-0.3m" if counted else self.model
        fields: dict[str, Any] = {
            "max_running": self.batch, "max_step_tokens": 256, "max_position": _MAX_LEN,
            "kv_tokens": self.batch * _MAX_LEN,
        }  # fmt: skip
        job = serve_job(zoo_name, **(fields | _MODES[name]))
        model = context.remember(
            f"model {zoo_name}", lambda: prepare(job, zoo.random(zoo_name, context.seed))
        )
        # Counted, a pass is what 2.5 ms are otherwise: about what one takes.
        scale = 400.0 if counted else 1.0
        trace = self._trace(context, model.config.vocab_size, self.rate / scale)
        engine, _, _ = engine_of(job, model)
        assert engine.kv is not None
        clock: Any = _Passes(engine)
        now, sleep = (clock.now, clock.sleep) if counted else (time.perf_counter, time.sleep)
        if name == _DYNAMIC:
            ends, tokens = self._batches(engine, trace, now, sleep, self.window_s * scale)
        else:
            tokens = [[] for _ in trace]

            def take(output: Output, _: float) -> None:
                tokens[int(output.request_id)].extend(output.tokens)

            ends = [one.finish for one in replay(engine, trace, clock=now, sleep=sleep, watch=take)]
        stats = engine.stats()
        return _Seen(
            makespan=max(ends) - trace[0].at,
            latency=float(np.mean([end - one.at for end, one in zip(ends, trace, strict=True)])),
            tokens=tokens,
            passes=stats["steps_total"],
            moves=float(engine.kv.stats().get("slot_moves", 0.0)),
            step_s=stats["step_seconds_total"],
        )

    def _batches(
        self, engine: Engine, trace: Sequence[Arrival], clock: Any, sleep: Any, window: float
    ) -> _Ends:
        """Whole batches: of those that came in time, all until the longest answer ends."""
        from shoal.cost.serving.simulator import request_of

        requests = [request_of(str(n), one) for n, one in enumerate(trace)]
        ends: list[float] = []
        began = clock()
        while len(ends) < len(trace):
            # A batch begins when it is full, or when its first request has waited long enough.
            waiting = trace[len(ends) : len(ends) + self.batch]
            begin = waiting[0].at + window
            if len(waiting) == self.batch:
                begin = min(begin, waiting[-1].at)
            sleep(max(0.0, begin - (clock() - began)))
            now = clock() - began
            count = sum(one.at <= now for one in waiting)
            batch = requests[len(ends) : len(ends) + count]
            longest = max(one.params.max_tokens for one in batch)
            for request in batch:
                request.params = replace(request.params, max_tokens=longest)
                engine.add(request)
            while engine.busy:
                engine.step()
            ends += [clock() - began] * count
        answers = [
            one.tokens[one.n_prompt : one.n_prompt + asked.output_tokens]
            for one, asked in zip(requests, trace, strict=True)
        ]
        return ends, answers


def _wrong(*seen: _Seen) -> float:
    """Requests that got different tokens in different modes."""
    every = zip(*(one.tokens for one in seen), strict=True)
    return float(sum(any(one != answers[0] for one in answers) for answers in every))
