"""Datastores: passages, indexes of them, and lists that are cleaned and sampled afterwards."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, ShoalError
from shoal.core.parts import Choice, table
from shoal.fields.retrieve.datastore import (
    PASSAGE_INDEXES,
    Datastore,
    RetrievalOptions,
    StoreSweep,
    build_datastore,
)
from shoal.fields.retrieve.datastore.lists import NGRAM, GramSets, WordHashes, similar_texts
from shoal.fields.retrieve.datastore.passages import TextFile, passage_spans, text_files
from shoal.fields.retrieve.datastore.protocols import DatastoreError
from shoal.fields.retrieve.grank.text import terms
from shoal.fields.retrieve.search.words import WordIndex

# Fewer steps than the defaults: only what a test is about.
_PLAIN = RetrievalOptions(k=3, depth=1000, decontaminate=False, dedupe=False)
_FLAT = Choice(name="dense", options={"embedder": {"name": "hashed_words", "dim": 64}})
_METHODS = {"bm25": Choice(name="bm25"), "dense": _FLAT}


def words(count: int, seed: int, known: int = 400) -> list[str]:
    draw = np.random.default_rng(seed)
    return [f"w{n}" for n in draw.zipf(1.2, count) % known]


def corpus(root: Path, texts: Sequence[str]) -> list[TextFile]:
    root.mkdir(parents=True, exist_ok=True)
    for at, text in enumerate(texts):
        (root / f"{at:03}.txt").write_text(text)
    return text_files(str(root))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[TextFile]:
    """40 files of 300 to 690 words: 120 passages of at most 256 words."""
    texts = ["\n".join(words(300 + 10 * at, at)) for at in range(40)]
    return corpus(tmp_path_factory.mktemp("text"), texts)


QUERIES = [" ".join(words(60, 1000 + at)) for at in range(6)]


def places(store: Datastore, ids: np.ndarray) -> list[list[tuple[str, int]]]:
    """(file, offset) of listed passages, which do not depend on their numbers."""
    return [
        [
            (store.passages.files[file].name, int(offset))
            for file, offset in store.passages.rows[row[row >= 0], :2].tolist()
        ]
        for row in ids
    ]


# ------------------------------------------------------------------ passages


@pytest.mark.parametrize("sentences", [False, True])
def test_passages_have_every_word_once_and_can_be_read_again(sentences: bool) -> None:
    text = "  Größe eins. " + " ".join(f"word{at}." if at % 7 == 0 else "ß" for at in range(700))
    data = text.encode()
    spans = list(passage_spans(data, 100, sentences=sentences))
    assert [word for at, size, _ in spans for word in data[at : at + size].split()] == data.split()
    assert all(count == len(data[at : at + size].split()) <= 100 for at, size, count in spans)
    ends = [data[at : at + size].endswith(b".") for at, size, _ in spans[:-1]]
    assert all(ends) if sentences else not all(ends)


def test_signs_alone_are_no_passage() -> None:
    assert list(passage_spans(b"-- == --", 10)) == []
    assert list(passage_spans(b"", 10)) == []


def test_a_smaller_sample_lies_in_a_larger_one_and_has_its_share(tmp_path: Path) -> None:
    some = corpus(tmp_path / "text", [" ".join(words(4000, at)) for at in range(10)])
    store = build_datastore(tmp_path / "store", some, passage_words=8)
    for seed in (0, 1):
        samples = [store.passages.sampled(share, seed) for share in (0.1, 0.3, 0.9, 1.0)]
        assert all((small <= large).all() for small, large in pairwise(samples))
        assert abs(samples[1].mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / len(store))
    both = store.passages.sampled(0.5, 0) & store.passages.sampled(0.5, 1)
    assert abs(both.mean() - 0.25) < 0.03


# ------------------------------------------------------------------ oracles


@pytest.mark.parametrize(("share", "seed"), [(0.5, 0), (0.25, 1), (0.1, 2)])
def test_a_sampled_list_is_that_of_an_index_of_the_sample(
    files: list[TextFile], tmp_path: Path, share: float, seed: int
) -> None:
    whole = build_datastore(tmp_path / "whole", files, method=_FLAT, shard_passages=50)
    built = build_datastore(tmp_path / "built", files, method=_FLAT, share=share, seed=seed)
    assert 0 < len(built) == whole.passages.sampled(share, seed).sum() < len(whole)
    assert built.passages.tokens() == whole.passages.tokens(share, seed)
    ours = StoreSweep(whole, QUERIES, options=_PLAIN).first(share, seed).lists
    theirs = StoreSweep(built, QUERIES, options=_PLAIN).first().lists
    assert places(whole, ours.ids) == places(built, theirs.ids)
    assert np.array_equal(ours.scores, theirs.scores)


@pytest.mark.parametrize("method", sorted(_METHODS))
def test_shards_give_what_one_index_gives(
    files: list[TextFile], tmp_path: Path, method: str
) -> None:
    one = build_datastore(tmp_path / "one", files, method=_METHODS[method])
    many = build_datastore(tmp_path / "many", files, method=_METHODS[method], shard_passages=17)
    assert len(many.shards) > 5
    ours, theirs = (store.search(QUERIES, 40) for store in (many, one))
    assert np.array_equal(ours.ids, theirs.ids)
    assert np.array_equal(ours.scores, theirs.scores)


def test_bm25_is_that_of_the_search_server(files: list[TextFile], tmp_path: Path) -> None:
    store = build_datastore(tmp_path / "store", files, shard_passages=50)
    index = WordIndex()
    for at, text in enumerate(store.passages.texts(np.arange(len(store)))):
        index.add(at, text)
    found = store.search([*QUERIES, "none of these w1", "?"], 20)
    for ids, scores, query in zip(
        found.ids, found.scores, [*QUERIES, "none of these w1"], strict=False
    ):
        there = dict(index.search(query, 20))
        assert ids[ids >= 0].tolist() == list(there)
        assert scores[ids >= 0] == pytest.approx(list(there.values()))
    assert (found.ids[-1] == -1).all()


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    has = terms(text)
    return {tuple(has[at : at + n]) for at in range(max(1, len(has) - n + 1))}


def jaccard(one: str, other: str) -> float:
    a, b = grams(one, NGRAM), grams(other, NGRAM)
    return len(a & b) / len(a | b)


def changed(text: list[str], places: Sequence[int]) -> list[str]:
    return [f"x{at}" if at in places else word for at, word in enumerate(text)]


def test_duplicates_are_those_of_exact_similarities() -> None:
    draw = np.random.default_rng(0)
    texts = []
    for family in range(12):
        base = [f"f{family}_{n}" for n in draw.integers(0, 50, 256)]
        texts += [" ".join(base), " ".join(base).upper()]
        for one in range(4):  # from one change, far above the threshold, to far below it
            at = draw.choice(256, 1 + one, replace=False)
            texts.append(" ".join(changed(base, at.tolist())))
    texts += ["short text", "Short, text", "another"]
    order = draw.permutation(len(texts))
    kept: list[int] = []
    for at in order.tolist():
        if all(jaccard(texts[at], texts[one]) <= 0.8 for one in kept):
            kept.append(at)
    ours = similar_texts(GramSets.of(WordHashes.of(texts), NGRAM), 0.8)
    assert order[ours.kept(order)].tolist() == kept
    assert 12 < len(kept) < len(texts) - 12  # some are dropped, and some similar ones are not


def longest_run(one: str, other: str) -> int:
    """By dynamic programming."""
    a, b = terms(one), terms(other)
    before, best = [0] * (len(b) + 1), 0
    for word in a:
        now = [0] * (len(b) + 1)
        for at, there in enumerate(b):
            if word == there:
                now[at + 1] = before[at] + 1
                best = max(best, now[at + 1])
        before = now
    return best


def test_nothing_that_repeats_the_judged_text_is_left(tmp_path: Path) -> None:
    target = [f"t{at}" for at in range(300)]
    noise = [f"n{at}" for at in range(300)]
    runs = {
        size: " ".join([*noise[:60], *target[50 : 50 + size], *noise[60:100]]).title()
        for size in (20, 32, 33, 60)
    }
    texts = [*runs.values(), " ".join(target[:256]), " ".join(changed(target[:256], [200]))]
    texts += [" ".join(words(200, at, 50)) for at in range(5)]
    store = build_datastore(tmp_path / "store", corpus(tmp_path / "text", texts))
    query, judged = [" ".join(target[:150])], [" ".join(target)]
    options = RetrievalOptions(k=1, depth=100, dedupe=False)
    lists = StoreSweep(store, query, against=judged, options=options)
    ids = store.search(query, 100).ids[0]
    wanted = {
        int(one)
        for one, text in zip(ids, store.passages.texts(ids[ids >= 0]), strict=False)
        if longest_run(text, judged[0]) <= 32 and jaccard(text, judged[0]) <= 0.8
    }
    assert set(lists._clean[""][0][0].tolist()) == wanted
    survivors = store.passages.texts(sorted(wanted))
    assert runs[32] in survivors and runs[33] not in survivors
    assert lists.overlap == 1.0 and lists.dropped["decontaminated"] == 4


def test_lists_are_searched_deeper_where_too_few_are_left(
    files: list[TextFile], tmp_path: Path
) -> None:
    store = build_datastore(tmp_path / "store", files, method=_FLAT)
    deep = StoreSweep(store, QUERIES, options=_PLAIN).first(0.2, 1)
    shallow = StoreSweep(store, QUERIES, options=_PLAIN.model_copy(update={"depth": 3}))
    found = shallow.first(0.2, 1)
    assert np.array_equal(found.lists.ids, deep.lists.ids)
    assert found.refilled == len(QUERIES) and deep.refilled == 0
    assert shallow.first(0.2, 1).refilled == 0
    few = shallow.first(0.01, 0)  # less than three passages are left of all
    assert few.short == len(QUERIES)
    assert (few.lists.ids >= 0).sum(axis=1).max() == store.passages.sampled(0.01, 0).sum() < 3


def test_a_list_gives_what_each_step_leaves_in_the_order_of_the_steps(tmp_path: Path) -> None:
    good = "the bird and the fish have to be with that of the sea"
    texts = [f"{good} {n}" for n in range(4)] + ["fish fish sea bird"]
    store = build_datastore(tmp_path / "store", corpus(tmp_path / "text", texts))
    filters = {"all": (), "long": (Choice(name="length", options={"min_words": 8}),)}
    sweep = StoreSweep(store, ["bird fish sea"], options=_PLAIN, filters=filters)
    assert places(store, sweep.first(filters="all").lists.ids)[0][0] == ("004.txt", 0)
    assert ("004.txt", 0) not in places(store, sweep.first(filters="long").lists.ids)[0]
    reranked = store.retrieve(
        ["bird 3"], 2, options=RetrievalOptions(rerank=_FLAT.options["embedder"], dedupe=False)
    )[0]
    assert reranked[0].file in ("003.txt", "004.txt")
    assert reranked[0].score >= reranked[1].score


def test_retrieve_reads_texts_from_their_files(files: list[TextFile], tmp_path: Path) -> None:
    build_datastore(tmp_path / "store", files)
    store = Datastore.open(tmp_path / "store")
    found = store.retrieve(QUERIES, 2)
    assert [len(row) for row in found] == [2] * len(QUERIES)
    for one in found[0]:
        data = (files[0].path.parent / one.file).read_bytes()
        assert one.text == data[one.offset : one.offset + one.length].decode()
    assert found[0][0].score >= found[0][1].score
    assert store.retrieve([], 3) == []


@pytest.mark.parametrize("name", ["flat", "ivf_flat", "ivf_pq", "hnsw", "curator", "osq"])
def test_an_index_of_vectors_is_opened_as_it_was_saved(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((600, 16)).astype(np.float32)
    part = table("vector_index").build(name)
    built = part.build(vectors, "l2", seed=0, threads=1)
    built.save(tmp_path)
    effort = part.efforts[len(part.efforts) // 2]
    ours, theirs = (
        one.search(vectors[:5], 10, effort) for one in (part.open(tmp_path, "l2", threads=1), built)
    )
    assert np.array_equal(ours.ids, theirs.ids)
    with pytest.raises(ShoalError):
        part.open(tmp_path / "gone", "l2", threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(_METHODS))
def test_a_pool_builds_the_same(files: list[TextFile], tmp_path: Path, method: str) -> None:
    here = build_datastore(tmp_path / "here", files, method=_METHODS[method], shard_passages=60)
    there = build_datastore(
        tmp_path / "there", files, method=_METHODS[method], shard_passages=60,
        pool=Choice(name="local", options={"workers": 2}), workers=2,
    )  # fmt: skip
    assert np.array_equal(here.search(QUERIES, 9).ids, there.search(QUERIES, 9).ids)


# ------------------------------------------------------------------ bad input


def test_what_cannot_be_is_refused(files: list[TextFile], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="depth = 2"):
        RetrievalOptions(k=3, depth=2)
    store = build_datastore(tmp_path / "store", files[:4])
    with pytest.raises(DatastoreError, match="already"):
        build_datastore(tmp_path / "store", files[:4])
    with pytest.raises(DatastoreError, match="same name"):
        build_datastore(tmp_path / "other", [files[0], files[0]])
    with pytest.raises(DatastoreError, match="no file"):
        build_datastore(tmp_path / "other", [])
    with pytest.raises(DatastoreError, match="1 texts for 6"):
        StoreSweep(store, QUERIES, against=["one"])
    with pytest.raises(DatastoreError, match="share = 0"):
        StoreSweep(store, QUERIES).first(0.0)
    with pytest.raises(DatastoreError, match="no datastore"):
        Datastore.open(tmp_path / "nothing")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"a\0b")
    with pytest.raises(ShoalError, match="binary"):
        build_datastore(tmp_path / "other", [TextFile("binary", binary)])


def test_judged_text_in_the_store_is_said_loudly(tmp_path: Path) -> None:
    text = " ".join(words(200, 0))
    store = build_datastore(tmp_path / "store", corpus(tmp_path / "text", [text, "other words"]))
    options = RetrievalOptions(k=1, decontaminate=False)
    with pytest.warns(UserWarning, match="100% of the queries"):
        StoreSweep(store, [text], against=[text], options=options)


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    some = corpus(tmp_path / "text", ["one two three", "four five"])
    store = build_datastore(tmp_path / "store", some)
    some[0].path.write_text("one two")
    with pytest.raises(DatastoreError, match=r"000\.txt: has 7 bytes, and had 13"):
        store.retrieve(["one"], 1)
    some[0].path.unlink()
    with pytest.raises(DatastoreError, match=r"000\.txt: cannot be read"):
        store.retrieve(["one"], 1)


@pytest.mark.parametrize("method", sorted(_METHODS))
def test_damaged_files_are_named(files: list[TextFile], tmp_path: Path, method: str) -> None:
    place = tmp_path / "store"
    build_datastore(place, files[:4], method=_METHODS[method])
    for path in [one for one in place.rglob("*") if one.is_file() and one.name[0] != "."]:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ShoalError):
            Datastore.open(place)
        path.write_bytes(data)
    manifest: dict[str, Any] = json.loads((place / "datastore.json").read_bytes())
    (place / "datastore.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(DatastoreError, match="version 99"):
        Datastore.open(place)


def test_a_build_that_was_stopped_goes_on(
    files: list[TextFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = PASSAGE_INDEXES.load("bm25")
    built: Counter[str] = Counter()
    build = part.build

    def stopping(self: Any, texts: Any, place: Path, **more: Any) -> int:
        built[place.name] += 1
        if built["000001"] == 1 and place.name == "000001":
            raise KeyboardInterrupt
        return int(build(self, texts, place, **more))

    monkeypatch.setattr(part, "build", stopping)
    with pytest.raises(KeyboardInterrupt):
        build_datastore(tmp_path / "store", files, shard_passages=50)
    with pytest.raises(DatastoreError, match="stopped"):
        Datastore.open(tmp_path / "store")
    again = build_datastore(tmp_path / "store", files, shard_passages=50)
    assert built["000000"] == 1 and built["000001"] == 2
    whole = build_datastore(tmp_path / "whole", files)
    assert np.array_equal(again.search(QUERIES, 9).ids, whole.search(QUERIES, 9).ids)
