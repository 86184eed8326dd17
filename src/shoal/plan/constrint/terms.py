"""What systems of constraints are made of: expressions, and what must hold of them.

Everything narrows a *box*, which gives every variable a domain: it takes away values that no
solution has. See :mod:`shoal.plan.constrint.solve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.plan.constrint.domain import Domain, Empty, prime_factors

# Numbers up to here are taken apart into primes.
_FACTORED = 1 << 32

Box = dict[str, Domain]
Interval = tuple[int, int]


class Expression:
    """A tree of sums, products and powers over variables."""

    names: frozenset[str]

    def value(self, at: Mapping[str, int]) -> int:
        """The value at an assignment."""
        raise TypeError

    def range(self, box: Box) -> Interval:
        """Bounds of the value over the box."""
        raise TypeError

    def factor(self, box: Box) -> int:
        """What divides every value; 0 where the value is always 0."""
        raise TypeError

    def primes(self, box: Box) -> frozenset[int] | None:
        """Primes that a value other than 0 can have; None if that is unknown."""
        return None

    def within(self, box: Box, low: int, high: int) -> None:
        """Narrow the box to where the value lies between the bounds."""
        raise TypeError

    def divisible(self, box: Box, factor: int) -> None:
        """Narrow the box to where the factor divides the value."""

    def composed(self, box: Box, primes: frozenset[int]) -> None:
        """Narrow the box to where the value, which is not 0, has only these primes."""


@dataclass(frozen=True, slots=True)
class Number(Expression):
    """A constant."""

    number: int
    names: frozenset[str] = frozenset()

    def value(self, at: Mapping[str, int]) -> int:
        return self.number

    def range(self, box: Box) -> Interval:
        return self.number, self.number

    def factor(self, box: Box) -> int:
        return abs(self.number)

    def primes(self, box: Box) -> frozenset[int] | None:
        return prime_factors(self.number) if abs(self.number) < _FACTORED else None

    def within(self, box: Box, low: int, high: int) -> None:
        if not low <= self.number <= high:
            raise Empty

    def divisible(self, box: Box, factor: int) -> None:
        if self.number % factor if factor else self.number:
            raise Empty


@dataclass(frozen=True, slots=True)
class Variable(Expression):
    """The value of a variable."""

    name: str
    names: frozenset[str]

    def value(self, at: Mapping[str, int]) -> int:
        return at[self.name]

    def range(self, box: Box) -> Interval:
        domain = box[self.name]
        return domain.low, domain.high

    def factor(self, box: Box) -> int:
        domain = box[self.name]
        return abs(domain.low) if domain.fixed else domain.factor

    def primes(self, box: Box) -> frozenset[int] | None:
        domain = box[self.name]
        few = domain.values is not None and len(domain.values) <= 16
        if few and max(abs(domain.low), abs(domain.high)) < _FACTORED:
            assert domain.values is not None
            return frozenset().union(*(prime_factors(v) for v in domain.values if v))
        return domain.primes

    def within(self, box: Box, low: int, high: int) -> None:
        domain = box[self.name]
        if low > domain.low or high < domain.high:
            box[self.name] = domain.narrowed(low, high)

    def divisible(self, box: Box, factor: int) -> None:
        domain = box[self.name]
        if factor == 0 or domain.factor % factor:
            box[self.name] = domain.narrowed(factor=factor)

    def composed(self, box: Box, primes: frozenset[int]) -> None:
        domain = box[self.name]
        if domain.primes is None or not domain.primes <= primes:
            box[self.name] = domain.narrowed(primes=primes)


@dataclass(frozen=True, slots=True)
class Sum(Expression):
    """Terms, added."""

    terms: tuple[Expression, ...]
    names: frozenset[str]

    def value(self, at: Mapping[str, int]) -> int:
        return sum(term.value(at) for term in self.terms)

    def range(self, box: Box) -> Interval:
        ranges = [term.range(box) for term in self.terms]
        return sum(low for low, _ in ranges), sum(high for _, high in ranges)

    def factor(self, box: Box) -> int:
        return math.gcd(*(term.factor(box) for term in self.terms))

    def within(self, box: Box, low: int, high: int) -> None:
        ranges = [term.range(box) for term in self.terms]
        below, above = sum(a for a, _ in ranges), sum(b for _, b in ranges)
        if below > high or above < low:
            raise Empty
        for term, (a, b) in zip(self.terms, ranges, strict=True):
            term.within(box, max(a, low - (above - b)), min(b, high - (below - a)))

    def divisible(self, box: Box, factor: int) -> None:
        for index, term in enumerate(self.terms):
            others = [t.factor(box) for i, t in enumerate(self.terms) if i != index]
            term.divisible(box, math.gcd(factor, *others))


@dataclass(frozen=True, slots=True)
class Product(Expression):
    """Factors, multiplied."""

    factors: tuple[Expression, ...]
    names: frozenset[str]

    def value(self, at: Mapping[str, int]) -> int:
        return math.prod(factor.value(at) for factor in self.factors)

    def range(self, box: Box) -> Interval:
        result = (1, 1)
        for factor in self.factors:
            result = _times(result, factor.range(box))
        return result

    def factor(self, box: Box) -> int:
        return math.prod(factor.factor(box) for factor in self.factors)

    def primes(self, box: Box) -> frozenset[int] | None:
        numbers: set[int] = set()
        for factor in self.factors:
            primes = factor.primes(box)
            if primes is None:
                return None
            numbers |= primes
        return frozenset(numbers)

    def within(self, box: Box, low: int, high: int) -> None:
        for index, factor in enumerate(self.factors):
            rest = (1, 1)
            for other, item in enumerate(self.factors):
                if other != index:
                    rest = _times(rest, item.range(box))
            bounds = _divided((low, high), rest)
            if bounds is not None:
                factor.within(box, *bounds)

    def divisible(self, box: Box, factor: int) -> None:
        # What is left of the factor when all that the others could have is taken out of it.
        for index, item in enumerate(self.factors):
            left = factor
            for other, rest in enumerate(self.factors):
                if other == index:
                    continue
                known = _single(rest, box)
                left = 1 if known is None else left // (math.gcd(left, known) or 1)
            if left > 1:
                item.divisible(box, left)

    def composed(self, box: Box, primes: frozenset[int]) -> None:
        for factor in self.factors:
            factor.composed(box, primes)


@dataclass(frozen=True, slots=True)
class Power(Expression):
    """A base to a constant exponent of 1 or more."""

    base: Expression
    exponent: int
    names: frozenset[str]

    def value(self, at: Mapping[str, int]) -> int:
        return int(self.base.value(at) ** self.exponent)

    def range(self, box: Box) -> Interval:
        low, high = self.base.range(box)
        ends = sorted((low**self.exponent, high**self.exponent))
        if self.exponent % 2 == 0 and low < 0 < high:
            return 0, ends[1]
        return ends[0], ends[1]

    def factor(self, box: Box) -> int:
        return int(self.base.factor(box) ** self.exponent)

    def primes(self, box: Box) -> frozenset[int] | None:
        return self.base.primes(box)

    def within(self, box: Box, low: int, high: int) -> None:
        if self.exponent % 2:
            self.base.within(
                box,
                -_root(-low, self.exponent) if low <= 0 else _root_up(low, self.exponent),
                _root(high, self.exponent) if high >= 0 else -_root_up(-high, self.exponent),
            )
            return
        if high < 0:
            raise Empty
        top = _root(high, self.exponent)
        self.base.within(box, -top, top)
        bottom = _root_up(low, self.exponent) if low > 0 else 0
        below, above = self.base.range(box)
        if below > -bottom:
            self.base.within(box, bottom, above)
        elif above < bottom:
            self.base.within(box, below, -bottom)

    def composed(self, box: Box, primes: frozenset[int]) -> None:
        self.base.composed(box, primes)

    def divisible(self, box: Box, factor: int) -> None:
        # The base has every prime of the factor.
        if 1 < factor < _FACTORED:
            self.base.divisible(box, math.prod(prime_factors(factor)))


def _root(value: int, exponent: int) -> int:
    """The largest integer whose power is at most the value, which is not negative."""
    low, high = 0, 1 << (value.bit_length() // exponent + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**exponent <= value else (low, middle - 1)
    return low


def _root_up(value: int, exponent: int) -> int:
    result = _root(value, exponent)
    return result if result**exponent == value else result + 1


def _times(a: Interval, b: Interval) -> Interval:
    ends = (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
    return min(ends), max(ends)


def _divided(a: Interval, b: Interval) -> Interval | None:
    """Bounds of the integers x with x * y in ``a`` for a y in ``b``; None: any."""
    low, high = b
    if low <= 0 <= high:
        if a[0] <= 0 <= a[1]:
            return None
        if low == high:
            raise Empty
        # y is not 0, so |x| is at most the larger end.
        largest = max(abs(a[0]), abs(a[1]))
        if low == 0:
            low = 1
        elif high == 0:
            high = -1
        else:
            return -largest, largest
    ups = [-(-x // y) for x in a for y in (low, high)]
    downs = [x // y for x in a for y in (low, high)]
    return min(ups), max(downs)


def _single(expression: Expression, box: Box) -> int | None:
    low, high = expression.range(box)
    return low if low == high else None


class Constraint:
    """What must hold: narrows a box, and judges an assignment."""

    names: frozenset[str]

    def holds(self, at: Mapping[str, int]) -> bool:
        """Whether an assignment satisfies it."""
        raise TypeError

    def narrow(self, box: Box) -> None:
        """Take away values that cannot be part of a solution.

        Raises:
            Empty: none is left.
        """
        raise TypeError

    def _filter(self, box: Box) -> None:
        """With one variable left, only values that satisfy."""
        free = [name for name in self.names if not box[name].fixed]
        if len(free) > 1:
            return
        at = {name: box[name].low for name in self.names}
        if not free:
            if not self.holds(at):
                raise Empty
            return
        name = free[0]
        if box[name].values is not None:
            box[name] = box[name].narrowed(keep=lambda value: self.holds({**at, name: value}))


@dataclass(frozen=True, slots=True)
class Relation(Constraint):
    """left == right, or left <= right."""

    left: Expression
    right: Expression
    equal: bool
    names: frozenset[str]

    def holds(self, at: Mapping[str, int]) -> bool:
        left, right = self.left.value(at), self.right.value(at)
        return left == right if self.equal else left <= right

    def narrow(self, box: Box) -> None:
        low, high = self.left.range(box)
        below, above = self.right.range(box)
        if self.equal:
            low, above = max(low, below), min(high, above)
            if low > above:
                raise Empty
            self.left.within(box, low, above)
            self.right.within(box, low, above)
            self.left.divisible(box, self.right.factor(box))
            self.right.divisible(box, self.left.factor(box))
            if low > 0:
                for one, other in ((self.left, self.right), (self.right, self.left)):
                    primes = other.primes(box)
                    if primes is not None:
                        one.composed(box, primes)
        else:
            if low > above:
                raise Empty
            self.left.within(box, low, min(high, above))
            self.right.within(box, max(low, below), above)
        self._filter(box)


@dataclass(frozen=True, slots=True)
class Divides(Constraint):
    """left % right == 0, and right is not 0."""

    left: Expression
    right: Expression
    names: frozenset[str]

    def holds(self, at: Mapping[str, int]) -> bool:
        by = self.right.value(at)
        return by != 0 and self.left.value(at) % by == 0

    def narrow(self, box: Box) -> None:
        low, high = self.right.range(box)
        if low == 0 == high:
            raise Empty
        if low == 0:
            self.right.within(box, 1, high)
        elif high == 0:
            self.right.within(box, low, -1)
        factor = self.right.factor(box)
        if factor > 1:
            self.left.divisible(box, factor)
        low, high = self.left.range(box)
        if low > 0 or high < 0:
            # A divisor is no larger than what it divides, and has no other primes.
            most = max(abs(low), abs(high))
            self.right.within(box, -most, most)
            primes = self.left.primes(box)
            if primes is not None:
                self.right.composed(box, primes)
        self._filter(box)


@dataclass(frozen=True, slots=True)
class AllOf(Constraint):
    """Every part holds."""

    parts: tuple[Constraint, ...]
    names: frozenset[str]

    def holds(self, at: Mapping[str, int]) -> bool:
        return all(part.holds(at) for part in self.parts)

    def narrow(self, box: Box) -> None:
        for part in self.parts:
            part.narrow(box)


@dataclass(frozen=True, slots=True)
class AnyOf(Constraint):
    """At least one part holds."""

    parts: tuple[Constraint, ...]
    names: frozenset[str]

    def holds(self, at: Mapping[str, int]) -> bool:
        return any(part.holds(at) for part in self.parts)

    def narrow(self, box: Box) -> None:
        """What at least one branch leaves."""
        alive = []
        for part in self.parts:
            branch = dict(box)
            try:
                part.narrow(branch)
            except Empty:
                continue
            alive.append(branch)
        if not alive:
            raise Empty
        for name in self.names:
            left = [branch[name] for branch in alive]
            if all(domain is box[name] for domain in left):
                continue
            values = [domain.values for domain in left]
            if any(found is None for found in values):
                box[name] = box[name].narrowed(
                    min(domain.low for domain in left),
                    max(domain.high for domain in left),
                    math.gcd(*(domain.factor for domain in left)) or 1,
                )
                continue
            joined = frozenset().union(*(found for found in values if found))
            box[name] = box[name].narrowed(min(joined), max(joined), keep=joined.__contains__)
        self._filter(box)
