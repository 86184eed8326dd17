"""What is sent, and over which links: columns of numbers, one row a flow or a piece of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.cost.network.fabric import LeafSpine

WITHIN = -1
"""Spine of a piece that does not leave its leaf."""

SPRAYED = -2
"""Spine of a piece whose packets take all spines in turn."""


@dataclass(frozen=True)
class Flows:
    """Messages between hosts.

    Phases do not overlap: each begins at the end of the previous one, so they are simulated
    separately, with times relative to the beginning of the phase.

    Args:
        src: sending hosts, [F].
        dst: receiving hosts, [F].
        size: bytes, [F].
        start_s: when each begins, [F].
        phase: number of the phase of each, ascending, [F].
    """

    src: np.ndarray
    dst: np.ndarray
    size: np.ndarray
    start_s: np.ndarray
    phase: np.ndarray

    @classmethod
    def of(
        cls,
        src: np.ndarray | list[int],
        dst: np.ndarray | list[int],
        size: np.ndarray | float,
        *,
        start_s: np.ndarray | float = 0.0,
        phase: np.ndarray | int = 0,
    ) -> Flows:
        """Flows from columns; single numbers hold for every flow.

        Raises:
            PlanError: columns of different lengths, or a negative number.
        """
        count = len(src)
        given: dict[str, tuple[Any, type]] = {
            "src": (src, np.int64),
            "dst": (dst, np.int64),
            "size": (size, np.float64),
            "start_s": (start_s, np.float64),
            "phase": (phase, np.int64),
        }
        columns = []
        for name, (values, kind) in given.items():
            column: np.ndarray = np.asarray(values, kind)
            column = np.full(count, column) if column.ndim == 0 else column
            require(
                len(column) == count,
                f"flows.{name}",
                f"{len(column)} values",
                expected=f"{count}, one a flow",
                error=PlanError,
            )
            low = float(column.min()) if count else 0.0
            require(low >= 0, f"flows.{name}", low, expected="no negative number", error=PlanError)
            columns.append(column)
        order = np.argsort(columns[4], kind="stable")
        return cls(*(column[order] for column in columns))

    def __len__(self) -> int:
        return len(self.src)

    @property
    def num_phases(self) -> int:
        """Phases, those without flows included."""
        return int(self.phase[-1]) + 1 if len(self) else 0

    def of_phase(self, phase: int) -> tuple[Flows, np.ndarray]:
        """The flows of one phase, and their numbers among all."""
        first, last = np.searchsorted(self.phase, [phase, phase + 1])
        chosen = np.arange(first, last)
        return self.take(chosen), chosen

    def take(self, chosen: np.ndarray) -> Flows:
        """Some of the flows, in the order given; phases must stay ascending."""
        columns = (self.src, self.dst, self.size, self.start_s, self.phase)
        return Flows(*(column[chosen] for column in columns))

    def starting(self, start_s: np.ndarray) -> Flows:
        """The same flows with other beginnings, [F]."""
        return replace(self, start_s=np.asarray(start_s, np.float64))

    def sized(self, size: np.ndarray) -> Flows:
        """The same flows with other sizes, [F]."""
        return replace(self, size=np.asarray(size, np.float64))

    def check(self, fabric: LeafSpine) -> None:
        """Refuse hosts that the fabric does not have.

        Raises:
            PlanError: names the number.
        """
        for name, column in (("src", self.src), ("dst", self.dst)):
            highest = int(column.max()) if len(column) else 0
            require(
                highest < fabric.num_hosts,
                f"flows.{name}",
                highest,
                expected=f"a host below {fabric.num_hosts}",
                error=PlanError,
            )

    def inside(self, fabric: LeafSpine) -> np.ndarray:
        """Which flows stay inside a node and never reach the fabric, [F]."""
        if fabric.rails == 1:
            return np.asarray(self.src == self.dst)
        return np.asarray(self.src // fabric.rails == self.dst // fabric.rails)

    def most_ends(self) -> int:
        """Most flows that one host sends, or receives, in one phase."""
        if not len(self):
            return 0
        most = 0
        for ends in (self.src, self.dst):
            keys = self.phase * (int(ends.max()) + 1) + ends
            most = max(most, int(np.unique(keys, return_counts=True)[1].max()))
        return most


@dataclass(frozen=True)
class FlowPaths:
    """Where each piece of each flow goes.

    Args:
        flow: number of the flow, [P].
        share: of the flow's bytes in this piece, [P]; those of a flow add up to 1.
        spine: number of the spine, :data:`WITHIN` or :data:`SPRAYED`, [P].
        src_port: bonded port that it leaves by, [P].
        dst_port: bonded port that it arrives at, [P].
        planner: who chose them.
        notes: what a reader should know.
    """

    flow: np.ndarray
    share: np.ndarray
    spine: np.ndarray
    src_port: np.ndarray
    dst_port: np.ndarray
    planner: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        flow: np.ndarray,
        share: np.ndarray | float,
        spine: np.ndarray,
        *,
        planner: str,
        src_port: np.ndarray | int = 0,
        dst_port: np.ndarray | int = 0,
        notes: tuple[str, ...] = (),
    ) -> FlowPaths:
        """Paths from columns; single numbers hold for every piece."""
        flow = np.asarray(flow, np.int64)

        def column(values: np.ndarray | float, kind: type) -> np.ndarray:
            array: np.ndarray = np.asarray(values, kind)
            return np.full(len(flow), array) if array.ndim == 0 else array

        return cls(
            flow,
            column(share, np.float64),
            column(spine, np.int64),
            column(src_port, np.int64),
            column(dst_port, np.int64),
            planner,
            notes,
        )

    def __len__(self) -> int:
        return len(self.flow)

    def take(self, chosen: np.ndarray) -> FlowPaths:
        """Some of the pieces."""
        return replace(
            self,
            flow=self.flow[chosen],
            share=self.share[chosen],
            spine=self.spine[chosen],
            src_port=self.src_port[chosen],
            dst_port=self.dst_port[chosen],
        )

    def ends(self, flows: Flows, fabric: LeafSpine) -> tuple[np.ndarray, np.ndarray]:
        """Leaf that each piece leaves by, and that it arrives at, [P] each."""
        return (
            fabric.leaf(flows.src[self.flow], self.src_port),
            fabric.leaf(flows.dst[self.flow], self.dst_port),
        )

    def links(self, flows: Flows, fabric: LeafSpine) -> tuple[np.ndarray, np.ndarray | None]:
        """Numbers of the links of each piece, [P, W], and what share of it each carries.

        The shares are None where every link carries the whole piece.
        """
        src, dst = flows.src[self.flow], flows.dst[self.flow]
        first, last = self.ends(flows, fabric)
        inside = flows.inside(fabric)[self.flow]
        crossing = self.spine != WITHIN
        spread = self.spine == SPRAYED
        none = fabric.nothing
        ends = [
            np.where(inside, none, fabric.host_up(src, self.src_port)),
            np.where(inside, none, fabric.host_down(dst, self.dst_port)),
        ]
        if not spread.any() or fabric.uniform:
            up = np.where(spread, fabric.all_up(first), fabric.up(first, self.spine))
            down = np.where(spread, fabric.all_down(last), fabric.down(last, self.spine))
            middle = [np.where(crossing, up, none), np.where(crossing, down, none)]
            return np.stack([*ends, *middle], axis=1).astype(np.int32), None
        # Spraying over unequal links: packets are distributed by what each path can carry.
        path_PS = np.minimum(fabric.uplinks[first], fabric.uplinks[last])
        weight_PS = path_PS / path_PS.sum(1, keepdims=True)
        spines = np.arange(fabric.spines)
        weight_PS = np.where(spread[:, None], weight_PS, self.spine[:, None] == spines)
        weight_PS = np.where(crossing[:, None], weight_PS, 0.0)
        up_PS = fabric.up(first[:, None], spines)
        down_PS = fabric.down(last[:, None], spines)
        links = np.concatenate([np.stack(ends, axis=1), up_PS, down_PS], axis=1)
        weights = np.concatenate([np.ones((len(self), 2)), weight_PS, weight_PS], axis=1)
        return np.where(weights > 0, links, none).astype(np.int32), weights

    def check(self, flows: Flows, fabric: LeafSpine) -> None:
        """What any paths must keep: every byte goes somewhere, over links that are up.

        Raises:
            PlanError: names the first flow or link that breaks a rule.
        """
        whole = np.bincount(self.flow, self.share, len(flows))
        wrong = np.flatnonzero(np.abs(whole - 1.0) > 1e-9)
        if len(wrong):
            raise PlanError(
                f"paths of {self.planner}: flow {wrong[0]} has {whole[wrong[0]]:g} of its bytes "
                "on paths; expected all of them, once"
            )
        first, last = self.ends(flows, fabric)
        inside = flows.inside(fabric)[self.flow]
        stray = (self.spine == WITHIN) & (first != last) & ~inside
        if stray.any():
            raise PlanError(
                f"paths of {self.planner}: flow {self.flow[stray][0]} goes from leaf "
                f"{first[stray][0]} to leaf {last[stray][0]} without a spine; name one"
            )
        pinned = self.spine >= 0
        spine = self.spine[pinned]
        if len(spine) and int(spine.max()) >= fabric.spines:
            raise PlanError(
                f"paths of {self.planner}: spine {int(spine.max())}; "
                f"there are 0 to {fabric.spines - 1}"
            )
        rate = np.minimum(fabric.uplinks[first[pinned], spine], fabric.uplinks[last[pinned], spine])
        if (rate <= 0).any():
            at = int(np.flatnonzero(rate <= 0)[0])
            raise PlanError(
                f"paths of {self.planner}: flow {self.flow[pinned][at]} takes spine {spine[at]} "
                f"from leaf {first[pinned][at]} to leaf {last[pinned][at]}, and a link of it is "
                "down; plan again with the fabric as it is"
            )


def demand(flows: Flows, fabric: LeafSpine) -> np.ndarray:
    """Flows from each leaf to each other leaf, [L, L], when a card's ports stay apart.

    With several ports a flow counts once for each, since a part of it leaves by each.
    """
    out = np.zeros((fabric.leaves, fabric.leaves), np.int64)
    away = ~flows.inside(fabric)
    for port in range(fabric.ports):
        first, last = fabric.leaf(flows.src, port), fabric.leaf(flows.dst, port)
        chosen = away & (first != last)
        np.add.at(out, (first[chosen], last[chosen]), 1)
    return out


def link_bytes(flows: Flows, paths: FlowPaths, fabric: LeafSpine) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that cross each uplink and each downlink in all phases, [L, S] each."""
    size = flows.size[paths.flow] * paths.share
    first, last = paths.ends(flows, fabric)
    out = []
    for leaf in (first, last):
        load = np.zeros((fabric.leaves, fabric.spines))
        pinned = paths.spine >= 0
        np.add.at(load, (leaf[pinned], paths.spine[pinned]), size[pinned])
        spread = paths.spine == SPRAYED
        if spread.any():
            path_PS = np.minimum(fabric.uplinks[first[spread]], fabric.uplinks[last[spread]])
            np.add.at(
                load, leaf[spread], size[spread, None] * path_PS / path_PS.sum(1, keepdims=True)
            )
        out.append(load)
    return out[0], out[1]


def worst_bytes(flows: Flows, paths: FlowPaths, fabric: LeafSpine) -> np.ndarray:
    """Bytes on the busiest link between leaf and spine in each phase, [phases]."""
    out = np.zeros(flows.num_phases)
    order = np.argsort(paths.flow, kind="stable")
    cuts = np.searchsorted(flows.phase[paths.flow[order]], np.arange(flows.num_phases + 1))
    for phase, (begin, end) in enumerate(pairwise(cuts.tolist())):
        up, down = link_bytes(flows, paths.take(order[begin:end]), fabric)
        out[phase] = max(up.max(), down.max())
    return out


def lower_bound_s(flows: Flows, fabric: LeafSpine) -> np.ndarray:
    """Seconds that no choice of paths can beat, for each phase, [phases].

    What a host must send or receive over its ports, and what must leave or reach a leaf over
    all its links together. On a fabric of equal links and phases in which ports stay apart,
    ideal spraying reaches it.
    """
    phases = flows.num_phases
    worst = np.zeros(phases)
    if not phases:
        return worst
    away = ~flows.inside(fabric)
    for leaving in (True, False):
        ends = flows.src if leaving else flows.dst
        key = flows.phase * fabric.num_hosts + ends
        sums = np.bincount(key[away], flows.size[away], phases * fabric.num_hosts)
        by_phase = sums.reshape(phases, -1).max(1)
        worst = np.maximum(worst, by_phase / fabric.bandwidth)
        out = fabric.uplinks.sum(1)
        if fabric.ports > 1:
            # A flow may use any of the leaves of its card.
            out = out.reshape(-1, fabric.ports).sum(1)
        group = fabric.leaf(ends) // fabric.ports
        other = fabric.leaf(flows.dst if leaving else flows.src) // fabric.ports
        chosen = away & (group != other)
        key = flows.phase * len(out) + group
        sums = np.bincount(key[chosen], flows.size[chosen], phases * len(out))
        worst = np.maximum(worst, (sums.reshape(phases, -1) / out).max(1))
    return worst
