"""Copies of experts for a step: equal to one process, whatever is copied where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import PlanError
from shoal.core.meter import Meter
from shoal.parallel.expert.copies import copies_of, sent_copies
from shoal.parallel.expert.layer_copies import TAG, gathered
from shoal.parallel.legal import check_split
from shoal.plan.placement import PLACERS
from shoal.plan.placement.owners import in_order, only_owners
from shoal.plan.placement.protocols import Devices

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 4, "top_k": 2, "num_layers": 2}


@dataclass(frozen=True)
class Anything:
    """Copies by chance, the same on all ranks and others in every step; now and then of all."""

    seed: int = 0
    rematerialize: str = "off"
    every: ClassVar[int] = 0
    slots: ClassVar[int] = 2

    def estimate(self, work, machine):
        return PLACERS.build("owners").estimate(work, machine)

    def owners(self, expected_E, devices):
        return in_order(len(expected_E), devices)

    def place(self, expected_E, owner_E, devices, budget=None):
        source = np.random.default_rng([self.seed, *expected_E.astype(np.int64).tolist()])
        some = source.random((len(expected_E), devices.count)) < source.choice([0.3, 1.1])
        return some | only_owners(owner_E, devices)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setitem(PLACERS._own, "anything", f"{__name__}:Anything")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _agrees(split, placer, **extra):
    model = {**MOE, **extra.pop("model", {})}
    given = job({**split, "placer": placer}, **{"global_batch": 4, "microbatch": 1, **extra})
    result = same_as_one(given, config(**model), steps=3)
    assert result.same, str(result)


def test_random_copies_are_one_process():
    _agrees({"dp": 2, "ep": 2}, {"name": "anything", "seed": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "placer", "extra"),
    [
        ({"dp": 4, "ep": 4}, {"name": "anything", "seed": 1}, {}),
        ({"dp": 4, "ep": 4}, {"name": "fssdp", "slots": 1}, {"shard": "zero1"}),
        ({"dp": 4, "ep": 2}, {"name": "anything", "seed": 2}, {"shard": "zero1"}),
        ({"dp": 4, "ep": 4}, {"name": "anything", "seed": 5}, {"recompute": "full"}),
        ({"dp": 2, "tp": 2, "sp": True, "ep": 4}, {"name": "anything", "seed": 6}, {}),
        ({"cp": 2, "dp": 2, "ep": 4}, {"name": "anything", "seed": 7}, {}),
        ({"dp": 4, "ep": 4}, "fssdp", {"model": {"top_k": 1}}),
        ({"dp": 2, "pp": 2, "ep": 2}, {"name": "anything", "seed": 8}, {}),
    ],
)
def test_any_copies_are_one_process(split, placer, extra):
    _agrees(split, placer, **extra)


def _tables(seed, experts, devices):
    """Owners, and a random table of copies."""
    source = np.random.default_rng(seed)
    owner = np.sort(source.integers(0, devices.count, experts))
    held = only_owners(owner, devices) | (source.random((experts, devices.count)) < 0.4)
    return owner, held


@pytest.mark.parametrize("seed", range(3))
def test_gathering_is_linear_and_summing_is_its_adjoint(seed):
    devices = Devices(4, 2)
    owner, held = _tables(seed, 6, devices)

    def on(comm):
        mine = int((owner == comm.rank).sum())
        source = torch.Generator().manual_seed(comm.rank)
        own = [
            torch.randn(mine, *shape, generator=source, dtype=torch.float64, requires_grad=True)
            for shape in ((3, 2), (4,))
        ]
        copies = copies_of(owner, held, devices, comm.rank)
        out = gathered(own, copies, comm)
        given = [torch.randn(one.shape, generator=source, dtype=one.dtype) for one in out]
        torch.autograd.backward(out, given)
        there = sum(float((a * b).sum().detach()) for a, b in zip(out, given, strict=True))
        back = sum(float((a * b.grad).sum().detach()) for a, b in zip(own, own, strict=True))
        whole = torch.zeros(6, 6, dtype=torch.float64)
        both = torch.cat([own[0], out[0]]).detach()
        whole[list(copies.experts), :] = both.flatten(1)
        return there, back, copies, whole

    meter = Meter()
    ranks = run_ranks(4, on, meter=meter, ranks_per_node=2)
    assert sum(one[0] for one in ranks) == pytest.approx(sum(one[1] for one in ranks))
    for rank, (_, _, copies, whole) in enumerate(ranks):
        assert sorted(copies.experts) == np.flatnonzero(held[:, rank]).tolist()
        assert copies.owned == (owner == rank).sum()
        for expert in copies.experts:
            assert torch.equal(whole[expert], ranks[owner[expert]][3][expert])
    travels = sent_copies(owner, held, devices)
    assert len(travels) == held.sum() - len(owner)
    wire = sum(size for name, size in meter.totals().items() if "wire_" in name and TAG in name)
    assert wire == 2 * len(travels) * 10 * 8  # there, and gradients back
    for _, expert in {(n, e) for n, e, _, _ in travels}:
        far = [to // 2 for _, e, source, to in travels if e == expert and source // 2 != to // 2]
        assert len(far) == len(set(far))  # every node gets it once


def test_everything_everywhere_is_all_gather_and_nothing_moves_nothing():
    devices = Devices(3, 3)
    owner = in_order(6, devices)

    def on(comm, held):
        own = torch.full((2, 5), float(comm.rank), requires_grad=True)
        copies = copies_of(owner, held, devices, comm.rank)
        (out,) = gathered((own,), copies, comm)
        out.sum().backward()
        return copies, out.detach(), own.grad

    every = np.ones((6, 3), dtype=bool)
    for rank, (copies, out, grad) in enumerate(run_ranks(3, lambda comm: on(comm, every))):
        assert sorted(copies.experts) == list(range(6))
        assert out[:, 0].tolist() == [owner[e] for e in copies.experts[2:]]
        assert owner[list(copies.experts[:2])].tolist() == [rank, rank]
        assert (grad == 2).all()
    none = only_owners(owner, devices)
    for copies, out, grad in run_ranks(3, lambda comm: on(comm, none)):
        assert not copies.used
        assert len(out) == 0
        assert (grad == 0).all()


def test_what_cannot_be():
    for split in ({"dp": 2}, {"dp": 2, "etp": 2}, {"dp": 4, "ep": 2, "etp": 2}):
        with pytest.raises(PlanError, match=r"parallel.placer = 'fssdp'.*whole experts are copied"):
            check_split(job({**split, "placer": "fssdp"}), config(**MOE).shape())
