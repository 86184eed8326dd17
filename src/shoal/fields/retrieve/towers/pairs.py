"""Pairs of a query and the document that answers it: real text of this machine, or a file."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import expanded, open_atomic, shoal_home
from shoal.core.random import generator
from shoal.corpora.debian import debian_packages
from shoal.fields.retrieve.grank.documents import read_documents
from shoal.fields.retrieve.towers.protocols import TextPairs, TowerError

LOCAL = "local"
# Words of a query, and of the document behind it, at least; characters that are kept of one.
_QUERY_WORDS, _BODY_WORDS, _CLIPPED = 3, 12, 600
# Of two documents with the same beginning one is kept: which of them answers cannot be known.
_SAME = 160
# Share of packages among pairs that are drawn here, and packages that a description lists.
_PACKAGES, _LISTED = 0.2, 24


class PairSplit(NamedTuple):
    """Pairs that are learned from, and pairs that are not; no query of one is in another.

    Args:
        train: with further queries.
        valid: to choose by.
        test: to judge by.
    """

    train: TextPairs
    valid: TextPairs
    test: TextPairs


def num_pairs(data: str) -> int | None:
    """Pairs that ``local:N`` asks for; None for other data, which must be read.

    Raises:
        DataError: N is no number above 0.
    """
    kind, _, count = data.partition(":")
    if kind != LOCAL:
        return None
    if not count.isdecimal() or not int(count):
        raise DataError(f"data = {data!r}: expected local:N with a number of pairs, as local:40000")
    return int(count)


def read_pairs(data: str, *, seed: int = 0) -> TextPairs:
    """Pairs in an order drawn by the seed, each query and each document once.

    Args:
        data: ``local:N``, N pairs of this machine: summaries of Python functions and classes that
            are installed and the documentation below each, and descriptions of Debian packages and
            what the index says of each; a file of JSON lines with ``query`` and ``document``; or
            what :func:`~shoal.fields.retrieve.grank.documents.read_documents` reads, whose titles
            are queries.
        seed: of the order, and of which are taken.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    count = num_pairs(data)
    path = expanded(data)
    if count is not None:
        rows, loose = _local(count, seed)
    elif path.is_file() and _is_pairs(path):
        given = load_pairs(path)
        rows = list(zip(given.queries, given.documents, strict=True))
        loose = list(given.unlabelled)
    else:
        found = read_documents(data)
        bodies = found.bodies()
        rows, loose = [(title, bodies[name]) for name, title in found.titles.items()], []
    kept = _once((query, document) for query, document in rows if query and document.strip())
    if len(kept) < 2:
        raise DataError(f"{data}: {len(kept)} pairs of a query and a document; expected 2 or more")
    order = generator(seed, purpose="tower pairs").permutation(len(kept))
    chosen = [kept[at] for at in order[:count]]
    named = {normal(query) for query, _ in chosen}
    # What is left of pairs has queries too.
    loose = [*loose, *(kept[at][0] for at in order[len(chosen) :])]
    free = {normal(text): text for text in loose if normal(text) not in named}
    return TextPairs(
        [query for query, _ in chosen], [text for _, text in chosen], list(free.values())
    )


def normal(text: str) -> str:
    """A text by which two queries are the same: words in lower case."""
    return " ".join(text.lower().split()).strip(" .")


def split_pairs(pairs: TextPairs, held: int) -> PairSplit:
    """Hold out the last pairs: ``held`` to choose by, and as many to judge by.

    Raises:
        TowerError: too few pairs are left.
    """
    left = len(pairs) - 2 * held
    if held < 1 or left < 2:
        raise TowerError(
            f"held = {held}: {2 * held:,} of {len(pairs):,} pairs are held out for validation and "
            f"test; expected at least 2 others to train on: give more pairs, or hold out fewer "
            "with --set held=N"
        )
    at = (0, left, left + held, len(pairs))
    parts = [TextPairs(pairs.queries[a:b], pairs.documents[a:b]) for a, b in itertools.pairwise(at)]
    train = TextPairs(parts[0].queries, parts[0].documents, pairs.unlabelled)
    result = PairSplit(train, parts[1], parts[2])
    check_apart(result)
    return result


def check_apart(split: PairSplit) -> None:
    """No query that is held out is learned from, not even without its document.

    Raises:
        TowerError: one is; names it.
    """
    held = {normal(query) for part in (split.valid, split.test) for query in part.queries}
    for query in (*split.train.queries, *split.train.unlabelled):
        if normal(query) in held:
            raise TowerError(
                f"query {query[:60]!r} is held out and is learned from; expected each query once"
            )


def write_pairs(path: Path, pairs: TextPairs) -> None:
    """Write JSON lines; those of further queries have no document."""
    with open_atomic(path) as file:
        for query, document in zip(pairs.queries, pairs.documents, strict=True):
            file.write(_row(query=query, document=document))
        for query in pairs.unlabelled:
            file.write(_row(query=query))


def load_pairs(path: Path) -> TextPairs:
    """What :func:`write_pairs` wrote.

    Raises:
        DataError: it cannot be read.
    """
    rows = list(_lines(path))
    labelled = [(query, text) for query, text in rows if text is not None]
    return TextPairs(
        [query for query, _ in labelled],
        [text for _, text in labelled],
        [query for query, text in rows if text is None],
    )


def _row(**fields: str) -> bytes:
    return (json.dumps(fields, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _is_pairs(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "query" in first


def _lines(path: Path) -> Iterator[tuple[str, str | None]]:
    at = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                at += 1
                row = json.loads(line)
                query, document = row["query"], row.get("document")
                if not isinstance(query, str) or not isinstance(document, str | None):
                    raise ValueError("query and document must be text")
                yield query, document
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"{path}, line {at}: expected an object with query and document ({cause})"
        ) from cause


def _once(rows: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    queries: set[str] = set()
    bodies: set[str] = set()
    kept = []
    for query, document in rows:
        key, body = normal(query), normal(document[:_SAME])
        if key not in queries and body not in bodies:
            queries.add(key)
            bodies.add(body)
            kept.append((query, document))
    return kept


def _local(count: int, seed: int) -> tuple[list[tuple[str, str]], list[str]]:
    """At least ``count`` pairs where the machine has so many, and queries without a document."""
    packages, loose = _packages()
    functions, alone = _docstrings()
    least = len(packages) + len(functions)
    if least < count:
        raise DataError(f"local:{count}: this machine has {least:,} pairs; ask for at most these")
    few = min(len(packages), max(int(_PACKAGES * count), count - len(functions)))
    rng = generator(seed, purpose="tower packages")
    taken = np.sort(rng.permutation(len(packages))[:few])
    mixed = [packages[at] for at in taken]
    left = sorted(set(range(len(packages))) - set(taken.tolist()))
    # As many functions as fill the rest, so that the share of packages is what it is meant to be.
    some = [functions[at] for at in np.sort(rng.permutation(len(functions))[: count - few])]
    spare = {query for query, _ in functions} - {query for query, _ in some}
    return [*mixed, *some], [*alone, *sorted(spare), *(packages[at][0] for at in left), *loose]


def _packages() -> tuple[list[tuple[str, str]], list[str]]:
    """Descriptions of Debian packages, and what the index says of each beside it."""
    try:
        rows = debian_packages().rows
    except DataError:  # no Debian: functions alone
        return [], []
    pairs, alone = [], []
    for one in rows:
        if len(one.description.split()) < _QUERY_WORDS:
            continue
        words = (one.name, one.section, "depends on", *one.depends[:_LISTED], *one.tags[:_LISTED])
        body = " ".join(words)
        if len(body.split()) < _BODY_WORDS:
            alone.append(one.description)
        else:
            pairs.append((one.description, body))
    return _once(iter(pairs)), alone


def _docstrings() -> tuple[list[tuple[str, str]], list[str]]:
    """First lines of the documentation of every function and class, and what stands below.

    Reading all source takes a minute, so it is kept in Shoal's home by what is installed.
    """
    files = list(_sources())
    digest = hashlib.sha256("\n".join(f"{p}:{p.stat().st_size}" for p in files).encode())
    kept = shoal_home() / "towers" / f"docstrings-{digest.hexdigest()[:16]}.jsonl"
    if not kept.exists():
        found = list(_documented(files))
        rows = [(query, text) for query, text in found if text]
        once = _once(iter(rows))
        named = {normal(query) for query, _ in once}
        alone = {normal(q): q for q, text in found if not text and normal(q) not in named}
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_pairs(
            kept,
            TextPairs([q for q, _ in once], [text for _, text in once], list(alone.values())),
        )
    pairs = load_pairs(kept)
    return list(zip(pairs.queries, pairs.documents, strict=True)), list(pairs.unlabelled)


def _sources() -> Iterator[Path]:
    standard = Path(sysconfig.get_path("stdlib"))
    for root in (standard, Path(sysconfig.get_path("purelib"))):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts[:-1]
            foreign = root == standard and {"site-packages", "dist-packages"} & set(parts)
            # Shoal's own text changes with every edit.
            hidden = any(one.startswith(("_", "test", "shoal")) for one in parts)
            if path.is_file() and not foreign and not hidden:
                yield path


def _documented(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(name and summary, the rest or nothing) of every function and class; nothing is imported."""
    for path in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in the source of others
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # templates and tests of parsers are no Python of this version
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            head, _, body = (ast.get_docstring(node) or "").partition("\n")
            text = " ".join(body.split())[:_CLIPPED]
            if len(head.split()) >= _QUERY_WORDS and head.isprintable():
                enough = len(text.split()) >= _BODY_WORDS
                yield head.strip()[:_CLIPPED], text if enough else ""
