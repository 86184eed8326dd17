"""Blocks of which the backward pass computes something again.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022 (selective).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import shoal.kernel.fused.causal  # noqa: F401 - defines its operator

# Products and attention, whose outputs are kept where the rest is computed again.
_KEPT = (
    torch.ops.shoal.causal_attention,
    *(
        getattr(torch.ops.aten, name)
        for name in (
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "_grouped_mm",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        )
    ),
)


def computed_again(block: nn.Module, *inputs: Any) -> Tensor:
    """The block's output; the backward pass computes again what is not kept.

    Kept is its input, and with an attribute ``keeps_products`` that is true what its products and
    its attention give.
    """
    contexts: Any = noop_context_fn
    if getattr(block, "keeps_products", False):
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        if not torch.compiler.is_compiling():
            contexts = functools.partial(_contexts, contexts)
    output: Tensor = checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
    return output


def own(x: Tensor) -> Tensor:
    """What may be written over: ``x``, or a copy where the backward pass is to find ``x`` kept."""
    return x.clone() if _here.keeps else x


class _Here(threading.local):
    """Whether this thread is in a block whose products are kept."""

    keeps = False


_here = _Here()


def _contexts(both: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    forward, again = both()
    return _marked(forward), _marked(again)


@contextlib.contextmanager
def _marked(context: AbstractContextManager[Any]) -> Iterator[None]:
    before, _here.keeps = _here.keeps, True
    try:
        with context:
            yield
    finally:
        _here.keeps = before


def _policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    kept = getattr(op, "overloadpacket", op) in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
