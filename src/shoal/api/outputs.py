"""What :class:`~shoal.api.llm.LLM` answers, in the shapes of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.ir.serving import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token at one place of an answer.

    Args:
        logprob: natural logarithm of its probability.
        rank: 1 for the best token; None where it is not among those reported.
        decoded_token: the text that it stands for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Args:
        index: among the answers to the prompt.
        text: without the stop string that ended it.
        token_ids: of the answer, the token that ended it included.
        finish_reason: ``stop`` for a stop string or a token that ends the text, ``length`` for
            ``max_tokens``.
        logprobs: token id -> log probability at each token, of it and of the best ones; None if
            not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log probability of the whole answer; None if not asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(values[token].logprob for token, values in pairs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers.

    Args:
        request_id: unique in this process.
        prompt: its text; None if token ids were given.
        prompt_token_ids: its tokens.
        outputs: ``n`` answers.
        prompt_logprobs: token id -> log probability at each token of the prompt, of it and of the
            best ones; None at the first, which follows nothing, and None if not asked for.
        finished: always true.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text.

    Args:
        embedding: as many numbers as the model's hidden states have.
    """

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text and its vector.

    Args:
        request_id: unique in this process.
        prompt_token_ids: tokens of the text.
        outputs: the vector.
        finished: always true.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
