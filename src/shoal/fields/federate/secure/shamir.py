"""A secret in n shares, of which any t give it back and fewer say nothing.

Source: Shamir, How to Share a Secret, 1979. Numbers are modulo the prime 2^521 - 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
SHARE_BYTES = 66


def split(secret: bytes, count: int, needed: int) -> list[bytes]:
    """Shares 0 ... count - 1 of at most 64 bytes: values of a random polynomial at 1 ... count.

    Args:
        secret: constant term.
        count: shares.
        needed: shares that give it back, t; the degree is t - 1.
    """
    assert len(secret) <= 64 and 1 <= needed <= count
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(needed - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for term in reversed(terms):
            value = (value * x + term) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def recover(shares: Mapping[int, bytes], size: int) -> bytes:
    """The secret of ``size`` bytes, from t shares by their numbers; interpolated at 0.

    Raises:
        OverflowError: the shares are not of one secret of this size.
    """
    total = 0
    for i, share in shares.items():
        above = below = 1
        for j in shares:
            if j != i:
                above = above * (j + 1) % PRIME
                below = below * (j - i) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    return (total % PRIME).to_bytes(size, "big")
