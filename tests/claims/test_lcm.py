"""The claim about LCM: its task, what it counts, and that its networks learn."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.set_tasks import (  # noqa: E402
    SetNetwork,
    accuracy,
    bits_of,
    drawn_sets,
    learned,
    operations,
    spread,
)


def test_the_answer_is_the_second_smallest():
    sizes = torch.tensor([2, 3, 16, 40, 256])
    values, ptr, answer = drawn_sets(sizes, torch.Generator().manual_seed(0))
    for at, size in enumerate(sizes.tolist()):
        rows = values[ptr[at] : ptr[at + 1]].tolist()
        assert len(rows) == size and sorted(rows)[1] == int(answer[at])
        assert 0 <= min(rows) <= max(rows) < 64
    bits = (bits_of(values) > 0).long() @ (2 ** torch.arange(6))
    assert torch.equal(bits, values)


def test_answers_of_large_sets_differ():
    _, _, answer = drawn_sets(torch.full((500,), 256), torch.Generator().manual_seed(0))
    assert int(answer.bincount().max()) < 50


@pytest.mark.parametrize("size", [1, 2, 7, 1024])
def test_operations_are_counted(size):
    assert operations("lcm", size) == (size - 1).bit_length()
    assert operations("gru", size) == size


def test_spread_is_that_of_orders():
    torch.manual_seed(0)
    apart = {
        name: spread(SetNetwork(name, 16).eval(), [9], sets=4, times=5, seed=0)
        for name in ("max", "gru", "lcm")
    }
    assert apart["max"] < 1e-6 < min(apart["gru"], apart["lcm"])


@pytest.mark.parametrize("name", ["max", "lcm"])
def test_networks_learn(name):
    few = {"steps": 60, "seed": 0, "width": 16, "largest": 3}
    found = accuracy(learned(name, **few), [2], sets=300, seed=1)
    assert found[2] > 3 * accuracy(SetNetwork(name, 16).eval(), [2], sets=300, seed=1)[2] + 0.02
