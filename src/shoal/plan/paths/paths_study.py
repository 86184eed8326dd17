"""``shoal explain paths``: which way should the flows of a collective take?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from shoal.core.config import resolve
from shoal.core.errors import require
from shoal.core.parts import Choice, part
from shoal.core.sizes import human_bytes
from shoal.core.svg import Chart, Series
from shoal.core.tables import Table, digits
from shoal.cost.network.collectives import CollectiveFlows, collective, place
from shoal.cost.network.fabric import LeafSpine
from shoal.ir import Explanation, Machine, Progress
from shoal.plan.paths import PATH_PLANNERS
from shoal.plan.paths.compare import PathPlannerResult, compare

_MOST_FLOWS = 4_000_000
_HEALTH = re.compile(r"(\d+)-(\d+)(?:=(\d*\.?\d+))?")


@part
class PathsStudy:
    """Choose network paths for the flows of a collective, and simulate its time.

    Flows share links fairly, and a collective ends with its last flow. Planned single paths are
    compared with hashing and with ideal packet spraying.

    **Examples**

        shoal explain paths --leaves 16 --hosts 8 --spines 8 --collective all_reduce --policy split

        shoal explain paths --policy ecmp --policy c4p --ports 2 --picture loads.svg

        shoal explain paths --broken 3-0 --broken 5-2=0.5 --policy all

        shoal explain paths topology.yaml --collective all_to_all --jitter 0.1 -o json

    Args:
        fabric: a leaf-spine fabric, in YAML, which the options override; or give a machine with a
            fabric.
        leaves: leaf switches; 16 by default.
        hosts: ports of a leaf to hosts; 8.
        spines: spines, the uplinks of a leaf; 8.
        rails: network cards of a node, each connected to a different leaf; 1.
        ports: bonded ports of a card, each connected to a different leaf; 1.
        bandwidth: byte/s of a host; 50e9.
        uplink: byte/s of a link between leaf and spine; those of a host's port.
        broken: LEAF-SPINE that is down, or LEAF-SPINE=SHARE of its bandwidth.
        collective: all_reduce, all_gather, reduce_scatter, all_to_all or broadcast.
        algorithm: ring, halving_doubling, hierarchical, pairwise, direct or tree.
        bytes: bytes that each rank holds.
        ranks: ranks; one on every host if not given.
        placement: ranks on hosts, packed, strided or random.
        policy: ecmp, greedy, on_arrival, split, spray, lp, c4p or all.
        jitter: spread of the start times, as a share of a phase.
        size_jitter: spread of the sizes, as a share.
        resolution: flow ends closer than this share of a phase are treated as simultaneous.
        seed: seed of placement, hashes and jitter.
    """

    subject: ClassVar = "fabric"
    machine: ClassVar = ""

    fabric: Path | None = None
    leaves: int | None = None
    hosts: int | None = None
    spines: int | None = None
    rails: int | None = None
    ports: int | None = None
    bandwidth: float | None = None
    uplink: float | None = None
    broken: tuple[str, ...] = ()
    collective: str = "all_reduce"
    algorithm: str | None = None
    bytes: float = 1e9
    ranks: int | None = None
    placement: str = "random"
    policy: tuple[str, ...] = ("ecmp", "split", "spray")
    jitter: Annotated[float, Ge(0), Le(1)] = 0.0
    size_jitter: Annotated[float, Ge(0), Le(1)] = 0.0
    resolution: Annotated[float, Ge(0)] = 0.0
    seed: Annotated[int, Ge(0)] = 0

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """What every policy reaches, fastest first, and the loads of the links."""
        fabric = self._fabric(machine)
        hosts = place(fabric, self.placement, ranks=self.ranks, seed=self.seed)
        if self.collective == "all_to_all":
            require(
                len(hosts) ** 2 <= _MOST_FLOWS,
                "--ranks",
                len(hosts),
                expected=f"at most {int(_MOST_FLOWS**0.5)} for an all-to-all",
            )
        job = collective(
            self.collective, hosts, self.bytes, algorithm=self.algorithm, fabric=fabric
        )
        policies: list[Choice | str] = [*self.policy]
        if "all" in self.policy:
            # The colouring behind split is about equal links; asked for by name, it says so.
            policies = [name for name in PATH_PLANNERS if name != "split" or fabric.uniform]
        result = compare(
            job,
            fabric,
            policies,
            seed=self.seed,
            start=self.jitter,
            size=self.size_jitter,
            resolution=self.resolution,
            progress=lambda text, share: progress(share, 1.0, text),
        )
        return Explanation(
            blocks=tuple(_blocks(fabric, job, result)),
            data=_record(fabric, job, result),
            picture=lambda: _picture(job, result),
        )

    def _fabric(self, machine: Machine | None) -> LeafSpine:
        """The fabric of the file or of the machine, with the options over it."""
        base = None
        if machine is not None:
            require(
                self.fabric is None,
                "--machine",
                machine.name,
                expected="no file of a fabric beside it",
            )
            require(
                machine.fabric is not None,
                "--machine",
                machine.name,
                expected="a machine whose description has a fabric",
                hint="give --leaves, --hosts and --spines, or a file",
            )
            assert machine.fabric is not None
            base = LeafSpine.of(machine.fabric)
        flags = {
            **{name: getattr(self, name) for name in ("leaves", "hosts", "spines", "rails")},
            "ports": self.ports,
            "bandwidth": self.bandwidth,
            "uplink_bandwidth": self.uplink,
            "health": [_broken(word) for word in self.broken] or None,
        }
        return resolve(LeafSpine, base=base, file=self.fabric, flags=flags).value


def _broken(word: str) -> dict[str, float]:
    match = _HEALTH.fullmatch(word)
    require(
        match is not None,
        "--broken",
        word,
        expected="LEAF-SPINE for links that are down, or LEAF-SPINE=SHARE for slow ones",
        hint="such as 3-0 or 3-0=0.5",
    )
    assert match is not None
    return {"leaf": int(match[1]), "spine": int(match[2]), "share": float(match[3] or 0.0)}


def _record(
    fabric: LeafSpine, job: CollectiveFlows, found: Sequence[PathPlannerResult]
) -> dict[str, Any]:
    return {
        "fabric": fabric.model_dump(mode="json", exclude_none=True),
        "collective": job.name,
        "algorithm": job.algorithm,
        "bytes": job.size,
        "flows": len(job.flows),
        "phases": int(job.repeats.sum()),
        "bound_s": found[0].bound_s,
        "policies": [
            {
                "policy": item.planner,
                "seconds": item.seconds,
                "congestion": item.congestion,
                "connections_per_flow": item.connections,
                "most_connections_on_a_link": item.busiest,
                "uplink_bytes": item.up.tolist(),
                "downlink_bytes": item.down.tolist(),
                "notes": list(item.notes),
            }
            for item in found
        ],
    }


def _picture(job: CollectiveFlows, found: Sequence[PathPlannerResult]) -> str:
    """Bytes of every link between leaf and spine, busiest first, as SVG."""
    series = []
    for item in found:
        loads = sorted((*item.up.ravel().tolist(), *item.down.ravel().tolist()), reverse=True)
        places = [100.0 * i / max(1, len(loads) - 1) for i in range(len(loads))]
        series.append(Series(item.planner, places, loads))
    return Chart(
        title=f"Loads of links, {job.name} by {job.algorithm}",
        description="Bytes on each link between leaf and spine, sorted, for each policy; "
        "a flat line is an even load.",
        x_label="links, busiest first (%)",
        y_label="bytes",
        series=series,
    ).render()


def _blocks(
    fabric: LeafSpine, job: CollectiveFlows, found: Sequence[PathPlannerResult]
) -> list[Table | str]:
    rails = f", {fabric.rails} rails" if fabric.rails > 1 else ""
    ports = f", {fabric.ports} ports a card" if fabric.ports > 1 else ""
    ranked = sorted(found, key=lambda item: (item.seconds, item.connections))
    return [
        f"{fabric.leaves} leaves of {fabric.hosts} hosts, {fabric.spines} spines{rails}{ports}: "
        f"{job.name} of {human_bytes(job.size)} by {job.algorithm}, {len(job.flows):,} different "
        f"flows; no paths take less than {digits(1e3 * found[0].bound_s)} ms",
        Table(
            title="policies, fastest first",
            columns=("policy", "ms", "over bound", "congestion", "paths a flow", "most on a link"),
            rows=tuple(
                (
                    item.planner,
                    digits(1e3 * item.seconds),
                    f"{item.seconds / item.bound_s:.2f}x" if item.bound_s else "",
                    f"{item.congestion:.2f}x",
                    f"{item.connections:.3g}",
                    str(item.busiest or "all"),
                )
                for item in ranked
            ),
            right=" rrrrr",
        ),
        "congestion: bytes on the busiest link over those of ideal spraying",
        *(f"note: {item.planner}: {note}" for item in ranked for note in item.notes),
    ]
