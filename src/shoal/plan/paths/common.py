"""What planners of paths share: pieces of flows by port, and the links that are up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import WITHIN, FlowPaths, Flows


@dataclass(frozen=True)
class Pieces:
    """Flows cut into one piece for each bonded port; ports stay apart on the whole way.

    Args:
        flow: number of the flow, [P].
        port: port that the piece leaves by and arrives at, [P].
        first: leaf that it leaves by, [P].
        last: leaf that it arrives at, [P].
        crossing: it needs a spine, [P].
        phase: of the flow, [P].
        share: of the flow's bytes in each piece.
    """

    flow: np.ndarray
    port: np.ndarray
    first: np.ndarray
    last: np.ndarray
    crossing: np.ndarray
    phase: np.ndarray
    share: float

    def within(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Flow, port and spine of the pieces that need no spine."""
        chosen = ~self.crossing
        return self.flow[chosen], self.port[chosen], np.full(int(chosen.sum()), WITHIN)

    def paths(
        self,
        chosen: np.ndarray,
        share: np.ndarray | float,
        spine: np.ndarray,
        *,
        planner: str,
        notes: tuple[str, ...] = (),
    ) -> FlowPaths:
        """Paths of crossing pieces, with those that need no spine.

        Args:
            chosen: number of the piece of each path, [Q].
            share: of the piece in it, [Q].
            spine: its spine, [Q].
            planner: who chose.
            notes: what a reader should know.
        """
        rest, port, within = self.within()
        part = np.full(len(chosen), share) if np.ndim(share) == 0 else np.asarray(share)
        return FlowPaths.of(
            np.concatenate([self.flow[chosen], rest]),
            np.concatenate([part * self.share, np.full(len(rest), self.share)]),
            np.concatenate([np.asarray(spine, np.int64), within]),
            src_port=np.concatenate([self.port[chosen], port]),
            dst_port=np.concatenate([self.port[chosen], port]),
            planner=planner,
            notes=notes,
        )


def pieces_of(flows: Flows, fabric: LeafSpine) -> Pieces:
    """One piece of every flow for each bonded port.

    Raises:
        PlanError: a host that the fabric does not have.
    """
    flows.check(fabric)
    ports = fabric.ports
    flow = np.repeat(np.arange(len(flows)), ports)
    port = np.tile(np.arange(ports), len(flows))
    first = fabric.leaf(flows.src[flow], port)
    last = fabric.leaf(flows.dst[flow], port)
    crossing = (first != last) & ~flows.inside(fabric)[flow]
    return Pieces(flow, port, first, last, crossing, flows.phase[flow], 1.0 / ports)


def regular_note(flows: Flows) -> tuple[str, ...]:
    """A note where the theorem on single paths says nothing; none where it holds."""
    notes = []
    most = flows.most_ends()
    if most > 1:
        notes.append(
            f"a host sends or receives {most} flows in one phase: the theorem on single paths is "
            "about at most one; the links of hosts may be what binds"
        )
    if len(flows):
        low = np.full(flows.num_phases, np.inf)
        high = np.zeros(flows.num_phases)
        np.minimum.at(low, flows.phase, flows.size)
        np.maximum.at(high, flows.phase, flows.size)
        # An empty phase has no size.
        if (high > low * (1 + 1e-9)).any():
            notes.append(
                "flows of a phase differ in size: paths are assigned by number, not by bytes; "
                "lp weighs bytes"
            )
    return tuple(notes)
