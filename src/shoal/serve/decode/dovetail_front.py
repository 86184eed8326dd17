"""The first layers of a target beside its drafter, over a cache with the same blocks as the host's.

Shapes: N rows of a step, D hidden, V vocabulary.

Source: Zhang et al., Dovetail, 2025, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.parts import table
from shoal.ir import Copy, ServeJob
from shoal.kernel.protocols import Ready
from shoal.model.accelerate import accelerate
from shoal.model.config import ModelConfig
from shoal.model.parameters import Parameters
from shoal.model.transformer import Block, Transformer
from shoal.serve.attention import PagedAttention
from shoal.serve.cache import PagedCache
from shoal.serve.decode.dovetail_steps import Inside, Several

__all__ = ["Front", "layer_numbers"]

# The layers need no embedding of their own, and a model has one.
_NO_TOKENS = 64


def layer_numbers(config: ModelConfig) -> int:
    """Numbers of the weights of one layer."""
    with torch.device("meta"):
        return sum(one.numel() for one in Block(config, 0).parameters())


class _Room(NamedTuple):
    """A cache, and the kernels that read it: decodes and trees, and prompts."""

    cache: PagedCache
    kernel: Ready | None
    prompts: Ready | None


class Front:
    """Layers, and the caches of those who ask for them.

    Args:
        parameters: of the whole model; only these layers are read.
        count: layers.
        embed_VD: the target's.
        job: of the target.
        ready: they are computed by the kernels of inference, as the target is.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(
        self, parameters: Parameters, count: int, embed_VD: Tensor, job: ServeJob, *, ready: bool
    ) -> None:
        from shoal.serve.build import positions

        config = parameters.config
        small = {"num_layers": count, "vocab_size": _NO_TOKENS, "tied": True}
        with torch.device("meta"):
            layers = Transformer(config.model_copy(update=small))
        layers.embed = nn.Embedding(_NO_TOKENS, config.hidden)
        layers.norm.weight = nn.Parameter(torch.ones(config.hidden))
        for name, parameter in list(layers.blocks.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(parameters(f"blocks.{name}").view(parameter.shape))
            setattr(layers.blocks.get_submodule(owner), leaf, value)
        layers = layers.to(embed_VD.device, embed_VD.dtype).requires_grad_(False).eval()
        self._weights = sum(one.numel() * one.element_size() for one in layers.blocks.parameters())
        if ready:
            layers = accelerate(
                layers, job.kernel, positions=positions(job, config), exact=job.exact
            )
        self._layers, self._embed, self._job = layers, embed_VD, job
        self._form = table("kv_format").build(job.kv_format, where="kv_format")
        self._rooms: dict[int, _Room] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of weights and of all caches."""
        return self._weights + sum(one.cache.nbytes for one in self._rooms.values())

    def room(self, number: int, num_blocks: int, block_size: int) -> None:
        """Have a cache of this number, or no longer where it has no blocks.

        Raises:
            ServeError: there is no memory for it.
        """
        if not num_blocks:
            self._rooms.pop(number, None)
            return
        from shoal.serve.build import attention_kernel

        like, job, layers = self._embed, self._job, self._layers
        cache = PagedCache(
            layers.config, num_blocks, block_size,
            dtype=like.dtype, device=like.device, form=self._form,
        )  # fmt: skip
        kernels = (attention_kernel(job, layers, cache, prompts=many) for many in (False, True))
        self._rooms[number] = _Room(cache, *kernels)

    def states(self, number: int, step: Several) -> Tensor:
        """What comes out of these layers [N, D].

        Args:
            number: of the cache; its blocks are copied first, and it has the rows then.
            step: rows.
        """
        cache, kernel, prompts = self._rooms[number]
        device = self._embed.device
        for kind, numbers in step.moved:
            if kind == Inside.KEEP:
                half = len(numbers) // 2
                cache.keep(numbers[:half], numbers[half:])
            else:
                cache.move([Copy(*numbers)])
        tokens_N, position_N, slots_N = (
            torch.from_numpy(one).to(device)
            for one in (step.tokens, step.positions(), step.slots(cache.block_size))
        )
        mixer = PagedAttention(
            cache, step.contexts, slots_N, cache.dtype, kernel,
            prompts=prompts, exact=self._job.exact,
        )  # fmt: skip
        x_ND, branch_ND = self._layers.through(self._embed[tokens_N], position_N, mixer)
        return x_ND + branch_ND
