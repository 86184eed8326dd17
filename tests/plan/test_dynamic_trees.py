"""Dynamic trees: the best of every state, and how often every state is met."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, PlanError
from shoal.core.random import generator
from shoal.ir import DrafterCalibration
from shoal.plan.trees.auto import AutoTree
from shoal.plan.trees.chain import ChainTree
from shoal.plan.trees.drafting import RowCosts
from shoal.plan.trees.dynamic import DynamicTrees, best_rows, kept_prompts, last_of, stationary
from shoal.plan.trees.hardware import Hardware

RIGHT = ((0.6, 0.12, 0.06, 0.03), (0.4, 0.1, 0.06, 0.03), (0.3, 0.08, 0.05, 0.03))


@st.composite
def calibrations(draw):
    """Up to three levels of up to three guesses, best first."""
    levels = []
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.lists(st.floats(0.01, 0.4), min_size=1, max_size=3))
        total = max(1.0, sum(row))
        levels.append(tuple(sorted((share / total for share in row), reverse=True)))
    return DrafterCalibration(tuple(levels))


def brute_force(right, nodes):
    """The greatest sum of path products of all trees of so many nodes."""
    paths = [
        path
        for depth in range(1, len(right) + 1)
        for path in itertools.product(*(range(len(row)) for row in right[:depth]))
    ]
    best = 0.0
    for chosen in itertools.combinations(paths, nodes):
        if all(path[:-1] == () or path[:-1] in chosen for path in chosen):
            best = max(
                best,
                sum(
                    float(np.prod([right[level][rank] for level, rank in enumerate(path)]))
                    for path in chosen
                ),
            )
    return best


@settings(max_examples=8, deadline=None)
@given(
    st.tuples(
        st.tuples(st.floats(0.3, 0.6), st.floats(0.05, 0.3)),
        st.tuples(st.floats(0.3, 0.6), st.floats(0.05, 0.3)),
        st.tuples(st.floats(0.3, 0.6)),
    ),
    st.integers(1, 6),
)
def test_candidates_of_a_state_are_the_best_of_all_trees(right, nodes):
    for depth in range(1, 4):
        spec = AutoTree().build(DrafterCalibration(right[:depth])).first(nodes)
        if len(spec) == nodes:
            assert sum(spec.value) == pytest.approx(brute_force(right[:depth], nodes))


@given(calibrations(), st.integers(0, 40))
def test_prompts_are_deleted_where_that_costs_least(calibration, room):
    spec = AutoTree().build(calibration).first(9)
    last = last_of(spec)
    worth = np.array([0.0, 0.5, 0.8, 0.85])
    kept = [3] * len(last)
    while sum(kept) > room:
        costs = [
            (last[node] * (worth[count] - worth[count - 1]), node)
            for node, count in enumerate(kept)
            if count
        ]
        kept[min(costs)[1]] -= 1
    prompts = kept_prompts(last, worth, room)
    assert last @ worth[prompts] == pytest.approx(last @ worth[kept])
    assert prompts.sum() == sum(kept)


@settings(max_examples=25, deadline=None)
@given(calibrations(), st.integers(4, 40), st.integers(1, 2))
def test_trees_keep_to_their_rows_and_probabilities_to_one(calibration, rows, ensemble):
    trees = DynamicTrees(calibration, AutoTree(), ensemble)
    if rows < trees.fewest:
        return
    result = trees.of(rows)
    for state, tree in enumerate(result.trees):
        assert len(tree.spec) + sum(tree.prompts) * ensemble <= rows - 1
        assert tree.spec.depth <= state
        assert tree.last.sum() == pytest.approx(1)
        assert tree.row(len(result.trees)).sum() == pytest.approx(1)
    shares = result.shares
    assert shares.sum() == pytest.approx(1)
    assert shares @ result.transitions == pytest.approx(shares, abs=1e-9)
    expected = trees.expected()
    assert expected[0] == 1
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(expected))


def test_shares_of_states_are_those_of_a_simulated_chain():
    result = DynamicTrees(DrafterCalibration(RIGHT), AutoTree()).of(9)
    moves = result.transitions.cumsum(1)
    draws = generator(0, purpose="chain").random(1_000_000)
    counts, state = [0] * len(moves), 0
    rows = [row.tolist() for row in moves]
    for draw in draws.tolist():
        counts[state] += 1
        row = rows[state]
        after = 0
        while after < len(row) - 1 and draw >= row[after]:
            after += 1
        state = after
    simulated = np.array(counts) / 1e6
    assert result.shares == pytest.approx(simulated, abs=2e-3)
    assert np.count_nonzero(result.shares > 0.05) >= 2
    gains = [tree.gain for tree in result.trees]
    assert result.tokens == pytest.approx(1 + simulated @ gains, abs=5e-3)


def test_expected_tokens_are_those_of_drawn_acceptances():
    """Guesses right by their shares, walked down the trees: what a step gives on average."""
    result = DynamicTrees(DrafterCalibration(RIGHT), AutoTree()).of(14)
    source = generator(1, purpose="acceptances")
    state, tokens, steps = 0, 0, 20_000
    for _ in range(steps):
        tree = result.trees[state]
        below = {(above, rank): node for node, (above, rank) in
                 enumerate(zip(tree.spec.parent, tree.spec.rank, strict=True))}  # fmt: skip
        node = -1
        tokens += 1
        for row in RIGHT:
            rank = int(np.searchsorted(np.cumsum(row), source.random(), side="right"))
            if (node, rank) not in below:
                break
            node = below[node, rank]
            tokens += 1
        state = tree.prompts[node + 1]
    assert tokens / steps == pytest.approx(result.tokens, rel=0.02)


def test_values_of_states_beat_deleting_by_what_the_next_tree_gives_alone():
    """No tree of one state can be changed for more tokens: all other sizes were tried."""
    trees = DynamicTrees(DrafterCalibration(RIGHT), AutoTree())
    greedy = DynamicTrees(DrafterCalibration(RIGHT), AutoTree())
    greedy_tokens = []
    for rows in (8, 16, 32):
        worth = np.array([of_state[:rows][-1].gain for of_state in greedy._first])
        once = tuple(greedy._tree(one, rows, worth) for one in greedy._first)
        greedy_tokens.append(type(trees.of(rows))(rows, once).tokens)
    results = [trees.of(rows).tokens for rows in (8, 16, 32)]
    assert all(ours >= theirs - 1e-9 for ours, theirs in zip(results, greedy_tokens, strict=True))


def test_a_chain_with_two_states_is_solved_by_hand():
    shares = stationary(np.array([[0.5, 0.5], [0.25, 0.75]]))
    assert shares == pytest.approx([1 / 3, 2 / 3])
    assert stationary(np.array([[0.0, 1, 0], [0, 1, 0], [0, 0, 1]])) == pytest.approx([0, 1, 0])


def test_chains_and_fewer_rows_are_trees_too():
    chain = DynamicTrees(DrafterCalibration(RIGHT), ChainTree())
    assert [len(tree.spec) for tree in chain.of(64).trees] == [0, 1, 2, 3]
    assert Hardware(rows=4).build(DrafterCalibration(RIGHT)) == AutoTree(nodes=3).build(
        DrafterCalibration(RIGHT)
    )
    assert len(DynamicTrees(DrafterCalibration(RIGHT), Hardware(), 1, 9).expected()) == 9
    expected = chain.expected()
    assert expected[15] == chain.of(16).tokens
    assert expected[16] == expected[17] == expected[15]  # nobody looks at these


def test_best_rows_are_those_of_most_tokens_per_second():
    assert best_rows([1, 1.5, 1.9], [1, 1.1, 2]) == 2


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (
            lambda: DynamicTrees(DrafterCalibration(()), AutoTree()),
            ConfigError,
            "at least one level",
        ),
        (
            lambda: DynamicTrees(DrafterCalibration(RIGHT), AutoTree()).of(3),
            PlanError,
            "rows = 3: expected 4",
        ),
        (
            lambda: DynamicTrees(DrafterCalibration(RIGHT), AutoTree(), 1, 3),
            PlanError,
            "at least 4",
        ),
        (lambda: DynamicTrees(DrafterCalibration(RIGHT), AutoTree(), 0), PlanError, "ensemble = 0"),
        (
            lambda: DynamicTrees(DrafterCalibration(RIGHT), AutoTree(), 40),
            PlanError,
            "use fewer prompts",
        ),
        (
            lambda: DynamicTrees(DrafterCalibration(RIGHT), ChainTree(depth=9)),
            ConfigError,
            "4 tokens ahead",
        ),
        (lambda: Hardware(rows=1), ConfigError, "rows = 1"),
    ],
)
def test_bad_input_is_named(work, error, message):
    with pytest.raises(error, match=message):
        work()


def test_tables_of_costs_are_kept(tmp_path):
    costs = RowCosts(rows=(1, 4), seconds_of=(1e-3, 2e-3), draft_s=1e-4)
    costs.write(tmp_path / "costs.json")
    assert RowCosts.read(tmp_path / "costs.json") == costs
    assert RowCosts(rows=(1, 2), seconds_of=(2.0, 1.0)).falls == (2,)
    for text in ("{}", "[1]", '{"rows": [2, 1], "seconds": [1, 2]}', "nothing"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match="costs"):
            RowCosts.read(tmp_path / "bad.json")
