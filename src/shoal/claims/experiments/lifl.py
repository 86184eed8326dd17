"""[16] LIFL: do updates that stay in shared memory cost several times less than those that travel?

Source: Qi et al., LIFL: A Lightweight, Event-driven Serverless Platform for Federated Learning,
2024.

Three planes with the same aggregation, receiver and tree on two emulated hosts: LIFL; aggregators
that send each other HTTP; the same through a broker and sidecars. Models of 100 MB go to LIFL, to
one aggregator behind uvicorn, and to one with LIFL's own receiver, which tells what of the ratio is
the receiver's. CPU is that of the planes' processes; those of the clients, which are the same, are
not counted. The A/A run has the baselines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.http_aggregator import HttpAggregator
from shoal.claims.lab.update_rounds import driven
from shoal.core.parts import part
from shoal.fields.federate.lifl.plane import Lifl
from shoal.fields.federate.planes.broker import Broker
from shoal.fields.federate.planes.protocols import AggregationPlane

_LARGE = 25_000_000  # parameters of a model of 100 MB


@part
class LiflClaim(BaseClaim, row=16):
    """A round of updates through each plane, in turn.

    Args:
        clients: updates of a round.
        parameters: of an update.
        rounds: of each plane.
    """

    clients: int = 24
    parameters: int = 6_250_000
    rounds: int = 7

    def collect(self, run: ClaimRun) -> None:
        """Rounds of 25 MB, starts with and without reuse, then rounds of 100 MB."""
        size, count, rounds = self.parameters, self.clients, self.rounds
        if run.quick:
            size, count, rounds = 100_000, 8, 2
        shared = Lifl(hosts=2, capacity=-(-count // 2))
        planes: dict[str, AggregationPlane] = {
            "lifl": shared,
            "direct": Broker(hosts=2, relays=False),
            "broker": Broker(hosts=2),
        }
        if run.quick:
            del planes["broker"]
        said, facts = _rounds(run, planes, size, count, rounds)

        def put(metric: str, what: str, baseline: str) -> None:
            arms = said[run.pick("lifl", baseline)], said[baseline]
            run.put(metric, *([one[what] for one in arm] for arm in arms))

        put("cpu_over_direct", "cpu_s", "direct")
        hops = facts["lifl"]["hop_bytes"] / facts["lifl"]["hops"]
        run.put("hop_bytes", run.pick(hops, 4.0 * size))
        run.put("error", [one["error"] for one in said[run.pick("lifl", "direct")]])
        run.details["facts"] = facts
        if run.quick:
            return
        put("cpu_over_broker", "cpu_s", "broker")
        put("completion_over_broker", "wall_s", "broker")
        put("completion_over_direct", "wall_s", "direct")
        run.progress("without reuse", 0.5)
        anew: dict[str, AggregationPlane] = {
            "lifl": Lifl(hosts=2, capacity=-(-count // 2), reuse=False)
        }
        _, fresh = _rounds(run, anew, 100_000, count, rounds)
        starts = facts["lifl"]["starts"] / fresh["lifl"]["starts"]
        run.put("starts_with_reuse", run.pick(starts, 1.0))
        run.progress("100 MB", 0.6)
        large: dict[str, AggregationPlane] = {
            "lifl": Lifl(store_bytes=4e9),
            "http": HttpAggregator(),
            "same_receiver": Broker(relays=False, tree=False),
        }
        said, facts = _rounds(run, large, _LARGE, 6, rounds)
        put("large_throughput", "wall_s", "http")
        put("large_over_receiver", "wall_s", "same_receiver")
        _, more = _rounds(run, {"lifl": large["lifl"]}, _LARGE, 12, 2)
        grown = more["lifl"]["store_bytes"] / facts["lifl"]["store_bytes"] * 6 / 12
        run.put("memory_per_client", grown)


def _rounds(
    run: ClaimRun, planes: Mapping[str, AggregationPlane], size: int, count: int, rounds: int
) -> tuple[Any, dict[str, Mapping[str, float]]]:
    """What each plane has taken for each round, and what it has counted in the end."""
    with contextlib.ExitStack() as stack:
        arms = {name: stack.enter_context(driven(one, size, count)) for name, one in planes.items()}
        said = run.turns({name: arm.round for name, arm in arms.items()}, rounds, warmup=1)
        return said, {name: arm.plane.facts() for name, arm in arms.items()}
