"""[100] LCA-Bench: attention kernels and context-parallel methods under many masks.

Source: Long-Context Attention Benchmark: From Kernel Efficiency to Distributed Context Parallelism,
2025.

Kernels under all masks and context-parallel methods under four, compared with float64. Ulysses is
ahead where communication binds and heads suffice (real numbers, time of links on a virtual clock);
a causal ring over contiguous pieces gives the last rank (2N - 1) / N of the mean work; under
documents a causal kernel wastes more than half of its FLOPs at 32,768 tokens. The A/A run has a
causal mask, zigzag for Ulysses and the ring, the ring for zigzag, one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, MultipleOf

from shoal.claims.bench.attention.masks import MASKS, build_mask, document_lengths, real_lengths
from shoal.claims.bench.attention.values import (
    AttentionSettings,
    ContextRow,
    KernelRow,
    RankNetwork,
)
from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun, paired
from shoal.claims.protocols import ExperimentContext, PairedSamples
from shoal.core.errors import ConfigError
from shoal.core.parts import part, table
from shoal.ir.mask import Mask
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from shoal.claims.bench.attention.context import AttentionCase

CONTEXT_MASKS = ("full", "causal", "document", "causal_document")
RANKS = (2, 4, 8)
HEADS = 4

# Sequences whose FLOPs are added up for one sample of waste, and samples.
_SEQUENCES, _BATCHES = 16, 16

_Length = Annotated[int, MultipleOf(128), Ge(256)]


@part
class LCABench(BaseClaim, row=100):
    """Correctness of every cell, and three findings of the benchmark.

    Args:
        lengths: tokens of a sequence, of the kernels; two heads over one key/value head, beyond
            4,096 one.
        context_length: tokens of a sequence, of the context-parallel methods.
        document_length: tokens of a sequence, for the waste under documents.
    """

    lengths: tuple[_Length, ...] = (1024, 2048, 4096, 8192)
    context_length: _Length = 1024
    document_length: _Length = 32768

    def collect(self, run: ClaimRun) -> None:
        """Check every cell; the quick run and the A/A run have short sequences.

        Raises:
            DataError: this Python has no source whose files could be documents.
        """
        pool = run.remember("lengths", real_lengths)
        quick, context, as_baseline = run.quick, run.context, run.as_baseline
        small = quick or as_baseline
        # Threads that wait for each other cost more than such small products.
        with torch_threads(1 if small else 0):
            kernels = self._kernels(context, pool, small, as_baseline)
        with torch_threads(1):
            methods = self._methods(context, pool, quick)
            causal_rows = methods
            if as_baseline:
                causal_rows = [
                    row
                    for case in _cases(context, pool, 256)
                    for row in _rows(
                        context, case._replace(mask=Mask.causal(256)), 2, RankNetwork()
                    )
                ]
        cells: list[KernelRow | ContextRow] = [*kernels, *causal_rows]
        ulysses, ring = run.pick("ulysses", "zigzag"), run.pick("ring", "zigzag")
        run.put("wrong_cells", sum(row.status in ("wrong", "failed") for row in cells))
        run.put("full_methods", _full_methods(causal_rows))
        run.put("ulysses_refused", _refused(ulysses))
        shares = ((2 * n - 1) / n for n in sorted(RANKS))
        run.put("ring_imbalance_error", _balances(methods, ring), shares)
        run.put("zigzag_imbalance", _balances(methods, run.pick("zigzag", "ring")))
        waste = _waste(pool, self.document_length, run.seed, as_baseline)
        run.put("document_waste", waste.method, waste.baseline)
        if not quick:
            run.put("full_kernels", _full_kernels(kernels))
            run.put("ulysses_speedup", _speedups(methods, ulysses))
        if not small:
            run.details |= _details(kernels, pool, context)

    def _kernels(
        self, context: ExperimentContext, pool: Sequence[int], small: bool, as_baseline: bool
    ) -> list[KernelRow]:
        from shoal.claims.bench.attention.kernels import kernel_rows

        lengths = (256,) if small else self.lengths
        names = [name for name in table("attention_kernel") if not (small and name == "flex")]
        parts = {name: table("attention_kernel").build(name) for name in names}
        kernels: list[KernelRow] = []
        total = sum(length**2 for length in lengths) * len(MASKS)
        done = 0
        for length in lengths:
            # Scores of the longest take gigabytes; grouped queries are seen to before.
            heads = 2 if length <= 4096 else 1
            settings = _settings(context, lengths=(length,), heads=heads, kv_heads=1)
            for name in MASKS:
                context.progress(f"kernels, {name} of {length}", 0.75 * done / total)
                mask = build_mask(name, length, block=settings.block, seed=context.seed, pool=pool)
                seen = Mask.causal(length) if as_baseline else None
                kernels += kernel_rows(parts, name, mask, settings, seen=seen)
                done += length**2
        return kernels

    def _methods(
        self, context: ExperimentContext, pool: Sequence[int], quick: bool
    ) -> list[ContextRow]:
        """Rows of every method under four masks; those of the first run stay for the second."""
        length = 256 if quick else self.context_length
        masks = CONTEXT_MASKS[1::2] if quick else CONTEXT_MASKS

        def run() -> list[ContextRow]:
            results = []
            for index, case in enumerate(_cases(context, pool, length, masks)):
                context.progress(f"ranks, {case.name} of {length}", 0.75 + 0.2 * index / len(masks))
                for ranks in RANKS:
                    results += _rows(context, case, ranks, RankNetwork())
            return results

        return context.remember(f"methods of {length}", run)


def _settings(context: ExperimentContext, **changes: object) -> AttentionSettings:
    return AttentionSettings.model_validate(
        {
            "kernels": tuple(table("attention_kernel")),
            "masks": tuple(MASKS),
            "methods": tuple(table("context")),
            "heads": HEADS,
            "kv_heads": HEADS,
            "timed": False,
            "seed": context.seed,
            **changes,
        }
    )


def _cases(
    context: ExperimentContext,
    pool: Sequence[int],
    length: int,
    masks: Sequence[str] = CONTEXT_MASKS,
) -> list[AttentionCase]:
    from shoal.claims.bench.attention.context import AttentionCase

    settings = _settings(context, context_lengths=(length,))
    return [
        AttentionCase.of(
            name,
            build_mask(name, length, block=settings.block, seed=context.seed, pool=pool),
            settings,
        )
        for name in masks
    ]


def _rows(
    context: ExperimentContext, case: AttentionCase, ranks: int, network: RankNetwork
) -> list[ContextRow]:
    from shoal.claims.bench.attention.context import context_row

    settings = _settings(context, network=network)
    return [
        context_row(table("context").build(name), name, case, ranks, settings)
        for name in settings.methods
    ]


def _full_kernels(rows: Sequence[KernelRow]) -> int:
    """Kernels that are right under at least twelve masks at every length."""
    full_kernels = 0
    for kernel in {row.kernel for row in rows}:
        per_length = [
            sum(row.status == "ok" for row in rows if (row.kernel, row.length) == (kernel, length))
            for length in {row.length for row in rows}
        ]
        full_kernels += min(per_length) >= 12
    return full_kernels


def _full_methods(rows: Sequence[ContextRow]) -> int:
    """Methods that are right under every mask on all ranks that they do not refuse."""
    full_methods = 0
    for method in {row.method for row in rows}:
        states = [
            row.status for row in rows if row.method == method and row.status != "unsupported"
        ]
        full_methods += bool(states) and all(state == "ok" for state in states)
    return full_methods


def _refused(method: str) -> tuple[float, ...]:
    """1 for each number of ranks beyond the key/value heads that the method refuses."""
    chosen = table("context").build(method)
    results = []
    for heads, kv_heads in ((4, 4), (8, 8), (32, 8)):
        for ranks in (2 * kv_heads, 4 * kv_heads):
            try:
                chosen.check(heads, kv_heads, ranks)
                results.append(0.0)
            except ConfigError:
                results.append(1.0)
    return tuple(results)


def _balances(rows: Sequence[ContextRow], method: str) -> tuple[float, ...]:
    """Largest over mean FLOPs under the causal mask, by rising number of ranks."""
    return tuple(
        row.balance or 0.0
        for row in sorted(rows, key=lambda row: row.ranks)
        if (row.method, row.mask) == (method, "causal")
    )


def _speedups(rows: Sequence[ContextRow], method: str) -> tuple[float, ...]:
    """Step time of the fastest other method over that of this one, up to as many ranks as heads.

    USP on two ranks is Ulysses under another name.
    """
    speedups = []
    for mask in CONTEXT_MASKS:
        for ranks in (n for n in RANKS if n <= HEADS):
            seconds = {
                row.method: row.step_s or 0.0
                for row in rows
                if (row.mask, row.ranks, row.status) == (mask, ranks, "ok")
            }
            others = [
                taken
                for name, taken in seconds.items()
                if name != "ulysses" and (name, ranks) != ("usp", 2)
            ]
            speedups.append(min(others) / seconds[method])
    return tuple(speedups)


def _waste(pool: Sequence[int], length: int, seed: int, as_baseline: bool) -> PairedSamples:
    """Cells of causal sequences, and those of the same under their documents."""
    dense = Mask.causal(length).area() * _SEQUENCES
    exact = []
    for batch in range(_BATCHES):
        cells = 0
        for index in range(batch * _SEQUENCES, (batch + 1) * _SEQUENCES):
            documents = document_lengths(length, seed=seed, index=index, pool=pool)
            ids = np.repeat(np.arange(len(documents)), documents)
            cells += Mask.document(ids * (not as_baseline)).area()
        exact.append(float(cells))
    return paired([dense] * _BATCHES, exact)


def _details(
    kernels: Sequence[KernelRow], pool: Sequence[int], context: ExperimentContext
) -> dict[str, Any]:
    waste = {}
    for length in (1024, 2048, 4096, 8192, 32768, 131072):
        result = _waste(pool, length, context.seed, False)
        waste[length] = sum(result.method) / sum(result.baseline)
    reasons = {
        f"{row.kernel}, {row.mask}, {row.length}": row.reason for row in kernels if row.reason
    }
    return {"reasons": reasons, "document_waste": waste}
