"""How long an assignment takes: micro-steps as events on ranks, and what travels between them."""

from __future__ import annotations

from typing import NamedTuple

from shoal.cost.training.sequences import SequenceCost
from shoal.plan.balance.sequences.assignment import Assignment


class MicroStepSpan(NamedTuple):
    """When a micro-step runs.

    Args:
        start: s.
        end: s.
    """

    step: int
    start: float
    end: float


class PredictedStep(NamedTuple):
    """What is predicted of one step.

    Args:
        step_s: until the last rank ends; the sum of the gradients is not in it.
        idle_share: of the ranks' time, in which they wait.
        exchange_bytes: that all ranks send for attention.
        kept_bytes: most activations of a pass that one rank has on its device.
        host_bytes: most of them that one rank has on the host.
        spans: the micro-steps.
    """

    step_s: float
    idle_share: float
    exchange_bytes: float
    kept_bytes: float
    host_bytes: float
    spans: tuple[MicroStepSpan, ...]


def predict(plan: Assignment, cost: SequenceCost) -> PredictedStep:
    """Every micro-step begins when the last of its ranks is free, in the order of the plan."""
    free = [0.0] * plan.ranks
    busy = sent = kept = away = 0.0
    spans = []
    for number, step in enumerate(plan.steps):
        here = [plan.lengths[one] for one in step.sequences]
        degree = len(step.ranks)
        seconds = cost.pass_s(here, step.ranks, plan.exchange)
        start = max(free[rank] for rank in step.ranks)
        for rank in step.ranks:
            free[rank] = start + seconds
        busy += seconds * degree
        sent += degree * cost.exchange_bytes(sum(here), degree, plan.exchange)
        saved = cost.kept_bytes * -(-sum(here) // degree)
        kept = max(kept, (1.0 - step.offloaded) * saved)
        away = max(away, step.offloaded * saved)
        spans.append(MicroStepSpan(number, start, start + seconds))
    step_s = max(free)
    idle = 1.0 - busy / (step_s * plan.ranks) if step_s else 0.0
    return PredictedStep(step_s, max(0.0, idle), sent, kept, away, tuple(spans))
