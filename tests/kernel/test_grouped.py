"""Each expert's matrix with its own rows: kernels and gradients equal the reference; the rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, close, made, ways
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.core.errors import KernelError
from shoal.ir import Device, Machine, MemoryTier
from shoal.kernel.dispatch import candidates, kernels_of
from shoal.kernel.grouped import choice
from shoal.kernel.grouped.call import GroupedLinear
from shoal.kernel.grouped.choice import chosen_kernel
from shoal.kernel.grouped.padded import PaddedGroupedLinear
from shoal.kernel.grouped.product import multiply, weight_gradient

BACKENDS = ("loop", "torch", "padded", "triton")
UNEVEN = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=5)
COUNTS = st.one_of(UNEVEN, st.sampled_from([[0, 0, 0], [0, 70, 0, 0], [4, 4, 4], [17], [33, 1, 0]]))
SIZES = st.one_of(st.sampled_from([1, 8, 16, 65, 80]), st.integers(1, 30))


def call_of(counts, n, k, dtype, device="cpu"):
    busy, most = len(counts) - counts.count(0), max(counts)
    return GroupedLinear(sum(counts), len(counts), n, k, busy, most, dtype=dtype, device=device)


def passed(run, inputs, grad):
    """Result, and gradients of rows and matrices."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = run(*leaves)
    return result, *torch.autograd.grad(result, leaves, grad)


def compare(backend, counts, n, k, dtype, way, device="cpu"):
    call = call_of(counts, n, k, dtype, device)
    kernels = kernels_of("grouped_linear")
    reason = kernels[backend].refuses(call)
    if reason is not None:
        assert backend in ("torch", "triton"), reason
        return
    rows, grad = (
        made((sum(counts), width), DTYPES[dtype], way, seed).to(device)
        for width, seed in ((k, 1), (n, 2))
    )
    weight = made((len(counts), n, k), DTYPES[dtype], way, 3).to(device)
    ready = kernels[backend].prepare(call)
    result = passed(lambda x, w: ready(x, w, counts), (rows, weight), grad)
    wide = [x.double() for x in (rows, weight)]
    exact = kernels["reference"].prepare(call_of(counts, n, k, "fp64"))
    wanted = passed(lambda x, w: exact(x, w, counts), wide, grad.double())
    for mine, right in zip(result, wanted, strict=True):
        # A sum of a gradient has as many terms as the expert rows.
        if mine.numel():
            close(mine, right.to(mine.dtype), 2 * TOLERANCE[dtype])
        assert mine.shape == right.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_the_reference(backend, dtype):
    if backend == "triton":
        pytest.importorskip("triton")

    @settings(max_examples=8 if backend == "triton" else 25, deadline=None)
    @given(counts=COUNTS, n=SIZES, k=SIZES, way=ways)
    def check(counts, n, k, way):
        compare(backend, counts, n, k, dtype, way)

    check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [[3, 0, 70, 1], [0, 0, 0, 0], [0, 200, 0, 0], [64] * 8])
def test_equal_the_reference_on_a_gpu(backend, dtype, counts):
    compare(backend, counts, 80, 72, dtype, "plain", "cuda")


@pytest.mark.parametrize("backend", ["loop", "padded", None])
@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 5, 0], [2, 2, 2], [0, 0, 0]])
def test_gradients_are_those_of_differences(backend, counts):
    rows = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)

    def run(x, w):
        return multiply(x, w, counts, backend=backend)

    assert torch.autograd.gradcheck(run, (rows, weight))


@pytest.mark.parametrize("backend", [None, *BACKENDS[:3]])
def test_equal_one_layer_after_another(backend):
    counts = [5, 0, 3, 8]
    rows, weight, grad = torch.randn(16, 32), torch.randn(4, 24, 32), torch.randn(16, 24)

    def one_by_one(x, w):
        parts = zip(torch.split(x, counts), w.unbind(0), strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in parts])

    wanted = passed(one_by_one, (rows, weight), grad)
    if backend == "torch" and not hasattr(F, "grouped_mm"):
        with pytest.raises(KernelError, match="grouped_mm"):
            multiply(rows, weight, counts, backend=backend)
        return
    result = passed(lambda x, w: multiply(x, w, counts, backend=backend), (rows, weight), grad)
    for mine, right in zip(result, wanted, strict=True):
        close(mine, right, 1e-5)
    assert not result[2][1].any()


def test_computes_in_the_type_of_autocast():
    rows = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(2, 4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = multiply(rows, weight, [4, 2])
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert rows.grad.dtype == weight.grad.dtype == torch.float32
    exact = multiply(rows.double(), weight.double(), [4, 2])
    close(out.double(), exact, 2e-2)


@pytest.mark.slow  # the compiler is imported
def test_a_compiler_can_look_into_it():
    counts = [2, 0, 3]
    rows, weight, grad = torch.randn(5, 8), torch.randn(3, 4, 8), torch.randn(5, 4)
    compiled = torch.compile(multiply, backend="eager", fullgraph=True)
    result, wanted = (
        passed(lambda x, w, run=run: run(x, w, counts), (rows, weight), grad)
        for run in (compiled, multiply)
    )
    for mine, right in zip(result, wanted, strict=True):
        close(mine, right, 1e-5)
    assert not len(compiled(rows[:0], weight, [0, 0, 0]))


def test_a_gradient_may_wait():
    waiting = []

    def later(weight, gradient):
        waiting.append((weight, gradient))
        return True

    counts = [2, 0, 3]
    rows, weight = torch.randn(5, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    out = multiply(rows, weight, counts, later=later)
    out.sum().backward()
    ((parameter, gradient),) = waiting
    assert weight.grad is None and parameter is weight
    wanted = weight_gradient(torch.ones_like(out), rows, counts)
    assert torch.equal(gradient(), wanted) and not wanted.requires_grad


class Names(TorchDispatchMode):
    """Which operators there are."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["reference", "loop", "torch", "padded", "padded above 2"])
def test_a_second_time_is_as_the_first(backend):
    """What is recomputed does what its forward pass did: nothing has stayed from it."""
    kernel = kernels_of("grouped_linear").get(backend) or PaddedGroupedLinear(level=2)
    reason = kernel.refuses(call_of([5, 1, 6], 4, 8, "fp32"))
    if reason is not None:
        assert backend == "torch", "all others run with any version of PyTorch"
        pytest.skip(reason)
    rows, weight, counts = torch.ones(12, 8), torch.ones(3, 4, 8), [5, 1, 6]
    ran = []
    for _ in range(2):
        with Names() as names:
            out = kernel.product(rows, weight, counts)
            kernel.gradient(out, rows, counts)
        ran.append(names.found)
    assert ran[0] == ran[1]


def test_what_needs_no_gradient_has_none():
    rows, weight = torch.randn(5, 8, requires_grad=True), torch.randn(2, 4, 8)
    multiply(rows, weight, [2, 3]).sum().backward()
    assert rows.grad is not None and weight.grad is None
    with torch.no_grad():
        assert multiply(rows, weight, [2, 3]).grad_fn is None


@pytest.mark.parametrize(
    ("rows", "weight", "counts", "told"),
    [
        ((5, 8), (2, 4, 8), [2, 2], r"their sum is 4, but there are 5 rows"),
        ((5, 8), (2, 4, 8), [7, -2], r"at least 0"),
        ((5, 8), (2, 4, 8), [5], r"1 counts for 2 experts; give one per expert"),
        ((5, 7), (2, 4, 8), [2, 3], r"rows \[5, 7\] and matrices \[2, 4, 8\]"),
        ((5, 8), (4, 8), [2, 3], r"expected \[M, K\] and \[E, N, K\]"),
        ((5, 1, 8), (2, 4, 8), [2, 3], r"expected \[M, K\] and \[E, N, K\]"),
    ],
)
def test_what_does_not_fit_is_refused(rows, weight, counts, told):
    with pytest.raises(KernelError, match=told):
        multiply(torch.randn(rows), torch.randn(weight), counts)


def test_a_kernel_that_does_not_exist_is_refused():
    with pytest.raises(KernelError, match=r"grouped_linear = 'lop': expected one of .*loop"):
        multiply(torch.randn(2, 8), torch.randn(1, 4, 8), [2], backend="lop")


def of(counts, dtype, n=256, k=128):
    return chosen_kernel(counts, n, k, dtype, "cpu").backend


def test_the_rule_pads_small_even_experts_and_no_others():
    many = "torch" if hasattr(F, "grouped_mm") else "loop"
    assert of([8] * 64, "bf16") == of([4, 9] * 32, "bf16") == "padded"
    # Few and large experts take their time anyway.
    assert of([300, 2] * 4, "bf16", n=1024, k=512) == many
    # A product begins at once in fp32, so rows that are added are never worth it.
    assert of([4, 9] * 32, "fp32") == many
    assert of([4, 9] * 32, "fp64") == "loop"
    assert of([500] + [1] * 63, "fp32", n=7) == "loop"  # rows that the library cannot take
    assert of([0] * 64, "bf16") == "loop"


def test_what_is_above_the_level_is_multiplied_by_itself():
    zipf = [103 // (rank + 1) for rank in range(64)]
    result = chosen_kernel(zipf, 256, 128, "bf16", "cpu")
    assert result.backend == "padded" and 0 < result.level < 103 // 2
    # A matrix of its own that takes long to multiply hides how long that takes to begin.
    assert chosen_kernel(zipf, 4096, 4096, "bf16", "cpu").backend in ("torch", "loop")
    with pytest.raises(KernelError, match=r"padded.level = -1: expected rows, or 0"):
        PaddedGroupedLinear(level=-1)


@pytest.mark.parametrize("level", [1, 3, 7, 50])
@pytest.mark.parametrize("counts", [[9, 0, 3, 1], [0, 12, 0], [4, 4], [0, 0]])
def test_any_level_equals_one_after_another(level, counts):
    rows, grad = torch.randn(sum(counts), 5).double(), torch.randn(sum(counts), 6).double()
    weight = torch.randn(len(counts), 6, 5).double()
    result, wanted = (
        passed(lambda x, w, k=kernel: multiply(x, w, counts, kernel=k), (rows, weight), grad)
        for kernel in (PaddedGroupedLinear(level=level), kernels_of("grouped_linear")["loop"])
    )
    for mine, right in zip(result, wanted, strict=True):
        assert torch.allclose(mine, right, rtol=1e-12, atol=1e-12)


def test_the_rule_does_without_a_grouped_product(monkeypatch):
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    choice._able.cache_clear()
    try:
        assert of([300, 2] * 4, "bf16", n=1024, k=512) == "loop"
        assert of([2, 30] * 32, "fp32") == "loop"
    finally:
        choice._able.cache_clear()


def test_estimates_know_what_padding_and_beginning_cost():
    memory = (MemoryTier(name="dram", capacity_bytes=2**33, read_bandwidth=2e10),)
    device = Device(name="cpu", kind="cpu", num_cores=2, peak_flops={"bf16": 4e11}, memory=memory)
    machine = Machine(name="test", device=device)
    kernels = kernels_of("grouped_linear")

    def seconds(backend, counts):
        return kernels[backend].estimate(call_of(counts, 256, 128, "bf16"), machine).step_s.value

    even, uneven = [32] * 64, [2048 - 63] + [1] * 63
    assert seconds("padded", even) < seconds("loop", even)
    assert seconds("loop", uneven) < seconds("padded", uneven)
    assert seconds("loop", [2048] + [0] * 63) < seconds("loop", even)
    result = dict(candidates(call_of(even, 256, 128, "bf16"), machine))
    assert {"loop", "padded", "reference"} <= set(result) and "triton" not in result
