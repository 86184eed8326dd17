"""Which positions of a sequence a rank holds."""

from __future__ import annotations

import numpy as np

from shoal.core.errors import require


def contiguous(length: int, world: int, *, where: str) -> list[np.ndarray]:
    """Rank n holds the n-th of ``world`` equal pieces, int64 [length / world] each.

    Raises:
        ConfigError: the length is no multiple of the number of ranks.
    """
    _check(length, world, world, where)
    return np.split(np.arange(length, dtype=np.int64), world)


def zigzag(length: int, world: int, *, where: str) -> list[np.ndarray]:
    """Of 2 * ``world`` equal chunks rank n holds n and 2 * ``world`` - 1 - n.

    Under a causal mask early queries see little and late ones much; so paired, every rank
    has the same work.

    Raises:
        ConfigError: the length is no multiple of twice the number of ranks.
    """
    if world == 1:
        return contiguous(length, 1, where=where)
    _check(length, world, 2 * world, where)
    chunks = np.split(np.arange(length, dtype=np.int64), 2 * world)
    return [np.concatenate([chunks[n], chunks[-1 - n]]) for n in range(world)]


def _check(length: int, world: int, pieces: int, where: str) -> None:
    require(world >= 1, f"{where} ranks", world, expected="at least 1")
    below = length // pieces * pieces
    near = f"{below} or {below + pieces}" if below else str(pieces)
    require(
        length >= 1 and length % pieces == 0,
        f"{where}: seq_len",
        length,
        expected=f"a multiple of {pieces} for {world} ranks, such as {near}",
        hint="choose such a length and pad, or another cp",
    )
