"""Values that a variable may have: between bounds, multiples of a factor, of given primes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal.core.errors import PlanError, require

# Below so many candidates a domain is a list of values.
EXPLICIT = 2048


class Empty(Exception):  # noqa: N818 - not an error: a branch of the search that has ended
    """A domain has no value left."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Values that a variable may have.

    Args:
        values: all of them in rising order, or None for every multiple of ``factor``.
        factor: what divides every value.
        primes: no value has other prime factors than these; None: any.
    """

    low: int
    high: int
    values: tuple[int, ...] | None = None
    factor: int = 1
    primes: frozenset[int] | None = None

    @staticmethod
    def of(values: Sequence[int]) -> Domain:
        """Exactly these.

        Raises:
            PlanError: there are none.
        """
        require(bool(values), "domain", "no values", expected="at least one", error=PlanError)
        ordered = tuple(sorted(set(values)))
        return Domain(ordered[0], ordered[-1], ordered, max(1, math.gcd(*ordered)))

    @property
    def fixed(self) -> bool:
        """One value is left."""
        return self.low == self.high

    @property
    def size(self) -> int:
        """Candidates: the values, or the multiples of the factor between the bounds."""
        if self.values is not None:
            return len(self.values)
        return (self.high - self.low) // self.factor + 1

    def candidates(self) -> Iterator[int]:
        """The values in rising order."""
        if self.values is not None:
            yield from self.values
            return
        for value in range(self.low, self.high + 1, self.factor):
            if self.primes is None or _smooth(value, self.primes):
                yield value

    def narrowed(
        self,
        low: int | None = None,
        high: int | None = None,
        factor: int = 1,
        primes: frozenset[int] | None = None,
        keep: Callable[[int], bool] | None = None,
    ) -> Domain:
        """Those of the values that are also like this.

        Raises:
            Empty: there are none.
        """
        low = self.low if low is None else max(low, self.low)
        high = self.high if high is None else min(high, self.high)
        factor = math.lcm(self.factor, factor) if factor else 0
        both = self.primes if primes is None else primes & (self.primes or primes)
        if factor == 0:
            # Only zero is a multiple of zero.
            low, high, factor = max(low, 0), min(high, 0), 1
        low, high = -(-low // factor) * factor, high // factor * factor
        if low > high:
            raise Empty
        same = (low, high, factor, both) == (self.low, self.high, self.factor, self.primes)
        if same and keep is None:
            return self
        values = self.values
        if values is None and (high - low) // factor < EXPLICIT:
            values = tuple(range(low, high + 1, factor))
            same = False
        if values is None and both is not None and low > 0:
            values = _products(both, low, high, factor)
            same = False
        if values is None:
            return Domain(low, high, None, factor, both)
        kept = tuple(
            value
            for value in values
            if low <= value <= high
            and value % factor == 0
            and (both is None or _smooth(value, both))
            and (keep is None or keep(value))
        )
        if not kept:
            raise Empty
        if same and len(kept) == len(values):
            return self
        return Domain(kept[0], kept[-1], kept, math.gcd(*kept) or factor, both)

    def __str__(self) -> str:
        if self.values is not None and len(self.values) <= 8:
            return "{" + ", ".join(map(str, self.values)) + "}"
        text = f"{self.low}..{self.high}"
        return text + (f" % {self.factor}" if self.factor > 1 else "")


def _smooth(value: int, primes: frozenset[int]) -> bool:
    """The value has no prime factor but these; 0 has all of them."""
    if value == 0:
        return False
    value = abs(value)
    for prime in primes:
        while value % prime == 0:
            value //= prime
    return value == 1


def _products(primes: frozenset[int], low: int, high: int, factor: int) -> tuple[int, ...] | None:
    """All products of the primes between the bounds, or None if they are too many."""
    results = [1]
    for prime in sorted(primes):
        for value in results:
            if value * prime <= high:
                results.append(value * prime)
            if len(results) > 64 * EXPLICIT:
                return None
    kept = sorted(v for v in results if v >= low and v % factor == 0)
    if not kept:
        raise Empty
    return tuple(kept) if len(kept) <= EXPLICIT else None


@functools.lru_cache(maxsize=4096)
def prime_factors(value: int) -> frozenset[int]:
    """The primes that divide a number."""
    value, prime_factors, prime = abs(value), set[int](), 2
    while prime * prime <= value:
        while value % prime == 0:
            prime_factors.add(prime)
            value //= prime
        prime += 1
    if value > 1:
        prime_factors.add(value)
    return frozenset(prime_factors)
