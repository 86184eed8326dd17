"""Clicks as signed entries of a log that only grows.

The name of a peer is its public key (Ed25519), so an entry proves whose it is. Its hash is that of
what was signed. Format: JSON, keys sorted, without spaces.

Source: Bernstein et al., High-speed high-security signatures, 2012 (Ed25519).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic

_KEY, _SIGNATURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{128}")
_TEXT, _SHOWN, _NUMBER = 1000, 100, 2**53
_PURPOSE = "signatures of clicks"


class EntryRefusedError(ShoalError):
    """A click that is not taken; the peer goes on without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickEntry:
    """Somebody searched, saw a list, and clicked.

    Args:
        peer: public key, 64 hexadecimal digits.
        number: of the entry among the peer's, from 1.
        query: text.
        item: that was clicked.
        shown: the list, from the top.
        time: seconds since 1970, by the peer's clock.
        signature: of the rest, 128 hexadecimal digits.
    """

    peer: str
    number: int
    query: str
    item: str
    shown: tuple[str, ...]
    time: float
    signature: str = ""

    @functools.cached_property
    def message(self) -> bytes:
        """What is signed."""
        return json.dumps([self.peer, self.number, self.query, self.item, self.shown, self.time],
                          separators=(",", ":")).encode()  # fmt: skip

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of what is signed."""
        return hashlib.sha256(self.message).hexdigest()

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}

    def verify(self) -> None:
        """Check the signature.

        Raises:
            EntryRefusedError: it is not the peer's.
        """
        ed25519: Any = import_extra(
            "cryptography.hazmat.primitives.asymmetric.ed25519", extra="fields", purpose=_PURPOSE
        )
        exceptions: Any = import_extra("cryptography.exceptions", extra="fields", purpose=_PURPOSE)
        try:
            key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.peer))
            key.verify(bytes.fromhex(self.signature), self.message)
        except (ValueError, exceptions.InvalidSignature):
            raise EntryRefusedError(
                f"click {self.number} of {self.peer[:8]}: the signature is not that of its key"
            ) from None


def read_entry(value: Any) -> ClickEntry:
    """An entry from JSON; its signature is not checked.

    Raises:
        EntryRefusedError: it is none; says what is wrong.
    """
    names = [one.name for one in dataclasses.fields(ClickEntry)]
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise EntryRefusedError(f"click: expected an object with {', '.join(names)}")
    peer, number, query, item, shown, time, signature = (value[name] for name in names)
    rules: Sequence[tuple[bool, str]] = (
        (isinstance(peer, str) and bool(_KEY.fullmatch(peer)), "peer: expected 64 hex digits"),
        (type(number) is int and 0 < number < _NUMBER, "number: expected an integer from 1"),
        (_short(query) and bool(query.strip()), f"query: expected text of 1 to {_TEXT} characters"),
        (_short(item) and bool(item), f"item: expected a name of 1 to {_TEXT} characters"),
        (
            isinstance(shown, list | tuple) and len(shown) <= _SHOWN and all(map(_short, shown)),
            f"shown: expected at most {_SHOWN} names",
        ),
        (
            type(time) in (int, float) and math.isfinite(time) and 0 <= time < 1e11,
            "time: expected seconds since 1970",
        ),
        (
            isinstance(signature, str) and bool(_SIGNATURE.fullmatch(signature)),
            "signature: expected 128 hex digits",
        ),
    )
    for right, complaint in rules:
        if not right:
            raise EntryRefusedError(f"click: {complaint}")
    if item not in shown:
        raise EntryRefusedError("click: item: is not in the list that was shown")
    return ClickEntry(
        peer=peer, number=number, query=query, item=item, shown=tuple(shown),
        time=float(time), signature=signature,
    )  # fmt: skip


def _short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT


class PeerKey:
    """The key with which a peer signs.

    Args:
        private: 32 bytes.
    """

    def __init__(self, private: bytes) -> None:
        ed25519: Any = import_extra(
            "cryptography.hazmat.primitives.asymmetric.ed25519", extra="fields", purpose=_PURPOSE
        )
        self._key = ed25519.Ed25519PrivateKey.from_private_bytes(private)
        self.peer: str = self._key.public_key().public_bytes_raw().hex()

    @classmethod
    def kept(cls, path: Path) -> PeerKey:
        """The key of a file, which is made, readable by its owner alone, if there is none.

        Raises:
            EntryRefusedError: the file is no key.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.parent.chmod(0o700)
            write_atomic(path, os.urandom(32).hex())
            path.chmod(0o600)
        try:
            private = bytes.fromhex(path.read_text().strip())
            return cls(private)
        except (OSError, ValueError) as cause:
            raise EntryRefusedError(f"{path}: no key of 64 hex digits ({cause})") from cause

    def sign(
        self, *, number: int, query: str, item: str, shown: Sequence[str], time: float
    ) -> ClickEntry:
        """A signed entry.

        Raises:
            EntryRefusedError: a value that no peer would take.
        """
        entry = ClickEntry(
            peer=self.peer,
            number=number,
            query=query,
            item=item,
            shown=tuple(shown),
            time=float(time),
        )
        signature = self._key.sign(entry.message).hex()
        return read_entry({**entry.plain(), "signature": signature})
