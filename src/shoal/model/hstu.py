"""HSTU: sequences of events through attention without a softmax, and a transformer beside it.

Sequences of a batch lie behind each other, without padding. Attention is computed for all
sequences of one length at once.

Source: Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations, 2024, section 3; the transformer is that of Kang and McAuley,
Self-Attentive Sequential Recommendation, 2018.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernel.fused.pointwise import pointwise

TIME_BUCKETS = 128
# A bucket of a gap in time is a factor of e^0.301 wide.
_BUCKET = 0.301


class SequenceGroups:
    """Which rows of a batch's events are sequences of one length.

    Args:
        lengths: events of each sequence, at least 1; they lie behind each other.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        ends = torch.tensor(self.lengths).cumsum(0)
        self.total = int(ends[-1]) if self.lengths else 0
        self.last = ends - 1
        """Row of the last event of each sequence [B]."""
        by_length: dict[int, list[int]] = {}
        for at, length in enumerate(self.lengths):
            by_length.setdefault(length, []).append(at)
        self.members = [torch.tensor(one) for one in by_length.values()]
        """Sequences of each length, in the order of :meth:`split`."""
        self.rows: list[Tensor] | None = None
        if len(by_length) != 1:
            self.rows = [
                (ends[some] - length)[:, None] + torch.arange(length)
                for length, some in zip(by_length, self.members, strict=True)
            ]

    def split(self, values: Tensor) -> Iterator[Tensor]:
        """Of values [T, ...] those of each length [B, N, ...]."""
        if self.rows is None:
            yield values.view(len(self.lengths), -1, *values.shape[1:])
        else:
            for rows in self.rows:
                yield values[rows]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Back from [B, N, ...] of each length to [T, ...]."""
        if self.rows is None:
            return parts[0].flatten(0, 1)
        whole = parts[0].new_empty(self.total, *parts[0].shape[2:])
        rows = torch.cat([one.flatten() for one in self.rows])
        return whole.index_copy(0, rows, torch.cat([one.flatten(0, 1) for one in parts]))

    def positions(self) -> Tensor:
        """Of each event in its sequence [T]."""
        return torch.cat([torch.arange(length) for length in self.lengths])


@dataclass(frozen=True)
class HSTUShape:
    """Sizes of a network of events.

    Args:
        dim: of an event.
        blocks: layers.
        heads: of attention.
        head_dim: of queries, keys and values in a head.
        length: most events of a sequence, by which attention is divided.
        dropout: of the output of a layer.
        weights: of attention: ``silu`` of the products, or their ``softmax``.
        timed: attention knows how much time lies between two events.
    """

    dim: int = 50
    blocks: int = 8
    heads: int = 2
    head_dim: int = 25
    length: int = 200
    dropout: float = 0.2
    weights: Literal["silu", "softmax"] = "silu"
    timed: bool = False


def time_buckets(gaps: Tensor) -> Tensor:
    """Buckets of gaps in time, uint8: floor(ln(max(1, gap)) / 0.301), at most 128."""
    bucket = gaps.abs().clamp(min=1).float().log().div(_BUCKET).floor()
    return bucket.clamp(max=TIME_BUCKETS).to(torch.uint8)


class KeysValues(NamedTuple):
    """Of a history at one layer: keys and values [1, H, N, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass
class EventCache:
    """A history as the layers have seen it.

    Args:
        layers: keys and values of each.
        times: of its events [N]; None where they are not used.
    """

    layers: list[KeysValues] = field(default_factory=list)
    times: Tensor | None = None

    @property
    def length(self) -> int:
        """Events of the history."""
        return self.layers[0].keys.shape[2] if self.layers else 0


class HSTULayer(nn.Module):
    """Pointwise attention with a gate: Y = W2(norm(A V) * U) + X, A = SiLU(Q K' + bias) / n.

    Args:
        shape: of the network.
    """

    def __init__(self, shape: HSTUShape) -> None:
        super().__init__()
        self.shape = shape
        inner = shape.heads * shape.head_dim
        self.norm = nn.LayerNorm(shape.dim)
        self.uvqk = nn.Linear(shape.dim, 4 * inner)
        self.inner_norm = nn.LayerNorm(inner)
        self.out = nn.Linear(inner, shape.dim)
        # Added to a product by how far the key lies behind the query, and by the time between.
        self.position = nn.Parameter(torch.zeros(shape.length + 1))
        self.time = nn.Parameter(torch.zeros(TIME_BUCKETS + 1)) if shape.timed else None

    def forward(
        self,
        x: Tensor,
        groups: SequenceGroups,
        times: Tensor | None,
        cache: EventCache | None = None,
    ) -> Tensor:
        """Events [T, dim].

        Args:
            x: of all sequences.
            groups: which are sequences.
            times: of the events, in seconds [T]; None without.
            cache: filled with the keys and values of the only sequence.
        """
        gate, rest = self._projected(x)
        clocks = None if times is None else groups.split(times)
        parts = []
        for part in groups.split(rest):
            v, q, k = (
                one.view(*part.shape[:2], self.shape.heads, -1) for one in part.chunk(3, dim=-1)
            )
            if cache is not None:
                cache.layers.append(KeysValues(k.transpose(1, 2), v.transpose(1, 2)))
            gaps = None if clocks is None else time_buckets(_gaps(next(clocks)))
            parts.append(self._attend(q, k, v, gaps).flatten(2))
        return self._gated(x, gate, groups.join(parts))

    def flops(self, length: int) -> float:
        """Operations of an event in a sequence of some length, on average, forwards."""
        inner = self.shape.heads * self.shape.head_dim
        return 10.0 * self.shape.dim * inner + 2.0 * inner * (length + 1)

    def append(
        self, x: Tensor, past: KeysValues, gaps: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates [M, dim], each of which sees the history and itself.

        Args:
            x: the candidates.
            past: the history, of N events.
            gaps: seconds from each event of the history to the request, and 0 for a candidate
                itself [N + 1]; None without times.

        Returns:
            What is known behind each [M, dim], and its key and value [M, H, head_dim].
        """
        gate, rest = self._projected(x)
        v, q, k = (one.reshape(len(x), self.shape.heads, -1) for one in rest.chunk(3, dim=-1))
        length = past.keys.shape[2]
        bias = self.position[torch.arange(length, -1, -1)]
        if self.time is not None and gaps is not None:
            bias = bias + self.time[time_buckets(gaps).long()]
        products = torch.einsum("mhd,hnd->mhn", q, past.keys[0])
        own = (q * k).sum(-1, keepdim=True)
        products = torch.cat([products, own], dim=-1)
        if self.shape.weights == "softmax":
            weights = torch.softmax(products / math.sqrt(self.shape.head_dim) + bias, dim=-1)
        else:
            weights = F.silu(products + bias) / self.shape.length
        mixed = torch.einsum("mhn,hnd->mhd", weights[..., :length], past.values[0])
        mixed = mixed + weights[..., length:] * v
        return self._gated(x, gate, mixed.flatten(1)), k, v

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate, and values, queries and keys behind each other."""
        inner = self.shape.heads * self.shape.head_dim
        projected = F.silu(self.uvqk(self.norm(x)))
        return projected[..., :inner], projected[..., inner:]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor | None) -> Tensor:
        """Of queries, keys and values [B, N, H, d] what is mixed [B, N, H, d]."""
        if self.shape.weights == "silu":
            return pointwise(q, k, v, self.position, 1 / self.shape.length, buckets, self.time)
        at = torch.arange(q.shape[1])
        apart = at[:, None] - at
        bias = self.position[apart.clamp(min=0)].masked_fill(apart < 0, -math.inf)
        if buckets is not None and self.time is not None:
            bias = bias + self.time[buckets.long()].unsqueeze(1)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)

    def _gated(self, x: Tensor, gate: Tensor, mixed: Tensor) -> Tensor:
        y = self.out(self.inner_norm(mixed) * gate)
        return x + F.dropout(y, self.shape.dropout, self.training)


class TransformerLayer(nn.Module):
    """Softmax attention and a feed-forward block, each behind a norm, as SASRec has them.

    Args:
        shape: of the network; its feed-forward block is as wide as an event.
    """

    def __init__(self, shape: HSTUShape) -> None:
        super().__init__()
        self.shape = shape
        inner = shape.heads * shape.head_dim
        self.norm, self.norm_wide = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * inner)
        self.out = nn.Linear(inner, shape.dim)
        self.wide = nn.Linear(shape.dim, shape.dim)
        self.narrow = nn.Linear(shape.dim, shape.dim)

    def forward(
        self,
        x: Tensor,
        groups: SequenceGroups,
        times: Tensor | None,
        cache: EventCache | None = None,
    ) -> Tensor:
        """Events [T, dim]; times are not used.

        Raises:
            ValueError: a cache is given; only :class:`HSTULayer` fills one.
        """
        if cache is not None:
            raise ValueError("a transformer of events has no cache")
        parts = []
        for part in groups.split(self.qkv(self.norm(x))):
            heads = part.view(*part.shape[:2], 3, self.shape.heads, self.shape.head_dim)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            parts.append(mixed.transpose(1, 2).flatten(2))
        x = x + self._dropped(self.out(groups.join(parts)))
        return x + self._dropped(self.narrow(F.relu(self.wide(self.norm_wide(x)))))

    def flops(self, length: int) -> float:
        """Operations of an event in a sequence of some length, on average, forwards."""
        dim, inner = self.shape.dim, self.shape.heads * self.shape.head_dim
        return 8.0 * dim * inner + 4.0 * dim * dim + 2.0 * inner * (length + 1)

    def _dropped(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.shape.dropout, self.training)


class EventNetwork(nn.Module):
    """Events with their positions through layers.

    Args:
        shape: of the network.
        layer: of which it is made.
    """

    def __init__(
        self, shape: HSTUShape, layer: type[HSTULayer] | type[TransformerLayer] = HSTULayer
    ) -> None:
        super().__init__()
        self.shape = shape
        self.position = nn.Parameter(torch.randn(shape.length + 1, shape.dim) * 0.02)
        self.layers = nn.ModuleList(layer(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.dim)

    def forward(
        self,
        x: Tensor,
        groups: SequenceGroups,
        times: Tensor | None = None,
        cache: EventCache | None = None,
    ) -> Tensor:
        """What is known behind each event [T, dim].

        Args:
            x: of all sequences [T, dim].
            groups: which are sequences, none longer than the shape says.
            times: of the events, in seconds [T].
            cache: filled, if there is only one sequence.
        """
        x = x + self.position[groups.positions()]
        x = F.dropout(x, self.shape.dropout, self.training)
        for layer in self.layers:
            x = layer(x, groups, times, cache)
        if cache is not None:
            cache.times = times
        result: Tensor = self.norm(x)
        return result

    def flops(self, length: int) -> float:
        """Operations of an event in a sequence of some length, on average, forwards."""
        layers: Any = self.layers
        return float(sum(layer.flops(length) for layer in layers))

    def append(
        self, x: Tensor, cache: EventCache, time: float = 0.0, *, keep: bool = False
    ) -> Tensor:
        """Candidates behind a cached history [M, dim], none of which sees another.

        Args:
            x: [M, dim].
            cache: of the history, shorter than the shape's length.
            time: of the request, in seconds.
            keep: the only candidate has happened: it becomes the last event of the history.
        """
        x = x + self.position[cache.length]
        gaps = None
        if cache.times is not None:
            gaps = torch.cat([time - cache.times, cache.times.new_zeros(1)])
        for at, (layer, past) in enumerate(zip(self.layers, cache.layers, strict=True)):
            assert isinstance(layer, HSTULayer)
            x, key, value = layer.append(x, past, gaps)
            if keep:
                cache.layers[at] = KeysValues(
                    torch.cat([past.keys, key.transpose(0, 1)[None]], dim=2),
                    torch.cat([past.values, value.transpose(0, 1)[None]], dim=2),
                )
        if keep and cache.times is not None:
            cache.times = torch.cat([cache.times, cache.times.new_tensor([time])])
        result: Tensor = self.norm(x)
        return result


def _gaps(clock: Tensor) -> Tensor:
    """From each event to the time that is asked at another: of times [B, N] those [B, N, N].

    A query is asked when the next event happens, whose time is known then; the last of a sequence
    when it happens itself.
    """
    asked = torch.cat([clock[:, 1:], clock[:, -1:]], dim=1)
    return asked[:, :, None] - clock[:, None]
