"""Concurrent workers: every score from scratch, and one worker as ever."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hogwild_oracle import Recorder, from_scratch  # noqa: E402

from shoal.core.errors import ConfigError, ModelError, ServeError  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.generate import generate  # noqa: E402
from shoal.serve.decode.hogwild.blocks import BlockStore  # noqa: E402
from shoal.serve.decode.hogwild.forward import Forward  # noqa: E402
from shoal.serve.decode.hogwild.part import Hogwild  # noqa: E402
from shoal.serve.decode.hogwild.session import HogwildSession  # noqa: E402
from shoal.serve.decode.hogwild.views import Feed, HogwildView  # noqa: E402
from shoal.serve.decode.hogwild.words import WorkerReader, WorkerWords  # noqa: E402

PROMPT = [3, 60, 61, 62, 63, 64, 65]
LAYOUTS = ("contiguous", "interleaved", "combined")


@pytest.fixture(scope="module")
def model(random_model):
    return random_model("qwen3", dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [2, 3])
def test_every_score_is_that_of_the_flattened_text(
    model, engine_of, requests_of, run, layout, workers
):
    # Token 1 ends a step: sampled often enough for blocks to move.
    engine = engine_of(model, workers=workers, layout=layout, probe=[70, 71], probe_every=9)
    recorder = Recorder(engine)
    bias = ((1, 6.0),)
    run(
        engine,
        requests_of(PROMPT, workers, temperature=1.5, logit_bias=bias, max_tokens=20),
    )
    expected = from_scratch(model, recorder.nodes)
    assert len(recorder.logits) >= 20
    for node, scores in recorder.logits:
        torch.testing.assert_close(scores, expected[node], rtol=0, atol=1e-8)


def test_one_layer_is_the_model_itself_over_the_flattened_text(random_model):
    """Where keys depend on nothing but their token, the oracle is the plain model."""
    config = ModelConfig(
        vocab_size=160,
        hidden=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden=96,
        initializer_range=0.15,
    )
    model = random_model(config, dtype=torch.float64)
    for realise in ("queries", "keys"):
        store = BlockStore(model, 200, longest=100, num_blocks=4)
        forward = Forward(model, store, realise=realise)
        prompt, a, b = store.open(None), store.open("a"), store.open("b")
        forward([Feed(HogwildView((prompt,), None), PROMPT)])
        for token in range(12):
            views = HogwildView((prompt, b, a), "a"), HogwildView((prompt, a, b), "b")
            got = forward([Feed(views[0], [30 + token]), Feed(views[1], [90 - token, 5])])
            for view, scores in zip(views, got, strict=True):
                expected = model(torch.tensor([view.text()]))[0, -1]
                torch.testing.assert_close(scores, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_turned_queries_and_turned_keys_are_the_same(model, engine_of, requests_of, run, layout):
    scores = {}
    for realise in ("queries", "keys"):
        engine = engine_of(model, workers=2, layout=layout, realise=realise)
        recorder = Recorder(engine)
        run(engine, requests_of(PROMPT, 2, temperature=1.0, logit_bias=((1, 5.0),)))
        scores[realise] = torch.stack([found for _, found in recorder.logits])
    torch.testing.assert_close(scores["queries"], scores["keys"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_worker_is_ordinary_decoding(model, engine_of, requests_of, run, layout, temperature):
    engine = engine_of(model, workers=2, layout=layout)
    (tokens,), finishes = run(
        engine, requests_of(PROMPT, 1, seeds=[7], temperature=temperature, max_tokens=40)
    )
    assert tokens == generate(model, PROMPT, 40, temperature=temperature, seed=7)
    assert finishes == ["length"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_order_of_workers_does_not_matter(model, engine_of, requests_of, run, layout):
    def texts(names):
        engine = engine_of(model, workers=3, layout=layout, names=names)
        seeds = [ord(name) for name in names]
        requests = requests_of(
            PROMPT, 3, seeds=seeds, temperature=1.2, logit_bias=((1, 5.0),), max_tokens=16
        )
        return dict(zip(names, run(engine, requests)[0], strict=True))

    assert texts(("a", "b", "c")) == texts(("c", "a", "b")) == texts(("b", "c", "a"))


def test_workers_see_tokens_of_the_same_step(model):
    store = BlockStore(model, 100, longest=100, num_blocks=4)
    forward = Forward(model, store)
    prompt, a, b = store.open(None), store.open("a"), store.open("b")
    forward([Feed(HogwildView((prompt,), None), PROMPT)])
    views = HogwildView((prompt, b, a), "a"), HogwildView((prompt, a, b), "b")
    together = forward([Feed(views[0], [30]), Feed(views[1], [40])])[0]
    for block, token in ((a, 30), (b, 41)):
        store.close(block)
        del token
    a, b = store.open("a"), store.open("b")
    views = HogwildView((prompt, b, a), "a"), HogwildView((prompt, a, b), "b")
    other = forward([Feed(views[0], [30]), Feed(views[1], [41])])[0]
    assert (together - other).abs().max() > 1e-3


def test_relinking_leaves_scores_as_they_are(model):
    """A step that moved to the history, or was joined to it, is seen as it was."""

    def scores(change):
        store = BlockStore(model, 200, longest=150, num_blocks=8)
        forward = Forward(model, store)
        prompt, one, two, own = (store.open(w) for w in (None, "a", "a", "a"))
        forward([Feed(HogwildView((prompt,), None), PROMPT)])
        forward([Feed(HogwildView((prompt, one), "a"), [40, 41, 42])])
        forward([Feed(HogwildView((prompt, one, two), "a"), [50, 51, 52, 53])])
        if change == "join":
            store.join(one, two)
            history = (one,)
        elif change == "refused":
            history = (two, one)
        else:
            history = (one, two)
        return forward([Feed(HogwildView((prompt, *history, own), "a"), [7, 8])])

    plain = scores("none")
    torch.testing.assert_close(scores("join"), plain, rtol=0, atol=1e-9)
    assert (scores("refused") - plain).abs().max() > 1e-4  # the order of blocks does matter
    flat = model(torch.tensor([[*PROMPT, 40, 41, 42, 50, 51, 52, 53, 7, 8]]))[0, -1:]
    torch.testing.assert_close(plain, flat, rtol=0, atol=1e-8)


def test_long_histories_are_joined_and_stay_right(model, engine_of, requests_of, run):
    engine = engine_of(model, workers=2, layout="combined")
    recorder = Recorder(engine)
    common = []

    def watch(engine):
        common.extend(len(session.space.prompt) for session in engine.sessions)

    run(engine, requests_of(PROMPT, 2, logit_bias=((1, 50.0),), max_tokens=10), watch)
    # Prompt, rules and header, and four steps or more of each worker: two of prefix, a token.
    assert max(common) >= len(PROMPT) + 4 + 2 * 4 * 3
    expected = from_scratch(model, recorder.nodes)
    for node, scores in recorder.logits:
        torch.testing.assert_close(scores, expected[node], rtol=0, atol=1e-8)


def test_sessions_do_not_touch_each_other(model, engine_of, requests_of, run):
    other = [9, 80, 81]
    alone = [
        run(engine_of(model), requests_of(prompt, 2, temperature=1.0, max_tokens=12))[0]
        for prompt in (PROMPT, other)
    ]
    engine = engine_of(model)
    both, _ = run(
        engine,
        [
            *requests_of(PROMPT, 2, name="x", temperature=1.0, max_tokens=12),
            *requests_of(other, 2, name="y", temperature=1.0, max_tokens=12),
        ],
    )
    assert both == [*alone[0], *alone[1]]


def test_prompts_in_pieces(model, engine_of, requests_of, run):
    prompt = list(range(60, 100))
    whole = run(engine_of(model), requests_of(prompt, 2, max_tokens=8))[0]
    engine = engine_of(model)
    engine._max_step_tokens = 7
    assert run(engine, requests_of(prompt, 2, max_tokens=8))[0] == whole


def test_a_final_answer_stops_all(model, engine_of, requests_of, run):
    engine = engine_of(model, workers=3)
    requests = requests_of(PROMPT, 3, temperature=1.0)
    requests[1].params = requests_of(PROMPT, 3, logit_bias=((2, 100.0),))[1].params
    tokens, finishes = run(engine, requests)
    assert finishes == ["stop"] * 3
    assert tokens[1] == [2] and all(len(one) == 1 for one in tokens)


def test_one_answers_early_when_tokens_are_used_up(model, engine_of, requests_of, run):
    early = [77, 78]
    engine = engine_of(model, workers=2, early=early, answer_tokens=3)
    tokens, finishes = run(engine, requests_of(PROMPT, 2, max_tokens=20))
    assert tokens[0][15:17] == early and len(tokens[0]) == 20
    assert len(tokens[1]) == 15 and finishes == ["length", "length"]


def test_probes_come_every_so_many_tokens(model, engine_of, requests_of, run):
    engine = engine_of(model, workers=2, probe=[70, 71, 72], probe_every=5)
    tokens, _ = run(engine, requests_of(PROMPT, 2, max_tokens=24))
    for mine in tokens:
        assert mine[5:8] == [70, 71, 72] and mine[13:16] == [70, 71, 72]


def test_leaving_and_ending(model, engine_of, requests_of):
    engine = engine_of(model, workers=2)
    for request in requests_of(PROMPT, 2):
        engine.add(request)
    engine.step()
    assert engine.abort("r0") is not None and engine.abort("r0") is None
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["r1"]
    engine.abort("r1")
    assert not engine.busy and engine.store.num_free == engine.store.capacity
    first, second = requests_of(PROMPT, 2, name="z")
    engine.add(first)
    assert not engine.busy  # it waits for the other
    engine.abort(first.id)
    engine.add(second)
    assert not engine.busy


def test_reader():
    pieces = {1: b"\n", 2: b"\n\n", 3: b"word", 4: b"Final answer: 4", 5: b" x\n\nword"}
    reader = WorkerReader(WorkerWords(piece=pieces.get, marker=r"Final answer:[^\n]*\S[^\n]*\n"))
    fed = [(t, reader.feed(t)) for t in (2, 3, 1, 1, 3, 5, 4, 1)]
    assert [t for t, (ended, _) in fed if ended] == [1, 5]
    assert [found for _, (_, found) in fed] == [False] * 7 + [True]


# Bad input


def test_a_view_ends_in_the_own_block(model):
    store = BlockStore(model, 10, longest=10, num_blocks=4)
    prompt, own = store.open(None), store.open("a")
    for blocks in ((prompt,), (own, prompt), ()):
        with pytest.raises(ServeError, match="blocks that end in the one it writes to"):
            HogwildView(blocks, "a")
    with pytest.raises(ServeError, match="positions would overlap"):
        HogwildView((prompt, prompt, own), "a")


def test_two_workers_cannot_write_one_block(model):
    store = BlockStore(model, 10, longest=10, num_blocks=4)
    block = store.open("a")
    with pytest.raises(ServeError, match=r"writer = 'b': expected a"):
        store.append(block, [5], "b")


def test_a_view_beyond_the_positions(model, engine_of, requests_of, run):
    store = BlockStore(model, 30, longest=10, num_blocks=4)
    forward = Forward(model, store)
    prompt, own = store.open(None), store.open("a")
    forward([Feed(HogwildView((prompt,), None), PROMPT)])
    with pytest.raises(ServeError, match="at most 10 tokens, the positions of the model"):
        forward([Feed(HogwildView((prompt, own), "a"), [1, 2, 3, 4])])
    with pytest.raises(ServeError, match="positions of the model"):
        BlockStore(model, 30, longest=model.config.max_position + 1)
    engine = engine_of(model)
    with pytest.raises(ServeError, match="prompt, rules and headers = 5"):
        run(engine, requests_of([5] * 510, 2))
    # Texts that grow together end before there is no position left.
    tokens, finishes = run(engine_of(model), requests_of([5] * 440, 2, max_tokens=60))
    assert finishes == ["length"] * 2 and all(20 < len(one) < 40 for one in tokens)


def test_positions_must_be_rotations(model):
    class Absolute(torch.nn.Module):
        config = model.config

    with pytest.raises(ServeError, match="a model with rotary positions"):
        BlockStore(Absolute(), 10, longest=10)


def test_bad_requests(model, engine_of, requests_of):
    engine = engine_of(model, workers=2)
    with pytest.raises(ServeError, match="workers = 3: expected 1 to 2"):
        engine.add(requests_of(PROMPT, 3)[0])
    one, other = requests_of(PROMPT, 2)
    other.tokens, other.n_prompt = [*PROMPT, 9], len(PROMPT) + 1
    engine.add(one)
    with pytest.raises(ServeError, match="the same prompt for all"):
        engine.add(other)
    (wrong,) = requests_of([400], 1)
    with pytest.raises(ServeError, match="vocab_size"):
        engine.add(wrong)
    with pytest.raises(ServeError, match="names that differ"):
        HogwildSession(
            engine.store, engine._layout, WorkerWords(), requests_of(PROMPT, 2), ["a", "a"]
        )


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"workers": 0}, "workers = 0: expected 1 to 16"),
        ({"layout": "stacked"}, "decode.hogwild.layout = 'stacked'"),
        ({"names": ("a", "a")}, "names that differ"),
        ({"marker": "("}, "a regular expression"),
        ({"prefix": "{who}"}, "text with"),
        ({"probe_every": -1}, "probe_every = -1"),
        ({"separator": ""}, "some text"),
    ],
)
def test_bad_options(options, error):
    with pytest.raises(ConfigError, match=error):
        Hogwild(**options)


def test_jobs_that_do_not_go_with_workers(tmp_path):
    from shoal.ir import ServeJob
    from shoal.serve.decode.hogwild.engine import build_engine

    def job(**fields):
        return ServeJob.model_validate(
            {"model": str(tmp_path), "decode": {"name": "hogwild"}, **fields}
        )

    for key, value in (("scheduler", "static"), ("kv_format", "int8"), ("parallel", {"tp": 2})):
        with pytest.raises(ServeError, match=key):
            build_engine(job(**{key: value}))
    # A model with absolute positions is no model of ours.
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHead"]}')
    with pytest.raises(ModelError):
        build_engine(job())


@pytest.mark.parametrize("failing", ["scores", "step"])
def test_what_fails_ends_workers_and_not_the_engine(model, engine_of, requests_of, run, failing):
    engine = engine_of(model, workers=2)
    want, _ = run(engine, requests_of([5, 6, 7], 1, name="sound"))
    inner, calls = engine.forward, []

    def forward(feeds):
        calls.append(len(feeds))
        logits = inner(feeds)
        if failing == "step" and len(calls) == 3:
            raise ZeroDivisionError("nobody foresaw it")
        return logits.fill_(float("nan")) if failing == "scores" else logits

    engine.forward = forward
    run(engine, requests_of([8, 9], 2, name="bad"))
    notes = [one for one in engine.drain_events() if one["kind"] == "error"]
    assert {one["id"] for one in notes} == {"bad0", "bad1"}
    engine.forward = inner
    assert run(engine, requests_of([5, 6, 7], 1, name="sound"))[0] == want
