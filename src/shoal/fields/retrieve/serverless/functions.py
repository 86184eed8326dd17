"""The functions of a search: allocators that form a tree, and a processor for each part.

Source: Oakley and Ferhatosmanoglu, SQUASH: Serverless and Distributed Quantization-based
Attributed Vector Similarity Search, 2025.

An allocator starts its children, filters the rows for its own share of the queries, and starts a
processor for each part that they visit. What either has read of the index it keeps for later calls.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from shoal.core.config import Value, parse
from shoal.core.errors import ShoalError
from shoal.fields.retrieve.collections.filters import PointFilter
from shoal.fields.retrieve.index.osq.files import load_filter, load_part
from shoal.fields.retrieve.index.osq.index import OSQIndex
from shoal.fields.retrieve.serverless.payloads import (
    compressed,
    decompressed,
    packed,
    unpacked,
)
from shoal.fields.retrieve.serverless.protocols import (
    LIMIT_S,
    ContainerSetup,
    FunctionCall,
    FunctionError,
    FunctionReply,
    Invoker,
    TreeShape,
)

ALLOCATOR, PROCESSOR = "allocator", "processor-"
# Of a search.
_QUERIES = 1_000_000


class AllocatorInput(Value):
    """What an allocator is given.

    Args:
        node: its number.
        level: of it, from 1.
        tree: of all.
        total: queries of the whole search.
        first: the first of those given.
        queries: float32 [queries of the subtree, d], packed.
        k: neighbours of each.
        exact: miss nothing.
        where: which rows; None for all.
        hold_s: seconds for which every node works, though it may have no queries; None to leave
            out those without.
    """

    node: int = Field(ge=0)
    level: int = Field(ge=1)
    tree: TreeShape
    total: int = Field(ge=0)
    first: int = Field(ge=0)
    queries: dict[str, Any]
    k: int = Field(ge=1, le=65_536)
    exact: bool = False
    where: PointFilter | None = None
    hold_s: float | None = Field(default=None, ge=0, le=60)

    @model_validator(mode="after")
    def _is_in_the_tree(self) -> AllocatorInput:
        last = self.level <= self.tree.depth and self.node + self.tree.subtree(self.level)
        if not last or last > self.tree.nodes:
            raise ValueError(f"node {self.node} of level {self.level} is not in the tree")
        if self.total > _QUERIES:
            raise ValueError(f"{self.total} queries; expected at most {_QUERIES}")
        return self

    def share(self, node: int, count: int) -> slice:
        """The given queries of some nodes that follow each other."""
        ends = [at * self.total // self.tree.nodes for at in (node, node + count)]
        return slice(ends[0] - self.first, ends[1] - self.first)

    def of_node(self, node: int, level: int, queries: np.ndarray) -> AllocatorInput | None:
        """What a node below is given; None if it has nothing to do."""
        mine = self.share(node, self.tree.subtree(level))
        if mine.start == mine.stop and self.hold_s is None:
            return None
        changes = {
            "node": node,
            "level": level,
            "first": self.first + mine.start,
            "queries": packed(queries[mine]),
        }
        return self.model_copy(update=changes)


class ProcessorInput(Value):
    """What the processor of a part is given.

    Args:
        queries: float32 [queries, d], packed.
        k: neighbours of each.
        exact: miss nothing.
        bitmap: the rows that pass, compressed; None for all.
    """

    queries: dict[str, Any]
    k: int = Field(ge=1, le=65_536)
    exact: bool = False
    bitmap: str | None = None


class IndexFunctions:
    """The functions inside one container, and what it keeps of the index between calls.

    Args:
        setup: of the container.
        invoker: by which it calls other functions.
    """

    def __init__(self, setup: ContainerSetup, invoker: Invoker) -> None:
        self._directory, self._invoker = Path(setup.directory), invoker
        self._kept: dict[str, OSQIndex] = {}
        self._read = 0

    def call(self, name: str, payload: str) -> str:
        """Run a function on a payload of JSON; its answer as JSON.

        Raises:
            FunctionError: it failed.
        """
        begin, self._read = time.perf_counter(), 0
        kept = name in self._kept
        try:
            given = json.loads(payload)
            if name == ALLOCATOR:
                result, calls = self._allocate(parse(AllocatorInput, given, where=name))
            elif name.startswith(PROCESSOR) and name[len(PROCESSOR) :].isdecimal():
                result, calls = self._process(name, parse(ProcessorInput, given, where=name)), []
            else:
                raise FunctionError(f"there is no function {name!r}")
        except FunctionError:
            raise
        except (ShoalError, ValueError, RecursionError) as cause:
            raise FunctionError(f"{name}: {cause}") from cause
        return json.dumps(
            {
                "result": result,
                "calls": [one.model_dump() for one in calls],
                "seconds": time.perf_counter() - begin,
                "read_bytes": self._read,
                "retained": kept and not self._read,
            }
        )

    def close(self) -> None:
        self._kept.clear()

    def _index(self, name: str) -> OSQIndex:
        if name not in self._kept:
            if name == ALLOCATOR:
                index, size = load_filter(self._directory)
            else:
                index, size = load_part(self._directory, int(name[len(PROCESSOR) :]))
            self._kept[name], self._read = index, size
        return self._kept[name]

    def _allocate(self, given: AllocatorInput) -> tuple[dict[str, Any], list[FunctionCall]]:
        begun = time.time()
        queries = unpacked(given.queries, np.float32, 2)
        wanted = given.share(given.node, given.tree.subtree(given.level))
        if wanted.start != 0 or wanted.stop != len(queries):
            raise FunctionError(
                f"queries: {len(queries)} from {given.first} of {given.total}; node {given.node} "
                "has others"
            )
        below = []
        for node in given.tree.children(given.node, given.level):
            child = given.of_node(node, given.level + 1, queries)
            if child is not None:
                payload = child.model_dump(mode="json")
                below.append((child, self._invoker.start(ALLOCATOR, payload)))
        shape = (len(queries), given.k)
        ids, apart = np.full(shape, -1, np.int64), np.full(shape, np.inf, np.float32)
        calls: list[FunctionCall] = []
        own = given.share(given.node, 1)
        if own.stop > own.start:
            ids[own], apart[own] = self._own(given, queries[own], calls)
        if given.hold_s:
            time.sleep(given.hold_s)
        for child, future in below:
            reply = future.result(LIMIT_S)
            begun = max(begun, float(reply.result["begun"]))
            at = child.first - given.first
            found = unpacked(reply.result["ids"], np.int64, 2)
            ids[at : at + len(found)] = found
            apart[at : at + len(found)] = unpacked(reply.result["distances"], np.float32, 2)
            calls += reply.calls
        return {"ids": packed(ids), "distances": packed(apart), "begun": begun}, calls

    def _own(
        self, given: AllocatorInput, queries: np.ndarray, calls: list[FunctionCall]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Answers to this node's queries, by the processors of the parts that they visit."""
        index = self._index(ALLOCATOR)
        asked, program = index.queries(queries), index.program(given.where)
        bitmaps: dict[int, np.ndarray] = {}
        visitors: defaultdict[int, list[int]] = defaultdict(list)
        for number, query in enumerate(asked):
            for part in index.visits(query, given.k, program, bitmaps, exact=given.exact):
                visitors[part].append(number)
        started: list[tuple[list[int], Future[FunctionReply]]] = []
        for part, numbers in visitors.items():
            bitmap = compressed(bitmaps[part]) if len(program.steps) else None
            payload = ProcessorInput(
                queries=packed(asked[numbers]), k=given.k, exact=given.exact, bitmap=bitmap
            )
            future = self._invoker.start(f"{PROCESSOR}{part}", payload.model_dump(mode="json"))
            started.append((numbers, future))
        near = _Nearest(len(asked), given.k)
        for numbers, future in started:
            reply = future.result(LIMIT_S)
            near.merge(
                numbers,
                unpacked(reply.result["ids"], np.int64, 2),
                unpacked(reply.result["distances"], np.float32, 2),
            )
            calls += reply.calls
        index.restore(asked, near.ids, near.distances)
        return near.ids, near.distances

    def _process(self, name: str, given: ProcessorInput) -> dict[str, Any]:
        index = self._index(name)
        # Not as arrays in JSON, but as the kernel takes them: the allocator has prepared them.
        queries = np.ascontiguousarray(unpacked(given.queries, np.float32, 2))
        if queries.shape[1] != index.dim or not np.isfinite(queries).all():
            raise FunctionError(f"{name}: queries: expected finite numbers [Q, {index.dim}]")
        count = len(index)
        if given.bitmap is None:
            bitmap = index.bitmap(index.program(None), 0, count)
        else:
            bitmap = decompressed(given.bitmap, count)
        hits = [
            index.search_part(0, query, given.k, bitmap, exact=given.exact) for query in queries
        ]
        return {
            "ids": packed(np.concatenate([one.ids for one in hits])),
            "distances": packed(np.concatenate([one.distances for one in hits])),
            "compared": int(sum(one.stats["compared"].sum() for one in hits)),
        }


class _Nearest:
    """The nearest of some queries so far."""

    def __init__(self, queries: int, k: int) -> None:
        self.ids = np.full((queries, k), -1, np.int64)
        self.distances = np.full((queries, k), np.inf, np.float32)

    def merge(self, numbers: list[int], ids: np.ndarray, distances: np.ndarray) -> None:
        """Nearest of both; of equally near ones, the lower row."""
        k = self.ids.shape[1]
        all_ids = np.concatenate([self.ids[numbers], ids], axis=1)
        apart = np.concatenate([self.distances[numbers], distances], axis=1)
        order = np.lexsort((all_ids, apart), axis=1)[:, :k]
        self.ids[numbers] = np.take_along_axis(all_ids, order, axis=1)
        self.distances[numbers] = np.take_along_axis(apart, order, axis=1)


def answer_of(text: str) -> Mapping[str, Any]:
    """What :meth:`IndexFunctions.call` has written.

    Raises:
        FunctionError: it is damaged.
    """
    try:
        answer = json.loads(text)
        if not isinstance(answer["result"], dict):
            raise TypeError("no result")
        answer["calls"] = tuple(FunctionCall(**one) for one in answer["calls"])
    except (KeyError, TypeError, ValueError) as cause:
        raise FunctionError(f"a function's answer cannot be read: {cause}") from cause
    return answer  # type: ignore[no-any-return]
