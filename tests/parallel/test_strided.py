"""Messages of tensors of any strides, and the halo exchange made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from halo import halo_exchange

from shoal.claims.lab.strided.messages import locality, receive, send
from shoal.claims.lab.strided.method import LocalityTimes, MethodModel, TimeGrid
from shoal.claims.lab.strided.tables import agreed, measure_parts
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, KernelError, RankError
from shoal.core.meter import Meter
from shoal.parallel.comm.processes import run_processes
from shoal.parallel.protocols import Comm


def between(x: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
    def on(comm: Comm) -> None:
        if comm.rank == 0:
            send(comm, x, 1, **options).wait()
        else:
            receive(comm, out, 0, **options).wait()

    run_ranks(2, on)
    return out


def cube() -> torch.Tensor:
    return torch.arange(4 * 5 * 6, dtype=torch.float32).view(4, 5, 6)


def test_strides_of_the_ends_may_differ() -> None:
    x = cube()
    views = [x[:, 2], x[:, :, 1], x[1:3, ::2, 1:5:2], x.permute(2, 0, 1), x[2], x[0, 0, 0]]
    for view in views:
        assert torch.equal(between(view, torch.zeros(view.shape)), view)
        target = torch.zeros([2 * n + 1 for n in view.shape])
        part = target[tuple(slice(1, None, 2) for _ in view.shape)]
        assert torch.equal(between(view, part), view)
        assert int(target.count_nonzero()) == int(view.count_nonzero())
    assert torch.equal(between(x[:, 1:2].expand(4, 3, 6), torch.zeros(4, 3, 6))[:, 2], x[:, 1])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_every_type_and_plain_messages_at_the_other_end(dtype: torch.dtype) -> None:
    x = cube().to(dtype)

    def on(comm: Comm) -> torch.Tensor | None:
        if comm.rank == 0:
            send(comm, x[:, 1], 1, tag="a").wait()
            comm.send(x[:, 2].contiguous(), 1, tag="b").wait()
            return None
        out = torch.zeros(2, 4, 6, dtype=dtype)
        strided = torch.zeros(4, 6, 2, dtype=dtype)
        comm.receive(out[0], 0, tag="a").wait()
        receive(comm, strided[:, :, 1], 0, tag="b").wait()
        assert torch.equal(out[0], x[:, 1])
        return strided[:, :, 1]

    assert torch.equal(run_ranks(2, on)[1], x[:, 2])


@pytest.mark.parametrize("method", ["oneshot", "staged", "blocks"])
def test_every_method_carries_the_same(method: str) -> None:
    x = cube()
    for view in (x[:, 1:3], x[:, :, 2], x[1]):
        out = torch.zeros_like(x)
        part = out.as_strided(view.shape, view.stride(), view.storage_offset())
        assert torch.equal(between(view, part, method=method), view)


def test_bytes_are_counted_and_holes_are_not() -> None:
    meter = Meter([])
    x = cube()

    def on(comm: Comm) -> None:
        if comm.rank == 0:
            send(comm, x[:, :, 1], 1, tag="face").wait()
            send(comm, x[:, 1:1], 1, tag="none").wait()
        else:
            receive(comm, torch.zeros(4, 5), 0, tag="face").wait()
            receive(comm, x[:, 1:1], 0, tag="none").wait()

    run_ranks(2, on, meter=meter)
    assert sum(v for name, v in meter.totals().items() if "wire_bytes" in name) == 80


def test_a_message_may_be_waited_for_twice() -> None:
    def on(comm: Comm) -> torch.Tensor:
        x = cube()
        other = 1 - comm.rank
        out = torch.zeros(4, 6)
        both = [receive(comm, out, other), send(comm, x[:, comm.rank], other)]
        for _ in range(2):
            for one in both:
                one.wait()
        return out

    ranks = run_ranks(2, on)
    assert torch.equal(ranks[0], cube()[:, 1])
    assert torch.equal(ranks[1], cube()[:, 0])


def model(block_s: float) -> MethodModel:
    flat = TimeGrid(rows=(1.0,), seconds=((1e-3,),))
    return MethodModel(
        {
            name: LocalityTimes(
                pack=flat,
                unpack=flat,
                send=flat,
                blocks=TimeGrid(rows=(1.0, 2.0), seconds=((block_s,), (2 * block_s,))),
            )
            for name in ("node", "far")
        }
    )


@pytest.mark.parametrize("block_s", [1e-6, 1.0])
def test_the_model_chooses_for_both_ends(block_s: float) -> None:
    """By the model any order will do: a transposed view travels as it lies."""
    meter, x = Meter([]), cube().permute(2, 1, 0)[:, :, :3]
    chosen = model(block_s)

    def on(comm: Comm) -> torch.Tensor:
        mine = agreed(comm, chosen if comm.rank == 0 else model(1.0))
        out = torch.zeros_like(cube()).permute(2, 1, 0)[:, :, :3]
        if comm.rank == 0:
            send(comm, x, 1, model=mine).wait()
        else:
            receive(comm, out, 0, model=mine).wait()
        return out

    assert torch.equal(run_ranks(2, on, meter=meter)[1], x)


def test_locality() -> None:
    def on(comm: Comm) -> list[str]:
        return [locality(comm, peer) for peer in range(comm.world)]

    assert run_ranks(4, on, ranks_per_node=2)[1] == ["node", "node", "far", "far"]
    assert run_ranks(2, on)[0] == ["node", "node"]


def test_bad_input() -> None:
    x = cube()
    with pytest.raises(ConfigError, match="did you mean 'blocks'"):
        between(x, x, method="block")
    with pytest.raises(ConfigError, match="of a device"):
        between(x, x, method="device")
    with pytest.raises(KernelError, match="elements in one place"):
        between(x[:, 0], torch.zeros(4, 1).expand(4, 6))
    with pytest.raises(RankError, match="same size"):
        between(x[:, 0], torch.zeros(4, 7)[:, ::2])
    with pytest.raises(RankError, match="at least 2"):
        run_ranks(1, lambda comm: measure_parts(comm))


@pytest.mark.parametrize(
    ("grid", "periodic", "extra"),
    [
        ((1, 2), False, ()),
        ((2, 2), True, (3,)),
        ((3,), True, (2,)),
        ((2, 1, 2), True, ()),
        ((1, 3), False, ()),
    ],
)
def test_halo_is_what_one_process_would_see(
    grid: tuple[int, ...], periodic: bool, extra: tuple[int, ...]
) -> None:
    width, own = 2, (4, 5, 6)[: len(grid)]
    whole_shape = tuple(n * g for n, g in zip(own, grid, strict=True))
    whole = np.arange(1, np.prod(whole_shape) * np.prod(extra, dtype=int) + 1, dtype=np.float64)
    whole = whole.reshape(*whole_shape, *extra)
    pad = [(width, width)] * len(grid) + [(0, 0)] * len(extra)
    rimmed = np.pad(whole, pad, mode="wrap") if periodic else np.pad(whole, pad)

    def cut(rank: int) -> torch.Tensor:
        places = np.unravel_index(rank, grid)
        cells = tuple(
            slice(p * n, (p + 1) * n + 2 * width) for p, n in zip(places, own, strict=True)
        )
        return torch.from_numpy(rimmed[cells].copy())

    def on(comm: Comm) -> torch.Tensor:
        block = torch.zeros_like(cut(comm.rank))
        inner = tuple(slice(width, -width) for _ in grid)
        block[inner] = cut(comm.rank)[inner]
        halo_exchange(comm, block, grid=grid, width=width, periodic=periodic)
        return block

    for rank, block in enumerate(run_ranks(int(np.prod(grid)), on)):
        assert torch.equal(block, cut(rank)), rank


def test_halo_refuses_what_cannot_be() -> None:
    def on(**options: Any) -> None:
        block = torch.zeros(options.pop("size", 8), 8)
        run_ranks(2, lambda comm: halo_exchange(comm, block, **options))

    with pytest.raises(ConfigError, match="product is 2"):
        on(grid=(2, 2))
    with pytest.raises(ConfigError, match="at least 9 cells"):
        on(grid=(1, 2), width=3)
    with pytest.raises(ConfigError, match="0 or more"):
        on(grid=(1, 2), width=-1)
    on(grid=(1, 2), width=0)


def over_processes(comm: Comm) -> list[bool]:
    """Real ranks: large messages by Gloo, small ones by memory, and measured tables."""
    torch.set_num_threads(1)
    results = []
    parts = measure_parts(comm, largest=2**8, repeats=1)
    chosen = MethodModel({"node": parts})
    for size, method in ((8, "blocks"), (64, "oneshot"), (1200, "oneshot"), (1200, "staged")):
        x = torch.arange(size * size, dtype=torch.float32).view(size, size)
        out = torch.zeros(size, size)
        for source, options in ((0, {"method": method}), (1, {"model": chosen})):
            if comm.rank == source:
                send(comm, x[:, ::2], 1 - source, **options).wait()
            else:
                receive(comm, out[:, ::2], source, **options).wait()
                results.append(torch.equal(out[:, ::2], x[:, ::2]))
    return results


@pytest.mark.slow
@pytest.mark.multi
def test_processes() -> None:
    assert run_processes(f"{__file__}:over_processes", 2, {}) == [[True] * 4] * 2
