"""A client of secure aggregation: keys, shares, a masked update, and what it reveals in the end."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np

from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.secure.masks import (
    agree,
    expand,
    new_key,
    seal,
    to_fixed,
    unseal,
)
from shoal.fields.federate.secure.shamir import SHARE_BYTES, split

KEYS, SHARES, TRAIN, UNMASK = range(4)
"""What a client is asked for, in this order."""

Tensors = Mapping[str, np.ndarray]


class Party:
    """What a client remembers of a round.

    Clients of a round have numbers 0 ... n - 1. Secrets are new in every round: what is revealed
    at its end opens no other.
    """

    def __init__(self) -> None:
        self._revealed = True

    def keys(self) -> dict[str, np.ndarray]:
        """Public keys, uint8 [32] each: ``box`` for messages, ``mask`` for masks."""
        self._box, box = new_key()
        self._mask, mask = new_key()
        self._self_mask = secrets.token_bytes(32)
        self._revealed = False
        return {"box": _array(box), "mask": _array(mask)}

    def shares(self, given: Tensors) -> dict[str, np.ndarray]:
        """Shares of the own secrets for each client, sealed: ``boxes`` uint8 [n, bytes].

        Args:
            given: ``me``: number of this client; ``box``, ``mask``: public keys, uint8 [n, 32].
        """
        self._me, count = int(given["me"][0]), len(given["box"])
        self._boxes = [bytes(one) for one in given["box"]]
        self._masks = [bytes(one) for one in given["mask"]]
        if count < 3 or len(set(self._masks)) < count:
            raise FederationError(
                f"secure: the server named {count} clients of the round, or one of them twice; at "
                "least 3 different ones are needed"
            )
        needed = count // 2 + 1
        mine = [
            a + b
            for a, b in zip(
                split(self._self_mask, count, needed), split(self._mask, count, needed), strict=True
            )
        ]
        return {
            "boxes": np.stack(
                [_array(seal(self._key(to, self._me), one)) for to, one in enumerate(mine)]
            )
        }

    def masked(self, update: np.ndarray, given: Tensors) -> dict[str, np.ndarray]:
        """The update under masks, ``masked`` uint32 [P].

        Args:
            update: float32 [P].
            given: ``boxes``: from each client for this one, uint8 [n, bytes]; ``present``: clients
                that have shared their secrets, bool [n].
        """
        self._held: dict[int, bytes] = {}
        self._present = [bool(one) for one in given["present"]]
        total = to_fixed(update, len(self._present)) + expand(self._self_mask, len(update))
        for at, there in enumerate(self._present):
            if not there:
                continue
            self._held[at] = unseal(self._key(self._me, at), bytes(given["boxes"][at]))
            if at != self._me:
                stream = expand(agree(self._mask, self._masks[at], "mask"), len(update))
                total = total + stream if self._me < at else total - stream
        return {"masked": total}

    def reveal(self, given: Tensors) -> dict[str, np.ndarray]:
        """Shares that open the sum: ``shares`` uint8 [n, bytes].

        Of a client whose update has arrived the share of its own mask, of another one the share of
        its key. Never both, and once only: so no single update is opened.

        Args:
            given: ``arrived``: bool [n].

        Raises:
            FederationError: the server asks for more.
        """
        arrived = [bool(one) for one in given["arrived"]]
        needed = len(arrived) // 2 + 1
        if self._revealed or sum(arrived) < needed or not arrived[self._me]:
            raise FederationError(
                f"secure: the server asked to open a round twice, or with {sum(arrived)} of "
                f"{len(arrived)} updates; {needed} are needed"
            )
        self._revealed = True
        result = np.zeros((len(arrived), SHARE_BYTES), np.uint8)
        for at, held in self._held.items():
            own, key = held[:SHARE_BYTES], held[SHARE_BYTES:]
            result[at] = _array(own if arrived[at] else key)
        return {"shares": result}

    def _key(self, to: int, sender: int) -> bytes:
        """Of a message from one client to another; both ends make it."""
        other = sender if to == self._me else to
        return agree(self._box, self._boxes[other], f"box {sender} {to}")


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
