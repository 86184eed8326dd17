"""[129] PPD: do a few learned embeddings, asked beside the guesses they made, beat plain decoding?

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference, 2024.

One target decodes held-out prompts plainly and with prompt tokens, prompt by prompt in turn; a
sample is a whole round. The baseline of bytes are Medusa's four heads. Rows chosen by measured step
costs are held against a sweep. The A/A run decodes plainly, and stores Medusa's heads.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.decoding import drafter_of, prompts_of, seconds_per_token, target_of
from shoal.claims.frame import ClaimRun
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost import shapes
from shoal.cost.arithmetic import parameters

_HEADS = 4


@part
class PpdClaim(BaseClaim, row=129, needs=("torch",)):
    """Greedy decoding at batch 1, with and without prompt tokens.

    Args:
        prompts: prompt tokens m.
        ensemble: embeddings of each.
        train_tokens: tokens of the drafter's training.
        texts: held-out prompts that are continued.
        new: tokens of an answer.
        rounds: times that all are continued.
        sweep_texts: prompts at every size of the sweep.
        sizes: rows N of the sweep.
        exact_texts: prompts whose tokens are compared in fp64.
        threads: threads that compute; 0 for all cores.
    """

    prompts: Annotated[int, Ge(1)] = 3
    ensemble: Annotated[int, Ge(1)] = 1
    train_tokens: Annotated[int, Ge(1)] = 600_000
    texts: Annotated[int, Ge(1)] = 40
    rounds: Annotated[int, Ge(1)] = 5
    new: Annotated[int, Ge(8)] = 96
    sweep_texts: Annotated[int, Ge(1)] = 8
    sizes: tuple[int, ...] = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
    exact_texts: Annotated[int, Ge(1)] = 4
    threads: int = 0

    def __post_init__(self) -> None:
        fewest = self.prompts * self.ensemble + 1
        good = bool(self.sizes) and fewest <= min(self.sizes) and max(self.sizes) <= 64
        require(good, "claim.ppd.sizes", list(self.sizes), expected=f"sizes of {fewest} to 64 rows")

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        shape = shapes.resolve(run.context.model or "shoal-27m")
        heads = float(_HEADS * shape.hidden * (shape.hidden + 1 + shape.vocab_size))
        own = run.pick(float(self.prompts * self.ensemble * shape.hidden), heads)
        run.put("bytes_of_target", own, parameters(shape))
        run.put("bytes_of_medusa", own, heads)
        if not run.quick:
            self._decode(run)

    def _decode(self, run: ClaimRun) -> None:
        from shoal.claims.bench.decode import PLAIN, Bench
        from shoal.claims.experiments.medusa_runs import equal_answers
        from shoal.core.measure import num_cores
        from shoal.plan.trees.drafting import FixedDrafting, ProfitableDrafting

        context = run.context
        target = target_of(context)
        path = drafter_of(
            context, "ppd", tokens=self.train_tokens, prompts=self.prompts, ensemble=self.ensemble
        )
        prompts = prompts_of(context, self.texts, 64, 0)
        method: dict[str, Any] | None = run.pick({"name": "ppd", "path": str(path)}, None)
        run.progress("tokens in fp64", 0.3)
        same = equal_answers(target, method, prompts[: self.exact_texts], self.new // 2)
        run.put("wrong_tokens", (1 - one for one in same))
        run.progress("decoding", 0.5)
        bench = Bench(target, {PLAIN: None, "ppd": method}, threads=self.threads or num_cores())
        result = bench.interleaved(prompts, self.new, rounds=self.rounds, seed=run.seed)
        timed, places = seconds_per_token(result["ppd"], result[PLAIN])
        run.metrics["over_plain"] = timed
        measured = statistics.median(
            plain / ours for ours, plain in zip(timed.method, timed.baseline, strict=True)
        )
        if run.as_baseline:
            run.put("predicted_speedup", 1.0, measured)
            run.put("rate_of_best", 1.0, 1.0)
            return
        paying = bench.engines["ppd"].scheduler.drafting  # type: ignore[attr-defined]
        assert isinstance(paying, ProfitableDrafting)
        fresh = ProfitableDrafting(paying.expected, paying.cost)
        best = fresh.best(1)
        run.put("predicted_speedup", fresh.table()[best][2], measured)
        run.progress("sweep over rows", 0.8)
        texts = [prompts[place] for place in places[: self.sweep_texts]]
        sizes = sorted({*self.sizes, best + 1})

        def taken(rows: int) -> float:
            bench.engines["ppd"].scheduler.drafting = FixedDrafting(rows - 1)  # type: ignore[attr-defined]
            return sum(bench.answer("ppd", [text], self.new).seconds for text in texts)

        # Seconds of all texts together, with so many rows; the first round prepares.
        arms = {str(rows): partial(taken, rows) for rows in sizes}
        swept = run.turns(arms, self.rounds, warmup=1)
        seconds = {rows: swept[str(rows)] for rows in sizes}
        fastest = min(seconds, key=lambda rows: statistics.median(seconds[rows]))
        run.put("rate_of_best", *((1 / s for s in seconds[n]) for n in (best + 1, fastest)))
        run.profile = f"plain step {1e3 * paying.cost.seconds(1):.2f} ms; " + ", ".join(
            f"{rows} rows {1e3 * paying.cost.seconds(rows):.2f} ms" for rows in seconds
        )
        most = [rows for rows in seconds if rows <= len(paying.expected)]
        run.bounds["over_plain"] = max(paying.expected[rows - 1] for rows in most)
