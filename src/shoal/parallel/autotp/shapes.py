"""A split model for inputs of any shape: traced again for each new one, with the same parameters.

Source: Tan et al., Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any
GPU/TPUs, 2023.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.parallel.autotp.auto import ExecutablePlan, discover, split_model
from shoal.parallel.autotp.split import SplitModel

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm


class AutoSplit(nn.Module):
    """A model with sharded parameters, for inputs of any shape.

    Args:
        model: whole; it is not changed, and may be let go afterwards.
        args: example inputs.
        kwargs: the same by name.
        comm: the ranks.

    Raises:
        PlanError: heads that the ranks cannot share, or dropout where values are split.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm
    ) -> None:
        super().__init__()
        self.comm = comm
        comm.barrier()
        self.planned: ExecutablePlan = discover(model, args, kwargs, tp=comm.world)
        comm.barrier()
        self.first = split_model(self.planned, model, comm)
        # Parameters without memory: enough to trace again.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().new_zeros(()).expand(p.shape), p.requires_grad)
            for p in model.parameters()
        }
        self._empty = [copy.deepcopy(model, memo)]  # in a list, so that it is no sub-module
        self._made: dict[Any, SplitModel] = {}
        if isinstance(self.first, SplitModel):
            self._made[_shapes(args, kwargs, model.training)] = self.first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, equal on every rank."""
        if not isinstance(self.first, SplitModel):
            return self.first(*args, **kwargs)
        key = _shapes(args, kwargs, self.training)
        if key not in self._made:
            model = self._empty[0].train(self.training)
            # Ranks that are threads: none may call a module while another one traces.
            self.comm.barrier()
            result = discover(model, args, kwargs, tp=self.comm.world, fallback="refuse")
            self.comm.barrier()
            part = result.parts[0]
            self._made[key] = SplitModel(
                part.traced, part.plan, part.flow, model, self.comm, share=self.first
            )
        return self._made[key](*args, **kwargs)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    seen = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in flat)
    return training, str(spec), seen
