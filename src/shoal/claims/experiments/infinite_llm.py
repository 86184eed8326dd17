"""[39] Infinite-LLM: is memory that instances lend each other worth its traffic?

The longest context of three capped instances beside a lone one, and beside what the books say. One
request of 6 K tokens and 40 short ones, beside instances that do not lend, where the long one gives
way and is computed again; a tensor-parallel engine serves the same once, for the record. Bytes on
the wire for a token. The A/A run does not lend; the quick run has its instances in one process.

Source: Lin et al., Infinite-LLM: Efficient LLM Service for Long Context with DistAttention and
Distributed KVCache, 2024.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.claims.experiments.infinite_llm_runs import ServedRun

# Positions of the model: more than the longest context of all instances.
_LONGEST = 16384


@part
class InfiniteLLM(BaseClaim, row=39, needs=("torch",)):
    """Contexts longer than an instance, and short requests beside a long one.

    Args:
        layers: layers of the model.
        hidden: width of the model.
        room: tokens of an instance's cache where contexts are measured.
        kv_tokens: tokens of an instance's cache where throughput is.
        long: tokens of the long prompt.
        long_new: tokens that it generates.
        shorts: short requests.
        short: tokens of each of their prompts.
        short_new: tokens that each generates.
        rounds: timed pairs.
    """

    layers: Annotated[int, Ge(1)] = 6
    hidden: Annotated[int, Ge(1)] = 384
    room: Annotated[int, Ge(512)] = 1024
    kv_tokens: Annotated[int, Ge(512)] = 7680
    long: Annotated[int, Ge(1)] = 6000
    long_new: Annotated[int, Ge(1)] = 144
    shorts: Annotated[int, Ge(1)] = 40
    short: Annotated[int, Ge(1)] = 64
    short_new: Annotated[int, Ge(1)] = 256
    rounds: Annotated[int, Ge(2)] = 5

    def collect(self, run: ClaimRun) -> None:
        """Measure contexts and count bytes; then, unless it is quick, time both."""
        with ExitStack() as stack:
            self._contexts(run, stack)
        if not run.quick:
            self._throughput(run)

    def _model(self, context: ExperimentContext, *, quick: bool) -> Path:
        from shoal.claims.experiments.energon_ai import model_of
        from shoal.model import huggingface

        where = context.work_dir / ("small" if quick else "model")
        if not where.exists():
            shape = (2, 128) if quick else (self.layers, self.hidden)
            huggingface.write(where, model_of(*shape, context.seed, longest=_LONGEST))
        return where

    def _contexts(self, run: ClaimRun, stack: ExitStack) -> None:
        from shoal.claims.experiments import infinite_llm_runs as runs
        from shoal.model import huggingface
        from shoal.serve.cluster.distkv import DistKVEngine

        quick, lend, seed = run.quick, not run.as_baseline, run.seed
        where = self._model(run.context, quick=quick)
        served = runs.job(where, 512 if quick else self.room)
        if quick:
            near = runs.NearbyInstances(served, run.work_dir / f"near{lend}", lend=lend)
            stack.callback(near.close)
            own, lent, size, ledger = near.own, near.lent, near.registry.block_size, near.registry
        else:
            engine = stack.enter_context(DistKVEngine(served, lend=lend))
            own, lent = engine.capacity(0)
            size, ledger = engine.block_size, engine.registry
        most = runs.longest(ledger, own, lent, 100 * own * size)
        # Its last token is never kept.
        made, again = (runs.requests(seed, (most - 31, 32)) for _ in range(2))
        ran = near.serve(made) if quick else runs.serve(engine, made)
        want = runs.alone(huggingface.read(where), again)
        wrong = sum(a != b for a, b in zip(ran.tokens[0], want[0], strict=True))
        alone = own * size
        kept = -(-own // 20)  # a twentieth of an instance is not lent
        said = min(3 * own, own + 2 * (own - kept)) * size
        stats = ran.stats
        run.put("longest_context", most, alone)
        run.put("longest_context_off", abs(most - said))
        run.put("wrong_tokens", wrong)
        helped = stats["helped_tokens_total"] or 1.0
        # Without lending every key and value would have to come here.
        spared = stats["spared_bytes_total"] or 1.0
        moved = stats["helped_bytes_total"] or 1.0
        run.put("moved_bytes", moved / helped, spared / helped)

    def _throughput(self, run: ClaimRun) -> None:
        ours, apart = run.remember("runs", lambda: self._serve(run))
        mine = run.pick(ours, apart)
        run.put("throughput", (one.seconds for one in mine), (one.seconds for one in apart))
        notes = []
        for name, runs in (("lending", ours), ("apart", apart)):
            first = runs[0]
            notes.append(
                f"{name}: {first.seconds:.1f} s, {first.stats['preemptions_total']:.0f} requests "
                f"gave way, {first.stats['tokens_computed_total']:.0f} tokens computed for "
                f"{sum(map(len, first.tokens))} new ones"
            )
        run.profile = "; ".join(notes)

    def _serve(self, run: ClaimRun) -> tuple[list[ServedRun], list[ServedRun]]:
        from shoal.claims.experiments import infinite_llm_runs as runs
        from shoal.core.measure import check_quiet
        from shoal.serve.cluster.distkv import DistKVEngine

        where = self._model(run.context, quick=False)
        served = runs.job(where, self.kv_tokens)
        shapes = [(self.short, self.short_new)] * self.shorts
        shapes.append((self.long, self.long_new))
        ours: list[ServedRun] = []
        apart: list[ServedRun] = []
        check_quiet(wait_s=60.0)
        with DistKVEngine(served) as lending, DistKVEngine(served, lend=False) as others:
            for turn in range(self.rounds):
                run.progress("throughput", 0.3 + 0.6 * turn / self.rounds)
                pair = [(ours, lending), (apart, others)]
                for result, engine in pair if turn % 2 == 0 else reversed(pair):
                    result.append(runs.serve(engine, runs.requests(run.seed + turn, *shapes)))
        run.progress("tensor parallel", 0.95)
        split = runs.job(where, 3 * self.kv_tokens, kv="paged", parallel={"tp": 3})
        ran = runs.ranked(split, runs.requests(run.seed, *shapes))
        run.details["tensor_parallel_s"] = ran.seconds
        return ours, apart
