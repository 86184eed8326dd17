"""The first layers of a target beside its drafter, over a cache with the same blocks as the host's.

Shapes: N rows of a step, D hidden, V vocabulary.

Source: Zhang et al., Dovetail, 2025, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.parts import table
from shoal.ir import Copy, ServeJob
from shoal.kernel.protocols import Ready
from shoal.model.accelerate import accelerate
from shoal.model.config import ModelConfig
from shoal.model.parameters import Parameters
from shoal.model.transformer import Transformer, TransformerBlock
from shoal.serve.cache.attention import PagedAttention
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import Recordings, TreeRows
from shoal.serve.decode.dovetail.steps import CopyMode, RequestBatch

# The layers need no embedding of their own, and a model has one.
_NO_TOKENS = 64


def layer_numbers(config: ModelConfig) -> int:
    """Numbers of the weights of one layer."""
    with torch.device("meta"):
        return sum(one.numel() for one in TransformerBlock(config, 0).parameters())


class _Room(NamedTuple):
    """A cache, the kernels that read it (decodes and trees, and prompts), and recorded steps."""

    cache: PagedCache
    kernel: Ready | None
    prompts: Ready | None
    recorded: Recordings | None


class _Layers:
    """Layers as a recording asks for them: their output is what comes of it."""

    def __init__(self, model: Transformer, embed_VD: Tensor) -> None:
        self.model, self.weight, self.through = model, embed_VD, model.through

    def finished(self, x_ND: Tensor, branch_ND: Tensor) -> Tensor:
        """The stream with what is left to add to it; a norm's kernel adds, and can be recorded."""
        return self.model.norm.after(x_ND, branch_ND)[0]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Nothing comes behind the layers."""
        return hidden_RD


class SharedLayers:
    """Layers, and the caches of the processes that use them.

    Args:
        parameters: of the whole model; only these layers are read.
        count: layers.
        embed_VD: the target's.
        ready: they are computed by the kernels of inference, as the target is.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(
        self, parameters: Parameters, count: int, embed_VD: Tensor, job: ServeJob, *, ready: bool
    ) -> None:
        from shoal.serve.engine.build import positions

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
        self._layers, self._embed, self._job = _Layers(layers, embed_VD), embed_VD, job
        self._recordable = ready and embed_VD.device.type == "cpu"
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
        from shoal.serve.engine.build import attention_kernel, positions

        like, job, layers = self._embed, self._job, self._layers.model
        cache = PagedCache(
            layers.config, num_blocks, block_size,
            dtype=like.dtype, device=like.device, form=self._form,
        )  # fmt: skip
        kernel, prompts = (
            attention_kernel(job, layers, cache, prompts=many) for many in (False, True)
        )
        recorded = None
        if self._recordable and kernel is not None:
            recorded = Recordings(self._layers, cache, kernel, positions(job, layers.config))
        self._rooms[number] = _Room(cache, kernel, prompts, recorded)

    def states(self, number: int, step: RequestBatch) -> Tensor:
        """What comes out of these layers [N, D].

        Args:
            number: of the cache; its blocks are copied first, and it has the rows then.
            step: rows.
        """
        cache, kernel, prompts, recorded = self._rooms[number]
        device = self._embed.device
        for kind, numbers in step.moved:
            if kind == CopyMode.KEEP:
                half = len(numbers) // 2
                cache.keep(numbers[:half], numbers[half:])
            else:
                cache.move([Copy(*numbers)])
        if recorded is not None and all(
            one.length == 1 or one.seen is not None for one in step.contexts
        ):
            result = recorded.play(_branches(step))
            if result is not None:
                return result[0]
        tokens_N, position_N, slots_N = (
            torch.from_numpy(one).to(device)
            for one in (step.tokens, step.positions(), step.slots(cache.block_size))
        )
        mixer = PagedAttention(
            cache, step.contexts, slots_N, cache.dtype, kernel,
            prompts=prompts, exact=self._job.exact,
        )  # fmt: skip
        layers = self._layers
        return layers.finished(*layers.through(self._embed[tokens_N], position_N, mixer))


def _branches(step: RequestBatch) -> list[TreeRows]:
    """Rows of decodes and trees as a recording takes them."""
    branches, row, position = [], 0, step.positions()
    for one in step.contexts:
        rows = slice(row, row + one.length)
        seen = np.ones(1, dtype=np.int64) if one.seen is None else one.seen
        depth = position[rows] - one.start
        tokens = step.tokens[rows]
        branches.append(TreeRows(tokens, one.blocks, one.start, one.start, depth, seen))
        row = rows.stop
    return branches
