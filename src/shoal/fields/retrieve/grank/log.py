"""The clicks that a peer knows: its own and those that it was sent.

An entry comes in once; of each peer the newest are kept, up to a quota and an age. What is kept
depends on the set of entries that came, not on their order. Two entries of a peer with one number,
which an honest peer never signs, leave the one with the smaller hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.files import write_atomic
from shoal.fields.retrieve.grank.entries import ClickEntry, EntryRefusedError, read_entry
from shoal.fields.retrieve.grank.protocols import GossipSettings, RetrieveError

Ranges = list[list[int]]
"""Numbers as inclusive pairs, ascending: ``[[1, 40], [43, 43]]``."""

_PEERS = 100_000


class ClickLog:
    """Entries by peer and number.

    Args:
        settings: quota, age and clock skew.
        path: file to which each new entry is appended; None to keep none.
        added: called with an entry that is new.
        removed: called with one that is dropped.
    """

    def __init__(
        self,
        settings: GossipSettings,
        path: Path | None = None,
        added: Callable[[ClickEntry], None] = lambda entry: None,
        removed: Callable[[ClickEntry], None] = lambda entry: None,
    ) -> None:
        self.settings, self._path = settings, path
        self._added, self._removed = added, removed
        self._peers: dict[str, dict[int, ClickEntry]] = {}
        self._highest: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._peers.values()))

    def __iter__(self) -> Iterator[ClickEntry]:
        for entries in self._peers.values():
            yield from entries.values()

    def highest(self, peer: str) -> int:
        """The highest number that was seen of a peer; 0 for none."""
        return self._highest.get(peer, 0)

    def add(self, entry: ClickEntry, now: float) -> bool:
        """Take an entry, unless it is there or too old; whether it was new.

        Raises:
            EntryRefusedError: a wrong signature, or a time that has not come.
        """
        entries = self._peers.get(entry.peer, {})
        before = entries.get(entry.number)
        if before is not None and before.digest == entry.digest:
            return False
        if entry.time > now + self.settings.skew_s:
            raise EntryRefusedError(
                f"click {entry.number} of {entry.peer[:8]}: made {entry.time - now:.0f} s from "
                f"now; clocks may be {self.settings.skew_s:g} s apart"
            )
        if self._dropped(entry, now):
            return False
        entry.verify()
        if before is not None and before.digest < entry.digest:
            return False
        if not entries and len(self._peers) >= _PEERS:
            raise EntryRefusedError(f"click of {entry.peer[:8]}: {_PEERS} peers are known already")
        self._append(entry)
        if before is not None:
            self._drop(before)
        self._peers.setdefault(entry.peer, {})[entry.number] = entry
        self._highest[entry.peer] = max(self.highest(entry.peer), entry.number)
        self._added(entry)
        floor = self._highest[entry.peer] - self.settings.quota
        for number in [one for one in self._peers[entry.peer] if one <= floor]:
            self._drop(self._peers[entry.peer][number])
        return True

    def expire(self, now: float) -> None:
        """Drop what has become too old."""
        for entry in [one for one in self if self._dropped(one, now)]:
            self._drop(entry)

    def have(self) -> dict[str, Ranges]:
        """Peer -> numbers that are here, or were and are not wanted again."""
        result = {}
        for peer, highest in self._highest.items():
            floor = max(0, highest - self.settings.quota)
            numbers = sorted(self._peers.get(peer, {}))
            result[peer] = ranges([*([(1, floor)] if floor else []), *((n, n) for n in numbers)])
        return result

    def lacking(self, have: Mapping[str, Ranges]) -> list[ClickEntry]:
        """Entries that another peer does not have, each peer's newest first."""
        result = []
        for peer, entries in self._peers.items():
            theirs = have.get(peer, [])
            result += [
                entries[one] for one in sorted(entries, reverse=True) if not _within(one, theirs)
            ]
        return result

    def news_for(
        self, have: Mapping[str, Ranges], me: str, draw: np.random.Generator
    ) -> list[ClickEntry]:
        """What is sent first: the newest own entries and some of others, none that it has."""
        lacking = self.lacking(have)
        own = [one for one in lacking if one.peer == me][: self.settings.newest]
        others = [one for one in lacking if one.peer != me]
        some = draw.permutation(len(others))[: self.settings.sample]
        return own + [others[at] for at in some]

    def read(self, now: float) -> None:
        """Take the entries of the file; a last line that was cut off is left out.

        Raises:
            RetrieveError: another line is damaged.
        """
        if self._path is None or not self._path.exists():
            return
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            write_atomic(self._path, whole)
        path, self._path, at = self._path, None, 0
        try:
            for line in whole.splitlines():
                at += 1
                entry = read_entry(json.loads(line))
                self.add(entry, max(now, entry.time))  # this clock may have been set back
        except (ValueError, EntryRefusedError) as cause:
            raise RetrieveError(f"{path}, line {at}: no click ({cause}); remove it") from cause
        finally:
            self._path = path

    def _append(self, entry: ClickEntry) -> None:
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(json.dumps(entry.plain()).encode() + b"\n")

    def _dropped(self, entry: ClickEntry, now: float) -> bool:
        """Too old, or below the quota."""
        floor = self.highest(entry.peer) - self.settings.quota
        return entry.number <= floor or entry.time < now - self.settings.max_age_s

    def _drop(self, entry: ClickEntry) -> None:
        del self._peers[entry.peer][entry.number]
        self._removed(entry)


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending pairs, those that touch joined."""
    result: Ranges = []
    for low, high in pairs:
        if result and low <= result[-1][1] + 1:
            result[-1][1] = max(result[-1][1], high)
        else:
            result.append([low, high])
    return result


def read_have(value: Any) -> dict[str, Ranges]:
    """What another peer says it has.

    Raises:
        EntryRefusedError: it is not written like that.
    """

    def pair(one: object) -> bool:
        return isinstance(one, list) and len(one) == 2 and all(type(n) is int for n in one)

    if not isinstance(value, dict) or not all(
        isinstance(some, list) and all(map(pair, some)) for some in value.values()
    ):
        raise EntryRefusedError("gossip: have: expected peer -> pairs of numbers")
    return value


def _within(number: int, pairs: Ranges) -> bool:
    return any(low <= number <= high for low, high in pairs)
