"""The counting of claim GPipe: bytes that autograd keeps, layers in a budget, times by turn."""

from __future__ import annotations

import pytest
import torch

from shoal.claims.experiments.gpipe import GPipeClaim, makespan, most_layers
from shoal.claims.experiments.gpipe_ranks import AutogradBytes, pass_times, times
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_saved_bytes_are_counted_once_and_given_back():
    weight = torch.ones(8, 8, requires_grad=True)
    saved = AutogradBytes([weight])
    x = torch.ones(16, 8)
    with saved.hooks():
        out = (x @ weight).tanh()
        loss = (out * out).sum()
    assert saved.peak == saved.now == x.nbytes + out.nbytes
    loss.backward()
    del loss, out
    assert saved.now == 0


@pytest.mark.parametrize(("k", "m", "recompute", "most"), [(1, 1, False, 5), (2, 4, True, 28)])
def test_layers_in_a_budget(k, m, recompute, most):
    """Five tensors: as many layers at once; or 5 - 1 - 1/m of them, m times as often, on k ranks.

    The input of the recomputed micro-batch counts twice.
    """
    assert most_layers(5, k, m, recompute=recompute) in (most, most + k)


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 8), (4, 3), (8, 32)])
def test_makespan_in_closed_form(k, m):
    assert makespan(k, m, 1.0, 3.0) == pytest.approx((m + k - 1) * 4.0)


def test_times_come_by_turn():
    small = {"layers": 8, "width": 8, "batch": 32, "repeats": 3}
    ranks = run_ranks(2, lambda comm: times(comm, ms=[1, 4], recompute=True, **small))
    assert all(len(rank[at]) == 3 for rank in ranks for at in "01")
    (passes,) = run_ranks(1, lambda comm: pass_times(comm, ms=[1, 4], **small))
    assert [len(passes[m]) for m in ("1", "4")] == [3, 3]


@pytest.mark.parametrize(
    "options", [{"layers": 9}, {"batch": 33}, {"width": 1}, {"repeats": 1}, {"budget": 1}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"claim\.gpipe\."):
        GPipeClaim(**options)
