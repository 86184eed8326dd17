"""The coordinator: queries in, a tree of functions, neighbours and a bill out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.core.config import Value
from shoal.cost.functions import FunctionPrices
from shoal.fields.retrieve.collections.filters import PointFilter
from shoal.fields.retrieve.index.osq.index import SearchMode
from shoal.fields.retrieve.index.protocols import Hits
from shoal.fields.retrieve.serverless.functions import ALLOCATOR, AllocatorInput
from shoal.fields.retrieve.serverless.payloads import packed, unpacked
from shoal.fields.retrieve.serverless.protocols import (
    LIMIT_S,
    FunctionCall,
    FunctionError,
    FunctionRuntime,
    TreeShape,
    parse_tree,
)


class FunctionBill(Value):
    """What a search by functions cost.

    Args:
        queries: how many.
        calls: of functions.
        cold: of them, those that started a container.
        gb_s: seconds of functions and starts of containers, times their memory in GB.
        usd: of all.
        usd_per_1000: of 1,000 queries.
        read_bytes: of the index.
        retained: the share of calls that read nothing of it.
    """

    queries: int
    calls: int
    cold: int
    gb_s: float
    usd: float
    usd_per_1000: float
    read_bytes: int
    retained: float


class FunctionHits(NamedTuple):
    """What a search by functions found and took.

    Args:
        hits: neighbours.
        calls: of functions.
        seconds: from the first call to the last answer.
    """

    hits: Hits
    calls: Sequence[FunctionCall]
    seconds: float

    def bill(self, prices: FunctionPrices, memory_gb: float) -> FunctionBill:
        """What it costs.

        Args:
            prices: of calls and of memory.
            memory_gb: that each container has.
        """
        seconds = [one.cold_s + one.seconds for one in self.calls]
        gb_s = sum(map(prices.billed_s, seconds)) * memory_gb
        usd, queries = prices.usd(len(self.calls), gb_s), len(self.hits.ids)
        return FunctionBill(
            queries=queries,
            calls=len(self.calls),
            cold=sum(one.cold for one in self.calls),
            gb_s=gb_s,
            usd=usd,
            usd_per_1000=1000 * usd / max(queries, 1),
            read_bytes=sum(one.read_bytes for one in self.calls),
            retained=sum(one.retained for one in self.calls) / max(len(self.calls), 1),
        )


class FunctionSearch:
    """Searches an index by a tree of functions.

    Args:
        runtime: of the functions, such as a
            :class:`~shoal.fields.retrieve.serverless.gateway.FunctionGateway`.
        tree: of the allocators, such as ``4x3``.
    """

    def __init__(self, runtime: FunctionRuntime, tree: TreeShape | str = "4x3") -> None:
        self._runtime = runtime
        self.tree = parse_tree(tree) if isinstance(tree, str) else tree

    def search(
        self, queries: Any, k: int, *, where: PointFilter | None = None, mode: SearchMode = "fast"
    ) -> FunctionHits:
        """The nearest rows that pass a filter, as those of :meth:`OSQIndex.search`.

        Args:
            queries: float32 [Q, d], which the nodes of the tree share.
            k: of each.
            where: which rows.
            mode: ``fast``, or ``exact``.

        Raises:
            FunctionError: a function failed; its message says why.
        """
        try:
            asked = np.ascontiguousarray(np.atleast_2d(queries), np.float32)
        except (TypeError, ValueError) as cause:
            raise FunctionError(f"queries: expected numbers [Q, d]: {cause}") from cause
        if asked.ndim != 2 or not len(asked) or not 1 <= k <= 65_536:
            raise FunctionError(
                f"queries: {list(asked.shape)}, k = {k}: expected [Q, d] with at least one query, "
                "and k from 1 to 65,536"
            )
        if mode not in ("fast", "exact"):
            raise FunctionError(f"mode = {mode!r}: expected fast or exact")
        root = self._root(asked, k, exact=mode == "exact", where=where)
        begin = time.perf_counter()
        below = [
            (child, self._runtime.start(ALLOCATOR, child.model_dump(mode="json")))
            for node in self.tree.children(-1, 0)
            if (child := root.of_node(node, 1, asked)) is not None
        ]
        ids = np.full((len(asked), k), -1, np.int64)
        apart = np.full((len(asked), k), np.inf, np.float32)
        calls: list[FunctionCall] = []
        for child, future in below:
            reply = future.result(LIMIT_S)
            found = unpacked(reply.result["ids"], np.int64, 2)
            ids[child.first : child.first + len(found)] = found
            apart[child.first : child.first + len(found)] = unpacked(
                reply.result["distances"], np.float32, 2
            )
            calls += reply.calls
        return FunctionHits(Hits(ids, apart, {}), calls, time.perf_counter() - begin)

    def launch(self, hold_s: float, *, flat: bool = False) -> float:
        """Seconds until the last node of the tree begins, all without queries.

        Args:
            hold_s: for which each works; as long as the launch takes, so that each has a container
                of its own.
            flat: start all from here, one after another, and no tree.

        Raises:
            FunctionError: a node was not reached.
        """
        none = np.empty((0, 1), np.float32)
        root = self._root(none, 1, hold_s=hold_s)
        begin = time.time()
        if flat:
            # Of the lowest level: they have no children.
            level = self.tree.depth
            nodes = [root.of_node(node, level, none) for node in range(self.tree.nodes)]
        else:
            nodes = [root.of_node(node, 1, none) for node in self.tree.children(-1, 0)]
        started = [
            self._runtime.start(ALLOCATOR, one.model_dump(mode="json"))
            for one in nodes
            if one is not None
        ]
        replies = [future.result(LIMIT_S) for future in started]
        reached = sum(len(one.calls) for one in replies)
        if reached != self.tree.nodes:
            raise FunctionError(f"launch: {reached} of {self.tree.nodes} nodes were reached")
        return max(float(one.result["begun"]) for one in replies) - begin

    def _root(self, queries: np.ndarray, k: int, **more: Any) -> AllocatorInput:
        return AllocatorInput(
            node=0, level=1, tree=self.tree, total=len(queries), first=0,
            queries=packed(queries[:0]), k=k, **more,
        )  # fmt: skip
