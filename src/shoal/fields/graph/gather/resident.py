"""The part ``resident``: hot rows lie on the device, the others are read where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.graph.gather.direct import read_rows
from shoal.fields.graph.gather.protocols import Fetch, GatherError, GatherWork
from shoal.ir import Estimate, Machine

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.fields.graph.gather.table import FeatureTable
    from shoal.memory.tiers.mover import Ticket


@part
class ResidentFeatures:
    """Keep the hottest rows on the device; its threads read the others from host memory.

    Args:
        share: of the rows that are kept on the device.
        hot_by: ``degree`` keeps nodes with many neighbours; ``access`` those that a sampled epoch
            asks for most often.
    """

    reads_host: ClassVar = True

    share: Annotated[float, Gt(0), Le(1)] = 0.25
    hot_by: Literal["degree", "access"] = "degree"

    def estimate(self, work: GatherWork, machine: Machine) -> Estimate:
        """What is hot is copied on the device; the rest is read once."""
        hit = work.hot[min(100, int(100 * self.share))]
        missed, hot = (1 - hit) * work.nbytes, hit * work.nbytes
        read = ((1 - hit) * work.line_bytes * work.rates.direct_s, hot * work.rates.device_s)
        kept = 4.0 * work.width * self.device_rows(work.table_rows)
        return work.estimate(moves=((missed, read[0]), (0.0, read[1])), device=kept)

    def device_rows(self, num_rows: int) -> int:
        """At least one."""
        return max(1, round(self.share * num_rows)) if num_rows else 0

    def heat(self, degrees: np.ndarray, accesses: Callable[[], np.ndarray]) -> np.ndarray | None:
        """Degrees, or how often an epoch asks for a row."""
        return degrees if self.hot_by == "degree" else accesses()

    def place(self, table: FeatureTable) -> Fetch:
        import torch

        if table.heat is None:
            raise GatherError("heat: none; placement resident needs to know which rows are hot")
        count = self.device_rows(table.num_rows)
        hot = np.sort(np.argsort(-table.heat, kind="stable")[:count])
        # Where a row lies on the device; -1 if it does not.
        slots = torch.full((table.num_rows,), -1, dtype=torch.int64)
        slots[hot] = torch.arange(count)
        tier = table.on_device
        block = tier.alloc(4 * count * table.dim, "hot rows")
        kept = tier.view(block, torch.float32, (count, table.dim))
        if count:
            kept.copy_(table.values[hot])

        def fetch(rows: Tensor, out: Tensor) -> Ticket:
            slot = slots[rows]
            places = (slot < 0).nonzero()[:, 0]
            here = (slot >= 0).nonzero()[:, 0]
            missed = rows[places]

            def work() -> None:
                table.read_by_device(read_rows(table.values, missed, out, places))
                read_kept(kept, slot[here], out, here)
                nbytes = 4 * table.dim * len(here)
                table.moved(device_read=nbytes, device_written=nbytes)

            return table.moving.submit(work, 4 * table.dim * len(missed))

        return fetch


def read_kept(kept: Tensor, slots: Tensor, out: Tensor, places: Tensor) -> None:
    """``out[places] = kept[slots]``, all on the device; nothing of the host is read."""
    if out.device.type == "cpu":
        from shoal.fields.graph.gather.native import gather_rows

        gather_rows(kept.numpy(), slots.numpy(), out.numpy(), places.numpy())
    else:
        out.index_copy_(0, places.to(out.device), kept[slots.to(out.device)])
