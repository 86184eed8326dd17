"""Duo-LLM: feed-forward layers that are big, small, or skipped, token by token.

Every layer has its big feed-forward layer, a small one, and a router. The output of a token is
``x + FFN_r(norm(x))`` with its route r: big, small or skip (nothing). A model in training takes
random routes, of which some sequences are all big, so that every pattern of routes is known to the
weights; routers are trained afterwards with all else frozen, through straight-through Gumbel
samples. :func:`pattern_losses` is what an oracle asks: the loss of each token under patterns of its
own, the tokens before it on routes that are given.

Shapes: B sequences, T tokens, N = B T, L layers, K patterns, D hidden.

Source: Alizadeh et al., Duo-LLM: A Framework for Studying Adaptive Computation in Large Language
Models, 2024.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ModelError, require
from shoal.model.feedforward import SwiGLU
from shoal.model.rope import tables

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer, TransformerBlock

BIG, SMALL, SKIP = 0, 1, 2
_ROUTES = 3
# Of the sequences in training, one in so many is all big.
_WHOLE = 4


class DuoFFN(SwiGLU):
    """The big feed-forward layer, with a small one and a router beside it.

    Attributes:
        fixed: where ``routes`` is None all is big; else the router chooses.
        routes: route of every token, [B, T] or [N].
        shift: taken from a route's score for all of the big one's cost, of every token [N] or of
            all; None where routers choose by themselves.
        soft: routes are sampled with a gradient, and what they cost is kept in ``shares``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        ffn = config.architecture.ffn
        self.small = SwiGLU(
            config.model_copy(update={"ffn_hidden": ffn.small_width(config.ffn_hidden)})
        )
        self.router = nn.Linear(config.hidden, _ROUTES, bias=True)
        self.fixed = ffn.router == "fixed"
        self.routes: Tensor | None = None
        self.shift: Tensor | None = None
        small = self.small.down_proj.in_features
        self.costs = (1.0, small / config.ffn_hidden, 0.0)  # over those of the big one
        self.soft: torch.Generator | None = None
        self.shares: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself, on its route."""
        if self.soft is not None:
            return self._sampled(x, self.soft)
        if self.routes is None and self.shift is None and self.fixed:
            return super().forward(x)
        x_ND = x.reshape(-1, x.shape[-1])
        routes = self._chosen(x_ND) if self.routes is None else self.routes.reshape(-1)
        out: Tensor | None = None
        for route, layer in ((BIG, super().forward), (SMALL, self.small)):
            (rows,) = torch.nonzero(routes == route, as_tuple=True)
            some = layer(x_ND[rows])
            out = torch.zeros_like(x_ND, dtype=some.dtype) if out is None else out
            out = out.index_copy(0, rows, some)
        assert out is not None
        whole: Tensor = out.view(x.shape)
        return whole

    def _chosen(self, x_ND: Tensor) -> Tensor:
        """Of every token the route with the best score, less what it costs."""
        return self.best(self.router(x_ND))

    def best(self, scores_N3: Tensor) -> Tensor:
        """Routes [N] of these scores of the router."""
        if self.shift is not None:
            costs = torch.tensor(self.costs, device=scores_N3.device)
            scores_N3 = scores_N3.float() - self.shift.reshape(-1, 1) * costs
        return scores_N3.argmax(-1)

    def _sampled(self, x: Tensor, source: torch.Generator) -> Tensor:
        """Both layers, weighed by a one-hot sample whose gradient is that of its softmax."""
        logits = self.router(x).float()
        uniform = torch.rand(logits.shape, generator=source).clamp_(1e-9, 1 - 1e-7)
        soft = torch.softmax(logits - torch.log(-torch.log(uniform)), -1)
        hard = F.one_hot(soft.argmax(-1), _ROUTES).to(soft.dtype)
        weight = hard + soft - soft.detach()
        self.shares = torch.softmax(logits, -1).flatten(0, -2).mean(0)
        big, small = super().forward(x), self.small(x)
        weight = weight.to(big.dtype)
        mixed: Tensor = weight[..., BIG : BIG + 1] * big + weight[..., SMALL : SMALL + 1] * small
        return mixed


def _layers(model: Transformer) -> list[DuoFFN]:
    layers = [module for module in model.modules() if isinstance(module, DuoFFN)]
    require(
        bool(layers),
        "ffn",
        "plain",
        expected=f"duo, and {model.config.name} has one feed-forward layer a block",
        hint="convert it with --architecture ffn=duo",
        error=ModelError,
    )
    return layers


def drawn(tokens: Tensor, positions: Tensor, num_layers: int, *, training: bool) -> Tensor:
    """Random routes [L, ...] that follow from tokens, places and layers alone.

    In training from all tokens so far too, and some sequences are all big: what is computed again,
    resumed, or split over ranks gets the same routes.

    Args:
        tokens: ids [B, T], or [N] side by side.
        positions: of the tokens, broadcastable to them.
        num_layers: L.
        training: see above; tokens are [B, T].
    """
    seed = tokens.long() * 0x9E3779B1 + positions.long() * 0x85EBCA77
    if training:
        seed = _mixed(seed).cumsum(-1)
    layer = torch.arange(1, num_layers + 1, device=tokens.device).view(-1, *[1] * tokens.dim())
    routes = _mixed(seed + layer * 0xC2B2AE3D) % _ROUTES
    if training:
        whole = _mixed(seed[:, -1] + 1) % _WHOLE == 0
        routes = routes.masked_fill(whole.view(1, -1, 1), BIG)
    return routes


def _mixed(x: Tensor) -> Tensor:
    """Whole numbers from 0 to 2**31 whose bits depend on all bits of ``x``."""
    x = x & 0x7FFFFFFFFFFF
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0x7FFFFFFFFFFF
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & 0x7FFFFFFFFFFF
    return (x ^ (x >> 17)) & 0x7FFFFFFF


@contextlib.contextmanager
def routed(model: Transformer, routes: Tensor | None) -> Iterator[None]:
    """Within, tokens take these routes [L, ...], or those of their routers where None.

    Raises:
        ModelError: the model has no routes, or another number of layers.
    """
    layers = _layers(model)
    require(
        routes is None or len(routes) == len(layers),
        "routes",
        None if routes is None else len(routes),
        expected=f"one for each of {len(layers)} layers",
        error=ModelError,
    )
    before = [layer.routes for layer in layers]
    model.forced = True
    try:
        for number, layer in enumerate(layers):
            layer.routes = None if routes is None else routes[number]
        yield
    finally:
        model.forced = False
        for layer, old in zip(layers, before, strict=True):
            layer.routes = old


@contextlib.contextmanager
def computing(model: Transformer, shift_N: Tensor, rows_R: Tensor | None = None) -> Iterator[None]:
    """Within, what big layers cost is weighed against the scores of routes, token by token.

    Args:
        model: whose routers choose.
        shift_N: see :class:`DuoFFN`.
        rows_R: tokens whose outputs of the last layer are needed; all if not given.
    """
    layers = _layers(model)
    for layer in layers:
        layer.shift = shift_N
    if rows_R is not None and shift_N.dim():
        layers[-1].shift = shift_N[rows_R]
    try:
        yield
    finally:
        for layer in layers:
            layer.shift = None


def begin(
    model: Transformer, tokens: Tensor, positions: Tensor, rows_R: Tensor | None = None
) -> None:
    """Before a pass: give every layer the routes of these tokens, as the configuration says.

    Args:
        model: with routes.
        tokens: ids [B, T], or [N] side by side.
        positions: of the tokens.
        rows_R: tokens whose outputs of the last layer are needed; all if not given.
    """
    if model.forced:
        return
    layers, router = _layers(model), model.config.architecture.ffn.router
    learns = model.training and torch.is_grad_enabled()
    routes: Tensor | None = None
    if learns or router == "random":
        routes = drawn(tokens, positions, len(layers), training=learns and tokens.dim() == 2)
    for number, layer in enumerate(layers):
        layer.routes = None if routes is None else routes[number]
    if routes is not None and rows_R is not None:
        layers[-1].routes = routes[-1][rows_R]


@torch.no_grad()
def router_routes(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Routes [L, B, T] that the routers choose for these sequences; see :func:`computing` too."""
    layers = _layers(model)
    seen: list[Tensor] = []
    hooks = [
        layer.router.register_forward_hook(
            lambda _m, _i, out, layer=layer: seen.append(layer.best(out))
        )
        for layer in layers
    ]
    routers = [layer.fixed for layer in layers]
    try:
        for layer in layers:
            layer.fixed = False
        with routed(model, None):
            model.hidden(tokens_BT)
    finally:
        for layer, hook, fixed in zip(layers, hooks, routers, strict=True):
            hook.remove()
            layer.fixed = fixed
    return torch.stack([one.view(tokens_BT.shape) for one in seen])


def ffn_flops(config: ModelConfig, routes: Tensor) -> Tensor:
    """FLOP of the feed-forward layers of a token, for patterns [..., L]: two a weight met."""
    ffn = config.architecture.ffn
    one = 6 * config.hidden
    cost = torch.tensor([one * config.ffn_hidden, one * ffn.small_width(config.ffn_hidden), 0])
    return cost[routes].sum(-1)


def router_loss(
    model: Transformer,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    *,
    budget: float,
    weight: float,
    source: torch.Generator,
) -> Tensor:
    """Loss of the routers: cross-entropy on sampled routes, and being off the budget.

    Args:
        model: only its routers should take the gradient.
        inputs_BT: token ids.
        targets_BT: next tokens.
        budget: expected share of the all-big model's feed-forward operations.
        weight: of the squared distance to the budget.
        source: of the samples.
    """
    layers = _layers(model)
    cost = ffn_flops(model.config, torch.tensor([[BIG], [SMALL], [SKIP]])).float()
    with routed(model, None):
        for layer in layers:
            layer.soft = source
        try:
            loss = model.loss_sum(inputs_BT, targets_BT) / targets_BT.numel()
        finally:
            for layer in layers:
                layer.soft = None
    shares = [layer.shares for layer in layers if layer.shares is not None]
    spent = torch.stack(shares) @ (cost / cost[BIG])
    return loss + weight * (spent.mean() - budget) ** 2


Past = list[tuple[Tensor, Tensor]]
"""Of every layer, keys and values [B, S, K, d] of the tokens before."""


@torch.no_grad()
def pattern_losses(
    model: Transformer,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    patterns: Tensor,
    reference_LBT: Tensor,
) -> Tensor:
    """Loss [K, B, T] of each token on each pattern, all other tokens on their reference routes.

    Args:
        model: not in training.
        tokens_BT: ids.
        targets_BT: next tokens.
        patterns: routes by layer [K, L], or of every token its own [K, B, T, L].
        reference_LBT: routes of the tokens that a token sees.
    """
    length = tokens_BT.shape[1]
    past = _keys(model, tokens_BT, reference_LBT)
    # A token sees those before it as they are, and itself on its own route.
    mask = torch.full((length, length), float("-inf")).triu_(0)
    hidden, _ = _on_patterns(model, tokens_BT, patterns, past, mask, 0)
    return _losses(model, hidden, targets_BT)


@torch.no_grad()
def committed(
    model: Transformer, tokens_BT: Tensor, targets_BT: Tensor, patterns_KL: Tensor
) -> tuple[Tensor, Tensor]:
    """The best pattern of each token, from left to right, given those chosen before it.

    Returns:
        Losses [B, T], and routes [L, B, T] with which the model gives these losses.
    """
    batch, length = tokens_BT.shape
    config = model.config
    empty = torch.empty(batch, 0, config.num_kv_heads, config.head_dim, dtype=model.weight.dtype)
    past: Past = [(empty, empty)] * config.num_layers
    losses, routes = [], []
    rows = torch.arange(batch)
    for place in range(length):
        here = slice(place, place + 1)
        mask = torch.zeros(1, place)
        hidden, own = _on_patterns(model, tokens_BT[:, here], patterns_KL, past, mask, place)
        loss_KB = _losses(model, hidden, targets_BT[:, here])[:, :, 0]
        best_B = loss_KB.argmin(0)
        losses.append(loss_KB[best_B, rows])
        routes.append(patterns_KL[best_B].T)
        past = [
            (torch.cat([keys, k[best_B, rows]], 1), torch.cat([values, v[best_B, rows]], 1))
            for (keys, values), (k, v) in zip(past, own, strict=True)
        ]
    return torch.stack(losses, 1), torch.stack(routes, 2)


def _keys(model: Transformer, tokens_BT: Tensor, routes_LBT: Tensor) -> Past:
    """Keys and values of all tokens on given routes."""
    from shoal.model.attention import KVCache

    batch, length = tokens_BT.shape
    cache = KVCache(model.config, batch, length, dtype=model.weight.dtype)
    with routed(model, routes_LBT):
        model.hidden(tokens_BT, cache=cache)
    return cache.layers()


def _on_patterns(
    model: Transformer,
    tokens_BT: Tensor,
    patterns: Tensor,
    past: Past,
    mask_TS: Tensor,
    start: int,
) -> tuple[Tensor, Past]:
    """States [K, B, T, D] behind all layers, and the own keys and values [K, B, T, ...] of each.

    A pattern's tokens see the past and themselves, not each other.
    """
    config = model.config
    count, (batch, length) = len(patterns), tokens_BT.shape
    if patterns.dim() == 2:
        patterns = patterns[:, None, None].expand(-1, batch, length, -1)
    x = model.embed(tokens_BT).expand(count, -1, -1, -1).reshape(count * batch, length, -1)
    cos, sin = tables(config, start, length, x.device, x.dtype)
    group = config.num_heads // config.num_kv_heads
    results: Past = []
    blocks: list[TransformerBlock] = list(model.blocks)  # type: ignore[arg-type]
    for number, (block, (keys, values)) in enumerate(zip(blocks, past, strict=True)):
        attention = block.attention
        q, k, v = attention.rotated(attention.qkv_proj(block.attention_norm(x)), cos, sin)
        by_token = (count, batch, length, config.num_kv_heads)
        wide = q.reshape(*by_token, group, -1) / config.head_dim**0.5
        own_k, own_v = k.reshape(*by_token, 1, -1), v.reshape(*by_token, 1, -1)
        results.append((own_k.squeeze(-2), own_v.squeeze(-2)))
        seen = torch.einsum("pbtkgd,bskd->pbtkgs", wide, keys)
        seen = seen + mask_TS[:, None, None].to(seen.dtype)
        own = (wide * own_k).sum(-1, keepdim=True)
        weight = torch.softmax(torch.cat([seen, own], -1), -1)
        mixed = torch.einsum("pbtkgs,bskd->pbtkgd", weight[..., :-1], values)
        mixed = mixed + weight[..., -1:] * own_v
        x = x + attention.o_proj(mixed.reshape(count * batch, length, -1))
        assert isinstance(block.mlp, DuoFFN)
        block.mlp.routes = patterns[..., number].reshape(count * batch, length)
        x = x + block.mlp(block.mlp_norm(x))
        block.mlp.routes = None
    return model.norm(x).view(count, batch, length, -1), results


def _losses(model: Transformer, hidden_KBTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropies [K, B, T], one pattern at a time: logits are large."""
    rows = [
        F.cross_entropy(
            model.logits(hidden.flatten(0, 1)).float(), targets_BT.flatten(), reduction="none"
        ).view(targets_BT.shape)
        for hidden in hidden_KBTD
    ]
    return torch.stack(rows)
