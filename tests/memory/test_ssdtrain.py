"""SSDTrain: gradients to the bit, every storage written once, nothing left behind."""

from __future__ import annotations

import copy
import errno
import gc
import os
import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, MachineError, ModelError, TierFullError
from shoal.core.parts import table
from shoal.cost.shapes import find as shape_of
from shoal.ir import TrainJob, Work

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from shoal.memory.activations.records import SavedTensorHandle, ScopeTimes, choose_cut  # noqa: E402
from shoal.memory.activations.ssdtrain import SSDTrain, lifetime_years  # noqa: E402
from shoal.memory.streaming.superpipeline import wrap  # noqa: E402
from shoal.memory.tiers.device import DeviceScope  # noqa: E402
from shoal.memory.tiers.tier import BudgetedTier  # noqa: E402

WIDTH = 32


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.down(torch.tanh(q * k) * v)


class Stack(nn.Module):
    def __init__(self, n=5, *, again=None):
        super().__init__()
        torch.manual_seed(n)
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Part() for _ in range(n))
        self.head = nn.Linear(WIDTH, 20)
        self.again = again

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            again = self.again
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        return self.head(x)


class Shared(Stack):
    """Every block saves one table."""

    def forward(self, x):
        x = self.embed(x)
        table = torch.linspace(0, 1, 16 * 8 * WIDTH).view(16, 8, WIDTH)
        for block in self.blocks:
            x = block(x) * table
            x = block.down(x * table)
        return self.head(x)


@pytest.fixture
def tokens():
    return torch.randint(0, 20, (16, 8), generator=torch.Generator().manual_seed(1))


def left_on_disk(cache):
    """Bytes that stay taken when nothing is used any more.

    A collection that goes on in a thread of the cache makes one here return at once, with nothing
    collected: it is asked for again until there is nothing left.
    """
    for _ in range(200):
        gc.collect()
        cache.written()
        if not cache.disk.stats.used:
            break
        time.sleep(0.01)
    return cache.disk.stats.used


def loss_of(model, tokens):
    return model(tokens).logsumexp(-1).mean()


def same(model, whole):
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize("rate", [None, 2e6])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_are_those_of_keeping(tmp_path, tokens, again, rate):
    model = Stack(again=again)
    whole = copy.deepcopy(model)
    cache = SSDTrain(path=str(tmp_path), bytes_per_s=rate).apply(model)
    for _ in range(3):
        with cache:
            for _ in range(2):
                loss_of(model, tokens).backward()
        for _ in range(2):
            loss_of(whole, tokens).backward()
        same(model, whole)
        assert cache.disk.stats.used == 0
    assert cache.stats.offloaded > 0
    assert cache.cut is not None
    assert list(tmp_path.iterdir()) == []
    cache.close()


def test_what_all_blocks_save_does_not_lead_reading_astray(tmp_path, tokens, monkeypatch):
    model = Shared(6)
    whole = copy.deepcopy(model)
    cache = SSDTrain(path=str(tmp_path), adaptive=False, last=1).apply(model)
    order = []
    load = cache._load
    monkeypatch.setattr(
        cache,
        "_load",
        lambda entry: (
            order.append(max(s.index for s in entry.scopes)) if entry.loaded is None else None,
            load(entry),
        ),
    )
    with cache:
        loss = loss_of(model, tokens)
        for entry in list(cache._going):
            entry.ticket.wait()
        loss.backward()
    loss_of(whole, tokens).backward()
    same(model, whole)
    assert cache.stats.repeated >= 5
    # From the last scope to the first, each as it is wanted.
    assert order == sorted(order, reverse=True)
    cache.close()


def test_what_was_written_is_read(tmp_path, tokens):
    """Stores are given time to end, so nothing is forwarded and every byte comes from the disk."""
    model = Stack()
    whole = copy.deepcopy(model)
    cache = SSDTrain(path=str(tmp_path), adaptive=False, last=0).apply(model)
    with cache:
        loss = loss_of(model, tokens)
        for entry in list(cache._going):
            entry.ticket.wait()
        loss.backward()
    loss_of(whole, tokens).backward()
    same(model, whole)
    assert cache.stats.forwarded == 0
    assert cache.stats.written_bytes == cache.disk.stats.bytes_in > 0
    # What something else still holds need not be read.
    assert 0 < cache.stats.read_bytes <= cache.stats.written_bytes
    cache.close()


def test_a_storage_is_written_once(tmp_path, tokens):
    model = Stack()
    cache = SSDTrain(path=str(tmp_path), adaptive=False, min_bytes=1, last=0).apply(model)
    seen, offloaded = [], 0
    pack = cache.pack

    def spied(tensor):
        nonlocal offloaded
        handle = pack(tensor)
        if isinstance(handle, SavedTensorHandle):
            offloaded += 1
            seen.append(tensor.detach())  # alive: no address comes twice
        return handle

    cache.pack = spied
    with cache:
        loss_of(model, tokens).backward()
    different = {tensor.untyped_storage().data_ptr() for tensor in seen}
    assert cache.stats.repeated == offloaded - len(different) > 0
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not weights & different
    cache.close()


def test_addresses_that_come_again_are_not_mixed_up(tmp_path):
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    cache = SSDTrain(path=str(tmp_path), adaptive=False, min_bytes=1, last=0).apply(model)
    x = torch.linspace(0, 1, 2048, requires_grad=True)
    with cache:
        total = x.sum() * 0
        for i in range(8):  # each square is freed, and the next one takes its place
            total = total + (x * i).square().square().sum()
            for entry in list(cache._going):
                entry.ticket.wait()
        total.backward()
    expected = sum(4 * (x.detach() * i) ** 3 * i for i in range(8))
    assert torch.allclose(x.grad, expected)
    cache.close()


def test_a_graph_is_gone_through_twice(tmp_path, tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    cache = SSDTrain(path=str(tmp_path), adaptive=False).apply(model)
    with cache:
        for one in (model, whole):
            loss = loss_of(one, tokens)
            for entry in list(cache._going):
                entry.ticket.wait()
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
    same(model, whole)
    assert cache.disk.stats.used == 0
    cache.close()


def test_micro_batches_forward_and_then_back(tmp_path, tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    cache = SSDTrain(path=str(tmp_path), adaptive=False).apply(model)
    with cache:
        losses = []
        for number in range(3):
            cache.microbatch(number)
            losses.append(loss_of(model, tokens + number - number))
        for loss in losses:
            loss.backward()
    for loss in [loss_of(whole, tokens) for _ in range(3)]:
        loss.backward()
    same(model, whole)
    cache.close()


def test_the_peak_falls(tmp_path, tokens):
    peaks = []
    for offload in (False, True):
        model = Stack(8)
        cache = SSDTrain(path=str(tmp_path), adaptive=False).apply(model)
        tier = BudgetedTier("device", 2**26)
        many = tokens.repeat(4, 4)
        with DeviceScope(tier, strict=False) as scope:
            scope.adopt(many)
            if offload:
                with cache:
                    loss = loss_of(model, many)
                    # As a device would be that computes for longer than this one.
                    cache.written()
                    live = scope.live_bytes
                    loss.backward()
            else:
                loss = loss_of(model, many)
                live = scope.live_bytes
                loss.backward()
        peaks.append(live)
        cache.close()
    assert peaks[1] < 0.4 * peaks[0]


def test_beside_a_window_of_blocks(tmp_path, tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    cache = SSDTrain(path=str(tmp_path), adaptive=False).apply(model)
    with wrap(model, 2, 1, device="cpu"), cache:
        loss_of(model, tokens).backward()
    loss_of(whole, tokens).backward()
    same(model, whole)
    assert cache.stats.offloaded > 0
    cache.close()


@pytest.mark.slow
def test_what_is_written_to_after_it_was_saved_is_refused(tmp_path):
    model = Stack()
    cache = SSDTrain(path=str(tmp_path), adaptive=False, min_bytes=1).apply(model)
    x = torch.ones(1000, requires_grad=True)
    for small in (False, True):
        cache._min = 10**9 if small else 1
        with cache:
            y = x.exp()
            y.add_(1)
            with pytest.raises(ModelError, match=r"\[1000\].*modified in place.*version 1, and 0"):
                y.sum().backward()
            del y
    assert left_on_disk(cache) == 0
    cache.close()


@pytest.mark.slow
def test_a_full_disk_names_tensor_and_scope(tmp_path, tokens, monkeypatch):
    model = Stack()
    whole = copy.deepcopy(model)
    small = SSDTrain(path=str(tmp_path), capacity=30_000).apply(model)
    with (
        pytest.raises(TierFullError, match=r"disk: blocks.0: a tensor \[128, 32\].* needs"),
        small,
    ):
        loss_of(model, tokens)
    assert left_on_disk(small) == 0
    small.close()

    cache = SSDTrain(path=str(tmp_path), adaptive=False).apply(model)

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(TierFullError, match=r"is full: .*a tensor .* needs"), cache:
        loss = loss_of(model, tokens)
        for entry in list(cache._going):
            while not entry.ticket.done():
                pass
        loss.backward()
    monkeypatch.undo()
    loss = None
    model.zero_grad()
    with cache:
        loss_of(model, tokens).backward()
    loss_of(whole, tokens).backward()
    same(model, whole)
    assert left_on_disk(cache) == 0
    cache.close()


@pytest.mark.slow
def test_what_is_let_go_during_a_write_that_fails_gives_its_place_back(
    tmp_path, tokens, monkeypatch
):
    model = Stack()
    cache = SSDTrain(path=str(tmp_path), adaptive=False).apply(model)
    began, end = threading.Event(), threading.Event()

    def full(*_):
        began.set()
        end.wait()
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(TierFullError, match=r"is full: .*a tensor .* needs"), cache:
        loss = loss_of(model, tokens)
        began.wait()
        loss = None  # noqa: F841
        end.set()
        cache.written()
    monkeypatch.undo()
    assert left_on_disk(cache) == 0
    cache.close()


def test_out_of_place(tmp_path, tokens):
    cache = SSDTrain(path=str(tmp_path)).apply(Stack())
    with pytest.raises(MachineError, match=r"no step has begun"):
        cache.microbatch(0)
    with cache, pytest.raises(MachineError, match=r"begun already"):
        cache.__enter__()
    cache.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"depth": 0}, r"ssdtrain.depth = 0"),
        ({"last": -1}, r"ssdtrain.last = -1"),
        ({"bytes_per_s": 0}, r"bytes_per_s = 0"),
        ({"capacity": "many"}, r"such as 64MiB"),
        ({"adaptiv": True}, r"no such key"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises(ConfigError, match=told):
        table("activation").build({"name": "ssdtrain", **options})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=8))
@settings(max_examples=60)
def test_the_cut_is_the_most_that_is_written_in_time(blocks):
    made, scopes = 0.0, []
    for nbytes, seconds in blocks:
        made += seconds
        scopes.append([nbytes, made])
    needed = made
    for scope, (_, seconds) in zip(reversed(scopes), reversed(blocks), strict=True):
        scope.append(needed)
        needed += 2 * seconds
    times = [ScopeTimes(*scope) for scope in scopes]
    cut = choose_cut(times, 2.0, 4.0)

    def in_time(count):
        at = 0.0
        for scope in times[:count]:
            at = max(at, scope.made_s) + scope.nbytes / 2.0 if scope.nbytes else at
            if scope.nbytes and at > scope.needed_s - scope.nbytes / 4.0:
                return False
        return True

    assert in_time(cut.scopes)
    assert cut.nbytes == sum(scope.nbytes for scope in times[: cut.scopes])
    more = [n for n in range(cut.scopes + 1, len(times) + 1) if in_time(n)]
    assert all(sum(s.nbytes for s in times[:n]) == cut.nbytes for n in more)


def test_endurance():
    shape = shape_of("shoal-4m")
    work = Work(shape=shape, job=TrainJob(model="shoal-4m", steps=1))
    (note,) = SSDTrain().notes(work, 1.0)
    assert re.search(r"up to \d.* MB a step .* out in \S+ years", note)
    assert "lower last" in SSDTrain(last=99).notes(work, 1.0)[0]
    year = 365.25 * 86400
    assert lifetime_years(600e12, 600e12 / year, 1.0) == pytest.approx(1.0)
    assert lifetime_years(1.0, 0, 1.0) == float("inf")
