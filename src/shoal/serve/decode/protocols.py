"""One loop: propose a tree of tokens, verify it in one forward pass, accept a path, keep its cache.

The life of a guess. The scheduler gives a decode room for some guesses
(:class:`~shoal.ir.decoding.Drafting`). The runner asks the :class:`Drafter` for a tree of them,
computes the request's last token, the root, and all nodes side by side, each node seeing its own
path alone, and lets the :class:`Acceptance` walk down from the root. The keys and values of the
path are moved to where they belong; those of all other nodes are overwritten by the next step.
Then the drafter receives what is certain now.

Whatever a drafter guesses, a lossless acceptance gives what the model alone would give: guesses
cost or save time, and nothing else.

Shapes: N rows (root and nodes of all trees), V vocabulary, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from shoal.core.parts import Choice
from shoal.ir import Expectation, Request, SamplingParams, ServeJob

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.serve.cache.paged import PagedCache
    from shoal.serve.decode.dovetail.layers import LaterCache, LaterLayers

Needs = Literal["nothing", "last", "all"]
"""Final hidden states that a drafter wants: none, of the row that chose the root, or of all."""


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The shape of a tree as arrays; row 0 is the root.

    Args:
        parent: row above each row; -1 for the root.
        depth: [N] rows between a row and the root, itself included.
        seen: [N] the rows that each sees, a bit each.
        children: rows below each row, in the order of their candidates.
    """

    parent: tuple[int, ...]
    depth: np.ndarray
    seen: np.ndarray
    children: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.parent)


@functools.lru_cache(maxsize=4096)
def branches(parent: tuple[int, ...]) -> Branches:
    """The shape in which row i is below row ``parent[i]``; trees of one shape share it."""
    depth, seen = [0], [1]
    children: list[list[int]] = [[] for _ in parent]
    for row, above in enumerate(parent[1:], 1):
        depth.append(depth[above] + 1)
        seen.append(seen[above] | 1 << row)
        children[above].append(row)
    bits = np.array(seen, dtype=np.uint64).view(np.int64)
    return Branches(parent, np.array(depth), bits, tuple(map(tuple, children)))


class PromptRows(NamedTuple):
    """The last rows of a tree, if they are prompt tokens of the drafter instead of draft tokens.

    Args:
        inputs: [P, D] what is fed at these rows in place of the embedding of a token.
        below: of the root and every node, the rows whose scores the drafter receives where that
            one is the last accepted; they may stand below it alone.
    """

    inputs: Tensor
    below: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Draft tokens of one request.

    Args:
        tokens: [N] of every row; row 0 is the root, the last certain token. Rows that ask have -1,
            which is never accepted.
        shape: which row is below which.
        q: row -> the drafter's probabilities [V] of the next token, from which the children of this
            row were drawn; empty if they were not drawn.
        asking: prompt-token rows after all draft tokens.
    """

    tokens: np.ndarray
    shape: Branches
    q: dict[int, Tensor] | None = None
    asking: PromptRows | None = None

    @property
    def nodes(self) -> int:
        """Rows beside the root."""
        return len(self.shape) - 1


class Guess(NamedTuple):
    """A request whose next tokens are to be guessed, and with how many nodes at most."""

    request: Request
    nodes: int


class AcceptedTokens(NamedTuple):
    """What is certain now: tokens of a request from ``start`` on are computed.

    Args:
        start: place of the first of them.
        tokens: these tokens.
        hidden: their final hidden states [T, D]; of the last one alone, or None, as the drafter
            needs.
        root: the token after them, where it is known: what the model chose.
        prompt_scores: scores [A, V] of the rows that asked below the last of them.
    """

    request: Request
    start: int
    tokens: Sequence[int]
    hidden: Tensor | None
    root: int | None
    prompt_scores: Tensor | None = None


class Path(NamedTuple):
    """What was accepted of a tree: rows from the root's child on, and their tokens and the next."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]


class Drafter(Protocol):
    """Proposes draft tokens; changes only its own state.

    State belongs to the request object: a preempted request is processed again from its first
    token, and a request with incomplete state gets no draft tokens.
    """

    needs: ClassVar[Needs]

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        """A tree for each; None where nothing is guessed."""

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """These tokens are certain, for requests that guess or may later.

        Called after every step with a prompt or with requests that were to guess; of other steps
        only to a drafter that needs all states. What is missing it must notice.
        """

    def memory_bytes(self) -> int:
        """Bytes of its weights and of what it keeps for one request's thousand tokens."""


@runtime_checkable
class Adjustable(Protocol):
    """A drafter with several modes, such as more or fewer passes.

    What a way costs is measured when an engine starts, and the one that pays most is taken.
    """

    def ways(self) -> Sequence[Sequence[float]]:
        """Of each: tokens that a step is expected to give with 0, 1, ... nodes."""

    def take(self, way: int) -> None:
        """Guess in this way from now on."""


@runtime_checkable
class HostingDrafter(Protocol):
    """A drafter in a separate process that can also compute the target's first layers."""

    target_layers: int
    """how many of them it computes"""

    def left(self, model: Transformer, cache: PagedCache) -> tuple[LaterLayers, LaterCache]:
        """The layers that are left here, and a cache of theirs; before anything is computed.

        Args:
            model: the target, whole; it keeps its layers.
            cache: of all of them.
        """


class Acceptance(Protocol):
    """A part of kind ``accept``: how draft tokens are accepted."""

    lossless: ClassVar[bool]

    def check(self, params: SamplingParams) -> None:
        """Refuse a request that this rule cannot serve.

        Raises:
            ServeError: names its parameter.
        """

    def walk(
        self, trees: Sequence[TokenTree], requests: Sequence[Request], logits_NV: Tensor
    ) -> list[Path]:
        """The accepted path of each tree, and the token that the model chose at its end.

        Args:
            trees: whose rows ``logits_NV`` has, one tree after the other.
            requests: whose they are.
            logits_NV: scores of what comes after each row.
        """


class Speculator(Protocol):
    """A part of kind ``speculative``: proposes draft tokens for an engine.

    Attributes:
        accept: how draft tokens are accepted.
    """

    @property
    def accept(self) -> Choice:
        """The acceptance rule."""

    def expects(self) -> Expectation:
        """What it is expected to do, from its files alone; needs no torch.

        Raises:
            ShoalError: they are missing or damaged.
        """

    def drafter(self, job: ServeJob, model: Transformer) -> Drafter:
        """The drafter, ready.

        Raises:
            ShoalError: its files are missing, or were made for another model.
        """


class DecodePart(Protocol):
    """A part of kind ``decode``."""

    def factory(self) -> str | None:
        """``module:function`` that builds the engine of a job that decodes so.

        Returns:
            None: it is built as the rest of the job says.
        """

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that cannot be decoded in this way.

        Raises:
            ServeError: names the way that can.
        """
