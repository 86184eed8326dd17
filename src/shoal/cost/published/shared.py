"""What runs of a machine have in common: the shares behind corrections, and what one run is worth.

Every row of a publication on so many devices of a kind is a run on one machine. How far two rows of
a machine are apart in logarithms, and how far a row is from its prediction, gives the shares of
:data:`shoal.cost.calibration.SHARES`; medians, so that few odd rows do not set them.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from shoal.cost.calibration import Shares, pooled
from shoal.cost.published.board import Scoreboard
from shoal.cost.published.rows import read
from shoal.cost.published.silicon_board import score_silicon

Logs = Mapping[str, Sequence[float]]
"""Model -> logarithms of measured over predicted time, of one machine."""


@dataclass(frozen=True)
class OneRunStudy:
    """Median error of a machine's rows, in the median (and the mean) over machines.

    Args:
        machines: with two rows or more.
        rows: of them.
        priced: errors as priced.
        one: by the correction of one other row of the machine.
        same: of those: that row is of the same model; and as priced.
        others: by the correction of all other rows.
        better: machines whose median error one row lowers.
    """

    machines: int
    rows: int
    priced: tuple[float, float]
    one: tuple[float, float]
    same: tuple[float, float]
    others: tuple[float, float]
    better: int


def by_machine(board: Scoreboard) -> dict[tuple[str, str, int], dict[str, list[float]]]:
    """The rows of the board of training: (publication, device, number) -> logarithms."""
    models = {row.id: str(row.raw["model"]) for row in read()}
    result: dict[tuple[str, str, int], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in board.rows:
        log = math.log(row.reported / row.predicted)
        log = log if row.metric == "step_s" else -log
        result[row.group, row.device, row.devices][models.get(row.id, row.id)].append(log)
    return {key: dict(logs) for key, logs in result.items()}


def loops_by_machine(quantity: Literal["tpot", "ttft"]) -> dict[Any, dict[str, list[float]]]:
    """The measured closed loops, device and engine alike; each predicted without its model."""
    result: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for score in score_silicon().scores["model"]:
        log = math.log(score.measured(quantity) / score.predicted[quantity])
        result[score.run.device, score.run.engine][score.run.model].append(log)
    return {key: dict(logs) for key, logs in result.items()}


def shares_of(machines: Mapping[Any, Logs]) -> Shares:
    """The shares that these rows give: of any two models, and of one model."""
    sizes: list[float] = []
    apart: dict[bool, list[float]] = {True: [], False: []}
    for logs in machines.values():
        flat = np.array([log for own in logs.values() for log in own])
        models = np.repeat(np.arange(len(logs)), [len(own) for own in logs.values()])
        if len(flat) < 2:
            continue
        sizes.append(float(np.median(np.abs(flat))))
        first, second = np.triu_indices(len(flat), 1)
        far, alike = np.abs(flat[first] - flat[second]), models[first] == models[second]
        for same, found in apart.items():
            if (alike == same).any():
                found.append(float(np.median(far[alike == same])))

    def share(same: bool) -> float:
        # The difference of two has the variance of both.
        return max(0.0, 1.0 - (median(apart[same]) / median(sizes)) ** 2 / 2.0)

    whole = share(False)
    return Shares(whole, max(whole, share(True)))


def one_run_study(board: Scoreboard) -> OneRunStudy:
    """What one run is worth on published machines; shares are set without the publication."""
    machines = {
        key: logs for key, logs in by_machine(board).items() if sum(map(len, logs.values())) > 1
    }
    shares = {
        group: shares_of({key: logs for key, logs in machines.items() if key[0] != group})
        for group in {key[0] for key in machines}
    }
    errors: dict[str, list[float]] = defaultdict(list)
    for (group, _, _), logs in machines.items():
        own: dict[str, list[float]] = defaultdict(list)
        off = functools.partial(_off, shares[group])
        for row, known, others in _left_out(logs):
            own["others"].append(off(others, row))
            for other, seen in known:
                own["priced"].append(abs(math.expm1(row[1])))
                own["one"].append(off({other: [seen]}, row))
                if other == row[0]:
                    own["same priced"].append(own["priced"][-1])
                    own["same"].append(own["one"][-1])
        for name, found in own.items():
            errors[name].append(median(found))
    both = {name: (median(found), fmean(found)) for name, found in errors.items()}
    return OneRunStudy(
        machines=len(machines),
        rows=sum(len(own) for logs in machines.values() for own in logs.values()),
        priced=both["priced"],
        one=both["one"],
        same=(both["same"][0], both["same priced"][0]),
        others=both["others"],
        better=sum(a < b for a, b in zip(errors["one"], errors["priced"], strict=True)),
    )


def _off(shares: Shares, known: Logs, row: tuple[str, float]) -> float:
    """How far off a row is by the correction of others."""
    return abs(math.expm1(row[1] - pooled(known, row[0], shares)[0]))


def _left_out(
    logs: Logs,
) -> Iterator[tuple[tuple[str, float], list[tuple[str, float]], Logs]]:
    """(a row, the others, the others by model) for each row in turn."""
    flat = [(model, log) for model, own in logs.items() for log in own]
    for at, row in enumerate(flat):
        rest = flat[:at] + flat[at + 1 :]
        others: dict[str, list[float]] = defaultdict(list)
        for model, log in rest:
            others[model].append(log)
        yield row, rest, others
