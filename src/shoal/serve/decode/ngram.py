"""Guesses from the text itself: what followed the last few tokens when they came before.

The free baseline: no weights, no training, no state beside the tokens. It pays where answers
repeat their prompt, such as edits, summaries and code.

Source: Saxena, Prompt Lookup Decoding, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Ge, Le

from shoal.core.config import Kind
from shoal.core.errors import require
from shoal.core.parts import Choice, part
from shoal.core.traits import traits
from shoal.ir import MAX_NODES, Expectation, Machine, Request, ServeJob, ServeWork
from shoal.serve.decode.protocols import AcceptedTokens, Guess, Needs, TokenTree, branches

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer

# Share of the tokens that a guess from the text itself gets right, before anything is known of
# the text: what is seen of a workload soon replaces it.
_PRIOR = 0.3


@part
class Ngram:
    """A chain: the continuation of the latest earlier occurrence of the last tokens.

    Args:
        longest: length of the longest suffix to search for.
        shortest: length of the shortest suffix to search for.
        nodes: largest number of draft tokens.
        accept: how draft tokens are accepted.
    """

    longest: int = 4
    shortest: int = 2
    nodes: Annotated[int, Ge(1), Le(MAX_NODES)] = 8
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")

    def __post_init__(self) -> None:
        require(
            1 <= self.shortest <= self.longest <= 64,
            "speculative.ngram.shortest",
            self.shortest,
            expected=f"1 to longest = {self.longest}, at most 64",
        )

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Where answers repeat parts of their prompts; it needs no training."""
        if work.one_rank and "quotes_prompts" in traits("workload", work.job.workload):
            yield cls()

    def expects(self) -> Expectation:
        shares = [_PRIOR**level for level in range(self.nodes + 1)]
        return Expectation(
            tokens=tuple(accumulate(shares)),
            assumes=f"{_PRIOR:.0%} of the guesses from the text itself are taken to be right",
        )

    def drafter(self, job: ServeJob, model: Transformer) -> NgramDrafter:
        return NgramDrafter(self.longest, self.shortest, self.nodes)


class _Index:
    """Where each run of tokens of one request ended last, by its length."""

    def __init__(self, lengths: range) -> None:
        self._lengths = lengths
        self._ends: dict[tuple[int, ...], int] = {}
        self.upto = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what is new; the run at the very end is not its own continuation."""
        for stop in range(self.upto, len(tokens)):
            for length in self._lengths:
                if stop >= length:
                    self._ends[tuple(tokens[stop - length : stop])] = stop
        self.upto = max(self.upto, len(tokens))

    def after(self, tokens: Sequence[int]) -> int | None:
        """Where what followed the last tokens begins; None if they are new."""
        for length in reversed(self._lengths):
            if len(tokens) > length:
                value = self._ends.get(tuple(tokens[-length:]))
                if value is not None:
                    return value
        return None


class NgramDrafter:
    """The drafter that :class:`Ngram` builds.

    Args:
        longest: length of the longest suffix to search for.
        shortest: length of the shortest suffix to search for.
        nodes: largest number of draft tokens.
    """

    needs: ClassVar[Needs] = "nothing"

    def __init__(self, longest: int, shortest: int, nodes: int) -> None:
        from shoal.serve.engine.adjust import RequestHistory

        self._nodes = nodes
        lengths = range(shortest, longest + 1)
        self._known = RequestHistory(lambda request: _Known(request, lengths))

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        import numpy as np

        results: list[TokenTree | None] = []
        known = self._known.of([guess.request for guess in guesses])
        for guess, one in zip(guesses, known, strict=True):
            tokens = guess.request.tokens
            one.index.extend(tokens)
            start = one.index.after(tokens)
            if start is None:
                results.append(None)
                continue
            ahead = tokens[start : start + min(guess.nodes, self._nodes)]
            shape = branches(tuple(range(-1, len(ahead))))
            results.append(TokenTree(np.array([tokens[-1], *ahead]), shape))
        return results

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """Nothing: the tokens are all there is."""

    def memory_bytes(self) -> int:
        return 300 * 1000


class _Known:
    """What is known of one request."""

    def __init__(self, request: object, lengths: range) -> None:
        assert isinstance(request, Request)
        self.request = request
        self.index = _Index(lengths)
