"""Prompt tokens guess ahead of a draft model: its own greedy chain, in fewer passes."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.drafters import files  # noqa: E402
from shoal.model.drafters.ppd import PromptTokens  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting, RowCosts  # noqa: E402
from shoal.serve.decode.draft.part import DraftModel, DraftModelDrafter  # noqa: E402
from shoal.serve.decode.heads import prompted  # noqa: E402
from shoal.serve.decode.protocols import Guess  # noqa: E402
from shoal.serve.engine.build import engine_of  # noqa: E402

CALIBRATION = ((0.8, 0.1, 0.05), (0.7, 0.1, 0.05), (0.6, 0.1, 0.0))
ROWS = 16
PAYING = prompted._paying


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """Nothing here asks whether guesses pay; measuring it takes seconds."""
    costs = RowCosts(rows=(1, 64), seconds_of=(1.0, 2.0))
    monkeypatch.setattr("shoal.serve.decode.build.measure_costs", lambda *_: costs)
    monkeypatch.setattr("shoal.serve.decode.heads.prompted._paying", lambda *_: ROWS)


@pytest.fixture(scope="module")
def home(random_model, tmp_path_factory):
    """Directories of a target, of a draft that differs a little, and of prompt tokens for it."""
    home = tmp_path_factory.mktemp("prompted")
    huggingface.write(home / "target", random_model("llama", seed=1))
    noisy = random_model("llama", seed=1)
    source = torch.Generator().manual_seed(5)
    for parameter in noisy.parameters():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=source))
    huggingface.write(home / "draft", noisy)
    for ensemble in (1, 2):
        written(home / f"prompts{ensemble}", home / "draft", noisy.config, ensemble)
    return home


def written(place, target, config, ensemble, name="ppd"):
    tokens = PromptTokens(3, ensemble, config.hidden)
    source = torch.Generator().manual_seed(0)
    tokens.embeddings.data = torch.randn(tokens.embeddings.shape, generator=source)
    drafter = files.DrafterConfig(
        name=name,
        options={"prompts": 3, "ensemble": ensemble},
        target=files.fingerprint(target),
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        calibration=CALIBRATION,
    )
    files.write(place, drafter, tokens.state_dict())


def engine_with(home, *, prompts="prompts1", dtype=torch.float64, **options):
    chosen = {"name": "draft_model", "path": str(home / "draft"), **options}
    if prompts:
        chosen["prompts"] = str(home / prompts)
    job = ServeJob(model=str(home / "target"), kv_tokens=4096, threads=1, speculative=chosen)
    model = huggingface.read(home / "target", dtype).requires_grad_(False)
    return engine_of(job, model)[0]


def texts(count=3):
    source = random.Random(2)
    return [[source.randrange(160) for _ in range(length)] for length in (1, 20, 50)][:count]


def greedy(model, tokens, count):
    made = list(tokens)
    for _ in range(count):
        made.append(int(model(torch.tensor([made]))[0, -1].argmax()))
    return made[len(tokens) :]


def knowing(drafter):
    """Let prompt tokens say what the draft will say."""
    observe, model = drafter.prompts.observe, drafter.net.model

    def told(seen):
        right = []
        for one in seen:
            if one.prompt_scores is not None:
                count = len(one.prompt_scores) // drafter.prompts.trees.ensemble
                ahead = torch.tensor(greedy(model, one.request.tokens, count))
                scores = torch.nn.functional.one_hot(ahead, one.prompt_scores.shape[1]).double()
                one = one._replace(
                    prompt_scores=scores.repeat_interleave(drafter.prompts.trees.ensemble, 0)
                )
            right.append(one)
        observe(right)

    drafter.prompts.observe = told


def counted(drafter):
    """Rows of every pass of the draft."""
    passes, rows = [], drafter.net.rows

    def counting(several):
        passes.append([len(one.depth) for one in several])
        return rows(several)

    drafter.net.rows = counting
    return passes


@pytest.mark.parametrize("prompts", ["prompts1", "prompts2"])
@pytest.mark.parametrize("right", [False, True])
def test_chains_are_the_greedy_ones_of_the_draft_whatever_is_accepted(prompts, right, home):
    drafter = engine_with(home, prompts=prompts, depth=4).runner.drafter
    if right:
        knowing(drafter)
    model, source = drafter.net.model, random.Random(4)
    requests = [
        Request(f"r{number}", text, len(text), SamplingParams(max_tokens=99))
        for number, text in enumerate(texts())
    ]
    with torch.inference_mode():
        for _ in range(4):
            made = drafter.propose([Guess(one, 9) for one in requests])
            for request, tree in zip(requests, made, strict=True):
                assert tree.shape.parent == (-1, 0, 1, 2, 3)
                chain = tree.tokens[1:].tolist()
                assert chain == greedy(model, request.tokens, 4)
                request.tokens += [*chain[: source.randrange(5)], source.randrange(160)]
            drafter.memory.check_integrity()


def test_what_was_accepted_is_in_the_cache_as_if_it_were_read_anew(home):
    from shoal.model.attention import KVCache

    drafter = engine_with(home, depth=5).runner.drafter
    knowing(drafter)
    request = Request("r0", texts()[1], 20, SamplingParams(max_tokens=99))
    for accepted in (5, 2, 5, 0, 3):
        (tree,) = drafter.propose([Guess(request, 9)])
        request.tokens += [*tree.tokens[1 : 1 + accepted].tolist(), 7]
        kept = drafter.memory.of([request])[0]
        drafter._settle([kept])
        assert kept.length >= len(request.tokens) - 2
        cache = KVCache(drafter.net.model.config, 1, kept.length, dtype=torch.float64)
        drafter.net.model.hidden(torch.tensor([request.tokens[: kept.length]]), cache=cache)
        slots = [kept.blocks[at // 16] * 16 + at % 16 for at in range(kept.length)]
        result = drafter.net.cache.stores[0][:, :, slots]
        torch.testing.assert_close(result, cache._store[:, :, 0], rtol=0, atol=1e-10)


def test_right_prompts_take_fewer_passes_and_wrong_ones_no_more(home):
    taken = {}
    for right in (True, False):
        drafter = engine_with(home, depth=4).runner.drafter
        if right:
            knowing(drafter)
        passes = counted(drafter)
        request = Request("r0", texts()[1], 20, SamplingParams(max_tokens=99))
        for _ in range(6):
            (tree,) = drafter.propose([Guess(request, 9)])
            request.tokens += [*tree.tokens[1:].tolist()]
            request.tokens += greedy(drafter.net.model, request.tokens, 1)
        taken[right] = len(passes)
        assert max(max(rows) for rows in passes) <= ROWS + 16
    # One token and four; then four, the last of which is not computed, by turns.
    assert taken == {True: 9, False: 24}


def test_what_was_asked_below_an_accepted_guess_tells_behind_another_token(home):
    drafter = engine_with(home, depth=4).runner.drafter
    knowing(drafter)
    request = Request("r0", texts()[1], 20, SamplingParams(max_tokens=99))
    drafter.propose([Guess(request, 9)])
    result = drafter._texts["r0"].asked
    (tree,) = drafter.propose([Guess(request, 9)])
    accepted = next(at for at in range(4) if 19 + at in result)
    request.tokens += [*tree.tokens[1 : 1 + accepted].tolist(), 7]
    passes = counted(drafter)
    (tree,) = drafter.propose([Guess(request, 9)])
    assert tree.tokens[1:].tolist() == greedy(drafter.net.model, request.tokens, 4)
    assert len(passes) < 3


def test_same_tokens_as_plain_decoding(home, serve_all, engine_for):
    model = huggingface.read(home / "target", torch.float64).requires_grad_(False)
    params = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.9, seed=3),
        SamplingParams(max_tokens=24),
    ]
    wanted = serve_all(engine_for(model), texts(), params=params)
    engine = engine_with(home, prompts="prompts2", depth=4)
    engine.scheduler.drafting = FixedDrafting(4)
    assert serve_all(engine, texts(), params=params) == wanted
    stats = engine.stats()
    assert 0.1 < stats["draft_tokens_accepted_total"] / stats["draft_tokens_total"] < 1


def test_recorded_passes_give_the_same_chains(home, recordable):
    drafter = engine_with(home, dtype=torch.float32, depth=4).runner.drafter
    recorded = drafter.net.recorded
    assert recorded is not None
    results = []
    for number, one in enumerate((recorded, None)):
        drafter.net.recorded = one
        request = Request(f"r{number}", texts()[1], 20, SamplingParams(max_tokens=99))
        for _ in range(6):
            (tree,) = drafter.propose([Guess(request, 9)])
            request.tokens += [*tree.tokens[1:3].tolist(), 7]
        results.append(request.tokens)
    assert results[0] == results[1]
    assert any(one is not None and one.tape for one in recorded.known.values())
    assert not recorded.reasons


def test_near_the_longest_text_one_token_a_pass(home):
    drafter = engine_with(home, depth=4).runner.drafter
    drafter.limit = 30
    request = Request("r0", texts()[2][:25], 25, SamplingParams(max_tokens=9))
    passes = counted(drafter)
    (tree,) = drafter.propose([Guess(request, 9)])
    assert tree.tokens[1:].tolist() == greedy(drafter.net.model, request.tokens, 4)
    assert passes[-1] == [1]


@pytest.mark.parametrize(
    ("row_s", "told_s", "few", "many"),
    [(0.0, 0.0, 24, 48), (0.05, 0.0, 4, 12), (1.0, 0.0, 1, 1), (0.0, 9.0, 1, 1)],
)
def test_rows_that_pay_follow_from_what_passes_take(row_s, told_s, few, many, home, monkeypatch):
    drafter, now = engine_with(home).runner.drafter, [0.0]
    net, prompts = drafter.net, drafter.prompts
    rows, observe = net.rows, prompts.observe

    def slow(several):
        now[0] += 1.0 + row_s * len(several[0].depth)
        return rows(several)

    def told(seen):
        now[0] += told_s
        observe(seen)

    monkeypatch.setattr(prompted.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(net, "rows", slow)
    monkeypatch.setattr(prompts, "observe", told)
    assert few <= PAYING(net, prompts, 512) <= many


def test_prompts_that_do_not_pay_are_left_out(home, monkeypatch):
    monkeypatch.setattr("shoal.serve.decode.heads.prompted._paying", lambda *_: 1)
    assert type(engine_with(home).runner.drafter) is DraftModelDrafter


def test_fewer_passes_are_expected(home):
    draft = str(home / "draft")
    plain = DraftModel(path=draft, depth=6).expects()
    expected = DraftModel(path=draft, depth=6, prompts=str(home / "prompts1")).expects()
    assert expected.reads < plain.reads == 6
    assert expected.tokens == plain.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"breadth": 2}, "breadth = 2: expected 1 with prompts.*leave breadth out"),
        ({"accept": "rejection"}, "accept = 'rejection'.*sample_match"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        ServeJob(
            model="tiny",
            speculative={"name": "draft_model", "path": "x", "prompts": "y", **options},
        )


def test_strangers_are_refused(home, random_model, tmp_path):
    config = random_model("llama", seed=1).config
    written(tmp_path / "others", home / "target", config, 1)
    own, others = files.fingerprint(home / "draft"), files.fingerprint(home / "target")
    with pytest.raises(ModelError, match=f"for the target {others}, and this model's is {own}"):
        engine_with(home, prompts=tmp_path / "others")
    written(tmp_path / "heads", home / "draft", config, 1, name="medusa")
    with pytest.raises(ModelError, match=r"a drafter of kind medusa.*drafter: ppd"):
        engine_with(home, prompts=tmp_path / "heads")
    with pytest.raises(ModelError, match="missing"):
        engine_with(home, prompts=tmp_path / "none")
