"""The plan explorer: a model, a machine and an objective in, ranked plans out.

Nothing that a visitor writes is opened as a file: models and machines are found by name alone.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal import api
from shoal.api import Plans
from shoal.core.counts import count
from shoal.core.errors import ConfigError, PlanError, ShoalError, require
from shoal.cost import shapes
from shoal.ir import TrainPlan
from shoal.machine import described
from shoal.plan.picture import content
from shoal.plan.strategy import PLANNERS
from shoal.plan.strategy.objective import UNITS
from shoal.plan.what_if import WhatIfResult, what_if

_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9@.-]{0,63}")
_SHOWN, _MOST_DEVICES = 5, 4096
# One search at a time: each takes a core for a second or more.
_ONE = threading.Lock()
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class _Question:
    """What a visitor asks, checked.

    Args:
        machine: name or shorthand of a machine.
        objective: time, cost or energy.
        numbers: (setting, value) of sequence, batch and training tokens, of those that are given.
        what_if: ask about other machines, too.
    """

    model: str
    machine: str
    objective: str
    planner: str
    numbers: tuple[tuple[str, int], ...]
    what_if: bool


def explore(query: Mapping[str, str]) -> dict[str, Any]:
    """What the page shows for the fields of its form; without any, the form alone."""
    given = {key: value.strip()[:100] for key, value in query.items()}
    page: dict[str, Any] = {
        "models": shapes.names(),
        "machines": described.names(),
        "objectives": list(UNITS),
        "planners": list(PLANNERS),
        "given": {
            "model": "Qwen3-14B",
            "machine": "16xH100",
            "objective": "time",
            "planner": "search",
            "seq_len": "",
            "global_batch": "",
            "tokens": "20B",
            "what_if": "",
            **given,
        },
        "error": "",
        "result": None,
    }
    if not given:
        return page
    try:
        plans, answers = _answer(_checked(page["given"]))
        page["result"] = {**content(plans[:_SHOWN], answers), "taken": plans.taken_line()}
    except ShoalError as cause:
        page["error"] = str(cause)
    return page


def check_machine(machine: str) -> str:
    """A machine that a visitor named.

    Raises:
        ConfigError: it may be a file.
    """
    require(
        _MACHINE.fullmatch(machine) is not None and not machine.endswith((".yaml", ".yml")),
        "machine",
        machine,
        expected="a name or a shorthand, such as 16xH100 or 8xA100@IB200",
        error=ConfigError,
    )
    return machine


def _checked(given: Mapping[str, str]) -> _Question:
    machine = check_machine(given["machine"])
    require(
        given["objective"] in UNITS,
        "objective",
        given["objective"],
        expected=", ".join(UNITS),
        error=ConfigError,
    )
    numbers = []
    for name, most in (("seq_len", 2**20), ("global_batch", 2**17), ("tokens", 10**15)):
        text = given[name]
        if not text:
            continue
        number = count(text, name) if text.isascii() else 0
        require(
            1 <= number <= most,
            name,
            text,
            expected=f"a whole number from 1 to {most}",
            error=ConfigError,
        )
        numbers.append((name, number))
    return _Question(
        model=shapes.find(given["model"]).name,
        machine=machine,
        objective=given["objective"],
        planner=given["planner"],
        numbers=tuple(numbers),
        what_if=bool(given["what_if"]),
    )


@functools.lru_cache(maxsize=32)
def _answer(asked: _Question) -> tuple[Plans[TrainPlan], tuple[WhatIfResult, ...]]:
    machine = described.load(asked.machine)
    require(
        machine.num_devices <= _MOST_DEVICES,
        "machine",
        asked.machine,
        expected=f"at most {_MOST_DEVICES} devices here; use shoal plan train for more",
        error=PlanError,
    )
    numbers: dict[str, Any] = dict(asked.numbers)
    if not _ONE.acquire(timeout=_PATIENCE_S):
        raise PlanError("other plans are being computed; try again in a moment")
    try:
        plans = api.plan(
            asked.model,
            machine,
            kind="train",
            planner=asked.planner,
            objective=asked.objective,
            **numbers,
        )
        answers = what_if(plans.job, plans.best, planner=asked.planner) if asked.what_if else []
    finally:
        _ONE.release()
    return plans, tuple(answers)
