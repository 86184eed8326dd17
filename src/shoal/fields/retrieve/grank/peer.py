"""A peer: documents, a ranker, a log of clicks, and a thread that exchanges them with others.

In each period it asks one neighbour at random: it sends what it has, as ranges of numbers by peer,
and the news that the neighbour lacked when they last spoke. The answer has what this peer lacks,
and what the other has; what that lacks is sent in a second message. A neighbour that cannot be
reached changes nothing: ranking works from the log that is here.

Source: Demers et al., Epidemic Algorithms for Replicated Database Maintenance, 1987 (anti-entropy).
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shoal.core.extras import import_extra
from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.fields.retrieve.grank.entries import (
    ClickEntry,
    EntryRefusedError,
    PeerKey,
    read_entry,
)
from shoal.fields.retrieve.grank.log import ClickLog, Ranges, read_have
from shoal.fields.retrieve.grank.protocols import (
    GossipSettings,
    Ranked,
    Ranker,
    Ranking,
    RetrieveError,
)
from shoal.fields.retrieve.grank.server import MESSAGE_BYTES, gossip_server

_ADDRESS = re.compile(r"[A-Za-z0-9.-]{1,253}:\d{1,5}")
_NEIGHBOURS, _ENTRIES, _TIMEOUT_S, _FAREWELL_S = 64, 500, 5.0, 10.0
# Seconds between looks for entries that have become too old.
_EXPIRE_S = 60.0


@dataclass
class PeerStats:
    """What a peer has done.

    Args:
        sent_bytes: of bodies, questions and answers alike.
        received_bytes: the same.
        exchanges: that it began and that were answered.
        unreachable: that were not.
        refused: entries that were not taken.
        reason: why the newest of them was not.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: int = 0
    unreachable: int = 0
    refused: int = 0
    reason: str = ""


class Peer:
    """Takes part in a network as long as its ``with`` block takes.

    Args:
        documents: name -> text, those that this peer has.
        directory: of its key and its log, for its user alone; made if it is not there.
        join: addresses ``host:port`` of peers; more are learned from them.
        host: address to listen on.
        port: 0 for a free one.
        ranker: a part of the table ``ranker``.
        settings: of the exchange.
        seed: of which neighbours are asked and which clicks are sent.

    Raises:
        RetrieveError: there are no documents, or an address is none.

    Example::

        with Peer(documents, "~/.peer", join=["10.0.0.5:7000"], host="0.0.0.0", port=7000) as peer:
            found = peer.rank("parse dates")
            peer.click("parse dates", found[0].item, [one.item for one in found])
    """

    def __init__(
        self,
        documents: Mapping[str, str],
        directory: Path | str,
        *,
        join: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        ranker: Choice | str | Mapping[str, Any] = "grank",
        settings: GossipSettings | None = None,
        seed: int = 0,
    ) -> None:
        if not documents:
            raise RetrieveError("peer: no documents; give one at least")
        for address in join:
            if not _ADDRESS.fullmatch(address):
                raise RetrieveError(f"peer: join {address!r}; expected host:port")
        root = Path(directory).expanduser()
        self.key = PeerKey.kept(root / "key")
        self.settings = settings or GossipSettings()
        made: Ranker = table("ranker").build(ranker, where="ranker")
        self.ranking: Ranking = made.start(documents, self.key.peer)
        self.log = ClickLog(
            self.settings, root / "clicks.jsonl", self.ranking.add, self.ranking.remove
        )
        self.log.read(time.time())
        self.online, self.stats = True, PeerStats()
        self.address = ""
        self._where, self._neighbours = (host, port), dict.fromkeys(join)
        self._documents, self._draw = frozenset(documents), generator(seed, purpose="gossip")
        # What a neighbour had when it last said so.
        self._had: dict[str, dict[str, Ranges]] = {}
        self.lock, self._over = threading.RLock(), threading.Event()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Listen, and begin to exchange."""
        self.address = self._open.enter_context(gossip_server(self._answer, *self._where))
        thread = threading.Thread(target=self._gossip, name="gossip periods", daemon=True)
        thread.start()
        self._open.callback(thread.join, _FAREWELL_S)
        self._open.callback(self._over.set)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave; the log and the key stay."""
        self._open.close()

    # What its user does

    def rank(
        self, query: str, candidates: Sequence[str] | None = None, limit: int = 10
    ) -> list[Ranked]:
        """The best documents, from what is known here.

        Args:
            query: text.
            candidates: documents to be ranked; those that match, or were clicked, if not given.
            limit: how many are returned.

        Raises:
            RetrieveError: the query has no terms, or a candidate is unknown.
        """
        with self.lock:
            return self.ranking.rank(query, candidates, limit)

    def click(self, query: str, item: str, shown: Sequence[str]) -> ClickEntry:
        """The user has clicked; the entry is signed, kept and passed on.

        Args:
            query: text.
            item: that was clicked.
            shown: the list, from the top.

        Raises:
            RetrieveError: the item is unknown here.
            EntryRefusedError: it was not shown, or the query is empty.
        """
        if item not in self._documents:
            raise RetrieveError(f"click: {item!r} is no document of this peer")
        with self.lock:
            entry = self.key.sign(
                number=self.log.highest(self.key.peer) + 1,
                query=query,
                item=item,
                shown=shown,
                time=time.time(),
            )
            self.log.add(entry, entry.time)
        return entry

    # What it does with others

    def neighbours(self) -> list[str]:
        """Addresses that it knows."""
        with self.lock:
            return list(self._neighbours)

    def exchange(self, address: str) -> bool:
        """Exchange with a neighbour now; False if it cannot be reached or does not answer."""
        with self.lock:
            had = self._had.get(address)
            news = [] if had is None else self._news(had)
            message = {**self._introduction(), "entries": news}
        answer = self._send(address, message)
        if answer is None:
            return False
        with self.lock:
            have = self._take(answer)
            more = self._news(have)
            # What it has once it has taken that.
            self._had[address] = have
        if more:
            answer = self._send(address, {**self._introduction(), "entries": more})
            if answer is not None:
                with self.lock:
                    self._had[address] = self._take(answer)
        return True

    def _gossip(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(self.settings.period_s * self._draw.uniform(0.8, 1.2)):
            if time.monotonic() - looked > _EXPIRE_S:
                looked = time.monotonic()
                with self.lock:
                    self.log.expire(time.time())
            known = self.neighbours()
            if not self.online or not known:
                continue
            try:
                done = self.exchange(known[self._draw.integers(len(known))])
            except EntryRefusedError as cause:  # the neighbour's answer is no message
                done, self.stats.reason = False, str(cause)
            self.stats.exchanges += done
            self.stats.unreachable += not done

    def _introduction(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "known": list(self._neighbours)[:_NEIGHBOURS],
            "have": self.log.have(),
        }

    def _news(self, have: dict[str, Ranges]) -> list[dict[str, Any]]:
        some = self.log.news_for(have, self.key.peer, self._draw)
        return [entry.plain() for entry in some]

    def _answer(self, message: Any, size: int) -> dict[str, Any] | None:
        """To a neighbour that asks."""
        if not self.online:
            return None
        with self.lock:
            self.stats.received_bytes += size
            have = self._take(message)
            lacking = self.log.lacking(have)[:_ENTRIES]
            answer = {**self._introduction(), "entries": [one.plain() for one in lacking]}

        self.stats.sent_bytes += len(json.dumps(answer, separators=(",", ":")))
        return answer

    def _take(self, message: Any) -> dict[str, Ranges]:
        """Learn from a message: addresses, entries; what its sender has.

        An entry that is refused is counted, and the others are taken.

        Raises:
            EntryRefusedError: it is no message.
        """
        if not isinstance(message, dict) or set(message) != {"address", "known", "have", "entries"}:
            raise EntryRefusedError("gossip: expected address, known, have and entries")
        have, entries = read_have(message["have"]), message["entries"]
        known = message["known"]
        if not isinstance(known, list) or not isinstance(entries, list) or len(entries) > _ENTRIES:
            raise EntryRefusedError(f"gossip: expected lists, of at most {_ENTRIES} entries")
        for address in [message["address"], *known]:
            if (
                isinstance(address, str)
                and _ADDRESS.fullmatch(address)
                and address != self.address
                and len(self._neighbours) < _NEIGHBOURS
            ):
                self._neighbours.setdefault(address)
        now = time.time()
        for value in entries:
            try:
                self.log.add(read_entry(value), now)
            except EntryRefusedError as cause:
                self.stats.refused += 1
                self.stats.reason = str(cause)
        return have

    def _send(self, address: str, message: dict[str, Any]) -> Any:
        """The answer; None if there is none."""
        http: Any = import_extra("httpx2", extra="run", purpose="exchanging messages between peers")
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            answer = http.post(
                f"http://{address}/v1/gossip", content=body, timeout=_TIMEOUT_S, trust_env=False
            )
        except http.HTTPError:
            return None
        self.stats.sent_bytes += len(body)
        self.stats.received_bytes += len(answer.content)
        if answer.status_code != 200 or len(answer.content) > MESSAGE_BYTES:
            return None
        try:
            return answer.json()
        except ValueError:
            return None
