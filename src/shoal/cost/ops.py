"""The ledger: what one rank's forward and backward pass of one micro-batch consists of.

Every entry is a group of equal operators with its matrix product or its traffic. The
traffic is counted operator by operator, reads and writes of whole tensors, as the
framework runs them: the eager composite of an RMS norm, for instance, reads and writes
its input seven times forward and 25 times backward. Three styles of running differ:

- ``cpu``: eager on a CPU, where norms, rotary embedding and losses are composites;
- ``gpu``: eager on a GPU, where norms and losses are single kernels;
- ``fused``: compiled, where chains of elementwise operators are one kernel.

Legend: n tokens of the micro-batch, D hidden, V vocabulary, c bytes of the compute type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.cost.arithmetic import linears, mixture_layers, parameters
from shoal.ir import ModelShape

__all__ = ["Op", "Style", "ledger", "stage_share"]

Style = Literal["cpu", "gpu", "fused"]


@dataclass(frozen=True)
class Passes:
    """Whole-tensor reads and writes of a group of operators, and how many operators it has."""

    forward: float
    backward: float
    forward_calls: int
    backward_calls: int


# Counted from the operators that the framework records. An operator that evaluates a
# transcendental function in every lane (silu, exp) counts twice.
PASSES: dict[Style, dict[str, Passes]] = {
    "cpu": {
        "norm": Passes(7, 25, 6, 14),
        "rotary": Passes(12, 14, 6, 9),
        "residual": Passes(3, 3, 1, 1),
        "gate": Passes(7, 14, 2, 6),
        "activation": Passes(4, 6, 1, 1),
        "loss": Passes(6, 8, 3, 4),
    },
    "gpu": {
        "norm": Passes(2, 4, 1, 2),
        "rotary": Passes(12, 14, 6, 9),
        "residual": Passes(3, 3, 1, 1),
        "gate": Passes(5, 9, 2, 4),
        "activation": Passes(2, 3, 1, 1),
        "loss": Passes(4, 4, 3, 3),
    },
    "fused": {
        "norm": Passes(2, 4, 1, 1),
        "rotary": Passes(2, 2, 1, 1),
        "residual": Passes(1, 1, 0, 0),
        "gate": Passes(3, 5, 1, 1),
        "activation": Passes(2, 3, 1, 1),
        "loss": Passes(2, 2, 2, 2),
    },
}

# Passes over the [T, T] weights of one head inside the attention kernel of a CPU, fp32
# lanes: scale, mask, maximum, exp, sum, rescale, convert; backward again and its products.
SCORE_PASSES = {"fp32": (12.0, 34.0), "bf16": (11.0, 70.0)}


@dataclass(frozen=True)
class Op:
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
        recomputed: full recomputation runs its forward pass again.
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
    recomputed: bool = True


def stage_share(shape: ModelShape, pp: int) -> float:
    """Blocks of the fullest pipeline stage, as a share of all blocks."""
    return -(-shape.num_layers // pp) / shape.num_layers


def ledger(
    shape: ModelShape,
    *,
    seq_len: int,
    microbatch: int,
    precision: str,
    style: Style,
    tp: int = 1,
    pp: int = 1,
) -> tuple[Op, ...]:
    """Everything that the fullest pipeline stage of one tensor rank runs for one micro-batch.

    Args:
        shape: the model.
        seq_len: tokens of a sequence, T.
        microbatch: sequences, B.
        precision: fp32, or bf16 compute on an fp32 residual stream and fp32 weights.
        style: how the framework runs.
        tp: tensor-parallel ranks, which share heads, feed-forward width and vocabulary.
        pp: pipeline stages, which share the blocks.
    """
    n = float(seq_len * microbatch)
    layers = stage_share(shape, pp) * shape.num_layers
    share = stage_share(shape, pp)
    low = precision == "bf16"
    # On a CPU a bf16 lane is widened, computed and narrowed: about 3 bytes of traffic.
    c = (3.0 if style == "cpu" else 2.0) if low else 4.0
    passes = PASSES[style]
    q = shape.num_heads * shape.head_dim / tp
    kv = shape.num_kv_heads * shape.head_dim / max(1, min(tp, shape.num_kv_heads))
    D = shape.hidden
    ops: list[Op] = []

    def memory(name: str, width: float, bytes_per: float, count: float, what: Passes) -> None:
        ops.append(
            Op(
                name,
                "memory",
                count=count,
                forward_bytes=what.forward * bytes_per * n * width,
                backward_bytes=what.backward * bytes_per * n * width,
                size_bytes=3 * bytes_per * n * width,
                forward_calls=what.forward_calls,
                backward_calls=what.backward_calls,
            )
        )

    for linear in linears(shape):
        if linear.name == "logits":
            continue
        column = linear.name in ("qkv", "ffn_in", "expert_in", "shared_in")
        row = linear.name in ("attention_out", "ffn_out", "expert_out", "shared_out")
        ops.append(
            Op(
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
    scores = microbatch * shape.num_heads / tp * seq_len * (seq_len + 64.0) / 2
    forward_passes, backward_passes = SCORE_PASSES[precision] if style == "cpu" else (0.0, 0.0)
    products = 4.0 * scores * shape.head_dim
    ops.append(
        Op(
            "attention",
            "attention",
            count=layers,
            forward_flops=products,
            # Five products instead of two: the weights are computed again.
            backward_flops=2.5 * products,
            forward_bytes=forward_passes * 4.0 * scores,
            backward_bytes=backward_passes * 4.0 * scores,
            size_bytes=2.0**20,
            forward_calls=1,
            backward_calls=1,
        )
    )
    memory("norm", D, 4.0, 2 * layers, passes["norm"])
    if shape.qk_norm:
        memory("qk_norm", q + kv, 4.0, layers, passes["norm"])
    memory("rotary", q + kv, c, layers, passes["rotary"])
    memory("heads", q, c, layers, Passes(2, 5, 1, 2))
    memory("residual", D, 4.0, 2 * layers, passes["residual"])
    if low:
        # Outputs of the two norms and of the two branches change type, and their gradients.
        casts = Passes(1.5, 1.5, 1, 1) if style != "fused" else Passes(0, 0, 0, 0)
        memory("cast", D, 4.0, 4 * layers, casts)
    sparse = mixture_layers(shape)
    act = passes["gate"] if shape.gated else passes["activation"]
    if shape.num_layers - sparse:
        memory("gate", shape.ffn_hidden / tp, c, (shape.num_layers - sparse) * share, act)
    if sparse:
        met = shape.top_k + shape.num_shared_experts
        memory("gate", shape.expert_hidden * met / tp, c, sparse * share, act)
        memory("dispatch", D * met, c, sparse * share, Passes(6, 8, 4, 6))
        # Each expert is a handful of small operators of its own.
        ops.append(
            Op(
                "experts",
                "memory",
                count=sparse * share,
                forward_calls=6 * shape.num_experts,
                backward_calls=10 * shape.num_experts,
            )
        )
    local = parameters(shape) * share / tp
    weights = max(1.0, 5.0 * layers)
    if low:
        # Autocast copies every matrix to bf16 once a forward pass; gradients come back.
        ops.append(
            Op(
                "weight_cast",
                "memory",
                forward_bytes=6.0 * local,
                backward_bytes=6.0 * local,
                size_bytes=6.0 * local / weights,
                forward_calls=int(weights),
                backward_calls=int(weights),
                recomputed=False,
            )
        )
    ops.append(
        Op(
            "gradient_sum",
            "memory",
            backward_bytes=12.0 * local,
            size_bytes=12.0 * local / weights,
            forward_calls=0,
            backward_calls=int(weights),
            recomputed=False,
        )
    )
    ops.extend(_ends(shape, n=n, c=c, low=low, tp=tp, style=style))
    return tuple(ops)


def _ends(shape: ModelShape, *, n: float, c: float, low: bool, tp: int, style: Style) -> list[Op]:
    """Embedding, final norm, logits and loss; of a pipeline, the last stage's, which is fuller."""
    D, V = shape.hidden, shape.vocab_size / tp
    what = PASSES[style]
    cells = n * V
    return [
        Op(
            "embedding",
            "memory",
            forward_bytes=8.0 * n * D,
            backward_bytes=12.0 * n * D + 8.0 * V * D,
            size_bytes=8.0 * n * D,
            recomputed=False,
        ),
        Op(
            "final_norm",
            "memory",
            forward_bytes=what["norm"].forward * 4.0 * n * D,
            backward_bytes=what["norm"].backward * 4.0 * n * D,
            size_bytes=12.0 * n * D,
            forward_calls=what["norm"].forward_calls,
            backward_calls=what["norm"].backward_calls,
            recomputed=False,
        ),
        Op("logits", "matmul", M=n, N=V, K=D, recomputed=False),
        Op(
            "loss",
            "memory",
            forward_bytes=(what["loss"].forward * 4.0 + (c + 4.0 if low else 0.0)) * cells,
            backward_bytes=(what["loss"].backward * 4.0 + (c + 4.0 if low else 0.0)) * cells,
            size_bytes=12.0 * cells,
            forward_calls=what["loss"].forward_calls,
            backward_calls=what["loss"].backward_calls,
            recomputed=False,
        ),
    ]
