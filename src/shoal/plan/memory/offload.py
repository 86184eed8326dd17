"""Every way to train a model beyond the device's memory, priced beside each other.

What a part does not compose with is a row that says so; so a reader sees every part, and why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.errors import ConfigError, ShoalError, require
from shoal.core.parts import Choice, options_of, table
from shoal.core.sizes import bytes_of
from shoal.cost.training.memory import TIERS
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, TrainJob, Work

__all__ = ["TIERS", "OffloadOption", "budgets_of", "ways"]


@dataclass(frozen=True, kw_only=True)
class OffloadOption:
    """One way, and what it costs a rank.

    Args:
        choice: the part of kind ``offload``, or ``none``.
        recompute: as in a job.
        tier_bytes: tier -> most bytes at one time.
        step_s: predicted.
        beyond: tiers whose budget it passes.
        notes: what the part says about it.
        refused: why the job cannot have it; nothing is priced then.
    """

    choice: str
    recompute: str
    tier_bytes: Mapping[str, float]
    step_s: float
    beyond: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Within every budget."""
        return not self.refused and not self.beyond


def budgets_of(text: str) -> dict[str, int]:
    """Budgets written as ``device=64MiB,host=256MiB``.

    Raises:
        ConfigError: a tier or a size that is none.
    """
    budgets: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        tier, _, size = (part.strip() for part in item.partition("="))
        require(tier in TIERS, "--budget", tier, expected=f"tier=size of {', '.join(TIERS)}")
        try:
            number = bytes_of(size)
        except ValueError as cause:
            raise ConfigError(f"--budget {tier} = {size}: {cause}") from None
        require(
            isinstance(number, int) and number > 0,
            f"--budget {tier}",
            size,
            expected="a size such as 64MiB",
        )
        budgets[tier] = number
    return budgets


def ways(
    job: TrainJob,
    shape: ModelShape,
    machine: Machine,
    *,
    budgets: Mapping[str, int],
    only: str | None = None,
) -> list[OffloadOption]:
    """All ways, those that fit before those that do not, the fastest first.

    Args:
        job: without ``offload``; its own recomputation is not kept.
        shape: of the model.
        machine: where.
        budgets: tier -> bytes; a part that holds a budget is given it.
        only: one part's name.

    Raises:
        PartError: there is no part of this name.
    """
    parts = table("offload")
    if only is not None:
        parts.load(only)
    choices: list[Choice | None] = [] if only else [None]
    for choice, _ in parts.offered(Work(shape=shape, job=job), machine):
        if only not in (None, choice.name):
            continue
        known = options_of(parts.load(choice.name))
        given = {
            f"{tier}_budget": size for tier, size in budgets.items() if f"{tier}_budget" in known
        }
        choices.append(Choice(name=choice.name, options={**given, **choice.options}))
    pricer = Pricer(machine)
    ways = [
        _priced(job, shape, pricer, choice, recompute, budgets)
        for choice in choices
        for recompute in ("none", "full")
    ]
    return sorted(ways, key=lambda way: (bool(way.refused), bool(way.beyond), way.step_s))


def _priced(
    job: TrainJob,
    shape: ModelShape,
    pricer: Pricer,
    choice: Choice | None,
    recompute: str,
    budgets: Mapping[str, int],
) -> OffloadOption:
    shown = "none" if choice is None else _shown(choice)
    candidate = job.model_copy(update={"offload": choice, "recompute": recompute})
    work = Work(shape=shape, job=candidate)
    try:
        part = None if choice is None else table("offload").build(choice)
        if part is not None:
            part.check(candidate)
        cost = pricer.estimate(work)
    except ShoalError as cause:
        return OffloadOption(
            choice=shown, recompute=recompute, tier_bytes={}, step_s=0.0, refused=str(cause)
        )
    filled = {tier: cost.memory_bytes[tier] for tier in TIERS if tier in cost.memory_bytes}
    if part is None:
        filled = {"device": cost.memory_total}
    return OffloadOption(
        choice=shown,
        recompute=recompute,
        tier_bytes=filled,
        step_s=cost.step_s.value,
        beyond=tuple(tier for tier, size in filled.items() if size > budgets.get(tier, 2**62)),
        notes=() if part is None else part.notes(work, pricer.machine),
    )


def _shown(choice: Choice) -> str:
    """Name and places; budgets are the same in every row."""
    kept = {key: value for key, value in choice.options.items() if not key.endswith("_budget")}
    return str(Choice(name=choice.name, options=kept))
