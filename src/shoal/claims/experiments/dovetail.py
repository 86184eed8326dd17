"""[133] Dovetail: does a drafter on a device of its own pay, and what crosses the way to it?

Source: Zhang et al., Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference,
2025.

Target and drafter are two processes, each held to one core; the way between them is held up as one
of 20 us and 8 GB/s would be. The baseline is the target alone on its core; of layer offloading over
the same way the bytes are counted, which are the weights for every token. In the A/A run nothing
guesses, and the weights cross the way.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.errors import require
from shoal.core.parts import part

__all__ = ["DovetailClaim"]

_Numbers = tuple[Annotated[int, Ge(1)], ...]


@part
class DovetailClaim(BaseClaim):
    """A drafter in a process of its own beside the target alone.

    Args:
        prompts: held-out prompts.
        prompt_tokens: tokens of each.
        new_tokens: tokens of each answer.
        rounds: times that all prompts are answered.
        layers: drafters of so many layers are trained.
        sweep: nodes of the trees that are tried for each of them.
        link_s: s of a message on the way.
        link_bytes_per_s: of the way.
        overlap: the drafter goes on while the target verifies.
        weights: format of the drafters' matrices.
    """

    prompts: Annotated[int, Ge(1)] = 24
    prompt_tokens: Annotated[int, Ge(1)] = 64
    new_tokens: Annotated[int, Ge(1)] = 96
    rounds: Annotated[int, Ge(1)] = 3
    layers: _Numbers = (1, 2)
    sweep: _Numbers = (3, 6, 10, 16)
    link_s: float = 20e-6
    link_bytes_per_s: float = 8e9
    overlap: bool = True
    weights: str = "int8-g64"

    rows: ClassVar[tuple[int, ...]] = (133,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)
    cores: ClassVar[int] = 2

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
            prompts_of,
            seconds_per_token,
            summarize,
            target_of,
        )
        from shoal.claims.experiments.dovetail_runs import Sweep, held_to, weight_bytes
        from shoal.train.zoo.drafters import drafter

        context, new = run.context, self.new_tokens
        target = target_of(context)
        say = lambda line: run.progress(line, 0.1)  # noqa: E731

        def net(count: int) -> Path:
            return drafter("dovetail", target, say=say, layers=count)

        nets = {
            count: run.remember(f"net {count}", functools.partial(net, count))
            for count in self.layers
        }
        prompts = prompts_of(context, self.prompts, self.prompt_tokens, 0)
        mine, theirs, *_ = sorted(os.sched_getaffinity(0))
        shared: dict[str, Any] = {
            "name": "dovetail",
            "cores": [theirs],
            "link_s": self.link_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            "overlap": self.overlap,
            "weights": self.weights,
        }
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
        run.details |= {
            "tokens_per_s": rates,
            "planned": planned,
            "best": best,
            "link_bytes_per_token": crossed,
            "kept": len(places),
            "loops": len(prompts) - len(places),
            "plain": summarize(result[PLAIN][0]),
            "dovetail": summarize(result[planned][0]),
        }
        run.profile = (
            f"{run.details['dovetail']['tokens_per_step']:.2f} tokens a step of the target, "
            f"{crossed:.0f} bytes a token on the way; {sweep.profile(planned)}"
        )
