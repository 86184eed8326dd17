"""The update in sub-groups: what travels is charged to the ways that it takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError  # noqa: E402
from shoal.memory.streaming.build import TierAssignment, offloaded  # noqa: E402
from shoal.memory.tiers.mover import EmulatedLink  # noqa: E402
from shoal.memory.tiers.places import Tiers  # noqa: E402
from shoal.train.optimizers.adamw import AdamW  # noqa: E402

ALONE = SimpleNamespace(world=1, rank=0)
MIB = 2**20


class Counted(EmulatedLink):
    """A link that remembers what it carried."""

    def __init__(self):
        super().__init__(1e15)
        self.carried = 0

    def book(self, nbytes, asked_at=None):
        self.carried += nbytes
        return super().book(nbytes, asked_at)


@pytest.mark.parametrize(
    ("param", "optim", "read", "written"),
    [
        ("disk", "disk", 4, 3),
        ("disk", "host", 1, 1),
        ("host", "disk", 3, 2),
        ("host", "host", 0, 0),
    ],
)
@pytest.mark.parametrize("of_disk", [False, True])
def test_the_update_is_charged_once(param, optim, read, written, of_disk, tmp_path):
    """Of weight, gradient and two moments, those on the disk, by whichever link there is."""
    ways = {"read": Counted(), "write": Counted()}
    model = torch.nn.Sequential(torch.nn.Linear(96, 256, bias=False))
    numel = 96 * 256
    wanted = TierAssignment(
        device_bytes=4 * MIB,
        host_bytes=16 * MIB,
        param=param,
        optim=optim,
        act="device",
        sub_group_numel=2**14,
        prefetch_numel=0,
        owner=False,
        path=tmp_path,
        links={} if of_disk else ways,
        disk_links=(ways["read"], ways["write"]) if of_disk else (None, None),
    )
    made = offloaded(model, ALONE, AdamW(lr=1e-2, fused=False), wanted)
    try:
        for gradients in (True, False):
            if gradients:
                x = torch.randn(8, 96)
                with made.passes("train", x):
                    model(x).sum().backward()
            for way in ways.values():
                way.carried = 0
            made.step(1.0)
            # A gradient that has not come is not read.
            fewer = optim == "disk" and not gradients
            assert ways["read"].carried == 4 * numel * (read - fewer)
            assert ways["write"].carried == 4 * numel * written
    finally:
        made.close()


def test_a_way_has_one_rate(tmp_path):
    with pytest.raises(ConfigError, match=r"links.write = .*one link for a way"):
        Tiers(
            device="cpu",
            device_bytes=MIB,
            host_bytes=MIB,
            disk_bytes=MIB,
            path=tmp_path,
            links={"write": EmulatedLink(1e9)},
            disk_links=(None, EmulatedLink(1e9)),
        )
