"""``shoal explain survival``: does a state in memory outlive its nodes, and how often to save?"""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeInt

from shoal.core.parts import part
from shoal.core.tables import Table, digits
from shoal.cost.training.failures import daly, young
from shoal.ir import Explanation, Machine, Progress
from shoal.plan.memory.survival import SaveLevel, Survival, sampled


@part
class SurvivalStudy:
    """Compute the survival probability of in-memory checkpoints, and the optimal interval of saves.

    The lifetimes of nodes follow a Weibull distribution; the formula is compared with simulated
    jobs. The shares of lost time compare in-memory snapshots with saving to storage alone.

    **Examples**

        shoal explain survival --nodes 64 --group 4

        shoal explain survival --nodes 64 --group 8 --losses 2 --mtbf-h 5000 --hours 48

        shoal explain survival --nodes 1024 --group 4 --storage-s 60 --step-s 20 -o json

    Args:
        nodes: nodes of the job.
        group: nodes of a coding group.
        losses: nodes of a group that the code survives.
        mtbf_h: mean time between failures of a node, hours.
        shape: shape of the Weibull distribution of lifetimes.
        hours: time without any replacement, hours.
        step_s: seconds of a step.
        memory_s: stall of a snapshot in memory, s.
        storage_s: stall of a save to storage, s.
        restart_s: time from a failure to the restart, s.
        read_s: additional time if storage is read, s.
        repair_h: time until a lost node is replaced, hours.
        trials: simulated jobs; 0 for none.
        seed: seed of the simulation.
    """

    machine: ClassVar = None

    nodes: int = 64
    group: int = 4
    losses: int = 1
    mtbf_h: float = 10_000.0
    shape: float = 1.0
    hours: float = 24.0
    step_s: float = 10.0
    memory_s: float = 0.1
    storage_s: float = 30.0
    restart_s: float = 60.0
    read_s: float = 300.0
    repair_h: float = 0.1
    trials: NonNegativeInt = 100_000
    seed: NonNegativeInt = 0

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """Chances of the state, and the best interval of each way to save."""
        job = Survival(
            nodes=self.nodes,
            group=self.group,
            losses=self.losses,
            mtbf_h=self.mtbf_h,
            shape=self.shape,
        )
        mtbf_s, read_s = 3600 * job.job_mtbf_h, self.restart_s + self.read_s
        storage = SaveLevel.storage(self.storage_s, mtbf_s, read_s)
        memory = SaveLevel.memory(
            self.memory_s, self.step_s, job, self.repair_h, self.restart_s, (self.storage_s, read_s)
        )
        drawn = (
            sampled(job, self.hours, trials=self.trials, seed=self.seed) if self.trials else None
        )
        chances = {
            "node": job.node(self.hours),
            "group": job.of_group(self.hours),
            "job": job.of_job(self.hours),
            "job, simulated": drawn,
            "job, no code": job.uncoded(self.hours),
        }
        by_young, by_daly = young(self.storage_s, mtbf_s), daly(self.storage_s, mtbf_s)
        left = Table(
            title=f"state left after {self.hours:g} h, nothing replaced",
            columns=("of", "probability"),
            rows=tuple((name, f"{one:.6f}") for name, one in chances.items() if one is not None),
            right=" r",
        )
        intervals = Table(
            title=f"a failure of any of {self.nodes} nodes every {digits(job.job_mtbf_h)} h",
            columns=("saves to", "every", "time lost"),
            rows=tuple(
                (one.name, f"{digits(one.interval_s)} s", f"{one.lost:.3%}")
                for one in (memory, storage)
            ),
            right=" rr",
        )
        return Explanation(
            blocks=(
                left,
                intervals,
                f"storage alone: every {digits(by_young)} s by Young, {digits(by_daly)} s by Daly",
            ),
            data={
                "survival": job.model_dump(),
                "hours": self.hours,
                "chances": chances,
                "storage": {
                    "young_s": by_young, "daly_s": by_daly, "job_mtbf_h": job.job_mtbf_h
                },
                "levels": [one.model_dump() for one in (memory, storage)],
            },
        )  # fmt: skip
