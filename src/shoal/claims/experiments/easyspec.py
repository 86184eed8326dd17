"""[142] EasySpec: do layers of a draft that read stale input draft faster, at what acceptance?

Source: Wu et al., EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU
Utilization, 2025.

A draft of eight layers, layer by layer and by groups, by the same recorded kernels: in one process,
and on two ranks of a core each, where layer by layer means tensor parallelism. The better of both
is judged. In the A/A run every layer is a group. Eight devices are simulated.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.claims.bench.decode import Bench
    from shoal.claims.experiments.easyspec_runs import TimedPasses


@part
class EasySpecClaim(BaseClaim, row=142, needs=("torch",)):
    """Groups of layers beside layers one by one.

    Args:
        group: layers of a group.
        stale: what of them reads the input of a group, as of ``speculative: easyspec``.
        depth: tokens that the draft looks ahead.
        prompts: held-out prompts that are answered in turn.
        asked: held-out prompts on which guesses are counted.
        prompt_tokens: tokens of each.
        new_tokens: tokens of each answer.
        rounds: times that all prompts are answered.
        passes: rounds in which draft passes are timed, a hundred passes each.
        draft: a model of the zoo.
    """

    group: Annotated[int, Ge(1)] = 6
    stale: str = "full"
    depth: Annotated[int, Ge(1)] = 4
    prompts: Annotated[int, Ge(1)] = 24
    asked: Annotated[int, Ge(1)] = 72
    prompt_tokens: Annotated[int, Ge(1)] = 64
    new_tokens: Annotated[int, Ge(1)] = 96
    rounds: Annotated[int, Ge(1)] = 5
    passes: Annotated[int, Ge(1)] = 31
    draft: str = "shoal-draft-8l"

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.easyspec_runs import eight_devices, tiny

        run.progress("a tiny draft in float64", 0.02)
        wrong, calls = tiny(run.seed, run.pick(self.group, 1))
        run.put("wrong_tokens", wrong)
        run.put("attention_calls", calls, 8.0)
        slow, fast = eight_devices(run.pick(4, 1))
        run.put("eight_devices", slow / fast, 1.0)
        if not run.quick:
            self._decode(run)

    def _decode(self, run: ClaimRun) -> None:
        from shoal.claims.bench.decode import Bench, regular
        from shoal.claims.experiments.decoding import prompts_of, target_of
        from shoal.claims.experiments.easyspec_runs import acceptance
        from shoal.train import zoo

        size = run.pick(self.group, 1)
        target = target_of(run.context)
        say = lambda line: run.progress(line, 0.1)  # noqa: E731
        draft = run.remember("draft", lambda: zoo.trained(self.draft, say))
        shared: dict[str, Any] = {"path": str(draft), "depth": self.depth}
        grouped = {"name": "easyspec", **shared, "group": size, "stale": self.stale}
        methods = {
            "plain": None,
            "draft": {"name": "draft_model", **shared},
            "groups": grouped,
            "stale": {**grouped, "calibrate": False},
        }
        bench = Bench(target, methods, threads=1)
        run.progress("acceptance", 0.2)
        prompts = prompts_of(run.context, self.asked, self.prompt_tokens, 0)
        places = regular([bench.answer("plain", [prompt], self.new_tokens) for prompt in prompts])
        rates = {
            name: acceptance(
                bench, name, [prompts[at] for at in places], self.new_tokens, self.depth
            )
            for name in ("draft", "groups", "stale")
        }
        first = {name: one[0] for name, one in rates.items()}
        late = {name: one[1] for name, one in rates.items()}
        run.put("acceptance_loss", first["draft"] - first["groups"])
        lost = late["draft"] - late["stale"]
        recovered = (late["groups"] - late["stale"]) / lost if lost > 0.005 else 0.0
        run.put("recovered", recovered, bound=1.0)
        one, two = self._timed(run, bench, target, draft, size)
        best = max(one, two, key=lambda ways: ways.speedup)
        run.metrics |= {"draft_pass": best.passes, "end_to_end": best.answers}
        run.bounds |= best.bounds
        run.profile = (
            f"of the guesses {first['draft']:.3f} accepted layer by layer, {first['groups']:.3f} "
            f"by groups of {size}, {first['stale']:.3f} with stale keys and values kept; in one "
            f"process a pass takes {one}: calls of kernels, which groups save, are little of it; "
            f"on two ranks it takes {two}, where groups save meetings; both are slower there than "
            "in one process, for this draft lies in the caches of one core"
        )

    def _timed(
        self, run: ClaimRun, bench: Bench, target: Path, draft: Path, size: int
    ) -> tuple[TimedPasses, TimedPasses]:
        """Passes and answers in one process, and on two ranks."""
        from shoal.claims.bench.decode import Bench
        from shoal.claims.experiments.decoding import prompts_of
        from shoal.claims.experiments.dovetail_runs import held_to
        from shoal.claims.experiments.easyspec_runs import (
            TimedPasses,
            answers_in_turn,
            ranked_passes,
            reading_s,
            timed_passes,
        )
        from shoal.model import huggingface
        from shoal.plan.trees.fuzzy import even_groups

        fields: dict[str, Any] = {"rounds": self.rounds, "seed": run.seed}
        prompts = prompts_of(run.context, self.prompts, self.prompt_tokens, 0)
        run.progress("draft passes in turn", 0.4)
        read = run.remember("reading", lambda: reading_s(draft, self.passes, run.seed))
        passes = timed_passes(bench.engines["groups"], self.passes, run.seed)
        run.progress("answers in turn", 0.5)
        answers = answers_in_turn(bench, "groups", prompts, self.new_tokens, **fields)
        fused = TimedPasses(passes, answers, read, self.depth)
        run.progress("draft passes on two ranks", 0.6)
        groups = even_groups(size, huggingface.read_config(draft).num_layers)
        full = self.stale == "full"
        passes = ranked_passes(draft, target, groups, full, self.passes, run.seed)
        run.progress("answers in turn with a draft on two ranks", 0.8)
        ranked = {
            "name": "easyspec", "path": str(draft), "depth": self.depth, "group": size,
            "stale": self.stale, "realise": "ranks", "cores": (max(os.sched_getaffinity(0)),),
        }  # fmt: skip
        # Where another rank waits for its turn, a step of this process costs twice what it costs on
        # a core of its own, and the engine measures costs when it starts.
        with held_to(min(os.sched_getaffinity(0))):
            with_ranks = Bench(target, {"ranks": ranked}, threads=1)
            runner: Any = with_ranks.engines["ranks"].runner
            try:
                answers = answers_in_turn(with_ranks, "ranks", prompts, self.new_tokens, **fields)
            finally:
                runner.drafter.net.team.close()
        return fused, TimedPasses(passes, answers, read / 2, self.depth)
