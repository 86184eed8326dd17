"""Kernels of serving, timed on one device in the measuring child process.

On a GPU a number of calls is recorded as a graph and replayed, as serving engines do: a small
kernel takes less than its launch. What is measured is the same on any device of torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.machine.probes.gemm_torch import buffer
from shoal.machine.torch_side import torch_device

_BATCH_S = 1.5e-3


def kernel_bytes(name: str, sizes: Sequence[int]) -> float:
    """Bytes that the operands of a kernel take."""
    family, *rest = name.split("/")
    if family == "gemm":
        m, n, k = sizes
        return 2.0 * (m * k + k * n + m * n)
    width = int(rest[1])
    if family == "prompt":
        rows, tokens = sizes
        return 8.0 * rows * tokens * width
    shared, rows, before = sizes
    return 4.0 * rows * (before + shared) * width


def _call(name: str, sizes: Sequence[int], device: str) -> Callable[[], object]:
    """The kernel of a grid, such as gemm/bf16 or decode/bf16/128, on operands of these sizes."""
    import torch
    import torch.nn.functional as F

    family, form, *rest = name.split("/")

    def operand(role: str, dtype: str, *shape: int) -> Any:
        number = 1
        for size in shape:
            number *= size
        return buffer(role, dtype, number, device)[:number].view(shape)

    if family == "gemm":
        m, n, k = sizes
        x, w = operand("a", "bf16", m, k), operand("b", form, n, k).t()
        if form == "fp8":
            one = torch.ones((), device=device)
            # Activations are quantized in front of each product.
            return lambda: torch._scaled_mm(
                x.to(w.dtype), w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
        out = torch.empty(m, n, device=device, dtype=x.dtype)
        return lambda: torch.mm(x, w, out=out)
    width = int(rest[0])
    if family == "prompt":
        rows, tokens = sizes
        q, k_, v = (operand(role, form, 1, rows, tokens, width) for role in "abc")
        return lambda: F.scaled_dot_product_attention(q, k_, v, is_causal=True)
    # Queries that share a key stand in one head: the kernel reads each key once.
    shared, rows, before = sizes
    q = operand("a", form, rows, 1, shared, width)
    k_, v = (operand(role, form, rows, 1, before, width) for role in "bc")
    return lambda: F.scaled_dot_product_attention(q, k_, v)


def repeated(
    call: Callable[[], object], times: int, device: str
) -> tuple[Callable[[], object], bool]:
    """``times`` calls as one, and whether as a graph, which a GPU replays without its host."""
    import torch

    def plain() -> None:
        for _ in range(times):
            call()

    if device != "cuda":
        return plain, False
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            plain()
    except RuntimeError:  # a kernel that cannot be recorded is launched by the host
        return plain, False
    return graph.replay, True


def kernel(
    name: str, sizes: Sequence[int], device: str, repeats: int, most_s: float
) -> dict[str, Any]:
    """Seconds of one kernel, up to ``repeats`` samples in about ``most_s``, after a warm-up.

    Answers ``refused`` where the device has no such kernel or no memory for it, and ``replayed``
    where no launch of the host is in the seconds.
    """
    import torch

    _, wait = torch_device(device)

    def timed(what: Callable[[], object]) -> float:
        wait()
        begin = time.perf_counter()
        what()
        wait()
        return time.perf_counter() - begin

    with torch.inference_mode():
        try:
            call = _call(name, sizes, device)
            timed(call)
            once = max(timed(call), 1e-7)
            times = max(1, min(1000, round(_BATCH_S / once)))
            batch, replayed = repeated(call, times, device)
            took = timed(batch)
            samples = [timed(batch) for _ in range(max(1, min(repeats, round(most_s / took))))]
        except RuntimeError as cause:  # out of memory is one, too
            return {"refused": str(cause).splitlines()[0]}
    return {"seconds": [sample / times for sample in samples], "replayed": replayed}
