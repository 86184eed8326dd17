"""Experts' matrices with their own rows, forward and back: kernels, peers and the limit in turns.

A round draws new counts, as every step of a training run does. One thread. The limit is the larger
of two times that are measured beside it: the products at the rate of one large product, and all
matrices and rows at the speed at which memory is read.

    python benchmarks/grouped.py [--rounds 41] [--dry]
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from common import Row, record, require_quiet

from shoal.core.measure import interleave
from shoal.kernel.dispatch import kernels_of
from shoal.kernel.grouped.call import GroupedLinear
from shoal.kernel.grouped.choice import chosen_kernel
from shoal.kernel.grouped.product import multiply
from shoal.kernel.tensors import dtype_of

Run = Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor]
# Draws that are gone through.
DRAWS = 8


class Case(NamedTuple):
    """Rows of experts: how many, of what size, how unevenly, and what the rule must gain."""

    experts: int
    n: int
    k: int
    rows: int
    skew: float
    dtype: str
    least: float


CASES = (
    Case(64, 256, 128, 512, 0.0, "bf16", 1.5),
    Case(64, 256, 128, 512, 1.0, "bf16", 1.0),
    Case(16, 512, 128, 4096, 0.3, "bf16", 1.0),
    Case(8, 1024, 512, 4096, 0.3, "bf16", 0.97),
    Case(64, 256, 128, 512, 0.0, "fp32", 1.0),
    Case(16, 512, 128, 4096, 0.3, "fp32", 1.0),
    Case(8, 1024, 512, 4096, 0.3, "fp32", 0.97),
)


def drawn(case: Case) -> list[list[int]]:
    """Counts of several steps; popularity falls as rank**-skew."""
    source = torch.Generator().manual_seed(0)
    chance = torch.arange(1, case.experts + 1).double().pow(-case.skew)
    chance = chance[torch.randperm(case.experts, generator=source)]
    chosen = torch.multinomial(chance, DRAWS * case.rows, replacement=True, generator=source)
    return [torch.bincount(one, minlength=case.experts).tolist() for one in chosen.view(DRAWS, -1)]


def one_by_one(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """What one writes first: a layer for each expert that has rows."""
    parts = zip(torch.split(rows, counts), weight.unbind(0), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts if len(part)])


def library(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """PyTorch's grouped product with PyTorch's gradients."""
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def measured(case: Case, rounds: int) -> list[Row]:
    """One case: the rule beside every kernel and both peers."""
    dtype = dtype_of(case.dtype)  # type: ignore[arg-type]
    rows = torch.randn(case.rows, case.k).to(dtype).requires_grad_()
    weight = torch.randn(case.experts, case.n, case.k).to(dtype).requires_grad_()
    grad = torch.randn(case.rows, case.n).to(dtype)
    every = drawn(case)

    def passed(run: Run) -> Callable[[], None]:
        turn = itertools.cycle(every)

        def both() -> None:
            torch.autograd.grad(run(rows, weight, next(turn)), (rows, weight), grad)

        return both

    call = GroupedLinear(case.rows, case.experts, case.n, case.k, dtype=case.dtype)  # type: ignore[arg-type]
    runs: dict[str, Run] = {"rule": multiply, "one by one": one_by_one}
    if kernels_of(call.op)["torch"].refuses(call) is None:
        runs["grouped_mm"] = library
    for name, kernel in kernels_of(call.op).items():
        if name != "reference" and not kernel.interpreted(call) and kernel.refuses(call) is None:
            runs[name] = kernel.prepare(call)
    side = torch.randn(1024, 1024).to(dtype)
    memory = torch.randn(2**25)
    methods = {name: passed(run) for name, run in runs.items()}
    methods["large product"] = lambda: side @ side
    methods["reading"] = lambda: memory.sum()
    paired = interleave(methods, rounds)
    rate = 2 * 1024**3 / paired.median("large product").value
    bandwidth = 4 * 2**25 / paired.median("reading").value
    limit = max(3 * call.flops / rate, 3 * call.moved_bytes / bandwidth)
    ours = paired.median("rule").value
    gain = paired.ratio("one by one", "rule")
    kernels = {
        chosen_kernel(counts, case.n, case.k, case.dtype, "cpu").backend  # type: ignore[arg-type]
        for counts in every
    }
    beside = ", ".join(
        f"{name} {paired.ratio(name, 'rule').value:.2f}x" for name in runs if name != "rule"
    )
    note = (
        f"{case.rows} rows, skew {case.skew}, one thread, forward and back; the rule takes "
        f"{' or '.join(sorted(kernels))}, {1e3 * ours:.2f} ms, {limit / ours:.0%} of the limit; "
        f"time of others over its: {beside}"
    )
    print(case, note, flush=True)
    name = f"{case.experts} experts {case.n}x{case.k}, {case.dtype}, skew {case.skew:g}"
    return [
        Row(
            f"grouped product of {name}, against one expert after another",
            gain.value,
            "x",
            ">=",
            case.least,
            note,
            gain.low,
            gain.high,
        )
    ]


def main() -> None:
    """Measure, and record if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.dry:
        require_quiet()
    rows = [row for case in CASES for row in measured(case, args.rounds)]
    if not args.dry:
        record(rows)


if __name__ == "__main__":
    main()
