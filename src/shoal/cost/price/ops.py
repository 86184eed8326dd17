"""Operators of one rank's forward and backward pass of one micro-batch.

Every entry is a group of equal operators with its matrix products or its traffic. The
traffic is counted operator by operator, as reads and writes of whole tensors, in the
order in which :mod:`shoal.model` runs them on a CPU: its RMS norm, for instance, passes five times
over its input forward and ten times backward. Two styles of running differ: ``cpu``, eager, where
attention's backward pass is plain products, and ``fused``, compiled, where chains of elementwise
operators are one kernel. What accelerators run is in :mod:`shoal.cost.price.accelerated`.

Legend: n tokens of the micro-batch, D hidden, V vocabulary, c bytes of the compute type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.cost.arithmetic import expert_parameters, linears, mixture_layers, parameters
from shoal.ir import ModelShape

Style = Literal["cpu", "fused"]


@dataclass(frozen=True)
class MemoryPasses:
    """Whole-tensor reads and writes of a group of operators, and how many operators it has."""

    forward: float
    backward: float
    forward_calls: int
    backward_calls: int
    forward_special: float = 0.0
    backward_special: float = 0.0


# Counted from the model's operators, in widths of their input; ``special`` counts those
# lanes that evaluate a transcendental function (silu, exp), see SPECIAL.
PASSES: dict[Style, dict[str, MemoryPasses]] = {
    "cpu": {
        "norm": MemoryPasses(5, 10, 6, 8),
        "rotary": MemoryPasses(5, 5, 4, 5),
        "residual": MemoryPasses(3, 3, 1, 1),
        "gate": MemoryPasses(6, 16, 2, 5, 1, 1),
        "activation": MemoryPasses(2, 3, 1, 1, 1, 1),
    },
    "fused": {
        "norm": MemoryPasses(2, 4, 1, 1),
        "rotary": MemoryPasses(2, 2, 1, 1),
        "residual": MemoryPasses(1, 1, 0, 0),
        "gate": MemoryPasses(3, 5, 1, 1),
        "activation": MemoryPasses(2, 3, 1, 1),
    },
}

# On a CPU a transcendental function costs a lane this many passes more than its traffic.
SPECIAL = {"fp32": 2.0, "bf16": 4.0}

# Passes of fp32 over the causal half of the [T, T] weights inside the tiled attention
# kernel of a CPU, where its small products and its conversions are not the matrix units':
# forward and backward.
TILED = {"fp32": (24.0, 42.0), "bf16": (20.0, 70.0)}
# Passes of the compute type over all of the [T, T] weights where attention's backward
# pass is plain products: mask, softmax, its gradient, and what the products write.
PLAIN_BACKWARD = MemoryPasses(0, 9, 0, 22, 0, 1)
# Scores of one sequence beyond which the tiled kernel runs backward too.
MOST_PLAIN_SCORES = 2**25
# Logits that are held at a time.
LOGITS_CHUNK = 2**24


class FrozenPasses(NamedTuple):
    """What frozen weights take to be multiplied, in bytes a weight read and written.

    Args:
        forward: of a forward pass, in which they are made in the compute type.
        backward: of a backward pass, in which they are made again.
    """

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class OpGroup:
    """A group of equal operators.

    Args:
        name: what it is.
        kind: matmul, attention or memory.
        count: how often it runs in one pass (layers, experts).
        M: rows of the product: tokens.
        N: output width of the product.
        K: inner width of the product.
        forward_flops: FLOP of one attention forward pass.
        backward_flops: FLOP of one attention backward pass.
        forward_bytes: bytes read and written forward.
        backward_bytes: bytes read and written backward.
        size_bytes: bytes that one of its operators touches.
        forward_calls: operators launched forward.
        backward_calls: operators launched backward.
        gaps: share of its calls, on an accelerator, whose kernels follow the last one after a gap
            that no other group counts.
        backward_share: share of the product's backward pass that runs backward; the loss
            makes its gradients forward.
        recomputed: full recomputation runs its forward pass again.
        keys: tokens of a sequence that attention reads.
        groups: equal products that run as one kernel, on an accelerator.
        dtype: type of the product's operands there.
        adds: bytes of a cell to which the gradient of a weight is added there; 0 writes it alone.
        frozen: the weight has no gradient.
        heads: attention's heads of all sequences, on an accelerator.
        head_dim: width of its queries and keys.
        value_dim: width of its values.
        kernel: which of the device's attention kernels.
        window: keys that a query sees at most, 0 for all, and on which share of the layers.
    """

    name: str
    kind: Literal["matmul", "attention", "memory"]
    count: float = 1.0
    M: float = 0.0
    N: float = 0.0
    K: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    size_bytes: float = 0.0
    forward_calls: int = 1
    backward_calls: int = 2
    gaps: float = 1.0
    backward_share: float = 1.0
    recomputed: bool = True
    keys: float = 1.0
    groups: int = 1
    dtype: str = ""
    adds: float = 0.0
    frozen: bool = False
    heads: float = 0.0
    head_dim: float = 0.0
    value_dim: float = 0.0
    kernel: str = ""
    window: tuple[int, float] = (0, 0.0)


def stage_share(shape: ModelShape, pp: int) -> float:
    """Blocks of the fullest pipeline stage, as a share of all blocks."""
    return -(-shape.num_layers // pp) / shape.num_layers


def operators(
    shape: ModelShape,
    *,
    seq_len: int,
    microbatch: int,
    precision: str,
    style: Style,
    tp: int = 1,
    pp: int = 1,
    vocab: int | None = None,
    experts: tuple[int, int] | None = None,
    frozen: FrozenPasses | None = None,
) -> tuple[OpGroup, ...]:
    """Everything that the fullest pipeline stage of one tensor rank runs for one micro-batch.

    Args:
        shape: the model.
        seq_len: tokens of a sequence, T.
        microbatch: sequences, B.
        precision: fp32, or bf16 compute on an fp32 residual stream and fp32 weights.
        style: how the framework runs.
        tp: tensor-parallel ranks, which share heads, feed-forward width and vocabulary.
        pp: pipeline stages, which share the blocks.
        vocab: ranks that share the vocabulary; ``tp`` if not given.
        experts: ep and etp, where experts have a grid of their own; else the tensor ranks share
            the width of each.
        frozen: of weights without gradients; None where all are trained.
    """
    n = float(seq_len * microbatch)
    layers = stage_share(shape, pp) * shape.num_layers
    share = stage_share(shape, pp)
    low = precision == "bf16"
    # On a CPU a bf16 lane is widened, computed and narrowed, which costs it more than its
    # two bytes: bf16 additions take 0.8 times as long as fp32 additions, not half.
    c = (3.2 if style == "cpu" else 2.0) if low else 4.0
    special = SPECIAL[precision] if style == "cpu" else 0.0
    passes = PASSES[style]
    q = shape.num_heads * shape.head_dim / tp
    kv = shape.num_kv_heads * shape.head_dim / max(1, min(tp, shape.num_kv_heads))
    D = shape.hidden
    ops: list[OpGroup] = []

    def memory(name: str, width: float, bytes_per: float, count: float, what: MemoryPasses) -> None:
        ops.append(
            OpGroup(
                name,
                "memory",
                count=count,
                forward_bytes=(what.forward + special * what.forward_special)
                * bytes_per
                * n
                * width,
                backward_bytes=(what.backward + special * what.backward_special)
                * bytes_per
                * n
                * width,
                size_bytes=3 * bytes_per * n * width,
                forward_calls=what.forward_calls,
                backward_calls=what.backward_calls,
            )
        )

    # Of its tokens, which tp ranks share, a rank of experts has those of ep * etp ranks.
    ep, etp = experts or (1, tp)
    visiting = ep * etp / tp
    for linear in linears(shape):
        if linear.role == "output":
            continue
        if linear.role == "expert":
            column = linear.divided == "outputs"
            ops.append(
                OpGroup(
                    linear.name,
                    "matmul",
                    count=linear.layers * linear.copies / ep * share,
                    M=n * linear.share * visiting,
                    N=linear.N / (etp if column else 1),
                    K=linear.K / (1 if column else etp),
                    forward_calls=1,
                    backward_calls=2,
                )
            )
            continue
        column, row = linear.divided == "outputs", linear.divided == "inputs"
        ops.append(
            OpGroup(
                linear.name,
                "matmul",
                count=linear.layers * linear.copies * share,
                M=n * linear.share,
                N=linear.N / (tp if column else 1),
                K=linear.K / (tp if row else 1),
                forward_calls=2 if linear.bias else 1,
                backward_calls=3 if linear.bias else 2,
            )
        )
    ops.extend(
        _attention(
            shape,
            seq_len=seq_len,
            microbatch=microbatch,
            precision=precision,
            style=style,
            layers=layers,
            tp=tp,
            c=c,
        )
    )
    memory("norm", D, c, 2 * layers, passes["norm"])
    if shape.qk_norm:
        memory("qk_norm", q + kv, c, layers, passes["norm"])
    memory("rotary", q + kv, c, layers, passes["rotary"])
    memory("values", kv, c, layers, MemoryPasses(2, 2, 1, 1))
    memory("residual", D, c, 2 * layers, passes["residual"])
    sparse = mixture_layers(shape)
    act = passes["gate"] if shape.gated else passes["activation"]
    if shape.num_layers - sparse:
        memory("gate", shape.ffn_hidden / tp, c, (shape.num_layers - sparse) * share, act)
    if sparse:
        met = shape.top_k + shape.num_shared_experts
        memory("gate", shape.expert_hidden * met / tp, c, sparse * share, act)
        own = 1 if experts is None else tp
        memory("dispatch", D * met / own, c, sparse * share, MemoryPasses(6, 8, 4, 6))
        # Each expert is a handful of small operators of its own.
        ops.append(
            OpGroup(
                "experts",
                "memory",
                count=sparse * share,
                forward_calls=6 * shape.num_experts // ep,
                backward_calls=10 * shape.num_experts // ep,
            )
        )
    held = parameters(shape) - (1 - tp / (ep * etp)) * expert_parameters(shape)
    local = held * share / tp
    ops.extend(passing_weights(local, 5.0 * layers, precision, frozen))
    ops.extend(_ends(shape, n=n, c=c, low=low, vocab=vocab or tp, style=style))
    return tuple(ops)


def passing_weights(
    local: float, pieces: float, precision: str, frozen: FrozenPasses | None
) -> list[OpGroup]:
    """What passes over all weights of a rank: copies in the compute type, sums of gradients.

    Args:
        local: weights of the rank.
        pieces: matrices that they are.
        precision: of the job.
        frozen: of weights without gradients; None where all are trained.
    """
    # Autocast copies every matrix to bf16 once a forward pass; gradients come back.
    casts = FrozenPasses(6.0, 6.0) if precision == "bf16" else FrozenPasses()
    if frozen is not None:
        casts = frozen
    both = [("weight_cast", *casts)] if any(casts) else []
    if frozen is None:
        both.append(("gradient_sum", 0.0, 12.0))
    pieces = max(1.0, pieces)
    return [
        OpGroup(
            name,
            "memory",
            forward_bytes=ahead * local,
            backward_bytes=behind * local,
            size_bytes=max(ahead, behind) * local / pieces,
            forward_calls=int(pieces) if ahead else 0,
            backward_calls=int(pieces) if behind else 0,
            # What is kept for the backward pass is not made again.
            recomputed=frozen is not None and behind > 0,
        )
        for name, ahead, behind in both
    ]


def _attention(
    shape: ModelShape,
    *,
    seq_len: int,
    microbatch: int,
    precision: str,
    style: Style,
    layers: float,
    tp: int,
    c: float,
) -> list[OpGroup]:
    """Attention of all blocks: the tiled kernel, backward as plain products on a CPU in bf16."""
    T, d = float(seq_len), shape.head_dim
    heads = microbatch * shape.num_heads / tp
    # Tiles of 64 queries see the keys up to their end.
    half = heads * T * min(T, (T + 64.0) / 2)
    forward_passes, backward_passes = TILED[precision] if style == "cpu" else (0.0, 0.0)
    plain = (
        style == "cpu" and precision == "bf16" and shape.num_heads / tp * T * T <= MOST_PLAIN_SCORES
    )
    tiled = OpGroup(
        "attention",
        "attention",
        count=layers,
        forward_flops=4.0 * half * d,
        # Five products instead of two: the weights are computed again.
        backward_flops=0.0 if plain else 10.0 * half * d,
        forward_bytes=forward_passes * 4.0 * half,
        backward_bytes=0.0 if plain else backward_passes * 4.0 * half,
        size_bytes=2.0**20,
        forward_calls=1,
        backward_calls=0 if plain else 1,
        keys=T,
    )
    if not plain:
        return [tiled]
    cells = heads * T * T
    what = PLAIN_BACKWARD
    width = heads * T * d
    return [
        tiled,
        OpGroup(
            "attention_backward",
            "attention",
            count=layers,
            backward_flops=10.0 * cells * d,
            backward_bytes=(what.backward + SPECIAL[precision]) * c * cells + 8 * c * width,
            size_bytes=2.0 * cells,
            forward_calls=0,
            backward_calls=what.backward_calls,
        ),
    ]


def _ends(
    shape: ModelShape, *, n: float, c: float, low: bool, vocab: int, style: Style
) -> list[OpGroup]:
    """Embedding, final norm, logits and loss; of a pipeline, the last stage's, which is fuller.

    Loss and gradient of the logits are made together, in the forward pass, a chunk at a
    time: converted to fp32, softmax, gathered, scattered, converted back.
    """
    D, V = shape.hidden, shape.vocab_size / vocab
    norm = PASSES[style]["norm"]
    cells = n * V
    chunks = max(1.0, cells / LOGITS_CHUNK)
    pieces = max(1.0, cells / 2**18) if style == "cpu" else chunks
    exact = 8.0 + (4.0 * SPECIAL["fp32"] if style == "cpu" else 0.0)
    return [
        OpGroup(
            "embedding",
            "memory",
            forward_bytes=(8.0 + (6.0 if low else 0.0)) * n * D,
            backward_bytes=(12.0 + (6.0 if low else 0.0)) * n * D + 8.0 * V * D,
            size_bytes=8.0 * n * D,
            recomputed=False,
        ),
        OpGroup(
            "final_norm",
            "memory",
            forward_bytes=norm.forward * c * n * D,
            backward_bytes=norm.backward * c * n * D,
            size_bytes=3 * c * n * D,
            forward_calls=norm.forward_calls,
            backward_calls=norm.backward_calls,
            recomputed=False,
        ),
        OpGroup("logits", "matmul", count=3, M=n, N=V, K=D, backward_share=0.0, recomputed=False),
        OpGroup(
            "loss",
            "memory",
            forward_bytes=(exact + (6.0 + 6.0 if low else 8.0 + 8.0)) * cells
            + (chunks * 12.0 + 6.0) * V * D,
            backward_bytes=8.0 * V * D + 3 * c * n * D,
            # Pieces of the logits stay in a cache.
            size_bytes=2.0**21 if style == "cpu" else 12.0 * cells / chunks,
            forward_calls=int(14 * pieces),
            backward_calls=2,
            recomputed=False,
        ),
    ]
