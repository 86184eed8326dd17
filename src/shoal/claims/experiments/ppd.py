"""[129] PPD: do a few learned embeddings, asked beside the guesses they made, beat plain decoding?

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference, 2024.

One target of 27 million parameters, or the user's, decodes held-out prompts plainly and with
prompt tokens, prompt by prompt in turn. The baseline of bytes are Medusa's four heads for the same
target. The rows that the measured step costs choose are held against a sweep over all sizes. The
A/A run decodes plainly in both arms, and stores Medusa's heads.
"""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any, ClassVar

from pydantic import JsonValue

from shoal.claims.experiments.decoding_runs import (
    Answer,
    Server,
    distinct,
    drafter,
    kept,
    prompts,
    target,
)
from shoal.claims.protocols import Attempt, Context, Metric, Paired, Samples
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost import shapes
from shoal.cost.arithmetic import parameters

__all__ = ["PpdClaim"]

_PLAIN = "plain greedy decoding"
_HEADS = 4


@part
class PpdClaim:
    """Greedy decoding at batch 1, with and without prompt tokens.

    Args:
        prompts: prompt tokens m.
        ensemble: embeddings of each.
        train_tokens: of the drafter's training.
        texts: held-out prompts that are continued.
        new: tokens of an answer.
        sweep_texts: prompts at every size of the sweep.
        sizes: rows N of the sweep.
        exact_texts: prompts whose tokens are compared in fp64.
        threads: that compute; 0 for all cores.
    """

    prompts: int = 3
    ensemble: int = 1
    train_tokens: int = 600_000
    texts: int = 60
    new: int = 96
    sweep_texts: int = 8
    sizes: tuple[int, ...] = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
    exact_texts: int = 4
    threads: int = 0

    rows: ClassVar[tuple[int, ...]] = (129,)
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric.speedup("over_plain", 1.2, _PLAIN, paper="up to 2.49x"),
        Metric.counted("bytes_of_target", "<=", 0.001, "the target", statistic="ratio"),
        Metric.counted("bytes_of_medusa", "<=", 0.001, "Medusa's heads", statistic="ratio"),
        Metric.counted("wrong_tokens", "<=", 0.0, _PLAIN, statistic="max", quick=False),
        Metric.counted(
            "predicted_speedup", "<=", 0.15, "the measured one", statistic="relative_error",
            quick=False,
        ),
        Metric.counted(
            "rate_of_best", ">=", 0.9, "the best of the sweep", statistic="ratio", quick=False
        ),
    )  # fmt: skip
    attempts: ClassVar[tuple[Attempt, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("prompts", "ensemble", "train_tokens", "texts", "sweep_texts", "exact_texts"):
            value = getattr(self, name)
            require(value >= 1, f"claim.ppd.{name}", value, expected="1 or more")
        require(self.new >= 8, "claim.ppd.new", self.new, expected="8 or more")
        fewest = self.prompts * self.ensemble + 1
        good = bool(self.sizes) and fewest <= min(self.sizes) and max(self.sizes) <= 64
        require(good, "claim.ppd.sizes", list(self.sizes), expected=f"sizes of {fewest} to 64 rows")

    def refuses(self, context: Context) -> str | None:
        """Training and decoding need torch."""
        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        return None

    def run(self, context: Context, *, quick: bool, as_baseline: bool = False) -> Samples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        shape = shapes.resolve(context.model or "shoal-27m")
        heads = float(_HEADS * shape.hidden * (shape.hidden + 1 + shape.vocab_size))
        own = heads if as_baseline else float(self.prompts * self.ensemble * shape.hidden)
        metrics = {
            "bytes_of_target": Paired(method=(own,), baseline=(float(parameters(shape)),)),
            "bytes_of_medusa": Paired(method=(own,), baseline=(heads,)),
        }
        if quick:
            return Samples(metrics=metrics)
        return self._decoded(context, metrics, as_baseline=as_baseline)

    def _decoded(
        self, context: Context, metrics: dict[str, Paired], *, as_baseline: bool
    ) -> Samples:
        from shoal.plan.trees.drafting import Always, Paying

        model = context.remember("target", lambda: target(context))
        options = {"name": "ppd", "prompts": self.prompts, "ensemble": self.ensemble}
        path, trained_s = context.remember(
            "prompt tokens", lambda: drafter(context, model, options, self.train_tokens)
        )
        asked = context.remember("texts", lambda: prompts(model, self.texts))
        guessing: dict[str, Any] = {"name": "ppd", "path": str(path)}
        context.progress("tokens in fp64", 0.3)
        true = Server(model, precision="fp64", threads=self.threads)
        exact = true
        if not as_baseline:
            exact = Server(model, guessing, precision="fp64", threads=self.threads)
            exact.drafting = Always(max(self.sizes) // 2 - 1)
        wrong = [
            float(exact.answer(text, self.new).tokens != true.answer(text, self.new).tokens)
            for text in asked[: self.exact_texts]
        ]
        metrics["wrong_tokens"] = Paired(method=tuple(wrong))
        context.progress("decoding", 0.5)
        plain = Server(model, threads=self.threads)
        method = Server(model, None if as_baseline else guessing, threads=self.threads)
        for server in (plain, method):  # the first answers prepare kernels and record steps
            server.answer(asked[0], self.new)
        found: list[tuple[Answer, Answer]] = []
        for number, text in enumerate(asked):
            order = (plain, method) if number % 2 else (method, plain)
            given = {server: server.answer(text, self.new) for server in order}
            found.append((given[plain], given[method]))
        good = kept([one for one, _ in found])
        require(bool(good), "claim.ppd", len(good), expected="an answer that is no loop")
        pairs = [found[number] for number in good]
        metrics["over_plain"] = Paired(
            method=tuple(ours.seconds for _, ours in pairs),
            baseline=tuple(theirs.seconds for theirs, _ in pairs),
        )
        measured = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        details: dict[str, JsonValue] = {
            "trained_s": trained_s,
            "tokens_per_step": statistics.mean(ours.per_step for _, ours in pairs),
            "same_in_bf16": statistics.mean(
                float(theirs.tokens == ours.tokens) for theirs, ours in pairs
            ),
            "distinct_4grams": statistics.mean(distinct(theirs.tokens) for theirs, _ in pairs),
            "loops_left_out": len(found) - len(good),
        }
        if as_baseline:
            metrics["predicted_speedup"] = Paired(method=(1.0,), baseline=(measured,))
            metrics["rate_of_best"] = Paired(method=(1.0,), baseline=(1.0,))
            return Samples(metrics=metrics, details=details)
        paying = method.drafting
        assert isinstance(paying, Paying)
        best = Paying(paying.expected, paying.cost).best(1)
        predicted = Paying(paying.expected, paying.cost).table()[best][2]
        metrics["predicted_speedup"] = Paired(method=(predicted,), baseline=(measured,))
        context.progress("sweep over rows", 0.8)
        sizes = sorted({*self.sizes, best + 1})
        seconds: dict[int, list[float]] = {rows: [] for rows in sizes}
        texts = [asked[number] for number in good[: self.sweep_texts]]
        for turn, text in enumerate([texts[0], *texts]):  # the first one prepares
            for rows in sizes if turn % 2 else reversed(sizes):
                method.drafting = Always(rows - 1)
                taken = method.answer(text, self.new).seconds
                if turn:
                    seconds[rows].append(taken)
        medians = {rows: statistics.median(of) for rows, of in seconds.items()}
        fastest = min(medians, key=lambda rows: medians[rows])
        metrics["rate_of_best"] = Paired(
            method=tuple(1 / one for one in seconds[best + 1]),
            baseline=tuple(1 / one for one in seconds[fastest]),
        )
        details |= {
            "chosen_rows": best + 1,
            "fastest_rows": fastest,
            "sweep_s": {str(rows): value for rows, value in medians.items()},
            "expected_tokens": list(paying.expected),
            "step_s": {str(rows): paying.cost.seconds(rows) for rows in sizes},
        }
        profile = f"plain step {1e3 * paying.cost.seconds(1):.2f} ms; " + ", ".join(
            f"{rows} rows {1e3 * paying.cost.seconds(rows):.2f} ms" for rows in sizes
        )
        bound = max(paying.expected[rows - 1] for rows in sizes)
        return Samples(
            metrics=metrics, details=details, profile=profile, bounds={"over_plain": bound}
        )
