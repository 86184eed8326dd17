"""One of four ranks of test_comm_ranks.py: every operation of TorchComm, whole and in groups."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from ranks_sharding import train
from safetensors.torch import save_file

from shoal.core.errors import ConfigError, RankError
from shoal.core.meter import Meter
from shoal.ir import Parallel
from shoal.parallel.comm.agree import agree
from shoal.parallel.comm.collectives import TorchComm
from shoal.parallel.comm.ranks import ranks_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * salt + rank)
    return (10 * torch.randn(shape, generator=source, dtype=torch.float64)).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(found, expected)
    else:  # another order of sums
        torch.testing.assert_close(found.double(), expected.double(), rtol=0.02, atol=0.2)


def check(
    comm: TorchComm, *, exact: bool, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
) -> None:
    """Every operation, on the members' numbers in the job."""
    r, w, ranks = comm.rank, comm.world, comm.ranks
    for dtype in dtypes:
        for n in (0, 700):
            part, whole = (n, 2), (w * n, 2)
            stack = torch.stack([data(rank, part, dtype) for rank in ranks])
            sums = data(ranks[0], whole, dtype)
            for rank in ranks[1:]:
                sums = sums + data(rank, whole, dtype)
            mine = data(ranks[r], whole, dtype)

            x = mine.clone()
            comm.all_reduce(x, tag="t").wait()
            same(x, sums, exact)

            x = data(ranks[r], part, dtype)
            comm.all_reduce(x, tag="t", op="max").wait()
            assert torch.equal(x, stack.amax(0))

            x = data(ranks[r], part, dtype)
            comm.broadcast(x, w - 1, tag="t").wait()
            assert torch.equal(x, stack[-1])

            x = mine.clone()
            comm.reduce(x, w - 1, tag="t").wait()
            if r == w - 1:
                same(x, sums, False)

            out = torch.empty(whole, dtype=dtype)
            comm.all_gather(out, data(ranks[r], part, dtype), tag="t").wait()
            assert torch.equal(out, stack.flatten(0, 1))

            out = torch.empty(part, dtype=dtype)
            comm.reduce_scatter(out, mine, tag="t").wait()
            same(out, sums[r * n : (r + 1) * n], exact)

            outs = [torch.empty((r, 2), dtype=dtype) for _ in range(w)]
            xs = [data(ranks[r], (peer, 2), dtype, peer) for peer in range(w)]
            comm.all_to_all(outs, xs, tag="t").wait()
            for peer, out in enumerate(outs):
                assert torch.equal(out, data(ranks[peer], (r, 2), dtype, r))
    comm.barrier()


def messages(comm: TorchComm) -> None:
    """Tags find their receiver whatever the order; those of one tag stay in order."""
    following, before = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    for dtype in DTYPES:
        sent = [
            comm.send(data(comm.ranks[comm.rank], (5,), dtype, salt), following, tag=tag)
            for salt, tag in enumerate(["a", "a", "b"])
        ]
        for salt, tag in ((2, "b"), (0, "a"), (1, "a")):
            out = torch.empty(5, dtype=dtype)
            comm.receive(out, before, tag=tag).wait()
            assert torch.equal(out, data(comm.ranks[before], (5,), dtype, salt))
        for work in sent:
            work.wait()


def backward(comm: TorchComm) -> None:
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            comm.all_reduce(gradient, tag="t").wait()
            return gradient

    x = torch.ones(2, requires_grad=True)
    (Summed.apply(x) * (comm.rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [10.0, 10.0]


def disagreement(comm: TorchComm) -> None:
    agree(comm, "job", {"lr": 0.1})
    try:
        agree(comm, "job", {"lr": 0.1 + (comm.rank == 3)})
    except ConfigError as error:
        assert "ranks 0, 1, 2 against rank 3: lr: 0.1 | 1.1" in str(error), error
    else:
        raise AssertionError("rank 3 disagrees")


def refusals(comm: TorchComm) -> None:
    for call in (
        lambda: comm.split([[0, 1]]),
        lambda: comm.split([[3, 0, 1], [2]]),
        lambda: comm.send(torch.ones(1), comm.rank, tag="t"),
        lambda: comm.broadcast(torch.ones(1), 4, tag="t"),
        lambda: comm.all_gather(torch.ones(5), torch.ones(2), tag="t"),
    ):
        try:
            call()
        except RankError as error:
            assert "expected" in str(error), error
        else:
            raise AssertionError("refused by nobody")


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    with Meter() as meter:
        comm = TorchComm.from_environment(
            meter, rendezvous=f"file://{out}/meet", beats=out, timeout_s=60.0
        )
        assert comm.ranks_per_node == 2
        check(comm, exact=comm.shared is not None, dtypes=DTYPES)
        ranks = ranks_of(comm, Parallel(dp=2, tp=2))
        assert ranks.data.ranks == ((0, 2) if comm.rank % 2 == 0 else (1, 3))
        assert ranks.tp.world == 2
        assert ranks.cp.world == ranks.pp.world == 1
        assert ranks.model is ranks.tp
        assert comm.split([range(4)]) is comm
        for group in (ranks.tp, ranks.data, ranks.cp):
            assert isinstance(group, TorchComm)
            check(group, exact=comm.shared is not None)
        uneven = comm.split([[0, 1, 3], [2]])
        check(uneven, exact=comm.shared is not None)
        halves = comm.split([[0, 3], [1, 2]])
        inner = halves.split([[0], [1]])
        assert inner.ranks == (comm.rank,)
        pairs = comm.split([[0, 1], [2, 3]]).split([[0, 1]])
        assert pairs.ranks == ((0, 1) if comm.rank < 2 else (2, 3))
        messages(comm)
        messages(ranks.tp)
        quiet = TorchComm.from_environment(meter, shared_memory=False)
        check(quiet, exact=False, dtypes=DTYPES)
        backward(comm)
        disagreement(comm)
        refusals(comm)

        counted = Meter()
        own = TorchComm.from_environment(counted, shared_memory=False)
        own.all_reduce(torch.ones(100), tag="ring").wait()
        scope = "loopback" if comm.rank % 2 == 0 else "node"
        assert counted.totals() == {f"wire_bytes{{op=all_reduce,scope={scope},tag=ring}}": 600.0}

        # Sharding inside sub-groups, as it is beside tensor parallelism; and hybrid over all.
        for name, group, shard in (
            ("zero3", ranks.data, "zero3"),
            ("zero2", ranks.data, "zero2"),
            ("zero1", ranks.data, "zero1"),
            ("hybrid", comm, "hybrid"),
        ):
            result = train(shard, "adamw", group)
            save_file(result, out / f"{name}-{comm.rank}.safetensors")
        comm.barrier()
        comm.close()
    (out / f"done-{comm.rank}").touch()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
