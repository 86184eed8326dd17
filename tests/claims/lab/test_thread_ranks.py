"""Every operation between threads equals torch on the stacked data; errors end all ranks."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import ConfigError, PlanError, RankError
from shoal.core.meter import Meter
from shoal.ir import Parallel
from shoal.parallel.comm.agree import agree
from shoal.parallel.comm.ranks import ranks_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)

worlds = st.integers(2, 5)
dtypes = st.sampled_from(DTYPES)


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * salt + rank)
    return (10 * torch.randn(shape, generator=source, dtype=torch.float64)).to(dtype)


def total(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """In rank order, as all sums are taken."""
    result = data(0, shape, dtype)
    for rank in range(1, world):
        result = result + data(rank, shape, dtype)
    return result


def sent(meter: Meter, op: str, scope: str = "loopback", tag: str = "t") -> float:
    return meter.totals().get(f"wire_bytes{{op={op},scope={scope},tag={tag}}}", 0.0)


@settings(max_examples=25, deadline=None)
@given(world=worlds, dtype=dtypes, n=st.integers(0, 5), m=st.integers(1, 3), root=st.integers(0, 9))
def test_collectives_equal_stacked_torch(
    world: int, dtype: torch.dtype, n: int, m: int, root: int
) -> None:
    root %= world
    part, whole = (n, m), (world * n, m)
    stack = torch.stack([data(r, part, dtype) for r in range(world)])
    sums = total(world, whole, dtype)

    def run(comm: ThreadComm) -> None:
        r, w = comm.rank, comm.world

        x = data(r, whole, dtype)
        comm.all_reduce(x, tag="t").wait()
        assert torch.equal(x, sums)
        assert sent(comm.meter, "all_reduce") == pytest.approx(2 * x.nbytes * (w - 1) / w)

        x = data(r, part, dtype)
        comm.all_reduce(x, tag="m", op="max").wait()
        assert torch.equal(x, stack.amax(0))

        x = data(r, part, dtype)
        comm.broadcast(x, root, tag="t").wait()
        assert torch.equal(x, stack[root])
        assert sent(comm.meter, "broadcast") == pytest.approx(x.nbytes * (w - 1) / w)

        x = data(r, whole, dtype)
        comm.reduce(x, root, tag="t").wait()
        assert r != root or torch.equal(x, sums)
        assert sent(comm.meter, "reduce") == pytest.approx(x.nbytes * (w - 1) / w)

        out = torch.empty(whole, dtype=dtype)
        comm.all_gather(out, data(r, part, dtype), tag="t").wait()
        assert torch.equal(out, stack.flatten(0, 1))
        assert sent(comm.meter, "all_gather") == pytest.approx(out.nbytes * (w - 1) / w)

        out = torch.empty(part, dtype=dtype)
        comm.reduce_scatter(out, data(r, whole, dtype), tag="t").wait()
        assert torch.equal(out, sums[r * n : (r + 1) * n])
        assert sent(comm.meter, "reduce_scatter") == pytest.approx(w * out.nbytes * (w - 1) / w)

        # Rank a sends b rows of its own to rank b.
        outs = [torch.empty((r, m), dtype=dtype) for _ in range(w)]
        xs = [data(r, (peer, m), dtype, salt=peer) for peer in range(w)]
        comm.all_to_all(outs, xs, tag="t").wait()
        for peer, out in enumerate(outs):
            assert torch.equal(out, data(peer, (r, m), dtype, salt=r))
        others = sum(x.nbytes for peer, x in enumerate(xs) if peer != r)
        assert sent(comm.meter, "all_to_all") == others

    run_ranks(world, run)


@settings(max_examples=15, deadline=None)
@given(world=worlds, dtype=dtypes, data_=st.data())
def test_messages_of_a_tag_arrive_in_order(
    world: int, dtype: torch.dtype, data_: st.DataObject
) -> None:
    order = data_.draw(st.permutations(["a", "a", "b", "c"]))

    def run(comm: ThreadComm) -> None:
        target, source = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
        pending = [
            comm.send(data(comm.rank, (3,), dtype, salt), target, tag=tag)
            for salt, tag in enumerate(["a", "a", "b", "c"])
        ]
        salts = {"a": iter([0, 1]), "b": iter([2]), "c": iter([3])}
        for tag in order:
            out = torch.empty(3, dtype=dtype)
            comm.receive(out, source, tag=tag).wait()
            assert torch.equal(out, data(source, (3,), dtype, next(salts[tag])))
        for work in pending:
            work.wait()
        nbytes = 3 * dtype.itemsize
        assert sent(comm.meter, "send", tag="a") == 2 * nbytes
        assert sent(comm.meter, "send", tag="b") == nbytes

    run_ranks(world, run)


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(5)),
    cut=st.integers(1, 4),
    per_node=st.integers(1, 5),
)
def test_groups(order: list[int], cut: int, per_node: int) -> None:
    groups = [tuple(sorted(order[:cut])), tuple(sorted(order[cut:]))]

    def run(comm: ThreadComm) -> None:
        group = comm.split(groups)
        mine = next(g for g in groups if comm.rank in g)
        assert group.ranks == mine
        assert (group.rank, group.world) == (mine.index(comm.rank), len(mine))
        x = torch.tensor([float(comm.rank)])
        group.all_reduce(x, tag="t").wait()
        assert float(x) == sum(mine)
        out = torch.empty(len(mine))
        group.all_gather(out, torch.tensor([float(comm.rank)]), tag="g").wait()
        assert out.tolist() == list(mine)
        # The same ranks as pairs of a group of the group.
        single = group.split([[i] for i in range(group.world)])
        assert (single.ranks, single.world) == ((comm.rank,), 1)
        single.all_reduce(x, tag="s").wait()
        assert not [key for key in comm.meter.totals() if "tag=s" in key]
        following = mine[(group.rank + 1) % len(mine)]
        scope = "loopback" if comm.rank // per_node == following // per_node else "node"
        expected = 2 * 4 * (len(mine) - 1) / len(mine)
        assert sent(comm.meter, "all_reduce", scope) == pytest.approx(expected)

    run_ranks(5, run, ranks_per_node=per_node)


def test_pairs_are_counted_by_their_own_link() -> None:
    def run(comm: ThreadComm) -> dict[str, float]:
        xs = [torch.ones(1 + peer) for peer in range(4)]
        outs = [torch.empty(1 + comm.rank) for _ in range(4)]
        comm.all_to_all(outs, xs, tag="t").wait()
        return comm.meter.totals()

    totals = run_ranks(4, run, ranks_per_node=2)
    assert totals[0] == {
        "wire_bytes{op=all_to_all,scope=loopback,tag=t}": 4.0 * 2,
        "wire_bytes{op=all_to_all,scope=node,tag=t}": 4.0 * (3 + 4),
    }


def test_ranks_share_a_meter_if_they_are_given_one() -> None:
    meter = Meter()
    run_ranks(3, lambda c: c.all_reduce(torch.ones(3), tag="t").wait(), meter=meter)
    assert sent(meter, "all_reduce") == 3 * 2 * 12 * 2 / 3


def test_inside_backward() -> None:
    def run(comm: ThreadComm) -> torch.Tensor:
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
        for _ in range(3):
            (Summed.apply(x) * (comm.rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    for gradient in run_ranks(4, run):
        assert gradient.tolist() == [30.0, 30.0]


def test_an_error_ends_all_ranks() -> None:
    def fails(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise ValueError("one bad rank")
        comm.all_reduce(torch.ones(1), tag="t").wait()

    begin = time.monotonic()
    with pytest.raises(ValueError, match="one bad rank") as caught:
        run_ranks(4, fails)
    assert caught.value.__notes__ == ["on rank 1 of 4"]

    def refuses(comm: ThreadComm) -> None:
        if comm.rank == 2:
            raise ConfigError("lr = -1: expected more")
        comm.receive(torch.ones(1), 2, tag="t").wait()

    with pytest.raises(ConfigError, match="rank 2: lr = -1"):
        run_ranks(3, refuses)
    assert time.monotonic() - begin < 30, "nobody waits for the timeout"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            lambda c: None if c.rank == 1 else c.barrier(),
            r"rank 0 in barrier of ranks \[0, 1, 2\], rank 1 has ended, rank 2 in barrier",
        ),
        (
            lambda c: c.send(torch.ones(1), (c.rank + 1) % 3, tag="ring").wait(),
            "rank 0 in send to 1 'ring', rank 1 in send to 2 'ring'",
        ),
        (
            lambda c: c.all_reduce(torch.ones(2 + (c.rank == 1)), tag="t").wait(),
            r"asks for all_reduce 't' \(\d,\) float32 sum where rank \d asks for",
        ),
        (
            lambda c: c.barrier() if c.rank else c.all_reduce(torch.ones(2), tag="t").wait(),
            "all ranks must make the same calls in order",
        ),
        (
            lambda c: (
                c.send(torch.ones(3), 1, tag="t").wait()
                if c.rank == 0
                else c.receive(torch.ones(4), 0, tag="t").wait()
                if c.rank == 1
                else None
            ),
            r"send 't' from rank 0 to rank 1 = 'float32\[3\] into float32\[4\]'",
        ),
        (lambda c: c.split([[0, 1]]), "every rank of 0 to 2 in exactly one group"),
        (lambda c: c.split([[1, 0], [2]]), "in rank order"),
        (lambda c: c.all_gather(torch.ones(5), torch.ones(2), tag="t"), "3 times the other's"),
        (lambda c: c.broadcast(torch.ones(5), 3, tag="t"), "rank = 3: expected 0 to 2"),
        (lambda c: c.send(torch.ones(5), c.rank, tag="t"), "another rank than"),
        (lambda c: c.all_to_all([torch.ones(1)], [torch.ones(1)], tag="t"), "3 of each"),
    ],
)
def test_what_would_hang_is_an_error(function: Callable[[ThreadComm], object], says: str) -> None:
    with pytest.raises(RankError, match=says):
        run_ranks(3, function)


def test_a_rank_that_computes_for_too_long_is_named() -> None:
    def run(comm: ThreadComm) -> None:
        if comm.rank == 1:
            time.sleep(0.3)
        comm.barrier()

    with pytest.raises(RankError, match=r"waited 0\.05 s for barrier.*rank 1 computes"):
        run_ranks(2, run, timeout_s=0.05)


def test_agreement() -> None:
    value = {"lr": 0.1, "layers": [1, 2], "name": "é"}
    run_ranks(3, lambda c: agree(c, "job", value))

    def differ(comm: ThreadComm) -> None:
        own = {**value, "lr": 0.1 + (comm.rank == 2), "layers": [1, 2 + comm.rank // 2]}
        agree(comm, "job", own)

    says = r"job: ranks disagree, ranks 0, 1 against rank 2: layers\[1\]: 2 \| 3; lr: 0\.1 \| 1\.1"
    with pytest.raises(ConfigError, match=says):
        run_ranks(3, differ)
    with pytest.raises(ConfigError, match="rank 0 against rank 1; give all"):
        run_ranks(2, lambda c: agree(c, "job", "x" * (2**20 + c.rank)))


def test_ranks_of_every_axis() -> None:
    parallel = Parallel(pp=2, dp=2, cp=1, tp=2)
    ranks = run_ranks(8, lambda c: [part.ranks for part in ranks_of(c, parallel)[:6]])
    for rank, (world, tp, cp, pp, data_ranks, model) in enumerate(ranks):
        layout = parallel.attention()
        assert world == tuple(range(8))
        assert cp == (rank,)
        for own, axes in ((tp, ["tp"]), (pp, ["pp"]), (data_ranks, ["dp", "cp"])):
            assert own == layout.group_of(rank, *axes)
        assert sorted(model) == sorted(layout.group_of(rank, "pp", "tp"))
    with pytest.raises(PlanError, match="start 8 ranks, or plan for 4"):
        run_ranks(4, lambda c: ranks_of(c, parallel))
