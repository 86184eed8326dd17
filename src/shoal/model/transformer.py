"""One transformer for the families Llama, Qwen2, Qwen3 and Mixtral, and for masked diffusion.

It knows arithmetic and nothing of ranks, meters or files. Shapes: B batch, T
positions, D hidden, V vocabulary.

The residual stream has the dtype of the computation: under autocast the embedding is
cast once, and no operator falls back to fp32 except statistics and softmax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ModelError, require
from shoal.core.parts import table
from shoal.kernel.protocols import Ready
from shoal.model import desync, duo, ladder, parscale
from shoal.model.attention import Attention, KVCache, Mixer, Turn, document_mask
from shoal.model.config import ModelConfig
from shoal.model.dropout import ATTENTION, FEED_FORWARD, Drop, StepDropout
from shoal.model.feedforward import Experts, SwiGLU
from shoal.model.loss import token_loss_sum
from shoal.model.norm import RMSNorm
from shoal.model.recompute import computed_again
from shoal.model.rope import frequencies, tables, tables_at
from shoal.model.routing import StepRouting, Tokens

if TYPE_CHECKING:
    from shoal.model.protocols import Gate


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on the normalised stream and added to it.

    In the family parallel both read the same: y = x + attention(norm(x)) + mlp(norm(x)).

    Attributes:
        keeps_products: where the block is computed again, what products and attention give is kept.
    """

    keeps_products = False

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = RMSNorm(config.hidden, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.parallel = config.family == "parallel"
        residual = config.architecture.residual
        self.ladder = residual.ladder
        self.late = residual.late(config.num_layers)[layer]
        self.desync = residual.desync
        self.sums = residual.sums(config.num_layers)[layer]
        self.last = layer == config.num_layers - 1
        self.join = desync.averaged(residual.apart)
        self.both: Callable[[Tensor], Tensor] = _alone  # sums both branches over ranks: one sum
        if not self.parallel:
            self.mlp_norm = RMSNorm(config.hidden, config.rms_norm_eps)
        dense = duo.DuoFFN if config.architecture.ffn.duo else SwiGLU
        self.mlp = Experts(config, layer) if config.num_experts else dense(config)

    def forward(
        self,
        x_BTD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        drop: Drop | None = None,
        tokens: Tokens | None = None,
    ) -> Tensor:
        """One step of the residual stream."""
        feed = self.mlp if tokens is None else functools.partial(self.mlp, tokens=tokens)
        out: Tensor = self.wired(
            x_BTD, lambda normed: self.attention(normed, cos, sin, mask, cache), feed, drop
        )
        return out

    def wired(
        self,
        x: Any,
        attend: Callable[[Tensor], Any],
        feed: Callable[[Tensor], Any],
        drop: Drop | None,
    ) -> Any:
        """The residual stream through both branches; with :mod:`shoal.model.ladder` its state."""
        if self.ladder:
            return ladder.wired(self, x, attend, feed, drop)
        if self.desync:
            return desync.wired(self, x, attend, feed)
        normed = self.attention_norm(x)
        x = self.residual(x, attend(normed), drop, ATTENTION)
        if not self.parallel:
            normed = self.mlp_norm(x)
        return self.residual(x, feed(normed), drop, FEED_FORWARD)

    def residual(self, x: Tensor, branch: Tensor, drop: Drop | None, site: str) -> Tensor:
        """Add the output of a branch to the stream, some of it dropped if asked."""
        return x + branch if drop is None else drop.add(x, branch, self.layer, site)

    def flat(
        self,
        x_ND: Tensor,
        branch_ND: Tensor | None,
        turn: Turn,
        mixer: Mixer,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same for tokens of any sequences side by side; what is left to add comes last.

        Args:
            x_ND: the stream; may change.
            branch_ND: what is left to add to it.
            turn: how queries and keys are rotated.
            mixer: keeps the keys and values, and knows what each token sees.
            rows_R: tokens that are needed further on; all, if not given. Of the others this block
                needs no more than their keys and values.
        """
        x_ND, normed = self.attention_norm.after(x_ND, branch_ND)
        seen = self.attention.flat(normed, turn, mixer)
        if rows_R is not None:
            x_ND, normed, seen = x_ND[rows_R], normed[rows_R], seen[rows_R]
            if not len(rows_R):
                return x_ND, x_ND
        mixed = self.attention.o_proj(seen)
        if self.parallel:
            return x_ND, self.both(mixed + self.mlp(normed))
        x_ND, normed = self.mlp_norm.after(x_ND, mixed)
        return x_ND, self.mlp(normed)


def _alone(x: Tensor) -> Tensor:
    return x


class Transformer(nn.Module):
    """The model, with weights as PyTorch leaves them; ``init_weights`` gives it its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _table(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(
            TransformerBlock(config, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden, config.rms_norm_eps)
        self.output: nn.Module | None = (
            None if config.tied else nn.Linear(config.hidden, config.vocab_size, bias=False)
        )
        streams = config.architecture.streams
        self.aggregate = parscale.Aggregate(config.hidden, streams) if streams.num > 1 else None
        self.streams = streams.num  # that are computed: see shoal.model.parscale.use
        self.counts_N: Tensor | None = None  # of tokens side by side that differ in it
        self.routes = config.architecture.ffn.duo
        self.forced = False  # routes are given from outside: see shoal.model.duo
        self.head: Ready | None = None  # of inference: see shoal.model.accelerate
        gate: Gate = table("gate").build(config.architecture.moe.gate)
        self.decodes = gate.decodes  # where tokens go does not depend on later ones

    @property
    def weight(self) -> Tensor:
        """A weight: of the dtype and on the device of all."""
        return self.embed.weight

    @property
    def output_weight(self) -> Tensor:
        """The output matrix [V, D]: the embedding where tied.

        Raises:
            ModelError: a kernel of inference has packed it.
        """
        weight = (self.embed if self.output is None else self.output).weight
        if not isinstance(weight, Tensor):
            raise ModelError("the output matrix is packed for inference; ask for logits")
        return weight

    @functools.cached_property
    def unstretched(self) -> tuple[Tensor, float]:
        """Frequencies and factor of the rotation where nothing depends on the context's length."""
        # A tensor made in inference mode could never again take part in training.
        with torch.inference_mode(False):
            return frequencies(self.config, 1)

    def hidden(
        self,
        tokens_BT: Tensor,
        *,
        documents_BT: Tensor | None = None,
        cache: KVCache | None = None,
        recompute: bool | Collection[int] = False,
        dropout: StepDropout | None = None,
        routing: StepRouting | None = None,
    ) -> Tensor:
        """Final normalised hidden states [B, T, D], in the dtype of the computation.

        Args:
            tokens_BT: token ids, int64.
            documents_BT: number of the document each token is of; tokens of different
                documents do not see each other.
            cache: keys and values of the tokens before these; is moved on.
            recompute: keep only the input of every block, or of the blocks with these numbers,
                for the backward pass, and what :mod:`shoal.model.recompute` was asked to keep.
            dropout: of these sequences; none where the model is not in training mode.
            routing: their place in a step of training, for routers of experts; without it tokens
                go where they go in inference.

        Raises:
            ModelError: more positions than the model has, or documents with a cache.
        """
        config = self.config
        length = tokens_BT.shape[1]
        start = 0 if cache is None else cache.length
        stretches = config.rope_scaling is not None and config.rope_scaling.rope_type == "dynamic"
        require(
            start + length <= config.max_position or stretches,
            "sequence length",
            start + length,
            expected=f"at most max_position = {config.max_position} of model {config.name}",
            hint="use shorter sequences, or a model with rope scaling",
            error=ModelError,
        )
        if cache is not None and documents_BT is not None:
            raise ModelError("documents and a cache are given; a cache holds one document a row")
        require(
            cache is None or config.causal,
            "cache",
            "of a model whose tokens see all others",
            expected=f"none: later tokens change every key of {config.name}",
            hint="decode it with shoal.serve.decode.diffusion",
            error=ModelError,
        )
        x_BTD = self.embed(tokens_BT)
        device = x_BTD.device.type
        if torch.is_autocast_enabled(device):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(device))
        cos, sin = tables(config, start, length, x_BTD.device, x_BTD.dtype)
        mask = None
        if documents_BT is not None:
            mask = document_mask(documents_BT, x_BTD.dtype, causal=config.causal)
        elif start and length > 1:
            mask = torch.full(
                (length, start + length), float("-inf"), dtype=x_BTD.dtype, device=x_BTD.device
            ).triu_(start + 1)
        if self.streams > 1:
            virtual = config.architecture.streams.prefix
            mask = parscale.causal(mask, virtual, length, start, x_BTD)
            if mask is not None and mask.dim() == 4:
                mask = parscale.repeated(mask, self.streams)
            x_BTD = parscale.repeated(x_BTD, self.streams)
        if self.routes:
            duo.begin(self, tokens_BT, torch.arange(start, start + length, device=x_BTD.device))
        drop = None
        if dropout is not None and self.training:
            positions_T = torch.arange(start, start + length, device=x_BTD.device)
            drop = dropout.over(positions_T, length, len(tokens_BT))
        rest: tuple[Any, ...] = (mask, cache, drop)
        if routing is not None or (not self.decodes and cache is None):
            of = routing or StepRouting(0, 0, 0, len(tokens_BT))
            places_T = torch.arange(length, device=x_BTD.device)
            trains = self.training and routing is not None
            rest = (*rest, of.over(places_T, length, len(tokens_BT), training=trains))
        x_BTD = desync.apart(x_BTD, config.architecture.residual.apart)
        again = recompute if isinstance(recompute, Collection) else range(len(self.blocks))
        for layer, block in enumerate(self.blocks):
            if recompute and layer in again and torch.is_grad_enabled():
                x_BTD = computed_again(block, x_BTD, cos, sin, *rest)
            else:
                x_BTD = block(x_BTD, cos, sin, *rest)
        if cache is not None:
            cache.length += length
        x_BTD = desync.together(x_BTD, config.architecture.residual.apart)
        normed: Tensor = self.norm(ladder.settled(x_BTD, config.num_layers, drop))
        return self.aggregated(normed)

    def aggregated(self, normed: Tensor) -> Tensor:
        """The states of all streams in one; as they are where there is one."""
        if self.aggregate is None or self.streams == 1:
            return normed
        out: Tensor = self.aggregate(normed, self.streams)
        return out

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor:
        """Final normalised hidden states of tokens of any sequences, side by side, no padding.

        Args:
            tokens_N: token ids, int64.
            position_N: place of each token in its sequence, below ``max_position``.
            mixer: keeps the keys and values, and knows what each token sees.
            rows_R: tokens whose states are wanted; all, if not given.

        Returns:
            [R, D], in the dtype of the weights.
        """
        x_ND = self.embed(tokens_N)
        if self.routes:
            duo.begin(self, tokens_N, position_N, rows_R)
        if self.aggregate is not None:
            return parscale.flat(self, x_ND, position_N, mixer, rows_R)
        return self.finished(*self.through(x_ND, position_N, mixer, rows_R))

    def through(
        self, x_ND: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens side by side through all blocks, of which there is one; what is left to add last.

        Args:
            x_ND: the stream; may change.
            position_N: place of each token in its sequence.
            mixer: keeps the keys and values, and knows what each token sees.
            rows_R: tokens that are needed behind the blocks; all, if not given.
        """
        if self.config.architecture.residual.ladder:
            return ladder.through(self, x_ND, position_N, mixer, rows_R)
        if self.config.architecture.residual.desync:
            return desync.through(self, x_ND, position_N, mixer, rows_R)
        branch_ND: Tensor | None = None
        turn = self.turn(position_N, x_ND.dtype)
        last = len(self.blocks) - 1
        for place, block in enumerate(self.blocks):
            needed = rows_R if place == last else None
            x_ND, branch_ND = block.flat(x_ND, branch_ND, turn, mixer, needed)  # type: ignore[operator]
        assert branch_ND is not None
        return x_ND, branch_ND

    def finished(self, x_ND: Tensor, branch_ND: Tensor) -> Tensor:
        """Normalised states behind the last block."""
        _, normed = self.norm.after(x_ND, branch_ND)
        return normed

    def turn(self, position_N: Tensor, dtype: torch.dtype) -> Turn:
        """How the tokens at these places are rotated, in every layer."""
        result = (block.attention for block in self.blocks)  # a rank may have that of some alone
        if next(one for one in result if isinstance(one, Attention)).kernel is not None:
            return lambda attention, qkv: attention.kernel(qkv, position_N)  # type: ignore[misc]
        cos, sin = tables_at(position_N.float(), *self.unstretched, dtype)

        def turned(attention: Attention, qkv_NR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = attention.rotated(qkv_NR.unsqueeze(0), cos, sin)
            return q[0], k[0], v[0]

        return turned

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Scores of all tokens [R, V] from final hidden states."""
        if self.head is not None:
            fast: Tensor = self.head(hidden_RD)
            return fast
        return F.linear(hidden_RD, self.output_weight)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        documents_BT: Tensor | None = None,
        cache: KVCache | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Logits [B, T, V] in the dtype of the computation; arguments as of :meth:`hidden`."""
        hidden = self.hidden(tokens_BT, documents_BT=documents_BT, cache=cache, recompute=recompute)
        return self.logits(hidden)

    def loss_sum(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        documents_BT: Tensor | None = None,
        weights_B: Tensor | None = None,
        recompute: bool | Collection[int] = False,
        dropout: StepDropout | None = None,
        routing: StepRouting | None = None,
    ) -> Tensor:
        """Sum of the cross-entropies of ``targets_BT``, in nats and fp32, logits never kept.

        Targets equal to -100 count nothing; those of sequence b count ``weights_B[b]``, 1 if not
        given. With sharded weights, register this method as
        a forward method, and keep the output matrix in the outermost group.
        """
        hidden = self.hidden(
            tokens_BT,
            documents_BT=documents_BT,
            recompute=recompute,
            dropout=dropout,
            routing=routing,
        )
        weights_BT = None if weights_B is None else weights_B[:, None].expand_as(targets_BT)
        return token_loss_sum(hidden, self.output_weight, targets_BT, weights_BT)


def _table(rows: int, width: int) -> nn.Embedding:
    # On ``meta`` there is nothing to fill, and filling it all the same imports the compiler, which
    # takes as long as PyTorch itself.
    if torch.get_default_device().type == "meta":
        return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
    return nn.Embedding(rows, width)
