"""The target's first layers beside Dovetail's drafter: the same tokens, counted bytes."""

# ruff: noqa: F811 - fixtures of another file

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from test_dovetail import job_of, served  # noqa: E402, F401
from test_draft_model import known_costs  # noqa: E402, F401
from test_speculative import answers, prompts  # noqa: E402

from shoal.core.errors import ConfigError, ServeError  # noqa: E402
from shoal.ir import Copy, Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model.parameters import Parameters  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402
from shoal.serve.cache.attention import PagedAttention, RequestContext  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402
from shoal.serve.decode.dovetail.layers import FirstLayers, LaterCache, LaterLayers  # noqa: E402
from shoal.serve.decode.dovetail.part import DovetailSpeculative  # noqa: E402
from shoal.serve.decode.dovetail.shared_layers import SharedLayers  # noqa: E402
from shoal.serve.decode.dovetail.small_device import placed  # noqa: E402
from shoal.serve.decode.dovetail.steps import CacheCopy, CopyMode, RequestBatch, packed, unpacked  # noqa: E402
from shoal.serve.decode.dovetail.wire import HEAD_BYTES, MessageKind, layers_bytes  # noqa: E402
from shoal.serve.decode.trained import stored  # noqa: E402
from shoal.serve.engine.build import engine_of, prepare  # noqa: E402


class Near:
    """Computes the first layers in this process; what they are asked, and not how it crosses."""

    def __init__(self, served, dtype=torch.float64, ready=False):
        model, place, *_ = served
        job = ServeJob(model=str(place), kv_tokens=256, threads=1, speculative="ngram")
        embed = model.embed.weight.to(dtype)
        self.front = SharedLayers(Parameters(place, dtype), 1, embed, job, ready=ready)
        self.hidden, self.itemsize = model.config.hidden, embed.element_size()
        self.expected_bytes = self.crossed = 0

    def tell(self, head, body=b""):
        self.crossed += HEAD_BYTES + len(body)
        if head.kind == MessageKind.ROOM:
            self.front.room(head.a, head.b, head.c)
        else:
            self.made = self.front.states(head.a, unpacked(body, head.c, head.d))

    def states(self, rows):
        assert len(self.made) == rows
        raw = self.made.contiguous().view(torch.uint8).numpy().tobytes()
        self.crossed += HEAD_BYTES + len(raw)
        return raw


@pytest.fixture(scope="module")
def near(served):
    return Near(served)


BLOCKS, SIZE = 12, 4


@torch.inference_mode()
def test_states_are_those_of_the_whole_model_whatever_is_copied_in_the_cache(
    served,
    near,
):
    model, peer = served[0], near
    whole = PagedCache(model.config, BLOCKS, SIZE, dtype=torch.float64)
    later = LaterCache(FirstLayers(peer, 1), model.config, BLOCKS, SIZE, dtype=torch.float64)
    sides = ((model, whole), (LaterLayers(model, 1), later))
    source = np.random.default_rng(0)

    def step(*several):
        """Contexts, and how deep their rows are where they are trees."""
        contexts = [context for context, _ in several]
        place = np.concatenate(
            [one.start + (np.arange(one.length) if deep is None else deep) for one, deep in several]
        )
        slots = np.concatenate(
            [
                [one.blocks[at // SIZE] * SIZE + at % SIZE for at in range(one.start, one.stop)]
                for one in contexts
            ]
        )
        tokens = source.integers(0, 160, len(place))
        fed = torch.from_numpy(np.array([tokens, place, slots]))
        results = [
            mine.flat(fed[0], fed[1], PagedAttention(cache, contexts, fed[2], torch.float64))
            for mine, cache in sides
        ]
        assert torch.equal(*results)

    one, two = [3, 1, 7], [0, 5]
    step((RequestContext(0, 6, one), None), (RequestContext(0, 3, two), None))
    seen, depth = np.array([0b1, 0b11, 0b101, 0b1101]), np.array([0, 1, 1, 2])
    step((RequestContext(3, 1, two), None), (RequestContext(6, 4, one, seen), depth))
    for _, cache in sides:  # the path over rows 2 and 3 is kept, and a block goes elsewhere
        cache.keep([7 * SIZE, 7 * SIZE + 1], [1 * SIZE + 3, 7 * SIZE])
        cache.move([Copy(0, 9, 1), Copy(9, 10, 1)])
    two = [10, 5]
    step((RequestContext(9, 1, one), None), (RequestContext(4, 1, two), None))
    assert peer.crossed == peer.expected_bytes
    assert peer.front.nbytes == sum(
        one.numel() * 8 for one in model.blocks[0].parameters()
    ) + whole.nbytes - later.nbytes  # fmt: skip
    own = later.sized(3)
    assert len(peer.front._rooms) == 2
    del own
    gc.collect()
    step((RequestContext(10, 1, one), None))
    assert len(peer.front._rooms) == 1
    assert peer.crossed == peer.expected_bytes


@pytest.mark.slow
@torch.inference_mode()
def test_recorded_steps_of_the_layers_give_the_same_states(served, recordable):
    plain, quick = (Near(served, torch.float32, ready).front for ready in (False, True))
    source = np.random.default_rng(0)
    for front in (plain, quick):
        front.room(1, BLOCKS, 16)
    seen = np.array([0b1, 0b11, 0b101])
    blocks = [7, 2]

    def both(contexts, depth=()):
        tokens = source.integers(0, 160, sum(one.length for one in contexts))
        step = RequestBatch((), contexts, tokens, np.array(depth, dtype=np.int64))
        one, two = (front.states(1, step) for front in (plain, quick))
        torch.testing.assert_close(two, one, atol=1e-4, rtol=1e-4)

    both([RequestContext(0, 14, blocks)])
    for start in range(14, 20):
        both([RequestContext(start, 1, [11, 5]), RequestContext(start, 3, blocks, seen)], (0, 1, 1))
        both([RequestContext(start, 1, blocks)])
    recorded = quick._rooms[1].recorded
    played = {key for key, one in recorded.known.items() if one.tape is not None}
    assert played == {(2, 4), (1, 1)}
    assert not recorded.reasons


def test_a_step_is_read_as_it_was_written():
    moved = [CacheCopy(CopyMode.KEEP, [5, 6, 1, 2]), CacheCopy(CopyMode.MOVE, (3, 4, 2))]
    tree = np.array([1, 3, -(2**63)])  # a bit for each place, the last among them
    contexts = [
        RequestContext(9, 1, [4, 7, 2]),
        RequestContext(3, 3, [1, 8], tree),
        RequestContext(0, 2, [6]),
    ]
    step = RequestBatch(moved, contexts, np.arange(6), np.array([0, 1, 2]))
    body = packed(step, 4)
    result = unpacked(body, 3, 2)
    assert [(kind, list(numbers)) for kind, numbers in result.moved] == [
        (kind, list(numbers)) for kind, numbers in moved
    ]
    assert [(one.start, one.length, one.blocks) for one in result.contexts] == [
        (one.start, one.length, one.blocks) for one in contexts
    ]
    assert result.contexts[1].seen.tolist() == tree.tolist()
    assert result.positions().tolist() == [9, 3, 4, 5, 0, 1]
    assert result.slots(4).tolist() == [9, 7, 32, 33, 24, 25]
    outcome = layers_bytes(6, 0, requests=3, blocks=6, tree_rows=3, copies=2, numbers=7)
    assert len(body) + 2 * HEAD_BYTES == outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "fields"),
    [
        (False, {}),
        (True, {"max_step_tokens": 24, "kv": {"name": "paged", "block_size": 4}}),
        (True, {"kv_tokens": 320, "max_position": 200}),
        (False, {"kv": {"name": "blockgroups", "init": 4}, "kv_tokens": 320, "max_position": 200}),
    ],
)
def test_same_tokens_and_bytes_by_the_formula(
    overlap, fields, served, engine_for, serve_all
):  # fmt: skip
    request = prompts()
    known = answers(serve_all, engine_for(served[0]), request)
    job = job_of(served, overlap=overlap, depth=3, breadth=3, nodes=7, target_layers=1)
    engine = engine_of(ServeJob.model_validate({**job.model_dump(), **fields}), served[0])[0]
    engine.scheduler.drafting = FixedDrafting(7)
    drafter = engine.runner.drafter
    try:
        assert answers(serve_all, engine, request) == known
        assert drafter.link_bytes == drafter.expected_bytes
        stats = engine.stats()
        assert stats["draft_trees_total"] > 50
        assert bool(stats["preemptions_total"]) == ("kv_tokens" in fields)
    finally:
        drafter.close()


@pytest.mark.slow
def test_the_kernels_of_inference_give_the_same_tokens(served, engine_for, serve_all, recordable):
    request, model = prompts(), copy.deepcopy(served[0]).to(torch.float32)
    known = answers(serve_all, engine_for(copy.deepcopy(model)), request)
    job = job_of(served, depth=3, breadth=3, nodes=7, target_layers=1)
    job = job.model_copy(update={"precision": "fp32"})
    engine = engine_of(job, prepare(job, model))[0]
    engine.scheduler.drafting = FixedDrafting(7)
    drafter = engine.runner.drafter
    try:
        assert answers(serve_all, engine, request) == known
        assert drafter.link_bytes == drafter.expected_bytes
        recorded = engine.runner._recorded
        assert any(one is not None and one.tape is not None for one in recorded.known.values())
        assert not recorded.reasons
    finally:
        drafter.close()


@pytest.mark.slow
def test_the_host_lets_go_of_the_layers_and_a_death_is_named(served):
    model = copy.deepcopy(served[0])
    gone, stays = (weakref.ref(block.attention.qkv_proj) for block in model.blocks)
    engine = engine_of(job_of(served, depth=2, breadth=2, target_layers=1), model)[0]
    del model
    gc.collect()
    assert gone() is None
    assert stays() is not None
    assert len(engine.runner.cache.stores[0]) == 1
    drafter = engine.runner.drafter
    engine.add(Request("r0", [1, 2, 3], 3, SamplingParams(max_tokens=40)))
    engine.step()
    os.kill(drafter.process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ServeError, match=r"drafter \(process \d+\) ended with exit code -9"):
        while engine.busy:
            engine.step()
    assert time.monotonic() - began < 2
    drafter.close()


def room_of(served, **fields):
    """What is placed for a job of these fields and options, without a process."""
    fields, options = dict(fields), fields.pop("options")
    job = job_of(served, **options).model_copy(update={"max_position": 200, **fields})
    _, state = stored("dovetail", served[2], job)
    return placed(DovetailSpeculative(path=str(served[2]), **options), job, served[0], 2, state)


def test_memory_is_counted_and_auto_takes_what_fits(served):
    bare = room_of(served, options={})
    one = room_of(served, options={"target_layers": 1})
    config = served[0].config
    cache = 4096 * 2 * config.num_kv_heads * config.head_dim * 8
    layer = sum(part.numel() for part in served[0].blocks[0].parameters()) * 8 + cache
    assert one.nbytes - bare.nbytes == layer
    for cap, count in ((one.nbytes, 1), (one.nbytes - 1, 0), (10 * one.nbytes, 1)):
        result = room_of(served, options={"target_layers": "auto", "memory_cap": cap})
        assert result.target_layers == count
        assert result.nbytes == (one if count else bare).nbytes <= cap
    with pytest.raises(ConfigError, match=r"room for 0 layers of .*target_layers: 0, or a memory"):
        room_of(served, options={"target_layers": 1, "memory_cap": one.nbytes - 1})


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"target_layers": -1}, {}, "target_layers = -1"),
        ({"target_layers": "auto"}, {}, "auto with a memory_cap"),
        ({"target_layers": 2}, {}, "at most 1: model model has 2 layers"),
        ({"target_layers": 1}, {"host_tokens": 64}, "host_tokens = 64"),
        ({"target_layers": 1}, {"weights": "int8-g32"}, "weights = 'int8-g32'"),
    ],
)
def test_bad_options_are_named(options, fields, message, served):
    with pytest.raises(ConfigError, match=message):
        room_of(served, options=options, **fields)
