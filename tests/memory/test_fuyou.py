"""Fuyou: the optimizer works during the backward pass, to the bits of the run without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from offload_runs import config, job, run, same  # noqa: E402

from shoal.core.errors import (  # noqa: E402
    ConfigError,
    MachineError,
    ModelError,
    ShoalError,
    TierFullError,
)
from shoal.core.parts import table  # noqa: E402
from shoal.ir import Device, Machine, MemoryTier, Work  # noqa: E402
from shoal.memory.activations.replay import ActivationReplay, units_of  # noqa: E402
from shoal.memory.activations.swapping import ActivationSwapping  # noqa: E402
from shoal.memory.fuyou.needs import SLOTS  # noqa: E402
from shoal.memory.fuyou.optimizer_process import (  # noqa: E402
    OptimizerServer,
    ParameterLocation,
    Setup,
    UpdateRequest,
)
from shoal.memory.tiers.disk import DiskTier  # noqa: E402
from shoal.memory.tiers.places import StagingRing, Tiers  # noqa: E402
from shoal.memory.tiers.shared import SharedLink, SharedPages  # noqa: E402
from shoal.parallel.legal import check_split  # noqa: E402
from shoal.train.optimizers.adamw import AdamW  # noqa: E402

ALONE = SimpleNamespace(world=1, rank=0)
RULE = AdamW(lr=1e-2, fused=False)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def offload(**options):
    budgets = {"device_budget": "8MiB", "host_budget": "96MiB", "swap_capacity": "64MiB"}
    return {"name": "fuyou", **budgets, **options}


def plain(**changes):
    return job(grad_clip=0, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "model", "changes", "steps"),
    [
        ({}, {}, {"optimizer": {"name": "adamw", "fused": False}}, 10),
        (
            {"swap": "none", "sub_group_numel": "16384"},
            {"tied": True},
            {"precision": "bf16", "microbatch": 4},
            4,
        ),
        ({"swap": "all"}, {"num_experts": 4, "top_k": 2, "family": "mixtral"}, {}, 4),
        ({"swap": "30kB", "prefetch_numel": 0}, {}, {"dropout": 0.1}, 4),
    ],
)
def test_one_device_is_the_same_to_the_bit(options, model, changes, steps, tmp_path):
    one = run(plain(**changes), config(**model), tmp_path, steps=steps)
    tiers = run(plain(offload=offload(**options), **changes), config(**model), tmp_path, steps)
    same(one, tiers)
    assert tiers.peaks["device"] <= 8 * 2**20
    assert not list(tmp_path.iterdir())


def small_machine():
    tier = MemoryTier(name="dram", capacity_bytes=2**34, read_bandwidth=1e10)
    return Machine(name="small", device=Device(name="cpu", kind="cpu", num_cores=2, memory=(tier,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changes"),
    [({"prefetch_numel": 0}, {}), ({"swap": "all"}, {"microbatch": 4, "seq_len": 64})],
)
def test_peaks_are_predicted(options, changes, tmp_path):
    model = config(hidden=128, ffn_hidden=384, num_layers=3, vocab_size=512, head_dim=32)
    wanted = plain(offload=offload(**options), **changes)
    result = run(wanted, model, tmp_path, steps=3)
    part = table("offload").build(wanted.offload)
    outcome = part.estimate(Work(shape=model.shape(), job=wanted), small_machine()).memory_bytes
    for tier, peak in result.peaks.items():
        assert peak <= outcome[tier], tier
        assert peak >= (0.4 if tier == "device" else 0.9) * outcome[tier], tier


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))


@pytest.mark.slow
def test_a_killed_optimizer_is_an_error_and_no_hang(tmp_path):
    part = table("offload").build(offload())
    made = part.apply(net(), ALONE, RULE, place=tmp_path)
    x = torch.randn(32, 64)

    def step():
        made.begin(1.0)
        with made.passes("train", x):
            made.model(x).square().mean().backward()
        made.step(1.0)

    try:
        step()
        os.kill(made.stream.consumer.process.pid, signal.SIGKILL)
        with pytest.raises(MachineError, match=r"process \d+ ended \(status -9\).*checkpoint"):
            for _ in range(3):
                step()
        with pytest.raises(MachineError, match="status -9"):
            made.stream.consumer.slot()
    finally:
        made.close()


@pytest.mark.slow
def test_what_must_be_said_before_and_what_cannot_be_done(tmp_path):
    made = table("offload").build(offload()).apply(net(), ALONE, RULE, place=tmp_path)
    x = torch.randn(32, 64)
    try:
        with (
            pytest.raises(ModelError, match=r"call begin\(factor\) before"),
            made.passes("train", x),
        ):
            pass
        with pytest.raises(ConfigError, match="use grad_clip: 0"):
            made.scale_gradients(torch.tensor(0.5))
        made.begin(0.5)
        with made.passes("train", x):
            made.model(x).sum().backward()
        with pytest.raises(ModelError, match=r"factor 0.5 that begin told it.*ends with 1.0"):
            made.step(1.0)
    finally:
        made.close()


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"grad_clip": 1.0}, "use grad_clip: 0, or offload: zero_infinity"),
        ({}, {"parallel": {"dp": 2}}, "trains on one device and parallel asks for 2"),
        ({}, {"recompute": "full"}, "leave recompute and layers out"),
        ({}, {"finetune": "lora"}, "offload = fuyou: expected nothing with finetune lora"),
        ({}, {"optimizer": "muon"}, "optimizer muon looks at several elements"),
        ({}, {"activation": "ssdtrain"}, "use activation: keep"),
        ({"swap": "some"}, {}, "some"),
        ({"swap": -1}, {}, "swap = -1: expected auto, all, none, or bytes from 0"),
        ({"swap_capacity": 3}, {}, "swap_capacity = 3: expected at least 1MiB"),
        ({"sub_group_numel": 3}, {}, "sub_group_numel = 3: expected at least 16384"),
        ({"prefetch_numel": -1}, {}, "prefetch_numel = -1: expected 0 or more"),
    ],
)
def test_what_does_not_go_together_is_one_error(options, changes, message):
    with pytest.raises(ShoalError, match=message):
        check_split(
            job(**{"grad_clip": 0, "offload": offload(**options), **changes}), config().shape()
        )


def test_a_host_without_room_for_staging(tmp_path):
    part = table("offload").build(offload(host_budget="1MiB"))
    with pytest.raises(TierFullError, match=r"staging buffers take .* a smaller sub_group_numel"):
        part.apply(net(), ALONE, RULE, place=tmp_path)


def test_plans_say_what_binds():
    slow = MemoryTier(name="disk", capacity_bytes=2**40, read_bandwidth=1e8)
    machine = small_machine()
    device = machine.device.model_copy(update={"memory": (*machine.device.memory, slow)})
    wanted = plain(offload=offload(host_budget="1MiB", device_budget="1MiB"))
    work = Work(shape=config(hidden=256, ffn_hidden=512).shape(), job=wanted)
    part = table("offload").build(wanted.offload)
    said = " ".join(part.notes(work, machine.model_copy(update={"device": device})))
    assert "the backward pass by read" in said
    assert "is too slow to hide" in said
    assert "host_budget 1.05 MB is below" in said
    assert "device_budget 1.05 MB is below" in said


# The process that updates, in a thread of this one.


class Served:
    """An optimizer's process in a thread, over parameters of one piece each."""

    def __init__(self, path, count, numel=2**14):
        self.numel = numel
        self.disk = DiskTier(path, 2**22)
        self.memory = SharedPages(SLOTS * 4 * numel)
        blocks = [
            [self.disk.alloc(4 * numel, name) for name in ("weight", *RULE.states)]
            for _ in range(count)
        ]
        self.places = tuple(
            ParameterLocation(w, {"exp_avg": m, "exp_avg_sq": v}, torch.float32, True)
            for w, m, v in blocks
        )
        self.mine, theirs = Pipe()
        setup = Setup(
            RULE, self.places, self.memory.descriptor, self.memory.nbytes, 4 * numel, numel,
            (0, "", 0, True), (None, None), 1,
        )  # fmt: skip
        updating = OptimizerServer(theirs, setup, self.disk)
        self.thread = threading.Thread(target=updating.run)
        self.thread.start()

    def rows(self, place):
        """Weight and states of a parameter."""
        result = self.places[place]
        return [
            self.disk.mapped(b).view(torch.float32)
            for b in (result.weight, *result.states.values())
        ]

    def close(self):
        self.mine.send(None)
        self.thread.join()
        self.disk.close()
        self.memory.close()


def test_what_is_not_written_is_not_read(tmp_path):
    served = Served(tmp_path, 2)
    torch.manual_seed(1)
    numel, steps = served.numel, 6
    gradients = torch.randn(SLOTS, numel)
    for slot in range(SLOTS):
        view = served.memory.bytes_at(slot * 4 * numel, 4 * numel).view(torch.float32)
        view.copy_(gradients[slot])
    expected = [[torch.zeros(numel) for _ in range(3)] for _ in range(2)]
    # The same parameter over and over, without a wait: each update needs the one before.
    for step in range(steps):
        for place in range(2):
            served.mine.send(UpdateRequest(2 * step + place, place, 0, numel, place, step, 0.5))
            weight, first, second = expected[place]
            states = {"exp_avg": first, "exp_avg_sq": second}
            RULE.update(
                weight, gradients[place].clone(), states, step=step, factor=0.5, matrix=True
            )
    served.mine.send(UpdateRequest(99, 0, 0, numel, -1, steps, 1.0))
    weight, first, second = expected[0]
    RULE.update(
        weight, torch.zeros(numel), {"exp_avg": first, "exp_avg_sq": second}, step=steps,
        factor=1.0, matrix=True,
    )  # fmt: skip
    heard = []
    while len([one for one in heard if one[0] == "done"]) < 2 * steps + 1:
        heard.append(served.mine.recv())
    assert [one[1] for one in heard if one[0] == "done"] == [*range(2 * steps), 99]
    for place in range(2):
        for result, wanted in zip(served.rows(place), expected[place], strict=True):
            assert torch.equal(result, wanted)
    served.close()


def test_a_link_that_two_share_carries_no_more_than_one():
    link = SharedLink(1e6)
    other = SharedLink(1e6, 0.0, os.dup(link.descriptor))
    begin = time.perf_counter()
    ends = [each.book(10**6) for each in (link, other, link)]
    assert [round(end - begin) for end in ends] == [1, 2, 3]


# Blocks that are computed again.


class Half(torch.nn.Module):
    """Linear, something, linear; what autograd saves of it is more than one tensor."""

    def __init__(self, between):
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.between = between

    def forward(self, x):
        return x + self.two(self.between(self.one(x)))


@pytest.fixture
def tiers(tmp_path):
    made = Tiers(
        device="cpu", device_bytes=2**24, host_bytes=2**20, disk_bytes=2**22, path=tmp_path,
        strict=False,
    )  # fmt: skip
    yield made
    made.close()


def gradients(model, x, replay=None):
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = None
    if replay is not None:
        replay.active = True
        replay.begin()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def replayed(tiers, between, x):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Half(between), Half(between))
    expected = gradients(model, x)
    rings = [StagingRing(tiers.host, 2, 2**14, "bounce") for _ in range(2)]
    swapping = ActivationSwapping(tiers, lambda: 2**20, *rings)
    return model, ActivationReplay(units_of(model), swapping, lambda tensor: False), expected


@pytest.mark.slow
@pytest.mark.parametrize("to_disk", [0, 40_000, float("inf")])
@pytest.mark.parametrize("between", [torch.nn.GELU(), torch.nn.Dropout(0.3), torch.tanh])
def test_any_choice_gives_the_same_gradients(tiers, between, to_disk):
    x = torch.randn(96, 64)
    if between is torch.tanh:
        between = type(
            "InPlace", (torch.nn.Module,), {"forward": lambda self, y: (y + 1).mul_(2)}
        )()
    model, replay, expected = replayed(tiers, between, x)
    for chosen in (set(), set(range(20)), {0}, {1, 2}):
        for unit, operators in enumerate(replay.operators):
            movable = {n for n, one in enumerate(operators) if one.movable and one.again}
            replay.chosen[unit] = frozenset(chosen & movable)
        replay.swapping.to_disk = to_disk
        result = gradients(model, x, replay)
        assert all(map(torch.equal, result, expected))
        replay.active = False
    assert any(one.movable for one in replay.operators[0])
    # What draws, or is written to, is always done again.
    for operators in replay.operators:
        for one in operators:
            redone = one.movable and one.again
            assert not (redone and one.name in ("aten.add.Tensor", "aten.empty_like.default"))
    replay.begin()
    x = None
    for mover in tiers.movers:
        mover.submit(lambda: None, 0).wait()
    replay.swapping.begin()
    assert tiers.disk.stats.used == 0


@pytest.mark.slow
def test_what_nobody_can_compute_again_is_refused(tiers):
    own = torch.Generator().manual_seed(1)
    noise = type(
        "Noise",
        (torch.nn.Module,),
        {"forward": lambda self, y: y * torch.empty_like(y).bernoulli_(0.5, generator=own)},
    )()
    model, replay, _ = replayed(tiers, noise, x := torch.randn(8, 64))
    with pytest.raises(ModelError, match="draws from a generator of its own"):
        gradients(model, x, replay)
    turns = iter(range(100))
    fickle = type(
        "Fickle",
        (torch.nn.Module,),
        {"forward": lambda self, y: y.sin() if next(turns) % 4 < 2 else y.cos()},
    )()
    model, replay, _ = replayed(tiers, fickle, x)
    next(turns), next(turns)
    with pytest.raises(ModelError, match="it must do the same both times"):
        gradients(model, x, replay)
