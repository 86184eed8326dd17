"""What mining costs: the shape of the data, the rates of a machine, and what the miners share.

A sample of the baskets is mined by every miner, and its operations are counted, not timed: so the
answer is the same each time. Operations that grow with the baskets are scaled up to all of them.
How long each sort of operation takes is timed here in about a second, and kept in ``mining.json``
of Shoal's home for this processor; a machine that is only described is taken to have such cores.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from shoal.core.measure import num_cores
from shoal.core.native import cpu_model
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.fields.data.mine.baskets import Baskets, from_matrix
from shoal.fields.data.mine.generator import heaton_baskets
from shoal.fields.data.mine.protocols import (
    Itemsets,
    Miner,
    MineRates,
    MineWork,
    MiningProblem,
    TooManyError,
)
from shoal.fields.rates import kept_rates
from shoal.ir import Device, Estimate, Interval, Machine, MemoryTier

# Fewest baskets of a sample, and the least support in it, below which chance decides.
_FEWEST, _LEAST = 256, 6
# Operations for each entry of the sample, after which a miner is known to be slow.
_BUDGET = 300
# The miner that says at which support a sample has few enough sets.
_FIRST = "eclat"
_SPREAD_TIMED, _SPREAD_DERIVED = 0.8, 3.0
# Of a core of Intel's Sapphire Rapids: what limits them is latency, which no description has.
_ELSEWHERE = MineRates(
    entry_s=1.2e-8,
    kept_s=1e-8,
    merge_s=1e-8,
    insert_s=4e-9,
    step_s=4e-9,
    word_s=3e-10,
    call_s=2e-8,
    pack_s=1e-9,
    node_s=1.3e-8,
    item_s=6e-8,
    trie_s=2.7e-9,
    join_s=2e-7,
    set_s=4e-8,
    spread=_SPREAD_DERIVED,
    measured=False,
)
# Nodes of prefix trees grow with this power of the baskets.
_SHARED = 0.85


class Effort(NamedTuple):
    """How much of the data is looked at.

    Args:
        one_in: a sample has one in so many baskets.
        most: baskets of it.
        sets: that are waited for; if there are more, a higher support is taken.
    """

    one_in: int
    most: int
    sets: int


QUICK = Effort(32, 1024, 1000)
"""To choose a miner, in a small share of the time that mining takes."""

CAREFUL = Effort(4, 16_384, 200_000)
"""To predict seconds and sets."""


def scaled(work: MineWork, count: float) -> float:
    """Operations on all baskets, of those on the sample."""
    return count * work.num_baskets / max(work.sample, 1)


def grown(work: MineWork, count: float) -> float:
    """Nodes of the trees of all baskets, of those of the sample: the more, the more are shared."""
    return count * float((work.num_baskets / max(work.sample, 1)) ** _SHARED)


def estimate_of(
    work: MineWork, terms: Mapping[str, float], *, whole: bool, tree: bool = False
) -> Estimate:
    """Seconds and bytes of a search.

    Args:
        work: the data.
        terms: cause -> seconds of what is the miner's own.
        whole: it keeps all frequent sets, whatever is wanted.
        tree: it has a tree of all baskets.
    """
    sets = work.sets if whole else work.wanted
    kept = work.num_baskets * work.mean_len
    times = {
        "reduce": work.entries * work.rates.entry_s + kept * work.rates.kept_s,
        **terms,
        "write": sets * work.rates.set_s,
    }
    return Estimate(
        step_s=Interval.around(sum(times.values()), work.rates.spread),
        terms_s=times,
        memory_bytes={
            "baskets": 4.0 * work.entries + 20.0 * kept + 16.0 * work.num_baskets,
            "trees": 24.0 * kept if tree else 0.0,
            "sets": sets * (12.0 + 4.0 * work.set_len),
        },
        bound="memory",
    )


def shape_of(
    problem: MiningProblem, rates: MineRates, effort: Effort, num_baskets: int | None = None
) -> MineWork:
    """The shape of some baskets, by what mining a sample of them takes.

    Args:
        problem: what is to be found.
        rates: of the machine.
        effort: how large the sample is.
        num_baskets: of all data, if the baskets are only some of it.
    """
    baskets = problem.baskets
    here = baskets.num_baskets
    total = num_baskets or here
    share = problem.least / max(total, 1)
    size = max(min(max(_FEWEST, here // effort.one_in), effort.most), math.ceil(_LEAST / share))
    sample = _spread(baskets, min(size, here))
    size = sample.num_baskets
    support = np.bincount(sample.ids, minlength=sample.num_items)
    least = max(1, math.ceil(share * size - 1e-9))
    kept = support >= least
    mean_len = float(support[kept].sum()) / max(size, 1)
    small = replace(
        problem,
        baskets=sample,
        least=least,
        max_itemsets=effort.sets,
        budget=_BUDGET * (len(sample.ids) + 1000),
        tick=lambda done, sets: None,
    )
    small, found = _few_sets(small)
    return MineWork(
        num_baskets=total,
        entries=round(len(baskets.ids) * total / max(here, 1)),
        least=problem.least,
        num_items=int(kept.sum()),
        mean_len=mean_len,
        longest=int(np.diff(sample.begins).max(initial=0)),
        density=mean_len / max(int(kept.sum()), 1),
        depth=int(found.lengths.max(initial=0)),
        sets=float(len(found)),
        wanted=float(len(_first().mine(small)) if problem.target != "all" else len(found)),
        set_len=len(found.items) / max(len(found), 1),
        sample=size,
        capped=small.least > least,
        counts={name: dict(table("miner").build(name).counts(small)) for name in table("miner")},
        rates=rates,
    )


def _spread(baskets: Baskets, size: int) -> Baskets:
    """So many baskets, one from each of as many equal stretches; their items numbered anew."""
    if size >= baskets.num_baskets:
        return baskets
    places = np.arange(size) + generator(0, purpose="mining sample").random(size)
    some = baskets.rows((places * (baskets.num_baskets / size)).astype(np.int64))
    there = np.zeros(baskets.num_items, np.bool_)
    there[some.ids] = True
    numbers = np.cumsum(there, dtype=np.int32) - 1
    return Baskets(some.begins, numbers[some.ids], np.flatnonzero(there))


def _few_sets(problem: MiningProblem) -> tuple[MiningProblem, Itemsets]:
    """All sets of a sample, at a support at which there are not more than the limit."""
    while True:
        try:
            return problem, _first().mine(problem.whole())
        except TooManyError:
            problem = replace(problem, least=problem.least + max(1, problem.least // 4))


def _first() -> Miner:
    miner: Miner = table("miner").build(_FIRST)
    return miner


def rates_of(machine: Machine) -> MineRates:
    """How fast a machine is: timed if it is this one, else as fast as one core of a server.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        return rates_here()
    return _ELSEWHERE


def rates_here() -> MineRates:
    """Rates of this machine; timed once.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    return kept_rates("mining.json", cpu_model(), MineRates, timed)


def timed() -> MineRates:
    """Time every miner on a few small data sets, and find the rates that explain the times best.

    An estimate is a sum of operations times rates, so what it says for one rate alone is how many
    operations there are.
    """
    names = [name for name in MineRates.model_fields if name not in ("spread", "measured")]
    nothing = dict.fromkeys(names, 0.0)
    rows, seconds = [], []
    machine = this_machine()
    for problem in _workloads():
        for name in table("miner"):
            miner: Miner = table("miner").build(name)
            passed = min(_seconds(miner, problem) for _ in range(2))
            counted = dict(miner.counts(problem))
            found = miner.mine(problem)
            row = []
            for rate in names:
                rates = MineRates(**{**nothing, rate: 1.0}, spread=0.0, measured=True)
                work = _work_of(problem, rates, {name: counted}, found.lengths)
                row.append(miner.estimate(work, machine).step_s.value)
            rows.append(row)
            seconds.append(passed)
    relative = np.array(rows) / np.array(seconds)[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-30)
    solution, _ = nnls(relative / scale, np.ones(len(seconds)))
    values = dict(zip(names, (solution / scale).tolist(), strict=True))
    return MineRates(**values, spread=_SPREAD_TIMED, measured=True)


def _seconds(miner: Miner, problem: MiningProblem) -> float:
    begin = time.perf_counter()
    miner.mine(problem)
    return time.perf_counter() - begin


def _work_of(
    problem: MiningProblem, rates: MineRates, counts: Mapping[str, Any], lengths: np.ndarray
) -> MineWork:
    """The work of a search whose operations are counted, not estimated."""
    baskets = problem.baskets
    support = np.bincount(baskets.ids, minlength=baskets.num_items)
    mean_len = float(support[support >= problem.least].sum()) / baskets.num_baskets
    return MineWork(
        num_baskets=baskets.num_baskets,
        entries=len(baskets.ids),
        least=problem.least,
        num_items=int((support >= problem.least).sum()),
        mean_len=mean_len,
        longest=int(np.diff(baskets.begins).max(initial=0)),
        density=0.0,
        depth=int(lengths.max(initial=0)),
        sets=float(len(lengths)),
        wanted=float(len(lengths)),
        set_len=float(lengths.mean()) if len(lengths) else 0.0,
        sample=baskets.num_baskets,
        capped=False,
        counts=counts,
        rates=rates,
    )


def _workloads() -> list[MiningProblem]:
    """Wide and narrow, sparse and dense baskets, some milliseconds each."""
    draw = generator(0, purpose="mining rates")
    problems = [
        MiningProblem(heaton_baskets(size, longest, planted), least=max(1, round(share * size)))
        for size, longest, planted, share in (
            (20_000, 10, 0.5, 0.02),
            (4_000, 14, 0.5, 0.04),
            (4_000, 40, 0.2, 0.05),
        )
    ]
    for rows, items, density, share in (
        (3_000, 40, 0.4, 0.1),
        (20_000, 12, 0.5, 0.01),
        (200_000, 10, 0.5, 0.01),
    ):
        problems.append(
            MiningProblem(
                from_matrix(draw.random((rows, items)) < density), least=round(share * rows)
            )
        )
    for rows, length, items, least in (
        (20_000, 8, 2000, 20),
        (5_000, 40, 2000, 60),
        (800_000, 3, 3000, 800),
    ):
        popular = 1 / np.arange(1, items + 1) ** 0.9
        ids = draw.choice(items, rows * length, p=popular / popular.sum()).astype(np.int32)
        begins = np.arange(0, rows * length + 1, length)
        problems.append(MiningProblem(Baskets(begins, ids, np.arange(items)), least=least))
    return problems


def this_machine() -> Machine:
    """What the estimates of this process's searches are asked for."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = Device(
        name=cpu_model(),
        kind="cpu",
        num_cores=num_cores(),
        memory=(MemoryTier(name="dram", capacity_bytes=memory),),
    )
    return Machine(name="here", device=device, fingerprint={"cpu": cpu_model()})
