"""Building a datastore: map the passages, then embed and index them shard by shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import open_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.core.pool import Pool
from shoal.fields.data.shards import map_shards
from shoal.fields.retrieve.datastore.passages import WORDS, PassageMap, TextFile, map_passages
from shoal.fields.retrieve.datastore.protocols import DatastoreError, PassageIndex
from shoal.fields.retrieve.datastore.store import MANIFEST, PASSAGES, SHARDS, VERSION, Datastore


def build_datastore(
    directory: Path,
    files: Sequence[TextFile],
    *,
    passage_words: int = 256,
    sentences: bool = False,
    tokenizer: Path | None = None,
    tick: Callable[[float, str], None] = lambda done, text: None,
    **options: Any,
) -> Datastore:
    """Map the passages of files and index them, or go on where a build was stopped.

    Args:
        directory: of the datastore; one that is whole is refused.
        files: whose text is stored; they stay where they are.
        passage_words: of a passage, at most.
        sentences: end passages at ends of sentences.
        tokenizer: ``tokenizer.json`` or directory of the readers, to count tokens; None counts
            words.
        tick: called with the share that is done, and what is being done.
        options: of :func:`index_passages`.

    Raises:
        DatastoreError: there is one already, or nothing to store.
        DataError: a file cannot be read.
    """
    if not files:
        raise DatastoreError(f"{directory}: no file to store; give some")
    if len({file.name for file in files}) < len(files):
        raise DatastoreError(f"{directory}: two files have the same name; give each its own")
    count, digest = token_counter(tokenizer)
    rows = map_passages(
        files, passage_words, sentences=sentences, tokens=count,
        tick=lambda done: tick(0.3 * done / len(files), f"mapped {done:,} files"),
    )  # fmt: skip
    passages = PassageMap(files, [file.path.stat().st_size for file in files], rows)
    return index_passages(
        directory, passages, digest=digest,
        tick=lambda done, text: tick(0.3 + 0.7 * done, text), **options,
    )  # fmt: skip


def index_passages(
    directory: Path,
    passages: PassageMap,
    *,
    method: Choice | str = "bm25",
    shard_passages: int = 50_000,
    digest: str = "",
    share: float = 1.0,
    seed: int = 0,
    pool: Choice | Pool | None = None,
    workers: int = 1,
    threads: int = 1,
    tick: Callable[[float, str], None] = lambda done, text: None,
) -> Datastore:
    """Index passages that are mapped.

    Args:
        directory: of the datastore.
        passages: where they lie.
        method: the index, of kind ``passage_index``.
        shard_passages: of a shard.
        digest: of the tokenizer that has counted tokens.
        share: of the passages, sampled as :class:`RetrievalOptions` says, that are stored.
        seed: of that sample, and of what is random in an index.
        pool: where shards are built: a choice of kind ``pool``, an open one, or None for here.
        workers: shards that are in work at a time.
        threads: of each.
        tick: called with the share that is done, and what is being done.

    Raises:
        DatastoreError: there is one already, or nothing to store.
        ShoalError: a passage cannot be read or indexed.
    """
    if (directory / MANIFEST).exists():
        raise DatastoreError(f"{directory}: is a datastore already; open it, or remove it first")
    choice = method if isinstance(method, Choice) else Choice(name=method)
    part: PassageIndex = table("passage_index").build(choice, where="method")
    rows = np.ascontiguousarray(passages.rows[passages.sampled(share, seed)])
    if not len(rows):
        raise DatastoreError(f"{directory}: no passage is left to store; give more text")
    directory.mkdir(parents=True, exist_ok=True)
    with open_atomic(directory / PASSAGES) as file:
        np.save(file, rows, allow_pickle=False)
    edges = [*range(0, len(rows), shard_passages), len(rows)]
    chosen = PassageMap(passages.files, passages.sizes, rows)
    results = map_shards(
        _build_shard,
        list(pairwise(edges)),
        directory / SHARDS,
        pool=pool,
        workers=workers,
        shared=(chosen, part, seed, threads),
        tick=lambda done, total: tick(done / total, f"shard {done} of {total}"),
    )
    manifest = {
        "version": VERSION,
        "method": table("passage_index").spell(part).model_dump(mode="json"),
        "passages": len(rows),
        "words": int(rows[:, WORDS].sum()),
        "tokenizer": digest,
        "files": [
            [file.name, str(file.path.absolute()), size]
            for file, size in zip(passages.files, passages.sizes, strict=True)
        ],
        "shards": [
            {"begin": begin, "end": end, "words": result["words"]}
            for (begin, end), result in zip(pairwise(edges), results, strict=True)
        ],
    }
    write_json(directory / MANIFEST, manifest, error=DataError)
    return Datastore.open(directory, threads=threads)


def _build_shard(
    ends: tuple[int, int], place: Path, shared: tuple[PassageMap, PassageIndex, int, int]
) -> dict[str, Any]:
    passages, part, seed, threads = shared
    texts = passages.texts(np.arange(*ends))
    return {"words": part.build(texts, place, seed=seed, threads=threads)}


def token_counter(
    tokenizer: Path | None,
) -> tuple[Callable[[Sequence[str]], Sequence[int]] | None, str]:
    """A function that counts tokens of texts, and the digest of its tokenizer; None and ''.

    Args:
        tokenizer: a ``tokenizer.json``, or its directory; None for none.

    Raises:
        ConfigError: it cannot be read.
    """
    if tokenizer is None:
        return None, ""
    from shoal.corpora.tokenizer import load

    made = load(tokenizer)

    def count(texts: Sequence[str]) -> Sequence[int]:
        return [
            len(one.ids) for one in made.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    return count, tokenizer_digest(tokenizer)


def tokenizer_digest(tokenizer: Path) -> str:
    """Sha256 of the file of a tokenizer, which says whether two models have the same tokens."""
    from shoal.corpora.tokenizer import locate

    return hashlib.sha256(locate(tokenizer).read_bytes()).hexdigest()
