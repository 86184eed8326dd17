"""Gradients that are summed in slices beside experts: each once, all waited for, equal to one."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import PlanError, RankError
from shoal.cost.training.gradient_slices import hidden_bytes
from shoal.cost.training.step import Pricer
from shoal.ir import Work
from shoal.machine.described import load
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.expert.gradients import GradientSlices
from shoal.parallel.legal import check_split
from shoal.parallel.shard.replicated import ReplicatedModel
from shoal.parallel.tensor.rows import ReplicaSequences

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 4, "top_k": 2, "num_layers": 3}
SPLIT: dict[str, Any] = {"dp": 2, "ep": 2, "expert_chunks": [3, 2]}
SLICES = [[4000, 3000], [0, 6400], [10_000, 80]]
ALL = 10**9


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _job(slices: Any, **extra: Any) -> Any:
    split = {**SPLIT, **extra.pop("split", {}), "gradient_slices": slices}
    return job(split, **{"global_batch": 8, "microbatch": 2, **extra})


def _agrees(slices: Any, per_node: int | None = None, **extra: Any) -> None:
    model = {**MOE, **extra.pop("model", {})}
    whole = _job(slices, **extra)

    def run(on: Any) -> Any:
        return run_ranks(whole.parallel.world, on, ranks_per_node=per_node)[0]

    result = same_as_one(whole, config(**model), steps=2, run=run)
    assert result.same, str(result)


@pytest.mark.parametrize("slices", [[3000, 500], SLICES, [ALL, ALL]], ids=["one", "each", "all"])
def test_any_slices_equal_one_process(slices):
    _agrees(slices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        {"shard": {"name": "zero1", "bucket_mb": 0.02}},
        {"recompute": "full", "dropout": 0.2},
        {"split": {"expert_chunks": 1}},
        {"split": {"dp": 4, "ep": 4, "expert_dispatch": "2dh"}, "per_node": 2},
        {"split": {"dp": 2, "tp": 2, "sp": True, "ep": 2}},
        {"split": {"dp": 1, "cp": 2}},
        {"model": {"tied": True}},
    ],
    ids=[
        "zero1, small buckets",
        "recomputed",
        "one chunk",
        "by node",
        "folded over tp",
        "cp",
        "tied",
    ],
)
def test_slices_with_what_else_a_job_may_do(extra):
    _agrees(SLICES, **extra)


class _Deferred:
    """A sum that is made when it is waited for, as late as a network may make it."""

    def __init__(self, comm: ThreadComm, x: torch.Tensor, tag: str, left: set[object]) -> None:
        self._call = lambda: _REDUCE(comm, x, tag=tag).wait()
        self._left = left
        left.add(self)

    def wait(self) -> None:
        self._call()
        self._left.discard(self)


_REDUCE = ThreadComm.all_reduce


def _step(whole: Any, before: Any = None) -> list[tuple[dict[str, torch.Tensor], Any]]:
    """Gradients after one step of every rank, and what it sent when; ``before`` on each rank."""
    weights = SeededWeights(config(**MOE), 0, torch.float64)
    tokens = torch.randint(0, 53, (8, 17), generator=torch.Generator().manual_seed(2))

    def on(comm: ThreadComm) -> tuple[dict[str, torch.Tensor], Any]:
        schedule = check_split(whole, weights.config.shape())
        engine = ParallelEngine(whole, schedule, weights, comm, dtype=torch.float64)
        if before is not None:
            before(comm.rank, engine)
        mine = tokens[engine.replica * 4 : engine.replica * 4 + 4]
        engine.backward(
            ReplicaSequences(mine[:, :-1], mine[:, 1:], None, engine.replica * 4, 0), 2, 128.0
        )
        engine.finish()
        engine.grad_norm()
        named = engine.local.named_parameters()
        notes = [h.events()["step"] for h in engine.hooks if isinstance(h, GradientSlices)]
        sent = tuple(notes[0].values()) if notes else None
        return {n: p.grad.clone() for n, p in named}, sent

    return run_ranks(2, on)


def test_every_element_is_summed_once_and_waited_for(monkeypatch):
    """Slices, and what is left, cover all gradients that ranks share; none is under way after."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    left: set[object] = set()
    waited: list[int] = []

    def later(self: ThreadComm, x: torch.Tensor, *, tag: str, op: str = "sum") -> Any:
        if tag != "gradients":
            assert tag != "norm" or not left, "the norm was asked for before all sums were there"
            return _REDUCE(self, x, tag=tag, op=op)
        ranges[f"rank {self.rank}"].append((x.data_ptr(), x.nbytes))
        waited.append(len(left))
        return _Deferred(self, x, tag, left)

    plain = _step(_job([]))
    monkeypatch.setattr(ThreadComm, "all_reduce", later)
    result = _step(_job(SLICES))
    assert not left
    assert max(waited) >= 4  # slices were under way together
    for own in ranges.values():
        own.sort()
        assert len(own) >= 4
        for (start, size), (following, _) in itertools.pairwise(own):
            assert following == start + size, "a gap, or an element that is summed twice"
        shared = {n: g for n, g in result[0][0].items() if ".mlp." not in n or "router" in n}
        assert sum(size for _, size in own) == sum(g.nbytes for g in shared.values())
    for name, gradient in plain[0][0].items():
        torch.testing.assert_close(result[0][0][name], gradient, rtol=1e-9, atol=1e-12)


def test_a_rank_that_is_late_gets_equal_gradients():
    def late(rank: int, engine: ParallelEngine) -> None:
        if rank == 0:
            return
        for block in engine.local.blocks.values():
            whole = block.mlp.holes

            def slowly(hole: int, whole: Any = whole) -> None:
                time.sleep(0.02)
                whole(hole)

            block.mlp.holes = slowly

    plain = _step(_job(SLICES))
    result = _step(_job(SLICES), late)
    for rank in range(2):
        for name, gradient in plain[rank][0].items():
            assert torch.equal(result[rank][0][name], gradient), name
    for name, gradient in result[0][0].items():
        if ".mlp." not in name or "router" in name:
            assert torch.equal(result[1][0][name], gradient), name


@pytest.mark.parametrize("slices", [[8, 0], [3200, 800], SLICES, [ALL, 0], [0, ALL]], ids=str)
def test_what_is_hidden_is_predicted(slices):
    whole = _job(slices)
    hidden, after = _step(whole)[0][1]
    # The estimate counts fp32; gradients here have twice the bytes.
    halved = whole.model_copy(
        update={
            "parallel": whole.parallel.model_copy(
                update={
                    "gradient_slices": tuple(
                        (a / 2, b / 2) for a, b in whole.parallel.gradient_slices
                    )
                }
            )
        }
    )
    assert hidden == 2 * hidden_bytes(halved, config(**MOE).shape())
    _, every = _step(_job([0, 0]))[0][1]
    assert hidden + after == every


def test_hidden_sums_make_a_step_shorter():
    shape, machine = config(**MOE, hidden=512, vocab_size=8192).shape(), load("16xH100")
    seconds = []
    for slices in ([0, 0], [1 << 20, 1 << 20], [ALL, ALL]):
        split = {"dp": 16, "ep": 4, "gradient_slices": slices}
        one = job(split, global_batch=16, microbatch=1)
        estimate = Pricer(machine).estimate(Work(job=one, shape=shape))
        seconds.append(estimate.terms_s["collective"])
    assert seconds[0] > seconds[1] > seconds[2]


def test_a_gradient_that_is_not_done_is_not_sent(monkeypatch):
    """The head's gradients are done before any block's; those of a block below are not."""
    whole = ReplicatedModel.send

    def eager(self: ReplicatedModel, nbytes: int, before: int) -> None:
        whole(self, ALL, before + 2)

    monkeypatch.setattr(ReplicatedModel, "send", eager)
    with pytest.raises(RankError, match="not done"):
        _step(_job(SLICES))


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ({"dp": 2}, "give parallel.ep"),
        ({"dp": 1, "tp": 2, "sp": True, "ep": 2}, "dp . cp = 1"),
        ({"dp": 2, "ep": 2, "pp": 2}, "pp = 2"),
        ({"dp": 2, "ep": 2, "placer": {"name": "fssdp", "slots": 1}}, "use owners"),
        ({"dp": 2, "ep": 2, "gradient_slices": [[1, 1], [2, 2]]}, "each of 3"),
    ],
)
def test_slices_without_a_hole_are_refused(split, told):
    with pytest.raises(PlanError, match=rf"parallel\.gradient_slices.*{told}"):
        check_split(job({"gradient_slices": [8, 8], **split}), config(**MOE).shape())
    with pytest.raises(ValueError, match="gradient_slices"):
        job({"dp": 2, "ep": 2, "gradient_slices": [8, -1]})
