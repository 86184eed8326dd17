"""Dovetail by the kernels of inference: the same trees as operator by operator, and sooner."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.ir import ServeJob  # noqa: E402
from shoal.kernel.fused.guess import native  # noqa: E402
from shoal.model.drafters.fusion import FusionDrafter  # noqa: E402
from shoal.plan.serving.small_device import tree_room  # noqa: E402
from shoal.serve.decode.dovetail.fast import PagedFusion  # noqa: E402
from shoal.serve.decode.dovetail.net import NetInput, PlainFusion  # noqa: E402
from shoal.serve.decode.dovetail.taped import fast_net  # noqa: E402
from shoal.serve.decode.dovetail.trees import FeatureTrees  # noqa: E402
from shoal.serve.decode.draft.growing import GrowingTree  # noqa: E402

DEPTH, BREADTH, LIMIT = 4, 3, 120
LONGEST = LIMIT + tree_room(DEPTH, BREADTH)
TOKENS = [7 * n % 160 for n in range(20)]

fast = pytest.mark.skipif(
    not native(torch.float32, torch.device("cpu")), reason="needs AVX-512 and a compiler"
)


@pytest.fixture(scope="module")
def model(random_model):
    return random_model("llama", seed=1).requires_grad_(False)


def net_of(model):
    torch.manual_seed(3)
    net = FusionDrafter(model.config, 2).requires_grad_(False)
    # As random as it begins, a net takes all tokens for as probable.
    net.gate.bias.normal_()
    return net


def plain_of(model, dtype=torch.float32):
    model = model.to(dtype)
    return PlainFusion(
        net_of(model).to(dtype), model.embed.weight, 40 * model.output_weight,
        count=BREADTH, room=LONGEST,
    )  # fmt: skip


def fast_of(model, **options):
    model = model.to(torch.float32)
    job = ServeJob(
        model="none", precision="fp32", threads=1, max_running=1, max_position=LIMIT,
        speculative={"name": "ngram"}, **{"kv_tokens": 512, **options},
    )  # fmt: skip
    return fast_net(
        net_of(model), model.embed.weight, 40 * model.output_weight, job,
        count=BREADTH, longest=LONGEST,
    )  # fmt: skip


def trees_of(net):
    return FeatureTrees(net, depth=DEPTH, breadth=BREADTH, limit=LIMIT)


def tell(trees, model, tokens, root, start=0, request=1):
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor([tokens]))[0]
        trees.certain(request, start, tokens[start:], hidden[start:], root)


def told(tree):
    return tree.tokens.tolist(), list(tree.shape.parent)


@fast
@pytest.mark.slow
@torch.inference_mode()
def test_recorded_passes_give_the_bits_of_others_and_the_numbers_of_the_plain_net(
    model, recordable
):
    taped, plain = fast_of(model), plain_of(model)
    source = torch.Generator().manual_seed(0)
    holds = [(net, net.hold()) for net in (taped, plain)]
    features = torch.randn(30, taped.width, generator=source)
    seen = np.array([0b11, 0b101, 0b1011])
    for net, held in holds:
        assert net.reserve(held, 60)
        net.read(held, NetInput(features, list(range(30)), range(30), last=True))
    for _ in range(4):
        behind = torch.randn(3, taped.width, generator=source)
        rows = [
            NetInput(behind, [5, 6, 7], [30, 30, 31], seen, 30),
            NetInput(behind, [5, 6, 7], range(30, 33)),
            NetInput(behind, [5, 6, 7], range(30, 33), last=True),
        ]
        for row in rows:
            (result, known), (wanted, held) = ((net.read(h, row), h) for net, h in holds)
            known.length = held.length = 30
            features_of, tokens = result.features.clone(), result.tokens.copy()
            torch.testing.assert_close(features_of, wanted.features, atol=2e-4, rtol=2e-4)
            np.testing.assert_array_equal(tokens, wanted.tokens)
            np.testing.assert_allclose(result.values, wanted.values, atol=1e-3)
            single = PagedFusion.read(taped, known, row)
            known.length = 30
            if row.seen is not None:  # of a chain, attention is another kernel's where it is not
                assert torch.equal(single.features, features_of)
    assert not taped.refused
    assert taped.recorded[3] is not None


@fast
@torch.inference_mode()
def test_trees_are_those_of_the_plain_net(model):
    pair = [trees_of(net_of_kind(model)) for net_of_kind in (plain_of, fast_of)]
    tokens = list(TOKENS)
    for root in (42, 17, 99, 3, 150):
        for trees in pair:
            tell(trees, model, tokens, root, 0 if root == 42 else len(tokens) - 1)
        first, second = (told(trees.tree(1, len(tokens) + 1, 7)) for trees in pair)
        assert first == second
        tokens.append(root)


class Whole(GrowingTree):
    """A tree that grows without regard to how many nodes are wanted."""

    def expand(self, nodes=0):
        return super().expand()


@torch.inference_mode()
def test_what_cannot_be_verified_is_not_computed_and_the_tree_is_the_same(model, monkeypatch):
    passes, rows = [], []
    for kind in (GrowingTree, Whole):
        monkeypatch.setattr("shoal.serve.decode.dovetail.trees.GrowingTree", kind)
        trees = trees_of(plain_of(model, torch.float64))
        tell(trees, model, TOKENS, 42)
        results = []
        for nodes in range(1, 13):
            trees._states[1].ahead = None
            results.append(told(trees.tree(1, 21, nodes)))
        passes.append(trees.passes)
        rows.append(results)
    model.to(torch.float32)
    assert rows[0] == rows[1]
    assert passes[0] < passes[1]


def test_pruned_trees_of_any_probabilities_are_the_best_nodes():
    for seed in range(40):
        source = np.random.default_rng(seed)
        sharp = source.uniform(0.1, 3)
        nodes, width, depth = (int(source.integers(1, most)) for most in (20, 5, 6))
        drawn: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        trees = []
        for limit in (0, nodes):
            tree = GrowingTree(0, depth, width)
            path = {0: ()}
            order = [0]
            for level in range(depth):
                if level:
                    tree.expand(limit)
                    order = list(tree._expanded)
                if not order:
                    break
                made = []
                for row in order:
                    key = path[row]
                    if key not in drawn:
                        mine = np.random.default_rng([seed, *key, 7])
                        # Rounded, so that some are equal.
                        share = np.sort(np.round(np.log(mine.dirichlet([sharp] * 6) + 1e-3), 1))
                        drawn[key] = (mine.permutation(50)[:width], share[::-1][:width].clip(max=0))
                    made.append(drawn[key])
                before = len(tree.tokens)
                tree.add(*(np.array(part) for part in zip(*made, strict=True)))
                for row in range(before, len(tree.tokens)):
                    path[row] = (*path[tree.parent[row]], tree.tokens[row])
            trees.append(told(tree.tree(nodes)[0]))
        assert trees[0] == trees[1]


@torch.inference_mode()
def test_what_was_begun_ahead_is_finished_when_it_is_wanted(model):
    model.to(torch.float64)
    whole, cut = (trees_of(plain_of(model, torch.float64)) for _ in range(2))
    for trees, most in ((whole, 99), (cut, 3)):
        tell(trees, model, TOKENS, 42)
        trees.tree(1, 21, 8)
        request = iter(range(99))
        trees.on(1, lambda asked=request, most=most: next(asked) >= most)
    state = cut._states[1]
    assert not state.ahead.grown.whole
    assert whole._states[1].ahead.grown.whole
    assumed = state.ahead.tokens
    results = []
    for trees in (whole, cut):
        tell(trees, model, [*TOKENS, 42, *assumed[:-1]], assumed[-1], start=20)
        results.append(told(trees.tree(1, 21 + len(assumed), 8)))
        assert (trees.guessed, trees.right) == (1, 1)
    model.to(torch.float32)
    assert results[0] == results[1]


@fast
@torch.inference_mode()
def test_who_guessed_longest_ago_gives_room(model):
    net = fast_of(model, kv_tokens=LONGEST)
    trees = trees_of(net)
    long = [n % 160 for n in range(100)]
    for request in range(1, 6):
        tell(trees, model, long, 42, request=request)
        assert trees.tree(request, 101, 5) is not None
    assert 1 not in trees._states
    tell(trees, model, [*long, 42], 43, start=100, request=1)
    assert trees.tree(1, 102, 5) is None
    held = [block for state in trees._states.values() for block in state.held.blocks]
    assert len({*held, *net._free}) == len(held) + len(net._free) == net.cache.num_blocks
