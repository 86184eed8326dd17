"""Accept a guess as often as the model would have said it; else draw from what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.ir import Request, SamplingParams
from shoal.serve.decode.protocols import Path, TokenTree

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@part
class Rejection:
    """Rejection sampling: keeps the model's distribution and accepts more than ``sample_match``.

    A draft token x, drawn with probability q(x), is accepted with probability min(1, p(x) / q(x)).
    Otherwise p is replaced by the normalized max(p - q, 0), and the next sibling, drawn without x,
    is tested in the same way; after the last sibling the token is drawn from the remaining p. A
    draft token that was not drawn counts as certain: it is accepted with probability p(x).

    Greedy requests get greedy tokens. Requests that sample get other tokens than plain decoding
    with the same seed, from the same distribution.

    Source: Leviathan et al., 2023, section 2.3; Jeon et al., Recursive Speculative Decoding, 2024,
    section 3.2 (siblings without replacement).
    """

    traits: ClassVar[frozenset[str]] = frozenset({"draws_guesses"})
    lossless: ClassVar[bool] = True

    def check(self, params: SamplingParams) -> None:
        """See :class:`~shoal.serve.decode.protocols.Acceptance`; serves all."""

    def walk(
        self, trees: Sequence[TokenTree], requests: Sequence[Request], logits_NV: Tensor
    ) -> list[Path]:
        import numpy as np

        from shoal.serve.decode.accept.common import greedy_paths, rows_of
        from shoal.serve.engine.sampler import probabilities

        paths = greedy_paths(trees, requests, logits_NV)
        rows = rows_of(trees)
        drawn = [at for at, one in enumerate(requests) if one.params.temperature > 0]
        if not drawn:
            return [path for path in paths if path is not None]
        which = [row for at in drawn for row in range(rows[at].start, rows[at].stop)]
        params = [requests[at].params for at in drawn for _ in trees[at].tokens]
        every = len(which) == len(logits_NV)
        p_NV = probabilities(logits_NV if every else logits_NV[which], params).cpu().numpy()
        # A row that is not finite has no distribution: its best token, whose score shows it.
        for row in np.isnan(p_NV[:, 0]).nonzero()[0].tolist():
            p_NV[row] = 0
            p_NV[row, int(logits_NV[which[row]].argmax())] = 1
        first = 0
        for at in drawn:
            stop = first + len(trees[at].tokens)
            request = requests[at]
            source = generator(request.params.seed, purpose="accept", step=request.n_generated)
            paths[at] = _walk(trees[at], p_NV[first:stop], source)
            first = stop
        return [path for path in paths if path is not None]


def _walk(tree: TokenTree, p_NV: np.ndarray, source: np.random.Generator) -> Path:
    """From the root on while a child holds."""
    row, rows, tokens = 0, [], []
    while True:
        p_V = p_NV[row]
        q = None if tree.q is None else tree.q.get(row)
        q_V = None if q is None else q.double().cpu().numpy().copy()
        for child in tree.shape.children[row]:
            token = int(tree.tokens[child])
            certain = q_V is None
            chance = p_V[token] if certain else p_V[token] / q_V[token]  # type: ignore[index]
            if source.random() < chance:
                rows.append(child)
                tokens.append(token)
                row = child
                break
            p_V = p_V.copy() if certain else (p_V - q_V).clip(0)
            if q_V is None:
                p_V[token] = 0
            else:
                q_V[token] = 0
                q_V /= q_V.sum() or 1
            if not p_V.any():  # by rounding: what is left of p is what it was
                p_V = p_NV[row]
            p_V = p_V / p_V.sum()
        else:
            tokens.append(_draw(p_V, source.random()))
            return Path(tuple(rows), tuple(tokens))


def _draw(p_V: np.ndarray, uniform: float) -> int:
    cumulative = p_V.cumsum()
    place = int(cumulative.searchsorted(uniform * cumulative[-1], "right"))
    return place if place < len(p_V) else int(p_V.nonzero()[0][-1])  # by rounding
