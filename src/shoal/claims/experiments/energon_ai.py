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

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
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

    def collect(self, run: ClaimRun) -> None:
        """Count rows; then, unless it is quick, time the three."""
        wrong = self._packed(run)
        if not run.quick:
            run.progress("pipeline", 0.3)
            wrong += self._pipeline(run)
            run.progress("memory", 0.7)
            self._memory(run)
        run.put("wrong_tokens", wrong)

    def _packed(self, run: ClaimRun) -> int:
        from shoal.claims.experiments.energon_ai_runs import FirstTokens, job, lengths, model_of
        from shoal.core.random import generator
        from shoal.serve.engine.build import prepare

        hidden, longest = (64, 32) if run.quick else (_HIDDEN, self.longest)
        counts = lengths(self.prompts, longest, run.seed)
        prompts = [
            generator(run.seed, purpose="packed", index=number).integers(0, 4096, n).tolist()
            for number, n in enumerate(counts)
        ]
        both = FirstTokens(prepare(job(), model_of(4, hidden, run.seed)), prompts)
        tokens, rows = both.rows(padded=run.as_baseline)
        reference, most = both.rows(padded=True)
        run.put("linear_rows", rows, sum(counts))
        run.details["packed"] = {"lengths": counts, "rows": rows, "padded_rows": most}
        if not run.quick:
            arms = {
                "packed": functools.partial(both.run, padded=False),
                "padded": functools.partial(both.run, padded=True),
            }
            timed = run.race(arms, self.rounds, swaps={"packed": "padded"})
            run.put("packed_prefill", timed["packed"], timed["padded"])
        return sum(one != other for one, other in zip(tokens, reference, strict=True))

    def _pipeline(self, run: ClaimRun) -> int:
        from shoal.claims.experiments.energon_ai_runs import (
            generate,
            model_of,
            one_process,
            pipeline,
        )
        from shoal.model import huggingface

        directory = run.work_dir / "pipeline"
        if not directory.exists():
            huggingface.write(directory, model_of(8, _HIDDEN, run.seed))
        size = (self.requests, self.tokens, run.seed)
        want = run.remember("answers", lambda: generate(one_process(directory), *size))
        wrong = 0
        blocks = run.arms({"nonblocking": False, "blocking": True}, {"nonblocking": "blocking"})
        with contextlib.ExitStack() as stack:
            engines = {}
            for name, blocking in blocks.items():
                engines[name] = pipeline(directory, blocking=blocking, latency_s=_LATENCY_S)
                stack.callback(engines[name].close)

            def answer(name: str) -> None:
                nonlocal wrong
                wrong += generate(engines[name], *size) != want

            arms = {name: functools.partial(answer, name) for name in engines}
            timed = run.race(arms, self.rounds, swaps={})
        run.put("nonblocking_pipeline", timed["nonblocking"], timed["blocking"])
        every = self.requests * self.tokens
        run.details["pipeline"] = {
            "latency_s": _LATENCY_S,
            "tokens_per_s": {
                name: [round(every / one, 1) for one in seconds] for name, seconds in timed.items()
            },
        }
        return wrong

    def _memory(self, run: ClaimRun) -> None:
        from shoal.claims.experiments.energon_ai_runs import job, model_of, steps_of
        from shoal.serve.cache.weights import PeerMemory, least_resident
        from shoal.serve.engine.build import prepare

        def model() -> Transformer:
            return prepare(job(), model_of(self.layers, _HIDDEN, run.seed))

        resident = steps_of(model(), 96)
        alone = run.race({"resident": resident}, 8)["resident"]
        layer_s = sorted(alone)[len(alone) // 2] / self.layers
        layer_bytes = 4 * sum(
            one.numel() for name, one in model().blocks[0].named_parameters() if "norm" not in name
        )
        speed = layer_bytes / (_COPY * layer_s)

        def elsewhere(*, prefetch: bool) -> tuple[Callable[[], object], int]:
            made = model()
            pool = PeerMemory(fraction=0.3, prefetch=prefetch, bytes_per_s=speed).apply(made)
            assert pool is not None
            return steps_of(made, 96), pool.saved_bytes

        ours, saved = elsewhere(prefetch=not run.as_baseline)
        late = elsewhere(prefetch=False)[0]
        arms = {"resident": resident, "elsewhere": ours, "late": late}
        timed = run.race(arms, 2 * self.rounds, swaps={"late": "resident"})
        run.put("peer_memory", timed["elsewhere"], timed["resident"])
        run.put("peer_memory_without_prefetch", timed["late"], timed["resident"])
        run.details["memory"] = {
            "layer_s": layer_s,
            "copy_s": _COPY * layer_s,
            "layer_bytes": layer_bytes,
            "link_bytes_per_s": speed,
            "saved_bytes": saved,
            "least_resident": least_resident(self.layers, _COPY, 1.0),
            "resident": self.layers - int(0.3 * self.layers),
        }
