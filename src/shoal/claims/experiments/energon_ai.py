"""[17] EnergonAI: packed batches, a pipeline that never blocks, weights in a neighbour's memory.

- Prompts of lognormal lengths, their mean 0.4 of the longest: all tokens side by side beside the
  same model with every prompt padded to the longest. Rows of the linear layers are counted.
- Two processes with half of the layers each, four steps under way, over a link that is emulated:
  what was sent is there 3 ms later. The pipeline beside one whose sender waits until its receiver
  has taken the states.
- Six of twenty layers in another memory over an emulated link, which takes 1.5 times as long for a
  layer as computing it: with prefetching and without, beside resident layers.

The A/A run pads, blocks and copies late in the place of the three parts.

Source: Du et al., EnergonAI: An Inference System for 10-100 Billion Parameter Transformer Models,
2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.measure import interleave
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer

__all__ = ["EnergonAI"]

_LATENCY_S = 3e-3
_COPY = 1.5
_HIDDEN = 384


@part
class EnergonAI(BaseClaim):
    """Packed or padded, blocking or not, resident or elsewhere.

    Args:
        prompts: of the packed batch.
        longest: tokens of the longest of them.
        requests: of the pipeline, at once.
        tokens: that each of them generates.
        layers: of the model of which some lie elsewhere.
        rounds: timed pairs.
    """

    prompts: Annotated[int, Ge(2)] = 16
    longest: Annotated[int, Ge(2)] = 200
    requests: Annotated[int, Ge(2)] = 16
    tokens: Annotated[int, Ge(2)] = 32
    layers: Annotated[int, Ge(2)] = 20
    rounds: Annotated[int, Ge(2)] = 16

    rows: ClassVar[tuple[int, ...]] = (17,)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """Count rows; then, unless it is quick, time the three."""
        metrics: dict[str, PairedSamples] = {}
        details: dict[str, JsonValue] = {}
        wrong = self._packed(context, metrics, details, quick=quick, as_baseline=as_baseline)
        if not quick:
            context.progress("pipeline", 0.3)
            wrong += self._pipeline(context, metrics, details, as_baseline=as_baseline)
            context.progress("memory", 0.7)
            self._memory(context, metrics, details, as_baseline=as_baseline)
        metrics["wrong_tokens"] = PairedSamples(method=(float(wrong),))
        return ClaimSamples(metrics=metrics, details=details)

    def _packed(
        self,
        context: ExperimentContext,
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
        *,
        quick: bool,
        as_baseline: bool,
    ) -> int:
        from shoal.claims.experiments.energon_ai_runs import FirstTokens, job, lengths, model_of
        from shoal.core.random import generator
        from shoal.serve.engine.build import prepare

        hidden, longest = (64, 32) if quick else (_HIDDEN, self.longest)
        counts = lengths(self.prompts, longest, context.seed)
        prompts = [
            generator(context.seed, purpose="packed", index=number).integers(0, 4096, n).tolist()
            for number, n in enumerate(counts)
        ]
        both = FirstTokens(prepare(job(), model_of(4, hidden, context.seed)), prompts)
        tokens, rows = both.rows(padded=as_baseline)
        reference, most = both.rows(padded=True)
        metrics["linear_rows"] = PairedSamples(
            method=(float(rows),), baseline=(float(sum(counts)),)
        )
        details["packed"] = {"lengths": list(counts), "rows": rows, "padded_rows": most}
        if not quick:
            timed = interleave(
                {
                    "packed": lambda: both.run(padded=as_baseline),
                    "padded": lambda: both.run(padded=True),
                },
                self.rounds,
                seed=context.seed,
            ).seconds
            metrics["packed_prefill"] = PairedSamples(
                method=timed["packed"], baseline=timed["padded"]
            )
        return sum(one != other for one, other in zip(tokens, reference, strict=True))

    def _pipeline(
        self,
        context: ExperimentContext,
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
        *,
        as_baseline: bool,
    ) -> int:
        from shoal.claims.experiments.energon_ai_runs import (
            generate,
            model_of,
            one_process,
            pipeline,
        )
        from shoal.model import huggingface

        directory = context.work_dir / "pipeline"
        if not directory.exists():
            huggingface.write(directory, model_of(8, _HIDDEN, context.seed))
        size = (self.requests, self.tokens, context.seed)
        want = context.remember("answers", lambda: generate(one_process(directory), *size))
        wrong = 0
        ours = pipeline(directory, blocking=as_baseline, latency_s=_LATENCY_S)
        try:
            blocking = pipeline(directory, blocking=True, latency_s=_LATENCY_S)
            try:

                def answer(name: str) -> None:
                    nonlocal wrong
                    engine = ours if name == "nonblocking" else blocking
                    wrong += generate(engine, *size) != want

                timed = interleave(
                    {
                        "nonblocking": lambda: answer("nonblocking"),
                        "blocking": lambda: answer("blocking"),
                    },
                    self.rounds,
                    seed=context.seed,
                ).seconds
            finally:
                blocking.close()
        finally:
            ours.close()
        metrics["nonblocking_pipeline"] = PairedSamples(
            method=timed["nonblocking"], baseline=timed["blocking"]
        )
        every = self.requests * self.tokens
        details["pipeline"] = {
            "latency_s": _LATENCY_S,
            "tokens_per_s": {
                name: [round(every / one, 1) for one in seconds] for name, seconds in timed.items()
            },
        }
        return wrong

    def _memory(
        self,
        context: ExperimentContext,
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
        *,
        as_baseline: bool,
    ) -> None:
        from shoal.claims.experiments.energon_ai_runs import job, model_of, steps_of
        from shoal.serve.cache.weights import PeerMemory, least_resident
        from shoal.serve.engine.build import prepare

        def model() -> Transformer:
            return prepare(job(), model_of(self.layers, _HIDDEN, context.seed))

        resident = steps_of(model(), 96)
        alone = interleave({"resident": resident}, 8, seed=context.seed).seconds["resident"]
        layer_s = sorted(alone)[len(alone) // 2] / self.layers
        layer_bytes = 4 * sum(
            one.numel() for name, one in model().blocks[0].named_parameters() if "norm" not in name
        )
        speed = layer_bytes / (_COPY * layer_s)

        def elsewhere(*, prefetch: bool) -> tuple[Transformer, int]:
            made = model()
            pool = PeerMemory(fraction=0.3, prefetch=prefetch, bytes_per_s=speed).apply(made)
            assert pool is not None
            return made, pool.saved_bytes

        ours, saved = elsewhere(prefetch=not as_baseline)
        late = steps_of(elsewhere(prefetch=False)[0], 96)
        timed = interleave(
            {
                "resident": resident,
                "elsewhere": steps_of(ours, 96),
                "late": resident if as_baseline else late,
            },
            2 * self.rounds,
            seed=context.seed,
        ).seconds
        metrics["peer_memory"] = PairedSamples(
            method=timed["elsewhere"], baseline=timed["resident"]
        )
        metrics["peer_memory_without_prefetch"] = PairedSamples(
            method=timed["late"], baseline=timed["resident"]
        )
        details["memory"] = {
            "layer_s": layer_s,
            "copy_s": _COPY * layer_s,
            "layer_bytes": layer_bytes,
            "link_bytes_per_s": speed,
            "saved_bytes": saved,
            "least_resident": least_resident(self.layers, _COPY, 1.0),
            "resident": self.layers - int(0.3 * self.layers),
        }
