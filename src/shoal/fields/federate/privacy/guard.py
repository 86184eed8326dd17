"""Privacy around a rule: what was combined is released, and the release is accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core.parts import table
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.privacy.protocols import PrivacyState
from shoal.fields.federate.protocols import (
    Arrived,
    ClientScheduler,
    DrawsClients,
    FederationError,
    LocalJob,
    RobustRule,
)


class NoPrivacy:
    """Updates and directions as they are."""

    reads = False

    def share(self, delta: np.ndarray, job: LocalJob) -> np.ndarray:
        """All of it."""
        return delta

    def bound(self, delta: np.ndarray) -> np.ndarray:
        """All of it."""
        return delta

    def release(self, direction: np.ndarray, arrived: Arrived, pool: int) -> np.ndarray:
        """All of it."""
        return direction

    def measured(self) -> dict[str, float]:
        """Nothing is promised."""
        return {}

    def refusal(self) -> str:
        """Nothing is used up."""
        return ""

    def state(self) -> dict[str, np.ndarray]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Nothing."""


def privacy_of(job: FederateJob, names: tuple[str, ...]) -> PrivacyState:
    """The privacy of a job, at work."""
    if job.privacy is None:
        return NoPrivacy()
    state: PrivacyState = (
        table("privacy").build(job.privacy, where="privacy").start(names, job.seed)
    )
    return state


def guarded(rule: RobustRule, scheduler: ClientScheduler, privacy: PrivacyState) -> RobustRule:
    """The rule, whose result is released under the privacy.

    Raises:
        FederationError: what one client adds to the result is not bounded.
    """
    if isinstance(privacy, NoPrivacy):
        return rule
    if not rule.linear:
        raise FederationError(
            "privacy: needs robust = mean; with a rule that compares updates, what one client "
            "changes is not bounded by the length of its update"
        )
    return GuardedRule(rule, scheduler, privacy)


@dataclass(frozen=True)
class GuardedRule:
    """A rule whose result is released.

    Args:
        rule: combines.
        scheduler: says from how many clients a round is drawn.
        privacy: releases.
    """

    rule: RobustRule
    scheduler: ClientScheduler
    privacy: PrivacyState

    linear: ClassVar = True
    # The whole is released, and accounted for.
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """As the rule."""
        return self.rule.covers(count)

    def combine(self, arrived: Arrived) -> np.ndarray:
        """Combine, release, account.

        Raises:
            FederationError: the budget does not allow it.
        """
        direction = self.rule.combine(arrived)
        result = self.privacy.release(
            direction, arrived, pool_of(self.scheduler, len(arrived.jobs))
        )
        arrived.report.update(self.privacy.measured())
        return result


def pool_of(scheduler: ClientScheduler, updates: int) -> int:
    """Clients from which those of an aggregation were drawn; ``updates`` if they were not drawn."""
    return scheduler.drawn_from(updates) if isinstance(scheduler, DrawsClients) else updates
