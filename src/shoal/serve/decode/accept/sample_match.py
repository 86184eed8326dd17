"""Draw from the model at every node; go on while a guess is what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.ir import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.protocols import Path, TokenTree


@part
class SampleMatch:
    """Accept the tokens that plain decoding gives, greedy or sampled with the same seed.

    The random number of a token depends on the request's seed and the token's position alone, so
    the row of a node samples with the number of plain decoding.

    Source: Miao et al., SpecInfer, 2023, section 4.3 (naive sampling).
    """

    lossless: ClassVar[bool] = True

    def check(self, params: SamplingParams) -> None:
        """See :class:`~shoal.serve.decode.protocols.Acceptance`; serves all."""

    def walk(
        self, trees: Sequence[TokenTree], requests: Sequence[Request], logits_NV: Tensor
    ) -> list[Path]:
        from shoal.serve.decode.accept.common import descend, rows_of
        from shoal.serve.engine.sampler import pick_tokens

        of_row = [one for one, tree in zip(requests, trees, strict=True) for _ in tree.tokens]
        ahead = [depth for tree in trees for depth in tree.shape.depth.tolist()]
        chosen = pick_tokens(logits_NV, of_row, ahead)
        return [
            descend(tree, chosen[rows]) for tree, rows in zip(trees, rows_of(trees), strict=True)
        ]
