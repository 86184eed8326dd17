"""One forward pass for all workers; passes of few tokens are recorded and played again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernel.paged.views import view_attention
from shoal.kernel.tape import Tape, record
from shoal.model.transformer import Transformer
from shoal.serve.decode.hogwild.attention import Pairs, QueryRotatingMixer, Realise, mixer, pairs_of
from shoal.serve.decode.hogwild.blocks import BlockStore
from shoal.serve.decode.hogwild.views import Feed

# Passes of more tokens take so long that asking the kernels is little beside.
_MOST = 64
# Recorded kinds of passes that are kept; each has memory of its own.
_KEPT = 64

_Shape = tuple[int, int, int]


class _Inputs:
    """What a pass is about, in memory that stays."""

    def __init__(self, shape: _Shape, weight: Tensor) -> None:
        rows, pairs, most = shape
        self.tokens = torch.zeros(4, rows, dtype=torch.int64)
        self.pairs = torch.zeros(4, pairs, dtype=torch.int64)
        self.parts = torch.zeros(rows, most, dtype=torch.int64)
        self.x_ND = weight.new_zeros(rows, weight.shape[1])

    def write(self, pairs: Pairs, weight: Tensor) -> None:
        self.tokens.numpy()[:] = pairs.tokens
        self.pairs.numpy()[:] = pairs.pairs
        self.parts.numpy()[:] = pairs.parts
        self.embed(weight)

    def embed(self, weight: Tensor) -> None:
        torch.index_select(weight, 0, self.tokens[0], out=self.x_ND)


class Forward:
    """Scores for the tokens of all workers at once.

    Args:
        realise: queries are turned, or keys.
    """

    def __init__(
        self, model: Transformer, store: BlockStore, *, realise: Realise = "queries"
    ) -> None:
        self._model, self._store, self._realise = model, store, realise
        self._weight = model.weight
        config = model.config
        self._kernel = None
        if realise == "queries":
            self._kernel = view_attention(
                config.num_heads, config.num_kv_heads, config.head_dim, model.weight, store.tables
            )
        self._seen: set[_Shape] = set()
        self._tapes: dict[_Shape, tuple[_Inputs, Tape]] = {}
        self.reasons: dict[_Shape, str] = {}  # why passes of this shape are not recorded

    @torch.inference_mode()
    def __call__(self, feeds: Sequence[Feed]) -> Tensor:
        """Scores [Y, V] behind the feeds that yield, in their order.

        Every token sees every other that is put down in the same pass, where its view has it.

        Raises:
            ServeError: see :func:`~shoal.serve.decode.hogwild.attention.pairs_of`.
        """
        pairs = pairs_of(self._store, feeds)
        if pairs.rows and self._kernel is not None:
            logits = self._recorded(pairs)
            if logits is not None:  # of every token: of so few it takes no longer
                return logits if len(pairs.rows) == len(logits) else logits[pairs.rows]
        tokens, mix = mixer(self._realise, self._store, pairs, self._kernel)
        rows = torch.tensor(pairs.rows, dtype=torch.int64, device=self._weight.device)
        return self._model.logits(self._model.flat(tokens[0], tokens[1], mix, rows))

    def _recorded(self, pairs: Pairs) -> Tensor | None:
        shape = pairs.shape
        if shape in self.reasons or shape[0] > _MOST:
            return None
        if shape not in self._seen:
            # The first pass of a kind may prepare kernels, which must not be repeated.
            self._seen.add(shape)
            return None
        known = self._tapes.get(shape)
        if known is None:
            return self._record(pairs)
        inputs, tape = known
        inputs.write(pairs, self._weight)
        return tape.result if tape.play() else None

    def _record(self, pairs: Pairs) -> Tensor:
        """Compute a pass, and keep what was asked if that gives the same again."""
        model, shape = self._model, pairs.shape
        inputs = _Inputs(shape, self._weight)
        inputs.write(pairs, self._weight)
        mix = QueryRotatingMixer(
            self._store, inputs.tokens, inputs.pairs, inputs.parts, self._kernel
        )

        def compute() -> Tensor:
            return model.logits(model.finished(*model.through(inputs.x_ND, inputs.tokens[1], mix)))

        result, tape = record(compute)
        if isinstance(tape, str):
            self.reasons[shape] = tape
            return result
        computed = result.clone()
        inputs.embed(self._weight)
        if tape.play() and torch.equal(result, computed):
            if len(self._tapes) == _KEPT:
                self._tapes.pop(next(iter(self._tapes)))
            self._tapes[shape] = inputs, tape
        else:
            self.reasons[shape] = "a kernel that is not seen"
        return computed
