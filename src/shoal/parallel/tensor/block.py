"""One block of the model, as one rank computes it.

The rank's block is the model's own with fewer heads and a narrower feed-forward layer; its
linear layers are exchanged for ones that can put off their weight gradients and, under
tensor parallelism, communicate. Where tensor or context parallelism needs it, the stream
is tokens behind each other, [N, D], or [n, D] with sequence parallelism; else the block is used
as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.model.config import ModelConfig
from shoal.model.dropout import Drop
from shoal.model.feedforward import Experts, SwiGLU, gate
from shoal.model.routing import Tokens
from shoal.model.transformer import TransformerBlock
from shoal.parallel.expert.fssdp import CopiedExperts, dispatched
from shoal.parallel.tensor.linear import (
    ColumnLinear,
    LateColumnLinear,
    LateRowLinear,
    RowLinear,
    WholeLinear,
    grouped,
)
from shoal.parallel.tensor.operators import enter, leave, synced

if TYPE_CHECKING:
    from shoal.core.parts import Choice
    from shoal.parallel.protocols import Comm, ExpertRanks

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention: q [B, H, T, d], k and v [B, K, T, d] to [B, H, T, d]."""


def local_config(config: ModelConfig, tp: int) -> ModelConfig:
    """The configuration of one tp rank's blocks; of streams that are apart it has one."""
    architecture = config.architecture
    if tp > 1 and architecture.residual.apart > 1:
        one = architecture.residual.model_copy(update={"ranks": 1})
        architecture = architecture.model_copy(update={"residual": one})
    return config.model_copy(
        update={
            "architecture": architecture,
            "num_heads": config.num_heads // tp,
            # Fewer than ranks: several hold the same one.
            "num_kv_heads": max(1, config.num_kv_heads // tp),
            "ffn_hidden": config.ffn_hidden // tp,
        }
    )


class _Experts(Experts):
    """Experts of which each rank has a part of the width.

    Every rank sends all tokens to the same experts; the router's gradient is a share, since
    the outputs that its weights scale are.
    """

    def __init__(self, config: ModelConfig, layer: int, comm: Comm, *, sp: bool) -> None:
        super().__init__(config, layer)
        self.comm, self.sp, self.copies = comm, sp, comm.world
        self.router = WholeLinear.of(self.router, comm)

    def forward(self, x: Tensor, total: int = 0, *, tokens: Tokens | None = None) -> Tensor:
        """As of whole experts; [n, D] with sequence parallelism."""
        if self.comm.world == 1:
            return super().forward(x, tokens=tokens)
        whole = enter(x, self.comm, total, sp=self.sp)
        return leave(super().forward(whole, tokens=tokens), self.comm, sp=self.sp)

    def product(self, rows_MI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        """Each expert's matrix with its own rows; the weight gradient can be put off."""
        return grouped(rows_MI, weight_EOI, counts, self.grouped)


class WholeBlock(TransformerBlock):
    """A block whose linear layers are this rank's; without communication it is the model's."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        comm: Comm,
        *,
        sp: bool,
        overlap: str = "none",
        experts: ExpertRanks | None = None,
        placer: Choice | None = None,
        expert_chunks: tuple[int, int] = (1, 1),
    ) -> None:
        whole, config = config, local_config(config, comm.world)
        super().__init__(config, layer)
        attention = self.attention
        how: dict[str, Any] = {"sp": sp, "overlap": overlap}
        # What a ladder adds late may be on its way; ranks that are apart add what they have.
        kinds: tuple[type[WholeLinear], type[WholeLinear]] = ColumnLinear, RowLinear
        if self.ladder:
            kinds = LateColumnLinear, LateRowLinear
        elif self.desync:
            kinds = WholeLinear, WholeLinear
        column, row = kinds
        if self.desync and comm.world > 1:
            self.join = synced(comm)
        attention.qkv_proj = column.of(attention.qkv_proj, comm, **how)
        attention.o_proj = row.of(attention.o_proj, comm, **how)
        if isinstance(self.mlp, SwiGLU):
            self.mlp.gate_up_proj = column.of(self.mlp.gate_up_proj, comm, **how)
            self.mlp.down_proj = row.of(self.mlp.down_proj, comm, **how)
        elif experts is not None:
            self.mlp = dispatched(whole, experts, layer, placer)
            self.mlp.chunks = expert_chunks
        else:
            self.mlp = _Experts(config, layer, comm, sp=sp)

    def wired(
        self,
        x: Any,
        attend: Callable[[Tensor], Any],
        feed: Callable[[Tensor], Any],
        drop: Drop | None,
    ) -> Any:
        """The residual stream; copies of experts are sent during attention."""
        if isinstance(self.mlp, CopiedExperts):
            self.mlp.begin()
        return super().wired(x, attend, feed, drop)


class SplitBlock(WholeBlock):
    """A block over tokens behind each other, with attention from outside."""

    def forward(  # type: ignore[override]
        self,
        x_ND: Tensor,
        cos: Tensor,
        sin: Tensor,
        mix: Mix,
        batch: int,
        drop: Drop | None = None,
        tokens: Tokens | None = None,
    ) -> Tensor:
        """One step of the residual stream.

        Args:
            x_ND: tokens [N, D] of ``batch`` sequences, or [n, D] with sequence parallelism.
            cos: [T, 1, C] of this rank's positions.
            sin: [T, 1, C].
            mix: attention.
            batch: sequences.
            drop: dropout of these tokens.
            tokens: those that this rank's router sees.
        """
        attention = self.attention
        total = batch * len(cos)

        def attend(normed: Tensor) -> Tensor:
            qkv = attention.qkv_proj(normed, total)
            q, k, v = attention.rotated(qkv.view(batch, len(cos), qkv.shape[-1]), cos, sin)
            mixed = mix(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            width = mixed.shape[1] * mixed.shape[3]
            out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(total, width))
            return out

        def feed(normed: Tensor) -> Tensor:
            if isinstance(self.mlp, Experts):
                out: Tensor = self.mlp(normed, total, tokens=tokens)
                return out
            gated = (self.mlp.kernel or gate)(self.mlp.gate_up_proj(normed, total))
            return self.mlp.down_proj(gated)  # type: ignore[no-any-return]

        out: Tensor = self.wired(x_ND, attend, feed, drop)
        return out
