"""How likely a state in memory outlives its nodes, and how often to save.

A node lives past time t with probability R(t) = exp(-(t / scale)^shape), Weibull. A group of n
nodes whose code survives m losses keeps its state while at most m of them fail; a job of g groups
while all do. What a failure costs is half an interval and the way back; what saving costs is its
stall.

Source: Wang et al., Reliable and Efficient In-Memory Fault Tolerance of Large Language Model
Pretraining, 2023, section 5.
"""

from __future__ import annotations

import math

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.random import generator
from shoal.cost.training.failures import daly


class Survival(Value):
    """A job on nodes that fail.

    Args:
        nodes: of the job, one member of a group on each.
        group: nodes of a group.
        losses: nodes of a group that may fail.
        mtbf_h: mean time between failures of a node, hours.
        shape: of the Weibull distribution; 1 for failures without memory, less for nodes that
            mostly fail early.
    """

    nodes: int
    group: int
    losses: int = 1
    mtbf_h: float = 10_000.0
    shape: float = 1.0

    def model_post_init(self, _context: object) -> None:
        """Refuse what cannot be."""
        require(
            self.nodes >= 1 and self.group >= 1 and self.nodes % self.group == 0,
            "survival.nodes",
            self.nodes,
            expected=f"a multiple of the group of {self.group}",
        )
        require(
            0 <= self.losses < self.group,
            "survival.losses",
            self.losses,
            expected=f"0 to {self.group - 1}, fewer than the group",
        )
        require(self.mtbf_h > 0, "survival.mtbf_h", self.mtbf_h, expected="hours above 0")
        require(self.shape > 0, "survival.shape", self.shape, expected="a number above 0")

    @property
    def scale_h(self) -> float:
        """Scale of the distribution, from its mean."""
        return self.mtbf_h / math.gamma(1 + 1 / self.shape)

    def node(self, hours: float) -> float:
        """Probability that a node lives for so long."""
        return math.exp(-((hours / self.scale_h) ** self.shape))

    def of_group(self, hours: float) -> float:
        """Probability that a group still has its state, nothing being replaced meanwhile."""
        alive, n = self.node(hours), self.group
        return sum(
            math.comb(n, k) * alive ** (n - k) * (1 - alive) ** k for k in range(self.losses + 1)
        )

    def of_job(self, hours: float) -> float:
        """Probability that all groups still have theirs."""
        return self.of_group(hours) ** (self.nodes // self.group)

    def uncoded(self, hours: float) -> float:
        """Probability that all nodes live: what the state has without a code."""
        return self.node(hours) ** self.nodes

    @property
    def job_mtbf_h(self) -> float:
        """Mean time between failures of any of the nodes, hours, as if without memory."""
        return self.mtbf_h / self.nodes


def sampled(survival: Survival, hours: float, *, trials: int = 100_000, seed: int = 0) -> float:
    """Share of simulated jobs whose state is left after so many hours.

    Args:
        survival: the job.
        hours: time.
        trials: jobs.
        seed: of the lives.
    """
    source = generator(seed, purpose="survival")
    kept = 0
    # So many at a time that a table of lives stays below some 16 MiB.
    step = max(1, 2**21 // survival.nodes)
    for first in range(0, trials, step):
        count = min(step, trials - first)
        lives = survival.scale_h * source.weibull(survival.shape, (count, survival.nodes))
        lost = (lives <= hours).reshape(count, -1, survival.group).sum(axis=2)
        kept += int(np.all(lost <= survival.losses, axis=1).sum())
    return kept / trials


def lost_share(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Share of the time that saving, work done again and restarts take.

    Args:
        interval_s: between saves.
        cost_s: for which a save stops the computation.
        mtbf_s: between failures of the job.
        restart_s: from a failure until the run goes on.
    """
    return min(1.0, cost_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s)


class SaveLevel(Value):
    """A level of saving, and what it costs where it is used best.

    Args:
        name: of the level.
        interval_s: between saves.
        lost: share of the time that is lost, failures that this level does not survive included.
    """

    name: str
    interval_s: float
    lost: float

    @classmethod
    def storage(cls, cost_s: float, mtbf_s: float, restart_s: float) -> SaveLevel:
        """Every failure goes back to the storage."""
        interval = daly(cost_s, mtbf_s)
        return cls(
            name="storage",
            interval_s=interval,
            lost=lost_share(interval, cost_s, mtbf_s, restart_s),
        )

    @classmethod
    def memory(
        cls,
        cost_s: float,
        step_s: float,
        survival: Survival,
        repair_h: float,
        restart_s: float,
        storage: tuple[float, float],
    ) -> SaveLevel:
        """Failures go back to memory; those of more nodes than the code survives to the storage.

        Args:
            cost_s: for which a snapshot stops the computation.
            step_s: of a step: no interval is shorter.
            survival: the job.
            repair_h: hours until a lost node is replaced and its part rebuilt.
            restart_s: from a failure until the run goes on.
            storage: seconds for which a save there stops the computation, and of a way back.
        """
        mtbf_s = 3600 * survival.job_mtbf_h
        interval = max(step_s, daly(cost_s, mtbf_s))
        # While one node is being replaced, so many more of its group must not fail.
        rest = survival.node(repair_h)
        others = survival.group - 1
        kept = sum(
            math.comb(others, k) * rest ** (others - k) * (1 - rest) ** k
            for k in range(survival.losses)
        )
        lost = lost_share(interval, cost_s, mtbf_s, restart_s)
        if kept < 1:
            rare = mtbf_s / (1 - kept)
            below = daly(storage[0], rare)
            lost += lost_share(below, storage[0], rare, storage[1])
        return cls(name="memory", interval_s=interval, lost=min(1.0, lost))
