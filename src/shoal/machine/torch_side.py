"""What the measuring child process does with torch. Only :mod:`shoal.machine.worker` calls it.

A sample is the time of a batch of calls, long enough that the two readings of the
clock around it do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_BATCH_S = 4e-3


def _per_call(call: Callable[[], object], repeats: int, wait: Callable[[], object]) -> list[float]:
    """Seconds of one call, ``repeats`` times; ``wait`` ends asynchronous work."""
    call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    once = max(time.perf_counter() - begin, 1e-7)
    batch = max(1, min(10_000, round(_BATCH_S / once)))
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        wait()
        samples.append((time.perf_counter() - begin) / batch)
    return samples


def _nothing() -> None:
    """What waits for a CPU, which is done when a call returns."""


def torch_device(name: str) -> tuple[Any, Callable[[], object]]:
    """A device, cpu or cuda, and what waits for its work."""
    import torch

    return torch.device(name), torch.cuda.synchronize if name == "cuda" else _nothing


def hello() -> dict[str, Any]:
    """Import torch and say what it is."""
    import torch

    return {"version": torch.__version__, "threads": torch.get_num_threads()}


def matmul(
    m: int, n: int, k: int, dtype: str, threads: int, repeats: int, device: str = "cpu"
) -> list[float]:
    """Seconds of one product [m, k] x [k, n]; the weight is transposed, as in a linear layer."""
    import torch

    torch.set_num_threads(threads)
    where, wait = torch_device(device)
    kind = getattr(torch, _DTYPES[dtype])
    a = torch.randn(m, k, device=where).to(kind)
    b = torch.randn(n, k, device=where).to(kind)
    out = torch.empty(m, n, device=where, dtype=kind)
    with torch.inference_mode():
        return _per_call(lambda: torch.mm(a, b.t(), out=out), repeats, wait)


def elementwise(bytes_: int, threads: int, repeats: int, device: str = "cpu") -> list[float]:
    """Seconds of ``c = a + b`` over three fp32 arrays of ``bytes_`` each."""
    import torch

    torch.set_num_threads(threads)
    where, wait = torch_device(device)
    a = torch.ones(bytes_ // 4, device=where)
    b = torch.ones_like(a)
    c = torch.empty_like(a)
    with torch.inference_mode():
        return _per_call(lambda: torch.add(a, b, out=c), repeats, wait)


def copy(bytes_: int, to_device: bool, repeats: int) -> list[float]:
    """Seconds of one copy between pinned host memory and the GPU."""
    import torch

    _, wait = torch_device("cuda")
    host = torch.empty(bytes_, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
    source, target = (host, there) if to_device else (there, host)
    return _per_call(lambda: target.copy_(source, non_blocking=True), repeats, wait)


def overhead(threads: int, repeats: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of one operator whose work is nothing, by operator.

    ``train`` is the time of one operator of a chain with its backward pass, counted
    per operator of the forward pass.
    """
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    where, wait = torch_device(device)
    x = torch.ones(8, 16, device=where)
    w = torch.ones(16, 16, device=where)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: torch.add(x, x),
        "mul": lambda: torch.mul(x, x),
        "mm": lambda: torch.mm(x, w),
        "softmax": lambda: torch.softmax(x, -1),
        "silu": lambda: F.silu(x),
        "reshape": lambda: x.view(4, 32),
    }
    with torch.no_grad():
        result = {name: _per_call(call, repeats, wait) for name, call in calls.items()}
    weight = torch.ones(16, 16, device=where, requires_grad=True)
    depth = 8

    def train() -> None:
        h = x
        for _ in range(depth):
            h = F.silu(F.linear(h, weight)) + x
        h.sum().backward()  # type: ignore[no-untyped-call]
        weight.grad = None

    operators = 3 * depth + 1
    result["train"] = [seconds / operators for seconds in _per_call(train, repeats, wait)]
    return result


def gpu_facts() -> dict[str, Any] | None:
    """What the driver says about the first GPU, or None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": facts.total_memory,
        "l2_bytes": getattr(facts, "L2_cache_size", 0),
        "num_multiprocessors": facts.multi_processor_count,
        "capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
    }
