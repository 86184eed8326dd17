"""The part of a model that one rank computes: a stage, and all stages of a rank.

A stage holds some consecutive layers, of these what its tensor-parallel rank holds, under the
names that they have in :class:`~shoal.model.transformer.Transformer`. The first stage embeds,
the last one ends in the sum of the token losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, ModelError, require
from shoal.ir.mask import Mask
from shoal.model.attention import attend, document_mask
from shoal.model.desync import apart, together
from shoal.model.feedforward import Experts
from shoal.model.ladder import settled
from shoal.model.loss import IGNORE, token_loss_sum
from shoal.model.norm import RMSNorm
from shoal.model.recompute import computed_again
from shoal.model.rope import frequencies, tables_at
from shoal.parallel.tensor.block import Mix, SplitBlock, WholeBlock
from shoal.parallel.tensor.operators import copy_to, gather_tokens, local_rows, reduce_from
from shoal.parallel.tensor.slices import Slices, slices, take
from shoal.parallel.vocab.layers import VocabularyTable, check_targets, split_loss_sum

if TYPE_CHECKING:
    from shoal.ir import Parallel
    from shoal.model.config import ModelConfig
    from shoal.model.dropout import Drop, Dropout
    from shoal.model.routing import StepRouting, Tokens
    from shoal.parallel.protocols import ContextPart, MicroBatch, Ranks


class Stage(nn.Module):
    """Consecutive layers of a model on one rank; its parameters begin on ``meta``.

    Args:
        layers: numbers of the layers.
        first: this stage embeds the tokens.
        last: this stage has the final norm and the loss.
        parallel: the split.
        ranks: communicators of this rank; ``tp`` and ``cp`` are used.
        context: attention over sequences that ranks share; needed where cp > 1.
        dropout: of the outputs of attention and feed-forward, in training mode.
        routing: seed and sequences of a step, for the routers of experts.
        recomputed: numbers of the layers that are always recomputed from their input.
        mixed: micro-batches may have different attention.

    Raises:
        PlanError: the model cannot be split so.
        ConfigError: cp > 1 without ``context``.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        first: bool,
        last: bool,
        parallel: Parallel,
        ranks: Ranks,
        context: ContextPart | None = None,
        dropout: Dropout | None = None,
        routing: StepRouting | None = None,
        recomputed: frozenset[int] = frozenset(),
        mixed: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.layers, self.first, self.last = config, layers, first, last
        self.tp, self.cp, self.context, self.dropout = ranks.tp, ranks.cp, context, dropout
        self.recomputed = recomputed
        self.sp = parallel.sp and self.tp.world > 1
        self.vocab = parallel.vocab_split
        self.split = self.tp.world > 1 or self.cp.world > 1 or mixed
        require(
            self.cp.world == 1 or context is not None,
            "parallel.cp",
            self.cp.world,
            expected="1 without a part of kind context",
        )
        expert = (
            (0, 0) if ranks.experts is None else (ranks.experts.ep.rank, ranks.experts.etp.rank)
        )
        every = slices(config, parallel, self.tp.rank, expert=expert)
        with torch.device("meta"):
            kind = SplitBlock if self.split else WholeBlock
            self.blocks = nn.ModuleDict(
                {
                    str(layer): kind(
                        config,
                        layer,
                        self.tp,
                        sp=self.sp,
                        overlap=parallel.overlap,
                        experts=ranks.experts,
                        placer=parallel.placer,
                        expert_chunks=parallel.chunks,
                    )
                    for layer in layers
                }
            )
            shared = self.tp if self.vocab == "tp" and self.tp.world > 1 else None
            here = self.vocab != "pp"
            self.embed: VocabularyTable | None = None
            self.norm: RMSNorm | None = None
            self.output: VocabularyTable | None = None
            if here and (first or (last and config.tied)):
                self.embed = VocabularyTable(config.vocab_size, config.hidden, shared)
            if last:
                self.norm = RMSNorm(config.hidden, config.rms_norm_eps)
                if here and not config.tied:
                    self.output = VocabularyTable(config.vocab_size, config.hidden, shared)
        self.slices: dict[str, Slices] = {name: every[name] for name, _ in self.named_parameters()}
        self.folded = ranks.experts is not None
        self.routing = routing if config.num_experts else None
        for block in self.blocks.values():
            if isinstance(block.mlp, Experts):
                block.mlp.peers = (self.tp, self.cp) if self.folded else (self.cp,)

    def forward(self, x: Tensor | None, mb: MicroBatch, *, recompute: bool = False) -> Tensor:
        """One forward pass.

        Args:
            x: hidden states [N, D] of the stage before, [n, D] with sequence parallelism; nothing
                for a first stage that embeds.
            mb: the micro-batch; N = b * T / cp.
            recompute: keep only the input of every block for the backward pass.

        Returns:
            Hidden states for the next stage; of the last stage the sum of the token losses of
            this context-parallel rank, in fp32 (fp64 for fp64 weights) and equal on all tp ranks;
            or, where the pipeline ranks share the vocabulary, normalised hidden states.

        Raises:
            ModelError: sequences longer than the model is made for.
            DataError: token ids or labels beyond the vocabulary.
        """
        batch, share = mb.tokens.shape
        length = mb.length or share * self.cp.world
        self._check_length(length)
        if self.first and self.embed is not None:
            x = self._embedded(mb.tokens)
        if x is None:
            raise ConfigError(f"layers {self.layers}: no hidden states were given to this stage")
        frequency_C, scale = frequencies(self.config, length)
        cos, sin = tables_at(mb.positions.float(), frequency_C, scale, x.dtype)
        drop = self._drop(mb, length)
        if self.split:
            rest: tuple[Any, ...] = (self._mix(mb, length, x.dtype), batch, drop)
        else:
            mask = None if mb.documents is None else document_mask(mb.documents, x.dtype)
            rest = (mask, None, drop)
            x = x.view(batch, share, -1)
        if self.routing is not None:
            rest = (*rest, self._tokens(mb, length))
        ranks = self.config.architecture.residual.apart
        if ranks > 1:
            x = copy_to(x, self.tp) if self.split else apart(x, ranks)
        x = self._through(x, cos, sin, rest, mb, recompute)
        if self.config.architecture.residual.ladder:
            x = settled(x, self.config.num_layers, drop)
        if not self.split:
            x = together(x, ranks)
        hidden: Tensor = x if self.split else x.view(batch * share, -1)
        return self._end(hidden, mb) if self.last else hidden

    def _through(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rest: tuple[Any, ...],
        mb: MicroBatch,
        recompute: bool,
    ) -> Tensor:
        """All blocks; ``rest`` is what each of them is given beside the stream and the angles."""
        for layer in self.layers:
            x = self._block(layer, x, cos, sin, rest, recompute)
        return x

    def _block(
        self,
        layer: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rest: tuple[Any, ...],
        recompute: bool,
    ) -> Tensor:
        block = self.blocks[str(layer)]
        if (recompute or layer in self.recomputed) and torch.is_grad_enabled():
            return computed_again(block, x, cos, sin, *rest)
        out: Tensor = block(x, cos, sin, *rest)
        return out

    @torch.no_grad()
    def load(
        self,
        whole: Callable[[str], Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take this rank's part of every parameter.

        Args:
            whole: name of a parameter -> all of it, in memory order.
            device: where the parameters come to lie.
            dtype: what they become.
        """
        for name, part in self.slices.items():
            owner, _, leaf = name.rpartition(".")
            local = take(whole(name), part).to(device, dtype)
            setattr(self.get_submodule(owner), leaf, nn.Parameter(local))

    def _check_length(self, length: int) -> None:
        scaling = self.config.rope_scaling
        require(
            length <= self.config.max_position
            or (scaling is not None and scaling.rope_type == "dynamic"),
            "sequence length",
            length,
            expected=f"at most max_position = {self.config.max_position} of model "
            f"{self.config.name}",
            hint="use shorter sequences, or a model with rope scaling",
            error=ModelError,
        )

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self.embed is not None
        tokens = tokens.reshape(-1)
        if self.sp and self.embed.comm is None:
            tokens = local_rows(tokens, self.tp)
        return self.embed.look_up(tokens, sp=self.sp)

    def _drop(self, mb: MicroBatch, length: int) -> Drop | None:
        if self.dropout is None or not self.training:
            return None
        places = mb.positions if mb.numbers is None else mb.numbers
        drop = self.dropout.at(mb.step, mb.row).over(places, length, len(mb.tokens))
        if drop is None or not self.sp:
            return drop
        return drop.of(local_rows(drop.tokens, self.tp))

    def _tokens(self, mb: MicroBatch, length: int) -> Tokens:
        """The tokens that this rank's routers see."""
        assert self.routing is not None
        of = replace(self.routing, step=mb.step, row=mb.row)
        tokens = of.over(mb.positions, length, len(mb.tokens), training=self.training)
        if not (self.sp and self.folded):
            return tokens
        return tokens.some(local_rows(tokens.numbers, self.tp))

    def _mix(self, mb: MicroBatch, length: int, dtype: torch.dtype) -> Mix:
        """Attention over whole sequences."""
        if mb.mix is not None:
            return mb.mix
        if self.cp.world == 1:
            mask = None if mb.documents is None else document_mask(mb.documents, dtype)
            return lambda q, k, v: attend(q, k, v, mask, causal=mask is not None or length > 1)
        context = self.context
        assert context is not None
        if mb.documents is None:
            masks = [Mask.causal(length)]
        else:
            masks = [Mask.document(row) for row in mb.documents.cpu().numpy()]
        return lambda q, k, v: context.attend(q, k, v, masks, self.cp)

    def _end(self, hidden: Tensor, mb: MicroBatch) -> Tensor:
        """The loss of hidden states [N, D] or [n, D]."""
        assert self.norm is not None
        hidden = self.norm(hidden)
        table = self.embed if self.output is None else self.output
        if table is None:
            return hidden
        targets = mb.targets.reshape(-1)
        if table.comm is not None:
            total = len(targets)
            tp = self.tp
            whole = gather_tokens(hidden, tp, total) if self.sp else copy_to(hidden, tp)
            return split_loss_sum(whole, table, targets)
        check_targets(targets, self.config.vocab_size)
        if not self.sp:
            return token_loss_sum(hidden, table.weight, targets)
        own = local_rows(targets, self.tp, IGNORE)
        return reduce_from(token_loss_sum(hidden, table.weight, own), self.tp)


class LocalModel(nn.Module):
    """All stages of one rank.

    What two stages share, a tied embedding where one rank has both ends, is one parameter.

    Args:
        config: the whole model.
        layers: stage -> numbers of its layers, of this rank's stages.
        num_stages: stages of the whole pipeline.
        kind: makes a stage.

    Attributes:
        slices: parameter name -> what this rank holds of it.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Mapping[int, range],
        *,
        num_stages: int,
        parallel: Parallel,
        ranks: Ranks,
        context: ContextPart | None = None,
        dropout: Dropout | None = None,
        routing: StepRouting | None = None,
        recomputed: frozenset[int] = frozenset(),
        mixed: bool = False,
        kind: Callable[..., Stage] = Stage,
    ) -> None:
        super().__init__()
        self.config = config
        # In a plain mapping, so that parameters carry the names of the whole model alone.
        self.stages: Mapping[int, Stage] = {
            number: kind(
                config,
                chosen,
                first=number == 0,
                last=number == num_stages - 1,
                parallel=parallel,
                ranks=ranks,
                context=context,
                dropout=dropout,
                routing=routing,
                recomputed=recomputed,
                mixed=mixed,
            )
            for number, chosen in sorted(layers.items())
        }
        self.slices: dict[str, Slices] = {}
        self.blocks = nn.ModuleDict()
        self.embed: VocabularyTable | None = None
        self.norm: RMSNorm | None = None
        self.output: VocabularyTable | None = None
        for stage in self.stages.values():
            self.slices |= stage.slices
            self.blocks.update(dict(stage.blocks.items()))
            if self.embed is None:
                self.embed = stage.embed
            elif stage.embed is not None:
                stage.embed = self.embed
            self.norm = stage.norm or self.norm
            self.output = stage.output or self.output

    def named(self) -> dict[str, nn.Parameter]:
        """Name in the whole model -> this rank's part."""
        return dict(self.named_parameters())

    def units(self) -> list[nn.Module]:
        """Modules to shard over data-parallel ranks, inner ones first: blocks, then stages."""
        return [*self.blocks.values(), *self.stages.values()]

    def train(self, mode: bool = True) -> LocalModel:
        """Switch dropout of every stage on or off."""
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self
