"""Grouped-query attention, causal or to all, with a document mask or a cache of keys and values.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, G = H / K,
d head_dim.

Source: Ainslie et al., GQA, 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernel.fused.causal import causal as causal_attention
from shoal.kernel.fused.causal import takes
from shoal.kernel.protocols import Ready
from shoal.model.config import ModelConfig
from shoal.model.desync import own, shared
from shoal.model.norm import RMSNorm
from shoal.model.parscale import before, spread
from shoal.model.rope import rotate, rotate_split

# Scores of one sequence that the backward pass may hold at a time; beyond, the tiled
# kernel is used both ways.
_MAX_SCORES = 2**25

# Queries of one block of the backward pass.
_QUERY_BLOCK = 128


class KVCache:
    """Keys and values of the tokens seen so far, in buffers of a fixed size.

    Those of virtual tokens, which a model with streams has, lie before them and are not counted.

    Args:
        capacity: most tokens a sequence can have.
        dtype: of the keys and values.
        streams: how many the model computes; all that it has, if not given.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        streams: int | None = None,
    ) -> None:
        num = streams or config.architecture.streams.num
        batch *= num
        self._virtual = config.architecture.streams.prefix if num > 1 else 0
        rows = self._virtual + capacity
        size = (config.num_layers, 2, batch, rows, config.num_kv_heads, config.head_dim)
        self._store = torch.empty(size, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def append(
        self, layer: int, k_BTKd: Tensor, v_BTKd: Tensor, prefix_2PMKd: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens of one layer; returns all of its keys and values [B, S, K, d].

        :attr:`length` is moved on by the model, once for all layers. With the first tokens the
        layer's prefix is stored, which comes first in what is returned.
        """
        stop = self.length + k_BTKd.shape[1]
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens in a cache for {self.capacity}")
        keys, values = self._store[layer]
        if prefix_2PMKd is not None and not self.length:
            for side, first in zip((keys, values), spread(prefix_2PMKd, len(keys)), strict=True):
                side[:, : self._virtual] = first
        start, stop = self._virtual + self.length, self._virtual + stop
        keys[:, start:stop] = k_BTKd
        values[:, start:stop] = v_BTKd
        return keys[:, :stop], values[:, :stop]

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer so far, [B, length, K, d]."""
        keys, values = self._store[layer, :, :, self._virtual : self._virtual + self.length]
        return keys, values

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, length, K, d] of every layer."""
        return [self.held(layer) for layer in range(len(self._store))]


class Mixer(Protocol):
    """Attention over keys and values that another object keeps."""

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """Store the new keys and values of N tokens; what their queries see [N, H, d]."""


Turn = Callable[["Attention", Tensor], tuple[Tensor, Tensor, Tensor]]
"""From projected tokens [N, (H + 2K) d] to q [N, H, d], k and v [N, K, d], turned."""


def document_mask(documents_BT: Tensor, dtype: torch.dtype, *, causal: bool = True) -> Tensor:
    """Additive mask [B, 1, T, T]: a token sees what came before it in its document, and itself.

    Not ``causal``, it sees all of its document.
    """
    length = documents_BT.shape[1]
    same = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    hidden = (same.tril_() if causal else same).logical_not_().unsqueeze(1)
    mask = torch.zeros(len(documents_BT), 1, length, length, dtype=dtype, device=same.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _causal_mask(length: int, dtype: torch.dtype) -> Tensor:
    return torch.full((1, 1, length, length), float("-inf"), dtype=dtype).triu_(1)


class _Attend(torch.autograd.Function):
    """The tiled kernel forward, plain matrix products backward.

    PyTorch's tiled backward kernel for CPUs leaves the matrix units idle in reduced
    precision; computing the scores of a few sequences again with ordinary products takes
    about half the time.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, _ = kernel(q, k, v, 0.0, causal and mask is None, attn_mask=mask)
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, mask)
        result: Tensor = out
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, mask = ctx.saved_tensors
        batch, heads, length, _ = q.shape
        # Gradients in the layout [B, T, heads, d] that the projections have.
        grads = [torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
        rows = max(1, _MAX_SCORES // (heads * length * k.shape[2]))
        for first in range(0, batch, rows):
            part = slice(first, first + rows)
            _attend_backward(
                q[part],
                k[part],
                v[part],
                mask if mask is None or len(mask) == 1 else mask[part],
                grad[part],
                [x[part] for x in grads],
                causal=ctx.causal,
            )
        return grads[0], grads[1], grads[2], None, None


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    grad: Tensor,
    out: list[Tensor],
    *,
    causal: bool,
) -> None:
    """Write the gradients of ``q``, ``k`` and ``v`` to ``out``, some queries at a time.

    Where queries see what is before them, a block of them needs the keys up to its end alone, so
    most of the upper triangle is never computed. The last block comes first, for it touches every
    key.
    """
    _, heads, length, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    scale = dim**-0.5
    key, value = (x.reshape(-1, keys, dim) for x in (k, v))
    key_grad, value_grad = torch.empty_like(key), torch.empty_like(value)
    first = True
    for start in reversed(range(0, length, _QUERY_BLOCK)):
        stop = min(start + _QUERY_BLOCK, length)
        seen = stop + keys - length if causal else keys
        group = (-1, (stop - start) * heads // kv_heads, dim)
        query = (q[:, :, start:stop] * scale).reshape(group)
        out_grad = grad[:, :, start:stop].reshape(group)
        scores = torch.bmm(query, key[:, :seen].transpose(1, 2))
        per_head = scores.view(-1, heads, stop - start, seen)
        if mask is not None:
            per_head.add_(mask[:, :, start:stop, :seen])
        elif causal:
            per_head[..., start:].add_(_causal_mask(stop - start, q.dtype))
        weights = torch.softmax(scores, -1)
        weights_grad = torch.bmm(out_grad, value[:, :seen].transpose(1, 2))
        scores_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, q.dtype)
        query_grad = torch.bmm(scores_grad, key[:, :seen])
        torch.mul(
            query_grad.view(-1, heads, stop - start, dim), scale, out=out[0][:, :, start:stop]
        )
        beta = int(not first)  # 0 ignores what the fresh buffers hold
        first = False
        for total, left, right in (
            (key_grad, scores_grad, query),
            (value_grad, weights, out_grad),
        ):
            total[:, :seen].baddbmm_(left.transpose(1, 2), right, beta=beta)
    out[1].copy_(key_grad.view(-1, kv_heads, keys, dim))
    out[2].copy_(value_grad.view(-1, kv_heads, keys, dim))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Softmax attention of grouped queries.

    Args:
        q: [B, H, T, d].
        k: [B, K, S, d].
        v: [B, K, S, d].
        mask: additive, broadcastable to [B, H, T, S], or None.
        causal: no query sees a key beyond its own place, the last query being at the last key;
            needs T = S, or a mask. A mask says so itself, and less is computed then.

    Returns:
        [B, H, T, d].
    """
    square = q.shape[2] == k.shape[2]
    trained = (
        q.device.type == "cpu"
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
    if trained and causal and mask is None and takes(q, k):
        return causal_attention(q, k, v)
    if (
        trained
        and (square or mask is not None)
        and q.shape[1] * q.shape[2] * k.shape[2] <= _MAX_SCORES
    ):
        if mask is not None and mask.dim() == 2:
            mask = mask[None, None]
        out: Tensor = _Attend.apply(q, k, v, mask, causal)  # type: ignore[no-untyped-call]
        return out
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )


class Attention(nn.Module):
    """Grouped-query attention with one matrix for queries, keys and values.

    Rows of ``qkv_proj``: H heads of queries, K of keys, K of values.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.causal = config.causal
        self.apart = config.architecture.residual.apart
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden, rows, bias=config.attention_bias)
        self.o_proj = nn.Linear(
            config.num_heads * config.head_dim, config.hidden, bias=config.output_bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        streams = config.architecture.streams
        self.streams = streams.num  # that are computed
        self.prefix: nn.Parameter | None = None  # keys and values of virtual tokens, by stream
        if streams.num > 1:
            size = (2, streams.num, streams.prefix, config.num_kv_heads, config.head_dim)
            self.prefix = nn.Parameter(torch.empty(size))
        self.kernel: Ready | None = None  # of inference: see shoal.model.accelerate
        self.trained: Ready | None = None  # of training: see shoal.model.trained

    def forward(
        self,
        x_BTD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Mix each token with those it sees: those before it, or those that ``mask`` says."""
        length = x_BTD.shape[1]
        q, k, v = self._project(x_BTD, cos, sin)
        prefix: Tensor | None = None
        # A cache that has tokens has the prefix, too.
        if self.streams > 1 and self.prefix is not None and not (cache and cache.length):
            prefix = self.prefix[:, : self.streams]
        if cache is not None:
            k, v = cache.append(self.layer, k, v, prefix)
        elif prefix is not None:
            k, v = before(prefix, k, v)
        out = attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask,
            causal=self.causal and (mask is not None or length > 1),
        )
        seen = out.transpose(1, 2).reshape(len(q), length, -1)
        mixed: Tensor = self.o_proj(shared(seen, self.apart))
        return mixed

    def flat(self, x_ND: Tensor, turn: Turn, mixer: Mixer) -> Tensor:
        """What tokens of any sequences see [N, H d], before ``o_proj``; ``mixer`` knows it."""
        q, k, v = turn(self, self._own(x_ND))
        return mixer(self.layer, q, k, v).reshape(len(q), -1)

    def _project(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values."""
        return self.rotated(self._own(x_BTD), cos, sin)

    def _own(self, x: Tensor) -> Tensor:
        """Queries, keys and values; of streams that are apart, each gives those of its heads."""
        keys = self.num_kv_heads * self.head_dim
        return own(self.qkv_proj(x), self.apart, (self.num_heads * self.head_dim, keys, keys))

    def rotated(self, qkv_BTR: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, T, H, d] and keys, and values [B, T, K, d], of projected tokens."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = qkv_BTR.view(*qkv_BTR.shape[:2], heads + 2 * kv_heads, self.head_dim)
        if self.trained is not None:
            norms = (None if n is None else n.weight for n in (self.q_norm, self.k_norm))
            q, k, v = self.trained(qkv, cos[:, 0], sin[:, 0], *norms)
            return q, k, v
        if self.q_norm is None or self.k_norm is None:
            return rotate_split(qkv, cos, sin, heads, kv_heads)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 2)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v
