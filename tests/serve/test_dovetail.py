"""Drafter and target as two processes: the same tokens, counted bytes, a death that is named."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from test_draft_model import known_costs  # noqa: E402, F401
from test_speculative import answers, prompts  # noqa: E402

from shoal.core.errors import ConfigError, ModelError, ServeError  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.drafters import files  # noqa: E402
from shoal.model.drafters.fusion import FusionDrafter  # noqa: E402
from shoal.plan.serving.small_device import tree_room  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402
from shoal.serve.decode.dovetail.fast import fits  # noqa: E402
from shoal.serve.decode.dovetail.net import PlainFusion  # noqa: E402
from shoal.serve.decode.dovetail.trees import FeatureTrees  # noqa: E402
from shoal.serve.decode.dovetail.worker import RequestForecast  # noqa: E402
from shoal.serve.engine.build import engine_of  # noqa: E402


@pytest.fixture(scope="module")
def served(random_model, tmp_path_factory):
    """A target, its directory, and that of a drafter which knows as much as chance does."""
    home = tmp_path_factory.mktemp("dovetail")
    model = random_model("llama", seed=1)
    huggingface.write(home / "target", model)
    torch.manual_seed(3)
    net = FusionDrafter(model.config, 2)
    config = files.DrafterConfig(
        name="dovetail",
        options={"layers": 2},
        target=files.fingerprint(home / "target"),
        vocab_size=model.config.vocab_size,
        hidden=model.config.hidden,
        calibration=((0.5, 0.2), (0.3, 0.1)),
    )
    files.write(home / "drafter", config, net.state_dict())
    return model.to(torch.float64), home / "target", home / "drafter", net


def job_of(served, **options):
    chosen = {"name": "dovetail", "path": str(served[2]), "cores": [], **options}
    return ServeJob(model=str(served[1]), kv_tokens=4096, threads=1, speculative=chosen)


@pytest.fixture
def engine(served):
    """Options -> an engine; its drafter is ended with the test."""
    made = []

    def make(**options):
        engine = engine_of(job_of(served, **options), served[0])[0]
        engine.scheduler.drafting = FixedDrafting(7)
        made.append(engine)
        return engine

    yield make
    for one in made:
        one.runner.drafter.close()


@pytest.mark.slow
def test_same_tokens_and_bytes_by_the_formula(served, engine, engine_for, serve_all):
    request = prompts()
    known = answers(serve_all, engine_for(served[0]), request)
    for overlap in (False, True):
        result = engine(overlap=overlap, depth=3, breadth=3, nodes=7)
        assert answers(serve_all, result, request) == known
        drafter = result.runner.drafter
        assert drafter.link_bytes == drafter.expected_bytes
        stats = result.stats()
        assert stats["draft_trees_total"] > 50
        width, tokens = served[0].config.hidden, sum(map(len, known.values()))
        assert drafter.link_bytes < 2 * tokens * (width * 8 + 4) + stats["draft_trees_total"] * 100


@pytest.mark.slow
def test_the_kernels_of_inference_guess_for_the_same_tokens(served, engine_for, serve_all):
    request, model = prompts(), copy.deepcopy(served[0]).to(torch.float32)
    if not fits(model.config, torch.float32, torch.device("cpu")):
        pytest.skip("this CPU has no kernels of inference")
    known = answers(serve_all, engine_for(copy.deepcopy(model)), request)
    for options in ({}, {"overlap": True, "weights": "int8-g32"}):
        engine = engine_of(job_of(served, depth=3, breadth=3, nodes=7, **options), model)[0]
        engine.scheduler.drafting = FixedDrafting(7)
        drafter = engine.runner.drafter
        try:
            assert answers(serve_all, engine, request) == known
            assert drafter.link_bytes == drafter.expected_bytes
            assert engine.stats()["draft_trees_total"] > 50
            assert drafter.level_s > 0
            assert max(passes for passes, _ in drafter.drafts) <= 4
        finally:
            drafter.close()


@pytest.mark.slow
def test_a_death_is_named_with_its_exit_code(engine):
    result = engine(depth=2, breadth=2)
    drafter = result.runner.drafter
    result.add(Request("r0", [1, 2, 3], 3, SamplingParams(max_tokens=40)))
    result.step()
    os.kill(drafter.process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ServeError, match=r"drafter \(process \d+\) ended with exit code -9"):
        while result.busy:
            result.step()
    assert time.monotonic() - began < 2


class Line:
    """A drafter in this process; what the net does, and not how it is reached."""

    def __init__(self, served, **options):
        model, _, _, net = served
        options = {"depth": 3, "breadth": 2, "limit": 200, **options}
        self.model = model
        self.net = net.to(torch.float64)
        room = options["limit"] + tree_room(options["depth"], options["breadth"])
        plain = PlainFusion(
            self.net, model.embed.weight, model.output_weight, count=options["breadth"], room=room
        )
        self.trees = FeatureTrees(plain, **options)

    def tell(self, tokens, root=None, start=0):
        with torch.inference_mode():
            hidden = self.model.hidden(torch.tensor([tokens]))[0]
            self.trees.certain(1, start, tokens[start:], hidden[start:], root)


def naive(line, tokens, root, path):
    """The net's best two tokens behind a path of guesses, read anew and one by one."""
    net, model = line.net, line.model
    with torch.inference_mode():
        features = model.hidden(torch.tensor([tokens]))
        known = [*tokens, root]
        for token in path:
            out = net(features, model.embed(torch.tensor([known[1:]])))
            features = torch.cat((features, out[:, -1:]), 1)
            known.append(token)
        out = net(features, model.embed(torch.tensor([known[1:]])))
        return model.logits(out[:, -1])[0].topk(2).indices.tolist()


@torch.inference_mode()
def test_trees_are_what_the_net_says_node_by_node(served):
    line = Line(served)
    tokens = [7 * n % 160 for n in range(20)]
    line.tell(tokens[:13])
    line.tell(tokens, root=42, start=13)
    tree = line.trees.tree(1, 21, 10)
    assert tree.tokens[0] == 42
    for row, children in enumerate(tree.shape.children):
        path, at = [], row
        while at:
            path.append(int(tree.tokens[at]))
            at = tree.shape.parent[at]
        best = naive(line, tokens, 42, path[::-1])
        assert [int(tree.tokens[child]) for child in children] == best[: len(children)] or {
            int(tree.tokens[child]) for child in children
        } <= set(best)
    assert tree.shape.depth.max() == 3


@torch.inference_mode()
def test_what_was_drafted_ahead_is_used_where_the_target_agrees(served):
    tokens = [7 * n % 160 for n in range(20)]
    line = Line(served)
    line.tell(tokens, root=42)
    first = line.trees.tree(1, 21, 10)
    line.trees.on(1, lambda: False)
    state = line.trees._states[1]
    assert state.held.length == 20
    assumed = state.ahead.tokens
    passes = []
    inner = line.trees.net.read
    line.trees.net.read = lambda *args: passes.append(1) or inner(*args)
    line.tell([*tokens, 42, *assumed[:-1]], root=assumed[-1], start=20)
    assert line.trees.tree(1, 21 + len(assumed), 10).tokens[0] == assumed[-1]
    assert not passes  # it was there
    assert int(first.tokens[1]) in (assumed[0], *first.tokens.tolist())
    other = Line(served)
    other.tell(tokens, root=42)
    other.trees.tree(1, 21, 10)
    other.trees.on(1, lambda: False)
    wrong = (assumed[0] + 1) % 160
    other.tell([*tokens, 42], root=wrong, start=20)
    fresh = Line(served)
    fresh.tell([*tokens, 42], root=wrong)
    one, two = other.trees.tree(1, 22, 10), fresh.trees.tree(1, 22, 10)
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.shape.parent == two.shape.parent


def test_no_pass_begins_shortly_before_the_verdict_is_due():
    due = RequestForecast()
    for start in range(0, 50, 10):
        assert not due.soon(start + 5, 2.0)  # nothing is drafted, or too little is known
        due.sent(start)
        due.came(start + 8)
        due.came(start + 9)  # a question behind its verdict
    due.sent(100)
    assert [due.soon(100 + at, 2.0) for at in (1, 6.5, 7.5, 8.5)] == [False, False, True, False]


def test_the_gate_at_its_ends_takes_one_input_alone(served):
    net = served[3].to(torch.float64)
    source = torch.Generator().manual_seed(0)
    f, g, e = (torch.randn(1, 4, 64, generator=source, dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        assert torch.equal(net.mixed(f, e, z=1.0)[0], net.mixed(f, g, z=1.0)[0])
        assert torch.equal(net.mixed(f, e, z=0.0)[0], net.mixed(g, e, z=0.0)[0])
        assert not torch.equal(net.mixed(f, e)[0], net.mixed(f, g)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_cap": 1000}, r"memory_cap = 1000: the drafter with 2 layers.*bytes"),
        ({"weights": "int8-g64"}, "give weights: plain"),
        ({"link_s": 1e-5}, "link_bytes_per_s"),
        ({"nodes": 0}, "nodes = 0"),
        ({"breadth": 40}, "breadth"),
    ],
)
def test_bad_options_are_named(options, message, served):
    with pytest.raises(ConfigError, match=message):
        engine_of(job_of(served, **options), served[0])


def test_a_drafter_of_another_target_is_refused(served, random_model, tmp_path):
    huggingface.write(tmp_path / "other", random_model("llama", seed=9))
    job = job_of(served).model_copy(update={"model": str(tmp_path / "other")})
    with pytest.raises(ModelError, match=files.fingerprint(served[1])):
        engine_of(job, served[0])
