"""ParScale: the same weights on several streams of the same tokens, and a learned mean of them.

Every stream sees a trained prefix of its own, keys and values of virtual tokens in every layer,
before the real tokens, whose positions it does not move. Behind the last block the streams are
weighed token by token::

    w = softmax(down(silu(up([h_1, ..., h_P])))),  w <- (1 - eps) w + eps / P,  h = sum_p w_p h_p

Streams lie on the batch axis, stream by stream; in a paged cache, where a token has one place, they
are more heads of it. Prefixes are parameters, which a cache may hold beside the tokens.

Shapes: P streams, M virtual tokens, B sequences, N tokens, K key/value heads, d head_dim, D hidden.

Source: Chen et al., Parallel Scaling Law for Language Models, 2025; Li and Liang, Prefix-Tuning,
2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ModelError, require

if TYPE_CHECKING:
    from shoal.ir.architecture import Streams
    from shoal.model.attention import Mixer
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer, TransformerBlock


class Aggregate(nn.Module):
    """The streams' states in one, by weights that follow from all of them."""

    def __init__(self, hidden: int, streams: Streams) -> None:
        super().__init__()
        self.num, self.smoothing = streams.num, streams.smoothing
        self.up = nn.Linear(streams.num * hidden, hidden)
        self.down = nn.Linear(hidden, streams.num)

    def forward(self, x: Tensor, num: int | None = None) -> Tensor:
        """[P * B, ..., D] to [B, ..., D].

        Args:
            x: states of all streams, or of the first ``num``, stream by stream.
            num: streams in ``x``; all, if not given.
        """
        num = num or self.num
        streams = x.view(num, -1, *x.shape[1:]).movedim(0, -2)  # [B, ..., num, D]
        if num == self.num:
            return self.joined(streams)
        streams = F.pad(streams, (0, 0, 0, self.num - num))
        return self.joined(streams, torch.full(streams.shape[:-2], num, device=x.device))

    def joined(self, streams: Tensor, counts: Tensor | None = None) -> Tensor:
        """[..., P, D] to [..., D].

        Args:
            streams: states; zeros in the place of streams that were not computed.
            counts: streams that were, [...]; all, if not given.
        """
        scores = self.down(F.silu(self.up(streams.flatten(-2))))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if counts is None:
            weight = torch.softmax(scores, -1).to(streams.dtype)
            weight = weight * (1 - self.smoothing) + self.smoothing / self.num
        else:
            count = counts.unsqueeze(-1)
            there = torch.arange(self.num, device=count.device) < count
            weight = torch.softmax(scores.masked_fill(~there, float("-inf")), -1)
            smooth = weight * (1 - self.smoothing) + self.smoothing / count
            # One stream alone is the base model, to the bit.
            weight = torch.where(count == 1, weight, smooth * there).to(streams.dtype)
        mean: Tensor = (streams * weight.unsqueeze(-1)).sum(-2)
        return mean


def use(model: Transformer, num: int) -> None:
    """Let a model compute the first ``num`` of its streams from now on.

    One stream sees no prefix: it is the base model. A cache of another number does not go with it.

    Raises:
        ModelError: it has not so many.
    """
    most = model.config.architecture.streams.num
    require(
        1 <= num <= most,
        "streams",
        num,
        expected=f"1 to {most}, the streams of model {model.config.name}",
        error=ModelError,
    )
    model.streams = num
    blocks: list[TransformerBlock] = list(model.blocks)  # type: ignore[arg-type]
    for block in blocks:
        block.attention.streams = num


@contextmanager
def computing(model: Transformer, counts_N: Tensor) -> Iterator[None]:
    """Within, tokens side by side are computed by so many streams each."""
    model.counts_N = counts_N
    try:
        yield
    finally:
        model.counts_N = None


@torch.no_grad()
def begun(model: Transformer, tokens_PM: Tensor) -> list[Tensor]:
    """Prefixes that are texts: of every layer, keys and values [2, P, M, K, d] just before place 0.

    Streams that begin with them compute what the model would behind another text each: close to
    what it was trained for, and diverse.

    Args:
        model: computes one stream.
        tokens_PM: the text of each stream, int64.
    """
    from shoal.model.attention import KVCache  # which needs this module
    from shoal.model.rope import tables_at

    rows, length = tokens_PM.shape
    x = model.embed(tokens_PM)
    cache = KVCache(model.config, rows, length, dtype=x.dtype, device=x.device, streams=1)
    place = torch.arange(-length, 0, dtype=torch.float32, device=x.device)
    cos, sin = tables_at(place, *model.unstretched, x.dtype)
    for block in model.blocks:
        x = block(x, cos, sin, None, cache)
    cache.length = length
    return [torch.stack(pair) for pair in cache.layers()]


def repeated(x: Tensor, num: int) -> Tensor:
    """``x`` once for every stream, behind each other along the first axis."""
    return x.repeat(num, *[1] * (x.dim() - 1)) if num > 1 else x


def spread(prefix_2PMKd: Tensor, rows: int) -> Tensor:
    """The prefix [2, P * B, M, K, d] of every row of the batch axis, stream by stream."""
    return prefix_2PMKd.repeat_interleave(rows // prefix_2PMKd.shape[1], 1)


def before(prefix_2PMKd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [P * B, M + S, K, d] behind the prefix of each stream."""
    first = spread(prefix_2PMKd.to(k_BSKd.dtype), len(k_BSKd))
    return torch.cat([first[0], k_BSKd], 1), torch.cat([first[1], v_BSKd], 1)


def causal(
    mask: Tensor | None, virtual: int, length: int, start: int, like: Tensor
) -> Tensor | None:
    """Additive mask of ``length`` queries over the prefix, which all see, and the real tokens.

    None where a single query sees all of them.

    Args:
        mask: of the real tokens; None for a causal one.
        virtual: tokens of the prefix.
        length: queries.
        start: real tokens before them.
        like: of the dtype and device.
    """
    if mask is None:
        if length == 1:
            return None
        mask = torch.full((length, start + length), float("-inf"), dtype=like.dtype)
        mask = mask.to(like.device).triu_(start + 1)
    return F.pad(mask, (virtual, 0))


def heads_of(config: ModelConfig) -> ModelConfig:
    """The configuration whose cache has room for the keys of all streams."""
    num = config.architecture.streams.num
    if num == 1:
        return config
    plain = {"num_heads": config.num_heads * num, "num_kv_heads": config.num_kv_heads * num}
    return config.model_copy(update=plain)


def prefixes(model: object) -> Callable[[int], Tensor]:
    """Of a layer, keys and values [2, M, P * K, d] that all requests see before their own."""

    def prefix(layer: int) -> Tensor:
        own_2PMKd: Tensor = model.blocks[layer].attention.prefix  # type: ignore[attr-defined]
        return own_2PMKd.transpose(1, 2).flatten(2, 3)

    return prefix


def paged(mixer: Mixer, num: int) -> Mixer:
    """For tokens of all streams, a mixer whose tokens have all streams' heads."""

    def mixed(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        def beside(x: Tensor) -> Tensor:
            return x.view(num, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)

        seen = mixer(layer, beside(q_NHd), beside(k_NKd), beside(v_NKd))
        return seen.reshape(len(seen), num, *q_NHd.shape[1:]).transpose(0, 1).flatten(0, 1)

    return mixed


def flat(
    model: Transformer,
    x_ND: Tensor,
    position_N: Tensor,
    mixer: Mixer,
    rows_R: Tensor | None = None,
) -> Tensor:
    """Final normalised states [R, D] of tokens side by side; see :meth:`Transformer.flat`."""
    if model.counts_N is not None:
        return _some(model, x_ND, position_N, mixer, rows_R, model.counts_N)
    num = model.config.architecture.streams.num
    if rows_R is not None:
        offsets = torch.arange(num, device=rows_R.device).unsqueeze(1) * len(x_ND)
        rows_R = (offsets + rows_R).flatten()
    streams = repeated(x_ND, num), repeated(position_N, num), paged(mixer, num), rows_R
    x, branch = model.through(*streams)
    return model.aggregated(model.finished(x, branch))


def _some(
    model: Transformer,
    x_ND: Tensor,
    position_N: Tensor,
    mixer: Mixer,
    rows_R: Tensor | None,
    counts_N: Tensor,
) -> Tensor:
    """The same where tokens differ in their number of streams: each stream has its own tokens."""
    aggregate = model.aggregate
    assert aggregate is not None
    num, total = aggregate.num, len(x_ND)
    streams, tokens = (counts_N > torch.arange(num, device=x_ND.device)[:, None]).nonzero(
        as_tuple=True
    )

    def mixed(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        def beside(x: Tensor) -> Tensor:
            out = x.new_zeros(total, num, *x.shape[1:])
            out[tokens, streams] = x
            return out.flatten(1, 2)

        seen = mixer(layer, beside(q_NHd), beside(k_NKd), beside(v_NKd))
        return seen.reshape(total, num, *q_NHd.shape[1:])[tokens, streams]

    wanted = torch.arange(total, device=x_ND.device) if rows_R is None else rows_R
    place = torch.full((total,), -1, device=x_ND.device)
    place[wanted] = torch.arange(len(wanted), device=x_ND.device)
    needed = (place[tokens] >= 0).nonzero().flatten()
    x, branch = model.through(x_ND[tokens], position_N[tokens], mixed, needed)
    states = x.new_zeros(len(wanted), num, x.shape[-1])
    if len(needed):
        states[place[tokens[needed]], streams[needed]] = model.finished(x, branch)
    return aggregate.joined(states, counts_N[wanted])
