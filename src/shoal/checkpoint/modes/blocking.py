"""Saving while training waits: nothing goes on behind, nothing is copied.

The slowest way and the one that needs no memory. Copies are still written once and in equal
shares.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.modes.cost import estimate, seconds_of
from shoal.checkpoint.protocols import SaveTicket
from shoal.core.errors import CheckpointError
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.pieces import Given
    from shoal.checkpoint.store import Store
    from shoal.ir import Estimate, Machine, Work


@part
class Blocking:
    """Write directly from the tensors while training waits."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """The disk's time."""
        return estimate(seconds_of(work, machine)[1], 0.0)

    def build(self, store: Store, peers: Peers, *, device: str = "cpu") -> BlockingSaver:
        return BlockingSaver(store, peers)


class BlockingSaver:
    """See :class:`~shoal.checkpoint.protocols.Saver`."""

    def __init__(self, store: Store, peers: Peers) -> None:
        # Planning asks this module for a price alone, and need not read those.
        from shoal.checkpoint.background import StoreSession
        from shoal.checkpoint.plan import WritePlanner

        self._store = store
        self._peers = peers
        self._session = StoreSession(store, peers)
        self._planner = WritePlanner(peers)
        self._over: list[SaveTicket] = []

    def save(self, step: int, pieces: Given, meta: Mapping[str, Any]) -> SaveTicket:
        ticket = SaveTicket(step)
        begin = time.perf_counter()
        planned = self._planner.plan(pieces)
        ticket.blocked("plan", time.perf_counter() - begin)
        ticket.bytes, ticket.fresh_plan = planned.image.size, planned.fresh
        begin = time.perf_counter()
        error: CheckpointError | None = None
        try:
            self._store.save_chosen(
                step,
                planned.chosen(pieces),
                meta,
                rank=self._peers.rank,
                world=self._peers.world,
                barrier=self._peers.barrier,
                attempt=self._session.attempt(),
                ticket=ticket,
            )
        except CheckpointError as cause:
            error = cause
        ticket.blocked("write", time.perf_counter() - begin)
        ticket.settle(error)
        self._over.append(ticket)
        return ticket

    def before_update(self, names: Collection[str] | None = None) -> None:
        """Nothing is under way."""

    def finished(self) -> list[SaveTicket]:
        over, self._over = self._over, []
        return over

    def close(self, *, abandon: bool = False) -> None:
        self._session.close()
