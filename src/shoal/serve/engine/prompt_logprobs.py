"""Log probabilities of the tokens of a prompt, as its chunks are computed.

The row of a token has the scores of the token behind it, so a chunk reports its tokens but the
first, and the one behind it if the prompt goes on. Nothing is kept from chunk to chunk: a message
has the place of its first token, and the receiver leaves out what is computed again, after the
blocks of a request were taken away.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor

from shoal.ir import Chunk, StepResult, TokenInfo
from shoal.model.transformer import Transformer
from shoal.serve.engine.hooks import EngineHook, ExecutedStep, ForwardPass
from shoal.serve.engine.sampler import log_probabilities
from shoal.serve.engine.token_choice import NOT_FINITE
from shoal.serve.engine.wire import pack_infos

if TYPE_CHECKING:
    from shoal.serve.engine.build import EngineBuilder

# Scores that are computed at once: 64 MiB in fp32.
_SCORES = 2**24
# Tokens of a message, so that one with the most alternatives is a third of the largest frame.
_TOKENS = 8192


class PromptLogprobs(EngineHook):
    """Log probabilities for requests that want those of their prompt.

    Args:
        logits: scores [R, V] of hidden states [R, D], or None where another process has them;
            not given where steps are computed elsewhere.
        vocab_size: V.
    """

    kind: ClassVar[str] = "prompt_logprobs"

    def __init__(
        self, logits: Callable[[Tensor], Tensor | None] | None = None, vocab_size: int = 1
    ) -> None:
        self._logits = logits
        self._at_once = max(1, _SCORES // vocab_size)
        self._wanted: list[tuple[Chunk, range]] = []
        self._first = 0  # row behind those of others

    def executed(self, done: ExecutedStep) -> None:
        """Report log probabilities."""
        for name, (place, infos) in done.result.prompts.items():
            for start in range(0, len(infos), _TOKENS):
                part = pack_infos(infos[start : start + _TOKENS])
                self.engine.tell(self.kind, id=name, first=place + start, infos=part)

    def before_pass(self, work: ForwardPass) -> None:
        """Recordings have no scores of prompts."""
        wanted = ((chunk, places(chunk)) for chunk in work.chunks)
        self._wanted = [(chunk, tokens) for chunk, tokens in wanted if tokens]
        work.plain = work.plain and not self._wanted

    def lay_out(self, work: ForwardPass) -> None:
        """Ask for the rows behind those that are there."""
        if not self._wanted:
            return
        self._first = len(work.rows)
        last = {chunk.request.id: row for chunk, row in zip(work.chunks, work.last, strict=True)}
        for chunk, tokens in self._wanted:
            first = last[chunk.request.id] + 1 - chunk.length
            work.rows += range(first, first + len(tokens))

    def computed(self, work: ForwardPass, hidden_RD: Tensor, result: StepResult) -> StepResult:
        """The result with log probabilities of the prompts of the pass."""
        if not self._wanted:
            return result
        infos = self._infos(hidden_RD[self._first :])
        prompts, errors = dict(result.prompts), dict(result.errors)
        for chunk, tokens in self._wanted:
            own = list(itertools.islice(infos, len(tokens)))
            if len(own) < len(tokens):
                break  # another process has the scores
            if any(math.isnan(info.logprob) for info in own):
                errors[chunk.request.id] = NOT_FINITE
            else:
                prompts[chunk.request.id] = tokens.start, own
        return replace(result, prompts=prompts, errors=errors)

    def _infos(self, hidden_RD: Tensor) -> Iterator[TokenInfo]:
        """Of all rows that are wanted, in their order; a part of the rows at a time."""
        assert self._logits is not None
        rows = [
            (chunk.request.tokens[place], chunk.request.params.prompt_logprobs or 0)
            for chunk, tokens in self._wanted
            for place in tokens
        ]
        for start in range(0, len(rows), self._at_once):
            some = rows[start : start + self._at_once]
            logits_RV = self._logits(hidden_RD[start : start + len(some)])
            if logits_RV is not None:
                yield from log_probabilities(logits_RV, *map(list, zip(*some, strict=True)))


def places(chunk: Chunk) -> range:
    """Places of the prompt's tokens whose log probabilities follow from a chunk; none unasked."""
    request = chunk.request
    stop = min(chunk.stop + 1, request.n_prompt)
    return range(chunk.start + 1, stop if request.params.prompt_logprobs is not None else 0)


def prompt_logprobs_of(built: EngineBuilder) -> PromptLogprobs:
    """Of every engine: a request says whether it wants them."""
    model = built.model
    logits: Callable[[Tensor], Tensor | None] = model.logits
    if type(model).logits is Transformer.logits:
        # The layers, which some engines move elsewhere, must not stay because of this.
        head = model.head
        logits = functools.partial(F.linear, weight=model.output_weight) if head is None else head
    return PromptLogprobs(logits, model.config.vocab_size)
