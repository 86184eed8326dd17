"""Kernels against the bandwidth and against PyTorch; what the exact mode costs; what a build costs.

Usage: python benchmarks/kernels.py
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from common import Row, record, require_quiet

from shoal.core.measure import bootstrap, interleave
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.kernel.calls import LinearCall, PagedAttentionCall
from shoal.kernel.dispatch import dispatch, kernels_of
from shoal.machine.host import cpus
from shoal.machine.probes.memory_bandwidth import bandwidth_samples
from shoal.serve.engine.build import engine_of, prepare
from shoal.train import zoo
from shoal.train.quantize import quantize_directory

PAIRS = 21
N = K = 4096
# Sequences, tokens and heads of the attention that the threshold names.
BATCH, CONTEXT, HEADS, KV_HEADS, DIM, BLOCK = 64, 1024, 16, 4, 64, 16


def products() -> list[Row]:
    """Matrix-vector products beside reading the same bytes, turn by turn."""
    rows = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        weights = [torch.randn(N, K).to(dtype) for _ in range(20)]
        call = LinearCall(1, N, K, name)  # type: ignore[arg-type]
        kernel = dispatch(call)
        ours = [kernel.prepare(call, weight) for weight in weights]
        peer = [kernels_of("linear")["torch"].prepare(call, weight) for weight in weights]
        size = sum(weight.numel() * weight.element_size() for weight in weights)

        def all_of(ready: list, x: torch.Tensor) -> Callable[[], None]:  # type: ignore[type-arg]
            def run() -> None:
                for one in ready:
                    one(x)

            return run

        x = torch.randn(1, K).to(dtype)
        # The bound is the fastest of several ways to read, before the products and after them.
        bound = _read_rate(size)
        paired = interleave({"ours": all_of(ours, x), "torch": all_of(peer, x)}, PAIRS)
        bound = max(bound, _read_rate(size))
        share = bootstrap([size / s / bound for s in paired.seconds["ours"]])
        gain = paired.ratio("torch", "ours")
        rows.append(
            Row(
                f"{name} matrix-vector product against reading its bytes",
                share.value,
                "x",
                ">=",
                0.8,
                f"{kernel.backend}, {N}x{K}, 20 matrices in turn, {torch.get_num_threads()} "
                f"threads, {share.value * bound / 1e9:.1f} of {bound / 1e9:.1f} GB/s",
                share.low,
                share.high,
                {key: list(value) for key, value in paired.seconds.items()},
            )
        )
        rows.append(
            Row(
                f"{name} matrix-vector product against PyTorch",
                gain.value,
                "x",
                ">=",
                1.0,
                "F.linear, the same matrices, turn by turn",
                gain.low,
                gain.high,
            )
        )
    return rows


def _read_rate(size: int) -> float:
    """B/s at which the threads of a product read so many bytes, as the probe measures it."""
    cores = cpus()[: torch.get_num_threads()]
    each = size // len(cores)
    return median(
        bandwidth_samples("read", each, tuple(cores), repeats=9, sample_bytes=float(each))
    )


def attention() -> list[Row]:
    """Paged attention beside PyTorch's on pages that are copied side by side."""
    rows = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        call = PagedAttentionCall(
            BATCH,
            CONTEXT,
            HEADS,
            KV_HEADS,
            DIM,
            BLOCK,
            name,  # type: ignore[arg-type]
        )
        slots = 2 * BATCH * CONTEXT
        keys, values = (torch.randn(slots, KV_HEADS, DIM).to(dtype) for _ in range(2))
        blocks = torch.randperm(slots // BLOCK)[: BATCH * CONTEXT // BLOCK].view(BATCH, -1)
        lengths = torch.full((BATCH,), CONTEXT)
        q = torch.randn(BATCH, HEADS, DIM).to(dtype)
        ready = {
            backend: kernels_of("paged_attention")[backend].prepare(call)
            for backend in ("cpp", "torch")
        }
        paired = interleave(
            {
                backend: functools.partial(run, q, keys, values, blocks, lengths)
                for backend, run in ready.items()
            },
            PAIRS,
        )
        gain = paired.ratio("torch", "cpp")
        rate = call.moved_bytes / paired.median("cpp").value / 1e9
        rows.append(
            Row(
                f"paged attention, {name}, against PyTorch on copied pages",
                gain.value,
                "x",
                ">=",
                1.5,
                f"{BATCH} sequences x {CONTEXT} tokens, {HEADS} heads over {KV_HEADS} of {DIM}; "
                f"{rate:.1f} GB/s of the cache",
                gain.low,
                gain.high,
                {key: list(value) for key, value in paired.seconds.items()},
            )
        )
    return rows


def served(options: dict[str, object]) -> Callable[[], None]:
    """A run of 16 requests through the engine."""
    job = ServeJob(model="shoal-16m", kv_tokens=16384, precision="bf16", **options)  # type: ignore[arg-type]
    engine, _, _ = engine_of(job, prepare(job, zoo.random("shoal-16m")))
    number = 0

    def run() -> None:
        nonlocal number
        for _ in range(16):
            number += 1
            engine.add(
                Request(
                    id=str(number),
                    tokens=[(7 * number + at) % 4096 for at in range(64)],
                    n_prompt=64,
                    params=SamplingParams(max_tokens=32, temperature=0.0),
                )
            )
        while engine.busy:
            engine.step()

    return run


def serving() -> list[Row]:
    """The engine with its kernels, without them, and exact."""
    plain = {"linear": "torch", "rms_norm": "reference", "rope": "reference", "swiglu": "reference"}
    paired = interleave(
        {
            "kernels": served({}),
            "torch": served({"kernel": {**plain, "paged_attention": "torch"}}),
            "exact": served({"exact": True}),
        },
        PAIRS,
    )
    gain, price = paired.ratio("torch", "kernels"), paired.ratio("exact", "kernels")
    return [
        Row(
            "serving with kernels against serving with PyTorch's",
            gain.value,
            "x",
            ">=",
            1.0,
            "shoal-16m in bf16, 16 requests of 64 + 32 tokens at once",
            gain.low,
            gain.high,
            {key: list(value) for key, value in paired.seconds.items()},
        ),
        Row(
            "time of the exact mode against serving with kernels",
            price.value,
            "x",
            "<=",
            3.0,
            "the same requests; every sum in one order, prompts by the paged kernel too",
            price.low,
            price.high,
        ),
    ]


# Every native source of the room, as its kernels ask for them.
BUILD = """
import json, time
from concurrent.futures import ThreadPoolExecutor
import torch
from shoal.core.measure import num_cores
from shoal.kernel.native import libraries, library
begin = time.perf_counter()
names = libraries()
with ThreadPoolExecutor(num_cores()) as pool:
    list(pool.map(library, names))
print(json.dumps({"seconds": time.perf_counter() - begin, "names": names}))
"""


def builds() -> list[Row]:
    """First use of all kernels on a new machine, and every start after it."""
    with tempfile.TemporaryDirectory(prefix="shoal-kernels-") as home:
        environment = {**os.environ, "SHOAL_HOME": home}
        results = []
        for _ in range(4):
            done = subprocess.run(
                [sys.executable, "-c", BUILD], env=environment, capture_output=True, check=True
            )
            results.append(json.loads(done.stdout))
    first, later = results[0], sorted(one["seconds"] for one in results[1:])[1]
    return [
        Row(
            "building all kernels at first use",
            first["seconds"],
            "s",
            "<=",
            15.0,
            f"{len(first['names'])} files, a compiler a core",
        ),
        Row("loading all kernels that are built", later, "s", "<=", 0.1, "median of 3 processes"),
    ]


def quality() -> list[Row]:
    """What few bits cost the mini-model in perplexity on held-out text, in percent."""
    rows = []
    model = zoo.trained("shoal-4m-h128")
    for form, method, most in (("int4-g128", "gptq", 2.0), ("int8-channel", "rtn", 0.2)):
        with tempfile.TemporaryDirectory() as place:
            result = quantize_directory(
                model, Path(place) / "small", form, method=method, time_it=False
            ).quality
        assert result is not None
        note = (
            f"{method}, perplexity {result.reference:.3f} -> {result.perplexity:.3f} on "
            f"{result.tokens} tokens, same top token {result.agreement:.1%}"
        )
        rows.append(Row(f"{form} perplexity rise", 100 * result.rise, "%", "<=", most, note))
    return rows


def main() -> None:
    """Measure and record."""
    require_quiet()
    with torch.inference_mode():
        rows = [*builds(), *products(), *attention(), *serving()]
    rows += quality()
    record(rows)


if __name__ == "__main__":
    main()
