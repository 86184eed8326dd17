"""A second model guesses: the same tokens, its cache as if read anew, strangers refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from test_speculative import answers, params, prompts  # noqa: E402

from shoal.core.errors import ConfigError, ModelError  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting, RowCosts  # noqa: E402
from shoal.serve.engine.build import engine_of  # noqa: E402


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """Nothing here asks whether guesses pay; measuring it takes seconds."""
    costs = RowCosts(rows=(1, 64), seconds_of=(1.0, 2.0))
    monkeypatch.setattr("shoal.serve.decode.build.measure_costs", lambda *_: costs)


@pytest.fixture(scope="module")
def pair(random_model, tmp_path_factory):
    """A target, its directory, and that of a draft that agrees with it now and then."""
    home = tmp_path_factory.mktemp("pair")
    model = random_model("llama", seed=1)
    huggingface.write(home / "target", model)
    noisy = random_model("llama", seed=1)
    source = torch.Generator().manual_seed(5)
    for parameter in noisy.parameters():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=source))
    huggingface.write(home / "draft", noisy)
    return model.to(torch.float64), home / "target", home / "draft"


def engine_with(pair, fields=None, model=None, name="draft_model", **options):
    target, directory, draft = pair
    chosen = {"name": name, "path": str(draft), **options}
    job = ServeJob.model_validate(
        {
            "model": str(directory),
            "kv_tokens": 4096,
            "threads": 1,
            "speculative": chosen,
            **(fields or {}),
        }
    )
    return engine_of(job, model or target)[0]


@pytest.mark.slow
@pytest.mark.parametrize("tree", [{"depth": 5}, {"depth": 3, "breadth": 3, "nodes": 7}])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_step_tokens": 24, "kv": {"name": "paged", "block_size": 4}},
        {"kv_tokens": 300, "kv": {"name": "paged", "block_size": 1}, "max_position": 200},
    ],
)
def test_same_tokens_as_plain_decoding(tree, fields, pair, engine_for, serve_all):
    request = prompts()
    known = answers(serve_all, engine_for(pair[0]), request)
    engine = engine_with(pair, fields, **tree)
    for nodes in (2, 9):
        engine.scheduler.drafting = FixedDrafting(nodes)
        assert answers(serve_all, engine, request) == known
        engine.runner.drafter.memory.check_integrity()
    stats = engine.stats()
    assert 0.1 < stats["draft_tokens_accepted_total"] / stats["draft_tokens_total"] < 1
    assert bool(stats["preemptions_total"]) == (fields.get("kv_tokens", 4096) < 640)


@pytest.mark.parametrize("tree", [{"depth": 4}, {"depth": 4, "breadth": 3}])
def test_what_was_accepted_is_in_the_cache_as_if_it_were_read_anew(tree, pair):
    engine = engine_with(pair, **tree)
    engine.scheduler.drafting = FixedDrafting(12)
    request = Request("r0", list(range(20)), 20, SamplingParams(max_tokens=60))
    engine.add(request)
    drafter = engine.runner.drafter
    draft, checked = drafter.net.model, 0
    while engine.busy:
        engine.step()
        kept = drafter.memory.of([request])[0]
        drafter._settle([kept])
        if not kept.length:
            continue
        checked += 1
        fresh = _fresh_keys(draft, request.tokens[: kept.length])
        slots = [kept.blocks[at // 16] * 16 + at % 16 for at in range(kept.length)]
        result = drafter.net.cache.stores[0][:, :, slots]
        torch.testing.assert_close(result, fresh, rtol=0, atol=1e-10)
    assert checked > 10
    assert engine.stats()["draft_tokens_accepted_total"] > 10


def _fresh_keys(model, tokens):
    from shoal.model.attention import KVCache

    cache = KVCache(model.config, 1, len(tokens), dtype=torch.float64)
    model.hidden(torch.tensor([tokens]), cache=cache)
    return cache._store[:, :, 0]


def test_a_model_that_guesses_for_itself_is_always_right(pair, serve_all):
    target, directory, _ = pair
    engine = engine_with((target, directory, directory), depth=4)
    engine.scheduler.drafting = FixedDrafting(4)
    serve_all(engine, prompts(1), max_tokens=41)
    stats = engine.stats()
    assert stats["steps_total"] == 1 + 8
    assert stats["draft_tokens_accepted_total"] == stats["draft_tokens_total"] == 32


def test_requests_share_passes_and_blocks_come_back(pair, serve_all):
    engine = engine_with(pair, {"max_running": 2, "kv_tokens": 512, "max_position": 256}, depth=3)
    engine.scheduler.drafting = FixedDrafting(3)
    drafter = engine.runner.drafter
    passes = []
    rows = drafter.net.rows
    drafter.net.rows = lambda several: passes.append(len(several)) or rows(several)
    source = random.Random(0)
    requests = [[source.randrange(160) for _ in range(90)] for _ in range(12)]
    serve_all(engine, requests, max_tokens=20)
    assert max(passes) == 2
    drafter.memory.check_integrity()
    assert sum(bool(one.blocks) for one in drafter.memory._kept.values()) < 12  # the old gave way


def test_recorded_passes_give_the_same_guesses(random_model, pair, serve_all, recordable):
    from shoal.model.accelerate import accelerate

    model = accelerate(random_model("llama", seed=1, dtype=torch.float32))
    engine = engine_with(pair, model=model, depth=3, breadth=2)
    drafter = engine.runner.drafter
    assert drafter.net.recorded is not None
    engine.scheduler.drafting = FixedDrafting(5)
    result, trees = [], []
    propose = drafter.propose
    drafter.propose = lambda guesses: trees.append(propose(guesses)) or trees[-1]
    for recorded in (drafter.net.recorded, None):
        drafter.net.recorded = recorded
        trees.clear()
        tokens = serve_all(engine, prompts(), params=params())
        every = [one for step in trees for one in step if one is not None]
        result.append((tokens, [(one.tokens.tolist(), one.shape.parent) for one in every]))
        if recorded is not None:
            assert any(one is not None and one.tape for one in recorded.known.values())
            assert not recorded.reasons
    assert result[0] == result[1]


def test_strangers_are_refused(random_model, pair, tmp_path):
    target, directory, _ = pair
    other = random_model(target.config.model_copy(update={"vocab_size": 161}))
    huggingface.write(tmp_path / "other", other)
    with pytest.raises(ModelError, match="vocab_size = 161: expected 160"):
        engine_with((target, directory, tmp_path / "other"))
    with pytest.raises(ModelError, match="no such directory"):
        engine_with((target, directory, tmp_path / "none"))
    named = tmp_path / "named"
    huggingface.write(named, random_model("llama", seed=1))
    Path(named, "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    from shoal.model.drafters.files import tokenizer_hash

    with pytest.raises(ModelError, match=f"tokenizer is {tokenizer_hash(named)}.*is none"):
        engine_with((target, directory, named))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth = 0"),
        ({"depth": 9, "breadth": 8}, "breadth = 8"),
        ({"nodes": 64}, "nodes = 64"),
        ({}, "path"),
    ],
)
def test_bad_options_are_named(options, message):
    chosen = {"name": "draft_model", **({"path": "x"} if options else {}), **options}
    with pytest.raises(ConfigError, match=message):
        ServeJob(model="tiny", speculative=chosen)
