"""Towers beside formulas, one process and transformers; students beside teachers; the job."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from own_home import own_home
from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.fields.retrieve.search.protocols import SearchError
from shoal.fields.retrieve.towers import TowerPair, error_bounds, read_pairs, unchanged
from shoal.fields.retrieve.towers.contrastive import (
    PairTraining,
    fresh_pair,
    info_nce,
    mined,
    train_pair,
)
from shoal.fields.retrieve.towers.distil import distil_query, distillation_loss, student_of
from shoal.fields.retrieve.towers.execute import ranks_of
from shoal.fields.retrieve.towers.pair import vectors_digest
from shoal.fields.retrieve.towers.pairs import (
    PairSplit,
    check_apart,
    load_pairs,
    split_pairs,
    write_pairs,
)
from shoal.fields.retrieve.towers.protocols import TextPairs, TowerError, TowerTask, TowerTraining
from shoal.fields.retrieve.towers.rates import TowerRates
from shoal.machine import load

TINY = {
    "large": "3x64", "small": "1x32", "vocab": 300, "batch": 16, "epochs": 2, "precision": "fp32",
    "lr": 5e-3,
}  # fmt: skip
WORDS = ["".join(letters) for letters in itertools.product("bdgkm", "aeiou", "lnrst")]


def task(**other):
    return TowerTask(**{**TINY, **other})


def texts(count, seed=0, words=6):
    rng = generator(seed, purpose="texts of a test")
    return [" ".join(rng.choice(WORDS, words)) for _ in range(count)]


def some_pairs(count=48, unlabelled=10):
    """A document has three of its query's words, in another order, and three others."""
    rng = generator(1, purpose="pairs of a test")
    queries = texts(count)
    documents = [
        " ".join([*rng.permutation(query.split())[:3], *rng.choice(WORDS, 3)]) for query in queries
    ]
    return TextPairs(queries, documents, texts(unlabelled, seed=2))


def silent(done, text):
    assert 0 < done <= 1


@pytest.fixture(scope="module")
def pair():
    return train_pair(task(), "2x64", some_pairs(), silent)


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def drawn(count, dim, seed):
    return unit(np.random.default_rng(seed).normal(size=(count, dim)))


# The loss


def test_info_nce_is_the_cross_entropy_of_the_right_document():
    q, d = drawn(5, 8, 0).astype(np.float64), drawn(9, 8, 1).astype(np.float64)
    scores = q @ d.T / 0.1
    wanted = np.mean([np.log(np.exp(row).sum()) - row[2 + i] for i, row in enumerate(scores)])
    found = info_nce(torch.from_numpy(q), torch.from_numpy(d), 0.1, first=2)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_a_batch_of_one_is_no_choice():
    with pytest.raises(TowerError, match=r"batch = 1: .*use 2 or more"):
        info_nce(torch.ones(1, 4), torch.ones(1, 4), 0.1)
    with pytest.raises(TowerError, match="batch = 1 of 48 pairs"):
        train_pair(task(batch=1), "1x32", some_pairs(), silent)


@pytest.mark.parametrize("shared", [True, False])
def test_gathered_gradients_are_those_of_the_whole_batch(shared):
    from shoal.claims.lab.thread_ranks import run_ranks

    own = task(shared=shared)
    pairs = some_pairs(16)
    start = fresh_pair(own, "1x32", pairs)
    rows = [start.query.tokens(pairs.queries), start.document.tokens(pairs.documents)]
    hard = start.document.tokens(texts(8, seed=5))

    def gradients(comm=None):
        pair = fresh_pair(own, "1x32", pairs)
        learning = PairTraining(own, pair, comm)
        kept = {}
        learning._update = lambda done: kept.update(
            {
                name: p.grad.clone()
                for name, p in learning.towers.named_parameters()
                if p.grad is not None
            }
        )
        loss = learning.step(rows[0], [*rows[1], *hard], 0.0)
        return loss, kept

    loss, whole = gradients()
    for other, found in run_ranks(2, gradients):
        assert other == pytest.approx(loss, rel=1e-5)
        assert found.keys() == whole.keys()
        for name, grad in whole.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns():
    from shoal.parallel.comm.processes import run_processes

    target, given = "shoal.claims.lab.tower_runs:rank_gradients", {"batch": 16, "seed": 0}
    one = np.array(run_processes(target, 1, given)[0])
    two = [np.array(each) for each in run_processes(target, 2, given)]
    np.testing.assert_array_equal(two[0], two[1])
    np.testing.assert_allclose(one, two[0], atol=1e-4)


def test_mined_negatives_are_neither_near_nor_right(pair):
    pairs = some_pairs()
    q, d = pair.query.tokens(pairs.queries), pair.document.tokens(pairs.documents)
    found = mined(task(hard_margin=0.1), pair, q, d)
    scores = pair.encode_query(pairs.queries) @ pair.encode_document(pairs.documents).T
    order = (-scores).argsort(1).argsort(1)
    assert (found >= 0).any()
    for at, negative in enumerate(found):
        if negative >= 0:
            assert negative != at
            assert scores[at, negative] < scores[at, at] - 0.1 + 1e-5
            assert 24 <= order[at, negative] < 48


def test_learning_finds_more(pair):
    pairs = some_pairs()
    before = fresh_pair(task(), "2x64", pairs)
    long = train_pair(task(epochs=8), "2x64", pairs, silent)
    entropies = [
        float(
            info_nce(
                torch.from_numpy(one.encode_query(pairs.queries)),
                torch.from_numpy(one.encode_document(pairs.documents)),
                0.05,
            )
        )
        for one in (before, long)
    ]
    assert entropies[1] < entropies[0] - 0.5


# Towers


def test_a_text_is_the_same_alone_and_among_longer_ones(pair):
    several = ["bal", "bal den", " ".join(texts(3))]
    together = pair.encode_document(several)
    for at, text in enumerate(several):
        np.testing.assert_allclose(pair.encode_document([text])[0], together[at], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_saved_towers_are_the_same(pooling, tmp_path):
    made = fresh_pair(task(pooling=pooling), "1x32", some_pairs())
    made.save(tmp_path / "towers")
    again = TowerPair.load(tmp_path / "towers")
    np.testing.assert_array_equal(made.encode_query(WORDS[:9]), again.encode_query(WORDS[:9]))
    with pytest.raises(TowerError, match="exists"):
        made.save(tmp_path / "towers")


@pytest.mark.slow
def test_a_hugging_face_directory_is_a_backbone(pair, tmp_path):
    transformers = pytest.importorskip("transformers")
    pair.save(tmp_path / "towers")
    directory = tmp_path / "towers" / "query" / "backbone"
    made = fresh_pair(task(), str(directory), some_pairs())
    ids = made.query.tokens(["bal den gor"])[0]
    peer = transformers.LlamaModel.from_pretrained(directory).eval()
    with torch.no_grad():
        states = peer(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state
    mean = states.mean(1).numpy()
    np.testing.assert_allclose(made.encode_query(["bal den gor"]), unit(mean), atol=1e-4)


def test_what_is_no_tower(pair, tmp_path):
    with pytest.raises(TowerError, match="expected the towers query and document"):
        TowerPair.load(tmp_path)
    with pytest.raises(TowerError, match="expected words"):
        pair.encode_query(["bal", "  "])
    with pytest.raises(TowerError, match=r"backbone '4y128': expected S, M, L, LAYERSxWIDTH"):
        fresh_pair(task(), "4y128", some_pairs())
    with pytest.raises(TowerError, match="a multiple of 64"):
        fresh_pair(task(), "2x72", some_pairs())
    pair.save(tmp_path / "towers")
    (tmp_path / "towers" / "query" / "tower.json").write_text('{"dim": 7}')
    with pytest.raises(TowerError, match="no tower"):
        TowerPair.load(tmp_path / "towers")


def test_a_pair_has_one_dimension(pair):
    small = fresh_pair(task(), "1x32", some_pairs())
    with pytest.raises(TowerError, match="towers of 32 and 64 numbers: expected equal dimensions"):
        TowerPair(small.query, pair.document)


# Students


def test_a_copy_of_the_teacher_has_no_loss(pair):
    student = student_of(task(small="2x64"), pair.query)
    q = [torch.from_numpy(one.encode(WORDS[:20])) for one in (student, pair.query)]
    assert float(distillation_loss(*q, 1.0)) == pytest.approx(0, abs=1e-6)


def test_a_student_of_the_same_width_begins_as_chosen_layers():
    teacher = fresh_pair(task(), "3x64", some_pairs()).query
    student = student_of(task(small="2x64"), teacher)
    for own, at in ((0, 0), (1, 2)):
        wanted = teacher.backbone.blocks[at].state_dict()
        for name, value in student.backbone.blocks[own].state_dict().items():
            torch.testing.assert_close(value, wanted[name])


def test_a_student_learns_queries_and_leaves_the_teacher(pair):
    before = pair.encode_query(WORDS[:20])
    student = student_of(task(), pair.query)
    assert student.settings.dim == 64
    loose = texts(64, seed=3)
    gaps = [error_bounds(student.encode(loose), pair.encode_query(loose)).mean()]
    distil_query(task(), pair.query, loose, student, silent, epochs=20, batch=16)
    gaps.append(error_bounds(student.encode(loose), pair.encode_query(loose)).mean())
    assert gaps[1] < 0.8 * gaps[0]
    np.testing.assert_array_equal(pair.encode_query(WORDS[:20]), before)


def test_students_that_do_not_fit(pair, tmp_path):
    with pytest.raises(TowerError, match="width 32 and a teacher of 64 numbers"):
        student_of(task(), pair.query, linear_map=False)
    others = TextPairs(["zyx wvu zyx wvu"] * 30, ["zyx wvu qpo"] * 30)
    other = fresh_pair(task(vocab=400), "1x32", others)
    other.save(tmp_path / "other")
    own = task(small=str(tmp_path / "other" / "query" / "backbone"))
    with pytest.raises(TowerError, match="its tokenizer is not the teacher's"):
        student_of(own, pair.query)
    student = student_of(own, pair.query, retokenise=True)
    assert student.encode(["bal den"]).shape == (1, 64)


@pytest.mark.parametrize("k", [1, 10])
def test_the_margin_theorem_is_never_violated(k):
    rng = np.random.default_rng(100 + k)
    teacher, documents = drawn(500, 12, 1), drawn(60, 12, 2)
    moved = rng.normal(size=teacher.shape) * 10 ** rng.uniform(-4, -1, (500, 1))
    student = unit(teacher + moved)
    sure = unchanged(student, teacher, documents, k)
    same = [
        set(np.argsort(-(a @ documents.T))[:k]) == set(np.argsort(-(b @ documents.T))[:k])
        for a, b in zip(student, teacher, strict=True)
    ]
    assert 0 < sure.sum() < 500
    assert all(np.array(same)[sure])
    assert not all(same)


def test_the_bound_holds_for_every_document():
    teacher, student, documents = drawn(50, 12, 1), drawn(50, 12, 2), drawn(80, 12, 3)
    gaps = np.abs((student - teacher).astype(np.float64) @ documents.T)
    assert (gaps <= error_bounds(student, teacher)[:, None] * (1 + 1e-6)).all()
    with pytest.raises(TowerError, match="k = 80: expected 1 to 79"):
        unchanged(student, teacher, documents, 80)


# Ways to train


def test_two_stages_leave_the_index_as_it_is(tmp_path):
    pairs = some_pairs()
    large = train_pair(task(), "2x64", pairs, silent)
    large.save(tmp_path / "large")
    index = vectors_digest(large.encode_document(pairs.documents))
    method = table("tower_training").build(
        {"name": "two_stage", "teacher": str(tmp_path / "large"), "epochs": 1}
    )
    made = method.train(task(large="2x64"), pairs, silent)
    assert vectors_digest(made.encode_document(pairs.documents)) == index
    assert made.query.backbone.config.hidden == 32
    np.testing.assert_array_equal(made.teacher.encode(WORDS[:5]), large.encode_query(WORDS[:5]))


@pytest.mark.parametrize("name", sorted(table("tower_training")))
def test_ways_promise_what_they_must(name):
    method = table("tower_training").build(name)
    assert isinstance(method, TowerTraining)
    cost = [method.estimate(task(large=size), 1000, 0, TowerRates()) for size in ("S", "L")]
    assert cost[0].train_s > 0
    assert cost[0].query_s == cost[1].query_s
    assert (cost[0].train_s < cost[1].train_s) == (name == "two_stage")


# Pairs


def test_pairs_of_a_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    pairs = some_pairs()
    write_pairs(path, pairs)
    assert load_pairs(path) == TextPairs(pairs.queries, pairs.documents, pairs.unlabelled)
    read = read_pairs(str(path))
    assert sorted(zip(read.queries, read.documents, strict=True)) == sorted(
        zip(pairs.queries, pairs.documents, strict=True)
    )
    assert set(read.unlabelled) == set(pairs.unlabelled)
    split = split_pairs(read, 8)
    assert [len(one) for one in split] == [32, 8, 8]
    path.write_text(json.dumps({"query": "one"}) + "\n" + json.dumps({"document": "two"}) + "\n")
    with pytest.raises(DataError, match="line 2: expected an object with query and document"):
        read_pairs(str(path))


def test_what_cannot_be_split():
    with pytest.raises(TowerError, match="held = 24: 48 of 48 pairs are held out"):
        split_pairs(some_pairs(), 24)
    with pytest.raises(DataError, match="expected local:N"):
        read_pairs("local:many")
    pairs = some_pairs(8)
    held = TextPairs(pairs.queries[:1], pairs.documents[:1])
    again = TextPairs((), (), [pairs.queries[0].upper()])
    with pytest.raises(TowerError, match="is held out and is learned from"):
        check_apart(PairSplit(again, held, TextPairs((), ())))


def test_ranks_count_better_documents():
    documents = np.eye(3, dtype=np.float32)
    queries = np.array([[1, 0, 0], [0.9, 0.1, 0], [0, 0.5, 0.4]], np.float32)
    assert ranks_of(queries, documents).tolist() == [0, 1, 1]


# The job, and what uses towers


def test_the_job(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    kind = table("job").build("train_towers")
    job = kind.job_type(
        **{**kind.example, "method": Choice(name="two_stage", options={"epochs": 1})}
    )
    plan = kind.plan(job, load("laptop"))[0]
    report = kind.run(plan, tmp_path / "run")
    vectors = np.load(tmp_path / "run" / "documents.npy", allow_pickle=False)
    pair = TowerPair.load(tmp_path / "run" / "towers")
    assert vectors.shape == (report.details["documents"], 64)
    assert report.details["index"] == vectors_digest(vectors)
    assert pair.dim == 64
    assert 0 <= report.measured["recall"] <= 1
    assert 0 <= report.details["surely_same"] <= 1


def test_search_embeds_with_towers(pair, tmp_path):
    pair.save(tmp_path / "towers")
    embedder = table("embedder").build({"name": "tower", "directory": str(tmp_path / "towers")})
    assert embedder.dim_of(0) == 64
    np.testing.assert_array_equal(
        embedder.embed(["bal den"], query=True), pair.encode_query(["bal den"])
    )
    np.testing.assert_array_equal(embedder.embed(["bal den"]), pair.encode_document(["bal den"]))
    with pytest.raises(SearchError, match="expected words"):
        embedder.embed([" "])
    assert table("embedder").build({"name": "tower", "directory": "none"}).dim_of(7) == 7
    (tmp_path / "towers" / "document" / "tower.json").write_text("{}")
    with pytest.raises(SearchError, match="damaged"):
        embedder.dim_of(0)


def test_the_towers_of_a_directory_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="expected the towers"):
        table("tower_training").build({"name": "two_stage", "teacher": str(tmp_path)}).train(
            task(), some_pairs(), silent
        )


def test_states_of_all_layers_lie_side_by_side():
    made = fresh_pair(task(pooling="layers", dim=96), "2x32", some_pairs())
    rows = made.query.tokens(["bal den gor", "bal"])
    backbone = made.query.backbone
    tokens = torch.from_numpy(rows[0].astype(np.int64))[None]
    with torch.no_grad():
        x = backbone.embed(tokens)
        from shoal.model.rope import tables

        cos, sin = tables(backbone.config, 0, tokens.shape[1], x.device, x.dtype)
        between = backbone.blocks[0](x, cos, sin)
        states = [backbone.hidden(tokens)]
        states += [torch.nn.functional.rms_norm(one, one.shape[-1:]) for one in (x, between)]
        wanted = made.query.head(torch.cat(states, -1).mean(1))
    np.testing.assert_allclose(
        made.query.encode_tokens(rows)[0], unit(wanted.numpy())[0], atol=1e-5
    )
    assert not made.query.backbone.blocks[0]._forward_pre_hooks
    alone = made.encode_query(WORDS)
    with ThreadPoolExecutor(4) as pool:
        for at, row in enumerate(pool.map(lambda word: made.encode_query([word])[0], WORDS)):
            np.testing.assert_allclose(row, alone[at], atol=1e-5)
