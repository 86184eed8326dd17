"""A net over the target's features guesses several tokens a pass, and goes on from its guesses.

The first pass reads the target's own features of what is certain and gives the next k levels of
the tree. Nodes of the last of them from which the tree goes on are read by the next pass, all in
one batch: each with its own tokens and the net's features along its path, seeing what is certain
and its path alone. What the net keeps is of certain places; guesses leave nothing in it.

Shapes: G requests, k tokens of a pass, D hidden, W guesses of a level, E nodes that are read.

Source: Gao et al., Falcon: Faster and Parallel Inference of LLMs through Enhanced
Semi-Autoregressive Drafting and Custom-Designed Decoding Tree, 2025, sections 3.1 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.config import Kind
from shoal.core.errors import require
from shoal.core.parts import Choice, part, table
from shoal.core.traits import traits
from shoal.ir import MAX_NODES, DrafterCalibration, Expectation, ServeJob
from shoal.serve.decode.passes import TreePasses
from shoal.serve.decode.trained import TrainedSpeculator

if TYPE_CHECKING:
    import numpy as np

    from shoal.ir import TreePart, TreeSpec
    from shoal.model.drafters.files import DrafterConfig
    from shoal.model.transformer import Transformer
    from shoal.serve.cache.paged import PagedCache
    from shoal.serve.decode.falcon.fast import FalconInput, FalconOutput, FastFalcon
    from shoal.serve.decode.falcon.taped import TapedFalcon
    from shoal.serve.decode.heads.featured import FeatureState
    from shoal.serve.decode.protocols import AcceptedTokens, Guess, Needs, TokenTree


@part
class FalconSpeculative(TrainedSpeculator):
    """A semi-autoregressive drafter that was trained for the served model (``job: drafter``).

    Args:
        path: its directory.
        k: tokens of a pass; 0 for the number with which the drafter was trained.
        forwards: passes of a tree; 0 to choose the number with the lowest time per token on this
            machine, among those that were evaluated in training.
        tree: tree of draft tokens that are verified together.
        weights: format of the drafter's matrices, such as int8-g128; a coarser format is faster,
            lowers the acceptance rate a little and changes no token.
        accept: how draft tokens are accepted.
    """

    path: str
    k: Annotated[int, Ge(0)] = 0
    forwards: Annotated[int, Ge(0)] = 0
    tree: Annotated[Choice, Kind("tree")] = Choice(name="auto")
    weights: str = "plain"
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")
    kind: ClassVar[str] = "falcon"

    def expects(self) -> Expectation:
        config = self.config()
        spec, square = self._ways(config)[-1], 2.0 * config.hidden**2
        # An LSTM of twelve and eight squares, a block of some twelve, and the target's head.
        passes = -(-spec.depth // int(config.options.get("k", 2)))
        return Expectation(
            tokens=spec.expected(),
            weight_bytes=32 * square + 2.0 * config.hidden * config.vocab_size,
            reads=passes,
            request_bytes=6.0 * config.hidden,
        )

    def drafter(self, job: ServeJob, model: Transformer) -> FalconDrafter:
        """See :class:`~shoal.serve.decode.protocols.Speculator`.

        Raises:
            ModelError: the net is of another kind, or was trained for another model.
            ConfigError: another k, more passes than were judged, or a tree that needs more.
        """
        from shoal.model.drafters.falcon import SemiAutoregressive
        from shoal.serve.decode.draft.files import cache_of
        from shoal.serve.decode.falcon.fast import FastFalcon
        from shoal.serve.decode.falcon.taped import recorded

        config, state = self.stored(job)
        ways = self._ways(config)
        layers = sum(name.startswith("lstm.weight_ih") for name in state)
        net = SemiAutoregressive(model.config, int(config.options.get("k", 2)), layers)
        net.load_state_dict(state)
        ready = FastFalcon(net, model, self.weights)
        limit = job.max_position or model.config.max_position
        cache, kernel = cache_of(ready.shell, job, job, limit)
        taped = recorded(ready, cache, kernel, limit + MAX_NODES + 1)
        return FalconDrafter(ready, cache, taped, ways)

    def _ways(self, config: DrafterConfig) -> list[TreeSpec]:
        """Trees of one pass, of two, ..., or of as many as are asked for."""
        k = int(config.options.get("k", 2))
        require(
            self.k in (0, k),
            "speculative.falcon.k",
            self.k,
            expected=f"{k}, for which the net in {self.path} was trained",
        )
        there = len(config.calibration) // k
        most = self.first("forwards", there, "the passes that were judged in training")
        tree: TreePart = table("tree").build(self.tree, where="speculative.falcon.tree")
        # Only a shape that follows the guesses can be had for fewer passes than there are.
        follows = "follows_guesses" in traits("tree", self.tree) and not self.forwards
        fewest = 1 if follows else most
        return [
            tree.build(DrafterCalibration(config.calibration[: k * passes]))
            for passes in range(fewest, most + 1)
        ]


class FalconDrafter:
    """The drafter that :class:`FalconSpeculative` builds.

    Args:
        net: ready.
        cache: of the net, for the keys and values of its block.
        taped: passes of few rows; all are computed the same way without.
        ways: trees of one pass, of two, ...; the last is taken until another is chosen.
    """

    needs: ClassVar[Needs] = "all"

    def __init__(
        self,
        net: FastFalcon,
        cache: PagedCache,
        taped: TapedFalcon | None,
        ways: Sequence[TreeSpec],
    ) -> None:
        from shoal.serve.decode.draft.net import DraftMemory
        from shoal.serve.decode.heads.featured import FeatureState

        self.net, self._cache, self._taped = net, cache, taped
        self._memory: DraftMemory[FeatureState] = DraftMemory(
            cache.num_blocks, cache.block_size, FeatureState
        )
        self._ways = ways
        self.take(len(ways) - 1)

    def ways(self) -> Sequence[Sequence[float]]:
        return [spec.expected() for spec in self._ways]

    def take(self, way: int) -> None:
        from functools import cache

        self.spec = self._ways[way]
        self._width = self.spec.width
        self._passes = cache(self._fitting)

    def _fitting(self, nodes: int) -> TreePasses:
        """The passes of the first so many nodes, or of so many whose rows are distinguishable."""
        tree_passes = TreePasses(self.spec.first(nodes), self.net.k)
        return tree_passes if tree_passes.rows <= MAX_NODES else self._fitting(nodes - 1)

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        import torch

        known = self._memory.of([guess.request for guess in guesses])
        ready: list[tuple[int, FeatureState, TreePasses]] = []
        for place, (guess, kept) in enumerate(zip(guesses, known, strict=True)):
            if kept.known == len(guess.request.tokens) - 1 and kept.length >= self.net.k:
                passes = self._passes(min(guess.nodes, len(self.spec)))
                if self._memory.hold(kept, kept.length + passes.rows, len(guesses)):
                    ready.append((place, kept, passes))
        results: list[TokenTree | None] = [None] * len(guesses)
        if ready:
            places, held, several = zip(*ready, strict=True)
            with torch.inference_mode():
                trees = self._trees(held, several)
            for place, tree in zip(places, trees, strict=True):
                results[place] = tree
        return results

    def _trees(
        self, known: Sequence[FeatureState], passes: Sequence[TreePasses]
    ) -> list[TokenTree]:
        from shoal.serve.decode.heads.featured import reached, reading

        roots = [kept.request.tokens[-1] for kept in known]
        trees = [one.begin(root) for one, root in zip(passes, roots, strict=True)]
        certain, order = reading(self.net, known)
        made = reached(self._read(certain), certain, known, order)
        spans = [slice(number, number + 1) for number in range(len(known))]
        for turn in range(max(len(one.passes) for one in passes)):
            if turn:
                further, spans = self._further(turn, known, passes, trees, made, spans)
                made = self._read(further)
            best = self.net.best(made.logits, self._width)
            for one, tokens, span in zip(passes, trees, spans, strict=True):
                one.fill(turn, tokens, best[span])
        return [one.tree(tokens) for one, tokens in zip(passes, trees, strict=True)]

    def _read(self, reading: FalconInput) -> FalconOutput:
        if self._taped is not None:
            return self._taped.read(reading)
        return self.net.read(reading, self._cache)

    def _further(
        self,
        turn: int,
        known: Sequence[FeatureState],
        passes: Sequence[TreePasses],
        trees: Sequence[np.ndarray],
        made: FalconOutput,
        spans: Sequence[slice],
    ) -> tuple[FalconInput, list[slice]]:
        """What the next pass reads behind nodes of all trees, and which of it is of which."""
        import numpy as np
        import torch

        from shoal.serve.decode.captured import TreeRows
        from shoal.serve.decode.falcon.fast import FalconInput, FalconState

        k, embed_VD = self.net.k, self.net.weight
        parents: list[np.ndarray] = []
        chains: list[np.ndarray] = []
        branches: list[TreeRows] = []
        following: list[slice] = []
        first = 0
        for one, kept, tokens, span in zip(passes, known, trees, spans, strict=True):
            read = one.passes[turn] if turn < len(one.passes) else None
            count = 0 if read is None else len(read.chains)
            following.append(slice(first, first + count))
            first += count
            if read is None:
                continue
            parents.append(span.start + read.parents)
            chains.append(tokens[read.chains + 1])
            depth = np.tile(np.arange((turn - 1) * k, turn * k), count)
            start = kept.length + read.before
            rows = (0,) * len(depth)
            branches.append(TreeRows(rows, kept.blocks, start, kept.length, depth, read.seen))
        from_E = torch.from_numpy(np.concatenate(parents)).to(embed_VD.device)
        tokens_Ek = torch.from_numpy(np.concatenate(chains)).to(embed_VD.device)
        x_EkX = torch.cat((made.features[from_E], embed_VD[tokens_Ek]), -1)
        state = FalconState(made.state.h[:, from_E], made.state.c[:, from_E])
        return FalconInput(x_EkX, [k] * first, state, None, branches, False), following

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """Keep the features of what is certain; they are read when a guess is wanted."""
        known = self._memory.of([one.request for one in seen])
        for one, kept in zip(seen, known, strict=True):
            kept.learn(one)

    def memory_bytes(self) -> int:
        config, width = self.net.config, self.net.weight.element_size()
        place = 2 * config.num_kv_heads * config.head_dim + config.hidden
        return self.net.nbytes + 1000 * place * width
