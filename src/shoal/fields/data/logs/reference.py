"""What the native functions for logs compute, in Python: the oracle, and the fallback."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What the kernel takes for a space.
_SPACE = rb"[\t-\r ]"
_SPACES = _SPACE + rb"++"


def split_lines(text: bytes) -> list[tuple[bytes, int]]:
    r"""Lines without their ends, each with its end: 0 ``\n``, 1 ``\r\n``, 2 none."""
    lines: list[tuple[bytes, int]] = []
    pieces = text.split(b"\n")
    for piece in pieces[:-1]:
        both = piece.endswith(b"\r")
        lines.append((piece[:-1] if both else piece, int(both)))
    if pieces[-1]:
        lines.append((pieces[-1], 2))
    return lines


def tokens_of(line: bytes, *, exact: bool, runs: bool) -> list[bytes]:
    """Tokens of a masked line.

    Args:
        line: masked.
        exact: a token between any two spaces, even an empty one, so that nothing is lost.
        runs: count wildcards in a row as one.
    """
    if exact:
        return line.split(b" ") if line else []
    tokens: list[bytes] = []
    for token in re.split(_SPACE, line):
        if token and not (runs and token == b"<*>" and tokens[-1:] == [b"<*>"]):
            tokens.append(token)
    return tokens


class SlowTemplateTree:
    """The tree of Drain, line by line.

    Args:
        routed: tokens that choose the leaf.
        similarity: share of equal tokens from which a line joins a group.
        max_children: of a node.
        exact: as of :func:`tokens_of`.
        runs: as of :func:`tokens_of`.
    """

    def __init__(
        self, routed: int, similarity: float, max_children: int, *, exact: bool, runs: bool
    ) -> None:
        self._routed, self._similarity, self._max = routed, similarity, max_children
        self._exact, self._runs = exact, runs
        self._leaves: dict[tuple[object, ...], list[int]] = {}
        self._children: dict[tuple[object, ...], set[bytes]] = {}
        self._groups: list[list[bytes]] = []

    def add(self, lines: Sequence[bytes]) -> list[int]:
        """The group of each line."""
        return [self._add(line) for line in lines]

    def templates(self) -> list[bytes]:
        """The template of each group."""
        return [b" ".join(group) for group in self._groups]

    def _add(self, line: bytes) -> int:
        tokens = tokens_of(line, exact=self._exact, runs=self._runs)
        best, most = -1, (-1.0, -1)
        for group in self._leaves.get(self._leaf(tokens), ()):
            pairs = list(zip(self._groups[group], tokens, strict=True))
            if self._groups[group] == tokens:  # however few of them are no wildcards
                return group
            same = sum(a == b and a != b"<*>" for a, b in pairs)
            rank = (same / len(tokens) if tokens else 1.0, self._groups[group].count(b"<*>"))
            if rank > most:
                best, most = group, rank
        if most[0] >= self._similarity:
            merged = [
                a if a == b else b"<*>" for a, b in zip(self._groups[best], tokens, strict=True)
            ]
            self._groups[best] = merged
            return best
        self._groups.append(tokens)
        self._leaves.setdefault(self._made(tokens), []).append(len(self._groups) - 1)
        return len(self._groups) - 1

    def _leaf(self, tokens: Sequence[bytes]) -> tuple[object, ...]:
        node: tuple[object, ...] = (len(tokens),)
        for token in tokens[: self._routed]:
            below = self._children.get(node, set())
            node = (*node, token if token in below else b"<*>")
        return node

    def _made(self, tokens: Sequence[bytes]) -> tuple[object, ...]:
        node: tuple[object, ...] = (len(tokens),)
        for token in tokens[: self._routed]:
            below = self._children.setdefault(node, set())
            room = len(below) + (b"<*>" not in below) < self._max
            if token not in below and (re.search(rb"[0-9]", token) or not room):
                token = b"<*>"
            below.add(token)
            node = (*node, token)
        return node


def parameters(template: bytes, line: bytes, *, flexible: bool) -> list[bytes] | None:
    """Parameters of a line, the shortest from left to right; None where it is not of the template.

    Args:
        template: with ``<*>`` for each parameter.
        line: unmasked.
        flexible: a space stands for one or more of any kind, and none counts at the ends; where
            nothing else fits, a parameter may be no token at all.
    """
    if not flexible:
        found = re.fullmatch(_pattern(template, rb"\ "), line, re.DOTALL)
        return None if found is None else list(found.groups())
    line = line.strip(b" \t\n\r\v\f")
    found = re.fullmatch(_pattern(template, _SPACES), line, re.DOTALL)
    return _loose(template, line) if found is None else list(found.groups())


def _pattern(template: bytes, spaces: bytes) -> bytes:
    literals = (re.escape(piece).replace(rb"\ ", spaces) for piece in template.split(b"<*>"))
    return b"(.*?)".join(literals)


def _loose(template: bytes, line: bytes) -> list[bytes] | None:
    """The same where a parameter that is nothing has taken one of the spaces beside it with it."""
    pieces = template.split(b"<*>")
    at, values = 0, []
    for place, piece in enumerate(pieces):
        for start in range(at, len(line) + 1) if place else (0,):
            literal = piece
            if place and start == at and not re.match(_SPACE, line[start:]):
                literal = literal.removeprefix(b" ")
            rest = line[start:]
            found = re.match(_pattern(literal, _SPACES), rest, re.DOTALL)
            end = None if found is None else start + found.end()
            if place < len(pieces) - 1 and end is None and literal.endswith(b" "):
                whole = re.fullmatch(_pattern(literal[:-1], _SPACES), rest, re.DOTALL)
                end = None if whole is None else len(line)
            if end is not None and (place < len(pieces) - 1 or end == len(line)):
                break
        else:
            return None
        values.append(line[at:start])
        at = end
    return values[1:]
