"""Collectives as phases of flows, by algorithm and by where the ranks are.

==================  ===============================================================
algorithm           phases for N ranks and S bytes
==================  ===============================================================
ring                all-reduce 2 (N - 1), gather or scatter N - 1, of S / N
halving_doubling    all-reduce 2 log2 N, of S / 2, S / 4 ...; N a power of two
hierarchical        all-reduce inside each leaf, across leaves, inside again
pairwise            all-to-all N - 1: at step k to the rank k places on, S / N
direct              all-to-all in one phase of N (N - 1) flows
tree                broadcast log2 N
==================  ===============================================================

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations
in MPICH, 2005; Patarasuk and Yuan, Bandwidth Optimal All-reduce, 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import PlanError, nearest, require
from shoal.core.random import generator
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import Flows

PLACEMENTS = ("packed", "strided", "random")

_Steps = list[tuple[np.ndarray, np.ndarray, float, int]]
"""(sending ranks, receiving ranks, bytes, how many such phases) of each step."""


@dataclass(frozen=True)
class CollectiveFlows:
    """A collective as flows.

    Args:
        flows: of its different phases.
        repeats: how often each phase occurs, [phases].
        size: bytes that each rank holds.
    """

    name: str
    algorithm: str
    flows: Flows
    repeats: np.ndarray
    size: float

    def seconds(self, phase_s: np.ndarray) -> float:
        """Of the whole collective, from those of its different phases."""
        return float(phase_s @ self.repeats)


def place(
    fabric: LeafSpine, how: str = "packed", *, ranks: int | None = None, seed: int = 0
) -> np.ndarray:
    """Host of every rank, [N].

    Args:
        fabric: where.
        how: ``packed`` fills leaf after leaf, ``strided`` deals ranks to leaves in turn,
            and ``random`` is what is left to a job on a busy cluster.
        ranks: how many; all hosts, if not given.
        seed: of ``random``.

    Raises:
        PlanError: no such placement, or more ranks than hosts.
    """
    hosts = fabric.num_hosts
    count = hosts if ranks is None else ranks
    require(1 <= count <= hosts, "ranks", count, expected=f"1 to {hosts} hosts", error=PlanError)
    if how == "random":
        return generator(seed, purpose="place ranks").permutation(hosts)[:count]
    if how == "strided":
        leaf = fabric.leaf(np.arange(hosts))
        # The place of a host on its leaf, then the leaf.
        order = np.lexsort((leaf, _place_on(leaf)))
        return np.asarray(order[:count])
    require(
        how == "packed",
        "placement",
        how,
        expected=", ".join(PLACEMENTS),
        hint=nearest(how, PLACEMENTS),
        error=PlanError,
    )
    return np.arange(count)


def _place_on(leaf: np.ndarray) -> np.ndarray:
    """How many of the same leaf came before, for each."""
    order = np.argsort(leaf, kind="stable")
    first = np.searchsorted(leaf[order], leaf[order])
    out = np.empty(len(leaf), np.int64)
    out[order] = np.arange(len(leaf)) - first
    return out


def collective(
    name: str,
    hosts: np.ndarray | Sequence[int],
    size: float,
    *,
    algorithm: str | None = None,
    fabric: LeafSpine | None = None,
) -> CollectiveFlows:
    """The flows of a collective.

    Args:
        name: a key of :data:`ALGORITHMS`.
        hosts: host of each rank, [N].
        size: bytes that each rank holds (all-reduce, all-to-all, broadcast), or that it
            holds in the end (all-gather) or in the beginning (reduce-scatter).
        algorithm: one of :data:`ALGORITHMS` of that name; its first, if not given.
        fabric: needed by ``hierarchical``, which follows the leaves.

    Raises:
        PlanError: no such collective or algorithm, or one that these ranks cannot run.
    """
    require(
        name in ALGORITHMS,
        "collective",
        name,
        expected=", ".join(ALGORITHMS),
        hint=nearest(name, ALGORITHMS),
        error=PlanError,
    )
    known = ALGORITHMS[name]
    chosen = algorithm or next(iter(known))
    require(
        chosen in known,
        f"algorithm of {name}",
        chosen,
        expected=", ".join(known),
        hint=nearest(chosen, known),
        error=PlanError,
    )
    where = np.asarray(hosts, np.int64)
    count = len(where)
    require(count >= 2, "ranks", count, expected="at least 2", error=PlanError)
    require(
        len(np.unique(where)) == count,
        "ranks",
        f"{count} on {len(np.unique(where))} hosts",
        expected="a host of its own for each",
        error=PlanError,
    )
    require(size > 0, "bytes", size, expected="above 0", error=PlanError)
    steps = known[chosen](count, float(size), where, fabric)
    src = np.concatenate([where[step[0]] for step in steps])
    dst = np.concatenate([where[step[1]] for step in steps])
    lengths = [len(step[0]) for step in steps]
    flows = Flows.of(
        src,
        dst,
        np.repeat([step[2] for step in steps], lengths),
        phase=np.repeat(np.arange(len(steps)), lengths),
    )
    repeats = np.array([step[3] for step in steps], np.float64)
    return CollectiveFlows(name, chosen, flows, repeats, float(size))


def together(collectives: Sequence[CollectiveFlows]) -> tuple[Flows, np.ndarray]:
    """One-phase collectives of several jobs at the same time, and the job of each flow.

    A ring's steps are alike and follow each other closely, so a job's ring is one phase in
    which every rank sends all that it has to.

    Raises:
        PlanError: a collective has phases that differ.
    """
    src, dst, size, job = [], [], [], []
    for index, item in enumerate(collectives):
        require(
            item.flows.num_phases == 1,
            f"{item.name} by {item.algorithm}",
            f"{item.flows.num_phases} different phases",
            expected="one, such as a ring's",
            error=PlanError,
        )
        src.append(item.flows.src)
        dst.append(item.flows.dst)
        size.append(item.flows.size * item.repeats[0])
        job.append(np.full(len(item.flows), index))
    flows = Flows.of(np.concatenate(src), np.concatenate(dst), np.concatenate(size))
    return flows, np.concatenate(job)


def jittered(
    flows: Flows, bound_s: np.ndarray, *, start: float = 0.0, size: float = 0.0, seed: int = 0
) -> Flows:
    """The flows of ranks that are not in step, or whose messages are not equal.

    Args:
        flows: in step.
        bound_s: seconds that each phase takes at least, [phases].
        start: beginnings are uniform in this share of them.
        size: sizes are uniform in one minus to one plus this.
        seed: of both.

    Raises:
        PlanError: a share outside 0 to 1.
    """
    for name, value in (("start", start), ("size", size)):
        require(0.0 <= value <= 1.0, f"jitter of {name}", value, expected="0 to 1", error=PlanError)
    random = generator(seed, purpose="jitter of flows")
    begin = random.random(len(flows)) * start * bound_s[flows.phase]
    factor = 1.0 + size * (2.0 * random.random(len(flows)) - 1.0)
    return flows.starting(flows.start_s + begin).sized(flows.size * factor)


# ---------------------------------------------------------------------- algorithms


def _ring(rounds: int) -> Callable[..., _Steps]:
    def steps(count: int, size: float, where: np.ndarray, fabric: LeafSpine | None) -> _Steps:
        ranks = np.arange(count)
        return [(ranks, (ranks + 1) % count, size / count, rounds * (count - 1))]

    return steps


def _halving_doubling(
    count: int, size: float, where: np.ndarray, fabric: LeafSpine | None
) -> _Steps:
    power = count.bit_length() - 1
    require(
        count == 1 << power,
        "ranks of halving_doubling",
        count,
        expected="a power of two",
        error=PlanError,
    )
    ranks = np.arange(count)
    # Halves are scattered, and gathered again the other way round.
    return [(ranks, ranks ^ (1 << k), size / (1 << (k + 1)), 2) for k in range(power)]


def _hierarchical(count: int, size: float, where: np.ndarray, fabric: LeafSpine | None) -> _Steps:
    require(
        fabric is not None,
        "fabric",
        None,
        expected="a fabric, whose leaves a hierarchical algorithm follows",
        error=PlanError,
    )
    assert fabric is not None
    leaf = fabric.leaf(where)
    own, members = np.unique(leaf, return_counts=True)
    inner, outer = int(members[0]), len(own)
    require(
        bool((members == inner).all()),
        "ranks on leaves",
        members.tolist(),
        expected="equally many on each, for a hierarchical algorithm",
        hint="choose ring, or place ranks evenly",
        error=PlanError,
    )
    order = np.argsort(leaf, kind="stable").reshape(outer, inner)
    steps: _Steps = []
    if inner > 1:
        # Scattered inside before, gathered inside after: the same phases twice.
        steps.append(
            (order.ravel(), np.roll(order, -1, axis=1).ravel(), size / inner, 2 * (inner - 1))
        )
    if outer > 1:
        steps.append(
            (
                order.ravel(),
                np.roll(order, -1, axis=0).ravel(),
                size / inner / outer,
                2 * (outer - 1),
            )
        )
    return steps


def _pairwise(count: int, size: float, where: np.ndarray, fabric: LeafSpine | None) -> _Steps:
    ranks = np.arange(count)
    return [(ranks, (ranks + k) % count, size / count, 1) for k in range(1, count)]


def _direct(count: int, size: float, where: np.ndarray, fabric: LeafSpine | None) -> _Steps:
    src, dst = np.divmod(np.arange(count * count), count)
    other = src != dst
    return [(src[other], dst[other], size / count, 1)]


def _tree(count: int, size: float, where: np.ndarray, fabric: LeafSpine | None) -> _Steps:
    steps: _Steps = []
    have = 1
    while have < count:
        more = min(have, count - have)
        ranks = np.arange(more)
        steps.append((ranks, ranks + have, size, 1))
        have += more
    return steps


ALGORITHMS: dict[str, dict[str, Callable[..., _Steps]]] = {
    "all_reduce": {
        "ring": _ring(2),
        "halving_doubling": _halving_doubling,
        "hierarchical": _hierarchical,
    },
    "all_gather": {"ring": _ring(1)},
    "reduce_scatter": {"ring": _ring(1)},
    "all_to_all": {"pairwise": _pairwise, "direct": _direct},
    "broadcast": {"tree": _tree},
}
"""Collective -> algorithm -> its steps; the first algorithm is the usual one."""
