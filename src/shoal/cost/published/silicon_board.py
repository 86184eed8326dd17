"""The scoreboard of measured closed loops: every run predicted by constants that it did not set."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.cost.kernels.serving_engines import ENGINES
from shoal.cost.published.board import figures, widths
from shoal.cost.published.rows import UnplayableError
from shoal.cost.published.silicon import SiliconRun, read_silicon, replay_silicon
from shoal.cost.published.silicon_calibration import fitted

Quantity = Literal["tpot", "ttft"]
QUANTITIES: tuple[Quantity, Quantity] = ("tpot", "ttft")
"""Time per output token, and time to the first token."""
# Left out of what sets the constants that predict a run: all runs of its model, or its device.
_KEYS: dict[str, Callable[[SiliconRun], str]] = {
    "model": lambda run: "DeepSeek-V3, R1" if run.model.startswith("DeepSeek") else run.model,
    "device": lambda run: run.device,
}
_WORST = 25


@dataclass(frozen=True, eq=False)
class SiliconScore:
    """One run and what was predicted of it.

    Args:
        group: the held-out group, its model or its device.
        predicted: quantity -> s.
        spread: quantity -> factor of the 90 % interval, set by the other groups.
    """

    run: SiliconRun
    group: str
    predicted: dict[Quantity, float]
    spread: dict[Quantity, float]

    def error(self, quantity: Quantity) -> float:
        """Predicted over measured, less one."""
        return self.predicted[quantity] / self.measured(quantity) - 1.0

    def measured(self, quantity: Quantity) -> float:
        """What was measured, s."""
        return self.run.tpot_s if quantity == "tpot" else self.run.ttft_s

    def covered(self, quantity: Quantity) -> bool:
        """The interval holds what was measured."""
        off = abs(math.log1p(self.error(quantity)))
        return off <= math.log(self.spread[quantity]) + 1e-12


@dataclass(frozen=True, eq=False)
class SiliconBoard:
    """All runs of the table.

    Args:
        scores: left out by -> every run.
        skipped: reason -> rows.
        seconds: total time, including the refit of constants for every group.
    """

    scores: dict[str, list[SiliconScore]]
    skipped: Counter[str]
    seconds: float = 0.0


@functools.cache
def score_silicon() -> SiliconBoard:
    """Score the shipped table, whole models and then whole devices left out."""
    began = time.perf_counter()
    runs, skipped = _replayed(read_silicon())
    scores = {key: _scored(runs, of) for key, of in _KEYS.items()}
    return SiliconBoard(scores, skipped, time.perf_counter() - began)


# Factors of the 90 % intervals of runs of another table: what the shipped one's models, each left
# out, were off.
_SPREAD: dict[Quantity, float] = {"tpot": 1.38, "ttft": 2.5}


def score_silicon_file(path: Path) -> SiliconBoard:
    """Score another table of the same columns by the engines' constants as they are.

    Raises:
        ConfigError: a column is missing.
    """
    runs, skipped = _replayed(read_silicon(path))
    scores = []
    for run in runs:
        own = ENGINES[run.engine]
        predicted: dict[Quantity, float] = {"tpot": run.loop.tpot(own), "ttft": run.loop.ttft(own)}
        scores.append(SiliconScore(run, _KEYS["model"](run), predicted, _SPREAD))
    return SiliconBoard({"model": scores}, skipped)


def _replayed(rows: Iterable[Mapping[str, str]]) -> tuple[list[SiliconRun], Counter[str]]:
    runs, skipped = [], Counter[str]()
    for row in rows:
        try:
            runs.append(replay_silicon(row))
        except UnplayableError as error:
            skipped[str(error)] += 1
    return runs, skipped


def _scored(runs: Sequence[SiliconRun], of: Callable[[SiliconRun], str]) -> list[SiliconScore]:
    predicted: dict[str, dict[Quantity, float]] = {}
    for group in sorted({of(run) for run in runs}):
        engines = fitted([run for run in runs if of(run) != group])
        for run in runs:
            if of(run) == group:
                own = engines[run.engine]
                predicted[run.id] = {"tpot": run.loop.tpot(own), "ttft": run.loop.ttft(own)}
    spreads: dict[Quantity, dict[tuple[str, str], float]] = {}
    for quantity in QUANTITIES:
        spreads[quantity] = widths(
            [
                (
                    of(run),
                    run.engine,
                    abs(math.log(predicted[run.id][quantity] / getattr(run, f"{quantity}_s"))),
                )
                for run in runs
            ]
        )
    return [
        SiliconScore(
            run,
            of(run),
            predicted[run.id],
            {q: math.exp(spreads[q][of(run), run.engine]) for q in QUANTITIES},
        )
        for run in runs
    ]


def _figures(scores: Iterable[SiliconScore], quantity: Quantity) -> dict[str, float]:
    own = list(scores)
    return {
        **figures(one.error(quantity) for one in own),
        "coverage_of_90": sum(one.covered(quantity) for one in own) / len(own),
    }


def silicon_results(board: SiliconBoard) -> dict[str, Any]:
    """What ``results/published.json`` holds of the board."""
    return {
        "skipped": dict(board.skipped),
        **{
            f"{key}s_left_out": {
                quantity: {
                    **_figures(scores, quantity),
                    "by_group": {
                        group: _figures((s for s in scores if s.group == group), quantity)
                        for group in sorted({s.group for s in scores})
                    },
                }
                for quantity in QUANTITIES
            }
            for key, scores in board.scores.items()
        },
    }


def worst(scores: Iterable[SiliconScore], most: int) -> list[SiliconScore]:
    """The runs whose seconds of a token are furthest off, one of each kind of run."""
    results: dict[str, SiliconScore] = {}
    for score in sorted(scores, key=lambda one: -abs(math.log1p(one.error("tpot")))):
        if len(results) < most:
            results.setdefault(f"{score.run.model} {score.run.device} {score.run.run}", score)
    return list(results.values())


def silicon_page(board: SiliconBoard) -> list[str]:
    """The section of the scoreboard's page."""
    result = silicon_results(board)
    replayed = len(board.scores["model"])
    rows = replayed + board.skipped.total()
    names = ", ".join(engine.name for engine in list(ENGINES.values())[1:])
    out = [
        "## Serving under a closed loop",
        "",
        f"{replayed} of {rows} measured runs of {names} (time per output token and time to first "
        "token; public rows of ai-dynamo/aiconfigurator, Apache-2.0) are priced by the function "
        "that prices a plan for accelerators (`AcceleratedStepCost`), for the engine that ran. Its "
        "kernels are measured ones (`shoal/cost/kernels`); eleven constants of each engine are set "
        "by the other models' runs, and then by the other devices' runs.",
        "",
        "| left out | quantity | runs | median error | p90 | within 25 % | 90 % interval holds |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in board.scores:
        for quantity in QUANTITIES:
            whole = result[f"{key}s_left_out"][quantity]
            for group, some in [(f"**each {key}**", whole), *whole["by_group"].items()]:
                out.append(
                    f"| {group} | {quantity} | {some['rows']} | {some['median_error']:.1%} | "
                    f"{some['p90_error']:.0%} | {some['share_within_25']:.0%} | "
                    f"{some['coverage_of_90']:.0%} |"
                )
    filled = Counter(rule for s in board.scores["model"] for rule in s.run.filled)
    out += ["", "### Completed by rules (closed loop)", "", "| rule | runs |", "|---|---|"]
    out += [f"| {rule} | {count} |" for rule, count in filled.most_common()]
    out += ["", "### Not replayed (closed loop)", "", "| why | rows |", "|---|---|"]
    out += [f"| {why} | {count} |" for why, count in board.skipped.most_common()]
    return [*out, ""]


def silicon_worst(board: SiliconBoard) -> list[str]:
    """The section of the page of misses."""
    out = ["## Closed loops", ""]
    out += ["Runs whose settings cannot explain what was measured are at the top: guesses of "]
    out[-1] += (
        "several tokens a step, a cached prefix or a limit on requests in a step are not in the "
        "columns of the table."
    )
    out += ["", "| run | quantity | measured | predicted | error |", "|---|---|---|---|---|"]
    out += [
        f"| {score.run.model} on {score.run.device}, {score.run.run} | tpot | "
        f"{1e3 * score.measured('tpot'):.1f} ms | {1e3 * score.predicted['tpot']:.1f} ms | "
        f"{score.error('tpot'):+.0%} |"
        for score in worst(board.scores["model"], _WORST)
    ]
    return [*out, ""]
