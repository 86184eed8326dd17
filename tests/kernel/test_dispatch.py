"""The kernel that is taken is the one with the lowest estimate, or the one that is wanted."""

from __future__ import annotations

import pytest

from shoal.core.errors import KernelError
from shoal.ir import Device, Machine, MemoryTier
from shoal.ir.machine import Measurement
from shoal.kernel.base import roof_s
from shoal.kernel.calls import LinearCall, PointwiseCall
from shoal.kernel.dispatch import candidates, dispatch, kernels_of, operators


def machine(*rates: tuple[str, float, float]) -> Machine:
    return Machine(
        name="test",
        device=Device(
            name="cpu",
            kind="cpu",
            num_cores=2,
            peak_flops={"fp32": 1e11, "bf16": 4e11},
            memory=(MemoryTier(name="dram", capacity_bytes=2**33, read_bandwidth=2e10),),
        ),
        measurements=tuple(
            Measurement(
                probe="kernels", quantity=name, unit="B/s", median=rate, low=rate, high=rate,
                repeats=3, at=rows, note="bf16",
            )
            for name, rows, rate in rates
        ),
    )  # fmt: skip


def test_every_operator_has_a_reference_that_refuses_nothing_here():
    assert {"linear", "rms_norm", "rope", "swiglu", "sample"} <= set(operators())
    for op in operators():
        assert "reference" in kernels_of(op), op
        assert len(kernels_of(op)) > 1, op


def test_what_was_measured_decides():
    call = LinearCall(1, 4096, 4096, "bf16")
    slow = ("linear.amx", 1, 1e8), ("linear.packed", 1, 1e8)
    slow_cpp = machine(*slow, ("linear.cpp", 1, 1e9), ("linear.torch", 1, 9e9))
    fast_cpp = machine(*slow, ("linear.cpp", 1, 9e9), ("linear.torch", 1, 1e9))
    assert dispatch(call, machine=slow_cpp).backend == "torch"
    if kernels_of("linear")["cpp"].refuses(call) is None:
        assert dispatch(call, machine=fast_cpp).backend == "cpp"
    ((backend, seconds), *_) = candidates(call, slow_cpp)
    assert backend == "torch"
    assert seconds == pytest.approx(call.moved_bytes / 9e9, rel=0.01)


def test_rates_are_interpolated_between_rows():
    torch_kernel = kernels_of("linear")["torch"]
    known = machine(("linear.torch", 1, 1e10), ("linear.torch", 16, 1e9))

    def seconds(m: int, n: int = 4096, k: int = 4096) -> float:
        call = LinearCall(m, n, k, "bf16")
        return torch_kernel.estimate(call, known).step_s.value - torch_kernel.call_s

    rates = [LinearCall(m, 4096, 4096, "bf16").moved_bytes / seconds(m) for m in (1, 4, 16)]
    assert rates == pytest.approx([1e10, 10**9.5, 1e9])
    # Beyond the last point the operations a second stay the same; so they do with other weights.
    assert seconds(64) == pytest.approx(4 * seconds(16))
    assert seconds(2048, 1024, 256) == pytest.approx(seconds(2048) / 64)


def test_no_estimate_is_below_the_roofline_without_measurements():
    plain = machine()
    for call in (LinearCall(1, 512, 512, "bf16"), PointwiseCall("swiglu", 4, 64, 32, "bf16")):
        for kernel in kernels_of(call.op).values():
            assert kernel.estimate(call, plain).step_s.value >= roof_s(call, plain)


def test_exact_takes_only_what_does_not_depend_on_company():
    call = LinearCall(512, 4096, 4096, "fp32")
    assert dispatch(call, machine=machine(), exact=True).invariant
    with pytest.raises(KernelError, match=r"torch.*the call requires exact"):
        dispatch(call, wanted="torch", exact=True)


def test_what_is_wanted_must_exist_and_be_able():
    call = LinearCall(1, 8, 8, "bf16")
    assert dispatch(call, wanted="reference").backend == "reference"
    with pytest.raises(KernelError, match=r"expected one of .*did you mean 'torch'"):
        dispatch(call, wanted="troch")
    with pytest.raises(KernelError, match=r"cpp.*takes fp32, bf16; these can: .*torch"):
        dispatch(LinearCall(1, 8, 8, "fp64"), wanted="cpp")
    with pytest.raises(KernelError, match="no such operator; there are linear"):
        kernels_of("lienar")


def test_calls_on_a_gpu_are_priced_on_it(monkeypatch):
    import torch

    from shoal.kernel import dispatch as module
    from shoal.kernel.calls import LinearCall, PagedAttentionCall

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    module.here.cache_clear()
    module._remembered.cache_clear()
    try:
        assert module.here("cuda").name == "H200"
        assert module.here("cpu").device.kind == "cpu"
        assert module.dispatch(LinearCall(1, 8192, 2048, "bf16", "cuda")).backend == "torch"
        if "triton" in dict(module.candidates(LinearCall(1, 64, 64, "bf16", "cuda"))):
            for batch in (1, 256):  # what reads pages where they lie can be recorded
                call = PagedAttentionCall(batch, 288, 32, 8, 64, device="cuda")
                assert module.dispatch(call).backend == "triton"
            prompt = PagedAttentionCall(1, 2048, 32, 8, 64, device="cuda", queries=2048)
            assert module.dispatch(prompt).backend == "torch"
    finally:
        module.here.cache_clear()
        module._remembered.cache_clear()
