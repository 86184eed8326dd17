"""Systems of constraints as text; :mod:`shoal.plan.constrint.solve` has the grammar."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import ConfigError, require, suggestion
from shoal.plan.constrint.domain import Domain, Empty, prime_factors
from shoal.plan.constrint.terms import (
    AllOf,
    AnyOf,
    Constraint,
    Divides,
    Expression,
    Number,
    Power,
    Product,
    Relation,
    Sum,
    Variable,
)


@dataclass(frozen=True)
class ConstraintText:
    """A constraint as it was written."""

    text: str
    constraint: Constraint


@dataclass(frozen=True)
class ConstraintSystem:
    """Domains, constraints and what is best.

    Args:
        domains: variable -> what it may be.
        constraints: what must hold.
        objective: expression to maximize, or None.
        sign: -1 where the objective was to be made small.
        facts: variables that were given one value.
    """

    domains: dict[str, Domain]
    constraints: tuple[ConstraintText, ...]
    objective: Expression | None = None
    sign: int = 1
    facts: frozenset[str] = frozenset()

    @property
    def box(self) -> int:
        """Assignments of the box: the leaves that a search without thought has."""
        return math.prod(domain.size for domain in self.domains.values())

    def holds(self, at: Mapping[str, int]) -> bool:
        """Whether an assignment satisfies everything."""
        return all(
            at[name] in domain.candidates() if domain.values is None else at[name] in domain.values
            for name, domain in self.domains.items()
        ) and all(stated.constraint.holds(at) for stated in self.constraints)

    def score(self, at: Mapping[str, int]) -> int | None:
        """Value of the objective."""
        return None if self.objective is None else self.sign * self.objective.value(at)


_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(\*\*|==|<=|>=|\.\.|[-+*%<>|;(){},:=]))")


def parse(text: str | Sequence[str]) -> ConstraintSystem:
    """Read a system.

    Raises:
        ConfigError: it cannot be read; names the statement and what was expected.
    """
    if not isinstance(text, str):
        text = "\n".join(text)
    domains: dict[str, Domain] = {}
    facts: set[str] = set()
    later: list[str] = []
    for statement in _statements(text):
        reader = _Reader(statement, domains)
        result = reader.domain()
        if result is None:
            later.append(statement)
            continue
        name, domain, fact = result
        if name in domains:
            raise ConfigError(f"constrint: {statement!r}: {name} is declared twice; keep one")
        domains[name] = domain
        if fact:
            facts.add(name)
    require(bool(domains), "constrint", text, expected="at least one domain, such as x in 1..9")
    constraints: list[ConstraintText] = []
    objective: Expression | None = None
    sign = 1
    for statement in later:
        reader = _Reader(statement, domains)
        if reader.word() in ("maximize", "minimize"):
            if objective is not None:
                raise ConfigError(f"constrint: {statement!r}: a second objective; keep one")
            sign = 1 if reader.take() == "maximize" else -1
            found_objective = reader.sum()
            objective = found_objective if sign == 1 else _scaled(found_objective, -1)
            reader.end()
            continue
        constraints.append(ConstraintText(statement, reader.statement()))
    return ConstraintSystem(domains, tuple(constraints), objective, sign, frozenset(facts))


def _statements(text: str) -> Iterator[str]:
    """Statements: parted by ends of lines and by ``;`` outside of brackets."""
    depth, now = 0, ""
    for line in text.splitlines():
        for letter in line.partition("#")[0] + "\n":
            depth += (letter in "({") - (letter in ")}")
            if depth <= 0 and letter in ";\n":
                if now.strip():
                    yield " ".join(now.split())
                now, depth = "", 0
            else:
                now += letter
    if now.strip():
        yield " ".join(now.split())


def _scaled(expression: Expression, by: int) -> Expression:
    return Product((Number(by), expression), expression.names)


class _Reader:
    """Reads one statement."""

    def __init__(self, text: str, domains: Mapping[str, Domain]) -> None:
        self.text = text
        self.known = domains
        self.tokens: list[str] = []
        place = 0
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                raise ConfigError(
                    f"constrint: {text!r}: {text[place:].split()[0]!r} is no number, name or sign; "
                    "there are + - * ** % == <= >= < > | ; ( ) in primes maximize minimize"
                )
            self.tokens.append(match[0].strip())
            place = match.end()
        self.place = 0

    def word(self, ahead: int = 0) -> str:
        """The token to come; empty at the end."""
        at = self.place + ahead
        return self.tokens[at] if at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        """The token to come, which must be one of these."""
        word = self.word()
        if not word or (expected and word not in expected):
            wanted = " or ".join(repr(one) for one in expected) or "more"
            raise ConfigError(
                f"constrint: {self.text!r}: expected {wanted}, found "
                + (repr(word) if word else "the end")
            )
        self.place += 1
        return word

    def end(self) -> None:
        """Nothing is left."""
        if self.word():
            raise ConfigError(
                f"constrint: {self.text!r}: expected the end of the statement, found "
                f"{self.word()!r}; "
                "part statements by ; or a new line"
            )

    def integer(self) -> int:
        """A number with its sign."""
        sign = -1 if self.word() == "-" else 1
        if self.word() == "-":
            self.take()
        word = self.take()
        if not word.isdigit():
            raise ConfigError(f"constrint: {self.text!r}: expected an integer, found {word!r}")
        return sign * int(word)

    def domain(self) -> tuple[str, Domain, bool] | None:
        """``x in ...`` or ``x = 3``; None if the statement is something else."""
        if self.word(1) not in ("in", "="):
            return None
        name = self.take()
        if not name.isidentifier() or name in ("in", "primes", "maximize", "minimize"):
            raise ConfigError(f"constrint: {self.text!r}: {name!r} cannot name a variable")
        if self.take() == "=":
            value = self.integer()
            self.end()
            return name, Domain.of([value]), True
        if self.word() == "{":
            domain = Domain.of(self._set())
        else:
            low = self.integer()
            self.take("..")
            high = self.integer()
            if low > high:
                raise ConfigError(f"constrint: {self.text!r}: {low} .. {high} is empty")
            domain = Domain(low, high)
        try:
            if self.word() == "%":
                self.take()
                domain = domain.narrowed(factor=self._positive("a factor"))
            if self.word() == "primes":
                self.take()
                primes = frozenset(self._set())
                if any(prime_factors(prime) != {prime} for prime in primes):
                    raise ConfigError(f"constrint: {self.text!r}: primes has numbers that are none")
                domain = domain.narrowed(primes=primes)
            # A short one becomes a list.
            domain = domain.narrowed(keep=lambda _: True)
        except Empty:
            raise ConfigError(f"constrint: {self.text!r}: no value is like this") from None
        self.end()
        return name, domain, False

    def _positive(self, what: str) -> int:
        value = self.integer()
        if value < 1:
            raise ConfigError(f"constrint: {self.text!r}: {what} is 1 or more, not {value}")
        return value

    def _set(self) -> list[int]:
        self.take("{")
        results = [self.integer()]
        while self.word() == ",":
            self.take()
            results.append(self.integer())
        self.take("}")
        return results

    def statement(self) -> Constraint:
        """A constraint, with a name or without."""
        if self.word(1) == ":":
            self.take()
            self.take()
        result = self.either()
        self.end()
        return result

    def either(self) -> Constraint:
        """Branches between ``|``."""
        parts = [self.branch()]
        while self.word() == "|":
            self.take()
            parts.append(self.branch())
        if len(parts) == 1:
            return parts[0]
        return AnyOf(tuple(parts), frozenset().union(*(part.names for part in parts)))

    def branch(self) -> Constraint:
        """A relation, or bracketed constraints."""
        if self.word() == "(" and self._brackets_constraints():
            self.take("(")
            parts = [self.either()]
            while self.word() == ";":
                self.take()
                parts.append(self.either())
            self.take(")")
            if len(parts) == 1:
                return parts[0]
            return AllOf(tuple(parts), frozenset().union(*(part.names for part in parts)))
        return self.relation()

    def _brackets_constraints(self) -> bool:
        """Whether the bracket to come has a relation in it."""
        depth = 0
        for piece in self.tokens[self.place :]:
            depth += (piece == "(") - (piece == ")")
            if depth == 0:
                return False
            if piece in ("==", "<=", ">=", "<", ">"):
                return True
        return False

    def relation(self) -> Constraint:
        """Two sums and what lies between them."""
        left = self.sum()
        if self.word() == "%":
            self.take()
            by = self.sum()
            self.take("==")
            if self.take() != "0":
                raise ConfigError(
                    f"constrint: {self.text!r}: expected == 0 after %; write a remainder r as "
                    "(a - r) % b == 0"
                )
            return Divides(left, by, left.names | by.names)
        sign = self.take("==", "<=", ">=", "<", ">")
        right = self.sum()
        names = left.names | right.names
        if sign in (">=", ">"):
            left, right = right, left
        if sign in ("<", ">"):
            left = Sum((left, Number(1)), left.names)
        return Relation(left, right, sign == "==", names)

    def sum(self) -> Expression:
        """Terms between + and -."""
        sign = -1 if self.word() == "-" else 1
        if self.word() in ("-", "+"):
            self.take()
        first = self.term()
        terms = [first if sign == 1 else _scaled(first, -1)]
        while self.word() in ("+", "-"):
            minus = self.take() == "-"
            term = self.term()
            terms.append(_scaled(term, -1) if minus else term)
        if len(terms) == 1:
            return terms[0]
        return Sum(tuple(terms), frozenset().union(*(term.names for term in terms)))

    def term(self) -> Expression:
        """Factors between ``*``."""
        factors = [self.power()]
        while self.word() == "*":
            self.take()
            factors.append(self.power())
        if len(factors) == 1:
            return factors[0]
        return Product(tuple(factors), frozenset().union(*(f.names for f in factors)))

    def power(self) -> Expression:
        """An atom, or its power."""
        base = self.atom()
        if self.word() != "**":
            return base
        self.take()
        return Power(base, self._positive("an exponent"), base.names)

    def atom(self) -> Expression:
        """A number, a variable, or a sum in brackets."""
        word = self.take()
        if word == "(":
            total = self.sum()
            self.take(")")
            return total
        if word.isdigit():
            return Number(int(word))
        if not word.isidentifier():
            raise ConfigError(
                f"constrint: {self.text!r}: expected a number, a name or a bracket, found {word!r}"
            )
        if word not in self.known:
            raise ConfigError(
                f"constrint: {self.text!r}: {word} has no domain; write {word} in LOW..HIGH; "
                f"there are {', '.join(self.known)}" + suggestion(word, self.known)
            )
        return Variable(word, frozenset({word}))
