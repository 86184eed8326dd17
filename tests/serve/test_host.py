"""Blocks really move: bytes, order, an emulated link, and tokens that stay the same."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.cost.serving.simulator import SimulatedRunner  # noqa: E402
from shoal.cost.step_cost.fitted import FittedStepCost  # noqa: E402
from shoal.ir import Copy, HostLink, Request, SamplingParams, ServeJob, Step, Transfer  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.plan.serving.simulation import build_scheduler  # noqa: E402
from shoal.serve.cache.host import HostMover, HostStore, measure_link  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402
from shoal.serve.engine.build import concrete, engine_of  # noqa: E402

SMALL = ModelConfig(
    vocab_size=160,
    hidden=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_hidden=48,
    max_position=128,
    initializer_range=0.15,
)
LINK = HostLink(copy_s=1e-4, bytes_per_s=4e9, block_bytes=4096, layers=2)
SYNCHRONOUS = {"name": "swap", "asynchronous": "never", "keep_host_copies": False, "join": False}
GROUPS = {"name": "blockgroups", "init": 2, "block_size": 8}
SWITCHING = {"name": "fair", "policy": "uniform", "frequency": 0.3}


@pytest.fixture
def moved():
    cache = PagedCache(SMALL, 6, 4)
    host = HostStore(cache, 8)
    cache.blocks[0].copy_(torch.randn(cache.blocks[0].shape))
    return cache, host


def test_runs_are_copied_in_every_layer_and_back(moved):
    cache, host = moved
    before = cache.blocks[0].clone()
    mover = HostMover(cache, host)
    mover.begin((Transfer(0, "out", "a", (Copy(1, 3, 2), Copy(5, 0, 1))),))
    mover.wait((0,))
    assert torch.equal(host.blocks[0][:, :, 3:5], before[:, :, 1:3])
    assert torch.equal(host.blocks[0][:, :, 0], before[:, :, 5])
    mover.begin(
        (Transfer(1, "in", "a", (Copy(3, 0, 2),)), Transfer(2, "own", "b", (Copy(0, 4, 1),), (1,)))
    )
    mover.wait((1, 2))
    assert mover.over() == {0, 1, 2}
    assert mover.over() == frozenset()
    expected = before.clone()
    expected[:, :, 0:2] = before[:, :, 1:3]
    expected[:, :, 4] = before[:, :, 1]
    assert torch.equal(cache.blocks[0], expected)
    mover.close()


def test_an_emulated_link_takes_its_time(moved):
    cache, host = moved
    slept = []
    mover = HostMover(cache, host, link=LINK, clock=lambda: 0.0, sleep=slept.append)
    for number in range(2):
        mover.begin((Transfer(number, "out", "a", (Copy(0, 0, 1), Copy(2, 2, 3))),))
        mover.wait((number,))
    one = 2 * 2 * 1e-4 + 4 * 4096 / 4e9
    assert slept == pytest.approx([one, 2 * one]), "the second waits for the first"
    mover.close()


def test_what_fails_is_told(moved):
    cache, _ = moved
    mover = HostMover(cache)
    mover.begin((Transfer(0, "out", "a", (Copy(0, 0, 1),)),))
    with pytest.raises(ServeError, match="this engine has no host tier"):
        mover.wait((0,))
    mover.close()


def test_a_link_is_measured(moved):
    link = measure_link(*moved, seconds=0.01)
    assert (link.layers, link.block_bytes) == (2, 2 * 2 * 4 * 16 * 4)
    assert link.seconds((Copy(0, 0, 3),)) > 0


def asked(count=10, longest=60):
    source = random.Random(3)
    return [
        [source.randrange(160) for _ in range(source.randrange(2, longest))] for _ in range(count)
    ]


@pytest.mark.parametrize("kv", ["paged", GROUPS, "contiguous"], ids=str)
@pytest.mark.parametrize("preempt", ["swap", SYNCHRONOUS, "auto"], ids=str)
def test_tokens_are_those_without_preemption(kv, preempt, random_model, engine_for, serve_all):
    model = random_model(SMALL)
    prompts = asked()
    expected = serve_all(engine_for(model), prompts, max_tokens=16)
    engine = engine_for(
        model, kv_tokens=192, max_step_tokens=40, kv=kv, preempt=preempt, scheduler=SWITCHING
    )
    assert serve_all(engine, prompts, max_tokens=16) == expected
    stats = engine.stats()
    assert stats["preemptions_total"] > 0
    if preempt != "auto":
        assert stats["swap_in_blocks_total"] > 0
        assert stats["switch_seconds_total"] > 0


def test_host_and_cache_hold_the_same_at_every_resume(random_model):
    model = random_model(SMALL)
    job = ServeJob.model_validate(
        {
            "model": "m",
            "threads": 1,
            "kv_tokens": 192,
            "kv": GROUPS,
            "preempt": "swap",
            "scheduler": SWITCHING,
            "max_step_tokens": 40,
        }
    )
    engine, _, runner = engine_of(job, model, link=LINK)
    for number, prompt in enumerate(asked()):
        engine.add(Request(f"r{number}", prompt, len(prompt), SamplingParams(max_tokens=16)))
    swaps, resumed = engine.scheduler.preemption, 0
    settle = swaps.settle

    def compared(done, now):
        nonlocal resumed
        arriving = {
            moved.request
            for one, moved in swaps._under_way.items()
            if one in done and swaps._arriving.get(moved.request.id) == one
        }
        settle(done, now)
        for request in arriving:
            tokens = request.n_computed
            size = runner.cache.block_size
            (cache,), (host,) = runner.cache.blocks, runner.hooks["host_copies"].mover._host.blocks
            kept = swaps.host.blocks(request, 0, tokens)
            for place, (ours, theirs) in enumerate(zip(request.blocks, kept, strict=False)):
                filled = min(size, tokens - place * size)
                shape = (2, 2, size, -1)
                a, b = cache[:, :, ours].reshape(shape), host[:, :, theirs].reshape(shape)
                assert torch.equal(a[:, :, :filled], b[:, :, :filled])
            resumed += 1

    swaps.settle = compared
    while engine.busy:
        engine.step()
    assert resumed > 3


def test_the_simulator_plans_the_very_steps_of_the_engine(random_model):
    """Where nothing depends on time: synchronous copies, all requests there at the start."""
    model = random_model(SMALL)
    job = ServeJob.model_validate(
        {
            "model": "m",
            "threads": 1,
            "kv_tokens": 192,
            "kv": GROUPS,
            "preempt": {"name": "swap", "asynchronous": "never", "park": False},
            "scheduler": SWITCHING,
            "max_step_tokens": 40,
        }
    )
    engine, _, runner = engine_of(job, model, link=LINK)
    whole = concrete(job, model.config, torch.float32)
    cost = FittedStepCost(step=1e-3, token=1e-4, prompt_pair=0, decode_key=0, chunk=0)
    simulated = build_scheduler(whole, link=LINK)
    seen = {}
    for name, scheduler, executes in (
        ("engine", engine.scheduler, runner),
        ("simulator", simulated, SimulatedRunner(cost, LINK)),
    ):
        steps = seen[name] = []
        for number, prompt in enumerate(asked()):
            params = SamplingParams(max_tokens=16)
            scheduler.add(Request(f"r{number}", list(prompt), len(prompt), params))
        now = 0.0
        while scheduler.num_waiting or scheduler.num_running:
            step = scheduler.plan(now)
            result = executes.execute(step)
            now += result.seconds
            scheduler.commit(step, result, now)
            steps.append(
                (
                    [
                        (c.request.id, c.start, c.length, tuple(c.request.blocks))
                        for c in step.chunks
                    ],
                    step.transfers,
                    step.wait_for,
                )
            )
    assert seen["engine"] == seen["simulator"]
    assert sum(len(transfers) for _, transfers, _ in seen["engine"]) > 4


def test_a_runner_without_a_host_tier_says_so(random_model, engine_for):
    runner = engine_for(random_model(SMALL)).runner
    with pytest.raises(ServeError, match="give it a mover"):
        runner.execute(Step((), transfers=(Transfer(0, "out", "a", ()),)))


def test_a_host_tier_that_does_not_fit_is_refused(random_model, engine_for):
    with pytest.raises(ServeError, match="host_tokens = 1000000000000: expected at most"):
        engine_for(random_model(SMALL), preempt="swap", host_tokens=10**12)
