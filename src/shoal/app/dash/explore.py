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

from shoal.core.config import resolve
from shoal.core.errors import ConfigError, PlanError, ShoalError, require
from shoal.cost import shapes
from shoal.ir import TrainJob, TrainPlan
from shoal.machine import described
from shoal.plan.picture import content
from shoal.plan.strategy import PLANNERS
from shoal.plan.strategy.objective import UNITS
from shoal.plan.what_if import WhatIfResult, what_if

__all__ = ["check_machine", "explore"]

_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9@.-]{0,63}")
_SHOWN, _MOST_DEVICES = 5, 4096
# One search at a time: each takes a core for a second or more.
_ONE = threading.Lock()
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class _Question:
    """What a visitor asks, checked.

    Args:
        model: name of a shipped shape.
        machine: name or shorthand of a machine.
        objective: time, cost or energy.
        planner: who plans.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        tokens: training tokens.
        what_if: ask about other machines, too.
    """

    model: str
    machine: str
    objective: str
    planner: str
    seq_len: int
    global_batch: int
    tokens: int
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
            "seq_len": "4096",
            "global_batch": "128",
            "tokens": "20000000000",
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
    except ShoalError as cause:
        page["error"] = str(cause)
        return page
    page["result"] = content(plans, answers)
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
    numbers = {}
    for name, most in (("seq_len", 2**20), ("global_batch", 2**17), ("tokens", 10**15)):
        text = given[name]
        require(
            text.isascii() and text.isdigit() and 1 <= int(text) <= most,
            name,
            text,
            expected=f"a whole number from 1 to {most}",
            error=ConfigError,
        )
        numbers[name] = int(text)
    return _Question(
        model=shapes.find(given["model"]).name,
        machine=machine,
        objective=given["objective"],
        planner=given["planner"],
        what_if=bool(given["what_if"]),
        **numbers,
    )


@functools.lru_cache(maxsize=32)
def _answer(asked: _Question) -> tuple[tuple[TrainPlan, ...], tuple[WhatIfResult, ...]]:
    machine = described.load(asked.machine)
    require(
        machine.num_devices <= _MOST_DEVICES,
        "machine",
        asked.machine,
        expected=f"at most {_MOST_DEVICES} devices here; use shoal plan train for more",
        error=PlanError,
    )
    flags: dict[str, object] = {
        "model": asked.model,
        "seq_len": asked.seq_len,
        "global_batch": asked.global_batch,
        "tokens": asked.tokens,
        "objective": asked.objective,
    }
    job = resolve(TrainJob, flags=flags).value
    if not _ONE.acquire(timeout=_PATIENCE_S):
        raise PlanError("others are planning; ask again in a moment")
    try:
        plans = PLANNERS.build(asked.planner, where="planner").plan(job, machine)
        answers = what_if(job, plans[0], planner=asked.planner) if asked.what_if else []
    finally:
        _ONE.release()
    return tuple(plans[:_SHOWN]), tuple(answers)
