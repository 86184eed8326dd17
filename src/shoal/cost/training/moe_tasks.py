"""What the tasks of a mixture's layer take: ``alpha + beta n / r`` where its tokens go in r chunks.

A chunk's tokens are sent to the nodes of their experts, gathered by the ranks that share an
expert, multiplied, summed, and sent back. Of each kind of task the seconds at eight sizes are
fitted by least squares; what starts a task (messages, launches, reading weights) is its alpha, and
is paid r times.

Source: Pan et al., FSMoE: A Flexible and Scalable Training System for Sparse Mixture-of-Experts
Models, 2025, section 4.1.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import linears, mixture_layers
from shoal.cost.gpu.device import CALIBRATED
from shoal.cost.gpu.kernels import gemm_s
from shoal.cost.price.collectives import all_reduce_s, gather_s
from shoal.cost.price.expert_hops import hops
from shoal.cost.price.experts import exchange_s, first_groups
from shoal.cost.price.rates import KernelRates, RankRates
from shoal.ir import Machine, ModelShape, Parallel

# Parts of the whole work at which a task is timed: the sizes that chunks may have.
_SIZES = (1 / 32, 1 / 16, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1.0)
# Gradients of the input and of the weights: two products for one of the forward pass.
_BACKWARD = 2.0


class Line(NamedTuple):
    """Seconds of a kind of task by its size n: ``alpha + beta n``.

    Args:
        alpha: s, of any.
        beta: s for a byte or a FLOP.
    """

    alpha: float
    beta: float

    def of(self, size: float) -> Task:
        """A task of this kind; of size 0 there is none."""
        return Task(self.alpha, self.beta * size) if size > 0 else Task(0.0, 0.0)


class Task(NamedTuple):
    """Seconds of one chunk's task where there are r chunks: ``alpha + work / r``.

    Args:
        alpha: s, of any chunk.
        work: s, of all chunks together.
    """

    alpha: float
    work: float

    def at(self, chunks: float) -> float:
        """Seconds of one of so many chunks."""
        return self.alpha + self.work / chunks


class MoePass(NamedTuple):
    """One direction of a layer: what a chunk does, in order there and in reverse order back.

    Args:
        exchange: all-to-all between nodes, before and after.
        gather: all-gather inside a node before the experts, and reduce-scatter after them.
        experts: their products.
        tokens: of this rank; there are no more chunks than tokens.
    """

    exchange: Task
    gather: Task
    experts: Task
    tokens: int

    def at(self, chunks: float) -> tuple[float, float, float]:
        """Seconds of exchange, gather and experts of one of so many chunks."""
        return self.exchange.at(chunks), self.gather.at(chunks), self.experts.at(chunks)


class MoeLayer(NamedTuple):
    """A block with experts, and what its gradients need.

    Args:
        forward: of the experts.
        backward: of the experts.
        dense_s: s of the rest of the block, forward.
        dense_backward_s: s of the rest, backward.
        gradient: bytes of the rest's gradients, which all nodes sum.
        all_reduce: seconds of such a sum by bytes, between nodes.
    """

    forward: MoePass
    backward: MoePass
    dense_s: float
    dense_backward_s: float
    gradient: float
    all_reduce: Line


def fitted(sizes: Sequence[float], seconds: Sequence[float], what: str = "task") -> Line:
    """The line through measured seconds, by least squares; nothing of it is below zero.

    An alpha below zero is clipped: the line then goes through zero, and a warning says so.

    Args:
        sizes: bytes or FLOP.
        seconds: as many.
        what: is fitted, for messages.

    Raises:
        PlanError: fewer than two sizes, or seconds that do not grow with the size.
    """
    x, y = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    require(
        len(x) == len(y) and len(set(x.tolist())) >= 2,
        f"{what}: sizes",
        len(set(x.tolist())),
        expected="seconds of at least two different sizes",
        error=PlanError,
    )
    beta, alpha = (float(one) for one in np.polyfit(x / x.max(), y, 1))
    if alpha < 0:
        warnings.warn(
            f"{what}: the fit gives alpha = {alpha:.3g} s, which is below zero; it is clipped to 0",
            stacklevel=2,
        )
        alpha, beta = 0.0, float(x @ y / (x @ x) * x.max())
    require(
        beta > 0,
        f"{what}: beta",
        beta / float(x.max()),
        expected="above 0, seconds that grow with the size",
        hint="measure larger sizes, or more often",
        error=PlanError,
    )
    return Line(alpha, beta / float(x.max()))


def passes(
    exchange: Line, gather: Line, experts: Line, sizes: tuple[float, float, float], tokens: int
) -> tuple[MoePass, MoePass]:
    """Forward and backward pass of a layer from fits of its tasks.

    Args:
        exchange: seconds by bytes.
        gather: seconds by bytes.
        experts: seconds by FLOP.
        sizes: bytes of exchange and of gather, and FLOP of the experts, forward.
        tokens: of a rank.
    """
    there, beside, work = exchange.of(sizes[0]), gather.of(sizes[1]), experts.of(sizes[2])
    twice = Task(_BACKWARD * work.alpha, _BACKWARD * work.work)
    return MoePass(there, beside, work, tokens), MoePass(there, beside, twice, tokens)


def layer_of(
    shape: ModelShape, machine: Machine, split: Parallel, tokens: int, seq_len: int = 4096
) -> MoeLayer:
    """A block of a model on a grid of experts, its tasks fitted to what the cost model says.

    Args:
        shape: the model.
        machine: several nodes.
        split: with experts on a grid of their own.
        tokens: of one rank and micro-batch.
        seq_len: of a sequence, which attention works on.

    Raises:
        PlanError: a model without experts, or ranks of which it is not known who shares a node.
    """
    require(
        mixture_layers(shape) > 0,
        "model",
        shape.name,
        expected="a mixture of experts, such as Mixtral-8x7B-v0.1",
        error=PlanError,
    )
    per_node, far, near = machine.devices_per_node, machine.link("node"), machine.link("device")
    require(
        machine.nodes > 1 and far is not None and (per_node == 1 or near is not None),
        f"machine {machine.name}: nodes",
        machine.nodes,
        expected="several, and a link between them and inside: which ranks share a node decides "
        "what travels how; give a machine such as 64xH100",
        error=PlanError,
    )
    require(
        per_node % split.etp == 0,
        "parallel.etp",
        split.etp,
        expected=f"a divisor of the node's {per_node} devices, who gather inside it",
        error=PlanError,
    )
    groups = first_groups(split.experts(), "ep", max(1, per_node))
    rows, width = tokens * shape.top_k, 2.0

    def sent(size: float) -> float:
        # Hops wait for one another.
        every = hops(groups, 1.0, size, per_node, split.expert_dispatch)
        return sum(exchange_s(one, machine) for one in every)

    def gathered(size: float) -> float:
        return gather_s(size * split.etp, split.etp, near)

    mine = max(1, shape.num_experts // split.ep)
    wide = (2 if shape.gated else 1) * shape.expert_hidden / split.etp
    curve = RankRates(machine, split).matmul_curve("bf16")

    def product(m: float, n: float, k: float, groups: int = 1) -> float:
        if isinstance(curve, KernelRates):
            value: float = gemm_s(m, n, k, curve.gpu, CALIBRATED, curve.dtype, groups)
            return value + machine.device.op_overhead_s
        return groups * 2.0 * m * n * k / curve((m * n * k) ** (1 / 3))

    def multiplied(flops: float) -> float:
        each = flops / (2.0 * mine * shape.hidden * (wide + shape.expert_hidden / split.etp))
        return product(each, wide, shape.hidden, mine) + product(
            each, shape.hidden, shape.expert_hidden / split.etp, mine
        )

    size = rows * shape.hidden * width
    flops = 2.0 * rows * shape.hidden * (wide + shape.expert_hidden / split.etp) * split.etp
    lines = []
    for what, whole, seconds in (
        ("exchange", size if split.ep > 1 else 0.0, sent),
        ("gather", size if split.etp > 1 else 0.0, gathered),
        ("experts", flops, multiplied),
    ):
        sizes = [whole * part for part in _SIZES]
        none = Line(0.0, 0.0)
        lines.append(fitted(sizes, [seconds(x) for x in sizes], what) if whole else none)
    forward, backward = passes(lines[0], lines[1], lines[2], (size, size, flops), tokens)
    around = [x for x in linears(shape) if x.role in ("attention", "mixture")]
    dense = sum(product(tokens, x.N, x.K, x.copies) for x in around)
    keys = 2.0 * tokens * shape.num_heads * shape.head_dim * seq_len
    dense += keys / curve(2048.0)
    weights = sum(x.parameters / x.layers for x in around)
    gradient = 4.0 * weights / split.tp

    def summed(bytes_: float) -> float:
        # A node's ranks share out what they have summed among themselves.
        return all_reduce_s(bytes_ / per_node, machine.nodes, far)

    parts = [gradient * part for part in _SIZES]
    line = fitted(parts, [summed(x) for x in parts], "all-reduce")
    return MoeLayer(forward, backward, dense, _BACKWARD * dense, gradient, line)
