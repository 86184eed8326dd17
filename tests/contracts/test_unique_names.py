"""No new public class has a name that is taken; those that have are listed with a better one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "shoal"
KNOWN = Path(__file__).with_name("names_known.txt")


def defined() -> dict[str, set[str]]:
    """Name of a public class -> the modules below shoal that define it."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(module.removesuffix(".__init__"))
    return places


def known() -> dict[str, set[str]]:
    listed: dict[str, set[str]] = defaultdict(set)
    for line in KNOWN.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            module, name, _ = line.split(" | ")
            listed[name].add(module)
    return listed


def test_no_new_class_has_the_name_of_another() -> None:
    listed = known()
    unlisted = {name: sorted(modules - listed[name]) for name, modules in defined().items()}
    # One class of a name may keep it.
    new = {name: modules for name, modules in unlisted.items() if len(modules) > 1}
    assert not new, f"rename all but one of these: {new}"


def test_what_is_listed_is_still_there() -> None:
    places = defined()
    gone = [(m, name) for name, modules in known().items() for m in modules - places[name]]
    assert not gone, f"remove their lines from {KNOWN.name}: {gone}"
