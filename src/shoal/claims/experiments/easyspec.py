"""[142] EasySpec: do layers of a draft that read stale input draft faster, at what acceptance?

Source: Wu et al., EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU
Utilization, 2025.

A draft of eight layers guesses for a mini-model, once layer by layer and once by groups, by the
same recorded kernels. In the A/A run every layer is a group of its own. Eight devices are simulated
by what a published draft would read and exchange on them.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

from shoal.claims.protocols import Attempt, Context, Metric, Paired, Samples
from shoal.core.errors import require
from shoal.core.parts import part

__all__ = ["EasySpecClaim"]

_PLAIN_DRAFT = "the same draft, layer by layer"


@part
class EasySpecClaim:
    """Groups of layers beside layers one by one.

    Args:
        group: layers of a group.
        depth: tokens that the draft looks ahead.
        prompts: held-out prompts.
        prompt_tokens: tokens of each.
        new_tokens: tokens of each answer.
        rounds: times that all prompts are answered.
        passes: rounds in which draft passes are timed, a hundred passes each.
        draft: a model of the zoo.
    """

    group: int = 3
    depth: int = 4
    prompts: int = 24
    prompt_tokens: int = 64
    new_tokens: int = 96
    rounds: int = 3
    passes: int = 31
    draft: str = "shoal-draft-8l"

    rows: ClassVar[tuple[int, ...]] = (142,)
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric.speedup("draft_pass", 1.15, _PLAIN_DRAFT, evidence="mechanism", paper="up to 1.62x"),
        Metric.counted(
            "acceptance_loss",
            "<=",
            0.10,
            _PLAIN_DRAFT,
            evidence="mechanism",
            quick=False,
            paper="at most 7 points",
        ),
        Metric.counted(
            "recovered", ">=", 0.5, "stale keys and values kept", evidence="mechanism", quick=False
        ),
        Metric.speedup("end_to_end", 1.0, _PLAIN_DRAFT, evidence="mechanism"),
        Metric.counted(
            "eight_devices",
            ">=",
            1.3,
            "tensor-parallel drafting",
            statistic="ratio",
            unit="x",
            evidence="simulated",
        ),
        Metric.counted("attention_calls", "<=", 0.6, _PLAIN_DRAFT, statistic="ratio", unit="x"),
        Metric.counted("wrong_tokens", "<=", 0.0, "the target alone, in float64", statistic="max"),
    )
    attempts: ClassVar[tuple[Attempt, ...]] = ()

    def __post_init__(self) -> None:
        for name in (
            "group",
            "depth",
            "prompts",
            "prompt_tokens",
            "new_tokens",
            "rounds",
            "passes",
        ):
            value = getattr(self, name)
            require(value >= 1, f"claim.easyspec.{name}", value, expected="1 or more")

    def refuses(self, context: Context) -> str | None:
        """Models need torch."""
        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        return None

    def run(self, context: Context, *, quick: bool, as_baseline: bool = False) -> Samples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        from shoal.claims.experiments.easyspec_runs import eight_devices, tiny

        size = 1 if as_baseline else self.group
        context.progress("a tiny draft in float64", 0.02)
        wrong, calls = tiny(context.seed, size)
        slow, fast = eight_devices(1 if as_baseline else 4)
        metrics = {
            "wrong_tokens": Paired(method=(float(wrong),)),
            "attention_calls": Paired(method=(float(calls),), baseline=(8.0,)),
            "eight_devices": Paired(method=(slow / fast,), baseline=(1.0,)),
        }
        if quick:
            return Samples(metrics=metrics)
        return self._full(context, metrics, size)

    def _full(self, context: Context, metrics: dict[str, Paired], size: int) -> Samples:
        from shoal.claims.bench.decode import Bench, kept
        from shoal.claims.experiments.decoding import prompts_of, seconds_per_token, target_of, told
        from shoal.claims.experiments.easyspec_runs import acceptance, timed_passes
        from shoal.train import zoo

        target = target_of(context)
        say = lambda line: context.progress(line, 0.1)  # noqa: E731
        draft = context.remember("draft", lambda: zoo.trained(self.draft, say))
        asked = prompts_of(context, self.prompts, self.prompt_tokens, 0)
        shared: dict[str, Any] = {"path": str(draft), "depth": self.depth}
        grouped = {"name": "easyspec", **shared, "group": size}
        methods = {
            "plain": None,
            "draft": {"name": "draft_model", **shared},
            "groups": grouped,
            "stale": {**grouped, "calibrate": False},
        }
        bench = Bench(target, methods, threads=1)
        context.progress("draft passes in turn", 0.3)
        metrics["draft_pass"] = timed_passes(bench.engines["groups"], self.passes, context.seed)
        context.progress("acceptance", 0.5)
        places = kept([bench.answer("plain", [prompt], self.new_tokens) for prompt in asked])
        rates = {
            name: acceptance(bench, name, [asked[at] for at in places], self.new_tokens, self.depth)
            for name in ("draft", "groups", "stale")
        }
        first = {name: one[0] for name, one in rates.items()}
        late = {name: one[1] for name, one in rates.items()}
        metrics["acceptance_loss"] = Paired(method=(first["draft"] - first["groups"],))
        lost = late["draft"] - late["stale"]
        recovered = (late["groups"] - late["stale"]) / lost if lost > 0.005 else 0.0
        metrics["recovered"] = Paired(method=(recovered,))
        context.progress("answers in turn", 0.7)
        found = bench.interleaved(
            asked, self.new_tokens, rounds=self.rounds, names=("draft", "groups"), seed=context.seed
        )
        metrics["end_to_end"], _ = seconds_per_token(found["groups"], found["draft"])
        details = {
            "acceptance": first,
            "acceptance_late": late,
            "kept": len(places),
            "loops": len(asked) - len(places),
            "draft": told(found["draft"][0]),
            "groups": told(found["groups"][0]),
        }
        profile = (
            f"of the guesses {first['draft']:.3f} accepted layer by layer, {first['groups']:.3f} "
            f"by groups of {size}, {first['stale']:.3f} with stale keys and values kept"
        )
        return Samples(metrics=metrics, details=details, profile=profile)
