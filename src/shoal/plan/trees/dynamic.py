"""Trees that ask for the next step's guesses while they verify this step's.

A forward pass holds candidates, guessed by the pass before, and below each of them some prompt
tokens: whichever candidate is accepted last, the outputs of its prompts are guesses for the next
step. Every row costs time, so a node that is seldom last gets few prompts, and then the next tree
is less deep: how many prompts the last accepted node had is the state of a chain, in which the
tree of every state is chosen for what it gives now and for the states that it leads to.

Shapes: S = m + 1 states, n candidates.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference, 2024, section 3.2 (dynamic sparse tree) and 3.3 (hardware awareness).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.ir import MAX_NODES, DrafterCalibration, TreePart, TreeSpec

# What comes later counts so little less that values of states are defined whatever the chain.
_DISCOUNT = 1 - 1e-6

# Numbers of rows that are looked at.
_SIZES = (4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)

# The choice of all trees at once settles in a few rounds.
_ROUNDS = 20


@dataclass(frozen=True, slots=True, eq=False)
class StateTree:
    """The tree of one state.

    Args:
        spec: its candidates, the best ones, with at most as many levels as the state has
            predictions.
        prompts: prompt tokens below the root and below each candidate.
        last: probability that the root, or each candidate, is the last one accepted.
    """

    spec: TreeSpec
    prompts: tuple[int, ...]
    last: np.ndarray

    @property
    def gain(self) -> float:
        """Candidates that are expected to be accepted."""
        return sum(self.spec.value)

    def row(self, states: int) -> np.ndarray:
        """Probability of every state after it."""
        return np.bincount(self.prompts, weights=self.last, minlength=states)


@dataclass(frozen=True, slots=True, eq=False)
class Dynamic:
    """The trees of all states, with a limit of rows.

    Args:
        rows: N, root, candidates and prompt rows together.
        trees: of state 0, 1, ..., m.
    """

    rows: int
    trees: tuple[StateTree, ...]

    @property
    def transitions(self) -> np.ndarray:
        """P(s -> s') [S, S]."""
        return np.stack([tree.row(len(self.trees)) for tree in self.trees])

    @property
    def shares(self) -> np.ndarray:
        """Share of the steps in every state, [S]."""
        return stationary(self.transitions)

    @property
    def tokens(self) -> float:
        """Tokens that a step is expected to give: ``1 + sum_s share_s * gain_s``."""
        return 1.0 + float(self.shares @ [tree.gain for tree in self.trees])


def stationary(transitions_SS: np.ndarray) -> np.ndarray:
    """The share of its steps that a chain which begins in state 0 spends in every state.

    Args:
        transitions_SS: [s, s'] probability of s' after s.
    """
    states = len(transitions_SS)
    reached = np.linalg.matrix_power(np.eye(states) + transitions_SS, states)[0] > 0
    values, vectors = np.linalg.eig(transitions_SS[np.ix_(reached, reached)].T)
    result = np.abs(vectors[:, np.argmin(np.abs(values - 1))].real)
    shares = np.zeros(states)
    shares[reached] = result / result.sum()
    return shares


def last_of(spec: TreeSpec) -> np.ndarray:
    """Probability that the root, or each node, is accepted and nothing below it is, [n + 1]."""
    value = np.array([1.0, *spec.value])
    below = np.bincount(np.array(spec.parent, dtype=int) + 1, weights=value[1:],
                        minlength=len(value))  # fmt: skip
    array: np.ndarray = np.maximum(value - below, 0.0)
    return array


class _Begun(NamedTuple):
    """The first candidates of a tree: what they give, and which of them is the last accepted."""

    spec: TreeSpec
    gain: float
    last: np.ndarray


def _begun(spec: TreeSpec, nodes: int) -> _Begun:
    first = spec.first(nodes)
    return _Begun(first, sum(first.value), last_of(first))


def _best(calibration: DrafterCalibration, tree: TreePart, depth: int) -> TreeSpec:
    """The tree where guesses of so many levels are at hand; nodes that are never right left out."""
    right = calibration.right
    nothing = tuple((0.0,) * len(row) for row in right[depth:])
    spec = tree.build(DrafterCalibration((*right[:depth], *nothing)))
    kept = [node for node, value in enumerate(spec.value) if value > 0]
    place = {node: number for number, node in enumerate(kept)} | {-1: -1}
    return TreeSpec(
        tuple(place[spec.parent[node]] for node in kept),
        tuple(spec.rank[node] for node in kept),
        tuple(spec.value[node] for node in kept),
    )


def kept_prompts(last: np.ndarray, worth: np.ndarray, room: int) -> np.ndarray:
    """Prompts of every node when all have m and are deleted one by one until they fit.

    Deleted is the one that costs least: the probability that its node is last, times the drop to
    the value of the state below. Of every node the last prompt goes first, so the order of all
    deletions is that of the greatest cost on the way to each.

    Args:
        last: probability of every node to be the last one accepted.
        worth: value of the states 0..m.
        room: prompts in all.
    """
    most = len(worth) - 1
    surplus = most * len(last) - room
    if surplus <= 0:
        return np.full(len(last), most)
    cost = last[:, None] * np.diff(worth)[::-1]
    order = np.argsort(np.maximum.accumulate(cost, axis=1), axis=None, kind="stable")[:surplus]
    kept: np.ndarray = most - np.bincount(order // most, minlength=len(last))
    return kept


class DynamicTrees:
    """Dynamic trees for every number of rows, created on demand.

    Args:
        calibration: acceptance rates of every prompt token; it has m levels.
        tree: which candidates are the best ones.
        ensemble: rows of a prompt token.
        most: rows of a tree.

    Raises:
        PlanError: prompt tokens and root are more rows than a tree has.
    """

    def __init__(
        self,
        calibration: DrafterCalibration,
        tree: TreePart,
        ensemble: int = 1,
        most: int = MAX_NODES + 1,
    ) -> None:
        require(ensemble >= 1, "ensemble", ensemble, expected="at least 1 embedding of a prompt",
                error=PlanError)  # fmt: skip
        self.ensemble = ensemble
        self.prompts = calibration.levels
        self.fewest = 1 + self.prompts * ensemble
        self.most = most
        require(
            self.fewest <= most <= MAX_NODES + 1,
            "rows of a tree",
            most,
            expected=f"at least {self.fewest}, the root and {self.prompts} prompt tokens of "
            f"{ensemble}, and at most {MAX_NODES + 1}",
            hint="use fewer prompts, or give more rows",
            error=PlanError,
        )
        # Stage 1: the best candidates at every depth; every beginning is a tree too.
        specs = [_best(calibration, tree, depth) for depth in range(self.prompts + 1)]
        self.width = max(spec.width for spec in specs)
        # Of every state, the trees of its first 0, 1, ... candidates.
        self._first = [[_begun(spec, n) for n in range(len(spec) + 1)] for spec in specs]
        self._known: dict[int, Dynamic] = {}

    def of(self, rows: int) -> Dynamic:
        """The best trees of so many rows.

        Raises:
            PlanError: root and prompts alone are more.
        """
        require(
            self.fewest <= rows <= self.most,
            "rows",
            rows,
            expected=f"{self.fewest} to {self.most}",
            error=PlanError,
        )
        if rows not in self._known:
            self._known[rows] = self._best(rows)
        return self._known[rows]

    def expected(self) -> tuple[float, ...]:
        """Tokens of a step with 0, 1, ... rows beside the root.

        A number between two of those that are looked at has the tokens of the smaller one, so it
        is never worth its rows: every number that is used is a kind of step to be made ready.
        """
        sizes = {self.fewest, self.most, *_SIZES}
        result = [1.0] * (self.fewest - 1)
        for rows in range(self.fewest, self.most + 1):
            result.append(max(result[-1], self.of(rows).tokens) if rows in sizes else result[-1])
        return tuple(result)

    def _best(self, rows: int) -> Dynamic:
        """Choose trees by the values of states, and values by the trees, until both stay.

        Source: Howard, Dynamic Programming and Markov Processes, 1960 (policy iteration).
        """
        states = self.prompts + 1
        worth = np.array([of_state[:rows][-1].gain for of_state in self._first])
        best: Dynamic | None = None
        for _ in range(_ROUNDS):
            result = Dynamic(rows, tuple(self._tree(one, rows, worth) for one in self._first))
            if best is not None and result.tokens <= best.tokens + 1e-12:
                break
            best = result
            gains = np.array([tree.gain for tree in result.trees])
            worth = np.linalg.solve(np.eye(states) - _DISCOUNT * result.transitions, gains)
        assert best is not None
        return best

    def _tree(self, first: Sequence[_Begun], rows: int, worth: np.ndarray) -> StateTree:
        """Stage 2: as many of the candidates, and prompts below them, as are worth most."""
        best, kept, most = first[0], np.zeros(1, dtype=int), -np.inf
        for nodes, one in enumerate(first[:rows]):
            prompts = kept_prompts(one.last, worth, (rows - 1 - nodes) // self.ensemble)
            total = one.gain + float(one.last @ worth[prompts])
            if total > most + 1e-12:
                best, kept, most = one, prompts, total
        return StateTree(best.spec, tuple(kept.tolist()), best.last)


def best_rows(expected: Sequence[float], seconds: Sequence[float]) -> int:
    """N* = argmax tokens(N) / seconds(N), N from 1 on."""
    return 1 + int(np.argmax(np.array(expected) / np.array(seconds)))
