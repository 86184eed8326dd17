"""Layers that read stale input guess; the exact draft repairs the cache, the target decides."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from test_draft_model import _fresh_keys, engine_with, known_costs  # noqa: E402, F401
from test_speculative import prompts  # noqa: E402

from shoal.core.errors import ConfigError, ModelError, ServeError  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402

DEEP = {
    "vocab_size": 160, "hidden": 64, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "ffn_hidden": 96, "max_position": 512, "initializer_range": 0.12,
}  # fmt: skip


@pytest.fixture(scope="module")
def deep(random_model, tmp_path_factory):
    """A target of eight layers that is its own draft."""
    home = tmp_path_factory.mktemp("deep") / "model"
    model = random_model(ModelConfig(**DEEP, family="llama", tied=True), seed=1)
    huggingface.write(home, model)
    return model.to(torch.float64), home, home


def easy(pair, fields=None, model=None, **options):
    engine = engine_with(pair, fields, model, name="easyspec", **{"depth": 4, **options})
    engine.scheduler.drafting = FixedDrafting(4)
    return engine


def trees_of(engine, serve_all, asked, **sampling):
    drafter, result = engine.runner.drafter, []
    propose = drafter.propose
    drafter.propose = lambda guesses: result.append(propose(guesses)) or result[-1]
    tokens = serve_all(engine, asked, **sampling)
    every = [one for step in result for one in step if one is not None]
    return tokens, [(one.tokens.tolist(), one.shape.parent) for one in every]


@pytest.mark.slow
def test_greedy_output_is_the_targets(deep, engine_for, serve_all):
    request = prompts()[:4]
    known = serve_all(engine_for(deep[0]), request, max_tokens=24)
    for options in ({"group": 3}, {"group": (1, 2, 4, 1), "breadth": 2, "realise": "sequential"}):
        engine = easy(deep, **options)
        assert serve_all(engine, request, max_tokens=24) == known
        stats = engine.stats()
        assert 0 < stats["draft_tokens_accepted_total"] < stats["draft_tokens_total"]


def test_groups_of_one_are_the_plain_drafter(deep, serve_all):
    request = prompts()[:3]
    plain = engine_with(deep, depth=4)
    plain.scheduler.drafting = FixedDrafting(4)
    wanted = trees_of(plain, serve_all, request, max_tokens=20)
    assert trees_of(easy(deep, group=1), serve_all, request, max_tokens=20) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("stale", ["attention", "full"])
def test_fused_and_sequential_guess_the_same(stale, deep, serve_all):
    request = prompts()[:3]
    results = [
        trees_of(
            easy(deep, group=3, realise=one, stale=stale, breadth=2, depth=3),
            serve_all,
            request,
            max_tokens=20,
        )
        for one in ("sequential", "fused")
    ]
    assert results[0] == results[1]


def test_a_group_that_is_stale_throughout_is_one_wide_layer(deep):
    from shoal.model.attention import attend
    from shoal.serve.decode.draft.fuzzy import FuzzyModel
    from shoal.serve.decode.draft.stacked import stack

    model = deep[0]
    tokens, at = torch.tensor([5, 9, 2]), torch.arange(3)

    def mixer(layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attend(q, k, v, None, causal=True)[0].transpose(0, 1)

    def widely(x, layers):
        """Attention of all layers on x, then all their feed-forward layers on what that gives."""
        mixed = 0
        for layer in layers:
            block = model.blocks[layer]
            turn = model.turn(at, x.dtype)
            seen = block.attention.flat(block.attention_norm(x), turn, mixer)
            mixed = mixed + block.attention.o_proj(seen)
        x = x + mixed
        return x + sum(model.blocks[one].mlp(model.blocks[one].mlp_norm(x)) for one in layers)

    x = model.embed(tokens)
    for layers in ((0,), (1, 2, 3), (4, 5, 6), (7,)):
        x = widely(x, layers)
    wanted = model.norm(x)
    groups = (1, 3, 3, 1)
    for stacked in (None, stack(model, groups, True, model)):
        result = FuzzyModel(model, groups, stacked, full=True).flat(tokens, at, mixer)
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_after_calibration_the_cache_is_as_if_read_anew(deep):
    request = Request("r0", list(range(20)), 20, SamplingParams(max_tokens=40))
    for calibrate in (True, False):
        engine = easy(deep, group=3, calibrate=calibrate)
        request = Request("r0", list(range(20)), 20, SamplingParams(max_tokens=40))
        engine.add(request)
        drafter, far = engine.runner.drafter, 0.0
        while engine.busy:
            engine.step()
            kept = drafter.memory.of([request])[0]
            drafter._settle([kept])
            slots = [kept.blocks[at // 16] * 16 + at % 16 for at in range(kept.length)]
            if slots:
                fresh = _fresh_keys(drafter.net.model, request.tokens[: kept.length])
                result = drafter.net.cache.stores[0][:, :, slots]
                far = max(far, (result - fresh).abs().max().item())
        assert (far < 1e-10) == calibrate


@pytest.mark.parametrize("stale", ["attention", "full"])
def test_recorded_groups_give_the_scores_of_others(
    stale, random_model, deep, serve_all, recordable
):
    from shoal.model.accelerate import accelerate

    model = accelerate(random_model(ModelConfig(**DEEP, family="llama", tied=True), seed=1).float())
    engine = easy(deep, model=model, group=3, stale=stale)
    quick = engine.runner.drafter.quick
    assert quick.recorded is not None
    far = []
    rows = quick.rows

    def both(several):
        result = rows(several).clone()
        recorded, quick.recorded = quick.recorded, None
        far.append((rows(several) - result).abs().max().item())
        quick.recorded = recorded
        return result

    quick.rows = both
    serve_all(engine, prompts()[:1], max_tokens=16)
    assert len(far) > 6
    assert max(far) < 2e-4
    assert quick.recorded.known[1, 1].tape is not None
    assert not quick.recorded.reasons


@pytest.fixture
def by_ranks(deep):
    """Engines whose draft is on two ranks; one at a time in a process."""
    teams = []

    def start(**options):
        engine = easy(deep, realise="ranks", ranks=2, group=3, **options)
        teams.append(engine.runner.drafter.net.team)
        return engine, teams[-1]

    yield start
    for team in teams:
        team.close()


@pytest.mark.slow
def test_ranks_guess_what_one_process_does(deep, serve_all, by_ranks):
    request = prompts()[:4]
    options = {"breadth": 2, "depth": 3, "stale": "attention"}
    known = trees_of(
        easy(deep, group=3, realise="sequential", **options), serve_all, request, max_tokens=20
    )
    engine, team = by_ranks(**options)
    assert trees_of(engine, serve_all, request, max_tokens=20) == known
    stats = engine.stats()
    assert 0 < stats["draft_tokens_accepted_total"] < stats["draft_tokens_total"]
    with pytest.raises(ServeError, match="already is a rank"):
        by_ranks()
    engine.add(Request("r0", [1, 2, 3], 3, SamplingParams(max_tokens=40)))
    engine.step()
    os.kill(team.processes[0].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        ServeError, match=r"rank 1 of the draft \(process \d+\) ended with exit code -9"
    ):
        while engine.busy:
            engine.step()
    assert time.monotonic() - began < 2


@pytest.mark.slow
def test_recorded_passes_by_ranks(deep, recordable):
    from shoal.parallel.comm.processes import run_processes

    target = f"{Path(__file__).parent / 'ranked_passes.py'}:passes"
    fields = {"path": str(deep[1]), "groups": [1, 3, 3, 1]}
    for first, second in zip(*run_processes(target, 2, fields), strict=True):
        assert first is not None
        assert first["far"] < 0.05
        assert first["played"]
        assert second["played"]
        assert not first["reasons"]
        assert not second["reasons"]


def test_what_ranks_are_told_comes_back():
    from shoal.serve.decode.captured import TreeRows
    from shoal.serve.decode.draft.ranked_worker import _pack, _unpack

    several = [
        TreeRows([3, 4], [7, 9], 20, 20, np.array([0, 1]), np.array([1, 3])),
        TreeRows([5], [1], 3, 1, np.array([2]), np.array([-1])),
    ]
    for one, other in zip(several, _unpack(np.array(_pack(several))), strict=True):
        for mine, theirs in zip(one[:-1], other[:-1], strict=True):
            assert list(np.atleast_1d(mine)) == list(np.atleast_1d(theirs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"realise": "ranks", "ranks": 0}, "ranks = 0"),
        ({"realise": "ranks", "group": "auto"}, "auto with realise = ranks"),
        ({"cores": [1]}, "cores"),
        ({"realise": "ranks", "group": 9}, "at most 6"),
        ({"realise": "ranks", "ranks": 9}, "ranks = 9: expected at most 8"),
    ],
)
def test_ranks_that_cannot_be_are_named(options, message, deep):
    with pytest.raises(ConfigError, match=message):
        easy(deep, **options)


@pytest.mark.slow
def test_auto_groups_add_up(deep, serve_all):
    engine = easy(deep, group="auto")
    quick = engine.runner.drafter.quick.model
    assert sum(getattr(quick, "groups", (8,))) == 8
    assert len(serve_all(engine, prompts()[:1], max_tokens=8)[0]) == 8


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (0, "group = 0"),
        (7, "group = 7: expected at most 6"),
        ((1, 7), "group"),
        ((2, 5, 1), "alone"),
        ((1, 5, 1), "add up to the 8"),
    ],
)
def test_bad_groups_are_named(group, message, deep):
    with pytest.raises(ConfigError, match=message):
        easy(deep, group=group)


def test_what_cannot_be_stale_is_named(random_model, deep, tmp_path):
    one = ModelConfig(**{**DEEP, "num_layers": 1}, family="llama", tied=True)
    huggingface.write(tmp_path / "one", random_model(one))
    with pytest.raises(ConfigError, match="a draft of 1 layers"):
        easy((deep[0], deep[1], tmp_path / "one"), group=2)
    normed = ModelConfig(**DEEP, family="qwen3", qk_norm=True)
    huggingface.write(tmp_path / "normed", random_model(normed))
    with pytest.raises(ModelError, match="realise: sequential"):
        easy((deep[0], deep[1], tmp_path / "normed"), group=3)
    assert easy((deep[0], deep[1], tmp_path / "normed"), group=3, realise="sequential")
    with pytest.raises(ConfigError, match="realise"):
        ServeJob(model="x", speculative={"name": "easyspec", "path": "x", "realise": "magic"})
