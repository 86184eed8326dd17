"""Numbers in a few bits: how far off they are, what they weigh, and who adds them up."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import ConfigError
from shoal.parallel.comm.compress import gather_packed, pack, reduce_scatter_packed, unpack
from shoal.parallel.comm.wire import BLOCK, packed_bytes


def scales(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The scale of each value's block, [P, n]."""
    most = 2 ** (bits - 1) - 1
    blocks = [part.float().abs().amax(1, keepdim=True) / most for part in x.split(BLOCK, 1)]
    sizes = [part.shape[1] for part in x.split(BLOCK, 1)]
    return torch.cat([b.expand(-1, n) for b, n in zip(blocks, sizes, strict=True)], 1)


@settings(max_examples=15, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 3),
    n=st.integers(1, 700),
    seed=st.integers(0, 2**31),
    power=st.integers(-44, 37),
)
def test_off_by_half_a_scale_at_most(bits: int, rows: int, n: int, seed: int, power: int) -> None:
    source = np.random.default_rng(seed)
    spread = 10.0 ** source.uniform(-3, 0, (rows, n))
    x = torch.from_numpy(source.standard_normal((rows, n)) * spread * 10.0**power / 10).float()
    packed = pack(x, bits)
    assert packed.shape == (rows, packed_bytes(n, bits))
    result = unpack(packed, n, bits)
    allowed = scales(x, bits).clamp(min=torch.finfo(torch.float32).tiny) / 2
    assert bool(((result - x).abs().double() <= allowed.double() * (1 + 1e-5)).all())
    # What was rounded once is not rounded again, but for the scale's own last bit.
    again = unpack(pack(result, bits), n, bits)
    torch.testing.assert_close(again, result, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_extremes(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    codes = torch.arange(-most, most + 1, dtype=torch.float64)[None]
    assert torch.equal(unpack(pack(codes, bits), codes.shape[1], bits), codes.float())
    zero = torch.zeros(2, BLOCK + 1)
    assert torch.equal(unpack(pack(zero, bits), BLOCK + 1, bits), zero)
    bad = torch.ones(1, 2 * BLOCK)
    for value in (torch.nan, torch.inf, -torch.inf):
        bad[0, 3] = value
        result = unpack(pack(bad, bits), 2 * BLOCK, bits)
        assert not bool(result[0, 3].isfinite())
        assert torch.equal(result[0, BLOCK:], bad[0, BLOCK:])  # another block


def test_sizes() -> None:
    assert [packed_bytes(n, 4) for n in (1, 2, 256, 257)] == [5, 5, 132, 137]
    assert [packed_bytes(n, 8) for n in (1, 256, 257)] == [5, 260, 265]
    with pytest.raises(ConfigError, match="bits = 3: expected 4 or 8"):
        pack(torch.ones(1, 2), 3)
    with pytest.raises(ConfigError, match="bytes of a row = 9: expected 8, of 4 values in 8 bits"):
        unpack(torch.zeros(1, 9, dtype=torch.uint8), 4, 8)


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_are_of_numbers_and_bytes_travel(bits: int) -> None:
    n, world = 300, 4
    given = torch.randn(world, world, n, generator=torch.Generator().manual_seed(1))

    def run(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        mine = given[comm.rank]
        row = reduce_scatter_packed(comm, mine, bits, tag="gradients")
        everything = gather_packed(comm, pack(mine[:1], bits)[0], tag="parameters")
        return row, unpack(everything, n, bits), comm.meter.totals()

    rounded = torch.stack([unpack(pack(x, bits), n, bits) for x in given])
    for rank, (row, gathered, totals) in enumerate(run_ranks(world, run)):
        assert torch.equal(row, rounded[:, rank].sum(0))
        assert torch.equal(gathered, rounded[:, 0])
        each = 3.0 * packed_bytes(n, bits)
        assert totals == {
            "wire_bytes{op=all_to_all,scope=loopback,tag=gradients}": each,
            "wire_bytes{op=all_gather,scope=loopback,tag=parameters}": each,
        }


def test_among_one_nothing_is_rounded() -> None:
    x = torch.tensor([[0.1, 0.2, 0.3]])

    def run(comm: ThreadComm) -> torch.Tensor:
        return reduce_scatter_packed(comm, x, 4, tag="gradients")

    assert torch.equal(run_ranks(1, run)[0], x[0])
