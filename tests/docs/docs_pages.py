"""What the tests of the documentation share: its pages, their blocks, and the scripts."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FRONT = tuple(
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
)
PAGES = (*FRONT, *sorted(DOCS.rglob("*.md")))

_FENCE = re.compile(r"^([ \t]*)```(\w*)([^\n]*)\n(.*?)^\1```\s*$", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language, the rest of its first line, its text.

    ``runnable`` blocks run by themselves; ``printed`` ones are what a command writes; an
    ``example`` is what one might write, with numbers that nothing keeps up to date.
    """

    page: Path
    language: str
    title: str
    text: str
    runnable: bool
    printed: bool
    example: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0] if self.text else ''}"


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip()
        yield Block(
            page,
            match.group(2),
            match.group(3).strip(),
            match.group(4),
            before.endswith("<!-- runnable -->"),
            bool(re.search(r"<!-- (output: |emitted )[^\n]*-->$", before))
            or bool(re.search(r"<!-- demo-output -->\n\n[^\n]*$", before)),
            before.endswith("<!-- example -->"),
        )


@functools.cache
def prose(page: Path) -> str:
    """A page without its blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    module_name = f"shoal_script_{name}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    loader = importlib.machinery.SourceFileLoader(module_name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # or a cache would appear beside the script
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module
