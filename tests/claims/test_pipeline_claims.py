"""The parts of the claims about pipelines that can be computed by hand."""

from __future__ import annotations

import pytest

from shoal.claims.experiments.megatron import internode_bytes
from shoal.claims.experiments.pipeline_ranks import peak_memory, profile, time_steps
from shoal.claims.experiments.vocab_parallel import in_flight, parameter_share, recut
from shoal.ir import TrainJob
from shoal.ir.schedule import Event, Op, OpCosts
from shoal.model.config import ModelConfig


def test_a_share_of_every_boundary_crosses_between_nodes() -> None:
    # Four micro-batches of 16 tokens, 32 wide, in fp32, there and back.
    whole = 4 * 16 * 32 * 4 * 2
    assert internode_bytes(2, scatter=True) == whole
    assert internode_bytes(2, scatter=False) == 2 * whole


def test_costs_of_another_cut() -> None:
    # Blocks of 1 s forward and 2 s backward; an output layer of 3 s and 5 s on the last stage.
    measured = OpCosts(seconds={"F": (3.5, 2.0, 1.0, 6.0), "B": (6.5, 4.0, 2.0, 11.0)})
    cells = (range(2), range(2, 4), range(4, 5), range(5, 8))
    even = recut(measured, cells, best=False)
    assert even.seconds == {"F": (2.0, 2.0, 2.0, 5.0), "B": (4.0, 4.0, 4.0, 9.0)}
    # Eight blocks of 3 s and an output layer of 8 s: three stages of blocks, one without.
    best = recut(measured, cells, best=True)
    assert best.seconds == {"F": (3.0, 3.0, 2.0, 3.0), "B": (6.0, 6.0, 4.0, 5.0)}


@pytest.mark.slow
def test_the_split_vocabulary_balances_parameters_and_holds_few_microbatches() -> None:
    assert parameter_share(32 * 1024, "pp") < 1.001
    assert parameter_share(32 * 1024, "none") > 1.4
    assert max(in_flight("1f1b", 1)) <= 5
    assert max(in_flight("1f1b", 2)) <= 6


def test_profile_tells_passes_and_waiting() -> None:
    events = [Event(1, Op("F", 1, 0), 0.5, 1.0), Event(1, Op("B", 1, 0), 1.5, 2.0)]
    result = profile(events, title="1f1b")
    assert result == "1f1b\nrank 1: 2000.0 ms = B 500.0 ms, F 500.0 ms, waiting 1000.0 ms"


@pytest.mark.multi
@pytest.mark.slow
def test_steps_in_turn_and_peak_memory() -> None:
    config = ModelConfig(
        vocab_size=64, hidden=16, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=8,
        ffn_hidden=32, max_position=16,
    )  # fmt: skip
    jobs = [
        TrainJob.model_validate(
            {
                "model": "shoal-0.3m",
                "seq_len": 16,
                "global_batch": 4,
                "microbatch": 1,
                "precision": "fp32",
                "steps": 1,
                "parallel": {"pp": 2, "vocab": vocab},
            }
        )
        for vocab in ("none", "pp")
    ]
    result = time_steps(jobs, config, pairs=3, seed=0)
    assert [len(seconds) for seconds in result.seconds] == [3, 3]
    assert all(second > 0 for seconds in result.seconds for second in seconds)
    assert [{e.op.kind for e in events} for events in result.events] == [
        {"F", "B"},
        {"F", "B", "EF", "EB", "S", "T"},
    ]
    peaks = peak_memory(jobs[1], config, steps=1)
    assert len(peaks) == 2
    assert all(2**26 < peak < 2**34 for peak in peaks)
