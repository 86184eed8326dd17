"""How long workers take: slow-downs in bursts, a log of times, and a run that is only timed.

Source: Gilbert, Capacity of a Burst-Noise Channel, 1960 (two states); Krishnan et al., Sequential
Gradient Coding for Straggler Mitigation, 2023 (parameters picked from a log).
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.core.random import generator
from shoal.fields.federate.coded.protocols import Coding, rounds_of

_COLUMNS = ("round", "worker", "seconds", "load")


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """Seconds of each worker in each round, at any load.

    Args:
        fixed_s: seconds that do not depend on the load.
        whole_s: seconds that the whole data would take in addition [rounds, workers].
    """

    fixed_s: float
    whole_s: np.ndarray

    def at(self, number: int, loads: np.ndarray) -> np.ndarray:
        """Seconds of workers in a round with loads [workers]; rounds begin anew after the last."""
        return np.asarray(self.fixed_s + loads * self.whole_s[(number - 1) % len(self.whole_s)])


def slow_factors(
    workers: int,
    rounds: int,
    *,
    chance: float,
    recovery: float,
    factor: float,
    seed: int,
    draw: int = 0,
) -> np.ndarray:
    """Times as long as usual that workers take [rounds, workers]: two states, Gilbert-Elliott.

    Args:
        workers: n.
        rounds: how many.
        chance: of a worker that is not slow to be slow in the next round.
        recovery: of a slow one not to be.
        factor: of the time in a slow round.
        seed: of the draws.
        draw: another number has other ones.
    """
    dice = generator(seed, purpose="slow workers", step=draw)
    share = chance / (chance + recovery) if chance else 0.0
    slow = dice.random(workers) < share
    result = np.ones((rounds, workers))
    for row in result:
        row[slow] = factor
        number = dice.random(workers)
        slow = np.where(slow, number >= recovery, number < chance)
    return result


def read_times(path: str, workers: int, fixed_s: float) -> WorkerTimes:
    """A log of times: Parquet, or a JSON list of rows; columns round, worker, seconds, load.

    A column ``whole`` may say that a worker was not waited for, so that seconds are a lower bound.
    Rounds with such rows are left out if there are others. Where a log has several loads, the fixed
    part of the time is fitted to it.

    Args:
        path: of the log.
        workers: rows of further ones are left out.
        fixed_s: the fixed part, where the log has one load only.

    Raises:
        DataError: it cannot be read, or has no round with a row for each worker.
    """
    table, done = _rows(path)
    table, done = table[table[:, 1] < workers], done[table[:, 1] < workers]
    fixed_s = _fixed(table[done], fixed_s)
    cut = np.isin(table[:, 0], table[~done, 0])
    if not cut.all():
        table = table[~cut]
    rounds = np.unique(table[:, 0])
    whole = np.full((len(rounds), workers), np.nan)
    at = np.searchsorted(rounds, table[:, 0]), table[:, 1].astype(int)
    whole[at] = np.maximum(table[:, 2] - fixed_s, 1e-9) / table[:, 3]
    complete = ~np.isnan(whole).any(1)
    if not complete.any():
        number, missing = np.argwhere(np.isnan(whole))[0] if len(whole) else (0, 0)
        named = f"{rounds[number]:g}" if len(whole) else "any"
        raise DataError(
            f"log = {path!r}: no time of worker {missing} in round {named}; each of "
            f"{workers} workers needs one in a round"
        )
    return WorkerTimes(fixed_s=fixed_s, whole_s=whole[complete])


def _rows(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns of a log [rows, 4], and whether each row is of a worker that was waited for."""
    wanted = f"expected rows with {', '.join(_COLUMNS)}"
    try:
        if path.endswith(".parquet"):
            parquet = import_extra("pyarrow.parquet", extra="fields", purpose="logs of times")
            rows = parquet.read_table(path).to_pylist()
        else:
            rows = json.loads(Path(path).read_bytes())
        numbers = [[float(row[name]) for name in _COLUMNS] for row in rows]
        done = np.array([bool(row.get("whole", True)) for row in rows], bool)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as cause:
        raise DataError(f"log = {path!r}: cannot be read ({cause}); {wanted}") from cause
    # A round in which a worker has nothing to do says nothing of its time.
    table = np.array(numbers, np.float64).reshape(-1, len(_COLUMNS))
    busy = table[:, 3] > 0
    table, done = table[busy], done[busy]
    if not len(table) or not np.isfinite(table).all() or (table[:, [0, 1]] < 0).any():
        raise DataError(f"log = {path!r}: no rows with a load above 0 and numbers; {wanted}")
    if (table[:, 2] <= 0).any():
        raise DataError(f"log = {path!r}: seconds that are not above 0; {wanted}")
    return table, done


def _fixed(table: np.ndarray, known_s: float) -> float:
    """Seconds at load 0, on the line through the median times of each load."""
    loads = np.unique(table[:, 3]) if len(table) else np.empty(0)
    if len(loads) < 2:
        return known_s
    medians = [float(np.median(table[table[:, 3] == load, 2])) for load in loads]
    fixed = float(np.polyfit(loads, medians, 1)[1])
    return min(max(fixed, 0.0), float(table[:, 2].min()))


def loads_of(coding: Coding, number: int, workers: int) -> np.ndarray:
    """Fraction of the data of each worker's tasks in a round [workers]."""
    return np.array(
        [
            sum(
                coding.chunks[chunk]
                for task in coding.tasks(number, worker)
                for chunk, _ in task.parts
            )
            for worker in range(workers)
        ]
    )


def may_close(
    coding: Coding, number: int, arrived: Set[int], elapsed: float, fastest: float, mu: float
) -> bool:
    """Whether the server ends a round.

    It waits until 1 + mu times the fastest worker's time, and then for as many more as are needed
    for every job to be decoded in time.

    Args:
        coding: the scheme.
        number: of the round.
        arrived: workers whose results are there.
        elapsed: seconds since the round began.
        fastest: of the first worker.
        mu: patience.
    """
    if coding.enough(arrived):
        return True
    return elapsed >= (1 + mu) * fastest and coding.recoverable(number, arrived)


def timed_run(coding: Coding, times: WorkerTimes, jobs: int, mu: float) -> tuple[float, float]:
    """Drive a scheme through logged times; it is used up.

    Returns:
        Seconds of all rounds, and the share of rounds that waited beyond 1 + mu.
    """
    workers = times.whole_s.shape[1]
    total, waited = 0.0, 0
    for number in rounds_of(coding, jobs):
        loads = loads_of(coding, number, workers)
        seconds = times.at(number, loads)
        order = np.argsort(seconds, kind="stable")
        fastest = float(seconds[order[0]])
        patience = (1 + mu) * fastest
        now, arrived = fastest, frozenset[int]()
        for worker in order.tolist():
            if arrived and seconds[worker] > patience:
                now = max(now, patience)
                if may_close(coding, number, arrived, now, fastest, mu):
                    break
            arrived |= {worker}
            now = float(seconds[worker])
            if coding.enough(arrived):
                break
        coding.close(number, arrived)
        total += now
        waited += now > patience * (1 + 1e-9)
    return total, waited / (jobs + coding.delay)
