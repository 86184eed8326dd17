"""Tiers: budgets hold, blocks never overlap, a disk gives back what it was given."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DeviceMemoryError, MachineError, TierFullError

torch = pytest.importorskip("torch")

from shoal.core.sizes import bytes_of, human_bytes  # noqa: E402
from shoal.memory.tiers.device import DeviceScope  # noqa: E402
from shoal.memory.tiers.disk import SECTOR, DiskTier, staging  # noqa: E402
from shoal.memory.tiers.mover import EmulatedLink, Mover  # noqa: E402
from shoal.memory.tiers.tier import ALIGNMENT, BudgetedTier, TierAllocator  # noqa: E402

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64MiB", 64 * MIB), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("12", 12), (7, 7), ("3k", 3000)],
)
def test_sizes(text, nbytes):
    assert bytes_of(text) == nbytes


def test_what_is_no_size():
    with pytest.raises(ConfigError, match=r"64 meters.*such as 64MiB"):
        bytes_of("64 meters")
    assert [human_bytes(n) for n in (12, 999.6, 64 * MIB, 1.5e9, 2e16)] == [
        "12 B",
        "1.00 kB",
        "67.1 MB",
        "1.50 GB",
        "20.0 PB",
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * ALIGNMENT)), max_size=80))
def test_blocks_never_overlap_and_holes_come_back(operations):
    ledger = TierAllocator("device", 100 * ALIGNMENT)
    held = []
    for take, size in operations:
        if take:
            try:
                held.append(ledger.alloc(size, "x"))
            except TierFullError:
                assert ledger.largest_hole < ledger.rounded(size)
        elif held:
            ledger.free(held.pop(size % len(held)))
        spans = sorted((one.start, one.start + ledger.rounded(one.nbytes)) for one in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert ledger.stats.used == sum(b - a for a, b in spans) <= ledger.stats.peak
        assert not spans or spans[-1][1] <= ledger.capacity
    for one in held:
        ledger.free(one)
    assert ledger.largest_hole == ledger.room == ledger.capacity


def test_a_full_tier_tells_what_is_missing():
    tier = BudgetedTier("device", 4096)
    first, middle, last = (tier.alloc(1000, "x") for _ in range(3))
    tier.free(first)
    tier.free(last)
    with pytest.raises(TierFullError, match=r"weights needs 3.07 kB of 4.10 kB.*at least 4.10 kB"):
        tier.alloc(3000, "weights")
    tier.free(middle)
    tier.free(tier.alloc(4096, "all"))


def test_views_have_versions_of_their_own():
    tier = BudgetedTier("device", MIB)
    a, b = tier.alloc(64, "a"), tier.alloc(64, "b")
    x, y = (tier.view(one, torch.float32, (4, 4)) for one in (a, b))
    w = x.clone().requires_grad_()
    loss = (w * y.fill_(2)).sum()
    x.fill_(1)  # autograd saved y, and not x
    loss.backward()
    assert torch.equal(w.grad, y)
    assert tier.view(a, torch.float32, (16,)).tolist() == [1.0] * 16
    with pytest.raises(ConfigError, match=r"at most 64 bytes"):
        tier.view(a, torch.float64, (9,))


def test_a_scope_counts_what_lives():
    tier = BudgetedTier("device", MIB)
    with DeviceScope(tier) as scope:
        x = torch.ones(1000)
        y = x.view(10, 100)[2:]  # nothing new
        assert scope.live_bytes == 4000
        z = x * 2
        assert scope.live_bytes == 8000
        del x
        assert scope.live_bytes == 8000
        del y
        assert scope.live_bytes == 4000
        with scope.outside():
            kept = torch.ones(500)
        assert scope.live_bytes == 4000
        with pytest.raises(DeviceMemoryError, match=r"mul.* lies outside of device"):
            kept * 3
        scope.adopt(kept)
        assert float((kept * 3).sum()) == 1500
        with pytest.raises(DeviceMemoryError, match=r"aten.ones.*needs.*the largest results"):
            torch.ones(MIB // 4)
        del z, kept
        gc.collect()
        assert scope.live_bytes == 0
    assert tier.stats.used == 0
    assert tier.stats.peak >= 8000


def test_numbers_of_python_come_into_a_scope():
    with DeviceScope(BudgetedTier("device", 256)) as scope:
        x = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
        assert scope.live_bytes == 16
        assert int((x + 1).sum()) == 14
        with pytest.raises(DeviceMemoryError, match=r"lift_fresh.* needs 320"):
            torch.tensor(list(range(40)))


def test_a_scope_counts_what_autograd_saves():
    tier = BudgetedTier("device", MIB)
    with DeviceScope(tier) as scope:
        w = torch.ones(100, 100, requires_grad=True)
        h = (w * w).sin().sum()
        saved = scope.live_bytes
        assert saved >= 2 * 40000  # w and what sin needs
        h.backward()
        del h
        assert scope.live_bytes == 80000  # w and its gradient


def test_a_disk_gives_back_what_it_was_given(tmp_path):
    disk = DiskTier(tmp_path / "tier", MIB)
    blocks = [disk.alloc(n, f"b{n}") for n in (10, SECTOR, 3 * SECTOR + 1)]
    given = [
        torch.randint(0, 255, (disk.rounded(one.nbytes),), dtype=torch.uint8) for one in blocks
    ]
    with Mover("host-disk") as way, Mover("disk-host", depth=1) as back:
        for block, data in zip(blocks, given, strict=True):
            buffer = staging(block.nbytes)
            buffer.copy_(data)
            assert way.write(disk, block, buffer).wait() >= 0
        results = [staging(one.nbytes) for one in blocks]
        tickets = [back.read(disk, b, into) for b, into in zip(blocks, results, strict=True)]
        for ticket, into, data in zip(tickets, results, given, strict=True):
            ticket.wait()
            assert ticket.done()
            assert torch.equal(into, data)
    assert disk.stats.bytes_in == disk.stats.bytes_out == sum(one.nbytes for one in blocks)
    assert list((tmp_path / "tier").iterdir()) == []  # nothing outlives the process
    disk.close()


def test_bad_disks(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot be written"):
        DiskTier(tmp_path / "file", MIB)
    with pytest.raises(TierFullError, match=r"free and .* PB are needed"):
        DiskTier(tmp_path, 2**60)


def test_a_mover_tells_what_went_wrong():
    def fail():
        raise TierFullError("no room")

    with Mover("x") as way:
        ticket = way.submit(fail, 1)
        with pytest.raises(TierFullError, match=r"no room"):
            ticket.wait()
        target = torch.zeros(3)
        way.copy(torch.ones(3), target).wait()
        assert target.tolist() == [1, 1, 1]
    with pytest.raises(MachineError, match=r"closed"):
        way.submit(fail, 1)


def test_a_bounded_queue_holds_back():
    gate, started = threading.Event(), threading.Event()

    def stand():
        started.set()
        gate.wait()

    with Mover("x", depth=1) as way:
        way.submit(stand, 0)
        started.wait()
        way.submit(lambda: None, 0)
        late = threading.Thread(target=way.submit, args=(lambda: None, 0))
        late.start()
        late.join(0.05)
        assert late.is_alive()
        gate.set()
        late.join()


def test_a_link_takes_its_time():
    link = EmulatedLink(1e6, latency_s=0.001)
    first = link.book(1000, 5.0)
    assert link.book(2000, 4.0) - first == pytest.approx(0.003)
    with pytest.raises(ConfigError, match=r"above 0"):
        EmulatedLink(0)
