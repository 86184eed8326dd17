"""A draft model that guesses ahead of itself, by prompt tokens that were trained for it.

Each pass of the draft verifies what its prompt tokens guessed in the pass before, and asks them for
more: the chain is the draft's own greedy one, in fewer passes. What was asked below a token of
the chain stays of use where the target accepts no further: the guesses are of the places behind,
whichever token comes between.

Shapes: N rows of a pass, V vocabulary.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference, 2024 (beside speculative decoding).
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal.core.errors import ModelError
from shoal.core.parts import Choice
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.model.drafters import files
from shoal.plan.trees.drafting import RowCosts
from shoal.plan.trees.dynamic import best_rows
from shoal.serve.decode.draft.part import DraftModelDrafter, best_tokens
from shoal.serve.decode.heads.ppd import PpdSpeculative
from shoal.serve.decode.protocols import AcceptedTokens, Guess, TokenTree, branches

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.captured import TreeRows
    from shoal.serve.decode.draft.growing import GrowingTree
    from shoal.serve.decode.draft.net import DraftNet, DraftState
    from shoal.serve.decode.heads.ppd import PpdDrafter

log = logging.getLogger("shoal.serve")

# Rows of a draft's tree: behind some tokens that it has not read, all see each other in 64 bits.
_MOST = 48

# Numbers of rows of which passes are timed, how often, and behind so many tokens.
_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, _MOST)
_ROUNDS = 12
_CONTEXT = 64


def _part(path: str, draft: str) -> PpdSpeculative:
    """The prompt tokens of a draft as they guess for a model.

    Raises:
        ModelError: there are none, or it is a drafter of another kind.
    """
    kind = files.read_config(Path(path)).name
    if kind != "ppd":
        raise ModelError(
            f"speculative.draft_model.prompts = {path}: a drafter of kind {kind}; a draft guesses "
            f"ahead by prompt tokens alone: train them with job: drafter, model: {draft}, "
            "drafter: ppd"
        )
    return PpdSpeculative(path=path, tree=Choice(name="hardware", options={"rows": _MOST}))


def passes(path: str, draft: str, depth: int) -> int:
    """Passes that a chain is expected to take, by how often the prompt tokens were right.

    Raises:
        ModelError: there are none.
    """
    return math.ceil(depth / _part(path, draft).expects().tokens[-1])


def drafter_of(
    path: str, draft: str, net: DraftNet, *, depth: int, nodes: int, limit: int
) -> DraftModelDrafter:
    """The draft with its prompt tokens, or without where they do not pay: that is measured here.

    Args:
        path: directory of the prompt tokens.
        draft: directory of the draft.
        net: the draft.
        depth: see :class:`PromptedDrafter`, as the others.
        nodes: the same.
        limit: the same.

    Raises:
        ModelError: they are of another kind of drafter, or were trained for another model.
    """
    from shoal.model.transformer import Transformer

    assert isinstance(net.model, Transformer)
    prompts = _part(path, draft).drafter(ServeJob(model=draft), net.model)
    rows = _paying(net, prompts, limit)
    if rows < prompts.trees.fewest:
        log.info("%s: prompt tokens of the draft do not pay here, it guesses without", path)
        return DraftModelDrafter(net, depth=depth, breadth=1, nodes=nodes, limit=limit)
    log.info("%s: the draft guesses ahead of itself, %s rows a pass", path, rows)
    return PromptedDrafter(net, prompts, rows=rows, depth=depth, nodes=nodes, limit=limit)


def _paying(net: DraftNet, prompts: PpdDrafter, limit: int) -> int:
    """N* of the draft's passes by what they take here; 1 where a token a pass pays most."""
    import torch

    trees = prompts.trees
    context = max(1, min(_CONTEXT, limit - _MOST))
    blocks = list(range(-(-(context + _MOST) // net.cache.block_size)))
    most = min(trees.most, limit - context)
    counts = sorted(count for count in {*_ROWS, trees.fewest} if count <= most)
    chains = [_chain(count, context, blocks) for count in counts]
    requests = [Guess(Request("measured", [0] * context, context, SamplingParams(max_tokens=1)), 1)]
    plain = DraftModelDrafter(net, depth=1, breadth=1, nodes=1, limit=limit)
    asking = PromptedDrafter(net, prompts, rows=trees.fewest, depth=1, nodes=1, limit=limit)
    works: list[Callable[[], object]] = [
        *(lambda rows=rows: best_tokens(net.rows([rows])) for rows in chains),
        lambda: plain.propose(requests),
        lambda: asking.propose(requests),
    ]
    taken: list[list[float]] = [[] for _ in works]
    with torch.inference_mode():
        net.read([0] * context, 0, blocks)
        for _ in range(_ROUNDS):
            for times, work in zip(taken, works, strict=True):
                began = time.perf_counter()
                work()
                times.append(time.perf_counter() - began)
    # The first pass of a kind prepares kernels, the second records. Fewer rows take no longer.
    lows = [statistics.quantiles(times[3:], n=4)[0] for times in taken]
    seconds = np.minimum.accumulate(lows[-3::-1])[::-1].tolist()
    costs = RowCosts(rows=tuple(counts), seconds_of=tuple(seconds))
    # What asking takes beside the rows, to be written down, walked through and observed.
    beside = max(0.0, lows[-1] - lows[-2] - costs.seconds(trees.fewest) + costs.seconds(1))
    expected = trees.expected()[:most]
    return best_rows(
        expected,
        [costs.seconds(rows) + beside * (rows > 1) for rows in range(1, len(expected) + 1)],
    )


def _chain(count: int, start: int, blocks: Sequence[int]) -> TreeRows:
    """Rows that stand for a tree of as many."""
    from shoal.serve.decode.captured import TreeRows

    at = np.arange(count)
    return TreeRows(np.zeros(count, dtype=np.int64), blocks, start, start, at, (2 << at) - 1)


class _Text:
    """A request as the draft goes on with it, greedily.

    Attributes:
        own: the text so far; a request, as prompt tokens guess for one.
        start: place of its first token whose keys and values are not in the draft's cache.
        asked: by place, scores [A, V] of the prompt rows below the token there.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.own = Request(request.id, [], 0, SamplingParams(max_tokens=1))
        self.start = 0
        self.asked: dict[int, Tensor] = {}

    @property
    def root(self) -> int:
        """Place of the last token."""
        return len(self.own.tokens) - 1

    def begin(self, length: int) -> None:
        """Go on from the request as it is now, of which the draft knows so many tokens.

        What was asked below the last but one stays valid, whatever chose the last.
        """
        self.own.tokens = list(self.request.tokens)
        before = self.root - 1
        last = self.asked.get(before) if length > before else None
        self.asked = {} if last is None else {before: last}

    def seen(self) -> AcceptedTokens:
        """What was asked below the last token but one."""
        before = self.root - 1
        tokens = self.own.tokens[before : before + 1]
        return AcceptedTokens(self.own, before, tokens, None, None, self.asked.get(before))

    def rows(self, tree: TokenTree, blocks: Sequence[int]) -> TreeRows:
        """The tree, behind the tokens before it that are not in the cache."""
        from shoal.serve.decode.captured import TreeRows

        behind = self.root - self.start
        at = np.arange(behind)
        before = np.array(self.own.tokens[self.start : self.root], dtype=np.int64)
        seen = tree.shape.seen << behind | (1 << behind) - 1
        return TreeRows(
            np.concatenate((before, tree.tokens.clip(0))),
            blocks,
            self.start,
            self.start,
            np.concatenate((at, tree.shape.depth + behind)),
            np.concatenate(((2 << at) - 1, seen)),
            None if tree.asking is None else tree.asking.inputs,
        )


class _Active(NamedTuple):
    """A chain that has tokens to come."""

    text: _Text
    kept: DraftState
    grown: GrowingTree


class PromptedDrafter(DraftModelDrafter):
    """A drafter of chains that asks its prompt tokens.

    Args:
        net: the draft, and its cache.
        prompts: guess for the draft.
        rows: of its trees, root and prompt rows included; enough for all prompt tokens.
        depth: number of draft tokens in a path.
        nodes: most tokens of a chain; 0 for depth.
        limit: most tokens of a request that the draft can read.
    """

    def __init__(
        self, net: DraftNet, prompts: PpdDrafter, *, rows: int, depth: int, nodes: int, limit: int
    ) -> None:
        super().__init__(net, depth=depth, breadth=1, nodes=nodes, limit=limit, beside=rows - 1)
        self.prompts, self.rows = prompts, rows
        # Of the last step alone: scores of large vocabularies are not small.
        self._texts: dict[str, _Text] = {}

    def _grow(self, growing: Sequence[tuple[Guess, DraftState, GrowingTree]]) -> None:
        before, self._texts = self._texts, {}
        active = []
        for (request, _), kept, grown in growing:
            text = before.get(request.id)
            if text is None or text.request is not request:
                text = _Text(request)
            self._texts[request.id] = text
            text.begin(kept.length)
            text.start = self._begin(request.tokens, kept)
            active.append(_Active(text, kept, grown))
        while active:
            self._pass(active)
            active = [one for one in active if len(one.grown.tokens) <= one.grown.depth]

    def _pass(self, active: Sequence[_Active]) -> None:
        """Verify what was guessed for these texts, and ask for more."""
        from shoal.serve.decode.accept.common import descend

        trees = self._trees([one.text for one in active])
        several = [
            one.text.rows(tree, one.kept.blocks) for one, tree in zip(active, trees, strict=True)
        ]
        scores_NV = self.net.rows(several)
        chosen = best_tokens(scores_NV).tolist()
        ends = np.cumsum([len(one.depth) for one in several]).tolist()
        moves: list[tuple[int, int]] = []
        for (text, kept, grown), tree, end in zip(active, trees, ends, strict=True):
            root, first = text.root, end - len(tree.shape)
            path = descend(tree, chosen[first:end])
            walked = [(row, depth) for depth, row in enumerate((0, *path.rows))]
            for row, depth in walked:
                below = tree.asking.below[row] if tree.asking is not None else ()
                if below:
                    text.asked[root + depth] = scores_NV[[first + one for one in below]]
            moves += self._moved(kept.blocks, root, walked)
            text.own.tokens += path.tokens
            text.start = text.root
            _extend(grown, path.tokens)
        self._keep(moves)

    def _trees(self, texts: Sequence[_Text]) -> list[TokenTree]:
        """Guesses below the last token of each and prompt tokens, or that token alone."""
        self.prompts.observe([one.seen() for one in texts])
        guessed = self.prompts.propose([Guess(one.own, self.rows - 1) for one in texts])
        return [
            tree
            if tree is not None and text.root + tree.shape.depth.max() < self.limit
            else TokenTree(np.array(text.own.tokens[-1:]), branches((-1,)))
            for text, tree in zip(texts, guessed, strict=True)
        ]

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self.prompts.memory_bytes()


def _extend(grown: GrowingTree, tokens: Sequence[int]) -> None:
    """Add to a chain what the draft says next; what it says it behind was computed."""
    for token in tokens:
        if len(grown.tokens) > 1:
            grown.expand()
        if len(grown.tokens) > grown.depth:
            return
        grown.add(np.array([[token]]), np.zeros((1, 1)))
