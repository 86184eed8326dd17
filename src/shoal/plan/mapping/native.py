"""The game and the search in C++, and what plays where there is no compiler.

Some hundred decisions are made in well under a millisecond; the rules in plain Python take a
hundred times as long. Both give the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.native import build, compiler
from shoal.plan.mapping.game import Game
from shoal.plan.mapping.layout import COPY, DROP, NO_COPY, Mapping
from shoal.plan.mapping.observation import OBSERVED
from shoal.plan.mapping.program import Compiled

# Wanted of a decision: in fast memory, moved only if it is not there.
FAST = 3

_COUNTS = ("slots", "decisions", "buffers", "room", "best_fit", "all_slow", "all_fast")
_PER_DECISION = ("slot", "buffer", "write", "slow", "fast", "following", "left")
_PER_BUFFER = ("size", "made", "last", "output", "copy")
_ARRAYS = ("compute", *_PER_DECISION, *_PER_BUFFER)


class _Problem(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in _COUNTS] + [(name, c_void_p) for name in _ARRAYS]


_ARRAY = c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mapping_observed": (c_int, []),
    "mapping_replay": (c_int64, [POINTER(_Problem), _ARRAY, _ARRAY]),
    "mapping_trace": (None, [POINTER(_Problem), _ARRAY, _ARRAY, _ARRAY, _ARRAY]),
    "mapping_play": (
        c_int64,
        [POINTER(_Problem), _ARRAY, c_int, c_int, c_double, c_int, c_double, c_double]
        + [c_uint64, c_int64]
        + [_ARRAY] * 6,
    ),
    "mapping_reanalyse": (
        None,
        [_ARRAY, c_int, c_int, c_double, c_int, c_uint64, c_int64] + [_ARRAY] * 4,
    ),
}


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("game.cpp").read_text(encoding="utf-8")
    # Products and sums are rounded one by one, so that every machine plays the same game.
    part = build(source, name="mapping", flags=("-ffp-contract=off",))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(part, name)
        function.restype, function.argtypes = result, arguments
    assert part.mapping_observed() == OBSERVED
    return part


@dataclass
class GameRecord:
    """One game, decision by decision.

    Args:
        ticks: of the program in the end.
        actions: [D] int8.
        seen: observations, [D, O] float32.
        masks: legal actions, a bit each, [D] int8.
        rewards: ticks saved, [D] int64.
        shares: of the search's visits, [D, 3] float32.
        values: of the roots of the search, [D] float32.
    """

    ticks: int
    actions: np.ndarray
    seen: np.ndarray
    masks: np.ndarray
    rewards: np.ndarray
    shares: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class NetworkWeights:
    """The networks of a search.

    Args:
        flat: all matrices [in + 1, out] in the order of use, the bias last, float32.
        hidden: width of the hidden layers.
        latent: width of a state.
        discount: discount of rewards per decision.
    """

    flat: np.ndarray
    hidden: int
    latent: int
    discount: float

    def passed(self) -> tuple[int, int, int, float]:
        """As the C++ code takes them."""
        return self.flat.ctypes.data, self.hidden, self.latent, self.discount


class Native:
    """A compiled program as the C++ code has it.

    Raises:
        BuildError: there is no compiler.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self._code = _library()
        # Kept alive beside the structure that points to them.
        self._arrays = {
            name: np.ascontiguousarray(getattr(compiled, name), np.int64) for name in _ARRAYS
        }
        self._problem = _Problem(
            slots=compiled.slots,
            decisions=compiled.decisions,
            buffers=len(compiled.names),
            room=compiled.room,
            best_fit=int(compiled.tiers.fit == "best"),
            all_slow=compiled.all_slow,
            all_fast=compiled.all_fast,
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )

    def replay(self, wanted: np.ndarray) -> tuple[np.ndarray, int]:
        """Play what is wanted where it is legal; see :func:`replay`."""
        request = np.ascontiguousarray(wanted, np.int8)
        played = np.empty(self.compiled.decisions, np.int8)
        ticks = self._code.mapping_replay(
            ctypes.byref(self._problem), request.ctypes.data, played.ctypes.data
        )
        return played, int(ticks)

    def trace(self, actions: np.ndarray) -> GameRecord:
        """A game whose actions are known, as a player would have seen it."""
        game = self._empty(actions)
        self._code.mapping_trace(
            ctypes.byref(self._problem),
            *(array.ctypes.data for array in (game.actions, game.seen, game.masks, game.rewards)),
        )
        game.shares[np.arange(len(game.actions)), game.actions] = 1.0
        game.ticks = self.compiled.all_slow - int(game.rewards.sum())
        return game

    def play(
        self,
        weights: NetworkWeights,
        *,
        simulations: int,
        temperature: float,
        noise: float,
        seed: int,
        given: np.ndarray | None = None,
    ) -> GameRecord:
        """One game by search with a learned model.

        Args:
            weights: of the networks.
            simulations: of each search.
            temperature: of the choice by visits; 0 takes the most visited.
            noise: share of random priors at the root.
            seed: of noise and choices.
            given: actions that the game begins with.
        """
        game = self._empty(np.zeros(self.compiled.decisions, np.int8))
        start = 0 if given is None else len(given)
        if given is not None:
            game.actions[:start] = given
        arrays = (game.actions, game.seen, game.masks, game.rewards, game.shares, game.values)
        game.ticks = int(
            self._code.mapping_play(
                ctypes.byref(self._problem),
                *weights.passed(),
                simulations,
                temperature,
                noise,
                seed,
                start,
                *(array.ctypes.data for array in arrays),
            )
        )
        return game

    def reanalyse(
        self,
        weights: NetworkWeights,
        game: GameRecord,
        *,
        simulations: int,
        seed: int,
    ) -> None:
        """Repeat the search with the current networks from all positions of a game."""
        self._code.mapping_reanalyse(
            *weights.passed(),
            simulations,
            seed,
            len(game.actions),
            *(a.ctypes.data for a in (game.seen, game.masks, game.shares, game.values)),
        )

    def _empty(self, actions: np.ndarray) -> GameRecord:
        count = self.compiled.decisions
        return GameRecord(
            0,
            np.ascontiguousarray(actions, np.int8).copy(),
            np.zeros((count, OBSERVED), np.float32),
            np.zeros(count, np.int8),
            np.zeros(count, np.int64),
            np.zeros((count, 3), np.float32),
            np.zeros(count, np.float32),
        )


def replay(compiled: Compiled, wanted: Sequence[int] | np.ndarray) -> Game:
    """Play what is wanted where it is legal, else drop, else what is left; in plain Python.

    Args:
        compiled: program and memories.
        wanted: an action of each decision, or :data:`FAST`.
    """
    game = Game(compiled)
    while not game.done:
        legal, want = game.legal(), int(wanted[game.k])
        if want == FAST:
            want = NO_COPY if legal[NO_COPY] else COPY
        order = (want, DROP, NO_COPY, COPY)
        game.step(next(action for action in order if legal[action]))
    return game


def replayer(compiled: Compiled) -> Callable[[np.ndarray], tuple[np.ndarray, int]]:
    """Plays what is wanted, [D] -> (actions [D], ticks); in C++ where there is a compiler."""
    if compiler() is not None:
        return Native(compiled).replay

    def plain(wanted: np.ndarray) -> tuple[np.ndarray, int]:
        game = replay(compiled, wanted)
        return np.array(game.actions, np.int8), game.ticks

    return plain


def mapping_of(compiled: Compiled, actions: np.ndarray, mapper: str) -> Mapping:
    """The mapping that legal actions make."""
    return replay(compiled, actions).mapping(mapper)
