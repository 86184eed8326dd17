"""What ``shoal plan autotp`` does and shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.app.show import console, table
from shoal.core.errors import MissingExtraError
from shoal.core.sizes import human_bytes
from shoal.plan.autotp.plan import TensorPlan

__all__ = ["found", "grouped", "show"]


def found(config: Path, *, tp: int, length: int, fallback: Any) -> TensorPlan:
    """The plan of a model by its configuration.

    Raises:
        ModelError: a configuration that cannot be used.
        PlanError: heads that ``tp`` does not divide, or a model that cannot be traced.
        MissingExtraError: torch or transformers is not installed.
    """
    try:
        from shoal.parallel.autotp.auto import discover
        from shoal.parallel.autotp.families import example, from_config, read_config
    except ModuleNotFoundError as cause:
        if cause.name != "torch":
            raise
        raise MissingExtraError("torch", "run", "tracing a model") from cause
    model = from_config(read_config(config))
    inputs = example(model, length=length)
    named = type(model).__name__
    return discover(model, (), inputs, tp=tp, name=named, fallback=fallback).plan


def grouped(plan: TensorPlan) -> Iterator[tuple[str, str, str, int]]:
    """(parameter with * for layers, style, what is split, how many) of the plan's weights."""
    rows: dict[tuple[str, str, str], int] = {}
    for name, split in plan.weights.items():
        pieces = f" in {len(split.segments)} segments" if len(split.segments) > 1 else ""
        size = sum(split.segments)
        key = (
            re.sub(r"\.\d+\.", ".*.", name),
            split.style,
            f"dimension {split.dim} of {size}{pieces}",
        )
        rows[key] = rows.get(key, 0) + 1
    for (name, style, what), count in rows.items():
        yield name, style, what, count


def show(plan: TensorPlan) -> None:
    """Print what is split, what is not, and why."""
    console().print(
        f"{plan.model} on {plan.tp} ranks: {100 * plan.sharded:.1f} % of "
        f"{human_bytes(plan.parameter_bytes)} are split, {plan.all_reduces} all-reduces forward",
        markup=False,
    )
    table("split", ("parameters", "by", "what", "how many"), grouped(plan), numeric="   r")
    if plan.whole:
        rows = {(re.sub(r"\.\d+\.", ".*.", name), why) for name, why in plan.whole.items()}
        table("whole on every rank", ("parameters", "because"), sorted(rows))
    for note in plan.notes:
        console().print(f"note: {note}", markup=False)
