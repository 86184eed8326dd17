"""Every public method says what it does; one that overrides another may leave it to that one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest
import sources

Classes = Mapping[str, list[ast.ClassDef]]


def classes_of(*trees: ast.Module) -> Classes:
    result: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                result[node.name].append(node)
    return result


def methods(cls: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public ones that the class itself has; of a property, what reads it."""
    result: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            result.setdefault(node.name, node)
    return result


def members(cls: ast.ClassDef) -> set[str]:
    """Its public methods and fields."""
    fields = (node.target for node in cls.body if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name)} | methods(cls).keys()


def bases(cls: ast.ClassDef, classes: Classes) -> Iterator[ast.ClassDef]:
    """All bases in the package, by name."""
    for node in cls.bases:
        name = ast.unparse(node).partition("[")[0].rpartition(".")[2]
        for base in classes.get(name, ()):
            if base is not cls:
                yield base
                yield from bases(base, classes)


def undocumented(classes: Classes) -> Iterator[str]:
    every = [cls for named in classes.values() for cls in named]
    protocols = [
        cls for cls in every if any(ast.unparse(node).startswith("Protocol") for node in cls.bases)
    ]
    for cls in every:
        bare = {name for name, node in methods(cls).items() if not ast.get_docstring(node)}
        if cls.name.startswith("_") or not bare:
            continue
        above = list(bases(cls, classes))
        own = members(cls).union(*map(members, above))
        above += [each for each in protocols if each is not cls and methods(each).keys() <= own]
        for base in above:
            bare -= {name for name, node in methods(base).items() if ast.get_docstring(node)}
        yield from (f"{cls.name}.{name}" for name in sorted(bare))


def test_every_public_method_is_documented() -> None:
    assert list(undocumented(classes_of(*map(sources.tree, sources.paths())))) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("class A:\n    def f(self): ...", ["A.f"]),
        ("class A:\n    def f(self):\n        'It.'", []),
        ("class A:\n    def f(self):\n        'It.'\nclass B(A):\n    def f(self): ...", []),
        ("class A:\n    def f(self): ...\nclass B(A):\n    def f(self): ...", ["A.f", "B.f"]),
        ("class P(Protocol):\n    def f(self):\n        'It.'\nclass B:\n    def f(self): ...", []),
        (
            "class P(Protocol):\n    def f(self):\n        'It.'\n    def g(self):\n        'It.'\n"
            "class B:\n    def f(self): ...",
            ["B.f"],
        ),
    ],
)
def test_what_lacks_one_is_seen(text: str, missing: list[str]) -> None:
    assert list(undocumented(classes_of(ast.parse(text)))) == missing
