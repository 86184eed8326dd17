"""How many guesses pay: expected tokens of a step over its measured seconds.

A step of more rows takes longer, on one machine hardly and on another by every row; with many
requests the rows of all of them add up. So the number of nodes is the one with the most expected
tokens per second for as many requests as decode now, and none where plain decoding has more. What
is accepted is watched: the expected tokens behind the first are scaled by what came of earlier
guesses, and where guessing is off it is tried again now and then.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding, 2024, section 3.3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import ConfigError, require
from shoal.ir import MAX_NODES, StepCost, Verifying

__all__ = ["Always", "Paying", "PredictedRows", "RowCosts"]

# Weight of the newest step in what is known of acceptance; some fifty steps count.
_NEWEST = 0.02

# Steps without a guess after which one is made to see whether it pays now.
_AGAIN = 256

# Guessing has to be so much better than plain decoding, or the difference is noise.
_GAIN = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Seconds of a step by its rows, measured at some numbers of them and straight between.

    Args:
        rows: rising.
        seconds: of a step of each of these.
        draft_s: s of the guesses of a step, however many requests guess.
        draft_request_s: s of each request more.
        draft_less: (nodes, s), rising: so much less is drafted for a tree of so few nodes, as by
            a drafter that makes its guesses one after the other.
    """

    rows: tuple[int, ...]
    seconds_of: tuple[float, ...]
    draft_s: float = 0.0
    draft_request_s: float = 0.0
    draft_less: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.seconds_of) or not rising:
            raise ConfigError(
                f"step costs: rows {list(self.rows)} with {len(self.seconds_of)} times; give "
                "rising numbers of rows and one time of each"
            )
        require(min(self.seconds_of) > 0, "step costs", min(self.seconds_of), expected="above 0 s")

    @property
    def falls(self) -> tuple[int, ...]:
        """Rows measured to take a tenth less time than fewer rows: noise, or another kernel."""
        pairs = zip(self.seconds_of, self.seconds_of[1:], self.rows[1:], strict=False)
        return tuple(rows for before, after, rows in pairs if after < 0.9 * before)

    def seconds(self, rows: int) -> float:
        """See :class:`~shoal.ir.decoding.Verifying`."""
        at = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        if not at:
            return self.seconds_of[0]
        low, high = self.rows[at - 1], self.rows[at]
        a, b = self.seconds_of[at - 1], self.seconds_of[at]
        return max(min(a, b) / 2, a + (b - a) * (rows - low) / (high - low))

    def drafting_s(self, requests: int, nodes: int = MAX_NODES) -> float:
        """See :class:`~shoal.ir.decoding.Verifying`."""
        whole = self.draft_s + self.draft_request_s * requests
        # Between two numbers of nodes, of which nothing is known, as much as for more of them.
        less = next((saved for count, saved in self.draft_less if nodes <= count), 0.0)
        return max(whole / 8, whole - less)


@dataclass(frozen=True, slots=True)
class PredictedRows:
    """The same predicted: rows of a step by its cost, guesses by reading the drafter's weights.

    Args:
        cost: seconds of a step.
        context: tokens that a request has, on average.
        guess_s: s of the guesses of a step.
    """

    cost: StepCost
    context: int
    guess_s: float

    def seconds(self, rows: int) -> float:
        """See :class:`~shoal.ir.decoding.Verifying`."""
        return self.cost.seconds([(self.context, 1)] * rows)

    def drafting_s(self, requests: int, nodes: int = MAX_NODES) -> float:
        """See :class:`~shoal.ir.decoding.Verifying`."""
        return self.guess_s


class Always:
    """As many nodes as were asked for, whatever they cost; for comparisons and tests.

    Args:
        count: nodes of every tree.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def nodes(self, requests: int) -> int:
        """See :class:`~shoal.ir.decoding.Drafting`."""
        return self.count

    def observe(self, guessed: Sequence[int], accepted: Sequence[int]) -> None:
        """See :class:`~shoal.ir.decoding.Drafting`."""


class Paying:
    """Guesses while they give more tokens per second than plain decoding.

    Args:
        expected: tokens that a step is expected to give one request with 0, 1, ... nodes.
        cost: seconds of steps and of guesses.
        fixed: so many nodes wherever guessing pays; None for the number that pays best.
    """

    def __init__(
        self, expected: Sequence[float], cost: Verifying, *, fixed: int | None = None
    ) -> None:
        require(
            len(expected) >= 2 and expected[0] == 1,
            "expected tokens",
            len(expected),
            expected="1 with no node, and a number for at least one node",
        )
        self.expected, self.cost = tuple(expected[: MAX_NODES + 1]), cost
        self._choices = [fixed] if fixed else list(range(1, len(self.expected)))
        self.worth = 1.0
        self._chosen: dict[int, int] = {}
        self._off = 0
        self._known = 0.0

    def rate(self, nodes: int, requests: int) -> float:
        """Expected tokens per s of all requests together."""
        tokens = 1 + self.worth * (self.expected[min(nodes, len(self.expected) - 1)] - 1)
        seconds = self.cost.seconds(requests * (1 + nodes))
        if nodes:
            seconds += self.cost.drafting_s(requests, nodes)
        return requests * tokens / seconds

    def best(self, requests: int) -> int:
        """Nodes with the most expected tokens per s; 0 where none is better than plain."""
        nodes = max(self._choices, key=lambda count: self.rate(count, requests))
        return nodes if self.rate(nodes, requests) > _GAIN * self.rate(0, requests) else 0

    def nodes(self, requests: int) -> int:
        """See :class:`~shoal.ir.decoding.Drafting`."""
        if abs(self.worth - self._known) > 0.02:
            self._known = self.worth
            self._chosen.clear()
        chosen = self._chosen.get(requests)
        if chosen is None:
            chosen = self._chosen[requests] = self.best(requests)
        if chosen:
            self._off = 0
            return chosen
        self._off += 1
        # A text that is hard to guess may have ended: try again, unless rows are too dear anyhow.
        if self._off % _AGAIN == 0 and self.worth < 1:
            return self._choices[min(3, len(self._choices) - 1)]
        return 0

    def observe(self, guessed: Sequence[int], accepted: Sequence[int]) -> None:
        """See :class:`~shoal.ir.decoding.Drafting`."""
        hoped = sum(self.expected[min(nodes, len(self.expected) - 1)] - 1 for nodes in guessed)
        if hoped > 0:
            newest = 1 - (1 - _NEWEST) ** len(guessed)
            self.worth += newest * (min(2.0, sum(accepted) / hoped) - self.worth)

    def table(self, requests: int = 1) -> Mapping[int, tuple[float, float, float]]:
        """By number of nodes: expected tokens, seconds of a step, and tokens per s over plain's."""
        plain = self.rate(0, requests)
        found = {}
        for nodes in range(len(self.expected)):
            seconds = self.cost.seconds(requests * (1 + nodes))
            seconds += self.cost.drafting_s(requests, nodes) if nodes else 0.0
            tokens = 1 + self.worth * (self.expected[nodes] - 1)
            found[nodes] = (tokens, seconds, self.rate(nodes, requests) / plain)
        return found
