"""Aggregators: trees beside a loop, laws of the operators, orders, gradients, and bad input."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError  # noqa: E402
from shoal.core.native import compiler  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.fields.graph.gnn.gru.recurrent import Recurrent  # noqa: E402
from shoal.fields.graph.gnn.lcm import monoid  # noqa: E402
from shoal.fields.graph.gnn.lcm.monoid import (  # noqa: E402
    GRUPair,
    MLPPair,
    MonoidFold,
    Symmetrised,
    tree_fold,
)
from shoal.fields.graph.gnn.network import SAGEConv, aggregator_of  # noqa: E402
from shoal.fields.graph.gnn.protocols import GnnError  # noqa: E402
from shoal.fields.graph.gnn.segments import sampled, shuffled  # noqa: E402

SIZES = [0, 1, 5, 2, 0, 8, 3, 1, 17, 64, 33, 0]
NAMES = list(table("aggregator"))


def sets(sizes=SIZES, width=6, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    return torch.randn(int(ptr[-1]), width, generator=draw, dtype=dtype), ptr


def tree_of(rows, combine, identity):
    """One set, level by level, a pair at a time."""
    if not rows:
        return identity
    while len(rows) > 1:
        if len(rows) % 2:
            rows = [*rows, identity]
        rows = [
            combine(torch.stack([a, b])[None])[0]
            for a, b in zip(rows[::2], rows[1::2], strict=True)
        ]
    return rows[0]


def folded(function, identity, sizes=SIZES, **options):
    x, ptr = sets(sizes, dtype=torch.float64)
    pair = Symmetrised(function, 6)
    return x, ptr, tree_fold(x, ptr, pair, torch.full((6,), identity, dtype=x.dtype), **options)


def test_addition_is_scatter_add():
    x, ptr, found = folded(torch.add, 0.0)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), ptr.diff())
    wanted = torch.zeros(len(SIZES), 6, dtype=x.dtype).index_add(0, owner, x)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_maximum_is_the_maximum_of_each_set():
    x, ptr, found = folded(torch.maximum, -math.inf)
    rows = [x[a:b] for a, b in itertools.pairwise(ptr.tolist())]
    wanted = torch.stack([r.amax(0) if len(r) else torch.full((6,), -math.inf) for r in rows])
    assert torch.equal(found, wanted.to(found.dtype))


@pytest.mark.parametrize("pair", [GRUPair, MLPPair])
@pytest.mark.parametrize("sizes", [SIZES, [8, 8, 8], [0, 0], [1], [7], [300]])
def test_levels_of_all_sets_equal_one_set_after_the_other(pair, sizes):
    torch.manual_seed(0)
    operator, identity = pair(6).double(), torch.randn(6, dtype=torch.float64)
    x, ptr = sets(sizes, dtype=torch.float64)
    calls = []

    def combine(pairs):
        calls.append(len(pairs))
        return operator(pairs)

    order = shuffled(ptr)
    for one in (None, order):
        calls.clear()
        found = tree_fold(x, ptr, combine, identity, order=one)
        # A call for each level, however many sets there are.
        assert len(calls) == math.ceil(math.log2(max(*sizes, 1)))
        rows = x if one is None else x[one]
        parts = itertools.pairwise(ptr.tolist())
        wanted = torch.stack([tree_of(list(rows[a:b]), operator, identity) for a, b in parts])
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("pair", [GRUPair, MLPPair])
@pytest.mark.parametrize("count", [1, 2, 7, 64, 501])
def test_swapping_changes_no_bit(pair, count):
    torch.manual_seed(count)
    operator, pairs = pair(16), torch.randn(count, 2, 16)
    assert torch.equal(operator(pairs), operator(pairs.flip(1)))


def test_the_pair_is_half_of_two_cells():
    torch.manual_seed(0)
    operator = GRUPair(16)
    pairs = torch.randn(9, 2, 16)
    a, b = pairs.unbind(1)
    torch.testing.assert_close(operator(pairs), (operator.cell(b, a) + operator.cell(a, b)) / 2)


@pytest.mark.parametrize(
    ("count", "width", "scale"), [(1, 5, 1.0), (9, 16, 1.0), (600, 64, 1.0), (40, 64, 1000.0)]
)
def test_the_kernel_computes_what_pytorch_does(count, width, scale, monkeypatch):
    torch.manual_seed(count)
    operator, weights = GRUPair(width), torch.randn(count, width)
    # The gates of large numbers are 0 or 1, and no exponential of them is finite.
    pairs = (scale * torch.randn(count, 2, width)).requires_grad_()
    if compiler() is None:
        pytest.skip("no C++ compiler")
    assert monoid.native() is not None

    def results():
        value = operator(pairs)
        return [
            value,
            *torch.autograd.grad((value * weights).sum(), [pairs, *operator.parameters()]),
        ]

    ours = results()
    monkeypatch.setattr(monoid, "native", lambda: None)
    torch.testing.assert_close(ours, results(), rtol=1e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_differences(name):
    torch.manual_seed(0)
    module = aggregator_of(name, 3).double().eval()
    x, ptr = sets([0, 1, 4, 2, 0, 7], 3, torch.float64)
    values = [x, *module.parameters()]
    for one in values:
        one.requires_grad_()

    def run(*_):
        return module(x, ptr)

    assert torch.autograd.gradcheck(run, values)


@pytest.mark.parametrize("name", NAMES)
def test_empty_and_single_sets(name):
    torch.manual_seed(0)
    module = aggregator_of(name, 6)
    for training in (True, False):
        module.train(training)
        for sizes in ([0, 0, 0], [1], [0, 1, 0], [3, 0], []):
            x, ptr = sets(sizes)
            x.requires_grad_()
            found = module(x, ptr)
            assert found.shape == (len(sizes), 6) and bool(torch.isfinite(found).all())
            (found.sum() + module.penalty()).backward()
            assert x.grad is not None or not len(x)
    module.eval()
    x, ptr = sets([0, 2, 0])
    assert torch.equal(module(x, ptr)[0], module(x, ptr)[2])


@pytest.mark.parametrize("name", NAMES)
def test_a_set_does_not_see_the_others(name):
    torch.manual_seed(0)
    module = aggregator_of(name, 6).eval()
    x, ptr = sets()
    all_of_them = module(x, ptr)
    for at, size in enumerate(SIZES):
        alone = module(x[ptr[at] : ptr[at + 1]], torch.tensor([0, size]))
        torch.testing.assert_close(alone[0], all_of_them[at])


def test_the_recurrent_network_is_torchs():
    torch.manual_seed(0)
    module = Recurrent(6).eval()
    x, ptr = sets()
    found = module(x, ptr)
    for at, size in enumerate(SIZES):
        wanted = module.gru(x[ptr[at] : ptr[at + 1]])[1][0] if size else torch.zeros(6)
        torch.testing.assert_close(found[at], wanted)


def test_the_tree_is_shallow():
    lcm, gru = (table("aggregator").build(name) for name in ("lcm", "gru"))
    assert [lcm.depth(n) for n in (0, 1, 2, 3, 1024, 1025)] == [0, 0, 1, 2, 10, 11]
    assert gru.depth(1024) == 1024


def test_training_shuffles_each_set_and_learns_the_laws():
    torch.manual_seed(0)
    module = MonoidFold(6, GRUPair(6))
    x, ptr = sets()
    order = shuffled(ptr)
    assert not torch.equal(order, torch.arange(len(order)))
    for a, b in itertools.pairwise(ptr.tolist()):
        assert sorted(order[a:b].tolist()) == list(range(a, b))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    penalties = []
    for _ in range(60):
        module(x, ptr)
        optimizer.zero_grad()
        penalties.append(module.penalty().item())
        module.penalty().backward()
        optimizer.step()
    assert penalties[-1] < 0.5 * penalties[0]
    # Addition and 0 obey the laws; twice the sum does not.
    for factor, holds in ((1.0, True), (2.0, False)):
        other = MonoidFold(6, Symmetrised(lambda a, b, f=factor: (a + b) * f, 6))
        other(x, ptr)
        assert (other.penalty().item() < 1e-9) == holds
    assert torch.equal(module.eval()(x, ptr), module(x, ptr))


def test_neighbours_are_drawn_without_replacement():
    _, ptr = sets()
    places, few = sampled(ptr, 4, torch.Generator().manual_seed(0))
    assert few.diff().tolist() == [min(size, 4) for size in SIZES]
    for at in range(len(SIZES)):
        rows = places[few[at] : few[at + 1]].tolist()
        assert len(set(rows)) == len(rows)
        assert all(ptr[at] <= row < ptr[at + 1] for row in rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("ptr", "said"),
    [
        ([0, 3, 2, 5], r"ptr\[2\] = 2 after 3"),
        ([0, 2, 4], "from 0 to 4; expected from 0 to 5"),
        ([1, 5], "from 1 to 5"),
        ([0, 9], "from 0 to 9"),
        ([0.0, 5.0], "expected int64"),
        ([[0, 5]], "expected int64"),
        ([], "expected int64"),
    ],
)
def test_pointers_that_do_not_fit(name, ptr, said):
    module = aggregator_of(name, 6)
    with pytest.raises(GnnError, match=said):
        module(torch.zeros(5, 6), torch.tensor(ptr))


@pytest.mark.parametrize("name", ["gru", "lcm"])
def test_rows_of_another_width(name):
    module = aggregator_of(name, 6)
    with pytest.raises(GnnError, match="rows of 4 numbers; the operator has a width of 6"):
        module(torch.zeros(5, 4), torch.tensor([0, 5]))
    with pytest.raises(GnnError, match=r"x: \[5\]; expected"):
        module(torch.zeros(5), torch.tensor([0, 5]))


def test_operators_and_names_that_do_not_fit():
    with pytest.raises(GnnError, match="a width of 8; expected the hidden width 6"):
        MonoidFold(6, GRUPair(8))
    with pytest.raises(ConfigError, match="did you mean 'lcm'"):
        SAGEConv(6, 6, aggregator="lcn")
    with pytest.raises(ConfigError, match="associative_weight"):
        SAGEConv(6, 6, aggregator={"name": "lcm", "associative_weight": -1})
    with pytest.raises(ConfigError, match="operator"):
        SAGEConv(6, 6, aggregator={"name": "lcm", "operator": "lstm"})
