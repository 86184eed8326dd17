from itertools import combinations, pairwise
from statistics import pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import PlanError
from shoal.cost.arithmetic import flops_by_op
from shoal.cost.shapes import find
from shoal.plan.partition import block_costs, partition, stages_for, uniform_stages


def sums(costs, cells):
    return [sum(costs[i] for i in cell) for cell in cells]


def every_cut(layers, cells):
    for inner in combinations(range(1, layers), cells - 1):
        yield [range(a, b) for a, b in pairwise((0, *inner, layers))]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.data())
def test_equals_brute_force(costs, data):
    cells = data.draw(st.integers(1, len(costs)))
    result = partition(costs, cells)
    assert [i for cell in result for i in cell] == list(range(len(costs)))
    assert len(result) == cells and all(result)
    best = min(
        (max(s), pvariance(s)) for s in (sums(costs, c) for c in every_cut(len(costs), cells))
    )
    mine = sums(costs, result)
    assert (max(mine), pvariance(mine)) == best
    assert partition([cost / 7 for cost in costs], cells)  # fractions, too


def test_ties_give_more_layers_to_the_first_cells():
    assert [len(cell) for cell in partition([1.0] * 6, 4)] == [2, 2, 1, 1]
    assert partition([0.1] * 8, 4) == uniform_stages(8, 2, 2)


def test_blocks_move_away_from_the_output_layer():
    shape = find("Gemma-2-2b")  # 256k tokens: the output layer weighs some seven blocks
    blocks, output = block_costs(shape, seq_len=4096)
    assert sum(blocks) + output == pytest.approx(
        sum(flops_by_op(shape, 4096, training=False).values())
    )
    alone = stages_for(shape, 4, seq_len=4096)
    beside = stages_for(shape, 4, vocab_split="none", seq_len=4096)
    assert [len(s) for s in alone] == [7, 7, 6, 6]
    assert beside == stages_for(shape, 4, vocab_split="tp", seq_len=4096)
    whole = (*blocks[:-1], blocks[-1] + output)
    assert len(beside[-1]) < 6 and max(sums(whole, beside)) < max(sums(whole, alone))


def test_dense_layers_of_a_mixture_are_blocks_of_their_own_cost():
    shape = find("Qwen3-30B-A3B").model_copy(update={"num_dense_layers": 3})
    blocks, output = block_costs(shape, seq_len=2048)
    assert blocks[2] != blocks[3] and len(set(blocks[3:])) == 1
    total = sum(flops_by_op(shape, 2048, training=False).values())
    assert sum(blocks) + output == pytest.approx(total)


def test_a_large_model_is_quick():
    shape = find("Llama-3.1-405B")
    stages = stages_for(shape, 32, vocab_split="none")
    assert sum(map(len, stages)) == 126 and len(stages) == 32


def test_bad_input():
    with pytest.raises(PlanError, match="cells = 4: expected 1 to 3, the number of layers"):
        partition([1, 2, 3], 4)
    with pytest.raises(PlanError, match="cells = 0"):
        partition([1, 2, 3], 0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="cost of layer 1"):
            partition([1.0, wrong], 1)
    with pytest.raises(PlanError, match=r"2 \* 4 = 8': expected a divisor of 12 layers: 1, 2, 3"):
        uniform_stages(12, 2, 4)
    with pytest.raises(PlanError, match="blocks of shoal-4m"):
        stages_for(find("shoal-4m"), 99)
