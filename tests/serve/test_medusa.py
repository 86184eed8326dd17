"""Heads guess, the model decides: the same tokens, and heads of another model are refused."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.machine.described import load  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.drafters import files  # noqa: E402
from shoal.model.drafters.medusa import MedusaHeads  # noqa: E402
from shoal.plan.serving.plans import plan_serve  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402
from shoal.serve.engine.build import engine_of, load_model  # noqa: E402

HEADS, CALIBRATION = 3, ((0.5, 0.2, 0.1), (0.3, 0.1, 0.05), (0.2, 0.1, 0.0))


@pytest.fixture
def served(random_model, tmp_path):
    """Directories of a target and of heads that are its own output matrix, and a bit of noise."""
    model = random_model("llama", seed=1)
    target, heads_dir = tmp_path / "target", tmp_path / "heads"
    huggingface.write(target, model)
    heads = MedusaHeads.of(model.output_weight, HEADS)
    source = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=source)
    config = files.DrafterConfig(
        name="medusa",
        target=files.fingerprint(target),
        vocab_size=model.config.vocab_size,
        hidden=model.config.hidden,
        calibration=CALIBRATION,
    )
    files.write(heads_dir, config, heads.state_dict())
    return target, heads_dir, heads


def job_of(target, heads_dir, **options):
    chosen = {"name": "medusa", "path": str(heads_dir), **options}
    return ServeJob(model=str(target), kv_tokens=4096, threads=1, speculative=chosen)


def prompts():
    return [[7 * n % 160 for n in range(length)] for length in (3, 20, 50)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"tree": "chain", "heads": 2}, {"tree": {"name": "paths", "paths": [[1], [1, 0]]}}],
)
def test_same_tokens_as_plain_decoding(options, served, serve_all):
    target, heads_dir, _ = served
    job = job_of(target, heads_dir, **options)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    plain = engine_of(job.model_copy(update={"speculative": None}), model)[0]
    wanted = serve_all(plain, prompts(), max_tokens=30)
    engine = engine_of(job, model)[0]
    for nodes in (1, 4, 9):
        engine.scheduler.drafting = FixedDrafting(nodes)
        assert serve_all(engine, prompts(), max_tokens=30) == wanted
    assert engine.stats()["draft_trees_total"] > 20
    sampled = {"max_tokens": 30, "temperature": 0.8, "seed": 3}
    assert serve_all(engine, prompts(), **sampled) == serve_all(plain, prompts(), **sampled)


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["auto", "chain"])
def test_heads_that_were_never_right_are_served_and_do_not_guess(tree, served, serve_all):
    target, heads_dir, _ = served
    (heads_dir / files.CONFIG).write_text(
        json.dumps(
            json.loads((heads_dir / files.CONFIG).read_text())
            | {"calibration": [[0.0] * 3] * HEADS}
        )
    )
    job = job_of(target, heads_dir, tree=tree)
    assert plan_serve(job, load("laptop")).predicted
    engine = engine_of(job, load_model(job))[0]
    plain = engine_of(job.model_copy(update={"speculative": None}), load_model(job))[0]
    answers = [serve_all(one, prompts(), max_tokens=10) for one in (engine, plain)]
    assert answers[0] == answers[1]
    assert engine.stats()["draft_trees_total"] == 0


def test_trees_hold_the_best_guesses_of_the_heads(served, serve_all):
    target, heads_dir, heads = served
    job = job_of(target, heads_dir)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    engine = engine_of(job, model)[0]
    engine.scheduler.drafting = FixedDrafting(6)
    caught = []
    propose = engine.runner.drafter.propose

    def spy(guesses):
        caught.append((list(guesses[0].request.tokens), propose(guesses)[0]))
        return [caught[-1][1]]

    engine.runner.drafter.propose = spy
    serve_all(engine, prompts()[:1], max_tokens=12)
    spec = engine.runner.drafter._filler.spec
    assert len(caught) > 5
    for tokens, tree in caught:
        hidden = model.hidden(torch.tensor([tokens[:-1]]))[0, -1:]
        best = heads.double()(hidden)[:, 0].topk(3).indices
        assert tree.tokens[0] == tokens[-1]
        for node in range(tree.nodes):
            assert tree.tokens[node + 1] == best[spec.level[node], spec.rank[node]]
            assert tree.shape.parent[node + 1] == spec.parent[node] + 1


def test_heads_in_fewer_bits_guess_the_same_tokens_mostly_and_lose_none(served, serve_all):
    target, heads_dir, _ = served
    job = job_of(target, heads_dir, weights="int8-g32").model_copy(update={"precision": "bf16"})
    model = load_model(job)
    engine = engine_of(job, model)[0]
    engine.scheduler.drafting = FixedDrafting(4)
    result = serve_all(engine, prompts(), max_tokens=8)
    assert [len(one) for one in result] == [8, 8, 8]
    assert engine.stats()["draft_trees_total"] > 0


def test_heads_of_another_model_are_refused_with_both_hashes(served, random_model, tmp_path):
    target, heads_dir, _ = served
    other = tmp_path / "other"
    huggingface.write(other, random_model("llama", seed=2))
    job = job_of(other, heads_dir)
    mine, theirs = files.fingerprint(target), files.fingerprint(other)
    assert mine != theirs
    with pytest.raises(ModelError, match=f"target {mine}, and this model's is {theirs}"):
        engine_of(job, load_model(job))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 5}, ConfigError, "heads = 5: expected at most 3"),
        ({"heads": -1}, ConfigError, "heads = -1"),
        ({"tree": {"name": "auto", "nodes": 0}}, ConfigError, "nodes = 0: expected 1 to 63"),
        ({"tree": {"name": "paths", "paths": [[0, 0]]}}, ConfigError, "stands without"),
        ({"tree": {"name": "paths", "paths": [[7]]}}, ConfigError, r"takes guess 7 of level 1"),
        ({"tree": {"name": "chain", "depth": 9}}, ConfigError, "guesses 4 tokens ahead"),
        ({"path": "/nowhere"}, ModelError, "missing"),
    ],
)
def test_bad_input_is_named(options, error, message, served):
    target, heads_dir, _ = served
    with pytest.raises(error, match=message):
        job = job_of(target, heads_dir, **options)
        engine_of(job, load_model(job))


def test_a_drafter_of_another_kind_is_named(served):
    target, heads_dir, _ = served
    raw = json.loads((heads_dir / files.CONFIG).read_text())
    (heads_dir / files.CONFIG).write_text(json.dumps({**raw, "name": "falcon"}))
    with pytest.raises(ModelError, match="of kind falcon, and speculative is medusa"):
        job = job_of(target, heads_dir)
        engine_of(job, load_model(job))
