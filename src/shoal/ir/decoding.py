"""Speculative decoding: the values and protocols that tree shapes, schedulers and engines share.

A drafter guesses several tokens after the last certain one. The guesses are the nodes of a
tree under that token, the root; one forward pass of the model scores them all, and the path that
the model itself would have taken is kept.

Source: Miao et al., SpecInfer, 2023 (token trees); Cai et al., Medusa, 2024, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, runtime_checkable

from shoal.core.errors import ConfigError, require

# Nodes of a tree beside its root: a row of the attention kernel marks what it sees in 64 bits.
MAX_NODES = 63


@dataclass(frozen=True, slots=True)
class DrafterCalibration:
    """How often the guesses of a drafter are right, measured on text that it was not trained on.

    Args:
        right: ``right[k][i]``: share of places at which guess i (best first) of the token k + 1
            places behind the root is the model's own choice.
        samples: places measured.
    """

    right: tuple[tuple[float, ...], ...]
    samples: int = 0

    def __post_init__(self) -> None:
        require(
            bool(self.right) and all(self.right),
            "calibration",
            len(self.right),
            expected="at least one level with at least one guess",
        )
        for level, row in enumerate(self.right):
            good = all(0 <= share <= 1 for share in row) and sum(row) <= 1 + 1e-6
            require(
                good,
                f"calibration level {level}",
                list(row),
                expected="shares of the same places, together at most 1",
            )

    @property
    def levels(self) -> int:
        """Tokens ahead that are guessed."""
        return len(self.right)


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The nodes of a tree in an order in which every beginning of it is a tree too.

    Args:
        parent: of each node; -1 for the root.
        rank: which guess of its level each node is, best first.
        value: the probability that a node is accepted; empty where unknown.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    value: tuple[float, ...] = ()
    level: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.parent) > MAX_NODES:
            raise ConfigError(
                f"tree: {len(self.parent)} nodes; a tree has at most {MAX_NODES} beside its root"
            )
        if len(self.rank) != len(self.parent) or len(self.value) not in (0, len(self.parent)):
            raise ConfigError(
                f"tree: {len(self.parent)} parents, {len(self.rank)} ranks and {len(self.value)} "
                "values; give one of each for every node"
            )
        level: list[int] = []
        seen: set[tuple[int, int]] = set()
        for node, (parent, rank) in enumerate(zip(self.parent, self.rank, strict=True)):
            if not -1 <= parent < node:
                raise ConfigError(
                    f"tree node {node}: its parent {parent} is not among the nodes before it"
                )
            if rank < 0 or (parent, rank) in seen:
                raise ConfigError(
                    f"tree node {node}: guess {rank} below node {parent}; ranks begin at 0, and "
                    "no two children of a node are the same guess"
                )
            seen.add((parent, rank))
            level.append(level[parent] + 1 if parent >= 0 else 0)
        object.__setattr__(self, "level", tuple(level))

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(self.level, default=-1) + 1

    @property
    def width(self) -> int:
        """Guesses of a level that it uses."""
        return max(self.rank, default=-1) + 1

    def first(self, nodes: int) -> TreeSpec:
        """The tree of its first nodes."""
        if nodes >= len(self):
            return self
        return TreeSpec(self.parent[:nodes], self.rank[:nodes], self.value[:nodes])

    def expected(self) -> tuple[float, ...]:
        """Tokens a step is expected to give with 0, 1, ... of its nodes: one, and their values."""
        return tuple(accumulate(self.value, initial=1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a drafter is expected to do, before anything is run.

    Args:
        tokens: of a step of one request with 0, 1, ... nodes.
        weight_bytes: B of what it reads to guess once, for however many requests.
        reads: how often it reads that for the guesses of one step.
        request_bytes: B that it keeps for one token of a request's context.
        assumes: what the numbers rest on, where it was not measured.
    """

    tokens: tuple[float, ...]
    weight_bytes: float = 0.0
    reads: int = 1
    request_bytes: float = 0.0
    assumes: str = ""

    def __post_init__(self) -> None:
        require(
            len(self.tokens) >= 2 and self.tokens[0] == 1,
            "expected tokens",
            len(self.tokens),
            expected="1 with no node, and a number for at least one node",
        )


class SpeculationEstimator(Protocol):
    """What plans ask of a part of kind ``speculative``; needs no torch."""

    def expects(self) -> Expectation:
        """What it is expected to do.

        Raises:
            ShoalError: its files are missing or damaged.
        """


class TreePart(Protocol):
    """A part of kind ``tree``: tree of draft tokens that are verified together."""

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        """The tree, best nodes first.

        Args:
            calibration: of the drafter.
            most: nodes it may have.

        Raises:
            ConfigError: it wants guesses that the drafter does not make.
        """


@runtime_checkable
class VerificationCost(Protocol):
    """Seconds of a step that verifies guesses, and of making them."""

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows, roots and nodes together."""

    def drafting_s(self, requests: int, nodes: int) -> float:
        """Of the guesses for so many requests, so many nodes each."""


@runtime_checkable
class Drafting(Protocol):
    """How much is guessed: a scheduler asks in every step, and then reports the outcome."""

    def nodes(self, requests: int) -> int:
        """Nodes of the tree of each of so many requests that decode together; 0 for none."""

    def observe(self, guessed: Sequence[int], accepted: Sequence[int]) -> None:
        """Of each request that was to guess: nodes of its tree, 0 for none, and those accepted."""

    def took(self, requests: int, asked: int, nodes: int, seconds: float) -> None:
        """How long a step of decodes alone took.

        Args:
            requests: in it.
            asked: of them, those that were to guess.
            nodes: of all trees.
            seconds: of the step.
        """
