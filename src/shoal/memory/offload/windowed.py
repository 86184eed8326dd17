"""Superpipeline in a training job: weights and optimizer state on the host, a window on the device.

Source: Superpipeline: A Universal Approach for Reducing GPU Memory Usage in Large Models, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shoal.core.parts import part
from shoal.core.sizes import Size
from shoal.cost.arithmetic import parameters
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.ir import Estimate, Interval, Machine, TrainJob, Work
from shoal.memory.offload.options import LEAST_BUDGET, check_least, refuse_streamed, short_budgets
from shoal.memory.streaming.needs import HOST_OF_A_GPU, needs, sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.protocols import TieredModel

_ROOM = 4 * 2**30  # bytes of activations where no budget is given


@part
class SuperpipelineOffload:
    """Keep a window of k blocks on the device, and all state on the host.

    Blocks are detected in any model; k' of them are replaced at a time, in the forward and the
    backward pass. Every data-parallel rank has all of the state on its host.

    Args:
        k: blocks on the device; half of them if not given.
        k_prime: blocks that are replaced at once; half of k if not given.
        device_budget: bytes of device memory that a step may use; no limit if not given.
    """

    k: int | None = None
    k_prime: int | None = None
    device_budget: Size | None = None

    def __post_init__(self) -> None:
        check_least(self, "offload.superpipeline", k=1, k_prime=1, device_budget=LEAST_BUDGET)

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Half of the blocks, and the fewest of which one can come while another runs."""
        yield cls()
        if work.shape.num_layers > 4:
            yield cls(k=2)

    def check(self, job: TrainJob) -> None:
        """Refuse what this does not compose with."""
        refuse_streamed(job, "superpipeline")

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes by tier, and the seconds for which a step waits for blocks."""
        split = work.job.parallel
        matrices = sizes(work.shape, split.tp, split.pp)
        layers = -(-work.shape.num_layers // split.pp)
        block = 4.0 * sum(matrices[-4 * layers :]) / layers
        tables = 4.0 * sum(matrices[: len(matrices) - 4 * layers])
        k = min(self.k or max(1, layers // 2), layers)
        step = min(self.k_prime or max(1, k // 2), k)
        rest = needs(
            work, param="host", optim="host", act="device", sub_group_numel=2**14, prefetch_numel=0
        )
        device = rest.device + (k + 3 * step) * block + 2 * tables
        moved = (2 * (layers - k) + k) * block * max(1, k < layers)
        # A load hides behind the k - k' blocks between; what is left of one is waited for.
        hidden = (k - step) / k
        seconds = 0.0 if k == layers else moved / copy_bytes_per_s(machine) * (1.0 - hidden)
        terms = {"memory": seconds}
        if machine.device.kind != "cpu":
            terms["optimizer"] = parameters(work.shape) / (split.tp * split.pp) / HOST_OF_A_GPU
        return Estimate(
            step_s=Interval.around(sum(terms.values()), 0.5),
            terms_s=terms,
            memory_bytes={"device": device, "host": 4 * (layers * block + tables) * 1.05},
        )

    def notes(self, work: Work, machine: Machine) -> tuple[str, ...]:
        """What a plan should say: a budget that is too small."""
        return short_budgets(self, self.estimate(work, machine).memory_bytes)

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
        """Wrap a model; see :class:`~shoal.memory.protocols.Offload`."""
        from shoal.memory.offload.windowed_model import WindowedModel, fill
        from shoal.memory.streaming.chain import find_chain
        from shoal.memory.streaming.superpipeline import wrap
        from shoal.memory.tiers.places import Tiers

        if values is not None:
            fill(model, values)
        whole = sum(p.nbytes for p in model.parameters())
        n = len(find_chain(model))
        k = self.k or max(1, n // 2)
        tiers = Tiers(
            device=device,
            device_bytes=self.device_budget or whole + _ROOM,
            host_bytes=5 * whole + 2**20,
        )
        try:
            wrapped = wrap(model, k, self.k_prime, tier=tiers.device, device=str(device))
        except BaseException:
            tiers.close()
            raise
        tiers.host.reserve(sum(home.nbytes for home in wrapped.window.homes), "blocks")
        return WindowedModel(wrapped, comm, optimizer, tiers)
