"""Several jobs on one fabric: their rings at the same time, with hashed and with planned paths.

For the network half of the claim about C4: :func:`rings_of_jobs` places jobs that are strewn
over the leaves, as on a busy cluster, and :func:`times_of_jobs` says what the all-reduce of each
takes and how many connections share the busiest link, under one planner of paths.
``times_of_jobs("ecmp", seed=n)`` beside ``times_of_jobs("c4p", seed=n)`` on the same ``n`` is one
paired sample of each: ratios of ``job_s``, and ``busiest``. A draw takes milliseconds.

Source: Dong et al., Boosting Large-scale Parallel Training Efficiency with C4: A
Communication-Driven Approach, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.core.parts import Choice
from shoal.cost.network.collectives import collective, place, together
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import Flows
from shoal.cost.network.simulate import simulate
from shoal.plan.paths.compare import busiest, plan_paths


@dataclass(frozen=True)
class JobTimes:
    """Seconds of each job's all-reduce, all at once; most connections on one link."""

    planner: str
    job_s: tuple[float, ...]
    busiest: int


def rings_of_jobs(
    fabric: LeafSpine, *, jobs: int = 3, ranks: int | None = None, size: float = 1e9, seed: int = 0
) -> tuple[Flows, np.ndarray]:
    """The rings of jobs whose ranks are strewn over the fabric, and the job of each flow, [F].

    Args:
        fabric: where.
        jobs: how many.
        ranks: of each job; as many as there are hosts for, if not given.
        size: bytes that each rank reduces.
        seed: of the placement.

    Raises:
        PlanError: more ranks than hosts.
    """
    require(jobs >= 1, "jobs", jobs, expected="at least 1", error=PlanError)
    each = ranks or fabric.num_hosts // jobs
    hosts = place(fabric, "random", ranks=jobs * each, seed=seed)
    rings = [
        collective("all_reduce", hosts[job * each : (job + 1) * each], size) for job in range(jobs)
    ]
    return together(rings)


def times_of_jobs(
    policy: Choice | str,
    *,
    fabric: LeafSpine | None = None,
    jobs: int = 3,
    ranks: int | None = None,
    size: float = 1e9,
    seed: int = 0,
) -> JobTimes:
    """Seconds of every job's all-reduce while all run, under one planner of paths.

    Args:
        policy: planner of paths, such as ``ecmp`` or ``c4p``.
        fabric: 16 leaves of 8 ports with 8 spines and two bonded ports a card, if not given.
        jobs: how many.
        ranks: of each job; as many as there are hosts for, if not given.
        size: bytes that each rank reduces.
        seed: of the placement and of hashes.

    Raises:
        PlanError: more ranks than hosts, or a planner that cannot plan here.
    """
    where = fabric or LeafSpine(leaves=16, hosts=8, spines=8, ports=2)
    flows, job = rings_of_jobs(where, jobs=jobs, ranks=ranks, size=size, seed=seed)
    paths = plan_paths(policy, flows, where, seed=seed)
    ends = simulate(flows, paths, where).flow_s
    last = np.zeros(jobs)
    np.maximum.at(last, job, ends)
    return JobTimes(paths.planner, tuple(last.tolist()), busiest(flows, paths, where))
