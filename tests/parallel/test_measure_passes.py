"""Passes timed rank by rank, with nobody else there."""

from __future__ import annotations

import math

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab import measure_passes as measured
from shoal.claims.lab.measure_passes import (
    PlaceholderWeights,
    SingleRankComm,
    batch,
    measure_link,
    measure_passes,
    pass_costs,
    send_times,
)
from shoal.claims.lab.same_as_one import SeededWeights
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import RankError, ShoalError
from shoal.ir.schedule import Event, Op
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split


@pytest.mark.parametrize(
    ("parallel", "kinds", "stages"),
    [
        ({"pp": 2}, {"F", "B"}, 2),
        ({"pp": 2, "vpp": 2, "schedule": "interleaved"}, {"F", "B"}, 4),
        ({"pp": 2, "vpp": 2, "schedule": "zbv"}, {"F", "B", "I", "W"}, 4),
        ({"pp": 4, "vocab": "pp"}, {"F", "B", "EF", "EB", "S", "T"}, 4),
        ({"pp": 4, "vocab": "pp", "vocab_barriers": 2}, {"F", "B", "EF", "EB", "S", "T"}, 4),
    ],
)
def test_every_pass_of_every_rank_is_timed(parallel, kinds, stages) -> None:
    threads = torch.get_num_threads()
    one = job(parallel, microbatch=1, global_batch=4)
    (result,) = measure_passes([one], config(), rounds=2, warmup=0)
    assert torch.get_num_threads() == threads
    assert len(result.rounds) == 2
    assert result.median.boundary_bytes == 4 * one.seq_len * config().hidden
    assert {"F"} < set(result.median.seconds) <= kinds
    for seconds in result.median.seconds.values():
        assert len(seconds) == stages
        assert all(math.isfinite(s) and s > 0 for s in seconds)
    assert len(result.parameter_bytes) == one.parallel.pp


@pytest.mark.slow
def test_a_rank_alone_does_the_passes_it_does_among_others() -> None:
    one = job({"pp": 2, "vpp": 2, "schedule": "interleaved"}, microbatch=1, global_batch=4)
    schedule = check_split(one, config().shape())
    rows = batch(one, config().vocab_size)

    def passes(comm):
        engine = ParallelEngine(one, schedule, PlaceholderWeights(config()), comm)
        engine.backward(rows, 1, rows.targets.numel(), record=True)
        shapes = {n: p.grad.shape for n, p in engine.local.named_parameters()}
        return [event.op for event in engine.runtime.events], shapes

    assert run_ranks(2, passes) == [passes(SingleRankComm(rank, 2)) for rank in range(2)]


def test_costs_are_medians_over_the_microbatches() -> None:
    events = [
        Event(0, Op("F", 0, mb), begin, begin + seconds)
        for mb, (begin, seconds) in enumerate([(0.0, 1.0), (1.0, 9.0), (10.0, 2.0)])
    ]
    result = pass_costs([*events, Event(1, Op("F", 1, 0), 2.0, 5.0)], boundary_bytes=8.0)
    assert result.seconds == {"F": (2.0, 3.0)}
    assert result.boundary_bytes == 8.0


def test_cheap_weights_have_the_shapes_of_the_model() -> None:
    cheap, fresh = PlaceholderWeights(config()), SeededWeights(config())
    for name, parameter in fresh.model().named_parameters():
        assert cheap.whole(name).shape == parameter.shape
    assert torch.equal(
        cheap.whole("embed.weight"), PlaceholderWeights(config()).whole("embed.weight")
    )


@pytest.mark.multi
@pytest.mark.slow
def test_a_link_is_what_the_median_message_took() -> None:
    link = measure_link(4096, repeats=3)
    assert math.isfinite(link.bandwidth) and link.bandwidth > 0
    assert link.seconds(0, 1, 4096) == 4096 / link.bandwidth
    assert link.seconds(1, 0, 8192) == pytest.approx(2 * link.seconds(0, 1, 4096))
    assert link.seconds(0, 0, 4096) == 0


def test_a_link_takes_the_median(monkeypatch) -> None:
    times = [0.5, 0.125, 9.0]
    monkeypatch.setattr(measured, "run_processes", lambda *_: [times, times])
    assert measure_link(1024, repeats=3).seconds(0, 1, 1024) == 0.5


def test_a_message_of_that_size_crosses_there_and_back() -> None:
    def rank(comm):
        return send_times(comm, nbytes=4096, repeats=2), comm.wire.meter.totals()

    for times, sent in run_ranks(2, rank):
        assert len(times) == 2 and all(math.isfinite(s) and s > 0 for s in times)
        # Three turns that warm up, and two that are timed.
        assert sent == {"wire_bytes{op=send,scope=loopback,tag=probe}": 5 * 4096}


def test_bad_input() -> None:
    with pytest.raises(RankError, match=r"dp \* tp \* cp = 2: expected 1"):
        measure_passes([job({"pp": 2, "dp": 2})], config())
    with pytest.raises(ShoalError, match=r"rounds = 0: expected at least 1"):
        measure_passes([job({"pp": 2})], config(), rounds=0)
    with pytest.raises(RankError, match="another rank than 1"):
        SingleRankComm(1, 2).send(torch.ones(1), 1, tag="x")
