"""When copies of experts travel, how long they stay, and what that costs."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one, tokens
from shoal.claims.lab.thread_links import Links, run_linked
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.cost.shapes import find
from shoal.ir import TrainJob, Work
from shoal.ir.hooks import TrainStep
from shoal.machine import load
from shoal.model.attention import Attention
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.expert.copies import copies_of, sent_copies
from shoal.parallel.expert.fssdp import CopiedExperts, lending
from shoal.parallel.expert.layer_copies import TAG, CopyMeter, LayerCopies, begun, handed, landed
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.plan.placement import PLACERS
from shoal.plan.placement.estimates import budget, hidden_again
from shoal.plan.placement.owners import in_order, only_owners
from shoal.plan.placement.protocols import Devices

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 8, "top_k": 2, "num_layers": 3}
NEXT = {"name": "next", "rematerialize": "on"}
MOVING = {"name": "fssdp", "rematerialize": "on", "resharding_every": 1}


@dataclass(frozen=True)
class Next:
    """Everybody borrows the first expert of every other rank."""

    rematerialize: str = "off"
    every: ClassVar[int] = 0
    slots: ClassVar[int] = 7

    def estimate(self, work, machine):
        return PLACERS.build("owners").estimate(work, machine)

    def owners(self, expected_E, devices, now_E=None):
        return in_order(len(expected_E), devices)

    def place(self, expected_E, owner_E, devices, budget=None):
        held = only_owners(owner_E, devices)
        held[np.unique(owner_E, return_index=True)[1]] = True
        return held


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setitem(PLACERS._own, "next", f"{__name__}:Next")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _agrees(split, placer, per_node=None, **extra):
    given = job({**split, "placer": placer}, **{"global_batch": 4, "microbatch": 1, **extra})

    def run(on):
        return run_ranks(given.parallel.world, on, ranks_per_node=per_node)[0]

    result = same_as_one(given, config(**MOE), steps=2, run=run)
    assert result.same, str(result)


def test_copies_that_are_gathered_again_are_one_process():
    _agrees({"dp": 4, "ep": 4}, NEXT, per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "placer", "per_node", "extra"),
    [
        ({"dp": 4, "ep": 4}, "next", 2, {}),
        ({"dp": 4, "ep": 4}, "next", 2, {"recompute": "full"}),
        ({"dp": 4, "ep": 2}, NEXT, None, {"shard": "zero1"}),
        ({"dp": 2, "pp": 2, "ep": 2, "schedule": "zb_h1"}, NEXT, None, {}),
        ({"dp": 2, "pp": 2, "ep": 2}, "next", None, {"recompute": "stage"}),
        ({"dp": 2, "tp": 2, "sp": True, "ep": 4}, NEXT, 2, {}),
        (
            {"dp": 4, "ep": 4},
            {"name": "fssdp", "rematerialize": "on", "resharding_every": 1},
            2,
            {},
        ),
    ],
)
def test_whenever_copies_travel_all_is_one_process(split, placer, per_node, extra):
    _agrees(split, placer, per_node, **extra)


def _passes(again, precision, meter):
    """What two passes of a model on four ranks of two nodes lent, rank by rank."""
    given = job(
        {"dp": 4, "ep": 4, "placer": {"name": "next", "rematerialize": again}},
        global_batch=8,
        microbatch=1,
        precision=precision,
    )
    weights = SeededWeights(config(**MOE))
    schedule = check_split(given, weights.config.shape())

    def on(comm):
        engine = ParallelEngine(given, schedule, weights, comm)
        every = tokens(given, weights.config.vocab_size, 0, documents=False)
        mine = slice(2 * comm.rank, 2 * comm.rank + 2)
        rows = ReplicaSequences(every.inputs[mine], every.targets[mine], None, mine.start, 0)
        engine.backward(rows, 1, 100.0)
        one = next(m for m in engine.local.modules() if isinstance(m, CopiedExperts))
        size = sum(p[0].nbytes for p in (one.gate_up_proj, one.down_proj))
        travels = len(sent_copies(one.owner_E, one.held, one.devices))
        return engine.hooks["copies"], size, travels

    return run_ranks(4, on, meter=meter, ranks_per_node=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("again", ["off", "on"])
def test_bytes_and_room_are_those_of_the_table(again, precision):
    meter = Meter()
    passes = _passes(again, precision, meter)
    wire = sum(size for name, size in meter.totals().items() if "wire_" in name and TAG in name)
    _, size, travels = passes[0]
    # There, back as gradients and, where they were dropped, there again; two passes, three layers.
    share = 0.5 if precision == "bf16" else 1.0
    assert wire == ((2 if again == "on" else 1) * share + 1) * travels * size * 3 * 2
    for ledger, size, _ in passes:
        assert ledger.bytes == 0
        # Three copies a layer, of all three layers or of one.
        assert ledger.peak_bytes == (1 if again == "on" else 3) * 3 * share * size
        events = ledger.events()["step"]
        assert events["copies_bytes"] == ledger.peak_bytes
        ledger.before_step(TrainStep(1, 2))
        assert events["copies_exposed_s"] > 0 == ledger.exposed_s


def test_copies_travel_while_attention_computes_and_gradients_while_it_goes_back(monkeypatch):
    groups: dict[int, list[str]] = defaultdict(list)

    def say(what):
        groups[threading.get_ident()].append(what)

    def note(name):
        whole = getattr(LayerCopies, name)

        def noted(self, *given):
            say(name)
            return whole(self, *given)

        monkeypatch.setattr(LayerCopies, name, noted)

    for name in ("_issue", "give_back", "pass_on", "settle"):
        note(name)
    attend, wait = Attention.forward, CopyMeter.wait

    def attended(self, *given, **named):
        out = attend(self, *given, **named)
        say("attention")
        out.register_hook(lambda grad: say("attention goes back"))
        self.qkv_proj.weight.register_hook(lambda grad: say("attention is back"))
        return out

    def waited(self, pending):
        say("wait")
        wait(self, pending)

    monkeypatch.setattr(Attention, "forward", attended)
    monkeypatch.setattr(CopyMeter, "wait", waited)
    given = job({"dp": 4, "ep": 4, "placer": "next"}, global_batch=4, microbatch=1)
    weights = SeededWeights(config(**{**MOE, "num_layers": 1}), dtype=torch.float64)
    schedule = check_split(given, weights.config.shape())

    def on(comm):
        engine = ParallelEngine(given, schedule, weights, comm, dtype=torch.float64)
        every = tokens(given, weights.config.vocab_size, 0, documents=False)
        mine = slice(comm.rank, comm.rank + 1)
        engine.backward(
            ReplicaSequences(every.inputs[mine], every.targets[mine], None, comm.rank, 0), 1, 9.0
        )
        return threading.get_ident()

    forward = ["_issue", "attention", "wait", "_issue", "wait"]
    backward = ["give_back", "pass_on", "wait", "attention goes back", "attention is back"]
    for thread in run_ranks(4, on, ranks_per_node=2):
        assert groups[thread] == [*forward, *backward, "settle", "wait"]


def test_what_attention_hides_is_not_waited_for():
    """On links that take time: the longer of the two, and not their sum."""
    devices, links = Devices(2, 2), Links(latency_s=0.0, bandwidth=1000.0)
    owner = in_order(2, devices)

    def on(comm, attention_s):
        own = torch.ones(1, 125, dtype=torch.float64, requires_grad=True)  # a second
        copies = copies_of(owner, np.ones((2, 2), dtype=bool), devices, comm.rank)
        lent = LayerCopies((own,), copies, comm, CopyMeter())
        sign = begun(lent, (own,))
        comm.compute(attention_s)
        (out,) = landed(lent, handed(lent, sign))
        there = comm.now
        lent.give_back((out.detach(),))
        lent.pass_on()
        comm.compute(2 * attention_s)
        lent.settle()
        return there, comm.now - there

    for attention_s, there, back in ((0.0, 1.0, 1.0), (0.4, 1.0, 1.0), (3.0, 3.0, 6.0)):
        for result in run_linked(2, lambda comm, s=attention_s: on(comm, s), links):
            assert result == pytest.approx((there, back))


def _work(seq_len, machine="64xH100", **placer):
    given = TrainJob(
        model="Mixtral-8x7B-v0.1",
        seq_len=seq_len,
        global_batch=64,
        microbatch=1,
        precision="bf16",
        parallel={"dp": 64, "ep": 8, "placer": {"name": "fssdp", **placer}},
        steps=1,
    )
    return Work(shape=find("Mixtral-8x7B-v0.1"), job=given), load(machine)


def test_copies_are_gathered_again_where_that_is_hidden():
    short, machine = _work(256)
    long, _ = _work(131072)
    assert not hidden_again(short, machine, 2)
    assert hidden_again(long, machine, 2)
    assert not hidden_again(long, machine, 0)
    assert budget(long, machine).hidden_s > budget(short, machine).hidden_s
    assert budget(long, machine).far_s > budget(long, machine).near_s

    def priced(seq_len, again):
        work, machine = _work(seq_len, rematerialize=again, resharding_every=None)
        return table("placer").build(work.job.parallel.placer).estimate(work, machine)

    off, on, auto = (priced(131072, again) for again in ("off", "on", "auto"))
    assert off.step_s.value == on.step_s.value == auto.step_s.value == 0.0
    sent = [sum(one.wire_bytes.values()) for one in (off, auto, on)]
    assert sent[2] == pytest.approx(4 / 3 * sent[0])  # copies of 2 bytes, gradients of 4
    assert sent[0] < sent[1] < sent[2]
    held = [one.memory_bytes["activations"] for one in (off, auto, on)]
    assert held[2] == held[1] == held[0] / 32
    off, on, auto = (priced(256, again) for again in ("off", "on", "auto"))
    assert auto == off
    assert on.step_s.value > off.step_s.value > 0


def test_layers_choose_by_the_estimate():
    given = job({"dp": 2, "ep": 2, "placer": "fssdp"})
    weights = SeededWeights(config(**MOE))
    schedule = check_split(given, weights.config.shape())

    def on(comm):
        return ParallelEngine(given, schedule, weights, comm).local

    model = run_ranks(2, on)[0]
    layers = [one for one in model.modules() if isinstance(one, CopiedExperts)]
    (long, machine), (short, _) = _work(131072), _work(256)
    lending(model, long, machine)
    # The last layer's copies are needed again at once.
    assert [one.again for one in layers] == [True, True, False]
    assert len({id(one.meter) for one in layers}) == 1
    assert layers[0].budget == budget(long, machine)
    for work, where in ((short, machine), (long, None)):
        lending(model, work, where)
        assert not any(one.again for one in layers)
    full = long.job.model_copy(update={"recompute": "full"})
    lending(model, Work(shape=long.shape, job=full), machine)
    assert not any(one.again for one in layers)


def test_moves_are_priced_by_step():
    def moved(**extra):
        work, machine = _work(256, slots=0, **extra)
        return table("placer").build(work.job.parallel.placer).estimate(work, machine)

    often, seldom, never = (moved(resharding_every=n) for n in (10, 100, None))
    assert seldom.step_s.value > 0
    assert often.step_s.value == pytest.approx(10 * seldom.step_s.value)
    assert sum(often.wire_bytes.values()) == pytest.approx(10 * sum(seldom.wire_bytes.values()))
    assert never.step_s.value == 0.0


def test_what_cannot_be():
    with pytest.raises(ConfigError, match=r"fssdp.rematerialize = 'maybe'.*auto"):
        table("placer").build({"name": "fssdp", "rematerialize": "maybe"})
    split = {"dp": 2, "ep": 2, "placer": {"name": "fssdp", "rematerialize": "on"}}
    with pytest.raises(PlanError, match=r"rematerialize = 'on'.*auto or off with recompute = full"):
        check_split(job(split, recompute="full"), config(**MOE).shape())
