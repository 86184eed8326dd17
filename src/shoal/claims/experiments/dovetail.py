"""[133] Dovetail: does a drafter on a device of its own pay, and what crosses the way to it?

Source: Zhang et al., Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference,
2025.

Target and drafter are processes of one core each; the way between them is that of 20 us and 8 GB/s.
The baseline is the target alone; the bytes of layer offloading are counted. In the A/A run nothing
guesses, and the weights cross the way.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.errors import require
from shoal.core.parts import part

_Numbers = tuple[Annotated[int, Ge(1)], ...]


@part
class DovetailClaim(BaseClaim, row=133, needs=("torch",), cores=2):
    """A drafter in a process of its own beside the target alone.

    Args:
        prompts: held-out prompts.
        prompt_tokens: tokens of each.
        new_tokens: tokens of each answer.
        rounds: times that all prompts are answered.
        layers: drafters of so many layers are trained.
        sweep: nodes of the trees that are tried for each of them.
        link_s: latency of the emulated link, s.
        link_bytes_per_s: bandwidth of the emulated link, byte/s.
        overlap: draft while the target verifies.
        weights: format of the drafters' matrices.
    """

    prompts: Annotated[int, Ge(1)] = 24
    prompt_tokens: Annotated[int, Ge(1)] = 64
    new_tokens: Annotated[int, Ge(1)] = 96
    rounds: Annotated[int, Ge(1)] = 5
    layers: _Numbers = (1, 2)
    sweep: _Numbers = (3, 6, 10, 16)
    link_s: float = 20e-6
    link_bytes_per_s: float = 8e9
    overlap: bool = True
    weights: str = "int8-g64"

    def __post_init__(self) -> None:
        for name in ("layers", "sweep"):
            some = bool(getattr(self, name))
            require(some, f"claim.dovetail.{name}", [], expected="one or more numbers")

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.dovetail_runs import tiny

        run.progress("a tiny drafter in float64", 0.02)
        counted = tiny(run.seed, offloads=run.as_baseline)
        run.put("tiny_link_bytes", counted.link, counted.offload)
        run.put("uncounted_bytes", counted.uncounted)
        run.put("wrong_tokens", counted.wrong)
        if not run.quick:
            self._decode(run)

    def _decode(self, run: ClaimRun) -> None:
        from shoal.claims.bench.decode import PLAIN, Bench, regular
        from shoal.claims.experiments.decoding import (
            drafter_of,
            prompts_of,
            seconds_per_token,
            summarize,
            target_of,
        )
        from shoal.claims.experiments.dovetail_runs import Sweep, held_to, weight_bytes

        context, new = run.context, self.new_tokens
        target = target_of(context)
        nets = {count: drafter_of(context, "dovetail", layers=count) for count in self.layers}
        prompts = prompts_of(context, self.prompts, self.prompt_tokens, 0)
        mine, theirs, *_ = sorted(os.sched_getaffinity(0))
        shared: dict[str, Any] = {
            "name": "dovetail", "cores": [theirs], "link_s": self.link_s,
            "link_bytes_per_s": self.link_bytes_per_s, "overlap": self.overlap,
            "weights": self.weights,
        }  # fmt: skip
        methods: dict[str, Any] = {PLAIN: None}
        for count, path in nets.items():
            methods |= {
                f"{count} {nodes}": {**shared, "path": str(path), "nodes": nodes}
                for nodes in self.sweep
            }
        with held_to(mine):
            bench = Bench(target, methods, threads=1)
            sweep = Sweep(bench, self.layers, self.sweep)
            run.progress("plain answers", 0.3)
            places = regular([bench.answer(PLAIN, [prompt], new) for prompt in prompts])
            some = [prompts[at] for at in places[:6]]
            run.progress("all trees and depths", 0.4)
            rates = sweep.rates(some, new)
            planned = sweep.planned(self.link_s, self.link_bytes_per_s, self.overlap)
            best = max(rates, key=rates.__getitem__)
            run.progress("answers in turn", 0.6)
            result = bench.interleaved(
                prompts, new, rounds=self.rounds, names=(PLAIN, planned), seed=run.seed
            )
            ours = result[run.pick(planned, PLAIN)]
            run.metrics["wall_clock"], _ = seconds_per_token(ours, result[PLAIN])
            crossed = sweep.link_bytes_per_token(planned, some, new)
            sweep.close()
        offloaded = float(weight_bytes(target))
        run.put("link_bytes", run.pick(crossed, offloaded), offloaded)
        run.put("planned_over_best", rates[planned], rates[best], bound=1.0)
        per_step = summarize(result[planned][0])["tokens_per_step"]
        run.profile = (
            f"{per_step:.2f} tokens a step of the target, {crossed:.0f} bytes a token on the way; "
            f"{sweep.profile(planned)}"
        )
