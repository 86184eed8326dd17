"""What the parts of kind ``offload`` have in common: options, budgets, and what goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from shoal.core.errors import ConfigError, require
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.core.traits import traits

if TYPE_CHECKING:
    from shoal.ir import TrainJob

LEAST_BUDGET = 2**20
"""Bytes that a budget has at least."""

UNLIMITED = 2**40
"""Bytes of a device of which all may be used."""


def _count(number: Any) -> Any:
    """``1e7``, which YAML reads as text."""
    try:
        return int(float(number)) if isinstance(number, str) else number
    except ValueError:
        return number


Count = Annotated[int, BeforeValidator(_count)]
"""An option that counts, and may be written as ``1e7``."""


def check_least(part: Any, where: str, **least: int) -> None:
    """Refuse options below the least that makes sense; words and what is not given pass.

    Raises:
        ConfigError: names the option.
    """
    for name, bound in least.items():
        value = getattr(part, name)
        shown = {0: "0 or more", LEAST_BUDGET: "at least 1MiB"}.get(bound, f"at least {bound}")
        require(
            not isinstance(value, int) or value >= bound, f"{where}.{name}", value, expected=shown
        )


def short_budgets(part: Any, need: Mapping[str, float]) -> tuple[str, ...]:
    """Sentences about tiers of which a part's budget is below what a step needs."""
    return tuple(
        f"offload: {tier}_budget {human_bytes(budget)} is below the {human_bytes(most)} that the "
        "step is predicted to need"
        for tier, most in need.items()
        if (budget := getattr(part, f"{tier}_budget", None)) is not None and most > budget
    )


def place_of(path: str, place: Path) -> Path:
    """The directory for what lies on disk: the one that was chosen, or the run's own."""
    return Path(path) if path else place


def refuse(job: TrainJob, name: str) -> None:
    """Refuse what no part goes with.

    Raises:
        ConfigError: names the option and what would do.
    """
    where = f"offload: {name}"
    if "moves_activations" in traits("activation", job.activation):
        raise ConfigError(
            f"{where} counts what autograd saves itself and activation is {job.activation.name}; "
            "use activation: keep, and recompute: full (or act: host of zero_infinity) where "
            "activations are large"
        )
    if job.replan.enabled:
        raise ConfigError(
            f"{where}: replan moves a state between plans, and not one in tiers; "
            "use replan: {enabled: false}"
        )


def refuse_streamed(job: TrainJob, name: str) -> None:
    """Refuse what no streamed training composes with.

    Raises:
        ConfigError: names the option and what would do.
    """
    where = f"offload: {name}"
    if traits("shard", job.shard):
        raise ConfigError(
            f"{where} divides parameters over the data-parallel ranks itself and shard is "
            f"{job.shard}; leave shard out"
        )
    if not hasattr(table("optimizer").load(job.optimizer.name), "states"):
        raise ConfigError(
            f"{where} updates parameters in pieces, and optimizer {job.optimizer.name} looks at "
            "several elements of a parameter in its update; use optimizer: adamw"
        )
    if job.compile:
        raise ConfigError(
            f"{where} fetches parameters in hooks, which compile does not see; use compile: false"
        )
    refuse(job, name)
