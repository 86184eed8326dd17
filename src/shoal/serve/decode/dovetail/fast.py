"""The net of Dovetail by the kernels of inference, over a paged cache that all requests share.

What the gate makes of a token depends on nothing else, so it is kept of every token: in place of
the embedding v = SiLU(W_2 e) and b + W_v v, beside each other. Of a feature f the gate needs W_1 f
and W_u W_1 f, one product. The layers are a model's, computed as the target is.

Shapes: T places, D hidden, V vocabulary, K guesses behind a place.

Source: Zhang et al., Dovetail, 2025, section 3.2.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernel.fused import guess
from shoal.kernel.protocols import Ready
from shoal.model.accelerate import accelerate
from shoal.model.attention import Mixer
from shoal.model.config import ModelConfig
from shoal.model.drafters.fusion import FusionDrafter
from shoal.model.transformer import Transformer
from shoal.serve.cache.attention import PagedAttention, RequestContext
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.dovetail.net import NetInput, NetOutput, NetState
from shoal.serve.decode.heads.fast import ready_linear

# The layers need no embedding, and a model has one.
_NO_TOKENS = 64


def fits(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these layers can be computed so here."""
    plain = config.architecture.residual.standard and not config.num_experts
    return plain and config.architecture.streams.num == 1 and guess.native(dtype, device)


class FastFusion:
    """Gate, layers and head, prepared for drafting.

    Args:
        net: trained; its layers change into those of inference.
        embed_VD: the target's.
        head_VD: the target's output matrix.
        weights: format of the matrices.

    Attributes:
        shell: a model of the layers.
        table: of every token, what the gate makes of it [V, 2 D].
    """

    def __init__(
        self, net: FusionDrafter, embed_VD: Tensor, head_VD: Tensor, weights: str = "plain"
    ) -> None:
        wide = torch.promote_types(embed_VD.dtype, torch.float32)
        of_u, of_v = net.gate.weight.to(wide).chunk(2, -1)
        first, second = (one.weight.to(wide) for one in (net.feature, net.embedding))
        self.table = embed_VD.new_empty(len(embed_VD), 2 * embed_VD.shape[1])
        for start in range(0, len(embed_VD), 4096):
            v = F.silu(embed_VD[start : start + 4096].to(wide) @ second.T)
            made = torch.cat((v, v @ of_v.T + net.gate.bias.to(wide)), -1)
            self.table[start : start + 4096] = made.to(embed_VD.dtype)
        both = torch.cat((first, of_u @ first)).to(embed_VD.dtype)
        config = net.config.model_copy(update={"vocab_size": _NO_TOKENS, "tied": True})
        shell = Transformer(config).to(embed_VD.device, embed_VD.dtype).requires_grad_(False)
        for place, block in enumerate(net.blocks):
            shell.blocks[place] = block
        layers = [both.numel(), *(one.numel() for one in net.blocks.parameters())]
        self.nbytes = (sum(layers) + self.table.numel() + head_VD.numel()) * embed_VD.itemsize
        if weights != "plain":
            for module in list(net.blocks.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(module, name, ready_linear(child.weight, child.bias, weights))
        self._into = ready_linear(both, None, weights)
        self._head = ready_linear(head_VD, None, weights)
        self.shell = accelerate(shell)

    def features(
        self, features_TD: Tensor, tokens_T: Tensor, position_T: Tensor, mixer: Mixer
    ) -> Tensor:
        """Features one place further [T, D].

        Args:
            features_TD: the target's, or the net's own.
            tokens_T: that come behind them, int64.
            position_T: of the features.
            mixer: keeps keys and values, and knows what each place sees.
        """
        x_TD = features_TD.new_empty(features_TD.shape)
        guess.gate(self._into(features_TD), self.table, tokens_T, x_TD)
        stream_TD, branch_TD = self.shell.through(x_TD, position_T, mixer)
        # The norm is of the model that the layers are taken for; it adds what is left on its way.
        return self.shell.norm.after(stream_TD, branch_TD)[0]

    def best(self, features_WD: Tensor, tokens_WK: Tensor, values_WK: Tensor) -> None:
        """The best tokens behind features and the logs of their probabilities; both are written."""
        guess.best(self._head(features_WD), tokens_WK, values_WK)


class RequestBlocks:
    """What a request has of the shared cache: blocks, and places in them that are written."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.length = 0


class PagedFusion:
    """Passes of a ready net over its paged cache.

    Args:
        attention: kernel of ``paged_attention`` that reads trees; pages are copied without one.
        prompts: the same for prompts.
        count: K.
    """

    def __init__(
        self,
        net: FastFusion,
        cache: PagedCache,
        attention: Ready | None,
        prompts: Ready | None,
        count: int,
    ) -> None:
        self.net, self.cache = net, cache
        self._attention, self._prompts = attention, prompts
        self.count, self.like, self.width = count, net.table, net.table.shape[1] // 2
        self._free = list(range(cache.num_blocks))

    @property
    def nbytes(self) -> int:
        return self.net.nbytes + self.cache.nbytes

    def hold(self) -> RequestBlocks:
        return RequestBlocks()

    def reserve(self, held: NetState, places: int) -> bool:
        assert isinstance(held, RequestBlocks)
        missing = -(-places // self.cache.block_size) - len(held.blocks)
        if missing > len(self._free):
            return False
        if missing > 0:
            # A new list: what is recorded compares it with the one that it has written down.
            held.blocks = [*held.blocks, *self._free[:missing]]
            del self._free[:missing]
        return True

    def free(self, held: NetState) -> None:
        assert isinstance(held, RequestBlocks)
        self._free += held.blocks
        held.blocks = []

    def read(self, held: NetState, rows: NetInput) -> NetOutput:
        assert isinstance(held, RequestBlocks)
        start, count, size = held.length, len(rows.tokens), self.cache.block_size
        at = np.arange(start, start + count)
        slots = np.asarray(held.blocks)[at // size] * size + at % size
        root = None if rows.seen is None else rows.base - 1
        context = RequestContext(start, count, held.blocks, rows.seen, root)
        fed = torch.from_numpy(np.array([rows.tokens, rows.places, slots], dtype=np.int64))
        mixer = PagedAttention(
            self.cache, [context], fed[2], self.like.dtype, self._attention, prompts=self._prompts
        )
        out_TD = self.net.features(rows.features.contiguous(), fed[0], fed[1], mixer)
        held.length += count
        wanted_WD = out_TD[-1:].contiguous() if rows.last else out_TD
        tokens = torch.empty(len(wanted_WD), self.count, dtype=torch.int64)
        values = torch.empty(len(wanted_WD), self.count, dtype=torch.float32)
        self.net.best(wanted_WD, tokens, values)
        return NetOutput(wanted_WD, tokens.numpy(), values.numpy())
