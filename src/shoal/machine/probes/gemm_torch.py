"""Products of torch, timed in the measuring child process.

Operands are windows of buffers that are filled once, so making them costs nothing; what
is small stays in a cache from call to call, as the activations of a model do.
"""

from __future__ import annotations

import time
from typing import Any

_BATCH_S = 1.5e-3
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
_BUFFERS: dict[tuple[str, str, str], Any] = {}


def buffer(role: str, dtype: str, number: int, device: str = "cpu") -> Any:
    """A flat buffer of at least ``number`` random elements, kept from call to call."""
    import torch

    value = _BUFFERS.get((role, dtype, device))
    if value is None or value.numel() < number:
        # The old one goes before the new one comes: they may not fit together.
        _BUFFERS.pop((role, dtype, device), None)
        value = None
        kind = getattr(torch, _DTYPES[dtype])
        if dtype == "int8":
            value = torch.randint(-127, 128, (number,), dtype=torch.int32, device=device).to(kind)
        elif dtype == "fp8":
            value = torch.rand(number, dtype=torch.bfloat16, device=device).sub_(0.5).to(kind)
        else:
            value = torch.rand(number, dtype=kind, device=device).sub_(0.5)
        _BUFFERS[role, dtype, device] = value
    return value


def gemm(
    m: int,
    n: int,
    k: int,
    dtype: str,
    layout: str,
    threads: int,
    repeats: int,
    most_s: float,
) -> dict[str, Any]:
    """Seconds of one product, ``repeats`` times, after two calls that are not counted.

    Answers ``slow`` with the seconds of one call when all of it would take more than
    ``most_s``, and ``refused`` where torch has no such product.
    """
    import torch

    from shoal.machine.probes.gemm_power import Sensor

    torch.set_num_threads(threads)
    a = buffer("a", dtype, m * k)[: m * k]
    b = buffer("b", dtype, k * n)[: k * n]
    a = a.view(m, k) if layout[0] == "n" else a.view(k, m).t()
    b = b.view(k, n) if layout[1] == "n" else b.view(n, k).t()
    if dtype == "int8":
        out = torch.empty(m, n, dtype=torch.int32)

        def call() -> None:
            torch._int_mm(a, b, out=out)
    else:
        out = torch.empty(m, n, dtype=a.dtype)

        def call() -> None:
            torch.mm(a, b, out=out)

    with torch.inference_mode():
        try:
            call()
        except RuntimeError as cause:
            return {"refused": str(cause).splitlines()[0]}
        begin = time.perf_counter()
        call()
        once = max(time.perf_counter() - begin, 1e-7)
        batch = max(1, min(10_000, round(_BATCH_S / once)))
        if once * batch * repeats > most_s:
            return {"slow": once}
        samples = []
        sensor = Sensor()
        sensor.start()
        for _ in range(repeats):
            begin = time.perf_counter()
            for _ in range(batch):
                call()
            samples.append((time.perf_counter() - begin) / batch)
        return {"seconds": samples, "watts": sensor.stop(), "power": sensor.source}
