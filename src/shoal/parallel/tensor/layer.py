"""A model whose layers attend on several ranks at a time; and the same one shared by heads.

Layers of a group that read the same, stale input need not wait for each other: the attention of
layer j, with its keys and values, is on rank j mod W, and the ranks then gather what each layer
gave. Feed-forward layers are shared by their width, on all ranks. What it is compared with is
tensor parallelism: heads and width are shared, and every layer needs two sums.

Shapes: N rows, D hidden, H query heads, K key/value heads, d head_dim, W ranks.

Source: Wu et al., EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU
Utilization, 2025, section 3; Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError, require
from shoal.model.attention import Mixer, Turn
from shoal.model.config import ModelConfig
from shoal.model.feedforward import SwiGLU
from shoal.model.transformer import Transformer, TransformerBlock
from shoal.parallel.protocols import Comm
from shoal.plan.trees.fuzzy import Groups, spans

Share = Literal["layers", "heads"]

# Under these tags the meter counts what layers gave, and the sums of shares.
_GATHER, _SUM = "layers", "tensor"


class TensorExchange(NamedTuple):
    """What ranks do with tensors of theirs before they go on.

    Args:
        how: ``sum`` all parts of all ranks into the first one; ``gather`` the parts of all ranks;
            take the first part of rank ``root``.
        parts: of this rank [N, D], as many on every rank that gathers.
        out: [W, parts, N, D] of what is gathered.
        root: the rank that has what the others take.
    """

    how: Literal["sum", "gather", "take"]
    parts: Sequence[Tensor]
    out: Tensor | None = None
    root: int = 0


Program = Generator[TensorExchange, None, tuple[Tensor, Tensor]]
"""A pass: it stops where ranks must meet, and gives the stream and what is left to add to it."""


def meet(comm: Comm, one: TensorExchange) -> None:
    """Do what a pass has stopped for.

    Raises:
        RankError: another rank is gone.
    """
    if one.how == "gather":
        assert one.out is not None
        comm.all_gather(one.out.view(-1), torch.stack(list(one.parts)).view(-1), tag=_GATHER).wait()
    elif one.how == "take":
        comm.broadcast(one.parts[0], one.root, tag=_GATHER).wait()
    else:
        total = one.parts[0]
        for part in one.parts[1:]:
            total += part
        comm.all_reduce(total, tag=_SUM).wait()


def cut(model: Transformer, rank: int, world: int, share: Share) -> None:
    """Keep of a model what a rank computes, in place.

    Args:
        model: whole, without gradients, before kernels pack its weights.
        rank: whose part it is to be.
        world: of so many.
        share: attention by ``layers`` or by ``heads``; feed-forward layers by width.

    Its configuration then gives the layers and heads of which this rank has keys and values.

    Raises:
        ModelError: its layers are others, or there are more ranks than layers, heads or width.
    """
    config = model.config
    for block in model.blocks:
        if (
            not isinstance(block, TransformerBlock)
            or block.parallel
            or not isinstance(block.mlp, SwiGLU)
        ):
            raise ModelError(
                f"model {config.name}: its blocks are not pre-norm attention, then one pre-norm "
                "feed-forward layer; ranks cannot share them. Use realise: fused"
            )
    most = config.num_layers if share == "layers" else config.num_kv_heads
    require(
        1 <= world <= min(most, config.ffn_hidden),
        "ranks",
        world,
        expected=f"1 to {min(most, config.ffn_hidden)}, the {share} of model {config.name}",
        error=ModelError,
    )
    heads = _shares(config.num_kv_heads, rank, world)
    width = _shares(config.ffn_hidden, rank, world)
    own = 0
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        if share == "heads":
            _cut_heads(block, heads, keeps_bias=not rank)
        elif layer % world == rank:
            block.attention.layer = own
            own += 1
        else:
            block.attention = nn.Identity()  # type: ignore[assignment]
        assert isinstance(block.mlp, SwiGLU)
        _cut_width(block.mlp, width, keeps_bias=not rank)
    queries = config.num_heads // config.num_kv_heads
    held = {"num_heads": queries * len(heads), "num_kv_heads": len(heads)}
    model.config = config.model_copy(update={"num_layers": own} if share == "layers" else held)


def _shares(count: int, rank: int, world: int) -> range:
    return range(count * rank // world, count * (rank + 1) // world)


def _cut_heads(block: TransformerBlock, kv: range, keeps_bias: bool) -> None:
    """Some heads of an attention; the bias behind a sum is added by one rank."""
    attention = block.attention
    dim, queries = attention.head_dim, attention.num_heads // attention.num_kv_heads
    q = range(kv.start * queries, kv.stop * queries)
    first_k, first_v = attention.num_heads, attention.num_heads + attention.num_kv_heads
    rows = torch.cat(
        [
            torch.arange(dim * (first + heads.start), dim * (first + heads.stop))
            for first, heads in ((0, q), (first_k, kv), (first_v, kv))
        ]
    )
    _keep(attention.qkv_proj, rows=rows)
    _keep(attention.o_proj, columns=torch.arange(dim * q.start, dim * q.stop), bias=keeps_bias)
    attention.num_heads, attention.num_kv_heads = len(q), len(kv)


def _cut_width(mlp: SwiGLU, width: range, keeps_bias: bool) -> None:
    """Some of the width of a feed-forward layer."""
    own = torch.arange(width.start, width.stop)
    _keep(mlp.gate_up_proj, rows=torch.cat([own, own + mlp.down_proj.in_features]))
    _keep(mlp.down_proj, columns=own, bias=keeps_bias)


def _keep(
    linear: nn.Linear,
    *,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    bias: bool = True,
) -> None:
    weight = linear.weight.detach()
    had: Tensor | None = linear.bias
    if rows is not None:
        weight = weight[rows]
        had = None if had is None else had.detach()[rows]
    if columns is not None:
        weight = weight[:, columns]
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    linear.out_features, linear.in_features = weight.shape
    kept = None if had is None or not bias else nn.Parameter(had.detach(), requires_grad=False)
    linear.register_parameter("bias", kept)


class LayerRanks:
    """One rank's part of a model, and what it does with the others.

    Args:
        part: of the model, :func:`cut` for this rank; it may be ready to serve.
        groups: of its layers, which read the same input; each layer its own, if not given.
        full: feed-forward layers of a group read one stream: what enters it and what the
            attention of all its layers gave.
    """

    def __init__(
        self,
        part: Transformer,
        comm: Comm,
        share: Share,
        groups: Groups | None = None,
        *,
        full: bool = False,
    ) -> None:
        self.part, self.comm, self._share, self._full = part, comm, share, full
        self._blocks = [block for block in part.blocks if isinstance(block, TransformerBlock)]
        self.groups: Groups = groups or (1,) * len(self._blocks)
        self._spans = spans(self.groups, len(self._blocks))

    @property
    def config(self) -> ModelConfig:
        """Of what this rank has keys and values."""
        return self.part.config

    @property
    def weight(self) -> Tensor:
        """The embedding, which every rank has."""
        return self.part.weight

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor:
        """See :meth:`~shoal.model.transformer.Transformer.flat`; on every rank."""
        x_ND, branch_ND = self.through(self.part.embed(tokens_N), position_N, mixer)
        if rows_R is not None:
            x_ND, branch_ND = x_ND[rows_R], branch_ND[rows_R]
        return self.finished(x_ND, branch_ND)

    def finished(self, x_ND: Tensor, branch_ND: Tensor) -> Tensor:
        return self.part.finished(x_ND, branch_ND)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Scores [R, V] on the first rank; the others have no use for them, and none."""
        return hidden_RD if self.comm.rank else self.part.logits(hidden_RD)

    def through(self, x_ND: Tensor, position_N: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor]:
        """See :meth:`~shoal.model.transformer.Transformer.through`; on every rank.

        Raises:
            RankError: another rank is gone.
        """
        program = self.program(x_ND, position_N, mixer)
        while True:
            try:
                one = next(program)
            except StopIteration as end:
                tensors: tuple[Tensor, Tensor] = end.value
                return tensors
            meet(self.comm, one)

    def whole(
        self, x_ND: Tensor, position_N: Tensor, mixer: Mixer
    ) -> Generator[TensorExchange, None, tuple[Tensor, Tensor]]:
        """A pass to its end, up to where ranks must meet; gives hidden states and scores."""
        hidden_ND = self.finished(*(yield from self.program(x_ND, position_N, mixer)))
        return hidden_ND, self.logits(hidden_ND)

    def program(self, x_ND: Tensor, position_N: Tensor, mixer: Mixer) -> Program:
        """The same, up to where ranks must meet, and on from there."""
        turn = self.part.turn(position_N, x_ND.dtype)
        branch_ND: Tensor | None = None
        for layers in self._spans:
            if self._share == "heads":
                x_ND, branch_ND = yield from self._by_heads(layers, x_ND, branch_ND, turn, mixer)
                continue
            first = self._blocks[layers[0]]
            x_ND, normed = first.attention_norm.after(x_ND, branch_ND)
            mine = []
            for layer in layers:
                if layer % self.comm.world == self.comm.rank:
                    block = self._blocks[layer]
                    own = normed if layer == layers[0] else block.attention_norm(x_ND)
                    mine.append(block.attention.o_proj(block.attention.flat(own, turn, mixer)))
            if self._full and len(layers) > 1:
                x_ND, branch_ND = yield from self._summed(layers, x_ND, mine)
            else:
                x_ND, branch_ND = yield from self._walked(layers, x_ND, mine)
        assert branch_ND is not None
        return x_ND, branch_ND

    def _walked(self, layers: range, x_ND: Tensor, mine: list[Tensor]) -> Program:
        """A group in order, each layer's attention from the rank that has it."""
        world = self.comm.world
        if len(layers) == 1:
            mixed = mine[0] if mine else x_ND.new_empty(x_ND.shape)
            yield TensorExchange("take", [mixed], root=layers[0] % world)
            gave = [mixed]
        else:
            waves = -(-len(layers) // world)
            out = x_ND.new_empty(world, waves, *x_ND.shape)
            # Who has fewer layers than others sends what no rank reads.
            yield TensorExchange("gather", [*mine, *[x_ND] * (waves - len(mine))], out)
            turns = [0] * world
            gave = []
            for layer in layers:
                gave.append(out[layer % world, turns[layer % world]])
                turns[layer % world] += 1
        branch_ND: Tensor | None = None
        for layer, mixed in zip(layers, gave, strict=True):
            block = self._blocks[layer]
            if branch_ND is not None:
                x_ND = block.attention_norm.after(x_ND, branch_ND)[0]
            x_ND, normed = block.mlp_norm.after(x_ND, mixed)
            branch_ND = block.mlp(normed)
            yield TensorExchange("sum", [branch_ND])
        assert branch_ND is not None
        return x_ND, branch_ND

    def _summed(self, layers: range, x_ND: Tensor, mine: list[Tensor]) -> Program:
        """A group whose feed-forward layers read one stream."""
        mixed = mine or [torch.zeros_like(x_ND)]
        yield TensorExchange("sum", mixed)
        blocks = [self._blocks[layer] for layer in layers]
        x_ND, normed = blocks[0].mlp_norm.after(x_ND, mixed[0])
        fed = [blocks[0].mlp(normed), *(block.mlp(block.mlp_norm(x_ND)) for block in blocks[1:])]
        yield TensorExchange("sum", fed)
        return x_ND, fed[0]

    def _by_heads(
        self, layers: range, x_ND: Tensor, branch_ND: Tensor | None, turn: Turn, mixer: Mixer
    ) -> Program:
        """Tensor parallelism: a layer's attention and its feed-forward layer are each a sum."""
        (layer,) = layers
        block = self._blocks[layer]
        x_ND, normed = block.attention_norm.after(x_ND, branch_ND)
        mixed = block.attention.o_proj(block.attention.flat(normed, turn, mixer))
        yield TensorExchange("sum", [mixed])
        x_ND, normed = block.mlp_norm.after(x_ND, mixed)
        fed = block.mlp(normed)
        yield TensorExchange("sum", [fed])
        return x_ND, fed
