"""Several instances on one clock: conservation, migrations by hand, and one is the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.claims.lab.phased import DecodeLine, Phased, PromptLine
from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.cost.serving.fleet import KVTransferLink, SimulatedInstance, attainment, simulate_fleet
from shoal.cost.serving.simulator import ServedRequest, simulate
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.ir import Arrival, SchedulerLimits
from shoal.plan.batching.dispatch import LeastLoadedDispatcher

COST = Phased(
    prefill=PromptLine(step=0.1, token=0.01, square=0.0),
    decode=DecodeLine(step=0.05, key=0.0, request=0.0),
)
LINE = FittedStepCost(step=1e-2, token=1e-3, prompt_pair=1e-6, decode_key=1e-5, chunk=1e-4)


def instance(
    kind: str, name: str, cost: Any = COST, tokens: int = 4096, **options: Any
) -> SimulatedInstance:
    kv = table("kv").build({"name": "paged", "prefix_reuse": False}).build(tokens)
    limits = SchedulerLimits(max_running=16, max_step_tokens=128, max_position=512)
    built = table(kind).build({"name": name, **options}).build(kv, limits)
    return SimulatedInstance(built, cost)


def workload(count: int, rate: float) -> list[Arrival]:
    part = table("workload").build({"name": "chat", "rate": rate, "scale": 16})
    arrivals: list[Arrival] = part.arrivals(count=count, vocab_size=100, max_position=256, seed=0)
    return arrivals


def test_one_instance_is_the_simulator_of_one() -> None:
    arrivals = workload(60, 20.0)
    one, other = instance("scheduler", "fcfs", LINE), instance("scheduler", "fcfs", LINE)
    want = simulate(one.scheduler, LINE, arrivals)
    seen = simulate_fleet([other], [], LeastLoadedDispatcher(1), arrivals)
    assert seen.served == want.served
    assert seen.busy_s == [pytest.approx(sum(step.seconds for step in want.steps))]


@pytest.mark.parametrize(("fronts", "backs", "tokens"), [(1, 1, 4096), (2, 1, 160), (1, 3, 160)])
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_lost_and_bytes_are_those_of_the_formula(
    fronts: int, backs: int, tokens: int, overlap: bool
) -> None:
    arrivals = workload(120, 30.0)
    prefill = [instance("phase", "prefill", LINE, tokens) for _ in range(fronts)]
    decode = [instance("phase", "decode", LINE, tokens) for _ in range(backs)]
    wire = KVTransferLink(bandwidth=1e6, token_bytes=512.0, layers=4, overlap=overlap)
    dispatcher = LeastLoadedDispatcher(fronts, backs)
    seen = simulate_fleet(prefill, decode, dispatcher, arrivals, wire=wire)
    assert [one.n_output for one in seen.served] == [one.output_tokens for one in arrivals]
    going_on = {str(n): a for n, a in enumerate(arrivals) if a.output_tokens > 1}
    assert {m.request_id: m.nbytes for m in seen.moves} == {
        name: 512.0 * len(a.prompt) for name, a in going_on.items()
    }
    first = {one.id: one.first for one in seen.served}
    for move in seen.moves:
        assert move.ready == pytest.approx(first[move.request_id])
        assert move.done >= max(move.ready, move.begun)
    for one in (*prefill, *decode):
        scheduler: Any = one.scheduler
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.kv.num_free == scheduler.kv.num_blocks


def test_a_migration_by_hand() -> None:
    """A prompt of 10 tokens: 0.2 s; 1000 bytes at 1000 byte/s; two steps of 0.05 s."""
    arrivals = [Arrival(1.0, (1,) * 10, 3)]

    def run(**options: Any) -> ServedRequest:
        wire = KVTransferLink(bandwidth=1000.0, token_bytes=100.0, **options)
        front, back = instance("phase", "prefill"), instance("phase", "decode")
        seen = simulate_fleet([front], [back], LeastLoadedDispatcher(1, 1), arrivals, wire=wire)
        return seen.served[0]

    plain = run()
    assert plain.ttft == pytest.approx(0.2)
    # The wait for keys and values counts as time between tokens.
    assert plain.tpot == pytest.approx((1.0 + 0.1) / 2)
    assert run(latency_s=0.5).tpot == pytest.approx((1.5 + 0.1) / 2)
    # Layer by layer: the first of 4 is there 0.05 s after the prompt began.
    assert run(layers=4, overlap=True).tpot == pytest.approx((1.05 - 0.2 + 0.1) / 2)


def test_what_slows_each_other() -> None:
    """Two prompts of 0.2 s at once on two instances: with one core for both, 0.4 s each."""
    arrivals = [Arrival(0.0, (1,) * 10, 1), Arrival(0.0, (2,) * 10, 1), Arrival(2.0, (3,) * 10, 1)]
    for crowding, want in ((0.0, 0.2), (1.0, 0.4), (0.5, 0.3)):
        both = [instance("scheduler", "fcfs") for _ in range(2)]
        seen = simulate_fleet(both, [], LeastLoadedDispatcher(2), arrivals, crowding=crowding)
        assert [one.ttft for one in seen.served] == pytest.approx([want, want, 0.2])


def test_attainment_wants_both_targets_of_all_requests() -> None:
    served = [
        ServedRequest("0", 0.0, 4, 1.0, 2.0, 11),
        ServedRequest("1", 0.0, 4, 1.0, 1.0, 1),
        ServedRequest("2", 0.0, 4, 3.0, 4.0, 11),
        ServedRequest("3", 0.0, 4),
    ]
    assert attainment(served, ttft=1.0, tpot=0.1) == 0.5
    assert attainment(served, ttft=1.0, tpot=0.09) == 0.25
    assert attainment(served, ttft=5.0, tpot=1.0) == 0.75


def test_a_step_of_both_phases_reads_the_weights_once() -> None:
    true = Phased(
        prefill=PromptLine(step=2e-2, token=1e-4, square=7e-9),
        decode=DecodeLine(step=1e-2, key=6e-7, request=4e-5),
        large=DecodeLine(step=5e-3, key=6e-7, request=2e-4),
        large_from=16,
    )
    # A step of both reads the weights once; a prompt in parts costs what it costs whole.
    both = true.seconds([(0, 64), (100, 1)])
    assert both == pytest.approx(2e-2 + 64e-4 + 7e-9 * 64**2 + 6e-7 * 101 + 4e-5)
    parts = true.seconds([(0, 64)]) + true.seconds([(64, 64)]) - 2e-2
    assert parts == pytest.approx(true.seconds([(0, 128)]))


def test_what_cannot_be() -> None:
    front, back = instance("phase", "prefill"), instance("phase", "decode")
    with pytest.raises(ConfigError, match="wire"):
        simulate_fleet([front], [back], LeastLoadedDispatcher(1, 1), [])
    late = [Arrival(1.0, (1,), 1), Arrival(0.0, (1,), 1)]
    with pytest.raises(ConfigError, match="sort the trace by time"):
        simulate_fleet([instance("scheduler", "fcfs")], [], LeastLoadedDispatcher(1), late)
    with pytest.raises(ConfigError, match="bandwidth"):
        KVTransferLink(bandwidth=0.0, token_bytes=1.0)
    with pytest.raises(ConfigError, match="crowding"):
        simulate_fleet(
            [SimulatedInstance(front.scheduler, COST, 2)],
            [],
            LeastLoadedDispatcher(1),
            [],
            crowding=1.0,
        )
