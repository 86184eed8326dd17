"""Networks of events beside padded ones, cached beside whole, and the job that learns them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.fields.retrieve.recommend.events import (
    drawn_streams,
    kept_events,
    read_events,
    split_events,
)
from shoal.fields.retrieve.recommend.hstu import HSTURecommender
from shoal.fields.retrieve.recommend.networks import ItemTraining, NextItem, shape_of
from shoal.fields.retrieve.recommend.popular import PopularItems
from shoal.fields.retrieve.recommend.protocols import (
    EventError,
    Recommender,
    RecommendTask,
    UserEvents,
    measures,
)
from shoal.fields.retrieve.recommend.ranker import HSTURanker
from shoal.model.hstu import (
    EventCache,
    EventNetwork,
    HSTULayer,
    HSTUShape,
    SequenceGroups,
    TransformerLayer,
    time_buckets,
)

COLUMNS = ("user", "item", "time")
SHAPE = HSTUShape(dim=12, blocks=2, heads=3, head_dim=4, length=16, dropout=0.0)
TIMED = HSTUShape(dim=12, blocks=2, heads=3, head_dim=4, length=16, dropout=0.0, timed=True)
SOFTMAX = HSTUShape(
    dim=12, blocks=2, heads=3, head_dim=4, length=16, dropout=0.0, weights="softmax"
)
TASK = RecommendTask(
    items=60, length=10, dim=8, blocks=1, heads=2, epochs=1, batch=8, lr=0.01, dropout=0.1,
    negatives=20, temperature=0.1, shuffle=True, sparse=False, timed=False, seed=0,
)  # fmt: skip


def network(shape, layer=HSTULayer):
    torch.manual_seed(0)
    made = EventNetwork(shape, layer)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


@pytest.mark.parametrize(
    ("shape", "layer"),
    [(SHAPE, HSTULayer), (TIMED, HSTULayer), (SOFTMAX, HSTULayer), (SHAPE, TransformerLayer)],
)
def test_sequences_of_many_lengths_are_each_as_if_alone_and_see_the_past_only(shape, layer):
    made, lengths = network(shape, layer), [5, 3, 5, 1, 16]
    x = torch.randn(sum(lengths), 12, requires_grad=True)
    times = torch.rand(sum(lengths), dtype=torch.float64).cumsum(0) * 1000
    whole = made(x, SequenceGroups(lengths), times)
    at = 0
    for length in lengths:
        rows = slice(at, at + length)
        alone = made(x[rows], SequenceGroups([length]), times[rows])
        torch.testing.assert_close(whole[rows], alone)
        at += length
    gradient = torch.autograd.grad(whole[10].sum(), x)[0].abs().sum(1)
    assert (gradient[8:11] > 0).all()
    assert not gradient[:8].any()
    assert not gradient[11:].any()


def test_attention_is_that_of_the_formula():
    layer = network(SHAPE).layers[0]
    x = torch.randn(7, 12)
    u, v, q, k = F.silu(layer.uvqk(layer.norm(x))).chunk(4, dim=-1)
    mixed = torch.zeros(7, 12)
    for i in range(7):
        for head in range(3):
            of = slice(4 * head, 4 * head + 4)
            for j in range(i + 1):
                weight = F.silu(q[i, of] @ k[j, of] + layer.position[i - j]) / SHAPE.length
                mixed[i, of] += weight * v[j, of]
    right = layer.out(layer.inner_norm(mixed) * u) + x
    torch.testing.assert_close(layer(x, SequenceGroups([7]), None), right)


def test_time_buckets():
    gaps = torch.tensor([0.0, 1.0, -2.0, 100.0, 1e30])
    assert time_buckets(gaps).tolist() == [0, 0, 2, 15, 128]


@pytest.mark.parametrize("shape", [SHAPE, TIMED, SOFTMAX])
def test_candidates_behind_a_cache_are_scored_as_one_by_one(shape):
    made = network(shape)
    history, candidates = torch.randn(9, 12), torch.randn(6, 12)
    clock = torch.arange(9, dtype=torch.float64) * 50
    cache = EventCache()
    made(history, SequenceGroups([9]), clock if shape.timed else None, cache)
    cached = made.append(candidates, cache, float(clock[-1]))
    for one, found in zip(candidates, cached, strict=True):
        both = torch.cat([history, one[None]])
        times = torch.cat([clock, clock[-1:]]) if shape.timed else None
        torch.testing.assert_close(found, made(both, SequenceGroups([10]), times)[-1])


def test_a_ranker_keeps_histories_and_learns_what_is_liked():
    draw = np.random.default_rng(0)
    items = draw.integers(0, 30, 3000)
    # Users with an even number like items below 15, the others the rest.
    users = np.repeat(np.arange(150), 20)
    actions = ((items < 15) == (users % 2 == 0)).astype(np.int64)
    events = UserEvents(np.arange(151) * 20, items, np.tile(np.arange(20.0), 150), [""] * 30)
    ranker = HSTURanker(30, 2, length=20, dim=16, blocks=2)
    ranker.fit(events, actions, epochs=40, batch=32, lr=5e-3)
    for user in (0, 1):
        for item, action in zip(items[user * 20 :][:8], actions[user * 20 :][:8], strict=True):
            ranker.observe(user, int(item), int(action))
            ranker.rank(user, 3)
        best = [one.item for one in ranker.rank(user, 10)]
        assert sum((item < 15) == (user == 0) for item in best) >= 9
        kept = ranker.scores(user, np.arange(30))
        ranker.drop(user)
        np.testing.assert_allclose(ranker.scores(user, np.arange(30)), kept, atol=1e-5)
    for step in range(60):  # longer than a history may be
        ranker.observe(0, step % 30, 1)
        assert len(ranker.rank(0, 5, [3, 4])) == 2
    assert ranker.kept[0].length < 40
    cold = ranker.rank("new", 2)
    assert [one.popular for one in cold] == [True, True]
    assert cold[0].item == np.bincount(items).argmax()


def test_sampled_softmax_with_every_item_is_the_softmax():
    torch.manual_seed(0)
    model = NextItem(SHAPE, HSTULayer, 40).double()
    out = F.normalize(torch.randn(9, 12, dtype=torch.float64), dim=-1)
    right = torch.randint(0, 40, (9,))
    whole = F.cross_entropy(model.scores(out) / 0.05, right)
    every = torch.arange(40).expand(3, 40)
    for lengths in ([3, 3, 3], [2, 4, 3]):
        found = model.loss(out, right, every, SequenceGroups(lengths), 0.05)
        torch.testing.assert_close(found, whole)


def test_rows_that_are_not_touched_stay(tmp_path):
    events = split_events(drawn_streams(100, items=60, categories=6), leave_last=True, length=10)
    task = TASK.model_copy(update={"sparse": True, "negatives": 1, "batch": 2})
    training = ItemTraining(task, shape_of(task), HSTULayer, events.train, 2.0)
    before = training.model.table.weight.detach().clone()
    items, right, _, _ = training.batch()
    training.step()
    changed = (training.model.table.weight != before).any(1).nonzero()[:, 0].tolist()
    assert set(changed) >= set(items.tolist())
    assert len(set(changed) - set(items.tolist()) - set(right.tolist())) <= task.batch
    assert len(changed) < 60


def test_stochastic_length_keeps_what_its_formula_says():
    draw = np.random.default_rng(0)
    most = round(256 ** (1.6 / 2))
    kept = kept_events(np.array([most, 200] * 4000), 1.6, 256, draw)
    assert all(len(one) == most for one in kept[::2])
    whole = np.mean([len(one) == 200 for one in kept[1::2]])
    assert whole == pytest.approx(most**2 / 200**2, abs=0.03)
    assert all((np.diff(one) > 0).all() for one in kept[:50])


def test_ranks_and_scores_agree_and_learning_repeats():
    split = split_events(drawn_streams(120, items=60, categories=6), leave_last=False, length=10)
    runs = [HSTURecommender().train(TASK, split.train, lambda *_: None) for _ in range(2)]
    ranks = [one.ranks(split.test) for one in runs]
    np.testing.assert_array_equal(*ranks)
    scores = runs[0].scores(split.test.items[:7], split.test.times[:7])
    assert (scores > scores[split.test.items[7]]).sum() == ranks[0][6]
    popular = PopularItems().train(TASK, split.train, lambda *_: None)
    scores = popular.scores(split.test.items, split.test.times)
    more = (scores > scores[split.test.items[1]]).sum()
    assert more <= popular.ranks(split.test)[0] <= (scores >= scores[split.test.items[1]]).sum() - 1
    assert isinstance(HSTURecommender(), Recommender)


def test_measures():
    found = measures(np.array([0, 1, 9, 10]))
    assert found["hr10"] == 0.75
    assert found["ndcg10"] == pytest.approx((1 + 1 / np.log2(3) + 1 / np.log2(11)) / 4)


def test_drawn_streams_show_nothing_before_its_release():
    events = drawn_streams(400, items=200, categories=10, seed=3)
    items = events.items.reshape(400, 64)
    assert items[0].max() < 80 + 1
    assert items[-1].max() > 150
    assert all(items[record].max() < 200 * (0.4 + 0.6 * record / 400) for record in range(400))
    of = generator(3, purpose="event streams").permutation(np.arange(200) % 10)
    assert {len(np.unique(of[one])) for one in items} <= {1, 2, 3, 4, 5}


def test_tables_of_events(tmp_path: Path):
    rows = [
        {"user": user, "item": item, "time": time}
        for user, item, time in (("b", "x", 5), ("a", "y", 9), ("b", "y", 7), ("b", "z", 8))
    ]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = read_events(str(file), columns=COLUMNS, sort=False, seed=0)
    assert events.lengths.tolist() == [3, 1]
    assert [events.item_names[one] for one in events.items] == ["x", "y", "z", "y"]
    split = split_events(events, leave_last=True, length=10)
    assert split.train.lengths.tolist() == [2, 1]
    assert split.judged.tolist() == [False, True]
    rows[2]["time"] = 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(EventError, match=r"row 3: earlier than .*sort=true"):
        read_events(str(file), columns=COLUMNS, sort=False, seed=0)
    events = read_events(str(file), columns=COLUMNS, sort=True, seed=0)
    assert [events.item_names[one] for one in events.items[:3]] == ["y", "x", "z"]
    with pytest.raises(EventError, match="no column 'who'"):
        read_events(str(file), columns=("who", "item", "time"), sort=False, seed=0)
    file.write_text('{"user": "a", "item": "x", "time": "soon"}\n')
    with pytest.raises(EventError, match="'time': expected numbers or times"):
        read_events(str(file), columns=COLUMNS, sort=False, seed=0)
    file.write_text(
        '{"user": "a", "item": null, "time": 1}\n{"user": "a", "item": "x", "time": 1}\n'
    )
    with pytest.raises(EventError, match="'item': 1 rows have no value"):
        read_events(str(file), columns=COLUMNS, sort=False, seed=0)
    with pytest.raises(EventError, match="too few to learn from"):
        file.write_text('{"user": "a", "item": "x", "time": 1}\n')
        split_events(
            read_events(str(file), columns=COLUMNS, sort=False, seed=0), leave_last=True, length=4
        )


def test_bad_questions():
    ranker = HSTURanker(5, 2, length=4, dim=4, blocks=1)
    ranker.observe("a", 1, 1, 10.0)
    for ask, match in (
        (lambda: ranker.observe("a", 1, 1, 3.0), "time 3.0 lies before the last event, 10.0"),
        (lambda: ranker.observe("a", 7, 1, 11.0), "item 7: expected one from 0 to 4"),
        (lambda: ranker.observe("a", 1, 2, 11.0), "action 2: expected one from 0 to 1"),
        (lambda: ranker.rank("a", 2, [-1]), "items: expected whole numbers from 0"),
        (lambda: ranker.rank("a", 0), "k = 0: expected at least 1"),
        (lambda: HSTURanker(5, 1), "actions at least 2"),
        (lambda: HSTURanker(5, 2, wanted=2), "wanted = 2"),
    ):
        with pytest.raises(EventError, match=match):
            ask()
    with pytest.raises(ConfigError, match="alpha"):
        table("recommender").build(Choice(name="hstu", options={"alpha": 1}), where="method")
