"""Saves that go on behind training: writing, voting, and the commit.

Every rank writes its file in a thread of its own and then votes: a small file that says what it
wrote, or why it could not. Rank 0 looks for the votes and commits when all are there; one refusal
is enough to drop the save. Training waits for none of this.

Source: Wan et al., ByteCheckpoint, 2024, section 4.2 (asynchronous pipeline); Maurya et al.,
DataStates-LLM, 2024, section IV (asynchronous consolidation by two-phase commit).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.image import Chunk, Image, write_image
from shoal.checkpoint.peers import call_on_first
from shoal.checkpoint.protocols import SaveTicket
from shoal.checkpoint.shards import shard_name
from shoal.checkpoint.store import refusal_names, refusal_of, refuse
from shoal.core.errors import CheckpointError, ShoalError

if TYPE_CHECKING:
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.storage import Draft
    from shoal.checkpoint.store import Store

_POLL_S = (0.002, 0.1)
# Pauses are so many times as long as a look at the votes, which takes longer with many ranks.
_POLL_SHARE = 200
# A rank that is alive writes its file in less; one that is not never votes.
_VOTES_S = 600.0


class StoreSession:
    """One run's right to write into a store.

    Args:
        peers: the ranks of the run; all of them open it.

    Raises:
        CheckpointError: on every rank, if another run writes there or the place refuses.
    """

    def __init__(self, store: Store, peers: Peers) -> None:
        self._held = contextlib.ExitStack()

        def begin() -> str:
            self._held.enter_context(store.hold())
            return secrets.token_hex(4)

        self._name = call_on_first(peers, begin)
        self._saves = 0

    def attempt(self) -> str:
        """A name for the next save, the same on all ranks and never used before."""
        self._saves += 1
        return f"{self._name}-{self._saves}"

    def close(self) -> None:
        """Let others write there."""
        self._held.close()


class Background:
    """Writes images into a store, one after the other."""

    def __init__(self, store: Store, peers: Peers) -> None:
        self.store = store
        self.peers = peers
        self._session = StoreSession(store, peers)
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-write")
        self._settlers = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        self._tickets: list[SaveTicket] = []
        self._abandoned = threading.Event()

    def submit(
        self,
        ticket: SaveTicket,
        image: Image,
        chunks: Iterable[Chunk],
        meta: Mapping[str, Any],
        checksums: Mapping[str, int] | None = None,
    ) -> None:
        """Write an image; called by all ranks for the same saves.

        Args:
            ticket: settled when all ranks' files are a checkpoint, or cannot become one.
            image: this rank's file.
            chunks: its bytes; read in a thread of this object.
            meta: plain data, already checked.
            checksums: see :func:`~shoal.checkpoint.image.write_image`.
        """
        draft = self.store.storage.draft(ticket.step, self._session.attempt())
        self._tickets.append(ticket)
        ticket.bytes = image.size
        self._writers.submit(self._write, ticket, draft, image, chunks, dict(meta), checksums)

    def finished(self) -> list[SaveTicket]:
        """See :class:`~shoal.checkpoint.protocols.Saver`."""
        over = [ticket for ticket in self._tickets if ticket.done()]
        self._tickets = [ticket for ticket in self._tickets if not ticket.done()]
        return over

    def pending(self) -> list[SaveTicket]:
        """Tickets under way, oldest first."""
        return [ticket for ticket in self._tickets if not ticket.done()]

    def close(self, *, abandon: bool) -> None:
        """See :class:`~shoal.checkpoint.protocols.Saver`."""
        if abandon:
            self._abandoned.set()
        self._writers.shutdown(wait=not abandon, cancel_futures=abandon)
        if not abandon:  # else the threads end by themselves
            self._settlers.shutdown()
        self._session.close()

    def _write(
        self,
        ticket: SaveTicket,
        draft: Draft,
        image: Image,
        chunks: Iterable[Chunk],
        meta: dict[str, Any],
        checksums: Mapping[str, int] | None,
    ) -> None:
        failures: list[ShoalError] = []
        rank = self.peers.rank
        try:
            with self.store.noting(failures, ticket.step, image.size):
                self.store.require_room(ticket.step, image.size)
                draft.prepare()
                vote = ticket.timed(
                    lambda: write_image(draft, rank, image, chunks, checksums), phase="write"
                )
                self.store.vote(draft, rank, vote, ticket)
        except Exception as cause:  # a thread has no caller: the ticket reports it
            failures.append(CheckpointError(f"step {ticket.step}: {type(cause).__name__}: {cause}"))
        finally:
            # Code that waits for the memory that chunks come from continues.
            if hasattr(chunks, "close"):
                chunks.close()
        if failures:
            with contextlib.suppress(OSError, ShoalError):
                draft.prepare()
            refuse(draft, rank, failures[0])
        if self._abandoned.is_set():
            ticket.settle(
                CheckpointError(f"step {ticket.step}: not saved, because the run was aborted")
            )
        else:
            self._settlers.submit(self._settle, ticket, draft, meta, failures)

    def _settle(
        self,
        ticket: SaveTicket,
        draft: Draft,
        meta: dict[str, Any],
        failures: list[ShoalError],
    ) -> None:
        try:
            if self.peers.rank:
                ticket.settle(failures[0] if failures else None)
                return
            with self.store.noting(failures, ticket.step):
                if not failures:
                    ticket.timed(lambda: self._await_votes(draft), phase="votes")
                    ticket.ranks = ticket.timed(
                        lambda: self.store.commit(draft, self.peers.world, meta), phase="commit"
                    )
            if failures:
                draft.discard()
            else:
                with self.store.noting(failures, ticket.step):
                    ticket.timed(lambda: self.store.retain(ticket.step), phase="retain")
            ticket.settle(failures[0] if failures else None)
        except Exception as cause:
            ticket.settle(CheckpointError(f"step {ticket.step}: {type(cause).__name__}: {cause}"))

    def _await_votes(self, draft: Draft) -> None:
        pause, limit = _POLL_S
        missing = set(range(self.peers.world))
        refusals: list[str] = []
        until = time.monotonic() + _VOTES_S
        while missing:
            # One listing and not two questions for each rank.
            begin = time.perf_counter()
            names = draft.names()
            for rank in sorted(missing):
                refused = not names.isdisjoint(refusal_names(rank))
                if refused:
                    refusals.append(f"rank {rank}: {refusal_of(draft, rank)}")
                if refused or shard_name(rank) in names:
                    missing.discard(rank)
            pause = max(pause, _POLL_SHARE * (time.perf_counter() - begin))
            if missing and (self._abandoned.wait(pause) or time.monotonic() > until):
                refusals.append(
                    f"{self.store.where}: step {draft.step} is not saved, because rank "
                    f"{min(missing)} has not written its file; see its log"
                )
                break
            pause = min(limit, 1.5 * pause)
        # Only now, so that no rank writes into a draft that was thrown away.
        if refusals:
            raise CheckpointError(refusals[0])
