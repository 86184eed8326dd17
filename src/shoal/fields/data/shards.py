"""One function over many shards, in this process, in a pool of processes, or on a cluster.

Every shard is done once: what is done is on disk, is not done again when a run goes on, and a
shard whose worker was killed is done by another.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import DataError, RankError
from shoal.core.files import write_json
from shoal.core.parts import Choice, table
from shoal.core.pool import Pool

_S = TypeVar("_S")
# Shards that wait at a worker, so that none waits for the next.
_AHEAD = 2


@contextlib.contextmanager
def opened(pool: Choice | Pool | None) -> Iterator[Pool | None]:
    """A pool for several calls of :func:`map_shards`: its processes start once.

    Args:
        pool: a choice of kind ``pool``; one that is open, or None, is given as it is.
    """
    if isinstance(pool, Choice):
        with table("pool").build(pool, where="pool").open() as running:
            yield running
    else:
        yield pool


def map_shards(
    function: Callable[[_S, Path, Any], dict[str, Any]],
    shards: Sequence[_S],
    directory: Path,
    *,
    pool: Choice | Pool | None = None,
    workers: int = 1,
    shared: Any = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Results of ``function(shard, place, shared)`` in the order of the shards.

    Args:
        function: at the top of a module. Writes what it makes to files that begin with the path
            ``place``, each whole or not at all, and returns what is to be remembered, as JSON.
        shards: can be pickled.
        directory: gets a file for each shard that is done; these are not done again.
        pool: a choice of kind ``pool``, or what :func:`opened` gave; None for this process.
        workers: shards that are in work at a time.
        shared: goes to every call.
        tick: called with (shards done, shards).

    Raises:
        DataError: a place is full, which is named; or what ``function`` raises.
        RankError: a shard's worker died twice.
    """
    directory.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any] | None] = [_done(directory, at) for at in range(len(shards))]
    waiting = [at for at, result in enumerate(results) if result is None]
    done = len(shards) - len(waiting)
    tick(done, len(shards))
    for at, result in _results(function, shards, waiting, directory, pool, workers, shared):
        write_json(_mark(directory, at), result)
        results[at] = result
        done += 1
        tick(done, len(shards))
    return [result for result in results if result is not None]


def _results(
    function: Callable[[_S, Path, Any], dict[str, Any]],
    shards: Sequence[_S],
    waiting: Sequence[int],
    directory: Path,
    pool: Choice | Pool | None,
    workers: int,
    shared: Any,
) -> Iterator[tuple[int, dict[str, Any]]]:
    left, running = deque(waiting), deque[tuple[int, Future[dict[str, Any]]]]()
    with opened(pool if waiting else None) as there:
        if there is None:
            for at in waiting:
                yield at, _call(function, shards[at], directory / f"{at:06}", shared)
            return

        def submit(at: int) -> Future[dict[str, Any]]:
            place = directory / f"{at:06}"
            return there.submit(_call, function, shards[at], place, shared)

        while left or running:
            while left and len(running) < workers * _AHEAD:
                at = left.popleft()
                running.append((at, submit(at)))
            at, future = running.popleft()
            try:
                yield at, future.result()
            except RankError:
                yield at, submit(at).result()


def _call(
    function: Callable[[_S, Path, Any], dict[str, Any]], shard: _S, place: Path, shared: Any
) -> dict[str, Any]:
    try:
        return function(shard, place, shared)
    except OSError as cause:
        if cause.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DataError(
                f"{place.parent}: no space left; what is done is kept: make space there and go on "
                "with --resume"
            ) from cause
        raise


def _mark(directory: Path, at: int) -> Path:
    """Hidden, so that the directory holds only data for the next job that reads it."""
    return directory / f".{at:06}.json"


def _done(directory: Path, at: int) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(_mark(directory, at).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return result
