"""Predictions of Shoal and of peers for the same published runs, and how far each is off."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Literal, TypeVar

from shoal.claims.bench.predictions.peer import NAME, answered, environment, question
from shoal.claims.run import commit_of_code
from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.tables import Table
from shoal.cost.published.baselines import BASELINES
from shoal.cost.published.board import figures
from shoal.cost.published.calibration import calibration_for
from shoal.cost.published.plan import predict
from shoal.cost.published.rows import read, replay
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.silicon_board import QUANTITIES, score_silicon
from shoal.machine.fingerprint import fingerprint

KINDS = ("serving", "training")
"""Published runs."""

_OURS, _NEARER = "Shoal, model left out", ("Shoal", NAME, "nearer")
# A reason names values, keys and advice besides; rows are counted by the rest of it.
_VALUE = re.compile(r"'[^']*'|`[^`]*`|(?<== )\d+")
_DETAIL = re.compile(r"\s*[({\[].*|\. .*|(,| for| at) \w+=.*", re.DOTALL)
_T = TypeVar("_T")


class PredictorErrors(Value):
    """How far one predictor is off on some rows.

    Args:
        kind: serving (closed loops) or training.
        quantity: tpot, ttft, or step (seconds of a step, or what was published in its place).
        runs: both (those that every predictor answered), all (that this one did), or the device
            and the engine of a part of both.
        predictor: Shoal, with what was left out of the runs that set its constants; or a peer.
        rows: their number; the rest is of their absolute errors, predicted over measured, less one.
    """

    kind: Literal["serving", "training"]
    quantity: str
    runs: str
    predictor: str
    rows: int
    median_error: float
    p90_error: float
    share_within_25: float


class PredictionTable(Value):
    """Predictors beside each other.

    Args:
        errors: of each, on the same rows.
        unanswered: kind and predictor -> reason -> rows.
        seconds: kind and predictor -> s of a row.
        versions: of peers that ran.
        limit: rows of each kind that were chosen; all without.
        machine: that computed it: fingerprint.
        date: of the day, UTC.
        commit: of the checkout; empty outside one.
    """

    errors: tuple[PredictorErrors, ...]
    unanswered: Mapping[str, Mapping[str, int]] = {}
    seconds: Mapping[str, float] = {}
    versions: Mapping[str, str] = {}
    limit: int | None = None
    machine: Mapping[str, str] = {}
    date: str = ""
    commit: str = ""


def compare(
    kinds: Iterable[str] = KINDS,
    *,
    python: Path | None = None,
    limit: int | None = None,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    notice: Callable[[str], None] = lambda text: None,
) -> PredictionTable:
    """Compare Shoal's predictions of published runs with those of peers.

    Shoal's are those of the scoreboard. Serving: NVIDIA AIConfigurator (Xu et al., 2026), which
    runs in an environment of its own. Training: models in the style of llm-analysis (Li, 2023),
    Calculon (Isaev et al., 2023) and SimuMax (2025).

    Args:
        kinds: serving, training, or both.
        python: interpreter that has AIConfigurator; without one, an environment is made below
            Shoal's home.
        limit: rows of each kind, evenly spaced over the table; all without.
        progress: called with a text, what is done and the total.
        notice: called with what a user should know.

    Raises:
        ConfigError: an unknown kind, an interpreter without AIConfigurator, or no environment
            can be made.
        ServeError: AIConfigurator's process ended; its answers so far are kept.
    """
    wanted = tuple(kinds)
    for kind in wanted:
        require(kind in KINDS, "--rows", kind, expected=" or ".join(KINDS))
    parts = []
    if "serving" in wanted:
        parts.append(_serving(python, limit, progress, notice))
    if "training" in wanted:
        progress("training", 0, 1)
        parts.append(_training(limit))
    return PredictionTable(
        errors=tuple(one for part in parts for one in part.errors),
        unanswered={who: why for part in parts for who, why in part.unanswered.items()},
        seconds={who: each for part in parts for who, each in part.seconds.items()},
        versions=parts[0].versions if parts else {},
        limit=limit,
        machine=fingerprint(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=commit_of_code()[0],
    )


def _serving(
    python: Path | None,
    limit: int | None,
    progress: Callable[[str, int, int], None],
    notice: Callable[[str], None],
) -> PredictionTable:
    if python is None:
        progress(f"an environment for {NAME}", 0, 1)
        python = environment()
    progress("closed loops, by Shoal", 0, 1)
    board = score_silicon()
    runs = {one.run.id: one.run for one in _spaced(board.scores["model"], limit)}
    version, answers = answered(
        [question(run) for run in runs.values()],
        python,
        progress=lambda done, total: progress(f"closed loops, by {NAME}", done, total),
        notice=notice,
    )
    given = {name: one for name, one in zip(runs, answers, strict=True) if "error" not in one}
    took = [one["seconds"] for one in given.values()]
    places = {name: f"{runs[name].device}, {runs[name].engine}" for name in given}
    errors: list[PredictorErrors] = []
    for quantity in QUANTITIES:
        off = {
            f"Shoal, {key} left out": {
                one.run.id: one.error(quantity) for one in scores if one.run.id in runs
            }
            for key, scores in board.scores.items()
        }
        off[NAME] = {
            name: one[f"{quantity}_ms"] / 1e3 / getattr(runs[name], f"{quantity}_s") - 1.0
            for name, one in given.items()
        }
        errors += _errors("serving", quantity, off, places)
    return PredictionTable(
        errors=tuple(errors),
        unanswered={
            "serving, Shoal": _counted(board.skipped.elements()),
            f"serving, {NAME}": _counted(one["error"] for one in answers if "error" in one),
        },
        seconds={
            "serving, Shoal": board.seconds / len(board.scores["model"]),
            **({f"serving, {NAME}": mean(took)} if took else {}),
            **({f"serving, {NAME}, median": median(took)} if took else {}),
        },
        versions={NAME: version},
    )


def _training(limit: int | None) -> PredictionTable:
    board = score_training()
    chosen = _spaced(board.rows, limit)
    off = {"Shoal, publication left out": {row.id: row.error for row in chosen}}
    for name in BASELINES:
        off[f"in the style of {name}"] = {
            row.id: row.baselines[name] / row.reported - 1.0 for row in chosen
        }
    return PredictionTable(
        errors=tuple(_errors("training", "step", off, {})),
        unanswered={"training, Shoal": _counted(board.skipped.values())},
        seconds=_training_seconds({row.id for row in chosen}),
    )


def _training_seconds(chosen: set[str]) -> dict[str, float]:
    """Seconds of a row by each model, constants not included."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for row in read():
        if row.id in chosen:
            constants = calibration_for(row.group)
            began = time.perf_counter()
            item = replay(row)
            run = predict(item, constants).run
            seconds["training, Shoal"].append(time.perf_counter() - began)
            for name, model in BASELINES.items():
                began = time.perf_counter()
                model(run, item.gpu)
                seconds[f"training, in the style of {name}"].append(time.perf_counter() - began)
    return {name: mean(each) for name, each in seconds.items()}


def _errors(
    kind: Literal["serving", "training"],
    quantity: str,
    off: Mapping[str, Mapping[str, float]],
    places: Mapping[str, str],
) -> Iterator[PredictorErrors]:
    """Of rows that all answered, of all rows of who answered more, of each place.

    ``off``: predictor -> row -> predicted over measured, less one; ``places``: row -> where it ran.
    """
    both = set.intersection(*(set(by) for by in off.values()))
    parts = {"both": both} | {
        place: {name for name in both if places[name] == place}
        for place in sorted({*places.values()})
    }
    for predictor, by in off.items():
        own = parts | ({"all": set(by)} if len(by) > len(both) else {})
        for runs, names in ((runs, names) for runs, names in own.items() if names):
            yield PredictorErrors(
                kind=kind,
                quantity=quantity,
                runs=runs,
                predictor=predictor,
                **figures(by[name] for name in names),
            )


def _spaced(items: Sequence[_T], limit: int | None) -> list[_T]:
    most = len(items) if limit is None else min(limit, len(items))
    return [items[number * len(items) // most] for number in range(most)]


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    """Rows by the first words of their reasons, most first."""
    short = (_DETAIL.sub("", _VALUE.sub("…", reason))[:160] for reason in reasons)
    return dict(Counter(short).most_common())


def tables(found: PredictionTable) -> list[Table]:
    """What a reader sees: errors of all, by device and engine, no predictions, seconds."""
    results = [
        Table(
            title=f"{kind.capitalize()}: absolute errors",
            columns=("runs", "quantity", "predicted by", "rows", "median", "p90", "within 25 %"),
            rows=tuple(
                (
                    "of all answered rows" if runs == "both" else "its own",
                    *(one.quantity, one.predictor, f"{one.rows}", f"{one.median_error:.1%}"),
                    *(f"{one.p90_error:.0%}", f"{one.share_within_25:.0%}"),
                )
                for runs in ("both", "all")
                for one in found.errors
                if (one.kind, one.runs) == (kind, runs)
            ),
            right="   rrrr",
        )
        for kind in KINDS
    ]
    by_place: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in found.errors:
        if one.runs not in ("both", "all") and one.predictor in (_OURS, NAME):
            by_place[one.runs, f"{one.rows}"].append(one.median_error)
    line = []
    for place, (tpot, their_tpot, ttft, their_ttft) in by_place.items():
        medians = []
        for ours, theirs in ((tpot, their_tpot), (ttft, their_ttft)):
            medians += [f"{ours:.1%}", f"{theirs:.1%}", NAME if theirs < ours else "Shoal"]
        line.append((*place, *medians))
    results.append(
        Table(
            title="Serving, by device and engine: median errors, Shoal's with the model left out",
            columns=("ran on", "rows", *(f"{q}, {who}" for q in QUANTITIES for who in _NEARER)),
            rows=tuple(line),
            right=" rrr rr ",
        )
    )
    why = [(who, f"{n}", why) for who, by in found.unanswered.items() for why, n in by.items()]
    seconds = [(name, f"{1e3 * one:.3g}") for name, one in found.seconds.items()]
    for title, column, cells in (
        ("No prediction", ("rows", "why"), why),
        ("Time", ("ms per row",), seconds),
    ):
        results.append(
            Table(title=title, columns=("predicted by", *column), rows=tuple(cells), right=" r")
        )
    return [one for one in results if one.rows]
