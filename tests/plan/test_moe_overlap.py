"""Chunks of a layer of experts: fits, streams, the chosen numbers, gradients in the holes."""

from __future__ import annotations

import json
import random
import warnings
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.errors import PlanError
from shoal.cost.gpu.device import CALIBRATED
from shoal.cost.price.expert_hops import hops
from shoal.cost.shapes import find
from shoal.cost.training.moe_makespan import gained_s, makespan
from shoal.cost.training.moe_tasks import Line, MoeLayer, MoePass, Task, fitted, layer_of, passes
from shoal.cost.training.step import Pricer
from shoal.ir import Parallel, TrainJob, Work
from shoal.machine.described import load
from shoal.parallel.legal import check_split
from shoal.plan.experts.moe_gradients import partition
from shoal.plan.experts.moe_overlap import (
    STREAMS,
    cases,
    choose,
    exhaustive,
    room,
    schedule,
    timeline,
)
from shoal.plan.experts.moe_overlap_picture import streams
from shoal.plan.experts.moe_step import planned
from shoal.plan.strategy.space import candidates

MODEL = "Mixtral-8x7B-v0.1"
SPLIT = Parallel(dp=64, ep=8, etp=8)


def _any(source: random.Random) -> MoePass:
    def task() -> Task:
        return Task(10 ** source.uniform(-6, -4), 10 ** source.uniform(-4, -2))

    return MoePass(task(), task(), task(), 4096)


def _layer(dense_s: float, gradient: float, exchange: float = 1e-3) -> MoeLayer:
    there, beside, work = Line(5e-5, exchange), Line(1e-5, 3e-4), Line(2e-5, 2e-3)
    forward, backward = passes(there, beside, work, (1.0, 1.0, 1.0), 4096)
    return MoeLayer(forward, backward, dense_s / 2, dense_s, gradient, Line(1e-5, 1e-9))


def test_a_line_is_found_again():
    sizes = [1e6 * i for i in range(1, 9)]
    line = fitted(sizes, [3e-5 + 2e-10 * size for size in sizes])
    assert line == pytest.approx(Line(3e-5, 2e-10), rel=1e-9)
    assert line.of(4e6).at(2) == pytest.approx(3e-5 + 4e-4)
    assert line.of(0.0) == Task(0.0, 0.0)


def test_a_start_below_zero_is_clipped_and_told():
    with pytest.warns(UserWarning, match=r"exchange.*below zero.*clipped"):
        line = fitted([1.0, 2.0, 3.0], [0.5, 2.0, 3.5], "exchange")
    assert line.alpha == 0.0
    assert line.beta == pytest.approx((0.5 + 4.0 + 10.5) / 14)


@pytest.mark.parametrize(
    ("sizes", "seconds", "told"),
    [([1.0, 1.0], [1.0, 1.0], "two different"), ([1.0, 2.0], [2.0, 1.0], "grow with the size")],
)
def test_fits_that_say_nothing_are_refused(sizes, seconds, told):
    with pytest.raises(PlanError, match=told):
        fitted(sizes, seconds, "gather")


def test_the_quick_sum_is_the_simulation():
    source = random.Random(1)
    for r in (1, 2, 3, 6):
        for slice_s in (0.0, 2e-3):
            one = _any(source)
            for one_link in (False, True):
                result = timeline(one, r, slice_s, one_link=one_link)
                quick = makespan(one, r, slice_s, one_link=one_link)
                assert quick == pytest.approx(result.makespan, rel=1e-12)


def test_streams_do_every_task_once_and_in_turn():
    for r in (1, 4):
        result = schedule(r, min(1, r - 1), slice_=True)
        done = [op for ops in result.ops for op in ops]
        assert len(done) == len(set(done)) == 5 * r + 1
        assert all(result.rank_of(op) == rank for rank, ops in enumerate(result.ops) for op in ops)
    there, beside, work = 3.0, 1.0, 2.0
    one = MoePass(Task(0.0, 2 * there), Task(0.0, 2 * beside), Task(0.0, 2 * work), 8)
    # By hand: D 0-3 3-6, G 3-4, E 4-6, S 6-7, G 7-8, E 8-10, S 10-11, C 7-10 11-14.
    assert timeline(one, 2, ahead=0).makespan == 14.0
    # With the second gathered before the first is summed: G 6-7, S 7-8, C 8-11, E 7-9, S 9-10.
    assert timeline(one, 2, ahead=1).makespan == 14.0
    assert makespan(one, 1) == 2 * (6.0 + 2.0) + 4.0


def test_closed_forms_are_never_above_the_simulation():
    source = random.Random(2)
    for _ in range(30):
        one = _any(source)
        for r in (1, 2, 5, 20):
            for ahead in {0, min(1, r - 1), min(2, r - 1)}:
                result = timeline(one, r, 1e-3, ahead=ahead).makespan
                for name, seconds in cases(one, r, 1e-3, ahead).items():
                    assert seconds <= result * (1 + 1e-9), name


def test_the_choice_is_near_the_best_of_all():
    source = random.Random(3)
    for _ in range(6):
        one = _any(source)
        chosen = choose(one)
        assert chosen.seconds == pytest.approx(timeline(one, chosen.r).makespan)
        assert chosen.seconds <= 1.02 * min(exhaustive(one))


def test_bottlenecks_are_named():
    slow = Task(1e-5, 1e-1)
    fast = Task(1e-5, 1e-3)
    for place, name in enumerate(STREAMS):
        tasks = [slow if i == place else fast for i in range(3)]
        assert choose(MoePass(*tasks, 4096)).bound == name


def test_chunks_are_tokens_at_least():
    one = MoePass(Task(0.0, 1.0), Task(0.0, 1.0), Task(0.0, 1.0), 3)
    assert choose(one).r == 3
    assert len(exhaustive(one)) == 3
    with pytest.raises(PlanError, match=r"chunks r = 4.*3, the tokens"):
        makespan(one, 4)
    with pytest.raises(PlanError, match="chunks r"):
        timeline(one, 0)


def test_what_fits_the_room_costs_nothing():
    source = random.Random(4)
    for _ in range(10):
        one = _any(source)
        for r in (1, 3, 8):
            free = room(one, r)
            assert makespan(one, r, free) == pytest.approx(makespan(one, r))
            assert makespan(one, r, free + 1e-3) == pytest.approx(makespan(one, r) + 1e-3)


def test_slices_are_all_gradients_once():
    layers = [_layer(1e-3, 2e6) for _ in range(6)]
    result = partition(layers)
    sent = sum(one.bytes for one in result.slices) + result.tail
    assert sent == pytest.approx(6 * 2e6)
    # Nothing of a layer before it is done, and the first one's own when all are.
    finished = 0.0
    for one in result.slices:
        finished = 2e6 * (5 - one.layer)
        assert one.layer < 5
    assert sum(one.bytes for one in result.slices) <= finished + 2e6
    assert result.tail == pytest.approx(2e6)
    uncut = sum(choose(one.backward).seconds + one.dense_backward_s for one in layers)
    assert result.seconds == pytest.approx(uncut + 1e-5 + 1e-9 * 2e6)


def test_what_no_hole_takes_is_spread_if_that_is_sooner():
    layers = [_layer(1e-4, 8e6) for _ in range(4)]
    result = partition(layers, seed=1)
    sent = sum(one.bytes for one in result.slices) + result.tail
    assert sent == pytest.approx(4 * 8e6)
    assert result.seconds <= result.greedy_s
    # The network is never asked for more than it has.
    busy = sum(one.seconds for one in result.slices) + result.tail_s
    assert result.seconds >= busy
    assert partition(layers, seed=1) == result
    with pytest.raises(PlanError, match="at least one block"):
        partition([])


def test_tasks_of_a_model_follow_its_machine():
    machine = load("64xH100")
    layer = layer_of(find(MODEL), machine, SPLIT, 4096)
    slow = machine.model_copy(
        update={
            "links": tuple(
                one.model_copy(update={"bandwidth": one.bandwidth / 2})
                if one.scope == "node"
                else one
                for one in machine.links
            )
        }
    )
    other = layer_of(find(MODEL), slow, SPLIT, 4096)
    assert other.forward.exchange.work == pytest.approx(2 * layer.forward.exchange.work)
    assert other.forward.gather == layer.forward.gather
    assert layer.backward.experts.work == pytest.approx(2 * layer.forward.experts.work)
    # Seven eighths of two rows a token, in bf16, over 50 GB/s.
    assert layer.forward.exchange.work == pytest.approx(
        7 / 8 * 2 * 4096 * 4096 * 2 / (CALIBRATED.wire * 5e10)
    )
    alone = layer_of(find(MODEL), machine, Parallel(dp=64, ep=8), 4096)
    assert alone.forward.gather == Task(0.0, 0.0)


def test_machines_whose_nodes_are_not_known_are_refused():
    with pytest.raises(PlanError, match=r"which ranks share a node"):
        layer_of(find(MODEL), load("8xH100"), Parallel(dp=8, ep=8), 4096)
    with pytest.raises(PlanError, match="divisor of the node's 8 devices"):
        layer_of(find(MODEL), load("64xH100"), Parallel(dp=64, ep=4, etp=16), 4096)
    with pytest.raises(PlanError, match="mixture of experts"):
        planned("Llama-3.1-8B", load("64xH100"))
    with pytest.raises(PlanError, match=r"parallel\.ep"):
        planned(MODEL, load("64xH100"), ep=3)


def test_a_plan_is_sooner_than_one_chunk():
    result = planned("Qwen3-30B-A3B", load("64xH100"), tokens=2048)
    assert result.parallel.ep == 8
    assert result.parallel.etp == 8
    assert result.seconds < 0.8 * result.uncut_s
    assert len(result.gradients.r) == result.blocks == 48


def test_the_picture_has_every_task():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = layer_of(find(MODEL), load("64xH100"), SPLIT, 4096)
    forward, backward = choose(layer.forward).r, choose(layer.backward).r
    drawn = ElementTree.fromstring(streams(layer.forward, layer.backward))
    bars = [one for one in drawn.iter() if one.tag.endswith("rect") and len(one)]
    assert len(bars) == 5 * (2 + forward + backward)


def test_the_command_tells_and_draws(tmp_path):
    picture = tmp_path / "streams.svg"
    words = ["explain", "moe-overlap", MODEL, "--picture", str(picture)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0
    assert "expert_chunks: [" in shown.output
    assert picture.read_text().startswith("<svg")
    data = json.loads(CliRunner().invoke(app, [*words, "-o", "json"]).stdout)
    assert data["forward"]["faster"] > 1.0
    assert data["blocks"] == 32


def test_small_messages_are_planned_by_node():
    """Of few tokens what starts a message counts, and by node there are fewer of them."""
    result = {
        way: planned("Qwen3-30B-A3B", load("64xH100"), tokens=64, ep=64, etp=1, dispatch=way)
        for way in ("flat", "1dh", "2dh")
    }
    assert (
        result["2dh"].layer.forward.exchange.alpha < result["flat"].layer.forward.exchange.alpha / 4
    )
    assert result["2dh"].seconds < result["flat"].seconds
    # A node's first rank sends for eight.
    assert result["1dh"].layer.forward.exchange.work > 7 * result["2dh"].layer.forward.exchange.work
    outcome = result["2dh"].as_record()
    assert outcome["dispatch"] == "2dh"
    with pytest.raises(PlanError, match=r"expert_dispatch = 2dh.*use flat"):
        hops([(0, 1)], 1.0, 4, None, "2dh")


def _auto(machine: str, parallel: dict[str, object]) -> list[TrainJob]:
    job = TrainJob(
        model=MODEL, seq_len=1024, global_batch=64, microbatch=1, shard="zero1", precision="bf16",
        recompute="none", parallel={"dp": 64, "ep": 8, "etp": 8, **parallel},
    )  # fmt: skip
    return list(candidates(job, load(machine)))


def test_auto_takes_what_the_solver_finds():
    (result,) = _auto("64xH100", {"expert_chunks": "auto", "gradient_slices": "auto"})
    shape = find(MODEL)
    layer = layer_of(shape, load("64xH100"), SPLIT, 1024, 1024)
    chunks = choose(layer.forward).r, choose(layer.backward).r
    assert result.parallel.chunks == chunks
    assert max(chunks) > 1
    sums = partition([layer] * shape.num_layers)
    for number, pair in enumerate(result.parallel.slices):
        for where, size in zip(("experts", "dense"), pair, strict=True):
            mine = [one.bytes for one in sums.slices if (one.layer, one.where) == (number, where)]
            assert size == int(sum(mine))
    assert sum(map(sum, result.parallel.slices)) > 0
    # A planned job is as it would be if its numbers had been given, and can be checked.
    assert _auto("64xH100", result.parallel.model_dump()) == [result]
    check_split(result, shape)


def test_only_one_may_be_left_open():
    (result,) = _auto("64xH100", {"expert_chunks": [3, 2], "gradient_slices": "auto"})
    assert result.parallel.chunks == (3, 2)
    assert result.parallel.slices
    (result,) = _auto("64xH100", {"expert_chunks": "auto"})
    assert result.parallel.slices == ()


def test_auto_without_nodes_experts_or_a_plan_is_refused():
    with pytest.raises(PlanError, match=r"expert_chunks = auto.*several.*or give numbers"):
        _auto("8xH100", {"dp": 8, "expert_chunks": "auto", "ep": 8, "etp": 1})
    with pytest.raises(PlanError, match=r"gradient_slices = auto.*give parallel\.ep"):
        _auto("64xH100", {"gradient_slices": "auto", "ep": 1, "etp": 1})
    for name in ("expert_chunks", "gradient_slices"):
        job = TrainJob(model=MODEL, global_batch=64, parallel={"dp": 64, "ep": 8, name: "auto"})
        with pytest.raises(PlanError, match=rf"parallel\.{name} = auto.*or plan"):
            check_split(job, find(MODEL))


def test_a_step_is_priced_with_its_chunks():
    """By what the layer's passes gain; nothing is known of one node."""
    shape, seconds = find(MODEL), {}
    for chunks in ([1, 1], "auto", [32, 32]):
        (job,) = _auto("64xH100", {"expert_chunks": chunks})
        estimate = Pricer(load("64xH100")).estimate(Work(job=job, shape=shape))
        gain = gained_s(job, shape, load("64xH100"), 1)
        seconds[str(chunks)] = estimate.terms_s["collective"], gain, max(job.parallel.chunks)
    one, best, many = seconds["[1, 1]"], seconds["auto"], seconds["[32, 32]"]
    assert one[1] == 0.0
    assert best[2] > 1
    assert best[1] > many[1]
    assert one[0] - best[0] == pytest.approx(best[1], rel=1e-6)
    layer = layer_of(shape, load("64xH100"), SPLIT, 1024, 1024)
    chosen = sum(choose(one).seconds for one in layer[:2])
    uncut = sum(makespan(one, 1) for one in layer[:2])
    assert best[1] == pytest.approx(shape.num_layers * (uncut - chosen), rel=1e-6)
    (job,) = _auto("8xH100", {"dp": 8, "etp": 1, "ep": 8, "expert_chunks": [2, 2]})
    assert gained_s(job, shape, load("8xH100"), 1) == 0.0
