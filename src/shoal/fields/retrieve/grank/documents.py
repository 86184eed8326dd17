"""What a peer ranks: descriptions of packages, documentation of functions, or files."""

from __future__ import annotations

import ast
import importlib.util
import json
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from shoal.core.errors import DataError
from shoal.core.files import expanded

_CLIPPED = 4000
_ENDINGS = (".md", ".rst", ".txt")


@dataclass(frozen=True)
class DocumentSet:
    """Texts by name.

    Args:
        texts: name -> text.
        titles: name -> its first line, or summary.
    """

    texts: dict[str, str]
    titles: dict[str, str]

    def __len__(self) -> int:
        return len(self.texts)

    def bodies(self) -> dict[str, str]:
        """Texts without their titles."""
        return {name: text[len(self.titles[name]) + 1 :] for name, text in self.texts.items()}


def read_documents(data: str) -> DocumentSet:
    """Documents of a peer.

    Args:
        data: ``packages``: the descriptions of what is installed here; ``docstrings:PACKAGE``: the
            documentation of a package's public functions and classes, read from its source; a
            directory, whose files in Markdown, reStructuredText or plain text are documents; or a
            file of JSON lines with ``id`` and ``text``, and perhaps ``title``.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    path = expanded(data)
    if data == "packages":
        found = _packages()
    elif data.startswith("docstrings:"):
        found = _docstrings(data.partition(":")[2])
    elif path.is_dir():
        found = _files(path)
    elif path.is_file():
        found = _lines(path)
    else:
        raise DataError(f"{data}: no file or directory; or take packages, or docstrings:PACKAGE")
    if not found:
        raise DataError(f"{data}: no documents; expected files ending in {', '.join(_ENDINGS)}")
    found = dict(sorted(found.items()))
    return DocumentSet(
        {name: f"{title}\n{text}"[:_CLIPPED] for name, (title, text) in found.items()},
        {name: title for name, (title, _) in found.items()},
    )


def _packages() -> dict[str, tuple[str, str]]:
    found = {}
    for one in metadata.distributions():
        facts = one.metadata.json
        name, title = str(facts.get("name", "")), str(facts.get("summary", ""))
        if name and title:
            found[name.lower()] = (f"{name}: {title}", str(facts.get("description", "")))
    return found


def _docstrings(package: str) -> dict[str, tuple[str, str]]:
    """Nothing of the package is imported but what finds it."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"docstrings:{package}: no such package is installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    found = {}
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if any(part.startswith(("_", "test")) for part in place.parts[:-1]):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in the source of others
            tree = ast.parse(path.read_bytes())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                if text.count(" ") > 2:
                    found[node.name] = (f"{node.name}: {text.splitlines()[0]}", text)
    return found


def _files(folder: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in _ENDINGS and path.is_file():
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError as cause:
                raise DataError(f"{path}: cannot be read ({cause.strerror})") from cause
            first = next((line for line in text.splitlines() if line.strip()), path.stem)
            found[str(path.relative_to(folder))] = (first.strip("# "), text)
    return found


def _lines(path: Path) -> dict[str, tuple[str, str]]:
    found, at = {}, 0
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            at += 1
            row = json.loads(line)
            name, text = row["id"], row["text"]
            if not isinstance(name, str) or not isinstance(text, str):
                raise ValueError("id and text must be text")
            found[name] = (str(row.get("title", text.split("\n")[0][:100])), text)
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"{path}, line {at}: expected an object with id and text ({cause})"
        ) from cause
    return found
