"""PyTorch's optimizers, run eagerly.

The methods of :class:`torch.optim.Optimizer` are wrapped so that ``torch.compile`` leaves them out,
and the first call of one imports the compiler, which takes as long as PyTorch itself: half of what
a rank needs before its first step. No update is compiled here, so what is wrapped is called itself.
"""

from __future__ import annotations

import inspect

import torch


class EagerOptimizer(torch.optim.Optimizer):
    """An optimizer that does not import the compiler; to be named before PyTorch's own class."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class EagerAdamW(EagerOptimizer, torch.optim.AdamW):
    """PyTorch's AdamW, with the same updates."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
