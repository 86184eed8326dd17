"""The Triton twins, interpreted on the CPU, against plain enumeration."""

from __future__ import annotations

import pytest
import torch

from shoal.claims.lab.strided.api import pack, unpack
from shoal.core.errors import KernelError
from shoal.kernel.dispatch import dispatch
from shoal.kernel.strided.calls import Pack
from shoal.kernel.strided.canonical import canonical
from shoal.kernel.strided.datatype import Datatype, contiguous, hindexed, hvector, named

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Read when the program is first imported, and when a kernel refuses.
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize(
    "datatype",
    [
        named(40),
        hvector(9, 1, 24, named(8)),
        hvector(5, 3, 10, named(2)),
        hvector(3, 1, 100, hvector(4, 1, 20, named(4))),
        hvector(3, 1, 4, hvector(5, 1, 64, named(4))),
        hvector(4, 1, -12, named(4)),
        hvector(2, 1, 900, hvector(2, 1, 400, hvector(3, 1, 100, hvector(4, 1, 20, named(7))))),
        hvector(700, 1, 6, named(3)),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("skew", [0, 1, 4])
def test_moves_what_the_typemap_says(datatype: Datatype, skew: int) -> None:
    offsets = datatype.typemap()
    low = min(int(offsets.min()), 0)
    places = torch.from_numpy(offsets - low + skew)
    memory = torch.randint(0, 256, (int(places.max()) + 5,), dtype=torch.uint8)
    buffer = memory[skew - low :]
    packed = pack(buffer, datatype, backend="triton")
    assert torch.equal(packed, memory[places])
    wanted = memory.clone()
    fresh = torch.randint(0, 256, (len(places),), dtype=torch.uint8)
    wanted[places] = fresh
    unpack(fresh, buffer, datatype, backend="triton")
    assert torch.equal(memory, wanted)


def test_nothing_and_lists() -> None:
    x = torch.zeros(8)
    assert pack(x, contiguous(0, named(4)), backend="triton").numel() == 0
    with pytest.raises(KernelError, match="not lists of blocks"):
        pack(x, hindexed([1, 2], [0, 8], named(4)), backend="triton")
    # Interpreted, it is never chosen.
    assert dispatch(Pack(canonical(named(64)))).backend != "triton"
