"""Go on while a guess is the model's best token."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.errors import ServeError, require
from shoal.core.parts import part
from shoal.ir import SamplingParams
from shoal.serve.decode.accept.sample_match import SampleMatch


@part
class GreedyAcceptance(SampleMatch):
    """Accept the tokens of greedy decoding; requests that sample are refused.

    Source: Stern et al., Blockwise Parallel Decoding, 2018, section 3.
    """

    lossless: ClassVar[bool] = True

    def check(self, params: SamplingParams) -> None:
        require(
            params.temperature == 0,
            "temperature",
            params.temperature,
            expected="0: this server accepts guesses by the best token alone "
            "(speculative.accept = greedy)",
            hint="leave temperature out, or serve with accept: sample_match",
            error=ServeError,
        )
