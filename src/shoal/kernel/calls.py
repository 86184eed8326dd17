"""What is asked of an operator: shapes and types, no tensors.

One class an operator. M rows (tokens), N outputs, K inputs; B requests, S tokens that
each sees, H query heads, G key/value heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]

BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class LinearCall:
    """``y[M, N] = x[M, K] @ weight[N, K].T (+ bias[N])``.

    Constants: weight, and bias or None. M may differ between calls.

    Args:
        dtype: of x and y.
        gated: the first half of the outputs gates the second half: the result is ``silu(y[:, :N/2])
            * y[:, N/2:]``, of the rounded products.
    """

    op: ClassVar[str] = "linear"
    m: int
    n: int
    k: int
    dtype: Dtype = "bf16"
    device: Device = "cpu"
    gated: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        written = self.n // 2 if self.gated else self.n
        return BYTES[self.dtype] * float(self.n * self.k + self.m * (written + self.k))


@dataclass(frozen=True, slots=True)
class LowbitLinearCall:
    """The same with weights of few bits.

    Constants: a :class:`~shoal.kernel.protocols.PackedMatrix`, and bias or None. M may differ.

    Args:
        format: text of the weight format.
        bits: bits of a weight, scales included.
        dtype: of x and y.
        activations: what each row of x is rounded to before the product, such as
            ``bipolar8``; empty for nothing.
    """

    op: ClassVar[str] = "linear_lowbit"
    m: int
    n: int
    k: int
    format: str
    bits: float
    dtype: Dtype = "bf16"
    device: Device = "cpu"
    activations: str = ""

    @property
    def flops(self) -> float:
        """A multiply-add counts two."""
        return 2.0 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        return self.n * self.k * self.bits / 8 + BYTES[self.dtype] * float(
            self.m * (self.n + self.k)
        )


@dataclass(frozen=True, slots=True)
class MatmulPlanesCall:
    """``y[M, N] = sum_k x[M, k] w[N, k]`` of bipolar integers, exact.

    Constants: the packed planes of w. M may differ between calls.

    Args:
        m: rows of x.
        n: rows of w.
        k: their length.
        w: planes (bits) of w, 1 to 8.
        a: planes of x, 1 to 8.
    """

    op: ClassVar[str] = "matmul_planes"
    m: int
    n: int
    k: int
    w: int
    a: int
    device: Device = "cpu"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        """Planes in, 32-bit results out."""
        return (self.n * self.w + self.m * self.a) * self.k / 8 + 4.0 * self.m * self.n


@dataclass(frozen=True, slots=True)
class PagedAttentionCall:
    """Query tokens of B requests, over the blocks that each request holds.

    ``ready(q[B, H, d], keys, values, blocks[B, W], lengths[B]) -> [B, H, d]``: one token of each
    request, which sees so many tokens of it. ``ready(q[N, H, d], keys, values, blocks[B, W],
    lengths[N], requests[N])``: any tokens, each of the request with that row of blocks. Keys and
    values [slots, K, d] as the cache keeps them: a tensor, or the tensors of its format. B, N and
    S may differ between calls.

    ``ready(.., requests[N], tree[2, N])``: the tokens from place ``tree[0, n]`` on are of a tree of
    64 at most, and query n sees those of them whose bit of ``tree[1, n]`` is set.

    Where ``partial``, the tokens are a part of what the queries see, and ``ready`` gives records
    [.., H, d + 2] in fp32 that :func:`shoal.kernel.paged.partial.merge` puts together.

    Args:
        batch: requests.
        context: tokens each sees, on average.
        heads: query heads.
        block_size: tokens of a block.
        dtype: of q, and of the cache where ``format`` is plain.
        format: text of the cache format, such as plain or bfp12-b32.
        queries: tokens of each request that ask.
        partial: give what can be merged with other parts of the context.
        tree: the last tokens of some queries are branches of a tree.
    """

    op: ClassVar[str] = "paged_attention"
    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: Dtype = "bf16"
    format: str = "plain"
    device: Device = "cpu"
    queries: int = 1
    partial: bool = False
    tree: bool = False

    @property
    def flops(self) -> float:
        request = self.batch * self.queries
        return 4.0 * request * self.context * self.heads * self.head_dim

    @property
    def moved_bytes(self) -> float:
        """Keys and values, queries and results, once."""
        from shoal.kernel.kv import kv_format

        stored = kv_format(self.format).token_bytes(self.head_dim, dtype_bytes=BYTES[self.dtype])
        cache = 2.0 * self.batch * self.context * self.kv_heads * stored
        request = self.batch * self.queries
        return cache + BYTES[self.dtype] * 2.0 * request * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class PointwiseCall:
    """Row by row, limited by memory: ``rms_norm``, ``rope``, ``swiglu`` and ``sample``.

    Args:
        op: which of them.
        m: rows.
        n: numbers of a row that are read.
        out: numbers of a row that are written.
        dtype: of both.
        gradient: the pass back too, weights given with each call: ``ready`` is then a
            :class:`~shoal.kernel.fused.protocols.OperatorPasses`.
    """

    op: Literal["rms_norm", "rope", "swiglu", "sample"]
    m: int
    n: int
    out: int
    dtype: Dtype = "bf16"
    device: Device = "cpu"
    gradient: bool = False

    @property
    def flops(self) -> float:
        """About ten for each number read, and twice as many on the way back."""
        return (30.0 if self.gradient else 10.0) * self.m * self.n

    @property
    def moved_bytes(self) -> float:
        """In and out; on the way back the input and two gradients."""
        once = self.n + self.out
        return BYTES[self.dtype] * float(self.m * (once + (once + self.n) * self.gradient))
