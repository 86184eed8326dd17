"""Heads on the target's last hidden state guess the tokens behind the next one.

No second model and no second cache: the hidden state that chose the root is all that the heads
read. Their best guesses fill a tree whose shape follows from how often each of them was right.

Shapes: B requests, K heads, V vocabulary, D hidden, W guesses of a head.

Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads, 2024, sections 2.1 and 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.config import Kind
from shoal.core.parts import Choice, part, table
from shoal.ir import DrafterCalibration, Expectation, ServeJob
from shoal.serve.decode.heads.shaped import Filler
from shoal.serve.decode.trained import KeptGuess, TrainedSpeculator

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.ir import TreePart, TreeSpec
    from shoal.model.drafters.files import DrafterConfig
    from shoal.model.drafters.medusa import MedusaHeads
    from shoal.model.transformer import Transformer
    from shoal.serve.decode.protocols import AcceptedTokens, Guess, Needs, TokenTree


@part
class MedusaSpeculative(TrainedSpeculator):
    """Heads that were trained for the served model (``job: drafter``).

    Args:
        path: their directory.
        heads: use only the first ones, this many; 0 for all.
        tree: tree of draft tokens that are verified together.
        weights: format of their matrices, such as int8-g128; a coarser format is faster, lowers the
            acceptance rate a little and changes no token.
        accept: how draft tokens are accepted.
    """

    path: str
    heads: Annotated[int, Ge(0)] = 0
    tree: Annotated[Choice, Kind("tree")] = Choice(name="auto")
    weights: str = "plain"
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")
    kind: ClassVar[str] = "medusa"

    def drafter(self, job: ServeJob, model: Transformer) -> MedusaDrafter:
        """See :class:`~shoal.serve.decode.protocols.Speculator`.

        Raises:
            ModelError: the heads are of another kind, or were trained for another model.
            ConfigError: more heads than there are, or a tree that needs more.
        """
        from shoal.model.drafters.medusa import MedusaHeads

        config, state = self.stored(job)
        heads = MedusaHeads(len(config.calibration), config.hidden, config.vocab_size)
        heads.load_state_dict(state)
        heads.heads = heads.heads[: self._used(config)]
        return MedusaDrafter(heads, self._spec(config), model.weight, self.weights)

    def expects(self) -> Expectation:
        config = self.config()
        used = self._used(config)
        numbers = config.hidden * (config.hidden + config.vocab_size + 1)
        return Expectation(tokens=self._spec(config).expected(), weight_bytes=2.0 * used * numbers)

    def _used(self, config: DrafterConfig) -> int:
        return self.first("heads", len(config.calibration), f"those in {self.path}")

    def _spec(self, config: DrafterConfig) -> TreeSpec:
        tree: TreePart = table("tree").build(self.tree, where="speculative.medusa.tree")
        return tree.build(DrafterCalibration(config.calibration[: self._used(config)]))


class MedusaDrafter:
    """The drafter that :class:`MedusaSpeculative` builds.

    Args:
        like: dtype and device of what it computes.
        weights: format of the matrices.
    """

    needs: ClassVar[Needs] = "last"

    def __init__(
        self, heads: MedusaHeads, spec: TreeSpec, like: Tensor, weights: str = "plain"
    ) -> None:
        from shoal.serve.decode.heads.fast import FastHeads
        from shoal.serve.engine.adjust import RequestHistory

        heads = heads.to(like.device, like.dtype).requires_grad_(False)
        self._bytes = sum(one.numel() * one.element_size() for one in heads.parameters())
        self._heads = FastHeads(heads, spec.width, weights)
        self._filler = Filler(spec)
        self._known = RequestHistory(KeptGuess)

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        known = self._known.of([guess.request for guess in guesses])
        ready = [
            (guess, one.value)
            for guess, one in zip(guesses, known, strict=True)
            if one.value is not None and one.place == len(guess.request.tokens)
        ]
        if not ready:
            return [None] * len(guesses)
        best_BKW = self._heads([hidden for _, hidden in ready])
        trees = {
            guess.request.id: self._filler.tree(guess.request.tokens[-1], best_KW, guess.nodes)
            for (guess, _), best_KW in zip(ready, best_BKW, strict=True)
        }
        return [trees.get(guess.request.id) for guess in guesses]

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """Keep the state that chose the next token of each request."""
        known = self._known.of([one.request for one in seen])
        for one, kept in zip(seen, known, strict=True):
            kept.place = one.start + len(one.tokens) + 1
            kept.value = None if one.root is None or one.hidden is None else one.hidden[-1]

    def memory_bytes(self) -> int:
        return self._heads.nbytes
