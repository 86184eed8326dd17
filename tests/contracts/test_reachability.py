"""Every module is reached by users: from a kind of job, a verb, a study or documented Python.

What only a claim reaches lies in ``shoal.claims.lab``; what only a test reaches lies in
``tests/oracles``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import graph
from .graph import modules, place_of, reached

DOCS = Path(__file__).parents[2] / "docs"
CLAIMS, LAB = "shoal.claims", "shoal.claims.lab"
SHOWN = re.compile(
    r"^(?:::: (shoal[\w.]*)\.(\w+)|from (shoal[\w.]*) import (.+)|import (shoal[\w.]*))$", re.M
)


def documented() -> set[str]:
    """Modules of what the pages of the documentation import, or the Python reference lists."""
    result = set()
    for page in sorted(DOCS.rglob("*.md")):
        for listed, name, source, names, module in SHOWN.findall(page.read_text()):
            package = listed or source
            result |= {place_of(package, each) for each in (name or names).split(", ") if package}
            result |= {module} & set(modules())
    return {place for place in result if not place.startswith(CLAIMS)}


ROOTS = ("shoal", "shoal.__main__", "kind:job", "kind:study", *sorted(documented()))


def code() -> set[str]:
    """All modules but the front pages of packages."""
    return {name for name, path in modules().items() if path.name != "__init__.py"}


def test_what_only_claims_reach_lies_in_their_lab() -> None:
    without = reached(ROOTS, without=CLAIMS)
    below = {name for name in code() - without if not name.startswith(f"{CLAIMS}.")}
    assert sorted(below & reached(ROOTS)) == []


def test_what_only_tests_reach_lies_with_the_tests() -> None:
    assert sorted(code() - reached(ROOTS)) == []


def test_the_lab_serves_claims_alone() -> None:
    for name in sorted(code()):
        if not name.startswith(f"{CLAIMS}."):
            named = [to for _, to in graph.edges(name) if f"{to}.".startswith(f"{LAB}.")]
            assert named == [], name


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import shoal.core.files", "shoal.core.files"),
        ("def f():\n    from shoal.core import files", "shoal.core.files"),
        ("from shoal.ir import TrainJob", "shoal.ir.job"),
        ("from shoal.train import OPTIMIZERS", "kind:optimizer"),
        ("from shoal.core.parts import table as t\nt('optimizer')", "kind:optimizer"),
        ("x = 'shoal.train.worker'", "shoal.train.worker"),
        ("x = 'shoal.serve.engine.build:build_engine'", "shoal.serve.engine.build"),
        ("x = f'shoal.kernel.fused.{way}_training'", "shoal.kernel.fused.cpp_training"),
        ("x = Path(__file__).parent / 'dash'", "shoal.app.dash.app"),
    ],
)
def test_what_a_module_names_is_seen(
    text: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"shoal.app.{abs(hash(text))}"
    monkeypatch.setitem(modules(), module, tmp_path / "module.py")
    modules()[module].write_text(text)
    assert named in {to for _, to in graph.edges(module)}


def test_a_way_around_the_claims_is_needed() -> None:
    """What is reached through the claims alone does not count."""
    assert f"{LAB}.rmat" in reached(ROOTS)
    assert not {place for place in reached(ROOTS, without=CLAIMS) if place.startswith(CLAIMS)}
