"""ZeRO stages 2 and 3 on PyTorch's FSDP2, with its collectives counted.

Stage 3 splits parameters, gradients and optimizer state over the ranks and gathers
each block's parameters for its forward and again for its backward pass. Stage 2 keeps
them between the two, which saves one gather.

Source: Rajbhandari et al., ZeRO, 2020, sections 5.2 and 5.3; Zhao et al., PyTorch FSDP, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shoal.core.errors import ConfigError
from shoal.core.parts import part
from shoal.ir import Estimate, Machine, Work
from shoal.kernel.squares import sum_of_squares
from shoal.parallel.protocols import LocalParameter
from shoal.parallel.shard.cost import sharding_estimate
from shoal.parallel.shard.units import check_divided, units

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.parallel.protocols import Comm, ShardedModel


@part
class Zero2:
    """Shard gradients and optimizer state; parameters are gathered once per step."""

    divides: ClassVar[frozenset[str]] = frozenset({"gradients", "optimizer"})
    traits: ClassVar[frozenset[str]] = frozenset(f"shards_{what}" for what in divides)

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield cls()

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """One gather of the parameters and one reduce-scatter of the gradients."""
        return sharding_estimate(
            work,
            machine,
            sent_per_parameter_byte=2.0,
            messages=2 * (work.shape.num_layers + 1),
        )

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> ShardedModel:
        """Shard the model, block by block."""
        return divided(model, comm, reshard=False, whole_matrices=whole_matrices)


@part
class Zero3:
    """Shard parameters, gradients and optimizer state; choose it when the weights do not fit."""

    divides: ClassVar[frozenset[str]] = frozenset({"weights", "gradients", "optimizer"})
    traits: ClassVar[frozenset[str]] = frozenset(f"shards_{what}" for what in divides)

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield cls()

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

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> ShardedModel:
        """Shard the model, block by block."""
        return divided(model, comm, reshard=True, whole_matrices=whole_matrices)


def divided(
    model: nn.Module,
    comm: Comm,
    *,
    reshard: bool,
    whole_matrices: bool,
    across: Comm | None = None,
) -> ShardedModel:
    """Divide by FSDP2 between processes, by our own means between threads.

    Args:
        model: the model.
        comm: the ranks that share the parameters.
        reshard: forget gathered parameters after forward (stage 3).
        whole_matrices: the optimizer needs whole matrices.
        across: ranks that hold the same parts as this one.

    Raises:
        ConfigError: there is one rank, or the optimizer needs whole matrices.
    """
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.shard.gathered import GatheredModel

    kind: type[FsdpModel | GatheredModel]
    # A communicator that is watched is still one of torch's.
    real = isinstance(getattr(comm, "inner", comm), TorchComm)
    kind = FsdpModel if real else GatheredModel
    return kind(model, comm, reshard=reshard, whole_matrices=whole_matrices, across=across)


class _CountedGather:
    """FSDP2's all-gather, through the communicator."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        # On a GPU this makes the current stream wait, not the host: as torch's own does.
        self._comm.all_gather(output_tensor, input_tensor, tag="parameters").wait()


class _CountedScatter(_CountedGather):
    """FSDP2's reduce-scatter, through the communicator."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._comm.reduce_scatter(output_tensor, input_tensor, tag="gradients").wait()


class FsdpModel:
    """See :class:`~shoal.parallel.protocols.ShardedModel` and :func:`divided`."""

    overlap = True

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        *,
        reshard: bool,
        whole_matrices: bool,
        across: Comm | None = None,
    ) -> None:
        check_divided(comm, whole_matrices=whole_matrices)
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        self.model = model
        self.comm = comm
        self.across = across if across is not None and across.world > 1 else None
        self._reshard = reshard
        blocks, around = units(model)
        self._around = around
        inside = {id(p) for block in blocks for p in block.parameters()}
        outside = [id(p) for module in around for p in module.parameters() if id(p) not in inside]
        if len(outside) != len(set(outside)):
            raise ConfigError(
                "shard: zero2, zero3 and hybrid cannot divide an embedding that two stages of one "
                "rank share; use shard: zero1 or replicated, or a schedule whose first and last "
                "stage are on different ranks"
            )
        group: Any = getattr(comm, "group", None) or dist.group.WORLD
        # Of these ranks, not of all: other groups hold other stages and slices.
        mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
        for module in (*blocks, *around):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(_CountedGather(comm))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_CountedScatter(comm))  # type: ignore[arg-type]
            # Sums, never means: the loss was divided by the global count already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if self.across is not None:
                module.set_all_reduce_hook(self._sum_across)
        if hasattr(model, "loss_sum"):
            # FSDP2 gathers around forward(); training calls loss_sum().
            register_fsdp_forward_method(model, "loss_sum")
        self._names: dict[str, Any] = dict(model.named_parameters())

    def _sum_across(self, gradient: Tensor) -> None:
        """Sum what this rank keeps over the ranks that keep the same."""
        assert self.across is not None
        self.across.all_reduce(gradient, tag="gradients").wait()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        for module in self._around:
            module.set_requires_gradient_sync(last)  # type: ignore[operator]
            module.set_is_last_backward(last)  # type: ignore[operator]
            # Stage 2 gathers once a step: what one micro-batch has gathered serves the next.
            module.set_reshard_after_backward(last or self._reshard)  # type: ignore[operator]
        yield

    def finish(self) -> None:
        """Nothing: FSDP2 has waited at the end of backward."""

    def owned(self) -> dict[str, Tensor]:
        """This rank's slice of every parameter that has rows here."""
        return {n: p for n, p in self._names.items() if p.to_local().numel()}

    def held(self) -> dict[str, LocalParameter]:
        """Slices along the first dimension."""
        parameters: dict[str, LocalParameter] = {}
        for name, parameter in self.owned().items():
            dtensor: Any = parameter
            # FSDP2 gives every rank ceil(rows / ranks) rows until none are left.
            rows = -(-dtensor.shape[0] // self.comm.world) * self.comm.rank
            offset = (rows, *(0,) * (dtensor.dim() - 1))
            parameters[name] = LocalParameter(
                dtensor.to_local().detach(), offset, tuple(dtensor.shape)
            )
        return parameters

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the gradients of chosen parameters, over the ranks."""
        like: Tensor = next(iter(self._names.values())).to_local()
        total = sum_of_squares(like[:0])
        for name, parameter in self._names.items():
            if parameter.grad is not None and counts(name):
                total += sum_of_squares(parameter.grad.to_local())
        self.comm.all_reduce(total, tag="norm").wait()
        return total

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
        """Every rank writes its slices, once."""
        return self.across is None or self.across.rank == 0
