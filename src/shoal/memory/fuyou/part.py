"""Fuyou: the optimizer works on the disk during the backward pass, and activations are swapped.

Source: Liao et al., Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single
GPU, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator

from shoal.core.errors import ConfigError, require
from shoal.core.parts import part
from shoal.core.sizes import Size, bytes_of
from shoal.ir import Estimate, Machine, TrainJob, Work
from shoal.memory.offload.options import (
    LEAST_BUDGET,
    UNLIMITED,
    Count,
    check_least,
    place_of,
    refuse_streamed,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.protocols import TieredModel

_WORDS = ("auto", "all", "none")


def _amount(amount: Any) -> Any:
    """A word, or a size in bytes."""
    return amount if amount in _WORDS else bytes_of(amount)


@part
class Fuyou:
    """Keep all state on a disk; a separate process updates it during the backward pass.

    Choose it on one device with a fast disk, where the optimizer's disk traffic after the backward
    pass is the bottleneck. Losses and parameters equal those of the run without offloading, bit for
    bit. It cannot clip gradients, because their norm is known only after most of them are used.

    Args:
        device_budget: bytes of device memory that a step may use; all of it if not given.
        host_budget: bytes of host memory for staging and for activations; three quarters of the
            host's total if not given.
        swap: bytes of a micro-batch's activations to offload, the most valuable first; the rest is
            recomputed. auto measures a step and takes the fastest choice; all; none.
        swap_capacity: bytes of disk for activations that exceed the host's memory.
        sub_group_numel: largest number of elements of a parameter that are updated at once.
        prefetch_numel: number of parameter elements to prefetch; 0 for none.
        path: directory for state on disk; that of the run if not given.
    """

    device_budget: Size | None = None
    host_budget: Size | None = None
    swap: Annotated[Literal["auto", "all", "none"] | int, BeforeValidator(_amount)] = "auto"
    swap_capacity: Size = 4 * 2**30
    sub_group_numel: Count = 2**19
    prefetch_numel: Count = 10_000_000
    path: str = ""

    def __post_init__(self) -> None:
        where = "offload.fuyou"
        check_least(
            self,
            where,
            device_budget=LEAST_BUDGET,
            host_budget=LEAST_BUDGET,
            swap_capacity=LEAST_BUDGET,
            sub_group_numel=2**14,
            prefetch_numel=0,
        )
        require(
            isinstance(self.swap, str) or self.swap >= 0,
            f"{where}.swap",
            self.swap,
            expected="auto, all, none, or bytes from 0",
        )

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """As it is: it chooses itself what is swapped."""
        yield cls()

    def check(self, job: TrainJob) -> None:
        """Refuse what this does not compose with."""
        refuse_streamed(job, "fuyou")
        if job.grad_clip:
            raise ConfigError(
                f"offload: fuyou uses every gradient before the norm of all is known and grad_clip "
                f"is {job.grad_clip:g}; use grad_clip: 0, or offload: zero_infinity"
            )
        if job.parallel.world > 1:
            raise ConfigError(
                f"offload: fuyou trains on one device and parallel asks for {job.parallel.world}; "
                "use offload: zero_infinity"
            )
        if job.recompute != "none" or job.layers:
            raise ConfigError(
                "offload: fuyou decides itself what is computed again; leave recompute and layers "
                "out, and say swap: none to have all of it done again"
            )

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes by tier, and the seconds of a step that are not hidden behind its passes."""
        from shoal.memory.fuyou.needs import predicted

        return predicted(self, work, machine).estimate

    def notes(self, work: Work, machine: Machine) -> tuple[str, ...]:
        """What a plan should say: what binds a step, and budgets that are too small."""
        from shoal.memory.fuyou.needs import notes, predicted

        return notes(self, predicted(self, work, machine))

    def apply(
        self,
        model: nn.Module,
        comm: Comm,
        optimizer: object,
        *,
        place: Path,
        device: torch.device | str = "cpu",
        values: Callable[[str], Tensor] | None = None,
    ) -> TieredModel:
        """Move a model's state to the disk, and start the process that updates it."""
        from shoal.memory.fuyou.build import FuyouAssignment, fuyou_model

        wanted = FuyouAssignment(
            device_bytes=self.device_budget or UNLIMITED,
            host_bytes=self.host_budget,
            sub_group_numel=self.sub_group_numel,
            prefetch_numel=self.prefetch_numel,
            swap=self.swap,
            swap_bytes=self.swap_capacity,
            path=place_of(self.path, place),
        )
        return fuyou_model(model, comm, optimizer, wanted, device=device, values=values)
