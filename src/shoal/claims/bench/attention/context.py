"""One context-parallel method under one mask on some ranks: real numbers, time on links.

Ranks are threads; what they send really moves, and takes time on a virtual clock. What they
compute is real too, and takes the FLOPs of the seen cells over the rate of the network's
ranks: each call of a kernel moves the clock of the rank that makes it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.claims.bench.attention.kernels import BACKWARD_FLOPS, FORWARD_FLOPS
from shoal.claims.bench.attention.reference import NAMES, inputs, reference, worst
from shoal.claims.bench.attention.values import (
    TOLERANCES,
    AttentionSettings,
    ContextRow,
    RankNetwork,
)
from shoal.claims.lab.thread_links import LinkComm, Links, run_linked
from shoal.core.errors import ConfigError
from shoal.core.meter import Meter
from shoal.ir.mask import Mask
from shoal.parallel.protocols import ContextPart


class AttentionCase(NamedTuple):
    """A mask, inputs, and what attention over them gives.

    Args:
        name: of the pattern.
        mask: what is seen.
        data: q, k, v and a gradient of the output.
        wanted: output and gradients in float64.
    """

    name: str
    mask: Mask
    data: tuple[Tensor, Tensor, Tensor, Tensor]
    wanted: dict[str, Tensor]

    @classmethod
    def of(cls, name: str, mask: Mask, settings: AttentionSettings) -> AttentionCase:
        """The case of a pattern, with inputs by the settings' seed."""
        data = inputs(
            settings.batch,
            settings.heads,
            settings.kv_heads,
            mask.num_queries,
            settings.head_dim,
            settings.dtype,
            settings.seed,
        )
        wanted = reference(*data[:3], data[3] if settings.backward else None, mask)
        return cls(name, mask, data, wanted)


class _Seen(NamedTuple):
    """What one rank has at its end."""

    outputs: dict[str, Tensor]
    forward_s: float
    end_s: float
    busy_s: float
    flops: float


def context_row(
    method: ContextPart, name: str, case: AttentionCase, ranks: int, settings: AttentionSettings
) -> ContextRow:
    """Run the method; what it refuses is a row with its reason."""
    length = case.mask.num_queries
    row = ContextRow(method=name, mask=case.name, length=length, ranks=ranks, status="unsupported")
    try:
        positions = [torch.from_numpy(at) for at in method.positions(length, ranks)]
        method.check(settings.heads, settings.kv_heads, ranks)
    except ConfigError as refused:
        return row.model_copy(update={"reason": str(refused)})
    meter = Meter()

    def rank(comm: LinkComm) -> _Seen:
        return _rank(comm, method, case, positions[comm.rank], settings)

    try:
        seen = run_linked(ranks, rank, _links(settings.network), meter=meter)
    except (RuntimeError, TypeError, ValueError) as cause:
        text = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        return row.model_copy(update={"status": "failed", "reason": text})
    result = {}
    for part in seen[0].outputs:
        whole = torch.empty_like(case.data[NAMES.index(part) - 1 if part != "out" else 0])
        for at, one in zip(positions, seen, strict=True):
            whole[:, :, at] = one.outputs[part]
        result[part] = whole
    error, of = worst(result, case.wanted)
    limit = TOLERANCES[settings.dtype]
    forward = max(one.forward_s for one in seen)
    mean = sum(one.flops for one in seen) / ranks
    return row.model_copy(
        update={
            "status": "ok" if error <= limit else "wrong",
            "reason": "" if error <= limit else f"{of} is off by {error:.1e}, over {limit:.0e}",
            "error": error,
            "forward_s": forward,
            "backward_s": max(one.end_s for one in seen) - forward,
            "busy_s": max(one.busy_s for one in seen),
            "balance": max(one.flops for one in seen) / mean if mean else 1.0,
            "wire_bytes": _by_link(meter),
        }
    )


def _rank(
    comm: LinkComm,
    method: ContextPart,
    case: AttentionCase,
    at: Tensor,
    settings: AttentionSettings,
) -> _Seen:
    q, k, v, grad = (x[:, :, at].clone() for x in case.data)
    leaves = [x.requires_grad_(settings.backward) for x in (q, k, v)]
    clock = _Clock(comm, settings.network.flops)
    with clock:
        out = method.attend(q, k, v, [case.mask], comm)
        forward = comm.now
        result = {"out": out.detach()}
        if settings.backward:
            grads = torch.autograd.grad(out, leaves, grad)
            result |= dict(zip(NAMES[1:], grads, strict=True))
    return _Seen(result, forward, comm.now, clock.busy_s, clock.flops)


class _Clock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves a rank's clock by the FLOPs of its products and attention kernels.

    Attention counts its seen cells, as a kernel does that skips the others; products whole.
    """

    def __init__(self, comm: LinkComm, rate: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.comm = comm
        self.rate = rate
        self.flops = 0.0
        self.busy_s = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and be busy for as long as it takes."""
        out = func(*args, **(kwargs or {}))
        flops = _flops(func, args, kwargs or {})
        if flops:
            self.flops += flops
            self.busy_s += flops / self.rate
            self.comm.compute(flops / self.rate)
        return out


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    aten = torch.ops.aten
    if func in (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ):
        back = func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        q, k = args[1:3] if back else args[:2]
        causal = args[7] if back else (args[4] if len(args) > 4 else kwargs.get("is_causal", False))
        rows, keys = q.shape[2], k.shape[2]
        added = kwargs.get("attn_mask")
        if added is not None:
            cells = int((added == 0).sum())
        else:
            cells = rows * (rows + 1) // 2 if causal else rows * keys
        channels = q.shape[0] * q.shape[1] * q.shape[3]
        return float((BACKWARD_FLOPS if back else FORWARD_FLOPS) * cells * channels)
    if func in (aten.bmm.default, aten.mm.default):
        left, right = args[:2]
        return 2.0 * int(left.numel()) * int(right.shape[-1])
    return 0.0


def _links(network: RankNetwork) -> Links:
    return Links(
        latency_s=network.latency_s,
        bandwidth=network.bandwidth,
        shape=network.shape,
        ranks_per_node=network.ranks_per_node,
        node_latency_s=network.node_latency_s,
        node_bandwidth=network.node_bandwidth,
    )


def _by_link(meter: Meter) -> dict[str, float]:
    """Bytes by class: inside a node, and between nodes."""
    link = {"inside": 0.0, "between": 0.0}
    for key, total in meter.totals().items():
        if key.startswith("wire_bytes"):
            link["between" if re.search(r"scope=\"?node\b", key) else "inside"] += total
    return link
