"""Which parts of every parameter a tensor-parallel rank holds; integers only, no torch.

The projections of queries, keys and values are split by heads, those of the feed-forward
layer by its width, the vocabulary by rows; a fused matrix is several boxes of the whole one
behind each other. All else is held whole by every rank.

Source: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.core.boxes import Box
from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.ir.job import Parallel
from shoal.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """The part of one parameter that a tensor-parallel rank holds.

    Args:
        shape: of the whole parameter.
        boxes: boxes of it, which lie behind each other along ``dim`` in the local tensor.
        dim: that dimension.
        padding: zero rows behind them, where the vocabulary is not divisible.
        partial: a rank's gradient is its share of a sum over the tp ranks.
        replicated: every tp rank holds the same, whole; counted once in a norm.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dim: int = 0
    padding: int = 0
    partial: bool = False
    replicated: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, padding included."""
        extent = sum(box.shape[self.dim] for box in self.boxes) + self.padding
        first = self.boxes[0].shape
        return (*first[: self.dim], extent, *first[self.dim + 1 :])

    def placed(self) -> Iterator[tuple[Box, Box]]:
        """(box of the local tensor, box of the whole one), without the padding."""
        start = 0
        for box in self.boxes:
            offset = [0] * len(self.shape)
            offset[self.dim] = start
            yield Box(tuple(offset), box.shape), box
            start += box.shape[self.dim]

    def of_rows(self, rows: Sequence[int]) -> Slices:
        """Of the same parameter, whole rows by rising number."""
        rest, boxes = self.shape[1:], []
        runs = [n for n, row in enumerate(rows) if not n or row != rows[n - 1] + 1]
        for start, end in zip(runs, [*runs[1:], len(rows)], strict=True):
            boxes.append(Box((rows[start], *(0 for _ in rest)), (end - start, *rest)))
        return replace(self, boxes=tuple(boxes), dim=0)

    def find(self, part: Box) -> list[tuple[Box, Box]]:
        """What of the whole parameter a box of the local tensor holds.

        Returns:
            (box of the local tensor inside ``part``, the same elements in the whole one); nothing
            for padding.
        """
        results = []
        for local, whole in self.placed():
            common = local.intersect(part)
            if common is not None:
                offset = tuple(
                    w + c - o
                    for w, c, o in zip(whole.offset, common.offset, local.offset, strict=True)
                )
                results.append((common, Box(offset, common.shape)))
        return results


def take(whole: Tensor, part: Slices) -> Tensor:
    """The local tensor of a rank, a new one, out of the whole parameter of any layout."""
    whole = whole.reshape(part.shape)
    local = whole.new_zeros(part.local_shape)
    origin = Box.whole(part.shape)
    here = Box.whole(part.local_shape)
    for target, source in part.placed():
        local[target.slices(here)] = whole[source.slices(origin)]
    return local


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of ``Transformer(config)``, in its order."""
    dim, ffn, experts = config.hidden, config.ffn_hidden, config.num_experts
    query = config.num_heads * config.head_dim
    rows = query + 2 * config.num_kv_heads * config.head_dim
    block: dict[str, tuple[int, ...]] = {"attention_norm.weight": (dim,)}
    block["attention.qkv_proj.weight"] = (rows, dim)
    if config.attention_bias:
        block["attention.qkv_proj.bias"] = (rows,)
    block["attention.o_proj.weight"] = (dim, query)
    if config.output_bias:
        block["attention.o_proj.bias"] = (dim,)
    if config.qk_norm:
        block["attention.q_norm.weight"] = block["attention.k_norm.weight"] = (config.head_dim,)
    streams = config.architecture.streams
    if streams.num > 1:
        block["attention.prefix"] = (
            2, streams.num, streams.prefix, config.num_kv_heads, config.head_dim,
        )  # fmt: skip
    if config.family != "parallel":  # one norm for both branches
        block["mlp_norm.weight"] = (dim,)
    if experts:
        block["mlp.gate_up_proj"] = (experts, 2 * ffn, dim)
        block["mlp.down_proj"] = (experts, dim, ffn)
        gate = table("gate").build(config.architecture.moe.gate)
        block |= {f"mlp.{name}": shape for name, shape in gate.shapes(dim, experts).items()}
    else:
        block["mlp.gate_up_proj.weight"] = (2 * ffn, dim)
        if config.ffn_bias:
            block["mlp.gate_up_proj.bias"] = (2 * ffn,)
        block["mlp.down_proj.weight"] = (dim, ffn)
        if config.ffn_bias:
            block["mlp.down_proj.bias"] = (dim,)
    if config.architecture.ffn.duo:
        width = config.architecture.ffn.small_width(ffn)
        block["mlp.small.gate_up_proj.weight"] = (2 * width, dim)
        block["mlp.small.down_proj.weight"] = (dim, width)
        block["mlp.router.weight"], block["mlp.router.bias"] = (3, dim), (3,)
    whole_shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, dim)}
    for layer in range(config.num_layers):
        whole_shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    whole_shapes["norm.weight"] = (dim,)
    if not config.tied:
        whole_shapes["output.weight"] = (config.vocab_size, dim)
    if streams.num > 1:
        whole_shapes["aggregate.up.weight"], whole_shapes["aggregate.up.bias"] = (
            (dim, streams.num * dim),
            (dim,),
        )
        whole_shapes["aggregate.down.weight"] = (streams.num, dim)
        whole_shapes["aggregate.down.bias"] = (streams.num,)
    return whole_shapes


def check_split(config: ModelConfig, parallel: Parallel, *, copy_kv: bool = False) -> None:
    """Refuse a model whose layers the tp ranks cannot share evenly.

    Args:
        config: the model.
        parallel: the split.
        copy_kv: where there are fewer key/value heads than ranks, several ranks hold the same.

    Raises:
        PlanError: heads, key/value heads or the feed-forward width are not divisible by tp,
            or experts not by ep, or their width not by etp.
    """
    tp = parallel.tp
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    if not parallel.folded:
        sizes["ffn_hidden"] = config.ffn_hidden

    def fits(name: str, size: int, ranks: int) -> bool:
        return size % ranks == 0 or (copy_kv and name == "num_kv_heads" and ranks % size == 0)

    legal = [n for n in range(1, 65) if all(fits(name, size, n) for name, size in sizes.items())]
    for name, size in sizes.items():
        require(
            fits(name, size, tp),
            "parallel.tp",
            tp,
            expected=f"a divisor of {name} = {size} of model {config.name}",
            hint=f"this model can be split by {', '.join(map(str, legal))}",
            error=PlanError,
        )
    if not parallel.folded:
        return
    require(
        config.num_experts > 0 and config.num_experts % parallel.ep == 0,
        "parallel.ep",
        parallel.ep,
        expected=f"a divisor of the {config.num_experts} experts of model {config.name}"
        if config.num_experts
        else f"1: model {config.name} has no experts",
        error=PlanError,
    )
    require(
        config.ffn_hidden % parallel.etp == 0,
        "parallel.etp",
        parallel.etp,
        expected=f"a divisor of the experts' width {config.ffn_hidden} of model {config.name}",
        error=PlanError,
    )


def vocabulary_rows(vocab_size: int, shards: int, shard: int) -> tuple[range, int]:
    """The rows that one shard of the vocabulary holds, and zero rows behind them.

    Every shard has ceil(V / shards) rows, so that all are of one shape.
    """
    size = -(-vocab_size // shards)
    rows = range(min(vocab_size, shard * size), min(vocab_size, (shard + 1) * size))
    return rows, size - len(rows)


def slices(
    config: ModelConfig,
    parallel: Parallel,
    tp_rank: int,
    *,
    expert: tuple[int, int] = (0, 0),
    copy_kv: bool = False,
) -> dict[str, Slices]:
    """Parameter name -> what tensor-parallel rank ``tp_rank`` holds of it.

    Args:
        config: the model.
        parallel: tp, sp, vocab, ep and etp matter here.
        tp_rank: which rank.
        expert: its places along ep and etp, where experts have a grid of their own.
        copy_kv: as of :func:`check_split`; for models that are not trained.

    Raises:
        PlanError: the model cannot be split so.
    """
    check_split(config, parallel, copy_kv=copy_kv)
    return {
        name: _of_experts(config, parallel, expert, name, shape)
        if parallel.folded and is_expert(name)
        else _slices(config, parallel, tp_rank, name, shape)
        for name, shape in whole_shapes(config).items()
    }


def is_expert(name: str) -> bool:
    """The parameter is of experts, which may have a grid of their own."""
    return name.endswith(("mlp.gate_up_proj", "mlp.down_proj"))


def _of_experts(
    config: ModelConfig,
    parallel: Parallel,
    expert: tuple[int, int],
    name: str,
    shape: tuple[int, ...],
) -> Slices:
    """Some experts, of each a slice of the width; a box for gate and one for up."""
    (ep, etp), count = expert, config.num_experts // parallel.ep
    dim, groups = (1, 2) if name.endswith("gate_up_proj") else (2, 1)
    width = (config.ffn_hidden,) * groups
    cut = _cut(shape, dim, width, (parallel.etp,) * groups, (etp,) * groups)
    boxes = (Box((ep * count, *box.offset[1:]), (count, *box.shape[1:])) for box in cut.boxes)
    return Slices(shape, tuple(boxes), dim)


def _slices(
    config: ModelConfig, parallel: Parallel, rank: int, name: str, shape: tuple[int, ...]
) -> Slices:
    tp = parallel.tp
    if tp == 1:
        return Slices(shape, (Box.whole(shape),), replicated=True)
    leaf = name.split(".", 2)[-1]  # behind "blocks.3."
    if name in ("embed.weight", "output.weight") and parallel.vocab_split == "tp":
        rows, padding = vocabulary_rows(config.vocab_size, tp, rank)
        return Slices(shape, (Box((rows.start, 0), (len(rows), shape[1])),), padding=padding)
    if leaf.startswith("attention.qkv_proj"):
        query = config.num_heads * config.head_dim
        key = config.num_kv_heads * config.head_dim
        parts = min(tp, config.num_kv_heads)  # fewer than ranks where these hold copies
        place = rank * parts // tp
        return _cut(shape, 0, (query, key, key), (tp, parts, parts), (rank, place, place))
    if leaf.startswith("mlp.gate_up_proj"):
        dim = 1 if config.num_experts else 0
        return _cut(shape, dim, (config.ffn_hidden,) * 2, (tp,) * 2, (rank,) * 2)
    if leaf == "attention.prefix":
        heads = min(tp, config.num_kv_heads)
        return _cut(shape, 3, (config.num_kv_heads,), (heads,), (rank * heads // tp,))
    if leaf in ("attention.o_proj.weight", "mlp.down_proj.weight", "mlp.down_proj"):
        dim = len(shape) - 1
        return _cut(shape, dim, (shape[dim],), (tp,), (rank,))
    # What is left is whole. A gradient is partial where a rank sees some of the heads or
    # tokens, or a share of the experts' outputs by which the router's choices are weighed, or has
    # a stream of its own.
    heads = leaf.endswith(("q_norm.weight", "k_norm.weight"))
    apart = config.architecture.residual.apart > 1 and name.startswith("blocks.")
    # A router of experts with a grid of their own sees whole outputs of this rank's tokens.
    shared = leaf.startswith("mlp.router") and not parallel.folded
    partial = heads or apart or parallel.sp or shared
    return Slices(shape, (Box.whole(shape),), partial=partial, replicated=True)


def _cut(
    shape: tuple[int, ...],
    dim: int,
    groups: Sequence[int],
    parts: Sequence[int],
    which: Sequence[int],
) -> Slices:
    """Of every group of rows along ``dim``, cut in so many parts, this one."""
    boxes, start = [], 0
    for extent, count, place in zip(groups, parts, which, strict=True):
        size = extent // count
        offset, box = [0] * len(shape), list(shape)
        offset[dim], box[dim] = start + place * size, size
        boxes.append(Box(tuple(offset), tuple(box)))
        start += extent
    return Slices(shape, tuple(boxes), dim)
