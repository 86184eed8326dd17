"""Virtual time on links: formulas of the ring algorithms, contention, and no say of threads."""

import threading
import time

import pytest
import torch

from shoal.claims.lab.thread_links import LinkComm, Links, run_linked
from shoal.core.errors import ConfigError, RankError

LATENCY, BANDWIDTH = 1e-3, 1e6
MESH = Links(latency_s=LATENCY, bandwidth=BANDWIDTH)


def times(world: int, links: Links, function: object) -> list[float]:
    def run(comm: LinkComm) -> float:
        function(comm)  # type: ignore[operator]
        return comm.now

    return run_linked(world, run, links)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_take_the_time_of_their_ring(world: int) -> None:
    n = 1200 * world  # float32: 4800 bytes a rank's part
    part = 4.0 * n / world / BANDWIDTH + LATENCY

    def check(steps: float, call: object) -> None:
        for result in times(world, MESH, call):
            assert result == pytest.approx(steps * part)

    check(2 * (world - 1), lambda c: c.all_reduce(torch.ones(n), tag="x").wait())
    check(
        world - 1,
        lambda c: c.all_gather(torch.empty(n), torch.ones(n // world), tag="x").wait(),
    )
    check(
        world - 1,
        lambda c: c.reduce_scatter(torch.empty(n // world), torch.ones(n), tag="x").wait(),
    )
    # All peers at once, over links of their own.
    check(
        1,
        lambda c: c.all_to_all(
            [torch.empty(1200) for _ in range(world)],
            [torch.ones(1200) for _ in range(world)],
            tag="x",
        ).wait(),
    )
    for result in times(world, MESH, lambda c: c.barrier()):
        assert result == pytest.approx(2 * (world - 1) * LATENCY)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_chains_are_pipelined(op: str) -> None:
    world, n = 4, 4000
    piece = 4.0 * n / world / BANDWIDTH
    ends = times(world, MESH, lambda c: getattr(c, op)(torch.ones(n), 1, tag="x").wait())
    last = 0 if op == "broadcast" else 1  # the chain is 1 2 3 0, or ends in 1
    assert ends[last] == pytest.approx((2 * world - 2) * piece + (world - 1) * LATENCY)
    assert max(ends) == ends[last]


def test_data_moves_and_overlaps_with_computation() -> None:
    def run(comm: LinkComm) -> tuple[float, float, torch.Tensor]:
        x = torch.full((1000,), float(comm.rank))
        pending = comm.all_reduce(x, tag="x")
        comm.compute(0.001)
        pending.wait()
        first = comm.now
        y = torch.ones(1000)
        pending = comm.all_reduce(y, tag="x")
        comm.compute(1.0)
        pending.wait()
        return first, comm.now, x

    for first, second, x in run_linked(2, run, MESH):
        assert first == pytest.approx(2 * (2000 / BANDWIDTH + LATENCY))  # longer than computing
        assert second == pytest.approx(first + 1.0)  # hidden behind it
        assert torch.equal(x, torch.ones(1000))


def exchange(comm: LinkComm, distance: int = 1) -> None:
    """Everybody sends 4000 bytes up and 4000 bytes down."""
    up, down = (comm.rank + distance) % comm.world, (comm.rank - distance) % comm.world
    out = [torch.empty(1000), torch.empty(1000)]
    pending = [
        comm.send(torch.ones(1000), up, tag="up"),
        comm.send(torch.ones(1000), down, tag="down"),
        comm.receive(out[0], down, tag="up"),
        comm.receive(out[1], up, tag="down"),
    ]
    for work in pending:
        work.wait()


def test_half_duplex_links_carry_one_direction_at_a_time() -> None:
    one = 4000 / BANDWIDTH
    full = times(4, MESH, exchange)
    half = times(4, Links(latency_s=LATENCY, bandwidth=BANDWIDTH, duplex="half"), exchange)
    assert full == pytest.approx([one + LATENCY] * 4)
    assert max(half) == pytest.approx(2 * one + LATENCY)


def test_a_ring_keeps_every_link_on_the_way() -> None:
    ring = Links(latency_s=LATENCY, bandwidth=BANDWIDTH, shape="ring")
    assert ring.way(0, 2, 5) == [(0, 1), (1, 2)]
    assert ring.way(0, 3, 5) == [(0, 4), (4, 3)]
    assert ring.way(3, 1, 4) == [(3, 0), (0, 1)], "upwards where both ways are equal"
    assert MESH.way(0, 3, 5) == [(0, 3)]
    one = 4000 / BANDWIDTH
    alone = times(
        5,
        ring,
        lambda c: (
            c.send(torch.ones(1000), 2, tag="x").wait()
            if c.rank == 0
            else c.receive(torch.empty(1000), 0, tag="x").wait()
            if c.rank == 2
            else None
        ),
    )
    assert alone == pytest.approx([one, 0.0, one + 2 * LATENCY, 0.0, 0.0])
    # Over distance 2 every link carries two messages in each direction.
    assert max(times(5, ring, lambda c: exchange(c, 2))) >= 2 * one + 2 * LATENCY


def test_nodes_have_slower_links_between_them() -> None:
    links = Links(
        latency_s=LATENCY,
        bandwidth=BANDWIDTH,
        ranks_per_node=2,
        node_latency_s=0.1,
        node_bandwidth=1e5,
    )
    assert links.seconds(0, 1, 1000) == pytest.approx(0.002)
    assert links.seconds(1, 2, 1000) == pytest.approx(0.11)
    assert links.seconds(1, 1, 1000) == 0.0

    def run(comm: LinkComm) -> tuple[float, dict[str, float]]:
        comm.split([[0, 1], [2, 3]]).all_reduce(torch.ones(500), tag="in").wait()
        here = comm.now
        comm.all_reduce(torch.ones(1000), tag="all").wait()
        return here, comm.meter.totals()

    result = run_linked(4, run, links)
    assert [here for here, _ in result] == pytest.approx([0.004] * 4)
    scopes = [
        key.split("scope=")[1].split(",")[0] for _, t in result for key in t if "tag=all" in key
    ]
    assert scopes == ["loopback", "node", "loopback", "node"]


def test_threads_have_no_say_in_the_times() -> None:
    lock = threading.Lock()
    order = [0]

    def run(comm: LinkComm, naps: list[float]) -> list[float]:
        results = []
        group = comm.split([[0, 2, 4], [1, 3]])
        for turn in range(4):
            time.sleep(naps[(comm.rank + turn) % len(naps)])
            comm.compute(1e-3 * ((comm.rank * 7 + turn) % 5))
            pending = group.all_reduce(torch.ones(300), tag="g")
            exchange(comm, 2)
            pending.wait()
            comm.all_gather(torch.empty(500), torch.ones(100), tag="w").wait()
            results.append(comm.now)
            with lock:
                order[0] += 1
        return results

    ring = Links(latency_s=LATENCY, bandwidth=BANDWIDTH, shape="ring", duplex="half")
    naps = ([0.0], [0.004, 0.0, 0.002], [0.0, 0.003])
    results = [run_linked(5, lambda c, n=nap: run(c, n), ring) for nap in naps]
    assert results[0] == results[1] == results[2]
    assert order == [60]


def test_what_can_never_arrive_is_an_error() -> None:
    with pytest.raises(RankError, match=r"every rank waits.*receive from 1 'x'"):
        times(2, MESH, lambda c: c.receive(torch.empty(2), 1 - c.rank, tag="x").wait())


def test_bad_links() -> None:
    with pytest.raises(ConfigError, match=r"links\.bandwidth = 0"):
        Links(latency_s=0.0, bandwidth=0)
    with pytest.raises(ConfigError, match=r"links\.latency_s = -1"):
        Links(latency_s=-1, bandwidth=1)
    with pytest.raises(ConfigError, match=r"links\.shape"):
        Links(latency_s=0, bandwidth=1, shape="torus")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"compute = -1"):
        times(2, MESH, lambda c: c.compute(-1))
