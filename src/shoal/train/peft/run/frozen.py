"""Where the frozen matrices of a model in training lie: in a narrower type, or divided over ranks.

Source: Rajbhandari et al., ZeRO, 2020, section 5.3 (each rank a part of the weights, gathered for
every use); Hu et al., LoRA, 2021 (nothing but the thin matrices has gradients).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.model.feedforward import Experts
from shoal.train.peft.run.sites import FrozenLinear

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm
    from shoal.train.peft.run.handle import ModelPeftHandle


class DividedLinear(FrozenLinear):
    """A linear layer of whose matrix each rank keeps a part, gathered for its product and gone.

    All ranks call it together and in the same order, forward and backward.
    """

    def __init__(self, linear: nn.Linear, comm: Comm, dtype: torch.dtype) -> None:
        super().__init__(linear)
        self._comm = comm
        whole = linear.weight.detach().reshape(-1)
        size = -(-len(whole) // comm.world)
        mine = whole[comm.rank * size : (comm.rank + 1) * size]
        part = whole.new_zeros(size, dtype=dtype)
        part[: len(mine)] = mine
        self.weight = nn.Parameter(part, requires_grad=False)

    @torch.no_grad()
    def dense(self) -> Tensor:
        whole = self.weight.new_empty(self._comm.world * len(self.weight))
        self._comm.all_gather(whole, self.weight, tag="base").wait()
        return whole[: self.out_features * self.in_features].view(self.out_features, -1)


def divide(model: Transformer, name: str, comm: Comm, *, low: bool) -> None:
    """Let ranks divide a weight, if it is one of a linear layer of the blocks; routers stay.

    Args:
        model: whose module is replaced.
        name: of the weight.
        comm: the ranks.
        low: products are in bf16.
    """
    owner, _, kind = name.rpartition(".")
    parent, _, leaf = owner.rpartition(".")
    module = model.get_submodule(owner)
    around = model.get_submodule(parent)
    if not name.startswith("blocks.") or kind != "weight" or isinstance(around, Experts):
        return
    if isinstance(module, nn.Linear):
        dtype = torch.bfloat16 if low else module.weight.dtype
        setattr(around, leaf, DividedLinear(module, comm, dtype))


@torch.no_grad()
def narrow(handle: ModelPeftHandle, *, exact: bool) -> None:
    """Keep in bf16 what stands still and what products, which are in bf16, are made with.

    Args:
        handle: of the method; the way back was let go.
        exact: matrices with numbers that bf16 does not have stay as they are.
    """
    trained = {id(parameter) for parameter in handle.trainable().values()}
    for module in handle.model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding | Experts):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2 or parameter.requires_grad or id(parameter) in trained:
                continue
            low = parameter.bfloat16()
            if not exact or torch.equal(low.to(parameter.dtype), parameter):
                parameter.data = low
