"""[97] Medusa: do heads on the last hidden state pay on this machine?

Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads, 2024.

Four heads are trained for a mini-model on its own continuations, and the same held-out prompts are
answered greedily with and without them, by one engine, one cache and one dtype, in turn. In the
A/A run the heads are left out: plain decoding stands in the place of the part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.decoding import (
    agreement,
    peer_rates,
    prompts_of,
    seconds_per_token,
    summarize,
    target_of,
)
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

__all__ = ["MedusaClaim"]

_MEDUSA = "medusa"


@part
class MedusaClaim(BaseClaim):
    """Medusa heads beside plain decoding.

    Args:
        prompts: held-out prompts.
        prompt_tokens: tokens of each.
        new_tokens: tokens of each answer.
        rounds: times that all prompts are answered.
        exact: prompts whose answers are compared in float64.
        weights: format of the heads' matrices.
    """

    prompts: Annotated[int, Ge(1)] = 60
    prompt_tokens: Annotated[int, Ge(1)] = 64
    new_tokens: Annotated[int, Ge(1)] = 96
    rounds: Annotated[int, Ge(1)] = 5
    exact: Annotated[int, Ge(1)] = 6
    weights: str = "plain"

    rows: ClassVar[tuple[int, ...]] = (97,)
    needs: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.medusa_runs import tree_logits

        run.progress("trees beside their paths", 0.02)
        run.put("tree_logits", tree_logits(run.seed, masked=not run.as_baseline))
        if run.quick:
            return
        from shoal.claims.bench.decode import PLAIN, Bench
        from shoal.claims.experiments.medusa_runs import calibrated, equal_answers, trees
        from shoal.core.measure import num_cores
        from shoal.train.zoo.drafters import drafter

        context, new = run.context, self.new_tokens
        target = target_of(context)
        say = lambda line: run.progress(line, 0.1)  # noqa: E731
        heads = run.remember("heads", lambda: drafter("medusa", target, say=say))
        prompts = prompts_of(context, self.prompts, self.prompt_tokens, 0)
        method = run.pick({"name": "medusa", "path": str(heads), "weights": self.weights}, None)
        bench = Bench(target, {PLAIN: None, _MEDUSA: method}, threads=num_cores())
        run.progress("answering the prompts", 0.3)
        result = bench.interleaved(prompts, new, rounds=self.rounds, seed=run.seed)
        run.metrics["wall_clock"], places = seconds_per_token(result[_MEDUSA], result[PLAIN])
        own = summarize([result[_MEDUSA][0][place] for place in places])
        run.put("tokens_per_step", own["tokens_per_step"])
        run.progress("other trees of as many rows", 0.7)
        run.metrics["auto_over_fixed"], shapes = trees(
            bench, heads, prompts, new, as_baseline=run.as_baseline
        )
        run.progress("text of the calibration", 0.8)
        run.metrics["calibration_error"] = calibrated(target, heads, as_baseline=run.as_baseline)
        run.progress("answers in float64", 0.85)
        run.put("equal_answers", equal_answers(target, method, prompts[: self.exact], new // 2))
        run.progress("transformers", 0.95)
        run.peers["wall_clock"] = peer_rates(
            target,
            prompts[:12],
            new,
            lambda place: bench.answer(PLAIN, [prompts[place]], new).seconds,
        )
        run.details |= {
            "kept": len(places),
            "loops": len(prompts) - len(places),
            "bf16_agreement": agreement(result[_MEDUSA][0], result[PLAIN][0]),
            "medusa": own,
            "plain": summarize([result[PLAIN][0][place] for place in places]),
            "trees": shapes,
            "costs": _costs(bench) if method is not None else {},
            "heads_bytes": (Path(heads) / "drafter.safetensors").stat().st_size,
        }
        run.profile = _profile(run.details)


def _costs(bench: Any) -> dict[str, float]:
    """Seconds of steps by rows as the engine measured them, and of guesses."""
    cost = bench.engines[_MEDUSA].scheduler.drafting.cost
    steps = {str(rows): s for rows, s in zip(cost.rows, cost.seconds_of, strict=True)}
    return {**steps, "guesses": cost.draft_s + cost.draft_request_s}


def _profile(details: dict[str, Any]) -> str:
    costs, own = details["costs"], details["medusa"]
    if not costs:
        return "plain decoding on both sides"
    return (
        f"a step of one row takes {1e3 * costs['1']:.2f} ms, of eight {1e3 * costs['8']:.2f}, of "
        f"sixteen {1e3 * costs['16']:.2f}; guesses {1e3 * costs['guesses']:.2f} ms; "
        f"{own['nodes_per_step']:.1f} nodes and {own['tokens_per_step']:.2f} tokens a step"
    )
