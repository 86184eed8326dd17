"""[40] DistServe: do separate instances for prompts and generation serve more under targets?

Goodput per device of a 13 B model, simulated from given coefficients: one prefill and one decode
instance beside engines that do both, over targets for the time per token (where it is loose,
separate instances lose: claimed as well). The simulator beside an M/D/1 queue's closed form. Two
real processes at five rates, predicted before they are served. The A/A run has prompts-first
engines, and a prediction without queues.

Source: Zhong et al., DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large
Language Model Serving, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.phased import DecodeLine, Phased, PromptLine
from shoal.core.parts import part, table
from shoal.cost.serving.fleet import (
    KVTransferLink,
    SimulatedFleet,
    SimulatedInstance,
    simulate_fleet,
)
from shoal.cost.serving.queueing import md1_ttft
from shoal.ir import Arrival, SchedulerLimits
from shoal.plan.batching.dispatch import LeastLoadedDispatcher
from shoal.plan.serving.goodput import Goodput, Slo, poisson

if TYPE_CHECKING:
    from shoal.claims.experiments.distserve_real import RatePoint

COST = Phased(
    prefill=PromptLine(step=18.1e-3, token=0.102e-3, square=7.1e-9),
    decode=DecodeLine(step=19.9e-3, key=6.3e-7, request=0.0385e-3),
)
"""13 B parameters on one device: prompts by tokens, decodes by context and requests."""

_KV_TOKENS, _TOKEN_BYTES, _BANDWIDTH = 42_000, 0.82e6, 25e9
_POSITIONS = 4096
_BATCH = 2048
# Tokens of a step of the engine that cuts prompts: the best of these counts.
_CHUNKS = (256, 512, 2048)
_TPOTS = (0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2)
_CODE_TTFT, _CODE_TPOT = 0.125, 0.03
# Long prompts of chat take a quarter of a second alone: a second leaves the others room.
_CHAT_TTFT, _CHAT_TPOT = 1.0, 0.2


def system(name: str) -> tuple[Callable[[Sequence[Arrival]], SimulatedFleet], int]:
    """How a system serves, and its devices: ``apart``, ``prefill_first`` or ``fcfs:TOKENS``."""

    def instance(kind: str, part: dict[str, Any], tokens: int) -> SimulatedInstance:
        kv = table("kv").build({"name": "paged", "prefix_reuse": False}).build(_KV_TOKENS)
        limits = SchedulerLimits(max_running=256, max_step_tokens=tokens, max_position=_POSITIONS)
        return SimulatedInstance(table(kind).build(part).build(kv, limits), COST)

    if name == "apart":
        wire = KVTransferLink(bandwidth=_BANDWIDTH, token_bytes=_TOKEN_BYTES)

        def apart(arrivals: Sequence[Arrival]) -> SimulatedFleet:
            front = instance("phase", {"name": "prefill", "batch_tokens": _BATCH}, _BATCH)
            back = instance("phase", {"name": "decode"}, _BATCH)
            return SimulatedFleet([front], [back], LeastLoadedDispatcher(1, 1), arrivals, wire=wire)

        return apart, 2
    scheduler, _, tokens = name.partition(":")

    def both(arrivals: Sequence[Arrival]) -> SimulatedFleet:
        one = instance("scheduler", {"name": scheduler}, int(tokens or _BATCH))
        return SimulatedFleet([one], [], LeastLoadedDispatcher(1), arrivals)

    return both, 1


@part
class DistServe(BaseClaim, row=40):
    """Goodput under targets, simulated; two processes, predicted and served.

    Args:
        requests: simulated for each device.
        seconds: seconds that each of the ten real runs takes, about.
        model: model of the zoo, for the real runs.
    """

    requests: Annotated[int, Ge(500)] = 600
    seconds: Annotated[float, Gt(0)] = 8.0
    model: str = "shoal-8m"

    def collect(self, run: ClaimRun) -> None:
        """Simulate; then, unless it is quick, serve."""
        rates: dict[tuple[str, str], Goodput] = run.remember("rates", dict)
        step = 0.5 if run.quick else 0.05

        def found(name: str, workload: str, slo: Slo) -> float:
            key = name, workload
            if key not in rates:
                serve, devices = system(name)
                count = (500 if run.quick else self.requests) * devices
                lengths = (
                    table("workload")
                    .build({"name": workload})
                    .arrivals(count=count, vocab_size=1000, max_position=_POSITIONS, seed=run.seed)
                )
                rates[key] = Goodput(serve, poisson(lengths, count, run.seed), devices)
            return rates[key].find(slo, tolerance=step, start=4.0)

        chunks = _CHUNKS[1:2] if run.quick else _CHUNKS

        def chunked(workload: str, slo: Slo) -> float:
            return max(found(f"fcfs:{size}", workload, slo) for size in chunks)

        ours = run.pick("apart", "prefill_first")
        tight = Slo(ttft=_CODE_TTFT, tpot=_CODE_TPOT)
        mine = found(ours, "code", tight)
        run.put("over_prefill_first", mine, found("prefill_first", "code", tight))
        run.put("over_chunked", mine, chunked("code", tight))
        if run.quick:
            return
        run.progress("curves", 0.1)
        for workload, ttft in (("code", _CODE_TTFT), ("chat", _CHAT_TTFT)):
            slos = [Slo(ttft=ttft, tpot=tpot) for tpot in _TPOTS]
            curves = run.details[workload] = {"tpot_s": list(_TPOTS)}
            for name in ("apart", "prefill_first"):
                curves[name] = [found(name, workload, slo) for slo in slos]
            curves["chunked"] = [chunked(workload, slo) for slo in slos]
        loose = Slo(ttft=_CHAT_TTFT, tpot=_CHAT_TPOT)
        better = max(found("prefill_first", "chat", loose), chunked("chat", loose))
        run.put("loose_chat", found(ours, "chat", loose), better)
        run.put("queue_error", _queue_errors(run.seed, run.as_baseline))
        run.progress("two processes", 0.4)
        points = run.remember("real", lambda: self._serve(run))
        place = run.pick(1, 2)
        # Attainment cannot be predicted more closely than the machine keeps its pace.
        swing = max(point.swing for point in points)
        errors = (abs(p.attained[place] - p.attained[0]) for p in points)
        run.put("attainment_error", errors, bound=swing)
        run.put(
            "throughput_error", (abs(p.throughput[place] / p.throughput[0] - 1) for p in points)
        )
        run.put("wrong_bytes", sum(abs(p.moved[0] - p.moved[1]) for p in points))
        run.details["points"] = [point.model_dump(mode="json") for point in points]
        run.profile = "; ".join(map(str, points))

    def _serve(self, run: ClaimRun) -> Sequence[RatePoint]:
        from shoal.claims.experiments.distserve_real import RealSystems
        from shoal.core.measure import check_quiet
        from shoal.model import huggingface
        from shoal.train import zoo

        where = run.work_dir / "model"
        huggingface.write(where, zoo.random(self.model, run.seed))
        check_quiet(wait_s=60.0)
        real = RealSystems(where, seconds=self.seconds, seed=run.seed)
        points = real.points()
        # Also those that were made again: whatever the prediction was worth.
        run.details["attempts"] = [point.model_dump(mode="json") for point in real.attempts]
        return points


def _queue_errors(seed: int, as_baseline: bool) -> list[float]:
    """Relative errors of the mean time to the first token of equal prompts."""
    import numpy as np

    from shoal.core.random import generator

    errors = []
    for load in (0.3, 0.6, 0.8):
        cost = Phased(
            prefill=PromptLine(step=1.0, token=0.0, square=0.0),
            decode=DecodeLine(step=1.0, key=0.0, request=0.0),
        )
        kv = table("kv").build({"name": "paged", "prefix_reuse": False}).build(4096)
        limits = SchedulerLimits(max_running=1, max_step_tokens=4, max_position=64)
        part = table("phase").build({"name": "prefill", "batch_tokens": 4})
        gaps = generator(seed, purpose="distserve m/d/1").exponential(1 / load, 100_000)
        arrivals = [Arrival(float(at), (1, 2, 3, 4), 1) for at in np.cumsum(gaps)]
        front = SimulatedInstance(part.build(kv, limits), cost)
        seen = simulate_fleet([front], [], LeastLoadedDispatcher(1), arrivals).served
        mean = float(np.mean([one.ttft for one in seen]))
        said = 1.0 if as_baseline else md1_ttft(load, 1.0)
        errors.append(abs(mean / said - 1))
    return errors
