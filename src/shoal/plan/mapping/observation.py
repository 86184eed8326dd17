"""What a player sees before a decision, as one row of numbers; ``game.cpp`` sees the same.

The fast memory around now (slot x address), idle time of the link before now, the current
decision and those after it, how far the game is, and the legal actions.
"""

from __future__ import annotations

import numpy as np

from shoal.plan.mapping.game import Game

# Slots before and after the current one whose occupancy is seen, near ones all, far ones some.
_COLUMNS = (*range(-6, 10), 12, 16, 24, 32)
_ROWS = 8
_LINKS = 8
_AHEAD = 6
_EACH = 11

OBSERVED = len(_COLUMNS) * _ROWS + _LINKS + _AHEAD * _EACH + 5


def observe(game: Game) -> np.ndarray:
    """The observation of a game that is not over, float32 of shape [:data:`OBSERVED`]."""
    c = game.compiled
    now = int(c.slot[game.k])
    legal = [float(allowed) for allowed in game.legal()]
    most = max(1, c.all_slow - c.all_fast)
    gained = c.all_slow - game.ticks
    return np.concatenate(
        [
            _grid(game, now),
            _link(game, now),
            *(_decision(game, game.k + j, now) for j in range(_AHEAD)),
            np.array([game.k / c.decisions, gained / most, *legal]),
        ]
    ).astype(np.float32)


def _grid(game: Game, now: int) -> np.ndarray:
    """Share of each band of addresses that is taken in each slot; what is outside is taken."""
    c = game.compiled
    height = c.room / _ROWS
    seen = np.zeros((len(_COLUMNS), _ROWS))
    bands = np.arange(_ROWS) * height
    for row, offset in zip(seen, _COLUMNS, strict=True):
        slot = now + offset
        if not 0 <= slot < c.slots:
            row[:] = 1.0
            continue
        for b, start, end, address, _ in game.stays:
            if start <= slot <= end:
                top = address + int(c.size[b])
                part = np.minimum(top, bands + height) - np.maximum(address, bands)
                row += np.maximum(part, 0.0) / height
    return seen.ravel()


def _link(game: Game, now: int) -> np.ndarray:
    """Idle time of the link in the slots before now, in copies of middling size."""
    typical = float(game.compiled.copy.mean())
    return np.array(
        [min(4.0, game.free(now - j) / typical) if now >= j else 0.0 for j in range(1, _LINKS + 1)]
    )


def _decision(game: Game, k: int, now: int) -> np.ndarray:
    c = game.compiled
    if k >= c.decisions:
        return np.zeros(_EACH)
    b, slot = int(c.buffer[k]), int(c.slot[k])
    typical = max(1.0, c.all_slow / c.slots)
    after = int(c.following[k])
    stay = game.current[b]
    over = max(0, game.memory[slot] - int(c.compute[slot]))
    return np.array(
        [
            1.0,
            min(2.0, c.size[b] / max(1, c.room)),
            c.write[k],
            c.output[b],
            min(4.0, (c.slow[k] - c.fast[k]) / typical),
            min(4.0, over / typical),
            0.0 if after < 0 else min(1.0, (int(c.slot[after]) - slot) / 16),
            0.0 if stay < 0 else 1.0 if game.stays[stay][2] >= slot else 0.5,
            float(game.ready[b] <= slot),
            min(1.0, c.left[k] / 4),
            float(slot == now),
        ]
    )
