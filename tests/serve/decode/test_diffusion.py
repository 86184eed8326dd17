"""The loop of diffusion decoding: against a reference sampler, in batches, with every cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ServeError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402

from .conftest import CONFIG, MASK  # noqa: E402

PROMPTS = [[5, 9, 2], [7, 7, 1, 30, 12, 4, 4], [11]]


def reference(model, prompt, max_tokens, block):
    """Low-confidence decoding as published: the whole sequence, one token a forward pass."""
    ids = torch.tensor([[*prompt, *[MASK] * max_tokens]])
    end = len(prompt)
    order = []
    while end < ids.shape[1]:
        start, end = end, min(end + block, ids.shape[1])
        while (ids[0, start:end] == MASK).any():
            logits = model(ids)[0]
            logits[:, MASK] = -torch.inf
            sure, token = logits.softmax(-1).max(-1)
            sure[ids[0] != MASK] = -1
            place = start + int(sure[start:end].argmax())
            ids[0, place] = token[place]
            order.append(place)
    return ids[0, len(prompt) :].tolist(), order


@pytest.mark.parametrize("max_tokens", [8, 20, 3])
def test_one_token_an_iteration_is_the_reference(mdlm, engine_by, decode, max_tokens):
    """20 is no multiple of the block: the last one is shorter."""
    engine = engine_by(unmask="fixed", refresh="none")
    for prompt in PROMPTS:
        text = decode(engine, [prompt], max_tokens)[0]
        assert text == reference(mdlm, prompt, max_tokens, 8)[0]
    assert engine.runner.counts["forwards"] == len(PROMPTS) * max_tokens
    assert MASK not in text


WAYS = [
    {"unmask": "threshold", "refresh": "dual"},
    {"unmask": {"name": "threshold", "tau": 0.4}, "refresh": "prefix"},
    {"unmask": {"name": "factor", "f": 3.0}, "refresh": "none", "unroll": 3},
    {"unmask": "hierarchical", "refresh": {"name": "vicinity", "a": 2, "b": 3}},
    {
        "unmask": {"name": "credit", "tau": 0.5},
        "refresh": {"name": "vicinity", "a": 4, "b": 4, "warmup": 2, "every": 3},
        "iteration": "smooth",
    },
    {"unmask": {"name": "fixed", "steps": 3}, "refresh": "dual", "iteration": "smooth"},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(table("unmask").build(way["unmask"])))
def test_together_as_alone(engine_by, decode, way):
    """Requests of several lengths; more of them than run at once, so they come and go."""
    prompts = [*PROMPTS, [3] * 9, [8, 1], [2, 30]]
    alone = [decode(engine_by(**way), [prompt])[0] for prompt in prompts]
    assert decode(engine_by(max_running=3, **way), prompts) == alone
    assert decode(engine_by(**way), prompts) == alone
    # A cache that holds two at a time.
    assert decode(engine_by(kv_tokens=64, **way), prompts) == alone


def scores(engine, prompts, iterations):
    """Scores of each of the first iterations, of all requests of a batch."""
    results = []
    select = engine.runner.unmask.select

    class Spy:
        def select(self, logits, masked, state):
            results.append(logits.clone())
            return select(logits, masked, state)

    engine.runner.unmask = Spy()
    from shoal.ir import Request, SamplingParams

    for number, prompt in enumerate(prompts):
        engine.add(Request(f"s{number}", list(prompt), len(prompt), SamplingParams(max_tokens=20)))
    while len(results) < iterations:
        engine.step()
    return results[:iterations]


def test_a_window_of_everything_is_no_cache(engine_by):
    """Spliced into the cache and read back: the same scores, to the last digits."""
    wide = {"name": "vicinity", "a": 500, "b": 500}
    cached = scores(engine_by(unmask="fixed", refresh=wide), PROMPTS, 12)
    plain = scores(engine_by(unmask="fixed", refresh="none"), PROMPTS, 12)
    for one, other in zip(cached, plain, strict=True):
        finite = torch.isfinite(other)
        assert (one[finite] - other[finite]).abs().max() < 1e-10


def test_a_window_short_of_everything_reads_the_cache(engine_by):
    """All but the first token computed each time: it is the cache that is seen there."""
    most = {"name": "vicinity", "a": 500, "b": 0}
    cached = scores(engine_by(unmask="fixed", refresh=most), PROMPTS, 8)
    plain = scores(engine_by(unmask="fixed", refresh="none"), PROMPTS, 8)
    finite = torch.isfinite(plain[0])
    assert (cached[0][finite] - plain[0][finite]).abs().max() < 1e-10
    drift = (cached[7][finite] - plain[7][finite]).abs().max()
    assert drift > 1e-10  # the masks behind the block have not been computed again


def test_stale_keys_are_spliced_and_nothing_else(mdlm, engine_by):
    """One iteration with a window, against attention over the spliced keys written out."""
    engine = engine_by(unmask="fixed", refresh={"name": "vicinity", "a": 1, "b": 2})
    runner = engine.runner
    before = scores(engine, [PROMPTS[1]], 1)
    blocks = next(iter(runner._work.values())).request.blocks
    old = [
        [side[:, :27].clone() for side in runner.cache.gather(layer, torch.tensor([blocks]))]
        for layer in range(2)
    ]
    ids = runner._ids[next(iter(runner._work.values())).slot, :27].clone()
    assert before[0].shape == (1, 8, 40)
    engine.step()
    new = [
        [side[:, :27] for side in runner.cache.gather(layer, torch.tensor([blocks]))]
        for layer in range(2)
    ]
    first, stop = 7 - 1, 15 + 2
    for layer in range(2):
        for then, now in zip(old[layer], new[layer], strict=True):
            same = (then == now).flatten(2).all(-1)[0]
            # The first layer's keys depend on the token alone, so only new tokens change it.
            assert same[:first].all()
            assert same[stop:].all()
            assert not same[first:stop].all()
    assert (ids[15:] == MASK).all()


def test_smoothing_without_weight_is_hard(engine_by, decode):
    smooth = {"name": "smooth", "weight": 0.0, "growth": 0.0, "most": 0.0, "bar_from": 0.0}
    for unmask in ("threshold", "hierarchical"):
        plain = decode(engine_by(unmask=unmask), PROMPTS)
        assert decode(engine_by(unmask=unmask, iteration=smooth), PROMPTS) == plain


def test_smoothing_is_its_formula(mdlm):
    part = table("iteration").build("smooth")
    embedding = mdlm.embed.weight
    last = torch.randn(2, 3, 40, dtype=torch.float64)
    masks = embedding[MASK].expand(2, 3, -1)
    inputs = part.inputs(masks, last, embedding, torch.tensor([0, 4]))
    weight = 0.15 + 0.02 * 4
    assert torch.equal(inputs[0], masks[0])
    wanted = (1 - weight) * masks[1] + weight * last[1].softmax(-1) @ embedding
    assert (inputs[1] - wanted).abs().max() < 1e-12
    far = part.inputs(masks, last, embedding, torch.tensor([50, 50]))
    wanted = 0.7 * masks + 0.3 * last.softmax(-1) @ embedding
    assert (far - wanted).abs().max() < 1e-12
    bar = part.bar(0.9, torch.tensor([0, 2, 100]))
    assert bar.tolist() == pytest.approx([1.0, 0.96, 0.9])


def test_credit_without_weight_is_the_threshold(engine_by, decode):
    credit = {"name": "credit", "alpha": 0.0, "tau": 0.6}
    plain = {"name": "threshold", "tau": 0.6}
    assert decode(engine_by(unmask=credit), PROMPTS) == decode(engine_by(unmask=plain), PROMPTS)


def test_iterations_in_vain_change_nothing(engine_by, decode):
    way = {"unmask": {"name": "threshold", "tau": 0.5}, "refresh": "none"}
    plain, unrolled = engine_by(**way), engine_by(**way, unroll=4)
    assert decode(plain, PROMPTS) == decode(unrolled, PROMPTS)
    assert unrolled.runner.counts["forwards"] >= plain.runner.counts["forwards"]
    assert unrolled.stats()["steps_total"] < plain.stats()["steps_total"]


def test_the_text_ends_in_the_block_with_its_end(engine_by, decode):
    whole = decode(engine_by(), [PROMPTS[0]])[0]
    stop = whole[4]
    cut = decode(engine_by(), [PROMPTS[0]], stop_ids=frozenset({stop}))[0]
    assert cut == whole[: whole.index(stop) + 1]


def test_sampling_is_by_the_seed(engine_by, decode):
    first = decode(engine_by(), PROMPTS, temperature=2.0, seed=4)
    assert decode(engine_by(), PROMPTS, temperature=2.0, seed=4) == first
    assert decode(engine_by(), PROMPTS, temperature=2.0, seed=5) != first
    assert decode(engine_by(), PROMPTS[1:2], temperature=2.0, seed=4) == first[1:2]


def test_one_masked_token_is_sampled_as_the_model_says(mdlm, engine_by, decode):
    """Chi-square against the scores of the only place."""
    logits = mdlm(torch.tensor([[*PROMPTS[0], MASK]]))[0, -1]
    logits[MASK] = -torch.inf
    p = (logits / 1.5).softmax(-1)
    draws = 2000
    engine = engine_by(max_running=64)
    counts = torch.zeros(40)
    from shoal.ir import Request, SamplingParams

    requests = []
    for seed in range(draws):
        params = SamplingParams(max_tokens=1, temperature=1.5, seed=seed)
        requests.append(Request(f"c{seed}", list(PROMPTS[0]), 3, params))
        engine.add(requests[-1])
    while engine.busy:
        engine.step()
    for request in requests:
        counts[request.tokens[-1]] += 1
    from scipy.stats import chisquare

    likely = p * draws >= 5
    assert counts[MASK] == 0
    observed, wanted = counts[likely].double(), p[likely] * draws
    assert observed.sum() > 0.9 * draws
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_a_block_of_one_is_left_to_right(mdlm, engine_by, decode):
    engine = engine_by(block=1, refresh="none")
    assert decode(engine, [PROMPTS[0]], 6)[0] == reference(mdlm, PROMPTS[0], 6, 1)[0]


def test_abort_in_the_middle(engine_by, decode):
    from shoal.ir import Request, SamplingParams

    engine = engine_by(unmask="fixed")
    alone = decode(engine_by(unmask="fixed"), [PROMPTS[1]])[0]
    requests = [
        Request(str(number), list(prompt), len(prompt), SamplingParams(max_tokens=20))
        for number, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        engine.add(request)
    for _ in range(5):
        engine.step()
    engine.abort("0")
    while engine.busy:
        engine.step()
    assert requests[1].tokens[7:] == alone
    assert engine.stats()["blocks_used"] == 0


def test_bad_requests(engine_by, decode):
    engine = engine_by()
    for prompt, sampling, message in (
        ([5, MASK], {}, r"prompt token = 39: expected any but the mask token"),
        ([5], {"top_k": 3}, r"top_k = 3: expected 0 of a model that is decoded by diffusion"),
        ([5], {"logprobs": 1}, r"logprobs = 1"),
        ([5], {"presence_penalty": 1.0}, r"presence_penalty"),
    ):
        with pytest.raises(ServeError, match=message):
            decode(engine, [prompt], **sampling)
    assert decode(engine, [PROMPTS[0]]) == decode(engine_by(), [PROMPTS[0]])


def test_models_of_the_other_kind(engine_by, mdlm, random_model):
    from shoal.serve.engine.build import engine_of

    with pytest.raises(ServeError, match=r"decode = 'diffusion': expected autoregressive"):
        engine_by(random_model("llama"))
    job = ServeJob.model_validate({"model": "tiny", "kv_tokens": 512})
    with pytest.raises(ServeError, match=r"decode = 'autoregressive': expected diffusion"):
        engine_of(job, mdlm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheduler": "static"}, r"scheduler = static with decode diffusion"),
        ({"kv": "slots"}, r"kv = slots with decode diffusion"),
        ({"parallel": {"tp": 2}}, r"parallel = several ranks with decode diffusion"),
        ({"exact": True}, r"exact = True with decode diffusion"),
        ({"preempt": "swap"}, r"preempt = swap"),
    ],
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        ServeJob.model_validate({"model": "tiny", "decode": "diffusion", **fields})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, r"decode.diffusion.block = 0"),
        ({"unroll": 0}, r"decode.diffusion.unroll = 0"),
        ({"unmask": "treshold"}, r"decode.diffusion.unmask = 'treshold'.*threshold"),
        ({"refresh": {"name": "vicinity", "a": -1}}, r"refresh.vicinity.a = -1"),
        ({"iteration": {"name": "smooth", "weight": 2.0}}, r"iteration.smooth.weight = 2.0"),
    ],
)
def test_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        table("decode").build({"name": "diffusion", **options})


def test_the_config_is_checked():
    from shoal.core.errors import ModelError

    with pytest.raises(ModelError, match="mask_token_id = None"):
        type(CONFIG).model_validate({**CONFIG.model_dump(), "mask_token_id": None})
    with pytest.raises(ModelError, match="mask_token_id = 39"):
        type(CONFIG).model_validate({**CONFIG.model_dump(), "family": "llama"})


@pytest.mark.parametrize("way", WAYS)
def test_scores_that_are_not_finite_end_one_request(engine_by, decode, way):
    want = decode(engine_by(**way), PROMPTS)
    engine = engine_by(**way)
    inner = engine.runner._forward

    def forward(batch, windows):
        logits = inner(batch, windows)
        for row, work in enumerate(batch.work):
            if work.request.id == "r1":
                logits[row] = float("nan")
        return logits

    engine.runner._forward = forward
    got = decode(engine, PROMPTS)
    assert got[1] == []
    assert [got[0], got[2]] == [want[0], want[2]]
    (result,) = [one for one in engine.drain_events() if one["kind"] == "error"]
    assert result["id"] == "r1"
    assert engine.stats()["blocks_used"] == 0


def test_an_iteration_that_fails_ends_its_requests_and_not_the_engine(engine_by, decode):
    engine = engine_by()
    want = decode(engine, PROMPTS)
    inner = engine.runner.unmask

    class Broken:
        def select(self, *args):
            engine.runner.unmask = inner
            raise ZeroDivisionError("nobody foresaw it")

    engine.runner.unmask = Broken()
    assert decode(engine, PROMPTS) == [[], [], []]
    assert sum(one["kind"] == "error" for one in engine.drain_events()) == 3
    assert decode(engine, PROMPTS) == want
