"""Acceptance rules against the distribution that they promise, enumerated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from scipy.stats import chisquare  # noqa: E402

from shoal.core.errors import ConfigError  # noqa: E402
from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.serve.decode import ACCEPTANCES  # noqa: E402
from shoal.serve.decode.draft.growing import GrowingTree  # noqa: E402
from shoal.serve.decode.protocols import TokenTree, branches  # noqa: E402
from shoal.serve.engine.sampler import probabilities, sample_rows  # noqa: E402

V, TOKENS, DRAWS = 12, 3, 50_000


class Tables:
    """A target and a draft of which everything is known: scores by the last two tokens."""

    def __init__(self, seed, **params):
        source = np.random.default_rng(seed)
        self.params = {"temperature": 1.0, **params}
        self.target = torch.from_numpy(source.normal(0, 1.3, (V, V, V)))
        draft = self.target + torch.from_numpy(source.normal(0, 1.0, (V, V, V)))
        self.best = draft.argsort(-1, descending=True).tolist()
        self.q = [list(row.unsqueeze(1)) for row in self.chances(draft)]
        self.source = np.random.default_rng([seed, 1])

    def chances(self, scores):
        one = SamplingParams(max_tokens=1, **self.params)
        return probabilities(scores.view(-1, V), [one] * V * V).view(V, V, V)

    def joint(self):
        p = self.chances(self.target).numpy()
        return (p[0, 1][:, None, None] * p[1][:, :, None] * p).ravel()


def best_tree(tables, request, depth, width):
    """Guesses that are not drawn: the draft's best."""
    before, root = request.tokens[-2:]
    tokens, parent, level = [root], [-1], [(0, before)]
    for _ in range(depth):
        new = []
        for row, before in level:
            for token in tables.best[before][tokens[row]][:width]:
                new.append((len(tokens), tokens[row]))
                tokens.append(token)
                parent.append(row)
        level = new
    return TokenTree(np.array(tokens), branches(tuple(parent)))


def drawn_tree(tables, request, depth, width):
    before, root = request.tokens[-2:]
    grown = GrowingTree(root, depth, width)
    pairs = [(before, root)]
    for level in range(depth):
        q = [tables.q[before][last] for before, last in pairs]
        grown.draw(q[0] if len(q) == 1 else torch.cat(q), tables.source)
        if level + 1 < depth:
            tokens, *_ = grown.expand()
            above = [grown.computed[grown.parent[row]] for row in grown._expanded]
            start = grown.computed[grown.parent[grown._expanded[0]]]
            pairs = [(pairs[at - start][1], token) for at, token in zip(above, tokens, strict=True)]
    return grown.tree(depth * width)[0]


def sampled(rule, make, tables, depth, width, draws=DRAWS):
    """How often each text of three tokens came."""
    counts = np.zeros(V**TOKENS)
    pending = [
        Request(
            f"r{seed}", [0, 1], 2, SamplingParams(max_tokens=TOKENS, seed=seed, **tables.params)
        )
        for seed in range(draws)
    ]
    while pending:
        batch, pending = pending[:2000], pending[2000:]
        trees = [make(tables, one, depth, width) for one in batch]
        above, last = [], []
        for one, tree in zip(batch, trees, strict=True):
            tokens = tree.tokens.tolist()
            above += [one.tokens[-2], *(tokens[row] for row in tree.shape.parent[1:])]
            last += tokens
        logits = tables.target[above, last]
        for one, path in zip(batch, rule.walk(trees, batch, logits), strict=True):
            one.tokens += path.tokens
            if one.n_generated < TOKENS:
                pending.append(one)
            else:
                a, b, c = one.tokens[2 : 2 + TOKENS]
                counts[(a * V + b) * V + c] += 1
    return counts


def fits(counts, expected):
    """p of the chi-square test; rare texts are counted together."""
    expected = expected * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert counts[expected == 0].sum() == 0
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return chisquare(observed, wanted).pvalue


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "make", "depth", "width", "draws", "params"),
    [
        ("rejection", drawn_tree, 3, 1, DRAWS, {}),
        ("rejection", drawn_tree, 2, 2, DRAWS, {"temperature": 0.8}),
        ("rejection", drawn_tree, 1, 3, 10_000, {"temperature": 1.2, "top_k": 6, "top_p": 0.9}),
        ("rejection", best_tree, 2, 2, 10_000, {}),
        ("sample_match", best_tree, 2, 1, DRAWS, {}),
    ],
)
def test_the_distribution_is_the_targets_own(rule, make, depth, width, draws, params):
    tables = Tables(3, **params)
    counts = sampled(ACCEPTANCES.build(rule), make, tables, depth, width, draws)
    assert fits(counts, tables.joint()) > 1e-3


def test_q_of_another_distribution_is_found_out():
    """Drawing from one distribution and accepting by another is not lossless: the test can fail."""

    def make(tables, request, depth, width):
        tree = drawn_tree(tables, request, depth, width)
        q = {row: torch.ones(V, dtype=torch.float64) / V for row in tree.q}
        return TokenTree(tree.tokens, tree.shape, q)

    tables = Tables(3)
    counts = sampled(ACCEPTANCES.build("rejection"), make, tables, 1, 1, draws=2000)
    assert fits(counts, tables.joint()) < 1e-6


def test_probabilities_are_what_sampling_draws_from():
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=source)
    every = [
        SamplingParams(max_tokens=1, temperature=0.7),
        SamplingParams(max_tokens=1, temperature=1.0, top_k=3),
        SamplingParams(max_tokens=1, temperature=1.5, top_p=0.5),
        SamplingParams(max_tokens=1, temperature=1.0, min_p=0.2),
        SamplingParams(max_tokens=1, temperature=2.0, top_k=9, top_p=0.8, min_p=0.05),
        SamplingParams(max_tokens=1, temperature=0.1),
    ]
    p = probabilities(logits, every)
    torch.testing.assert_close(p.sum(-1), torch.ones(6, dtype=torch.float64))
    grid = (np.arange(400) + 0.5) / 400
    for row, params in enumerate(every):
        drawn = sample_rows(logits[row].expand(400, -1), [params] * 400, grid.tolist())
        share = np.bincount(drawn.numpy(), minlength=40) / 400
        assert np.abs(share - p[row].numpy()).max() <= 1 / 400 + 1e-9
        assert set(drawn.tolist()) <= set(p[row].nonzero()[:, 0].tolist())


def tree_of(*rows):
    """Token and parent of each row."""
    return TokenTree(np.array([token for token, _ in rows]), branches(tuple(at for _, at in rows)))


def request(**params):
    return Request("r", [1, 2], 2, SamplingParams(max_tokens=9, **params))


def test_typical_takes_the_longest_plausible_path():
    rule = ACCEPTANCES.build("typical")
    assert not rule.lossless
    tree = tree_of((2, -1), (3, 0), (4, 0), (5, 2), (6, 1))
    logits = torch.full((5, 8), -9.0)
    logits[0, 3], logits[0, 4] = 1.0, 0.0  # both plausible
    logits[1, 7] = 9.0  # 6 after 3 is not
    logits[2, 5] = 2.0
    logits[3, 1] = 3.0
    path = rule.walk([tree], [request(temperature=1.0)], logits)[0]
    assert path.rows == (2, 3)
    assert path.tokens == (4, 5, 1)
    greedy = rule.walk([tree], [request()], logits)[0]
    assert greedy.tokens == (3, 7)  # the best token of each place, as plain decoding has it


def test_typical_threshold_falls_with_entropy():
    flat = torch.zeros(2, 12)  # p = 1 / 12, exp(-entropy) = 1 / 12: above 0.3 / 12
    tree = tree_of((2, -1), (3, 0))
    rule = ACCEPTANCES.build("typical")
    assert rule.walk([tree], [request(temperature=1.0)], flat)[0].rows == (1,)
    sharp = flat.clone()
    sharp[0, 5] = 6.0  # the same guess is now far below the best
    assert rule.walk([tree], [request(temperature=1.0)], sharp)[0].rows == ()
    strict = ACCEPTANCES.build({"name": "typical", "epsilon": 1.0, "delta": 1.0})
    assert strict.walk([tree], [request(temperature=1.0)], flat)[0].rows == ()


@pytest.mark.parametrize("options", [{"epsilon": 0}, {"delta": 1.5}])
def test_bad_thresholds_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ACCEPTANCES.build({"name": "typical", **options})


def test_a_lossless_server_refuses_what_changes_its_words():
    from shoal.core.parts import Choice
    from shoal.serve.decode.build import acceptance

    with pytest.raises(ConfigError, match=r"accept = .?typical.*lossless"):
        acceptance(Choice(name="typical"), lossless=True)
    assert not acceptance(Choice(name="typical")).lossless
    for name in ("greedy", "rejection", "sample_match"):
        assert acceptance(Choice(name=name), lossless=True).lossless
