"""The sweep of serving's kernels: really measured on the CPU, at sizes of a second."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.core.errors import ConfigError, MachineError
from shoal.machine.probes.kernel_sweep import (
    KernelPoint,
    coarse_to_fine,
    device_facts,
    measured_kernels,
)
from shoal.machine.probes.kernel_torch import kernel, kernel_bytes
from shoal.machine.protocols import ProbeContext

AXES = {"gemm/bf16": [[1, 2, 4], [16, 32]], "decode/bf16/64": [[*range(1, 18)]]}


def test_every_place_comes_once_the_coarse_ones_of_all_grids_first() -> None:
    points = list(coarse_to_fine(AXES))
    assert len({point[:2] for point in points}) == len(points) == 3 * 2 + 17
    names = [point.name for point in points]
    # Ends of all grids come before what lies between in any of them.
    assert [p.sizes for p in points[:4]] == [(1, 16), (1, 32), (4, 16), (4, 32)]
    assert [p.sizes for p in points[4:7]] == [(1,), (9,), (17,)]
    assert names[7] == "decode/bf16/64" and points[7].sizes == (5,)


@pytest.mark.parametrize(
    ("name", "sizes", "queries", "keys"),
    [
        ("gemm/bf16", (64, 128, 96), None, None),
        ("gemm/fp8", (16, 32, 32), None, None),
        ("prompt/bf16/64", (2, 128), (1, 2, 128, 64), (1, 2, 128, 64)),
        ("decode/bf16/64", (4, 8, 256), (8, 1, 4, 64), (8, 1, 256, 64)),
    ],
)
def test_kernels_run_at_the_sizes_that_are_asked(
    name: str,
    sizes: tuple[int, ...],
    queries: tuple[int, ...] | None,
    keys: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    attend, multiply = torch.nn.functional.scaled_dot_product_attention, torch.mm
    seen: list[tuple[tuple[int, ...], ...]] = []

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        assert options.get("is_causal", False) == name.startswith("prompt")
        return attend(q, k, v, **options)

    def product(x: Any, w: Any, **options: Any) -> Any:
        seen.append((tuple(x.shape), tuple(w.shape)))
        return multiply(x, w, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch, "mm", product)
    answer = kernel(name, sizes, "cpu", repeats=3, most_s=0.05)
    assert 1 <= len(answer["seconds"]) <= 3
    assert all(seconds > 0 for seconds in answer["seconds"]) and not answer["replayed"]
    # A warm-up, a look at how long one takes, and at least two batches.
    wanted = (queries, keys, keys) if keys else ((sizes[0], sizes[2]), (sizes[2], sizes[1]))
    assert set(seen) == {wanted} if name != "gemm/fp8" else not seen
    assert len(seen) >= 4 or name == "gemm/fp8"


def test_bytes_of_operands_and_results() -> None:
    assert kernel_bytes("gemm/bf16", (64, 128, 96)) == 2 * (64 * 96 + 96 * 128 + 64 * 128)
    # Queries, keys, values and what comes out.
    assert kernel_bytes("prompt/bf16/64", (2, 128)) == 2 * 4 * 2 * 128 * 64
    assert kernel_bytes("decode/bf16/64", (4, 8, 256)) == 2 * 8 * 64 * 2 * (256 + 4)


def test_what_a_device_cannot_is_refused_with_its_reason() -> None:
    pytest.importorskip("torch")
    answer = kernel("gemm/fp8", (16, 33, 33), "cpu", repeats=1, most_s=0.01)
    assert answer.get("refused") or answer["seconds"]
    answer = kernel("decode/bf16/64", (1, 4, 1 << 50), "cpu", repeats=1, most_s=0.01)
    assert answer["refused"]


class Worker:
    """Answers as the measuring process: a grid that the device does not have, others at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def call(self, call: str, **given: object) -> object:
        if call == "gpu_facts":
            return None
        if call == "hello":
            return {"version": "2"}
        self.asked.append(str(given["name"]))
        return {"refused": "no units"} if "fp8" in str(given["name"]) else {"seconds": [3.0, 1.0]}


def test_a_grid_that_is_refused_at_first_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    monkeypatch.setattr(ProbeContext, "worker", lambda self: worker)
    wanted = list(coarse_to_fine({"gemm/fp8": [[1, 2]] * 3, "gemm/bf16": [[1, 2], [2], [2**20]]}))
    context = ProbeContext()
    found = [
        point
        for batch in measured_kernels(
            context, wanted, device="cpu", memory_bytes=2e7, budget_s=60.0
        )
        for point in batch
    ]
    assert worker.asked == ["gemm/fp8", "gemm/bf16"]  # the larger bf16 has no room
    assert [p.seconds for p in found if p.name == "gemm/bf16"] == [2.0, None]
    assert context.skipped == {"gpu.gemm/fp8": "no units"}
    assert len(found) == len(wanted)


def test_the_budget_ends_it_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbeContext, "worker", lambda self: Worker())
    wanted = [KernelPoint("gemm/bf16", (1, 1, size), None) for size in range(1, 50)]
    batches = list(
        measured_kernels(ProbeContext(), wanted, device="cpu", memory_bytes=math.inf, budget_s=1e-9)
    )
    assert [len(batch) for batch in batches] == [1]
    for budget in (0.0, -1.0, 1e9):
        with pytest.raises(ConfigError, match="--budget"):
            list(
                measured_kernels(
                    ProbeContext(), wanted, device="cpu", memory_bytes=1.0, budget_s=budget
                )
            )


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbeContext, "worker", lambda self: Worker())
    with pytest.raises(MachineError, match=r"sees no CUDA device.*-m H100"):
        device_facts(ProbeContext())
