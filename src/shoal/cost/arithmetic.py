"""Counts that follow from a shape alone: parameters, operations, bytes of activations.

Legend: D hidden, H query heads, K key/value heads, d head_dim, F feed-forward width,
V vocabulary, T tokens of a sequence, B sequences of a micro-batch, L layers.

Sources: Kaplan et al., Scaling Laws, 2020, section 2.1 (operations); Korthikanti et al.,
Reducing Activation Recomputation, 2022, section 4 (activations).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

from shoal.core.parts import table
from shoal.ir import ModelShape

__all__ = [
    "LinearProducts",
    "activation_bytes",
    "active_parameters",
    "block_parameters",
    "block_weights",
    "embedding_parameters",
    "expert_parameters",
    "flops_by_op",
    "flops_per_token",
    "linears",
    "logits_bytes",
    "mixture_layers",
    "parameters",
]


@dataclass(frozen=True)
class LinearProducts:
    """The matrix products of one kind: a weight [N, K] and the tokens that pass it.

    Args:
        name: qkv, attention_out, ffn_in, ffn_out, router, expert_in, expert_out, logits.
        N: output width.
        K: input width.
        layers: layers that have it.
        copies: weights of one layer (experts).
        share: tokens that pass one copy, as a share of all tokens.
        bias: it has a bias of N.
        role: part of a block, one of its attention's or of its experts' products, or the output
            layer.
        divided: what tensor parallelism divides: outputs (by columns), inputs (by rows), nothing.
    """

    name: str
    N: int
    K: int
    layers: int = 1
    copies: int = 1
    share: float = 1.0
    bias: bool = False
    role: Literal["block", "attention", "expert", "output"] = "block"
    divided: Literal["outputs", "inputs", ""] = ""

    @property
    def parameters(self) -> int:
        """Weights and biases of all copies in all layers."""
        return self.layers * self.copies * (self.N * self.K + (self.N if self.bias else 0))

    @property
    def flops_per_token(self) -> float:
        """FLOP of a forward pass for one token: two for each weight that the token meets."""
        return 2.0 * self.N * self.K * self.layers * self.copies * self.share


def mixture_layers(shape: ModelShape) -> int:
    """Layers with experts."""
    return shape.num_layers - shape.num_dense_layers if shape.num_experts else 0


@functools.cache
def linears(shape: ModelShape) -> tuple[LinearProducts, ...]:
    """Every linear layer of the model; projections that share an input are one product."""
    D, L = shape.hidden, shape.num_layers
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    wide = 2 if shape.gated else 1
    linears = [
        LinearProducts(
            "qkv", heads, D, L, bias=shape.attention_bias, role="attention", divided="outputs"
        ),
        LinearProducts(
            "attention_out",
            D,
            shape.num_heads * shape.head_dim,
            L,
            role="attention",
            divided="inputs",
        ),
    ]
    sparse = mixture_layers(shape)
    if L - sparse:
        linears.append(
            LinearProducts("ffn_in", wide * shape.ffn_hidden, D, L - sparse, divided="outputs")
        )
        linears.append(LinearProducts("ffn_out", D, shape.ffn_hidden, L - sparse, divided="inputs"))
    if sparse:
        X, E, S = shape.expert_hidden, shape.num_experts, shape.num_shared_experts
        linears.append(LinearProducts("router", _router(shape)["router.weight"][0], D, sparse))
        share = shape.top_k / E
        expert = LinearProducts(
            "expert_in", wide * X, D, sparse, copies=E, share=share, role="expert"
        )
        linears.append(replace(expert, divided="outputs"))
        linears.append(replace(expert, name="expert_out", N=D, K=X, divided="inputs"))
        if S:
            linears.append(
                LinearProducts("shared_in", wide * X, D, sparse, copies=S, divided="outputs")
            )
            linears.append(LinearProducts("shared_out", D, X, sparse, copies=S, divided="inputs"))
    if shape.architecture.ffn.duo:  # counted as if every token took the big layer
        small = shape.architecture.ffn.small_width(shape.ffn_hidden)
        linears.append(LinearProducts("small_in", wide * small, D, L, share=0.0))
        linears.append(LinearProducts("small_out", D, small, L, share=0.0))
        linears.append(LinearProducts("route", 3, D, L, bias=True))
    P = shape.architecture.streams.num
    if P > 1:  # every stream passes all blocks
        linears = [replace(one, share=one.share * P) for one in linears]
        linears.append(LinearProducts("aggregate_in", D, P * D, bias=True))
        linears.append(LinearProducts("aggregate_out", P, D, bias=True))
    linears.append(LinearProducts("logits", shape.vocab_size, D, role="output"))
    return tuple(linears)


def _router(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Parameters of one router, its matrix under ``router.weight``."""
    shapes: dict[str, tuple[int, ...]] = (
        table("gate").build(shape.architecture.moe.gate).shapes(shape.hidden, shape.num_experts)
    )
    return shapes


def _norms(shape: ModelShape) -> int:
    head = 2 * shape.head_dim if shape.qk_norm else 0
    return shape.num_layers * (2 * shape.hidden + head)


def block_parameters(shape: ModelShape) -> int:
    """Parameters of all blocks and of what joins streams, without embedding, output, final norm."""
    matrices = sum(x.parameters for x in linears(shape) if x.role != "output")
    of_routers = sum(math.prod(size) for name, size in _router(shape).items() if "." not in name)
    beside = mixture_layers(shape) * of_routers
    return matrices + _norms(shape) + prefix_parameters(shape) + beside


def block_weights(shape: ModelShape) -> int:
    """Weights of the matrices in all blocks: what a format of few bits packs."""
    return sum(x.layers * x.copies * x.N * x.K for x in linears(shape) if x.role != "output")


def prefix_parameters(shape: ModelShape) -> int:
    """Keys and values of virtual tokens, of all streams and layers."""
    streams = shape.architecture.streams
    if streams.num == 1:
        return 0
    one = 2 * streams.prefix * shape.num_kv_heads * shape.head_dim
    return shape.num_layers * streams.num * one


def embedding_parameters(shape: ModelShape) -> int:
    """Parameters of embedding and output matrix; once if they are tied."""
    return shape.vocab_size * shape.hidden * (1 if shape.tied else 2)


@functools.cache
def parameters(shape: ModelShape) -> int:
    """All parameters, exactly, of an RMS-norm decoder of this shape.

    Learned positions, biases of layer norms and of feed-forward layers, and latent
    attention (MLA) are not in a shape and are not counted.
    """
    return block_parameters(shape) + embedding_parameters(shape) + shape.hidden


def expert_parameters(shape: ModelShape) -> int:
    """Parameters of the experts that tokens choose between, without routers."""
    return sum(linear.parameters for linear in linears(shape) if linear.role == "expert")


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token meets: all, less the experts it is not sent to."""
    idle = sum(
        x.layers * x.N * x.K * (x.copies - shape.top_k)
        for x in linears(shape)
        if x.role == "expert"
    )
    return parameters(shape) - idle


def flops_by_op(shape: ModelShape, seq_len: int, *, training: bool = True) -> dict[str, float]:
    """FLOP for one token of a sequence of ``seq_len``, by operation.

    ``linear`` is every block's matrices, ``attention`` both products of queries with
    keys and weights with values over the causal half, ``logits`` the output matrix.
    Backward costs twice the forward pass.
    """
    factor = 3.0 if training else 1.0
    blocks = sum(x.flops_per_token for x in linears(shape) if x.role != "output")
    # A token at position t attends to t + 1 keys: (seq_len + 1) / 2 on average.
    streams = shape.architecture.streams
    virtual = streams.prefix if streams.num > 1 else 0
    seen = streams.num * ((seq_len + 1) / 2 + virtual)
    attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * seen
    logits = 2.0 * shape.vocab_size * shape.hidden
    return {
        "linear": factor * blocks,
        "attention": factor * attention,
        "logits": factor * logits,
    }


def flops_per_token(shape: ModelShape, seq_len: int, training: bool = True) -> float:
    """FLOP for one token, all operations; recomputation is not counted (as in MFU)."""
    return sum(flops_by_op(shape, seq_len, training=training).values())


def activation_bytes(
    shape: ModelShape,
    seq_len: int,
    microbatch: int,
    *,
    precision: str = "bf16",
    recompute: str = "none",
    tp: int = 1,
    sp: bool = False,
    layers: int | None = None,
) -> float:
    """Bytes that the blocks keep from a forward pass for the backward pass of one micro-batch.

    Attention is of the memory-saving kind: no [T, T] matrix is kept. The residual
    stream has the compute type; it and the norms are kept whole on every tensor rank,
    all else is divided.

    Args:
        shape: the model.
        seq_len: tokens of a sequence.
        microbatch: sequences.
        precision: fp32 or bf16.
        recompute: none, or full: only each block's input is kept, and one block's all.
        tp: tensor-parallel ranks.
        sp: they share the residual stream and the norms too, by token.
        layers: blocks on this rank; all if not given.
    """
    tokens = seq_len * microbatch * shape.architecture.streams.num
    count = shape.num_layers if layers is None else layers
    if recompute == "full":
        one = _block_bytes(shape, precision, tp, sp) * tokens
        width = 2.0 if precision == "bf16" else 4.0
        return count * tokens * shape.hidden * width / (tp if sp else 1) + one
    return count * _block_bytes(shape, precision, tp, sp) * tokens


def _block_bytes(shape: ModelShape, precision: str, tp: int, sp: bool = False) -> float:
    """Bytes that one token leaves in one block, averaged over dense and mixture layers."""
    c = 2.0 if precision == "bf16" else 4.0
    D = shape.hidden
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Whole on every tensor rank: inputs of the two norms with their reciprocal roots, and
    # the two norms' outputs, which feed matrix products.
    whole = 2 * (c * D + 4.0) + 2 * c * D
    # Rotated queries and keys, values, attention's output with its log-sum.
    attention = c * (q + 2 * kv) + c * q + 4.0 * shape.num_heads
    if shape.qk_norm:
        attention += c * (q + kv) + 4.0 * (shape.num_heads + shape.num_kv_heads)
    inner = (2 if shape.gated else 1) + (2 if shape.gated else 1)  # inputs, and silu, product
    sparse = mixture_layers(shape)
    dense_ffn = inner * c * shape.ffn_hidden
    share = sparse / shape.num_layers
    experts = shape.top_k + shape.num_shared_experts
    sparse_ffn = experts * (inner * c * shape.expert_hidden + 2 * c * D) + 4.0 * shape.num_experts
    ffn = (1 - share) * dense_ffn + share * sparse_ffn
    return whole / (tp if sp else 1) + (attention + ffn) / tp


def logits_bytes(
    shape: ModelShape, seq_len: int, microbatch: int, *, precision: str = "bf16", tp: int = 1
) -> float:
    """Bytes of the largest moment at the end of a forward pass: logits and their gradient.

    A chunk of the logits becomes its own gradient in place; beside it lie the gradient
    of the output matrix in both types and that of the hidden states.
    """
    c = 2.0 if precision == "bf16" else 4.0
    tokens = float(seq_len * microbatch)
    cells = min(2.0**24, tokens * shape.vocab_size / tp)
    matrix = shape.vocab_size * shape.hidden / tp
    return c * cells + (4.0 + c) * matrix + 2 * c * tokens * shape.hidden
