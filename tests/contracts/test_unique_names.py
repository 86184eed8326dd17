"""Public class names are unique, and no public name is a metaphor that was dropped."""

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest
import sources

BANNED = ("told", "found", "seats", "door", "unread", "foretold", "foretell", "ledger", "dealt")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sources.paths():
        yield str(path.relative_to(sources.PACKAGE)), sources.tree(path)


def words(name: str) -> set[str]:
    """``LastSeats`` and ``last_seats`` are last and seats."""
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return set(snake.split("_"))


def public_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of classes, functions, methods and fields; locals are left out."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, _Function)):
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, _Function):
                    yield member.lineno, member.name
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    yield member.lineno, member.target.id


def banned(tree: ast.Module) -> list[str]:
    return [
        f"{line}: {name}"
        for line, name in public_names(tree)
        if not name.startswith("_") and words(name) & set(BANNED)
    ]


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    twice = {name: lines for name, lines in places.items() if len(lines) > 1}
    assert not twice, twice


def test_no_public_name_is_banned() -> None:
    hits = [f"{path}:{hit}" for path, tree in modules() for hit in banned(tree)]
    assert not hits, hits


@pytest.mark.parametrize(
    "code",
    [
        "class Seats: ...",
        "class LastSeats: ...",
        "def told(): ...",
        "class A:\n    found: int",
        "class A:\n    async def is_found(self): ...",
    ],
)
def test_a_banned_name_is_reported(code: str) -> None:
    assert len(banned(ast.parse(code))) == 1


@pytest.mark.parametrize("code", ["class _Seats: ...", "class Foundation: ...", "def f(told): ..."])
def test_other_names_are_not_reported(code: str) -> None:
    assert banned(ast.parse(code)) == []
