"""Prompt tokens guess with the model's own weights: the same tokens, and nothing left behind."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError, PlanError  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.accelerate import accelerate  # noqa: E402
from shoal.model.attention import KVCache  # noqa: E402
from shoal.model.drafters import files  # noqa: E402
from shoal.model.drafters.ppd import PromptTokens, prompt_mask, prompt_positions  # noqa: E402
from shoal.model.rope import tables_at  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402
from shoal.serve.engine.build import engine_of, load_model  # noqa: E402

CALIBRATION = ((0.5, 0.2, 0.1), (0.3, 0.1, 0.05), (0.2, 0.1, 0.0))


@pytest.fixture
def served(random_model, tmp_path):
    """Directories of a target and of prompt tokens for it, two members each."""
    model = random_model("llama", seed=1)
    target = tmp_path / "target"
    huggingface.write(target, model)
    return target, written(tmp_path / "prompts", target, model, 2)


def written(place, target, model, ensemble, prompts=3):
    tokens = PromptTokens(prompts, ensemble, model.config.hidden)
    source = torch.Generator().manual_seed(0)
    tokens.embeddings.data = torch.randn(tokens.embeddings.shape, generator=source)
    config = files.DrafterConfig(
        name="ppd",
        options={"prompts": prompts, "ensemble": ensemble},
        target=files.fingerprint(target),
        vocab_size=model.config.vocab_size,
        hidden=model.config.hidden,
        calibration=CALIBRATION[:prompts],
    )
    files.write(place, config, tokens.state_dict())
    return place


def job_of(target, place, **options):
    chosen = {"name": "ppd", "path": str(place), **options}
    return ServeJob(model=str(target), kv_tokens=4096, threads=1, speculative=chosen)


def prompts():
    return [[7 * n % 160 for n in range(length)] for length in (3, 20, 50)]


def spied(engine):
    """Trees that were proposed, with the tokens before them, and what their walk saw."""
    caught = []
    propose, accept = engine.runner.drafter.propose, engine.runner.accept

    def proposing(guesses):
        made = propose(guesses)
        caught.append([[list(one.request.tokens) for one in guesses], made, None])
        return made

    def walk(trees, requests, logits):
        caught[-1][2] = logits.clone()
        return accept.walk(trees, requests, logits)

    engine.runner.drafter.propose = proposing
    engine.runner.accept = type("Spy", (), {"walk": staticmethod(walk), "check": accept.check})
    return caught


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prompts": 2, "tree": {"name": "chain"}}])
def test_same_tokens_as_plain_decoding(options, served, serve_all):
    target, place = served
    job = job_of(target, place, **options)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    plain = engine_of(job.model_copy(update={"speculative": None}), model)[0]
    wanted = serve_all(plain, prompts(), max_tokens=30)
    engine = engine_of(job, model)[0]
    for nodes in (6, 13, 40):
        engine.scheduler.drafting = FixedDrafting(nodes)
        assert serve_all(engine, prompts(), max_tokens=30) == wanted
    assert engine.stats()["draft_trees_total"] > 20
    sampled = {"max_tokens": 30, "temperature": 0.8, "seed": 3}
    assert serve_all(engine, prompts(), **sampled) == serve_all(plain, prompts(), **sampled)


def behind(model, tokens, embeddings):
    """Scores of prompt tokens behind the last of some tokens, by one dense pass: [m, V]."""
    count, ensemble = embeddings.shape[:2]
    length, dtype = len(tokens), model.weight.dtype
    place = torch.tensor([length - 1])
    rows = torch.cat((model.embed(torch.tensor(tokens)), embeddings.flatten(0, 1).to(dtype)))
    positions = torch.cat((torch.arange(length), prompt_positions(place, count, ensemble)))
    mask = prompt_mask(length, place, count, ensemble, dtype)[None, None]
    cos, sin = tables_at(positions.float(), *model.unstretched, dtype)
    x = rows[None]
    for block in model.blocks:
        x = block(x, cos, sin, mask)
    said = model.logits(model.norm(x)[0, length:])
    return said.unflatten(0, (count, ensemble)).mean(1)


def test_guesses_are_what_prompt_tokens_say_behind_the_last_accepted_token(served, serve_all):
    target, place = served
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    engine = engine_of(job_of(target, place), model)[0]
    engine.scheduler.drafting = FixedDrafting(45)
    caught = spied(engine)
    serve_all(engine, prompts()[:1], max_tokens=16)
    embeddings = engine.runner.drafter._embeddings
    seen = 0
    for (tokens,), (tree,), _ in caught[1:]:
        count = len(tree.asking.inputs)
        candidates = tree.nodes - count
        assert candidates > 0 and tree.nodes <= 45
        best = behind(model, tokens[:-1], embeddings).topk(3).indices
        for row in range(1, candidates + 1):
            assert tree.tokens[row] in best[tree.shape.depth[row] - 1]
            seen += 1
        assert (tree.tokens[candidates + 1 :] == -1).all()
    assert seen > 20


def test_prompt_rows_change_nothing_and_leave_nothing(served, serve_all):
    """Scores of ordinary rows, and the cache behind the step, as without prompt rows."""
    target, place = served
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    engine = engine_of(job_of(target, place), model)[0]
    engine.scheduler.drafting = FixedDrafting(24)
    caught = spied(engine)
    tokens = prompts()[1]
    request = Request("r0", list(tokens), len(tokens), SamplingParams(max_tokens=14))
    engine.add(request)
    compared = 0
    while engine.busy:
        engine.step()
        if not caught or not request.blocks:
            continue
        (before,), (tree,), logits = caught[-1]
        for row in range(len(tree.shape) - len(tree.asking.inputs)):
            path, at = [], row
            while at > 0:
                path.append(int(tree.tokens[at]))
                at = tree.shape.parent[at]
            alone = model(torch.tensor([before + path[::-1]]))[0, -1]
            torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-12)
            compared += 1
        plain = KVCache(model.config, 1, 64, dtype=torch.float64)
        certain = request.tokens[:-1]
        model.hidden(torch.tensor([certain]), cache=plain)
        blocks = torch.tensor([request.blocks])
        for layer in range(model.config.num_layers):
            for mine, true in zip(
                engine.runner.cache.gather(layer, blocks), plain.held(layer), strict=True
            ):
                torch.testing.assert_close(mine[:, : len(certain)], true, rtol=0, atol=1e-12)
    assert compared > 30


def test_recorded_steps_give_the_same_tokens(served, serve_all, recordable):
    target, place = served
    model = huggingface.read(target, torch.float32).requires_grad_(False)
    accelerate(model)
    engine = engine_of(job_of(target, place), model)[0]
    recorded = engine.runner._recorded
    assert recorded is not None
    engine.scheduler.drafting = FixedDrafting(8)
    results = []
    for one in (recorded, None):
        engine.runner._recorded = one
        results.append(serve_all(engine, prompts(), max_tokens=30))
    assert results[0] == results[1]
    assert not recorded.reasons
    assert any(one is not None and one.tape for one in recorded.known.values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompts": 4}, ConfigError, "prompts = 4: expected at most 3"),
        ({"prompts": -1}, ConfigError, "prompts = -1"),
        ({"tree": {"name": "hardware", "rows": 6}}, PlanError, "tree = 6: expected at least 7"),
        ({"tree": {"name": "chain", "depth": 9}}, ConfigError, "guesses 4 tokens ahead"),
        ({"path": "/nowhere"}, ModelError, "missing"),
    ],
)
def test_bad_input_is_named(options, error, message, served):
    target, place = served
    with pytest.raises(error, match=message):
        job = job_of(target, place, **options)
        engine_of(job, load_model(job))


def test_prompt_tokens_of_another_model_are_refused(served, random_model, tmp_path):
    _, place = served
    other = tmp_path / "other"
    huggingface.write(other, random_model("llama", seed=2))
    job = job_of(other, place)
    with pytest.raises(ModelError, match="and this model's is"):
        engine_of(job, load_model(job))


def test_no_prompt_tokens_at_all_are_refused(random_model, tmp_path):
    model = random_model("llama", seed=1)
    target = tmp_path / "target"
    huggingface.write(target, model)
    place = written(tmp_path / "none", target, model, 1, prompts=0)
    job = job_of(target, place)
    with pytest.raises(ModelError, match="no prompt token"):
        engine_of(job, load_model(job))
