"""Ours and the peers of [87], each called as a user calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from shoal.claims.experiments.itemset_shapes import BasketShape
from shoal.claims.frame import ClaimRun
from shoal.core.extras import import_extra
from shoal.core.parts import table
from shoal.fields.data.mine.baskets import from_lists
from shoal.fields.data.mine.estimators import FrequentItemsets
from shoal.fields.data.mine.planning import choose_miner
from shoal.fields.data.mine.protocols import MiningProblem

_PYFIM = ("apriori", "eclat", "fpgrowth", "sam", "relim")


def ours(shape: BasketShape, method: str = "auto") -> Any:
    """From lists to a table."""
    model = FrequentItemsets(shape.least, method=method, max_itemsets=10**8)
    return model.fit(shape.rows).itemsets_


def pyfim(fim: Any, name: str, shape: BasketShape) -> Any:
    """From lists to a list of sets with their counts."""
    return getattr(fim, name)(shape.rows, supp=-shape.least, zmin=1, report="a")


def fastest_of_pyfim(fim: Any, shape: BasketShape) -> str:
    """Of pyfim's miners, each run twice."""
    taken = {
        name: min(seconds_of(partial(pyfim, fim, name, shape)) for _ in range(2)) for name in _PYFIM
    }
    return min(taken, key=lambda name: taken[name])


def frame_of(shape: BasketShape) -> Any:
    """Booleans of the frequent items, which is all that mlxtend needs."""
    pandas: Any = import_extra("pandas", extra="notebook", purpose="the frame of a peer")
    baskets = from_lists(shape.rows)
    frequent = np.bincount(baskets.ids) >= shape.least
    column = (np.cumsum(frequent) - 1)[baskets.ids]
    kept, owner = (
        frequent[baskets.ids],
        np.repeat(np.arange(len(shape.rows)), np.diff(baskets.begins)),
    )
    matrix = np.zeros((baskets.num_baskets, int(frequent.sum())), np.bool_)
    matrix[owner[kept], column[kept]] = True
    return pandas.DataFrame(matrix)


def mlxtend(frame: Any, shape: BasketShape) -> Any:
    """From a frame to a frame; half a basket less, because it compares shares."""
    patterns: Any = import_extra("mlxtend.frequent_patterns", extra="bench", purpose="a peer")
    return patterns.fpgrowth(frame, (shape.least - 0.5) / len(shape.rows))


def different(fim: Any, shape: BasketShape) -> int:
    """How many miners do not find the sets that pyfim finds."""
    problem = MiningProblem(from_lists(shape.rows), shape.least)
    theirs = {frozenset(items): count for items, count in pyfim(fim, "fpgrowth", shape)}
    found = [table("miner").build(name).mine(problem) for name in table("miner")]
    agree = all(one.same_as(found[0]) for one in found)
    return int(not agree) + int(found[0].as_dict() != theirs)


def seconds_of(arm: Callable[[], Any]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    arm()
    return time.perf_counter() - begin


def race_of(
    run: ClaimRun, method: Callable[[], Any], baseline: Callable[[], Any], pairs: int
) -> tuple[list[float], list[float]]:
    """Seconds of both, turn by turn; what is quick several times in its turn."""
    arms = run.arms({"method": method, "baseline": baseline})
    times = {
        name: max(1, min(20, round(0.2 / max(seconds_of(arm), 1e-3)))) for name, arm in arms.items()
    }
    turns = {name: partial(_again, arm, times[name]) for name, arm in arms.items()}
    seconds = run.race(turns, pairs, swaps={}, warmup=0)
    method_s, baseline_s = (
        [s / times[name] for s in seconds[name]] for name in ("method", "baseline")
    )
    return method_s, baseline_s


def mined(problem: MiningProblem, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Label -> a search by the miner of that name; by all miners if none is named."""
    chosen = names or {name: name for name in table("miner")}
    return {
        label: partial(table("miner").build(name).mine, problem) for label, name in chosen.items()
    }


def choice_of(run: ClaimRun, shape: BasketShape, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of the miner that is chosen, and of the one that is the fastest."""
    problem = MiningProblem(from_lists(shape.rows), shape.least)
    arms = {name: partial(seconds_of, arm) for name, arm in mined(problem).items()}
    said = run.turns(arms, pairs)
    fastest = min(said, key=lambda one: float(np.median(said[one])))
    return said[table("miner").spell(choose_miner(problem)).name], said[fastest]


def operations(name: str, shape: BasketShape) -> float:
    """How many operations of any sort a miner takes."""
    problem = MiningProblem(from_lists(shape.rows), shape.least)
    return float(sum(table("miner").build(name).counts(problem).values()))


def _again(arm: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        arm()
