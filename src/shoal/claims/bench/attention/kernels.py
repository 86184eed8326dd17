"""All kernels under one mask of one length: checked, counted, then timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.claims.bench.attention.memory import LiveBytes, SavedBytes
from shoal.claims.bench.attention.reference import NAMES, inputs, reference, worst
from shoal.claims.bench.attention.values import TOLERANCES, AttentionSettings, KernelRow, Timing
from shoal.claims.lab.attention_kernels.protocols import AttentionKernelPart
from shoal.core.measure import PairedTimes, interleave
from shoal.core.sizes import human_bytes
from shoal.ir.mask import Mask
from shoal.machine import host

# FLOPs of a seen cell and channel: two products forward; backward four, and the scores again.
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10

_Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class _Ready(NamedTuple):
    """A kernel that is right, on the inputs that it is timed with."""

    run: Callable[[], Tensor]
    backward: Callable[[Tensor], object] | None


def kernel_rows(
    kernels: Mapping[str, AttentionKernelPart],
    name: str,
    mask: Mask,
    settings: AttentionSettings,
    *,
    seen: Mask | None = None,
) -> list[KernelRow]:
    """A row for each kernel.

    Args:
        kernels: by name.
        name: of the pattern.
        mask: what has to be computed.
        settings: shapes, type, device; whether to go backward and to time.
        seen: what the kernels are given instead of ``mask``; a test of the test.
    """
    outcome = seen or mask
    length = mask.num_queries
    data = inputs(
        settings.batch,
        settings.heads,
        settings.kv_heads,
        length,
        settings.head_dim,
        settings.dtype,
        settings.seed,
    )
    wanted: dict[str, Tensor] | None = None
    rows: dict[str, KernelRow] = {}
    ready: dict[str, _Ready] = {}
    for kernel_name, kernel in kernels.items():
        row = KernelRow(
            kernel=kernel_name,
            mask=name,
            length=length,
            status="unsupported",
            seen_cells=mask.area(),
        )
        reason = _refuses(kernel, outcome, settings)
        if reason is None and wanted is None:
            wanted = reference(*data[:3], data[3] if settings.backward else None, mask)
        if reason is not None or wanted is None:
            rows[kernel_name] = row.model_copy(update={"reason": reason})
            continue
        rows[kernel_name], result = _checked(row, kernel, outcome, data, wanted, settings)
        if result is not None:
            ready[kernel_name] = result
    if settings.timed and ready:
        for kernel_name, (forward, backward) in _timed(ready, mask, settings).items():
            rows[kernel_name] = rows[kernel_name].model_copy(
                update={"forward": forward, "backward": backward}
            )
    return list(rows.values())


def _refuses(kernel: AttentionKernelPart, mask: Mask, settings: AttentionSettings) -> str | None:
    reason = kernel.refuses(mask, dtype=settings.dtype, device=settings.device, backward=False)
    needed = kernel.held_bytes(mask, settings.batch * settings.heads)
    free = torch.cuda.mem_get_info()[0] if settings.device == "cuda" else host.memory_available()
    if reason is None and needed > free // 2:
        reason = f"holds {human_bytes(needed)} of scores and mask; {human_bytes(free)} are free"
    return reason


def _checked(
    row: KernelRow,
    kernel: AttentionKernelPart,
    mask: Mask,
    data: _Inputs,
    wanted: dict[str, Tensor],
    settings: AttentionSettings,
) -> tuple[KernelRow, _Ready | None]:
    """Errors and bytes of one kernel, and how to time it if it is right."""
    no_gradient = kernel.refuses(mask, dtype=settings.dtype, device=settings.device, backward=True)
    backward = settings.backward and no_gradient is None
    q, k, v, grad = (x.to(settings.device) for x in data)
    leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    row = row.model_copy(update={"computed_cells": kernel.cells(mask)})
    try:
        run = kernel.prepare(mask, dtype=settings.dtype, device=settings.device)
        watched = settings.device == "cuda" or not kernel.compiled
        with torch.set_grad_enabled(backward):
            if kernel.compiled:
                run(*leaves)
            with _Counted(settings.device if watched else "nothing", leaves) as counted:
                out = run(*leaves)
                result = {"out": out.detach()}
                if backward:
                    grads = torch.autograd.grad(out, leaves, grad)
                    result |= dict(zip(NAMES[1:], grads, strict=True))
                del out
    except (RuntimeError, TypeError, ValueError) as cause:
        # What others wrote may break in any way; that is a result about it.
        text = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        return row.model_copy(update={"status": "failed", "reason": text}), None
    error, of = worst(result, wanted)
    limit = TOLERANCES[settings.dtype]
    update: dict[str, object] = {"error": error, "status": "ok"}
    if watched:
        update |= {"saved_bytes": counted.saved, "peak_bytes": counted.peak}
    if settings.backward and not backward:
        update["reason"] = f"forward only: {no_gradient}"
    if error > limit:
        update |= {"status": "wrong", "reason": f"{of} is off by {error:.1e}, over {limit:.0e}"}
        return row.model_copy(update=update), None

    def forward() -> Tensor:
        with torch.set_grad_enabled(backward):
            return run(*leaves)

    def back(out: Tensor) -> object:
        return torch.autograd.grad(out, leaves, grad)

    return row.model_copy(update=update), _Ready(forward, back if backward else None)


class _Counted:
    """Bytes of a forward and a backward pass: by the allocator of cuda, by results on cpu."""

    def __init__(self, device: str, leaves: list[Tensor]) -> None:
        self._device = device
        self._live = LiveBytes()
        self._saved = SavedBytes(leaves)
        self.saved = self.peak = 0

    def __enter__(self) -> _Counted:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        elif self._device == "cpu":
            self._live.__enter__()  # type: ignore[no-untyped-call]
        self._saved.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._saved.__exit__(*error)
        self.saved = self._saved.bytes
        if self._device == "cuda":
            self.peak = torch.cuda.max_memory_allocated() - self._before
        elif self._device == "cpu":
            self._live.__exit__(*error)  # type: ignore[no-untyped-call]
            self.peak = self._live.peak


def _timed(
    ready: Mapping[str, _Ready], mask: Mask, settings: AttentionSettings
) -> dict[str, tuple[Timing, Timing | None]]:
    """Kernels in turn; a backward pass is what a round with it takes beyond one without."""
    forwards: dict[str, list[float]] = {name: [] for name in ready}
    backwards: dict[str, list[float]] = {name: [] for name in ready}

    def one(name: str) -> Callable[[], object]:
        kernel = ready[name]

        def run() -> object:
            start = _now(settings.device)
            out = kernel.run()
            middle = _now(settings.device)
            forwards[name].append(middle - start)
            if kernel.backward is None:
                return out
            result = kernel.backward(out)
            backwards[name].append(_now(settings.device) - middle)
            return result

        return run

    rounds: PairedTimes = interleave(
        {name: one(name) for name in ready}, settings.repeats, warmup=1, seed=settings.seed
    )
    cells = mask.area() * settings.batch * settings.heads * settings.head_dim
    result: dict[str, tuple[Timing, Timing | None]] = {}
    for name in rounds.seconds:
        back = backwards[name][1:]
        result[name] = (
            _timing(forwards[name][1:], FORWARD_FLOPS * cells),
            _timing(back, BACKWARD_FLOPS * cells) if back else None,
        )
    return result


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _timing(seconds: list[float], flops: float) -> Timing:
    low, median, high = (float(x) for x in np.percentile(seconds, [25, 50, 75]))
    return Timing(median_s=median, low_s=low, high_s=high, tflops=flops / max(median, 1e-12) / 1e12)
