"""[104] Falcon: are two tokens a pass of a drafter as good as one, in half the passes?

Source: Gao et al., Falcon: Faster and Parallel Inference of LLMs through Enhanced
Semi-Autoregressive Drafting and Custom-Designed Decoding Tree, 2025.

One target, prompt by prompt in turn: plainly, with Medusa's heads, with a net that guesses one
token a pass, and with Falcon's that guesses two. Glancing is judged by how often a block's second
token is right, over three seeds. The A/A run has plain decoding, the net of one token, and nets
without glancing.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.decoding import drafter_of, prompts_of, seconds_per_token, target_of
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import DrafterCalibration
from shoal.plan.trees.auto import AutoTree

# How often the guesses of a level are right, for the tree whose passes the quick run counts.
_RIGHT = (0.6, 0.15, 0.05)


@part
class FalconClaim(BaseClaim, row=104, needs=("torch",)):
    """Greedy decoding at batch 1 with drafters over features.

    Args:
        k: tokens of a pass; 1 is the baseline.
        forwards: passes.
        train_tokens: tokens of each drafter's training.
        seeds: seeds of the nets that glancing is judged by.
        texts: held-out prompts that are continued.
        rounds: times that all are continued.
        new: tokens of an answer.
        nodes: nodes of the trees by which accepted lengths are compared.
        exact_texts: prompts whose tokens are compared in fp64.
        threads: threads that compute; 0 for all cores.
    """

    k: Annotated[int, Ge(2)] = 2
    forwards: Annotated[int, Ge(1)] = 2
    train_tokens: Annotated[int, Ge(1)] = 600_000
    seeds: Annotated[int, Ge(1)] = 3
    texts: Annotated[int, Ge(1)] = 40
    rounds: Annotated[int, Ge(1)] = 5
    new: Annotated[int, Ge(8)] = 96
    nodes: Annotated[int, Ge(1), Le(63)] = 16
    exact_texts: Annotated[int, Ge(1)] = 4
    threads: int = 0

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.serve.decode.passes import TreePasses

        levels = self.k * self.forwards
        tree = AutoTree(nodes=self.nodes).build(DrafterCalibration((_RIGHT,) * levels))
        own, single = (len(TreePasses(tree, k).passes) for k in (run.pick(self.k, 1), 1))
        run.put("passes_of_single", own, single)
        if not run.quick:
            self._decode(run)

    def _net(self, context: ExperimentContext, seed: int = 0, **options: Any) -> Path:
        """The directory of a net over features."""
        chosen = {"k": self.k, "forwards": self.forwards, **options}
        return drafter_of(context, "falcon", tokens=self.train_tokens, seed=seed, **chosen)

    def _decode(self, run: ClaimRun) -> None:
        from shoal.claims.bench.decode import PLAIN, Bench
        from shoal.claims.experiments.medusa_runs import equal_answers
        from shoal.core.measure import num_cores
        from shoal.model.drafters.files import read_config
        from shoal.plan.trees.drafting import FixedDrafting

        context = run.context
        target = target_of(context)
        medusa = drafter_of(context, "medusa")
        single = self._net(context, k=1, forwards=self.k * self.forwards)
        gains: list[float] = []
        unglanced: list[float] = []
        for seed in range(self.seeds):
            without = self._net(context, seed, glance_from=0.0, glance_to=0.0)
            glanced = without if run.as_baseline else self._net(context, seed)
            right = [read_config(one).calibration[1][0] for one in (glanced, without)]
            gains.append(right[0] - right[1])
            unglanced.append(right[1])
        # Of all second tokens, those that were wrong without glancing.
        run.put("second_token_gain", gains, bound=1 - statistics.fmean(unglanced))
        # As many passes as pay; where lengths are compared, as many as the trees are judged for.
        falcon = {"name": "falcon", "path": str(self._net(context))}
        one_a_pass = {**falcon, "path": str(single)}
        method = run.pick(falcon, one_a_pass)
        passes = run.pick(self.forwards, self.k * self.forwards)
        prompts = prompts_of(context, self.texts, 64, 0)
        run.progress("tokens in fp64", 0.5)
        same = equal_answers(target, method, prompts[: self.exact_texts], self.new // 2)
        run.put("wrong_tokens", (1 - one for one in same))
        run.progress("decoding", 0.6)
        arms: dict[str, dict[str, Any] | None] = {
            PLAIN: None,
            "medusa": {"name": "medusa", "path": str(medusa)},
            "single": one_a_pass,
            "falcon": run.pick(falcon, None),
        }
        bench = Bench(target, arms, threads=self.threads or num_cores())
        result = bench.interleaved(prompts, self.new, rounds=self.rounds, seed=run.seed)
        timed = {name: seconds_per_token(result[name], result[PLAIN]) for name in arms}
        run.metrics["over_plain"], places = timed["falcon"]
        require(bool(places), "claim.falcon", len(places), expected="an answer that is no loop")
        run.progress("accepted tokens", 0.9)
        lengths: dict[str, list[float]] = {}
        judged = {
            "single": {**one_a_pass, "forwards": self.k * self.forwards},
            "method": {**method, "forwards": passes},
        }
        other = Bench(target, judged, threads=bench.threads)
        for name, engine in other.engines.items():
            engine.scheduler.drafting = FixedDrafting(self.nodes)  # type: ignore[attr-defined]
            lengths[name] = [
                other.answer(name, [prompts[place]], self.new).tokens_per_step for place in places
            ]
        run.put("accepted_of_single", lengths["method"], lengths["single"])
        run.profile = ", ".join(
            f"{name} {1e3 * statistics.median(one.method):.3f} ms a token"
            for name, (one, _) in timed.items()
        )
