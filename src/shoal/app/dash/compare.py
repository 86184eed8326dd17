"""Two runs side by side: their curves over each other, their numbers, and what they chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from shoal.app.dash.views import run
from shoal.core.config import ResolvedValue
from shoal.ir import Plan
from shoal.train.runs import Runs, RunStatus

# Runs that a form offers, newest first.
_OFFERED = 200


def compare(runs: Runs, chosen: Sequence[RunStatus]) -> dict[str, Any]:
    """What the page shows.

    Args:
        runs: all there are.
        chosen: the two to compare; with fewer, the page asks for the rest.
    """
    identities = [one.entry.id for one in chosen]
    offered = runs.all()[:_OFFERED]
    known = {row.entry.id for row in offered}
    offered += [one for one in chosen if one.entry.id not in known]
    sides = [run(runs, one) for one in chosen] if len(chosen) == 2 else []
    return {
        "given": identities,
        "offered": offered,
        "query": urlencode(dict(zip("ab", identities, strict=False))),
        "sides": sides,
        "compared": _beside([side["compared"] for side in sides]),
        "choices": _differing([side["plan"] for side in sides]),
        "state": "running" if any(one.live for one in chosen) else "finished",
    }


def _beside(
    tables: Sequence[Sequence[tuple[str, str, str, str]]],
) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Label -> (predicted, measured, error) of each run; dashes where one has none."""
    labels = dict.fromkeys(row[0] for table in tables for row in table)
    rows = [{label: (told, was, error) for label, told, was, error in table} for table in tables]
    none = ("", "–", "")
    return [(label, [row.get(label, none) for row in rows]) for label in labels]


def _differing(plans: Sequence[Plan[Any] | None]) -> list[tuple[str, list[str]]]:
    """The keys of the jobs that differ, and what each run has there; names are left out."""
    values = [
        {}
        if plan is None
        else {path: str(value) for path, value, _ in ResolvedValue(plan.job).lines()}
        for plan in plans
    ]
    keys = dict.fromkeys(key for one in values for key in one)
    rows = [(key, [one.get(key, "–") for one in values]) for key in keys if key != "name"]
    return [(key, row) for key, row in rows if len(set(row)) > 1]
