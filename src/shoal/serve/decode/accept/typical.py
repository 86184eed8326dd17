"""Accept what the model finds plausible, whether or not it would have been drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.ir import Request, SamplingParams
from shoal.serve.decode.protocols import Path, TokenTree

if TYPE_CHECKING:
    from torch import Tensor


@part
class Typical:
    """Accept tokens above a threshold that falls with the model's entropy; **not lossless**.

    A draft token x after a path is accepted if ``p(x) > min(epsilon, delta * exp(-entropy(p)))``.
    The longest accepted path is taken; of equally long ones, the most probable. The token after it
    is the model's most probable one, so the first token of every step is greedy. Requests that
    sample get less varied text than with sampling; greedy requests get greedy tokens.

    Args:
        epsilon: probability above which a draft token is always accepted.
        delta: factor of exp(-entropy) in the threshold.

    Source: Cai et al., Medusa, 2024, section 2.3.1.
    """

    epsilon: Annotated[float, Gt(0), Le(1)] = 0.09
    delta: Annotated[float, Gt(0), Le(1)] = 0.3

    lossless: ClassVar[bool] = False

    def check(self, params: SamplingParams) -> None:
        """See :class:`~shoal.serve.decode.protocols.Acceptance`; serves all."""

    def walk(
        self, trees: Sequence[TokenTree], requests: Sequence[Request], logits_NV: Tensor
    ) -> list[Path]:
        from shoal.serve.decode.accept.common import greedy_paths, rows_of

        paths = greedy_paths(trees, requests, logits_NV)
        rows = rows_of(trees)
        for at, request in enumerate(requests):
            if request.params.temperature > 0:
                scores_NV = logits_NV[rows[at]].double() / request.params.temperature
                paths[at] = self._longest(trees[at], scores_NV.log_softmax(-1))
        return [path for path in paths if path is not None]

    def _longest(self, tree: TokenTree, log_NV: Tensor) -> Path:
        p_NV = log_NV.exp()
        entropy_N = -(p_NV * log_NV.clamp(min=-1e9)).sum(-1)
        bar = ((-entropy_N).exp() * self.delta).clamp(max=self.epsilon).log().tolist()
        log = log_NV.cpu().numpy()
        # Of every row: guesses on its path and the log of their probability; None if one fell.
        results: list[tuple[int, float] | None] = [(0, 0.0)]
        for row, above in enumerate(tree.shape.parent[1:], 1):
            before = results[above]
            value = log[above, tree.tokens[row]]
            good = before is not None and value > bar[above]
            results.append((before[0] + 1, before[1] + value) if good and before else None)
        best = max((one, -row) for row, one in enumerate(results) if one is not None)
        row, taken = -best[1], []
        end = int(log[row].argmax())
        while row:
            taken.append(row)
            row = tree.shape.parent[row]
        rows = tuple(reversed(taken))
        return Path(rows, (*(int(tree.tokens[row]) for row in rows), end))
