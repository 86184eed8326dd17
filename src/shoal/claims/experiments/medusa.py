"""[97] Medusa: do heads on the last hidden state pay on this machine?

Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads, 2024.

Four heads are trained for a mini-model on its own continuations, and the same held-out prompts are
answered greedily with and without them, by one engine, one cache and one dtype, in turn. In the
A/A run the heads are left out: plain decoding stands in the place of the part.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.decoding import (
    drafter_of,
    peer_rates,
    prompts_of,
    seconds_per_token,
    summarize,
    target_of,
)
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

_MEDUSA = "medusa"


@part
class MedusaClaim(BaseClaim, row=97, needs=("torch", "transformers")):
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

        context, new = run.context, self.new_tokens
        target = target_of(context)
        heads = drafter_of(context, "medusa")
        prompts = prompts_of(context, self.prompts, self.prompt_tokens, 0)
        method = run.pick({"name": "medusa", "path": str(heads), "weights": self.weights}, None)
        bench = Bench(target, {PLAIN: None, _MEDUSA: method}, threads=num_cores())
        run.progress("answering the prompts", 0.3)
        result = bench.interleaved(prompts, new, rounds=self.rounds, seed=run.seed)
        run.metrics["wall_clock"], places = seconds_per_token(result[_MEDUSA], result[PLAIN])
        own = summarize([result[_MEDUSA][0][place] for place in places])
        run.put("tokens_per_step", own["tokens_per_step"])
        run.progress("other trees of as many rows", 0.7)
        trials = trees(bench, heads, prompts, new, as_baseline=run.as_baseline)
        run.metrics["auto_over_fixed"] = trials
        run.progress("text of the calibration", 0.8)
        run.metrics["calibration_error"] = calibrated(target, heads, as_baseline=run.as_baseline)
        run.progress("answers in float64", 0.85)
        run.put("equal_answers", equal_answers(target, method, prompts[: self.exact], new // 2))
        run.progress("transformers", 0.95)
        answer = lambda place: bench.answer(PLAIN, [prompts[place]], new).seconds  # noqa: E731
        run.peers["wall_clock"] = peer_rates(target, prompts[:12], new, answer)
        run.profile = "plain decoding on both sides"
        if method is not None:
            cost: Any = bench.engines[_MEDUSA].scheduler.drafting.cost  # type: ignore[attr-defined]
            steps = dict(zip(cost.rows, cost.seconds_of, strict=True))
            run.profile = (
                f"a step of one row takes {1e3 * steps[1]:.2f} ms, of eight {1e3 * steps[8]:.2f}, "
                f"of sixteen {1e3 * steps[16]:.2f}; guesses "
                f"{1e3 * (cost.draft_s + cost.draft_request_s):.2f} ms; "
                f"{own['nodes_per_step']:.1f} nodes and {own['tokens_per_step']:.2f} tokens a step"
            )
