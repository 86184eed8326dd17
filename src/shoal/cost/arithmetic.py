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
from shoal.cost.latent import Latent, latent_of
from shoal.ir import ModelShape


@dataclass(frozen=True)
class LinearProducts:
    """The matrix products of one kind: a weight [N, K] and the tokens that pass it.

    Args:
        name: qkv, attention_out, ffn_in, ffn_out, router, expert_in, expert_out, logits; of latent
            attention q_down, q_up, kv_down and kv_up in the place of qkv.
        N: output width.
        K: input width.
        layers: layers that have it.
        copies: weights of one layer (experts).
        share: tokens that pass one copy, as a share of all tokens.
        bias: it has a bias of N.
        role: part of a block, one of its attention's or of its experts' products, one of a mixture
            beside its experts (router, shared experts), or the output layer.
        divided: what tensor parallelism divides: outputs (by columns), inputs (by rows), nothing.
    """

    name: str
    N: int
    K: int
    layers: int = 1
    copies: int = 1
    share: float = 1.0
    bias: bool = False
    role: Literal["block", "attention", "expert", "mixture", "output"] = "block"
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
    if latent := latent_of(shape):
        products = _latent_projections(latent, shape)
    else:
        products = {"qkv": (heads, D), "attention_out": (D, shape.num_heads * shape.head_dim)}
    linears = [
        LinearProducts(
            name,
            N,
            K,
            L,
            bias=name == "qkv" and shape.attention_bias,
            role="attention",
            # What is compressed is small, and every rank has all of it.
            divided="" if "down" in name else "inputs" if name == "attention_out" else "outputs",
        )
        for name, (N, K) in products.items()
    ]
    sparse = mixture_layers(shape)
    if L - sparse:
        linears.append(
            LinearProducts("ffn_in", wide * shape.ffn_hidden, D, L - sparse, divided="outputs")
        )
        linears.append(LinearProducts("ffn_out", D, shape.ffn_hidden, L - sparse, divided="inputs"))
    if sparse:
        X, E, S = shape.expert_hidden, shape.num_experts, shape.num_shared_experts
        experts = _router(shape)["router.weight"][0]
        linears.append(LinearProducts("router", experts, D, sparse, role="mixture"))
        share = shape.top_k / E
        expert = LinearProducts(
            "expert_in", wide * X, D, sparse, copies=E, share=share, role="expert"
        )
        linears.append(replace(expert, divided="outputs"))
        linears.append(replace(expert, name="expert_out", N=D, K=X, divided="inputs"))
        if S:
            shared = LinearProducts("shared_in", wide * X, D, sparse, copies=S, role="mixture")
            linears.append(replace(shared, divided="outputs"))
            linears.append(replace(shared, name="shared_out", N=D, K=X, divided="inputs"))
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


def _latent_projections(latent: Latent, shape: ModelShape) -> dict[str, tuple[int, int]]:
    D, heads = shape.hidden, shape.num_heads
    wide, value = latent.plain + latent.rotary, latent.value
    queries = {"q": (heads * wide, D)}
    if latent.query:
        queries = {"q_down": (latent.query, D), "q_up": (heads * wide, latent.query)}
    return {
        **queries,
        "kv_down": (latent.kv + latent.rotary, D),
        "kv_up": (heads * (latent.plain + value), latent.kv),
        "attention_out": (D, heads * value),
    }


def attention_width(shape: ModelShape) -> float:
    """Mean of the widths of a head's queries and of its values, over which both products run."""
    if latent := latent_of(shape):
        return (latent.plain + latent.rotary + latent.value) / 2
    return float(shape.head_dim)


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
    attention = 4.0 * shape.num_layers * shape.num_heads * attention_width(shape) * seen
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
        recompute: none; full: only each block's input is kept, and one block's all; elementwise:
            the outputs of products and of attention are kept too, but of latent attention what is
            compressed in place of what comes of it; half: of products every other.
        tp: tensor-parallel ranks.
        sp: they share the residual stream and the norms too, by token.
        layers: blocks on this rank; all if not given.
    """
    tokens = seq_len * microbatch * shape.architecture.streams.num
    count = shape.num_layers if layers is None else layers
    whole = _block_bytes(shape, precision, tp, sp) * tokens
    if recompute == "none":
        return count * whole
    each = (2.0 if precision == "bf16" else 4.0) * shape.hidden / (tp if sp else 1)
    if recompute != "full":
        share = {"elementwise": 1.0, "half": 0.5}[recompute]
        products, attention = _output_bytes(shape, precision, tp, sp, up=recompute == "half")
        each += share * products + attention
    return count * tokens * each + whole


def _attended(shape: ModelShape) -> tuple[int, int, int]:
    """Numbers of a token: in queries, keys and values, in attention's output, compressed ones."""
    heads = shape.num_heads
    if latent := latent_of(shape):
        wide = latent.plain + latent.rotary
        compressed = latent.query + latent.kv + latent.rotary
        return heads * (2 * wide + latent.value), heads * latent.value, compressed
    return (heads + 2 * shape.num_kv_heads) * shape.head_dim, heads * shape.head_dim, 0


def _output_bytes(
    shape: ModelShape, precision: str, tp: int, sp: bool, *, up: bool
) -> tuple[float, float]:
    """Bytes of the outputs of a block's products, and of attention, for one token.

    ``up``: with those that latent attention gets from what is compressed.
    """
    c = 2.0 if precision == "bf16" else 4.0
    D = shape.hidden
    heads, out, compressed = _attended(shape)
    if compressed and not up:
        heads = 0
    share = mixture_layers(shape) / shape.num_layers
    wide, active = (2 if shape.gated else 1), shape.top_k + shape.num_shared_experts
    ffn = (1 - share) * wide * shape.ffn_hidden + share * active * (wide * shape.expert_hidden + D)
    inner = c * (heads + ffn) / tp + c * (2 - share) * D / (tp if sp else 1)
    return inner + c * compressed, (c * out + 4.0 * shape.num_heads) / tp


def _block_bytes(shape: ModelShape, precision: str, tp: int, sp: bool = False) -> float:
    """Bytes that one token leaves in one block, averaged over dense and mixture layers."""
    c = 2.0 if precision == "bf16" else 4.0
    D = shape.hidden
    heads, out, compressed = _attended(shape)
    # Whole on every tensor rank: inputs of the two norms with their reciprocal roots, and
    # the two norms' outputs, which feed matrix products; what is compressed, and its norms.
    whole = 2 * (c * D + 4.0) + 2 * c * D
    # Rotated queries and keys, values, attention's output with its log-sum.
    attention = c * (heads + out) + 4.0 * shape.num_heads
    if shape.qk_norm:
        norms = shape.num_heads + shape.num_kv_heads
        attention += (c * shape.head_dim + 4.0) * norms
    inner = (2 if shape.gated else 1) + (2 if shape.gated else 1)  # inputs, and silu, product
    sparse = mixture_layers(shape)
    dense_ffn = inner * c * shape.ffn_hidden
    share = sparse / shape.num_layers
    experts = shape.top_k + shape.num_shared_experts
    sparse_ffn = experts * (inner * c * shape.expert_hidden + 2 * c * D) + 4.0 * shape.num_experts
    ffn = (1 - share) * dense_ffn + share * sparse_ffn
    return whole / (tp if sp else 1) + 2 * c * compressed + (attention + ffn) / tp


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
