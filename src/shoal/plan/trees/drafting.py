"""How many guesses pay: expected tokens of a step over its measured seconds.

A step of more rows takes longer, on one machine hardly and on another by every row; with many
requests the rows of all of them add up. So the number of nodes is the one with the most expected
tokens per second for as many requests as decode now, and none where plain decoding has more. What
is accepted is watched: the expected tokens behind the first are scaled by what came of earlier
guesses, and the rows by how often there was anything to guess. So are the seconds of the steps
themselves: a table that was measured on a busy machine is put right by what steps with guesses and
steps without take. Where guessing is off because it went badly, it is tried again now and then.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding, 2024, section 3.3.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError, require
from shoal.core.files import write_json
from shoal.core.tables import ShownAsTables, Table, table_of
from shoal.ir import MAX_NODES, StepCost, VerificationCost

# Weight of the newest step in what is known of acceptance; some fifty steps count.
_NEWEST = 0.02

# Steps without a guess after which some are made to see whether they pay now. A drafter that was
# given nothing meanwhile guesses nothing in the first of them.
_AGAIN, _TRIED = 256, 2

# While guesses are made, a step without any is made so often, and more often until some are known,
# to see what it would take.
_COMPARE, _SOON, _FEW = 512, 4, 4

# Guessing has to be so much better than plain decoding, or the difference is noise.
_GAIN = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts(ShownAsTables):
    """Step time as a function of the number of rows, linear between measured points.

    Args:
        seconds: of a step of each of these.
        draft_s: s of drafting per step, independent of the number of requests.
        draft_request_s: s of each request more.
        draft_less: (nodes, s) in ascending order: time saved by trees of fewer nodes, as with an
            autoregressive drafter.
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

    def tables(self) -> Iterable[Table | str]:
        """Time by rows, and that of guesses."""
        rows = [
            (str(count), f"{1e3 * seconds:.3f} ms", f"{seconds / self.seconds_of[0]:.2f}x")
            for count, seconds in zip(self.rows, self.seconds_of, strict=True)
        ]
        yield table_of("step time by rows", ("rows", "step", "over one row"), rows, "rrr")
        yield (
            f"guesses: {1e3 * self.draft_s:.3f} ms a step and {1e3 * self.draft_request_s:.3f} ms "
            "a request"
        )

    @property
    def falls(self) -> tuple[int, ...]:
        """Rows measured to take a tenth less time than fewer rows: noise, or another kernel."""
        pairs = zip(self.seconds_of, self.seconds_of[1:], self.rows[1:], strict=False)
        return tuple(rows for before, after, rows in pairs if after < 0.9 * before)

    @classmethod
    def read(cls, path: Path) -> RowCosts:
        """A table as :meth:`write` leaves it.

        Raises:
            ConfigError: the file is missing, or is no such table.
        """
        try:
            raw = json.loads(path.read_bytes())
            return cls(
                rows=tuple(int(rows) for rows in raw["rows"]),
                seconds_of=tuple(float(seconds) for seconds in raw["seconds"]),
                draft_s=float(raw.get("draft_s", 0.0)),
                draft_request_s=float(raw.get("draft_request_s", 0.0)),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as cause:
            raise ConfigError(
                f"{path}: no table of step costs ({type(cause).__name__}: {cause}); shoal probe "
                "decode writes one"
            ) from cause

    def write(self, path: Path) -> None:
        """Keep it as JSON, in seconds."""
        table = {
            "rows": self.rows,
            "seconds": self.seconds_of,
            "draft_s": self.draft_s,
            "draft_request_s": self.draft_request_s,
        }
        write_json(path, table)

    def seconds(self, rows: int) -> float:
        at = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        if not at:
            return self.seconds_of[0]
        low, high = self.rows[at - 1], self.rows[at]
        a, b = self.seconds_of[at - 1], self.seconds_of[at]
        return max(min(a, b) / 2, a + (b - a) * (rows - low) / (high - low))

    def drafting_s(self, requests: int, nodes: int = MAX_NODES) -> float:
        whole = self.draft_s + self.draft_request_s * requests
        # Between two numbers of nodes, of which nothing is known, as much as for more of them.
        less = next((saved for count, saved in self.draft_less if nodes <= count), 0.0)
        return max(whole / 8, whole - less)


@dataclass(frozen=True, slots=True)
class PredictedRows:
    """Predicted costs: rows by the cost of a step, drafting by reading the drafter's weights.

    Args:
        cost: seconds of a step.
        context: tokens that a request has, on average.
        guess_s: s of drafting per step.
    """

    cost: StepCost
    context: int
    guess_s: float

    def seconds(self, rows: int) -> float:
        return self.cost.seconds([(self.context, 1)] * rows)

    def drafting_s(self, requests: int, nodes: int) -> float:
        return self.guess_s


class FixedDrafting:
    """A fixed number of nodes; for comparisons and tests.

    Args:
        count: nodes of every tree.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def nodes(self, requests: int) -> int:
        return self.count

    def observe(self, guessed: Sequence[int], accepted: Sequence[int]) -> None:
        """See :class:`~shoal.ir.decoding.Drafting`."""

    def took(self, requests: int, asked: int, nodes: int, seconds: float) -> None:
        """See :class:`~shoal.ir.decoding.Drafting`."""


class ProfitableDrafting:
    """Drafts only if this gives more tokens per second than plain decoding.

    Args:
        expected: expected tokens per step and request with 0, 1, ... nodes.
        cost: seconds of steps and of drafting.
        fixed: number of nodes if drafting pays off; None for the best number.
    """

    # ``worth``: accepted tokens over those hoped for from the same trees. ``share``: of requests
    # that were to guess, those that had a tree. Both of late.
    def __init__(
        self, expected: Sequence[float], cost: VerificationCost, *, fixed: int | None = None
    ) -> None:
        require(
            len(expected) >= 2 and expected[0] == 1,
            "expected tokens",
            len(expected),
            expected="1 with no node, and a number for at least one node",
        )
        self.expected, self.cost = tuple(expected[: MAX_NODES + 1]), cost
        self._choices = [fixed] if fixed else list(range(1, len(self.expected)))
        self.worth = self.share = 1.0
        self._chosen: dict[int, int] = {}
        self._hopeless: dict[int, bool] = {}
        self._off = 0
        self._on: dict[int, int] = {}
        self._fresh = True
        self._known: dict[int, tuple[float, float, float]] = {}
        self._pace: dict[tuple[int, bool], _Pace] = {}

    def rate(self, nodes: int, requests: int) -> float:
        """Expected tokens per s of all requests together."""
        return requests * self._tokens(nodes) / self._seconds(nodes, requests)

    def _tokens(self, nodes: int) -> float:
        expected = self.expected[min(nodes, len(self.expected) - 1)] - 1
        return 1 + self.share * self.worth * expected

    def _seconds(self, nodes: int, requests: int) -> float:
        if not nodes:
            return self.cost.seconds(requests)
        rows = round(requests * (1 + self.share * nodes))
        predicted = self.cost.seconds(rows) + self.cost.drafting_s(requests, nodes)
        return predicted * math.exp(self._dearer(requests))

    def _dearer(self, requests: int) -> float:
        """Logarithm of what guesses take more than predicted, beside plain steps, as was seen."""
        guessing, plain = (self._paced(requests, guessed) for guessed in (True, False))
        if min(guessing.count, plain.count) < _FEW:
            return 0.0
        return guessing.log - plain.log

    def _paced(self, requests: int, guessed: bool) -> _Pace:
        return self._pace.setdefault((requests.bit_length(), guessed), _Pace())

    def best(self, requests: int) -> int:
        """Nodes with the most expected tokens per s; 0 where none is better than plain."""
        nodes = max(self._choices, key=lambda count: self.rate(count, requests))
        return nodes if self.rate(nodes, requests) > _GAIN * self.rate(0, requests) else 0

    def nodes(self, requests: int) -> int:
        now = (self.worth, self.share, self._dearer(requests))
        known = self._known.get(requests)
        if known is None or max(abs(a - b) for a, b in zip(now, known, strict=True)) > 0.02:
            self._known[requests] = now
            self._chosen[requests] = self.best(requests)
        chosen = self._chosen[requests]
        if chosen:
            self._on[requests] = on = self._on.get(requests, 0) + 1
            seldom = self._paced(requests, False).count >= _FEW
            if on % (_COMPARE if seldom else _SOON) == 0:
                self._off = 1
                return 0
            self._fresh = self._off > 0
            self._off = 0
            return chosen
        self._off += 1
        tried = self._off % (_AGAIN + _TRIED) - _AGAIN
        if tried >= 0 and not self._dear(requests):
            self._fresh = tried == 0
            if self._fresh:
                self._paced(requests, True).age()
            return self._choices[min(3, len(self._choices) - 1)]
        return 0

    def _dear(self, requests: int) -> bool:
        """Rows cost too much for so many requests, even if guesses came true as hoped for."""
        if requests not in self._hopeless:
            fixed = self._choices[0] if len(self._choices) == 1 else None
            hoped = ProfitableDrafting(self.expected, self.cost, fixed=fixed)
            self._hopeless[requests] = not hoped.best(requests)
        return self._hopeless[requests]

    def observe(self, guessed: Sequence[int], accepted: Sequence[int]) -> None:
        trees = [nodes for nodes in guessed if nodes]
        if not trees and self._fresh:
            return  # the drafter had yet to see where these requests are
        share = len(trees) / len(guessed)
        self.share += _newest(len(guessed)) * (share - self.share)
        hoped = sum(self.expected[min(nodes, len(self.expected) - 1)] - 1 for nodes in trees)
        if hoped > 0:
            self.worth += _newest(len(trees)) * (min(2.0, sum(accepted) / hoped) - self.worth)

    def took(self, requests: int, asked: int, nodes: int, seconds: float) -> None:
        predicted = self.cost.seconds(requests + nodes)
        if asked:  # even if nothing was found to guess, it was looked for
            predicted += self.cost.drafting_s(asked, max(1, nodes // asked))
        self._paced(requests, asked > 0).see(seconds / predicted)

    def table(self, requests: int = 1) -> Mapping[int, tuple[float, float, float]]:
        """By number of nodes: expected tokens, seconds of a step, and tokens per s over plain's."""
        plain = self.rate(0, requests)
        return {
            nodes: (
                self._tokens(nodes),
                self._seconds(nodes, requests),
                self.rate(nodes, requests) / plain,
            )
            for nodes in range(len(self.expected))
        }


class _Pace:
    """How many times as long as predicted steps take: about the median, in logarithms.

    Some steps take much longer, such as the first of their kind, or those in which the machine does
    something else. So each moves what is known by as much, whatever it took.
    """

    def __init__(self) -> None:
        self.count = 0
        self.log = 0.0

    def see(self, times: float) -> None:
        """A step took so many times as long as predicted."""
        if times > 0:
            step = max(0.015, 1.0 / (4 + self.count))
            self.log += max(-step, min(step, math.log(times) - self.log))
            self.count += 1

    def age(self) -> None:
        """It was long ago: what steps take now counts for as much as when little was known."""
        self.count = min(self.count, _FEW)


def _newest(count: int) -> float:
    """Weight of so many new observations together."""
    return 1 - (1 - _NEWEST) ** count
