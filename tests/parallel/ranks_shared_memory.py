"""One rank of test_shared_memory.py: checks every collective, then meets a peer that dies."""

import os
import sys
import time
from pathlib import Path

import torch

from shoal.core.errors import RankError
from shoal.core.meter import Meter
from shoal.parallel.comm import mailboxes, shared_memory
from shoal.parallel.comm.collectives import TorchComm
from shoal.parallel.comm.mailboxes import Mailboxes
from shoal.parallel.comm.shared_memory import SharedMemory

# Small slots, so that a tensor takes several turns of both sets; and small rings, so that
# messages meet their ends, fill them, and are too large for them.
shared_memory._CHUNK = 4096
shared_memory._PART = 4096
mailboxes._RING = 8192

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZES = (0, 1, 2, 3, 1023, 1024, 1025, 5000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def part(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return (100 * torch.randn(size, generator=generator)).to(dtype)


def check(comm: TorchComm, *, exact: bool = True) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            total = part(0, size, dtype)
            for rank in range(1, WORLD):
                total += part(rank, size, dtype)
            mine = part(RANK, size, dtype)
            comm.all_reduce(mine, tag="test").wait()
            if exact:  # the order of the ranks, to the bit
                assert torch.equal(mine, total), (dtype, size)
            else:
                assert torch.allclose(mine.double(), total.double(), rtol=0.05, atol=3.0)
            root = size % WORLD
            mine = part(RANK, size, dtype)
            comm.broadcast(mine, root, tag="test").wait()
            assert torch.equal(mine, part(root, size, dtype)), (dtype, size)
            gathered = torch.empty(WORLD * size, dtype=dtype)
            comm.all_gather(gathered, part(RANK, size, dtype), tag="test").wait()
            parts = [part(rank, size, dtype) for rank in range(WORLD)]
            assert torch.equal(gathered, torch.cat(parts)), (dtype, size)
            # Rank r gives part(r) of its own to all: part i of the whole is theirs times i.
            whole = torch.cat([part(RANK, size, dtype) * i for i in range(WORLD)])
            expected = parts[0] * RANK
            for rank in range(1, WORLD):
                expected += parts[rank] * RANK
            mine = torch.empty(size, dtype=dtype)
            comm.reduce_scatter(mine, whole, tag="test").wait()
            if exact:
                assert torch.equal(mine, expected), (dtype, size)
            else:
                assert torch.allclose(mine.double(), expected.double(), rtol=0.05, atol=6.0)
    grid = torch.arange(6.0).view(2, 3).t()  # not contiguous: it takes the other road
    comm.all_reduce(grid, tag="test").wait()
    assert torch.equal(grid, WORLD * torch.arange(6.0).view(2, 3).t())
    # Ranks that come at very different times still meet.
    for turn in range(3):
        if turn % WORLD == RANK:
            time.sleep(0.05)
        one = torch.ones(2000)
        comm.all_reduce(one, tag="test").wait()
        assert bool((one == WORLD).all())


def begun(comm: TorchComm) -> None:
    """Sums that two ranks begin and wait for later, in any order, and more than there is room."""
    for early in (1, 2, 3, 9):
        sums = [part(RANK, 10 + number, torch.float32) for number in range(early)]
        pending = [comm.all_reduce(one, tag="test") for one in sums]
        gathered = torch.empty(WORLD * 5)  # another collective in between
        comm.all_gather(gathered, torch.full((5,), float(RANK)), tag="test").wait()
        for work in reversed(pending):
            work.wait()
        for number, one in enumerate(sums):
            total = part(0, 10 + number, torch.float32)
            for rank in range(1, WORLD):
                total += part(rank, 10 + number, torch.float32)
            assert torch.equal(one, total), (early, number)
    if WORLD == 2 and RANK == 0:  # nobody is waited for at the beginning
        one = torch.ones(3)
        work = comm.all_reduce(one, tag="test")
        assert one.tolist() == [1.0] * 3
        comm.send(one, 1, tag="go").wait()
        work.wait()
        assert one.tolist() == [2.0] * 3
    elif WORLD == 2:
        comm.receive(torch.empty(3), 0, tag="go").wait()
        comm.all_reduce(torch.ones(3), tag="test").wait()


def ring_and_gloo(comm: TorchComm) -> None:
    """Many messages, small and large, before the receiver looks: tags in any order."""
    following, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    sizes = (0, 1, 7, 300, 900, 1100, 5000)
    for dtype in DTYPES:
        for turn in range(3):
            sent = [
                comm.send(part(RANK, size + turn, dtype), following, tag=tag)
                for size in sizes
                for tag in ("x", "y")
            ]
            late = {
                (size, tag): torch.empty(size + turn, dtype=dtype)
                for tag in ("y", "x")
                for size in sizes
            }
            # Half of them are asked for before they are looked at, in one order ...
            early = [
                comm.receive(out, before, tag=tag) for (_, tag), out in late.items() if tag == "y"
            ]
            # ... and waited for in another.
            for (_, tag), out in late.items():
                if tag == "x":
                    comm.receive(out, before, tag=tag).wait()
            for work in reversed(early):
                work.wait()
            for (size, tag), out in late.items():
                assert torch.equal(out, part(before, size + turn, dtype)), (dtype, size, tag)
            for work in sent:
                work.wait()
    # More than there is room for even of headers: none is lost, the sender need not wait.
    sent = [comm.send(torch.full((200,), float(n)), following, tag="many") for n in range(400)]
    for n in range(400):
        got = torch.empty(200)
        comm.receive(got, before, tag="many").wait()
        assert bool((got == n).all())
    for work in sent:
        work.wait()
    comm.barrier()


def refused(comm: TorchComm) -> None:
    """A message of another size; a tensor with holes."""
    following, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    work = comm.send(torch.ones(3), following, tag="size")
    try:
        comm.receive(torch.empty(4), before, tag="size").wait()
        raise AssertionError("3 numbers are not 4")
    except RankError as error:
        assert "a message of 12 bytes, 16 were awaited" in str(error), error
    work.wait()
    try:
        comm.send(torch.ones(4, 2).t(), following, tag="holes")
        raise AssertionError("it is not contiguous")
    except RankError as error:
        assert "view" in str(error), error
    comm.barrier()


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    with Meter([]) as meter:
        comm = TorchComm.from_environment(
            meter, rendezvous=f"file://{out}/meet", timeout_s=60.0, beats=out
        )
        assert comm.shared is not None
        comm.barrier()  # the first rank takes the name away when all have opened it
        mapped = [
            row
            for row in Path("/proc/self/maps").read_text().splitlines()
            if "/dev/shm/shoal-" in row
        ]
        assert mapped
        assert all(row.endswith("(deleted)") for row in mapped), "it has no name any more"
        check(comm)
        begun(comm)
        assert comm.mailboxes is not None
        ring_and_gloo(comm)
        refused(comm)
        reserve = os.posix_fallocate

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        # No memory for the rings of rank 0: what it sends goes by Gloo.
        os.posix_fallocate = full if RANK == 0 else reserve
        comm.mailboxes = Mailboxes.join(RANK, WORLD, 60.0)
        assert comm.mailboxes is None, "not even for the counters"
        os.posix_fallocate = reserve
        comm.mailboxes = Mailboxes.join(RANK, WORLD, 60.0)
        os.posix_fallocate = full if RANK == 0 else reserve
        ring_and_gloo(comm)
        os.posix_fallocate = reserve
        comm.mailboxes = Mailboxes.join(RANK, WORLD, 60.0)
        quiet = TorchComm.from_environment(meter, shared_memory=False)
        assert quiet.shared is None
        assert quiet.mailboxes is None
        check(quiet, exact=False)
        ring_and_gloo(quiet)

        shared_memory.SHARED_MEMORY = out / "missing" if RANK == 0 else out
        assert SharedMemory.join(RANK, WORLD, 60.0) is None, "no file system: nobody joins"
        shared_memory.SHARED_MEMORY = Path("/dev/shm")
        if RANK == 1:
            shared_memory._namespace = lambda: "another container"
        assert SharedMemory.join(RANK, WORLD, 60.0) is None, "one cannot open it: nobody joins"

        comm.shared.timeout_s = 0.3
        if RANK == 0:
            comm.guard("barrier", comm.shared.barrier)
            try:
                comm.guard("barrier", comm.shared.barrier)  # rank 1 sleeps
            except RankError as late:
                assert "did not come in 0.3 s" in str(late), late
            comm.shared.timeout_s = 60.0
            comm.mailboxes.timeout_s = 0.3
            try:
                comm.receive(torch.ones(4), 1, tag="never").wait()
            except RankError as late:
                assert "rank 1 did not come in 0.3 s" in str(late), late
            comm.mailboxes.timeout_s = 60.0
            (out / "told").touch()
            try:
                comm.receive(torch.ones(4), 1, tag="never").wait()
                raise AssertionError("rank 1 has ended")
            except RankError as gone:
                assert "rank 1 has ended" in str(gone), gone
            try:
                comm.all_reduce(torch.ones(4), tag="test").wait()
                raise AssertionError("rank 1 has ended")
            except RankError as gone:
                assert "rank 1 has ended" in str(gone), gone
                assert "waiting for rank" in str(gone), gone
        else:
            comm.guard("barrier", comm.shared.barrier)
            while RANK == 1 and not (out / "told").exists():
                time.sleep(0.01)
        (out / f"done-{RANK}").touch()
    os._exit(0)  # Gloo's own goodbye would wait for the peer


main()
