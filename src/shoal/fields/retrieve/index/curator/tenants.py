"""Expressions of tenants: ``a & (b | ~c)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shoal.fields.retrieve.index.protocols import VectorIndexError

Select: TypeAlias = Callable[[Hashable], np.ndarray]
"""Rows of a tenant, sorted."""

_TOKEN = re.compile(r"\s*(?:([&|~()])|'([^']*)'|([\w.:-]+))")
# Parentheses and negations inside each other.
_DEEPEST = 50


@dataclass(frozen=True)
class TenantExpression:
    """What rows are visible to, as a formula.

    Args:
        operator: ``&``, ``|``, ``~``, or ``tenant``.
        operands: formulas; the name of a tenant.
    """

    operator: str
    operands: tuple[TenantExpression | str, ...]

    def select(self, rows_of: Select, everything: Callable[[], np.ndarray]) -> np.ndarray:
        """The rows for which it holds.

        Args:
            rows_of: sorted rows of a tenant.
            everything: all rows, sorted.
        """
        if self.operator == "tenant":
            return rows_of(self.operands[0])
        first, *others = [
            one.select(rows_of, everything)
            for one in self.operands
            if isinstance(one, TenantExpression)
        ]
        if self.operator == "~":
            return np.setdiff1d(everything(), first, assume_unique=True)
        join = np.union1d if self.operator == "|" else np.intersect1d
        both: np.ndarray = join(first, others[0])
        return both


def parse_tenants(text: str) -> TenantExpression:
    """Read an expression.

    Args:
        text: names, or anything in single quotes; ``~`` before ``&`` before ``|``; parentheses.

    Raises:
        VectorIndexError: it cannot be read; says where.
    """
    tokens: list[tuple[str, str, int]] = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise VectorIndexError(
                f"tenants: {text!r}: unexpected {text[at:].strip()[:1]!r} at {at}"
            )
        kind = match[1] or "tenant"
        tokens.append((kind, next(filter(None, match.groups()), ""), match.start()))
        at = match.end()
    tokens.append(("end", "", len(text)))
    return _Reader(text, tokens).whole()


class _Reader:
    """Recursive descent."""

    def __init__(self, text: str, tokens: list[tuple[str, str, int]]) -> None:
        self._text, self._tokens, self._at, self._depth = text, tokens, 0, 0

    def _next(self) -> str:
        return self._tokens[self._at][0]

    def _refuse(self) -> VectorIndexError:
        kind, word, place = self._tokens[self._at]
        what = "the end" if kind == "end" else repr(word)
        return VectorIndexError(f"tenants: {self._text!r}: unexpected {what} at {place}")

    def whole(self) -> TenantExpression:
        result = self._joined("|", lambda: self._joined("&", self._single))
        if self._next() != "end":
            raise self._refuse()
        return result

    def _joined(self, operator: str, operand: Callable[[], TenantExpression]) -> TenantExpression:
        left = operand()
        while self._next() == operator:
            self._at += 1
            left = TenantExpression(operator, (left, operand()))
        return left

    def _single(self) -> TenantExpression:
        kind, word, _ = self._tokens[self._at]
        if kind not in ("~", "(", "tenant") or self._depth > _DEEPEST:
            raise self._refuse()
        self._at += 1
        if kind == "tenant":
            return TenantExpression("tenant", (word,))
        self._depth += 1
        if kind == "~":
            result = TenantExpression("~", (self._single(),))
        else:
            result = self._joined("|", lambda: self._joined("&", self._single))
            if self._next() != ")":
                raise self._refuse()
            self._at += 1
        self._depth -= 1
        return result
