"""ZeRO stages 2 and 3 on PyTorch's FSDP2, with its collectives counted.

Stage 3 splits parameters, gradients and optimizer state over the ranks and gathers
each block's parameters for its forward and again for its backward pass. Stage 2 keeps
them between the two, which saves one gather.

Source: Rajbhandari et al., ZeRO, 2020, sections 5.2 and 5.3; Zhao et al., PyTorch FSDP, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.errors import ConfigError
from shoal.core.parts import part
from shoal.ir import Estimate, Machine, Work
from shoal.parallel.comm import ring_gather_bytes
from shoal.parallel.protocols import Held
from shoal.parallel.shard.cost import sharding_estimate

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.parallel.comm import TorchComm
    from shoal.parallel.protocols import Sharded

__all__ = ["FsdpModel", "Zero2", "Zero3"]


@part
class Zero2:
    """Gradients and optimizer state are divided; parameters are gathered once a step."""

    divides: ClassVar[frozenset[str]] = frozenset({"gradients", "optimizer"})

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """One gather of the parameters and one reduce-scatter of the gradients."""
        return sharding_estimate(
            work,
            machine,
            sent_per_parameter_byte=2.0,
            messages=2 * (work.shape.num_layers + 1),
        )

    def apply(self, model: nn.Module, comm: TorchComm, *, whole_matrices: bool) -> Sharded:
        """Shard the model, block by block."""
        return FsdpModel(model, comm, reshard=False, whole_matrices=whole_matrices)


@part
class Zero3:
    """Parameters too are divided; choose it when the weights do not fit otherwise."""

    divides: ClassVar[frozenset[str]] = frozenset({"weights", "gradients", "optimizer"})

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Two gathers of the parameters and one reduce-scatter of the gradients."""
        micro = work.job.global_batch // work.job.parallel.dp
        passes = max(1, micro // (work.job.microbatch or micro))
        return sharding_estimate(
            work,
            machine,
            sent_per_parameter_byte=1.0 + 2.0 * passes,
            messages=(1 + 2 * passes) * (work.shape.num_layers + 1),
        )

    def apply(self, model: nn.Module, comm: TorchComm, *, whole_matrices: bool) -> Sharded:
        """Shard the model, block by block."""
        return FsdpModel(model, comm, reshard=True, whole_matrices=whole_matrices)


class _CountedGather:
    """FSDP2's all-gather, through the meter and the heartbeat."""

    def __init__(self, comm: TorchComm) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        import torch.distributed as dist

        comm = self._comm
        comm.count("all_gather", ring_gather_bytes(output_tensor.nbytes, comm.world), "parameters")
        return comm.guard(
            lambda: dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        )


class _CountedScatter(_CountedGather):
    """FSDP2's reduce-scatter, through the meter and the heartbeat."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        import torch.distributed as dist

        comm = self._comm
        comm.count(
            "reduce_scatter", ring_gather_bytes(input_tensor.nbytes, comm.world), "gradients"
        )
        return comm.guard(
            lambda: dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        )


class FsdpModel:
    """See :class:`~shoal.parallel.protocols.Sharded`."""

    def __init__(
        self, model: nn.Module, comm: TorchComm, *, reshard: bool, whole_matrices: bool
    ) -> None:
        if whole_matrices:
            raise ConfigError(
                "shard: this optimizer needs whole matrices and zero2 and zero3 split them; "
                "use shard: zero1 or replicated, or optimizer: adamw"
            )
        if comm.world == 1:
            raise ConfigError(
                "shard: zero2 and zero3 divide over ranks and there is one; "
                "use shard: replicated, or parallel.dp of 2 or more"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        self.model = model
        self.comm = comm
        kind = next(model.parameters()).device.type
        mesh = init_device_mesh(kind, (comm.world,))
        blocks = list(getattr(model, "blocks", []))
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        for module in (*blocks, model):
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(_CountedGather(comm))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_CountedScatter(comm))  # type: ignore[arg-type]
            # Sums, never means: the loss was divided by the global count already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # FSDP2 gathers around forward(); training calls loss_sum().
        register_fsdp_forward_method(model, "loss_sum")
        self._names: dict[str, Any] = dict(model.named_parameters())

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        self.model.set_is_last_backward(last)  # type: ignore[operator]
        yield

    def finish(self) -> None:
        """Nothing: FSDP2 has waited at the end of backward."""

    def owned(self) -> dict[str, Tensor]:
        """This rank's slice of every parameter that has rows here."""
        return {n: p for n, p in self._names.items() if p.to_local().numel()}

    def held(self) -> dict[str, Held]:
        """Slices along the first dimension."""
        found: dict[str, Held] = {}
        for name, parameter in self.owned().items():
            dtensor: Any = parameter
            # FSDP2 gives every rank ceil(rows / ranks) rows until none are left.
            rows = -(-dtensor.shape[0] // self.comm.world) * self.comm.rank
            offset = (rows, *(0,) * (dtensor.dim() - 1))
            found[name] = Held(dtensor.to_local().detach(), offset, tuple(dtensor.shape))
        return found

    def grad_norm(self) -> Tensor:
        """Global L2 norm of all gradients: squares are summed over the ranks."""
        import torch

        squares = [
            torch.linalg.vector_norm(p.grad.to_local()) ** 2
            for p in self._names.values()
            if p.grad is not None
        ]
        total = torch.stack(squares).sum()
        self.comm.all_reduce(total, tag="norm").wait()
        return total.sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        for parameter in self._names.values():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(factor)

    def publish(self) -> None:
        """Drop last step's gradients; the next forward gathers the new parameters."""
        for parameter in self._names.values():
            parameter.grad = None

    def writes(self, name: str) -> bool:
        """Every rank writes its slices."""
        return True
