"""What autograd saves goes to a disk during the forward pass and is back before it is needed.

A cache of tensors sits where autograd saves (``torch.autograd.graph.saved_tensors_hooks``). It
hands out handles; the memory behind a tensor is written to the disk by a thread of its own, once,
however many tensors on it are saved, and let go when it is there. When the backward pass comes to
a block, what the blocks before it saved is read ahead. Who needs something that is not written yet
gets it as it is, and a write that has not begun is called off.

Weights stay, and so do small tensors and those of the last blocks, which are needed at once. With
``adaptive`` one step is measured, and from then on no more is written than the disk takes while it
is worth it.

Source: Wu et al., SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language
Model Training, 2024, sections 3.2 to 3.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.core.sizes import Size, human_bytes
from shoal.cost.arithmetic import activation_bytes, flops_per_token
from shoal.cost.price.shares import microbatch_of, passes_of
from shoal.ir import Estimate, Interval, Machine, Work
from shoal.memory.streaming.needs import disk_bandwidth, peak_flops

if TYPE_CHECKING:
    from torch import nn

    from shoal.memory.activations.cache import TensorCache
    from shoal.memory.tiers.mover import EmulatedLink

_SECONDS_A_YEAR = 365.25 * 86400


@part
class SSDTrain:
    """Offload saved activations to a disk.

    Args:
        path: directory on the disk; the system's temporary directory if not given.
        capacity: largest number of bytes on the disk at a time.
        adaptive: measure one step, and then write only as much as does not slow a step.
        min_bytes: smaller tensors stay on the device.
        last: last blocks, with the layers after them, whose tensors stay on the device.
        depth: blocks whose tensors are prefetched.
        bytes_per_s: byte/s of an emulated disk; no limit if not given.
        endurance: bytes that can be written in the lifetime of the disk.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"moves_activations"})
    path: str = ""
    capacity: Annotated[Size, Ge(1)] = 4 * 2**30
    adaptive: bool = True
    min_bytes: Annotated[Size, Ge(1)] = 4096
    last: Annotated[int, Ge(0)] = 1
    depth: Annotated[int, Ge(1)] = 1
    bytes_per_s: Annotated[float, Gt(0)] | None = None
    endurance: Annotated[Size, Ge(1)] = 600 * 10**12

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """As it is: it writes no more than pays."""
        yield cls()

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes that leave: all but the last blocks', those read ahead and those in work.

        With ``adaptive`` no more than the disk takes during the forward pass; without, a step waits
        for what does not hide behind its passes.
        """
        job, split = work.job, work.job.parallel
        layers = -(-work.shape.num_layers // split.pp)
        microbatch = microbatch_of(job)
        leaving = self._saved(work, microbatch, max(0, layers - self.last - self.depth - 1))
        tokens = job.seq_len * microbatch / (split.tp * split.pp * split.cp)
        computed = flops_per_token(work.shape, job.seq_len) * tokens / peak_flops(work, machine)
        write, read = disk_bandwidth(machine, writing=True), disk_bandwidth(machine)
        if self.bytes_per_s is not None:
            write = read = self.bytes_per_s
        seconds = 0.0
        if self.adaptive:
            leaving = min(leaving, write * computed / 3)
        else:
            passes = passes_of(job, microbatch)
            waited = max(0.0, leaving / write - computed / 3)
            waited += max(0.0, leaving / read - computed * 2 / 3)
            seconds = passes * waited
        return Estimate(
            step_s=Interval.around(seconds, 0.5),
            terms_s={"memory": seconds},
            memory_bytes={"disk": leaving},
        )

    def stored(self, work: Work) -> float:
        """Most bytes on the disk at one time: of every block, and every micro-batch under way."""
        job, split = work.job, work.job.parallel
        layers = -(-work.shape.num_layers // split.pp)
        passes = passes_of(job)
        return self._saved(work, microbatch_of(job) * min(passes, split.pp), layers)

    def _saved(self, work: Work, sequences: int, layers: int) -> float:
        """Bytes that so many blocks of a rank save for so many sequences."""
        job, split = work.job, work.job.parallel
        whole = activation_bytes(
            work.shape,
            job.seq_len,
            sequences,
            precision=job.precision,
            tp=split.tp,
            sp=split.sp,
            layers=layers,
        )
        if job.recompute != "none":
            width = 2.0 if job.precision == "bf16" else 4.0
            whole = layers * sequences * job.seq_len * work.shape.hidden * width
        return whole / split.cp

    def notes(self, work: Work, step_s: float) -> tuple[str, ...]:
        """What a plan should say: how long the disk lasts, if all goes there that may."""
        job, split = work.job, work.job.parallel
        layers = -(-work.shape.num_layers // split.pp) - self.last
        if layers < 1:
            return ("activation: ssdtrain keeps all blocks of a rank; lower last",)
        written = self._saved(work, job.global_batch // split.dp, layers)
        years = lifetime_years(self.endurance, written, step_s)
        return (
            f"activation: ssdtrain writes up to {human_bytes(written)} a step to each rank's disk, "
            f"which wears {human_bytes(self.endurance)} of endurance out in {years:.2g} years",
        )

    def apply(self, model: nn.Module) -> TensorCache:
        """A cache for a model, to be used around each of its steps.

        Raises:
            MachineError: the path cannot be written.
            TierFullError: its disk has less room than ``capacity``.
        """
        import tempfile

        from shoal.memory.activations.cache import TensorCache
        from shoal.memory.tiers.disk import DiskTier
        from shoal.memory.tiers.mover import EmulatedLink

        disk = DiskTier(Path(self.path or tempfile.gettempdir()), self.capacity)
        rate = self.bytes_per_s
        links: tuple[EmulatedLink | None, EmulatedLink | None] = (None, None)
        if rate is not None:
            links = EmulatedLink(rate), EmulatedLink(rate)
        return TensorCache(
            model,
            disk,
            adaptive=self.adaptive,
            min_bytes=self.min_bytes,
            last=self.last,
            depth=self.depth,
            links=links,
        )


def lifetime_years(endurance: float, step_bytes: float, step_s: float) -> float:
    """Years until a disk is worn out by training without a pause.

    Args:
        endurance: bytes that may be written to it in its life (TBW).
        step_bytes: bytes written in a step.
        step_s: s of a step.
    """
    if not step_bytes:
        return float("inf")
    return endurance / step_bytes * step_s / _SECONDS_A_YEAR
