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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from shoal.core.config import Kind
from shoal.core.errors import require
from shoal.core.parts import Choice, part, table
from shoal.ir import Calibration, Expectation, ServeJob

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from shoal.ir import TreePart, TreeSpec
    from shoal.model.drafters.files import DrafterConfig
    from shoal.model.transformer import Transformer
    from shoal.serve.decode.fast_falcon import FastFalcon, State
    from shoal.serve.decode.featured import Kept
    from shoal.serve.decode.passes import Passes
    from shoal.serve.decode.protocols import Guess, Needs, Seen, TokenTree

__all__ = ["Falcon", "FalconDrafter"]


@part
class Falcon:
    """A net that was trained for the served model (``job: drafter``).

    Args:
        path: its directory.
        k: tokens of a pass, where it must be so many; 0 for those that the net was trained for.
        forwards: passes of a tree; 0 for as many as were judged in training.
        tree: which guesses are verified together.
        weights: format of the net's matrices, such as int8-g128; a coarser one guesses a little
            worse, faster, and changes no token.
        accept: which guesses hold.
    """

    path: str
    k: int = 0
    forwards: int = 0
    tree: Annotated[Choice, Kind("tree")] = Choice(name="auto")
    weights: str = "plain"
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")

    def __post_init__(self) -> None:
        for name in ("k", "forwards"):
            value = getattr(self, name)
            require(value >= 0, f"speculative.falcon.{name}", value, expected="0 or more")

    def expects(self) -> Expectation:
        """See :class:`~shoal.serve.decode.protocols.Speculator`; weights as if in bf16."""
        from shoal.serve.decode.trained import config_of

        config = config_of("falcon", Path(self.path))
        spec, square = self._spec(config), 2.0 * config.hidden**2
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
        from shoal.serve.decode.fast_falcon import FastFalcon
        from shoal.serve.decode.trained import stored

        config, state = stored("falcon", Path(self.path), job)
        spec = self._spec(config)
        layers = sum(name.startswith("lstm.weight_ih") for name in state)
        net = SemiAutoregressive(model.config, int(config.options.get("k", 2)), layers)
        net.load_state_dict(state)
        return FalconDrafter(FastFalcon(net, model, self.weights), spec, model)

    def _spec(self, config: DrafterConfig) -> TreeSpec:
        k = int(config.options.get("k", 2))
        require(
            self.k in (0, k),
            "speculative.falcon.k",
            self.k,
            expected=f"{k}, for which the net in {self.path} was trained",
        )
        there = len(config.calibration) // k
        require(
            self.forwards <= there,
            "speculative.falcon.forwards",
            self.forwards,
            expected=f"at most {there}, the passes that were judged in training",
        )
        levels = k * (self.forwards or there)
        tree: TreePart = table("tree").build(self.tree, where="speculative.falcon.tree")
        return tree.build(Calibration(config.calibration[:levels]))


class FalconDrafter:
    """The drafter that :class:`Falcon` builds.

    Args:
        net: ready.
        spec: the tree.
        target: whose embedding the net reads.
    """

    needs: ClassVar[Needs] = "all"

    def __init__(self, net: FastFalcon, spec: TreeSpec, target: Transformer) -> None:
        from functools import cache

        from shoal.serve.adjust import Book
        from shoal.serve.decode.featured import Kept
        from shoal.serve.decode.passes import Passes

        self.net, self.spec, self._target = net, spec, target
        self._known: Book[Kept] = Book(Kept)
        self._passes = cache(lambda nodes: Passes(spec.first(nodes), net.k))
        self._width = spec.width

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        """See :class:`~shoal.serve.decode.protocols.Drafter`."""
        known = self._known.of([guess.request for guess in guesses])
        ready = [
            place
            for place, (guess, one) in enumerate(zip(guesses, known, strict=True))
            if one.known == len(guess.request.tokens) - 1 and one.known - one.first >= self.net.k
        ]
        found: list[TokenTree | None] = [None] * len(guesses)
        if ready:
            passes = [self._passes(min(guesses[place].nodes, len(self.spec))) for place in ready]
            trees = self._trees([known[place] for place in ready], passes)
            for place, tree in zip(ready, trees, strict=True):
                found[place] = tree
        return found

    def _trees(self, known: list[Kept], passes: list[Passes]) -> list[TokenTree]:
        from shoal.serve.decode.featured import catch_up

        made = [one.begin(kept.request.tokens[-1]) for one, kept in zip(passes, known, strict=True)]
        features, state = catch_up(self.net, self._target.weight, known)
        spans = [slice(number, number + 1) for number in range(len(known))]
        # Of every request: keys and values of the rows of passes that read guesses.
        held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in known]
        for turn in range(max(len(one.passes) for one in passes)):
            if turn:
                features, state, spans = self._go_on(
                    turn, known, passes, made, features, state, spans, held
                )
            best = self.net.best(features.flatten(0, 1), self._width).cpu().numpy()
            best = best.reshape(*features.shape[:2], -1)
            for one, tokens, span in zip(passes, made, spans, strict=True):
                one.fill(turn, tokens, best[span])
        return [one.tree(tokens) for one, tokens in zip(passes, made, strict=True)]

    def _go_on(
        self,
        turn: int,
        known: list[Kept],
        passes: list[Passes],
        made: list[np.ndarray],
        features: Tensor,
        state: State,
        spans: list[slice],
        held: list[list[tuple[Tensor, Tensor]]],
    ) -> tuple[Tensor, State, list[slice]]:
        """The next pass: features [E, k, D] behind the nodes that it reads, and whose they are."""
        import numpy as np
        import torch

        from shoal.serve.decode.fast_falcon import Seeing, State

        k, net, embed_VD = self.net.k, self.net, self._target.weight
        reads = [one.passes[turn] if turn < len(one.passes) else None for one in passes]
        parents = [
            span.start + read.parents
            for read, span in zip(reads, spans, strict=True)
            if read is not None
        ]
        chains = [
            tokens[read.chains + 1]
            for read, tokens in zip(reads, made, strict=True)
            if read is not None
        ]
        from_E = torch.from_numpy(np.concatenate(parents)).to(embed_VD.device)
        tokens_Ek = torch.from_numpy(np.concatenate(chains)).to(embed_VD.device)
        x_Ek = torch.cat((features[from_E], embed_VD[tokens_Ek]), -1)
        before = State(state.h[:, from_E], state.c[:, from_E])
        out, after = net.mixed(x_Ek, before, [k] * len(from_E))
        seeing: list[Seeing] = []
        positions: list[np.ndarray] = []
        following: list[slice] = []
        first = 0
        for number, (read, kept) in enumerate(zip(reads, known, strict=True)):
            count = 0 if read is None else len(read.chains)
            following.append(slice(first // k, first // k + count))
            if read is None:
                continue
            sides = [kept.held(), *held[number]]
            keys, values = (torch.cat([one[side] for one in sides]) for side in (0, 1))
            rows = count * k
            seeing.append(
                Seeing(
                    first,
                    first + rows,
                    rows,
                    keys,
                    values,
                    read.mask(kept.known - kept.first, keys),
                )
            )
            start = kept.known + (turn - 1) * k
            positions.append(np.tile(np.arange(start, start + k), count))
            first += rows
        place_R = torch.from_numpy(np.concatenate(positions)).to(embed_VD.device)
        found, keys, values = net.seen(out.flatten(0, 1), place_R, seeing)
        for number, span in enumerate(following):
            own = slice(span.start * k, span.stop * k)
            held[number].append((keys[own], values[own]))
        return found.view(len(from_E), k, -1), after, following

    def observe(self, seen: Sequence[Seen]) -> None:
        """Keep the features of what is certain; they are read when a guess is wanted."""
        for one, kept in zip(seen, self._known.of([one.request for one in seen]), strict=True):
            assert one.hidden is not None
            kept.learn(one)

    def memory_bytes(self) -> int:
        """See :class:`~shoal.serve.decode.protocols.Drafter`."""
        config, width = self.net.config, self._target.weight.element_size()
        place = 2 * config.num_kv_heads * config.head_dim + config.hidden
        return self.net.nbytes + 1000 * place * width
