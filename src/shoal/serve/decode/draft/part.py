"""A smaller model guesses: it says what it would say, token by token.

It needs no training for this target, only the same vocabulary. Its keys and values are in a cache
of its own, and what was accepted stays there.

Shapes: N rows of a pass, W nodes that a level expands, V vocabulary.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023; Chen et
al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from shoal.core.config import Kind
from shoal.core.errors import ModelError, require
from shoal.core.parts import Choice, part
from shoal.core.random import generator
from shoal.core.traits import traits
from shoal.ir import MAX_NODES, DrafterCalibration, Expectation, Machine, ServeJob, ServeWork
from shoal.serve.decode.draft.growing import GrowingTree

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from shoal.ir import Request
    from shoal.model.transformer import Transformer
    from shoal.serve.decode.draft.net import DraftMemory, DraftNet, DraftState
    from shoal.serve.decode.protocols import AcceptedTokens, Guess, Needs, TokenTree

# How often a guess is right before anything was seen, by its rank; what is seen replaces it.
_FIRST, _FALL = 0.6, 0.25

# So many new tokens are read with the first guess; more are read before, as a prompt is.
_FEW = 16


def check_tree(name: str, depth: int, breadth: int, nodes: int) -> None:
    """Refuse a tree that cannot be verified, or that the draft cannot grow.

    Raises:
        ConfigError: names the option.
    """
    where = f"speculative.{name}"
    require(1 <= depth <= 16, f"{where}.depth", depth, expected="1 to 16")
    require(
        breadth >= 1 and breadth * (depth - 1) <= MAX_NODES,
        f"{where}.breadth",
        breadth,
        expected=f"1 or more, and at most {MAX_NODES} nodes in depth - 1 = {depth - 1} levels",
    )
    require(0 <= nodes <= MAX_NODES, f"{where}.nodes", nodes,
            expected=f"0 (breadth * depth) to {MAX_NODES}")  # fmt: skip


def expectation(path: str, depth: int, breadth: int, nodes: int) -> Expectation:
    """What a draft model is expected to do, by its files.

    Raises:
        ModelError: it has none, or they are damaged.
    """
    from shoal.plan.trees.auto import AutoTree

    directory = Path(path)
    try:
        config = json.loads((directory / "config.json").read_bytes())
        weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        kept = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as cause:
        raise ModelError(
            f"{path}: no model that could draft ({cause!r}); give the directory of a smaller model "
            "with the same tokenizer"
        ) from None
    row = tuple(_FIRST * _FALL**rank for rank in range(min(breadth, 3)))
    tokens = AutoTree(nodes=nodes).build(DrafterCalibration((row,) * depth)).expected()
    return Expectation(
        tokens=tokens, weight_bytes=float(weights), reads=depth, request_bytes=4.0 * kept
    )


@part
class DraftModel:
    """A model directory of the same vocabulary and tokenizer as the served model's.

    Args:
        path: directory of the draft model.
        depth: number of draft tokens in a path.
        breadth: nodes of each level that are expanded, and draft tokens of each; 1 makes a chain,
            more make a tree by the probabilities of the draft.
        nodes: largest number of draft tokens that are verified, the most probable ones; 0 for
            breadth * depth.
        prompts: directory of prompt tokens (``ppd``) that were trained for the draft model, which
            makes the same chain in fewer passes; empty for one token per pass.
        accept: how draft tokens are accepted. With ``rejection``, the draft tokens of requests that
            sample are drawn from the draft's probabilities.
    """

    path: str
    depth: int = 4
    breadth: int = 1
    nodes: int = 0
    prompts: str = ""
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")

    def __post_init__(self) -> None:
        check_tree("draft_model", self.depth, self.breadth, self.nodes)
        if self.prompts:
            require(self.breadth == 1, "speculative.draft_model.breadth", self.breadth,
                    expected="1 with prompts, which guess a chain",
                    hint="leave breadth out, or prompts")  # fmt: skip
            require("draws_guesses" not in traits("accept", self.accept),
                    "speculative.draft_model.accept", self.accept.name,
                    expected="another rule with prompts, which draw nothing",
                    hint="use accept: sample_match, or leave prompts out")  # fmt: skip

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Of every draft model that there is."""
        for directory in work.drafters if work.one_rank else ():
            if (Path(directory) / "config.json").is_file():
                yield cls(path=directory)

    def expects(self) -> Expectation:
        expected = expectation(
            self.path, self.depth, self.breadth, self.nodes or self.breadth * self.depth
        )
        if not self.prompts:
            return expected
        from shoal.serve.decode.heads.prompted import passes

        return replace(expected, reads=passes(self.prompts, self.path, self.depth))

    def drafter(self, job: ServeJob, model: Transformer) -> DraftModelDrafter:
        """See :class:`~shoal.serve.decode.protocols.Speculator`.

        Raises:
            ModelError: no model lies there, or it is of another vocabulary or tokenizer; or its
                prompts are none, or were trained for another model.
        """
        from shoal.serve.decode.draft.files import load_draft

        net, limit = load_draft(self.path, job, model)
        if self.prompts:
            from shoal.serve.decode.heads.prompted import drafter_of

            return drafter_of(
                self.prompts, self.path, net, depth=self.depth, nodes=self.nodes, limit=limit
            )
        return DraftModelDrafter(
            net,
            depth=self.depth,
            breadth=self.breadth,
            nodes=self.nodes,
            limit=limit,
            draws="draws_guesses" in traits("accept", self.accept),
        )


class DraftModelDrafter:
    """The drafter that :class:`DraftModel` builds.

    Args:
        net: the draft, and its cache.
        depth: number of draft tokens in a path.
        breadth: nodes of each level that are expanded.
        nodes: most nodes of a tree; 0 for breadth * depth.
        limit: most tokens of a request that the draft can read.
        draws: draft tokens of requests that sample are drawn.
        quick: computes the levels behind the first in the place of ``net``, on the same cache and
            not as exactly: the keys and values that it leaves are computed again by ``net``.
        repairs: they are; False keeps them, to see what that costs.
        beside: rows of a pass beside those of the tree, which need room, too.
    """

    needs: ClassVar[Needs] = "nothing"

    def __init__(
        self,
        net: DraftNet,
        *,
        depth: int,
        breadth: int,
        nodes: int,
        limit: int,
        draws: bool = False,
        quick: DraftNet | None = None,
        repairs: bool = True,
        beside: int = 0,
    ) -> None:
        from shoal.serve.decode.draft.net import DraftMemory, DraftState

        self.net, self.quick = net, quick or net
        self.depth, self._breadth, self._nodes = depth, breadth, nodes or breadth * depth
        self.limit, self._draws, self._beside = limit, draws, beside
        self._keeps = quick is None or not repairs
        cache = net.cache
        self.memory: DraftMemory[DraftState] = DraftMemory(
            cache.num_blocks, cache.block_size, DraftState
        )

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        import torch

        known = self.memory.of([guess.request for guess in guesses])
        growing: list[tuple[Guess, DraftState, GrowingTree]] = []
        self._settle(known)
        with torch.inference_mode():
            for guess, kept in zip(guesses, known, strict=True):
                tokens = guess.request.tokens
                depth = min(self.depth, self._nodes, guess.nodes, self.limit - len(tokens))
                room = len(tokens) + self._breadth * max(0, depth - 1) + self._beside
                if depth >= 1 and self.memory.hold(kept, room, len(guesses)):
                    growing.append((guess, kept, GrowingTree(tokens[-1], depth, self._breadth)))
            if growing:
                self._grow(growing)
        token_trees: dict[str, TokenTree] = {}
        for guess, kept, grown in growing:
            kept.tree, kept.computed = grown.tree(min(guess.nodes, self._nodes))
            token_trees[guess.request.id] = kept.tree
        return [token_trees.get(guess.request.id) for guess in guesses]

    def _settle(self, known: Sequence[DraftState]) -> None:
        """Keep what was computed of accepted guesses, at the places that their tokens have."""
        moves: list[tuple[int, int]] = []
        for kept in known:
            if kept.tree is None:
                continue
            if self._keeps:
                kept.length, moved = kept.accepted()
                moves += self._moved(kept.blocks, kept.root, moved)
            kept.tree = None
        self._keep(moves)

    def _moved(
        self, blocks: Sequence[int], root: int, rows: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Slots (from, to) of the rows behind a root that are to move."""
        from shoal.serve.engine.runner import slots

        size = self.net.cache.block_size
        far = [(root + source, root + target) for source, target in rows if source != target]
        sources = slots(blocks, [source for source, _ in far], size)
        targets = slots(blocks, [target for _, target in far], size)
        return list(zip(sources, targets, strict=True))

    def _keep(self, moves: Sequence[tuple[int, int]]) -> None:
        self.net.keep([source for source, _ in moves], [target for _, target in moves])

    def _begin(self, tokens: Sequence[int], kept: DraftState) -> int:
        """The first place that a pass has to read; what is long is read before."""
        last = len(tokens) - 1
        start = min(kept.length, last)
        if last - start >= _FEW:
            self.net.read(tokens[start:last], start, kept.blocks)
            start = last
        kept.length = len(tokens)
        kept.root = last
        return start

    def _grow(self, growing: Sequence[tuple[Guess, DraftState, GrowingTree]]) -> None:
        import numpy as np

        from shoal.serve.decode.captured import TreeRows

        several = []
        for guess, kept, _ in growing:
            tokens = guess.request.tokens
            start = self._begin(tokens, kept)
            rows = np.arange(len(tokens) - start)
            seen = (np.int64(1) << rows + 1) - 1
            several.append(TreeRows(tokens[start:], kept.blocks, start, start, rows, seen))
        logits = self.net.rows(several)
        ends = np.cumsum([len(one.depth) for one in several]) - 1
        alone = len(ends) == len(logits)
        scores = logits if alone else logits[ends.tolist()]
        level = 1
        active = list(growing)
        counts = [1] * len(active)
        while True:
            self._add(active, counts, scores, level)
            active = [one for one in active if one[2].depth > level]
            if not active:
                return
            several, counts = [], []
            for _, kept, grown in active:
                new, first, seen = grown.expand()
                depth = np.full(len(new), level)
                start = kept.root + first
                several.append(TreeRows(new, kept.blocks, start, kept.root, depth, seen))
                counts.append(len(new))
            scores = self.quick.rows(several)
            level += 1

    def _add(
        self,
        active: Sequence[tuple[Guess, DraftState, GrowingTree]],
        counts: Sequence[int],
        scores_NV: Tensor,
        level: int,
    ) -> None:
        """New nodes below the expanded ones of every request."""
        import numpy as np

        drawing = [self._draws and guess.request.params.temperature > 0 for guess, _, _ in active]
        if not all(drawing):
            if self._breadth == 1:
                tokens = best_tokens(scores_NV)[:, None]
                values = np.zeros(tokens.shape)
            else:
                best = scores_NV.float().log_softmax(-1).topk(self._breadth)
                tokens, values = best.indices.cpu().numpy(), best.values.cpu().numpy()
        first = 0
        for (guess, _, grown), count, draws in zip(active, counts, drawing, strict=True):
            rows = slice(first, first + count)
            if draws:
                self._draw(guess.request, grown, scores_NV[rows], level)
            else:
                grown.add(tokens[rows], values[rows])
            first += count

    @staticmethod
    def _draw(request: Request, grown: GrowingTree, scores_WV: Tensor, level: int) -> None:
        from shoal.serve.engine.sampler import probabilities

        q_WV = probabilities(scores_WV, [request.params] * len(scores_WV))
        step, seed = request.n_generated, request.params.seed
        grown.draw(q_WV, generator(seed, purpose="draft", step=step, layer=level))

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """Nothing: a request's tokens say what became of its guesses."""

    def memory_bytes(self) -> int:
        from shoal.serve.cache.paged import token_bytes

        cache, config = self.net.cache, self.net.model.config
        return self.net.nbytes + 1000 * token_bytes(config, cache.dtype, cache.form)


def best_tokens(scores_NV: Tensor) -> np.ndarray:
    """The best token of each row; a tenth of the time that PyTorch takes for rows of bf16."""
    if scores_NV.device.type != "cpu":
        tokens: np.ndarray = scores_NV.argmax(-1).cpu().numpy()
        return tokens
    import torch

    wide = scores_NV.to(torch.promote_types(scores_NV.dtype, torch.float32))
    best: np.ndarray = wide.numpy().argmax(-1)
    return best
