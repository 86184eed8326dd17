"""Mining data that does not fit in memory: each shard by itself, then all candidates once more.

A set that is frequent in all data is frequent, at the same share, in at least one shard. So the
frequent sets of the shards together have all of them, and a second pass counts them exactly.

Source: Savasere, Omiecinski, Navathe, An Efficient Algorithm for Mining Association Rules in Large
Databases (Partition), 1995.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.files import write_atomic
from shoal.core.parts import Choice, table
from shoal.fields.data.mine.baskets import Baskets
from shoal.fields.data.mine.inputs import BasketShard
from shoal.fields.data.mine.job import MineJob
from shoal.fields.data.mine.miners.native import keep, recount
from shoal.fields.data.mine.protocols import Itemsets, MiningProblem, least_support, too_many
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.shards import map_shards, opened

Told = Callable[[float, str], None]


def mine_sharded(
    job: MineJob, choice: Choice, shards: Sequence[BasketShard], directory: Path, tell: Told
) -> tuple[Itemsets, BadRowCount]:
    """Frequent sets of all shards; equal to those of all baskets at once.

    Args:
        job: what to find.
        choice: the miner.
        shards: of the data.
        directory: keeps what is done, so that a run that was stopped goes on.
        tell: called with (share done, what is done).

    Raises:
        TooManyError: a shard, or all of them, have more sets than ``max_itemsets``.
        DataError: a row cannot be read.
    """
    bad = BadRowCount()

    with opened(job.pool) as pool:

        def passed(name: str, part: int, function: Any, shared: Any) -> list[dict[str, Any]]:
            return map_shards(
                function,
                shards,
                directory / name,
                pool=pool,
                workers=job.workers,
                shared=shared,
                tick=lambda done, total: tell(
                    (part + done / max(total, 1)) / 3, f"{name}: shard {done} of {total}"
                ),
            )

        counted = passed("count", 0, _count_items, None)
        for one in counted:
            bad.add(one["first_bad"], one["bad"])
        total = sum(one["baskets"] for one in counted)
        least = least_support(job.min_support, total)
        names = _frequent(directory / "count", len(shards), least)
        shared = (names, choice, job.max_len, job.max_itemsets, least, total)
        passed("mine", 1, _mine_shard, shared)
        sets = _united(directory / "mine", len(shards), names, total)
        passed("recount", 2, _recount_shard, (names, str(directory / "mine")))
    support = sum(
        (_load(directory / "recount" / f"{at:06}.npy") for at in range(len(shards))),
        np.zeros(len(sets), np.int64),
    )
    found = replace(sets, support=np.asarray(support, np.int32)).take(support >= least)
    if len(found) > job.max_itemsets:
        raise too_many(
            MiningProblem(
                Baskets(np.zeros(total + 1, np.int64), np.empty(0, np.int32), names),
                least,
                target=job.target,
                max_len=job.max_len,
                max_itemsets=job.max_itemsets,
            )
        )
    return (found if job.target == "all" else found.take(keep(found, job.target))), bad


def _count_items(shard: BasketShard, place: Path, shared: Any) -> dict[str, Any]:
    """In how many baskets each item of the shard is."""
    bad = BadRowCount()
    baskets = shard.baskets(bad)
    owner = np.repeat(np.arange(baskets.num_baskets), np.diff(baskets.begins))
    _, first = np.unique(owner * baskets.num_items + baskets.ids, return_index=True)
    counts = np.bincount(baskets.ids[first], minlength=baskets.num_items)
    _save_table(place, {"item": _as_arrow(baskets.names), "count": counts})
    return {"baskets": baskets.num_baskets, "bad": bad.rows, "first_bad": bad.first}


def _mine_shard(shard: BasketShard, place: Path, shared: Any) -> dict[str, Any]:
    """All sets that are frequent here at the share that is asked for."""
    names, choice, max_len, max_itemsets, least, total = shared
    baskets = _renumbered(shard.baskets(BadRowCount()), names)
    problem = MiningProblem(
        baskets,
        max(1, math.ceil(least * baskets.num_baskets / total - 1e-9)),
        max_len=max_len,
        max_itemsets=max_itemsets,
    )
    found = table("miner").build(choice, where="method").mine(problem).ordered()
    _save(place.with_suffix(".items.npy"), found.items)
    _save(place.with_suffix(".ends.npy"), found.ends)
    return {"sets": len(found)}


def _recount_shard(shard: BasketShard, place: Path, shared: Any) -> dict[str, Any]:
    """In how many baskets of the shard each candidate is."""
    names, mined = shared
    candidates = Itemsets(
        items=_load(Path(mined) / "items.npy"),
        ends=_load(Path(mined) / "ends.npy"),
        support=np.empty(0, np.int32),
        num_baskets=0,
        names=names,
    )
    _save(place.with_suffix(".npy"), recount(_renumbered(shard.baskets(), names), candidates))
    return {}


def _frequent(directory: Path, shards: int, least: int) -> Any:
    """The items that are in enough baskets of all shards, as an Arrow array."""
    parquet, pa = arrow("parquet"), arrow()
    tables = [parquet.read_table(directory / f"{at:06}.parquet") for at in range(shards)]
    sums = pa.concat_tables(tables).group_by("item").aggregate([("count", "sum")])
    enough = arrow("compute").greater_equal(sums.column("count_sum"), least)
    return sums.filter(enough).sort_by("item").column("item").combine_chunks()


def _united(directory: Path, shards: int, names: Any, total: int) -> Itemsets:
    """All sets of all shards, each once, in lexicographic order; kept for the second pass."""
    known: set[tuple[int, ...]] = set()
    for at in range(shards):
        items = _load(directory / f"{at:06}.items.npy")
        ends = _load(directory / f"{at:06}.ends.npy")
        begin, listed = 0, items.tolist()
        for end in ends.tolist():
            known.add(tuple(listed[begin:end]))
            begin = end
    ordered = sorted(known)
    items = np.fromiter((item for one in ordered for item in one), np.int32)
    ends = np.cumsum(np.fromiter(map(len, ordered), np.int64, len(ordered)))
    _save(directory / "items.npy", items)
    _save(directory / "ends.npy", ends)
    return Itemsets(items, ends, np.zeros(len(ordered), np.int32), total, names)


def _renumbered(baskets: Baskets, names: Any) -> Baskets:
    """The same baskets with the numbers that all shards share; other items are left out."""
    place = arrow("compute").index_in(_as_arrow(baskets.names), names)
    ids = place.fill_null(-1).to_numpy(zero_copy_only=False)[baskets.ids]
    kept = ids >= 0
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[baskets.begins]
    return Baskets(begins, ids[kept].astype(np.int32), names)


def _as_arrow(names: Any) -> Any:
    pa = arrow()
    return names if isinstance(names, pa.Array) else pa.array(names)


def _save(path: Path, numbers: np.ndarray) -> None:
    text = io.BytesIO()
    np.save(text, numbers, allow_pickle=False)
    write_atomic(path, text.getvalue())


def _load(path: Path) -> np.ndarray:
    numbers: np.ndarray = np.load(path, allow_pickle=False)
    return numbers


def _save_table(place: Path, columns: dict[str, Any]) -> None:
    text = io.BytesIO()
    arrow("parquet").write_table(arrow().table(columns), text)
    write_atomic(place.with_suffix(".parquet"), text.getvalue())
