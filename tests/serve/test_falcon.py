"""A net over features guesses blocks of tokens: the same tokens, and features of paths alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError  # noqa: E402
from shoal.ir import DrafterCalibration, ServeJob, TreeSpec  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.drafters import files  # noqa: E402
from shoal.model.drafters.falcon import SemiAutoregressive  # noqa: E402
from shoal.plan.trees.auto import AutoTree  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting, RowCosts  # noqa: E402
from shoal.serve.decode.costs import measure_costs  # noqa: E402
from shoal.serve.decode.passes import TreePasses  # noqa: E402
from shoal.serve.engine.build import engine_of, load_model  # noqa: E402

LEVEL = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.2, 0.1), (0.3, 0.2, 0.1),
         (0.3, 0.2, 0.1))  # fmt: skip


@pytest.fixture
def target(random_model, tmp_path):
    """The directory of a target."""
    huggingface.write(tmp_path / "target", random_model("llama", seed=1))
    return tmp_path / "target"


def written(place, target, k, levels=4):
    """A random net for it."""
    model = huggingface.read(target, torch.float32)
    net = SemiAutoregressive(model.config, k)
    source = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=source) * 0.2
    config = files.DrafterConfig(
        name="falcon",
        options={"k": k, "forwards": levels // k},
        target=files.fingerprint(target),
        vocab_size=model.config.vocab_size,
        hidden=model.config.hidden,
        calibration=LEVEL[:levels],
    )
    files.write(place, config, net.state_dict())
    return net.double()


def job_of(target, place, **options):
    chosen = {"name": "falcon", "path": str(place)} | options
    return ServeJob(model=str(target), kv_tokens=4096, threads=1, speculative=chosen)


def prompts():
    return [[7 * n % 160 for n in range(length)] for length in (3, 20, 50)]


@pytest.mark.slow
@pytest.mark.parametrize(("k", "options"), [(2, {"forwards": 3}), (1, {"forwards": 3}), (3, {})])
def test_same_tokens_as_plain_decoding(k, options, target, tmp_path, serve_all):
    written(tmp_path / "net", target, k, 6)
    job = job_of(target, tmp_path / "net", **options)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    plain = engine_of(job.model_copy(update={"speculative": None}), model)[0]
    wanted = serve_all(plain, prompts(), max_tokens=30)
    engine = engine_of(job, model)[0]
    for nodes in (1, 7, 30):
        engine.scheduler.drafting = FixedDrafting(nodes)
        assert serve_all(engine, prompts(), max_tokens=30) == wanted
    assert engine.stats()["draft_trees_total"] > 20
    sampled = {"max_tokens": 30, "temperature": 0.8, "seed": 3}
    assert serve_all(engine, prompts(), **sampled) == serve_all(plain, prompts(), **sampled)


@torch.no_grad()
def alone(model, net, tokens, path):
    """Logits of all levels down a path of guesses, by dense passes of the net over it alone."""
    places, k = len(tokens) - 1, net.k
    features = model.hidden(torch.tensor([tokens[:-1]]))
    embeds = model.embed(torch.tensor([tokens[1:]]))
    read, state = net.mixed(features, embeds)
    logits, last = [], None
    for turn in range(1 + len(path) // k):
        if turn:
            chosen = torch.tensor([path[(turn - 1) * k : turn * k]])
            more, state = net.mixed(last, model.embed(chosen), state)
            read = torch.cat((read, more), 1)
        # The last k places see everything.
        length = places + turn * k
        everything = torch.zeros(1, 1, length, length, dtype=read.dtype)
        last = net.seen(read, torch.arange(length), everything)[:, -k:]
        logits += list(model.logits(last)[0])
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
def test_guesses_of_a_tree_are_those_of_each_path_alone(k, target, tmp_path, serve_all):
    net = written(tmp_path / "net", target, k, 6)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    engine = engine_of(job_of(target, tmp_path / "net", forwards=6 // k), model)[0]
    engine.scheduler.drafting = FixedDrafting(40)
    caught = []
    propose = engine.runner.drafter.propose

    def spy(guesses):
        made = propose(guesses)
        caught.extend(zip([list(one.request.tokens) for one in guesses], made, strict=True))
        return made

    engine.runner.drafter.propose = spy
    serve_all(engine, prompts()[:2], max_tokens=5)
    spec, compared = engine.runner.drafter.spec, 0
    for tokens, tree in caught:
        if tree is None:
            assert len(tokens) - 1 < k
            continue
        assert tree.tokens[0] == tokens[-1]
        for node in range(0, tree.nodes, 3):
            path, above = [], spec.parent[node]
            while above >= 0:
                path.append(int(tree.tokens[above + 1]))
                above = spec.parent[above]
            logits = alone(model, net, tokens, path[::-1])[spec.level[node]]
            assert tree.tokens[node + 1] == logits.topk(3).indices[spec.rank[node]]
            compared += 1
    assert compared > 50
    assert spec.depth > k or k == 3


def test_a_preempted_request_is_read_again(random_model, target, tmp_path, serve_all):
    written(tmp_path / "net", target, 2)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    job = job_of(target, tmp_path / "net")
    tight = job.model_copy(update={"kv_tokens": 128, "max_position": 120})
    request = [prompt[:20] for prompt in prompts()] * 2
    wanted = serve_all(
        engine_of(job.model_copy(update={"speculative": None}), model)[0], request, max_tokens=40
    )
    engine = engine_of(tight, model)[0]
    engine.scheduler.drafting = FixedDrafting(4)
    assert serve_all(engine, request, max_tokens=40) == wanted
    assert engine.stats()["preemptions_total"] > 0


@pytest.mark.parametrize("weights", ["plain", "int8-g32"])
def test_kernels_of_inference_guess_too(weights, target, tmp_path, serve_all):
    written(tmp_path / "net", target, 2)
    job = job_of(target, tmp_path / "net", weights=weights).model_copy(update={"precision": "bf16"})
    engine = engine_of(job, load_model(job))[0]
    engine.scheduler.drafting = FixedDrafting(8)
    assert [len(one) for one in serve_all(engine, prompts(), max_tokens=8)] == [8, 8, 8]
    assert engine.stats()["draft_trees_total"] > 0
    assert engine.runner.drafter.memory_bytes() > engine.runner.drafter.net.nbytes


@pytest.mark.parametrize("recordable", ["cpp", "packed", "amx"], indirect=True)
def test_recorded_passes_make_what_others_make(target, tmp_path, serve_all, recordable):
    written(tmp_path / "net", target, 2)
    job = job_of(target, tmp_path / "net", forwards=2).model_copy(update={"precision": "bf16"})
    engine = engine_of(job, load_model(job))[0]
    engine.scheduler.drafting = FixedDrafting(8)
    drafter = engine.runner.drafter
    taped = drafter._taped

    def flat(made):
        return [made.features, made.logits, *made.state]

    def both(reading):
        results = [one.clone() for one in flat(drafter.net.read(reading, drafter._cache))]
        again = taped.read(reading)
        for mine, theirs in zip(flat(again), results, strict=True):
            assert (mine - theirs).norm() <= 0.02 * theirs.norm()
        return again

    drafter._read = both
    for wanted in (prompts()[1:2], prompts()):  # one after the other, and all together
        serve_all(engine, wanted, max_tokens=30)
    assert not taped.refused
    assert sum(one is not None for one in taped.recorded.values()) >= 3


def test_as_many_passes_as_pay(target, tmp_path, monkeypatch):
    """What passes cost decides how many there are; what was asked for is not decided."""
    written(tmp_path / "net", target, 2)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    for each, passes in ((1e-4, 2), (4e-3, 1)):
        monkeypatch.setattr(
            "shoal.serve.decode.build.measure_costs",
            lambda runner, _, each=each: RowCosts(
                rows=(1, 64),
                seconds_of=(0.01, 0.011),
                draft_s=each * (runner.drafter.spec.depth // 2),
            ),
        )
        for request in (0, 2):
            engine = engine_of(job_of(target, tmp_path / "net", forwards=request), model)[0]
            assert engine.runner.drafter.spec.depth == 2 * (request or passes)
            assert engine.scheduler.drafting.cost.draft_s == each * (request or passes)


def test_what_guesses_cost_is_of_guesses_that_were_made(target, tmp_path):
    """The net reads one more place for every guess that is timed, as it does in a step."""
    written(tmp_path / "net", target, 2)
    model = huggingface.read(target, torch.float64).requires_grad_(False)
    engine = engine_of(job_of(target, tmp_path / "net", forwards=2), model)[0]
    made = []
    propose = engine.runner.drafter.propose
    engine.runner.drafter.propose = lambda guesses: made.append(propose(guesses)) or made[-1]
    measure_costs(engine.runner, engine.scheduler.limits, rows=(1,), seconds=1e-6)
    assert len(made) > 10 and all(tree is not None for trees in made for tree in trees)


def test_passes_read_what_the_tree_goes_on_from():
    #      0      1      2 (under 0)  3 (under 1)  4 (under 2)  5 (under 4) 6 (under 3)
    spec = TreeSpec((-1, -1, 0, 1, 2, 4, 3), (0, 1, 0, 0, 0, 0, 1))
    first, second = TreePasses(spec, 2).passes
    assert first.nodes.tolist() == [0, 1, 2, 3]
    assert second.nodes.tolist() == [4, 5, 6]
    assert second.chains.tolist() == [[0, 2], [1, 3]]
    assert second.place.tolist() == [0, 0, 1]
    assert second.level.tolist() == [0, 1, 0]
    assert second.seen.tolist() == [0b0011, 0b0011, 0b1100, 0b1100]
    third = TreePasses(TreeSpec((-1, 0, 1), (0, 0, 0)), 1).passes[2]
    assert (third.before, third.seen.tolist()) == (1, [0b11])
    assert len(TreePasses(AutoTree(nodes=2).build(DrafterCalibration(LEVEL)), 4).passes) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 3}, ConfigError, "k = 3: expected 2"),
        ({"k": -1}, ConfigError, "k = -1"),
        ({"forwards": 3}, ConfigError, "forwards = 3: expected at most 2"),
        ({"forwards": 1, "tree": {"name": "chain", "depth": 3}}, ConfigError, "drafter guesses 2"),
        ({"path": "/nowhere"}, ModelError, "missing"),
    ],
)
def test_bad_input_is_named(options, error, message, target, tmp_path):
    written(tmp_path / "net", target, 2)
    with pytest.raises(error, match=message):
        job = job_of(target, tmp_path / "net", **options)
        engine_of(job, load_model(job))


def test_a_net_for_another_model_is_refused(random_model, target, tmp_path):
    written(tmp_path / "net", target, 2)
    huggingface.write(tmp_path / "other", random_model("llama", seed=2))
    job = job_of(tmp_path / "other", tmp_path / "net")
    with pytest.raises(ModelError, match="and this model's is"):
        engine_of(job, load_model(job))
