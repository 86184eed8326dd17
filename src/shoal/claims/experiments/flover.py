"""[95] Flover: does one generation step for all requests beat batches that run to their end?

Source: Yao et al., Flover: A Temporal Fusion Framework for Efficient Autoregressive Model Parallel
Inference, 2023.

Requests that come at random are served by a real engine in real time, in turn by: temporal fusion
over slots; dynamic batching as FasterTransformer's users have it (what comes within a window, or
as many as a batch holds, is one batch; all of its rows run until the longest answer ends, and
then all answers are given); one request after the other; and the core's ``fcfs`` over pages. All
compute in the same engine with the same kernels, without padded prompts, and the tokens must be
the same. How it would be if a batch gave each answer when that ends (``static``) is recorded
beside it.

The quick run counts passes through the model: requests come at fixed steps instead of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part
from shoal.core.random import generator

if TYPE_CHECKING:
    from shoal.ir import Arrival, Request, ServeJob
    from shoal.serve.engine.loop import Engine

__all__ = ["Flover"]

_FUSED, _DYNAMIC, _SEQUENTIAL, _PAGED = "fusion", "dynamic batching", "sequential", "paged"
_STATIC = "static"
_JUDGED = (_FUSED, _DYNAMIC, _SEQUENTIAL, _PAGED)
_MAX_LEN = 512
_MODES: dict[str, dict[str, Any]] = {
    _FUSED: {"scheduler": "temporal_fusion", "kv": {"name": "slots", "max_len": _MAX_LEN}},
    _DYNAMIC: {"scheduler": "static", "kv": "contiguous"},
    _SEQUENTIAL: {"max_running": 1},
    _PAGED: {},
    _STATIC: {"scheduler": "static", "kv": "contiguous"},
}


@dataclass(slots=True)
class _Seen:
    """What serving the trace once gave; times in s, or in passes where those are counted."""

    makespan: float
    latency: float
    tokens: dict[str, tuple[int, ...]]
    passes: float = 0.0
    moves: float = 0.0
    step_s: float = 0.0


class _Clock:
    """Real time, or the number of passes."""

    def __init__(self, engine: Engine, *, counted: bool) -> None:
        import time

        self._engine, self._counted, self._time = engine, counted, time
        self._began = time.perf_counter()
        self._skipped = 0.0

    def now(self) -> float:
        """S since the start, or passes."""
        if self._counted:
            return self._engine.stats()["steps_total"] + self._skipped
        return self._time.perf_counter() - self._began

    def wait(self, until: float) -> None:
        """Nothing is computed until then."""
        left = until - self.now()
        if left <= 0:
            return
        if self._counted:
            self._skipped += left
        else:
            self._time.sleep(left)


@dataclass(slots=True)
class _Served:
    """Requests as they are served: when they came and ended."""

    requests: Sequence[Request]
    arrivals: Sequence[Arrival]
    ends: dict[str, float] = field(default_factory=dict)


@part
class Flover(BaseClaim):
    """Requests that come at random, fused in time or in batches.

    Args:
        model: of the zoo, with random weights.
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

    rows: ClassVar[tuple[int, ...]] = (95,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        counted = {
            name: self._once(run, name, 0, counted=True) for name in (_FUSED, _DYNAMIC, _SEQUENTIAL)
        }
        fused, dynamic = counted[_FUSED], counted[_DYNAMIC]
        run.put("passes_vs_dynamic", fused.makespan, dynamic.makespan)
        run.put("moves_per_request", fused.moves / self.requests)
        run.put("wrong_answers", self._wrong(counted))
        run.details |= {
            f"{name}, in passes": [one.makespan, one.latency] for name, one in counted.items()
        }
        if run.quick:
            return
        seen: dict[str, list[_Seen]] = {}
        order = generator(run.seed, purpose="order of modes")
        for turn in range(self.rounds):
            for place in order.permutation(len(_MODES)):
                name = list(_MODES)[int(place)]
                if name == _STATIC and turn:
                    continue
                run.progress(name, turn / self.rounds)
                seen.setdefault(name, []).append(self._once(run, name, turn, counted=False))
        for metric, what, baseline in (
            ("makespan_vs_dynamic", "makespan", _DYNAMIC),
            ("makespan_vs_sequential", "makespan", _SEQUENTIAL),
            ("latency_vs_dynamic", "latency", _DYNAMIC),
            # The same tokens in every mode: their throughputs are as their makespans.
            ("throughput_vs_paged", "makespan", _PAGED),
        ):
            run.put(metric, *([getattr(o, what) for o in seen[n]] for n in (_FUSED, baseline)))
        run.put("moves_per_request", (o.moves / self.requests for o in (fused, *seen[_FUSED])))
        run.put(
            "wrong_answers",
            (self._wrong({n: seen[n][turn] for n in _JUDGED}) for turn in range(self.rounds)),
        )
        for name, ran in seen.items():
            run.details[name] = {
                what: [round(getattr(one, what), 4) for one in ran]
                for what in ("makespan", "latency", "passes", "moves", "step_s")
            }
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

    def _wrong(self, seen: Mapping[str, _Seen]) -> float:
        """Requests that got different tokens in different modes."""
        answers = seen[_SEQUENTIAL].tokens
        return float(
            sum(
                any(one.tokens[request] != answer for one in seen.values())
                for request, answer in answers.items()
            )
        )

    def _trace(self, context: ExperimentContext, vocab_size: int, rate: float) -> list[Arrival]:
        """Requests at random times: prompts of 16 to 128 tokens, answers of 16 to 256.

        Twice as long is as likely as half as long, as with answers that people get.
        """
        from shoal.ir import Arrival

        draw = generator(context.seed, purpose="requests that come at random")
        result, at = [], 0.0
        for _ in range(self.requests):
            at += float(draw.exponential(1 / rate))
            prompt = draw.integers(0, vocab_size, int(draw.integers(16, 129)))
            answer = round(16.0 * 16.0 ** float(draw.random()))
            result.append(Arrival(at, tuple(int(one) for one in prompt), answer))
        return result

    def _job(self, name: str, model: str) -> ServeJob:
        from shoal.ir import ServeJob

        return ServeJob.model_validate(
            {
                "model": model,
                "precision": "fp32",
                "threads": 1,
                "max_running": self.batch,
                "max_step_tokens": 256,
                "max_position": _MAX_LEN,
                "kv_tokens": self.batch * _MAX_LEN,
                **_MODES[name],
            }
        )

    def _serve(self, context: ExperimentContext, name: str, *, counted: bool) -> _Seen:
        """Serve the trace once."""
        from shoal.cost.serving.simulator import request_of
        from shoal.serve.engine.build import engine_of, prepare
        from shoal.train import zoo

        model_name = "shoal-0.3m" if counted else self.model
        job = self._job(name, model_name)
        model = context.remember(
            f"model {model_name}", lambda: prepare(job, zoo.random(model_name, context.seed))
        )
        # Counted, a pass is what 2.5 ms are otherwise: about what one takes.
        scale = 400.0 if counted else 1.0
        trace = self._trace(context, model.config.vocab_size, self.rate / scale)
        engine, _, _ = engine_of(job, model)
        assert engine.kv is not None
        served = _Served([request_of(str(n), one) for n, one in enumerate(trace)], trace)
        clock = _Clock(engine, counted=counted)
        if name == _DYNAMIC:
            self._batches(engine, served, clock, self.window_s * scale)
        else:
            _continuous(engine, served, clock)
        stats = engine.stats()
        latencies = [served.ends[str(n)] - one.at for n, one in enumerate(trace)]
        return _Seen(
            makespan=max(served.ends.values()) - trace[0].at,
            latency=float(np.mean(latencies)),
            tokens={
                request.id: tuple(
                    request.tokens[request.n_prompt : request.n_prompt + arrival.output_tokens]
                )
                for request, arrival in zip(served.requests, trace, strict=True)
            },
            passes=stats["steps_total"],
            moves=float(engine.kv.stats().get("slot_moves", 0.0)),
            step_s=stats["step_seconds_total"],
        )

    def _batches(self, engine: Engine, served: _Served, clock: _Clock, window: float) -> None:
        """Whole batches: of those that came in time, all until the longest answer ends."""
        from dataclasses import replace

        place, total = 0, len(served.arrivals)
        while place < total:
            # A batch begins when it is full, or when its first request has waited long enough.
            first = served.arrivals[place].at
            full = served.arrivals[min(place + self.batch, total) - 1].at
            last_chance = first + window
            clock.wait(min(full, last_chance) if place + self.batch <= total else last_chance)
            now = clock.now()
            batch: list[Request] = []
            while place < total and len(batch) < self.batch and served.arrivals[place].at <= now:
                batch.append(served.requests[place])
                place += 1
            longest = max(one.params.max_tokens for one in batch)
            for request in batch:
                request.params = replace(request.params, max_tokens=longest)
                engine.add(request)
            while engine.busy:
                engine.step()
            for request in batch:
                served.ends[request.id] = clock.now()


def _continuous(engine: Engine, served: _Served, clock: _Clock) -> None:
    """Every request is given to the engine when it comes."""
    place, total = 0, len(served.arrivals)
    while place < total or engine.busy:
        while place < total and served.arrivals[place].at <= clock.now():
            engine.add(served.requests[place])
            place += 1
        if not engine.busy:
            clock.wait(served.arrivals[place].at)
            continue
        outputs = engine.step()
        for output in outputs:
            if output.finish is not None:
                served.ends[output.request_id] = clock.now()
