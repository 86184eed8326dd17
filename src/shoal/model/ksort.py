"""K-sort: the channels of all keys in an order in which block floats lose less.

The rows of the key projection, and those of the queries that meet these keys, are permuted
once; the rotary step receives where a channel's partner and angle now are. No score changes, and
nothing is sorted at inference. For inference only: what is written to a directory must be the
model before.

Shapes: N tokens, H query heads, K key/value heads, d head_dim, C = d / 2 rotary pairs.

Source: Accurate Block Quantization in LLMs with Outliers, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError, require
from shoal.kernel.kv.ksort import Mode, channel_order, rotary
from shoal.kernel.protocols import KVFormat, Ready
from shoal.model.attention import Attention
from shoal.model.transformer import Transformer

By = Literal["weight", "calibration"]

# Share of the tokens whose keys are smaller than a channel's size, by calibration.
_QUANTILE = 0.999


class SortedAttention(Attention):
    """Attention whose queries and keys have their channels in another order.

    Args:
        attention: whose modules it takes over; the rows of its projection are permuted.
        channel_Kd: which channel comes to each place of a key/value head.
    """

    def __init__(self, attention: Attention, channel_Kd: Tensor) -> None:
        nn.Module.__init__(self)
        self.layer = attention.layer
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.qkv_proj, self.o_proj = attention.qkv_proj, attention.o_proj
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.prefix, self.causal = attention.prefix, attention.causal
        self.apart, self.streams = attention.apart, attention.streams
        # Of every head that is rotated: queries, then keys.
        owner = torch.arange(self.num_heads) // (self.num_heads // self.num_kv_heads)
        of_head = torch.cat([owner, torch.arange(self.num_kv_heads)]).to(channel_Kd.device)
        partner, pair, sign = rotary(channel_Kd)
        self._channel = channel_Kd[of_head]
        self._partner, self._pair, self._sign = partner[of_head], pair[of_head], sign[of_head]
        neighbour = torch.arange(self.head_dim, device=channel_Kd.device) ^ 1
        self._adjacent = bool((self._partner == neighbour).all())
        self._permute()

    @property
    def kernel(self) -> Ready | None:
        """None: a fused rotation knows one order of channels only."""
        return None

    @kernel.setter
    def kernel(self, _: Ready | None) -> None:
        """Not taken; see the getter."""

    @torch.no_grad()
    def _permute(self) -> None:
        turned, dim = self.num_heads + self.num_kv_heads, self.head_dim
        for tensor in (self.qkv_proj.weight, self.qkv_proj.bias):
            if tensor is not None:
                heads = tensor[: turned * dim].view(turned, dim, *tensor.shape[1:])
                index = self._channel.view(turned, dim, *[1] * (tensor.dim() - 1))
                heads.copy_(heads.gather(1, index.expand_as(heads)))

    def rotated(self, qkv_BTR: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, T, H, d] and keys, and values [B, T, K, d], of projected tokens."""
        heads, turned = self.num_heads, self.num_heads + self.num_kv_heads
        every = turned + self.num_kv_heads
        qkv = qkv_BTR.view(*qkv_BTR.shape[:2], every, self.head_dim)
        x = qkv[:, :, :turned]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = x[:, :, :heads], x[:, :, heads:]
            x = torch.cat([self._normed(q, self.q_norm, 0), self._normed(k, self.k_norm, heads)], 2)
        if self._adjacent:
            partner = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner = x.gather(-1, self._partner.expand_as(x))
        cos_THd = cos[:, 0][:, self._pair]
        sin_THd = sin[:, 0][:, self._pair] * self._sign.to(sin.dtype)
        y = x * cos_THd + partner * sin_THd
        return y[:, :, :heads], y[:, :, heads:], qkv[:, :, turned:]

    def _normed(self, x: Tensor, norm: nn.Module, first: int) -> Tensor:
        """Root mean square norm of heads whose gains are in the order of their channels."""
        eps: float = norm.eps  # type: ignore[assignment]
        weight: Tensor = norm.weight  # type: ignore[assignment]
        gain = weight[self._channel[first : first + x.shape[2]]]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return x * scale.to(x.dtype) * gain.to(x.dtype)


@torch.no_grad()
def channel_sizes(
    model: Transformer, *, by: By = "weight", tokens_BT: Tensor | None = None
) -> list[Tensor]:
    """Size [K, d] of the key channels of every layer.

    Args:
        model: what is looked at.
        by: weight: root mean square of a channel's key where the normed input has unit variance:
            the norm of its row, times the gains of the norm before, and its bias. Needs no data.
            calibration: the magnitude that 99.9 % of the rotated keys of a text stay below.
        tokens_BT: that text.

    Raises:
        ModelError: calibration without text, or a layer whose weights are not plain.
    """
    if by == "calibration":
        if tokens_BT is None:
            raise ModelError("ksort by calibration: no text; give tokens, or sort by weight")
        with captured(model) as seen:
            model.hidden(tokens_BT)
        return [_quantile(k_SKd.abs()) for _, k_SKd in seen]
    sizes = []
    for block in model.blocks:
        attention: Attention = block.attention  # type: ignore[assignment]
        _require_plain(attention)
        gain_D: Tensor = block.attention_norm.weight  # type: ignore[union-attr, assignment]
        dim, kv_heads = attention.head_dim, attention.num_kv_heads
        rows = slice(attention.num_heads * dim, (attention.num_heads + kv_heads) * dim)
        square = (attention.qkv_proj.weight[rows].float() * gain_D.float()).square().sum(-1)
        if attention.qkv_proj.bias is not None:
            square += attention.qkv_proj.bias[rows].float().square()
        size_Kd = square.sqrt().view(kv_heads, dim)
        if attention.k_norm is not None:
            size_Kd = size_Kd * attention.k_norm.weight.float().abs()
        sizes.append(size_Kd)
    return sizes


@torch.no_grad()
def ksort(
    model: Transformer,
    *,
    by: By = "weight",
    mode: Mode = "pairs",
    tokens_BT: Tensor | None = None,
) -> Transformer:
    """Sort the key channels of ``model``, in place; before kernels are prepared for it.

    Args:
        model: with plain weights.
        by: what determines the size of a channel; see :func:`channel_sizes`.
        mode: pairs or free; see :func:`~shoal.kernel.kv.ksort.channel_order`.
        tokens_BT: text for the calibration.

    Returns:
        The model.

    Raises:
        ModelError: it is sorted already, or its weights are packed or prepared.
        KernelError: there is no such mode.
    """
    for block in model.blocks:
        _require_plain(block.attention)  # type: ignore[arg-type]
    sizes = channel_sizes(model, by=by, tokens_BT=tokens_BT)
    orders = [channel_order(size_Kd, mode) for size_Kd in sizes]
    for block, channel_Kd in zip(model.blocks, orders, strict=True):
        block.attention = SortedAttention(block.attention, channel_Kd)  # type: ignore[arg-type]
    return model


def _require_plain(attention: Attention) -> None:
    if isinstance(attention, SortedAttention):
        raise ModelError(
            f"ksort: the channels of layer {attention.layer} are sorted already; read the model "
            "again to sort them otherwise"
        )
    projection: object = attention.qkv_proj
    require(
        type(projection) is nn.Linear,
        f"ksort of layer {attention.layer}: projection",
        type(projection).__name__,
        expected="plain weights",
        hint="sort the channels before weights are packed or kernels prepared",
        error=ModelError,
    )


def _quantile(size_SKd: Tensor) -> Tensor:
    count = len(size_SKd)
    return size_SKd.float().kthvalue(max(1, int(_QUANTILE * count)), 0).values


@contextmanager
def captured(model: Transformer) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Rotated queries [S, H, d] and keys [S, K, d] of every layer, of passes made inside."""
    seen: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0)) for _ in model.blocks]

    def keep(layer: int, q: Tensor, k: Tensor) -> Tensor:
        old_q, old_k = seen[layer]
        new_q, new_k = q.detach().flatten(0, 1), k.detach().flatten(0, 1)
        if len(old_q):
            new_q, new_k = torch.cat([old_q, new_q]), torch.cat([old_k, new_k])
        seen[layer] = new_q, new_k
        return k

    with _rotations(model, keep, None):
        yield seen


@contextmanager
def coded(
    model: Transformer, keys: KVFormat | None, values: KVFormat | None = None
) -> Iterator[Transformer]:
    """The model with keys and values as a cache of these formats would give them back.

    Args:
        model: no kernels prepared for it.
        keys: format of the keys; None leaves them.
        values: format of the values; None leaves them.
    """

    def through(form: KVFormat, x_BTKd: Tensor) -> Tensor:
        flat = x_BTKd.flatten(0, 1)
        return form.decode(*form.encode(flat)).to(x_BTKd.dtype).view(x_BTKd.shape)

    with _rotations(
        model,
        lambda _, __, k: k if keys is None else through(keys, k),
        None if values is None else lambda v: through(values, v),
    ):
        yield model


@contextmanager
def _rotations(
    model: Transformer,
    on_keys: Callable[[int, Tensor, Tensor], Tensor],
    on_values: Callable[[Tensor], Tensor] | None,
) -> Iterator[None]:
    """Let functions see what attention is computed from, and change it."""
    layers: list[Attention] = [block.attention for block in model.blocks]  # type: ignore[misc]

    def wrap(attention: Attention) -> Ready:
        inner = attention.rotated

        def rotated(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = inner(*given)
            k = on_keys(attention.layer, q, k)
            return q, k, v if on_values is None else on_values(v)

        return rotated

    for attention in layers:
        attention.rotated = wrap(attention)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for attention in layers:
            del attention.rotated
