"""Kernels in Triton against their references: interpreted where there is no GPU.

The programs of ``recurrence`` and ``pack`` have files of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, close, made

from shoal.core.errors import KernelError
from shoal.ir import Device, Machine, MemoryTier
from shoal.kernel.calls import (
    LinearCall,
    LowbitLinearCall,
    MatmulPlanesCall,
    PagedAttentionCall,
    PointwiseCall,
)
from shoal.kernel.dispatch import candidates, dispatch, kernels_of
from shoal.kernel.formats import weight_format
from shoal.kernel.grouped.call import GroupedLinear
from shoal.kernel.kv import kv_format
from shoal.kernel.planes.layout import pack
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.strided.calls import Pack
from shoal.kernel.strided.canonical import canonical
from shoal.kernel.strided.datatype import named

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE: Any = "cuda" if GPU else "cpu"
dtypes = st.sampled_from(["fp32", "bf16"])
ways = st.sampled_from(["plain", "strided", "misaligned"])
seeds = st.integers(0, 99)


def twins(op: str, call: Any, *constants: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The reference and its twin, prepared."""
    kernels = kernels_of(op)
    assert kernels["triton"].refuses(call) is None
    return tuple(kernels[name].prepare(call, *constants) for name in ("reference", "triton"))


def placed(*tensors: Any) -> list[Any]:
    """On the GPU, if there is one, with the strides that they have."""
    return [one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in tensors]


def check_rms_norm(dtype: str, m: int, n: int, way: str, adds: bool) -> None:
    weight, delta = placed(made((n,), DTYPES[dtype], seed=1), made((m, n), DTYPES[dtype], way, 3))
    outs = []
    for run in twins("rms_norm", PointwiseCall("rms_norm", m, n, n, dtype, DEVICE), weight, 1e-5):
        (x,) = placed(made((m, n), DTYPES[dtype], way, 2))
        outs.append((run(x, delta if adds else None), x))
    # The interpreter cuts what does not fit into bf16 off, of the sum and of the result, each time
    # up to 2**-7; a GPU rounds to nearest.
    cut = adds and dtype == "bf16" and not GPU
    close(outs[1][0], outs[0][0], 2 * 2**-7 if cut else TOLERANCE[dtype])
    close(outs[1][1], outs[0][1], 0.0 if GPU or dtype == "fp32" else 2**-7)


def check_swiglu(dtype: str, m: int, f: int, way: str) -> None:
    (x,) = placed(4 * made((m, 2 * f), DTYPES[dtype], way))
    wanted, result = (
        run(x) for run in twins("swiglu", PointwiseCall("swiglu", m, 2 * f, f, dtype, DEVICE))
    )
    close(result, wanted, TOLERANCE[dtype])


def check_rope(dtype: str, m: int, heads: int, kv_heads: int, half: int, normed: bool) -> None:
    every = (heads + 2 * kv_heads) * 2 * half
    call = PointwiseCall("rope", m, every, every, dtype, DEVICE)
    angle = torch.rand(50, half, generator=torch.Generator().manual_seed(m)) * 6
    norms = [made((2 * half,), DTYPES[dtype], seed=seed) if normed else None for seed in (1, 2)]
    constants = (*placed(angle.cos(), angle.sin(), *norms), heads, kv_heads, 1e-5)
    outs = []
    for run in twins("rope", call, *constants):
        x, position = placed(made((m, every), DTYPES[dtype]), torch.arange(7, 7 + m))
        outs.append(run(x, position))
    for wanted, result in zip(*outs, strict=True):
        close(result, wanted, TOLERANCE[dtype])


def check_sample(v: int, seed: int, hot: float, top_k: int) -> None:
    call = PointwiseCall("sample", 3, v, 1, "fp32", DEVICE)
    source = torch.Generator().manual_seed(seed)
    given_ = placed(
        3 * made((3, v), torch.float32, seed=seed),
        torch.full((3,), hot, dtype=torch.float64),
        torch.full((3,), top_k),
        torch.ones(3, dtype=torch.float64),
        torch.rand(3, generator=source, dtype=torch.float64),
    )
    wanted, result = (run(*given_) for run in twins("sample", call))
    assert torch.equal(result, wanted)


def check_linear(dtype: str, m: int, n: int, k: int, way: str, biased: bool) -> None:
    weight, x, bias = placed(
        made((n, k), DTYPES[dtype], way, 1),
        made((m, k), DTYPES[dtype], way, 3),
        made((n,), DTYPES[dtype], "plain", 2) if biased else None,
    )
    wanted, result = (
        run(x) for run in twins("linear", LinearCall(m, n, k, dtype, DEVICE), weight, bias)
    )
    close(result, wanted, TOLERANCE[dtype])


def check_lowbit(dtype: str, m: int, n: int, groups: int, group: int, way: str) -> None:
    text, k = f"int4-g{group}", groups * group
    packed = weight_format(text).quantize(made((n, k), torch.float32, seed=1).to(DEVICE))
    x, bias = placed(made((m, k), DTYPES[dtype], way, 2), made((n,), DTYPES[dtype], seed=3))
    call = LowbitLinearCall(m, n, k, text, 4.125, dtype, DEVICE)
    wanted, result = (run(x) for run in twins("linear_lowbit", call, packed, bias))
    close(result, wanted, 2 * TOLERANCE[dtype])


def check_planes(m: int, n: int, k: int, a: int, b: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, w = (
        2 * torch.randint(0, 2**bits, (rows, k), generator=source) - (2**bits - 1)
        for rows, bits in ((m, a), (n, b))
    )
    call = MatmulPlanesCall(m=m, n=n, k=k, w=b, a=a, device=DEVICE)
    planes_x, planes_w = placed(pack(x, a), pack(w, b))
    _, run = twins("matmul_planes", call, planes_w)
    assert torch.equal(run(planes_x).cpu().long(), x @ w.T)


def check_paged(
    dtype: str, form: str, d: int, heads: tuple[int, int], size: int, lengths: list[int], seed: int
) -> None:
    """A cache whose unused slots hold NaN, blocks in any order, some rows of one request."""
    source = torch.Generator().manual_seed(seed)
    kv_heads, group = heads
    call = PagedAttentionCall(1, 1, kv_heads * group, kv_heads, d, size, dtype, form, DEVICE)  # type: ignore[arg-type, unused-ignore]
    held = -(-max(lengths) // size)
    count = len(lengths)
    blocks = torch.randperm(count * held, generator=source).view(count, held)
    requests = torch.randint(0, count, (count,), generator=source)
    sides = []
    for _ in range(2):
        x = torch.randn(count * held * size, kv_heads, d, generator=source).to(DTYPES[dtype])
        if form == "plain":
            for request in range(count):
                seen = [lengths[row] for row in range(count) if requests[row] == request]
                for token in range(max(seen, default=0), held * size):
                    x[int(blocks[request, token // size]) * size + token % size] = float("nan")
            sides.append(x.to(DEVICE))
        else:
            sides.append(tuple(placed(*kv_format(form).encode(x))))
    q = torch.randn(count, call.heads, d, generator=source).to(DTYPES[dtype])
    q, blocks, seen, requests = placed(q, blocks.int(), torch.tensor(lengths), requests)
    # The last tokens of every row as branches of a tree: some of them, the very last always.
    roots = [max(0, length - 20) for length in lengths]
    bits = torch.randint(0, 1 << 20, (count,), generator=source).tolist()
    ends = [1 << (length - root - 1) for length, root in zip(lengths, roots, strict=True)]
    marked = [one & (2 * end - 1) | end for one, end in zip(bits, ends, strict=True)]
    (tree,) = placed(torch.tensor([roots, marked]))
    for more in ((), (tree,)):
        wanted, result = (
            run(q, *sides, blocks, seen, requests, *more) for run in twins("paged_attention", call)
        )
        close(result, wanted, TOLERANCE[dtype])


def cases(check: Callable[..., None], **drawn: Any) -> Any:
    """Two tests of a check: of a few small cases, and of many."""

    def made_test(examples: int, options: dict[str, Any]) -> Any:
        def body(**values: Any) -> None:
            check(**values)

        bounded = settings(max_examples=examples, deadline=None, derandomize=examples < 10)
        return bounded(given(**options)(body))

    few = {name: pair[0] if isinstance(pair, tuple) else pair for name, pair in drawn.items()}
    many = {name: pair[1] if isinstance(pair, tuple) else pair for name, pair in drawn.items()}
    return made_test(4, few), pytest.mark.slow(made_test(25, many))


tiny, odd = st.integers(1, 5), st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 257]))

test_rms_norm, test_rms_norm_of_many = cases(
    check_rms_norm, dtype=dtypes, m=(tiny, odd), n=odd, way=ways, adds=st.booleans()
)
test_swiglu, test_swiglu_of_many = cases(check_swiglu, dtype=dtypes, m=(tiny, odd), f=odd, way=ways)
test_rope, test_rope_of_many = cases(
    check_rope,
    dtype=dtypes,
    m=(st.integers(1, 2), st.integers(1, 20)),
    heads=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    half=st.sampled_from([1, 5, 16, 40]),
    normed=st.booleans(),
)
test_sample, test_sample_of_many = cases(
    check_sample,
    v=(st.integers(1, 300), st.integers(1, 3000)),
    seed=seeds,
    hot=st.sampled_from([0.3, 1.0, 5.0, 0.0]),
    top_k=st.sampled_from([0, 5000, 7]),
)
test_linear, test_linear_of_many = cases(
    check_linear,
    dtype=dtypes, m=(tiny, odd), n=odd, k=odd, way=ways, biased=st.booleans(),
)  # fmt: skip
test_lowbit, test_lowbit_of_many = cases(
    check_lowbit,
    dtype=dtypes,
    m=(tiny, odd),
    n=odd,
    groups=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128]),
    way=ways,
)
test_planes, test_planes_of_many = cases(
    check_planes,
    m=(tiny, odd),
    n=(st.integers(1, 20), odd),
    k=st.sampled_from([1, 63, 65, 130]),
    a=st.integers(1, 8),
    b=st.integers(1, 8),
    seed=seeds,
)
test_paged, test_paged_of_many = cases(
    check_paged,
    dtype=dtypes,
    form=st.sampled_from(["plain", "int8", "bfp12-b32", "bfp16-b32"]),
    d=(st.sampled_from([32, 64]), st.sampled_from([32, 64, 96, 128])),
    heads=(st.sampled_from([(1, 1), (1, 3)]), st.sampled_from([(1, 1), (2, 1), (2, 4), (1, 20)])),
    size=st.sampled_from([1, 5, 16]),
    lengths=(
        st.lists(st.sampled_from([1, 2, 65]), min_size=1, max_size=2),
        st.lists(st.sampled_from([1, 2, 31, 64, 130, 513]), min_size=1, max_size=4),
    ),
    seed=seeds,
)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    weight, x = placed(made((20, 70), torch.float32), made((19, 70), torch.float32, seed=5))
    _, run = twins("linear", LinearCall(1, 20, 70, "fp32", DEVICE), weight)
    whole = run(x)
    tile = made((16, 128), torch.float32).numpy()
    other = made((128, 64), torch.float32, seed=5).numpy()
    if not GPU and not np.array_equal((tile @ other)[3:], (np.roll(tile, -3, 0) @ other)[:-3]):
        pytest.skip("NumPy's product, which Triton's interpreter takes, depends on a row's place")
    for first, last in ((0, 1), (3, 10), (17, 19)):
        assert torch.equal(run(x[first:last]), whole[first:last])


def test_several_chunks_are_one_attention() -> None:
    check_paged("fp32", "plain", 16, (1, 2), 16, [513], 0)


# Calls for which every other kernel would need longer than any interpreter says it does.
LARGE = (
    LinearCall(10**6, 10**5, 10**5, "fp32"),
    LowbitLinearCall(10**6, 10**5, 128 * 10**3, "int4-g128", 4.125, "fp32"),
    MatmulPlanesCall(m=10**6, n=10**5, k=10**5, w=8, a=8),
    PagedAttentionCall(10**5, 10**6, 32, 8, 128, dtype="fp32"),
    PointwiseCall("rms_norm", 10**9, 10**4, 10**4, "fp32"),
    Recurrence("lstm", 10**5, 10**5, 64, 64),
    Pack(canonical(named(10**15))),
    GroupedLinear(10**6, 8, 10**5, 10**5, dtype="fp32"),
)


@pytest.mark.parametrize("call", LARGE, ids=lambda call: call.op)
def test_interpreted_it_is_chosen_by_name_only(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    memory = (MemoryTier(name="dram", capacity_bytes=2**40, read_bandwidth=1e9),)
    slow = Machine(name="slow", device=Device(name="cpu", kind="cpu", num_cores=1,
                                              peak_flops={"fp32": 1e9}, memory=memory))  # fmt: skip
    twin = kernels_of(call.op)["triton"]
    assert twin.refuses(call) is None and twin.interpreted(call)
    assert dispatch(call, machine=slow).backend != "triton"
    assert dispatch(call, wanted="triton", machine=slow).backend == "triton"
    assert "triton" not in dict(candidates(call, slow))


@pytest.mark.parametrize("op", sorted({call.op for call in LARGE} | {"rope", "swiglu", "sample"}))
def test_refuses_a_cpu_without_the_interpreter(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = next((one for one in LARGE if one.op == op), PointwiseCall(op, 1, 8, 4, "fp32"))  # type: ignore[arg-type, unused-ignore]
    with pytest.raises(KernelError, match=r"runs on a GPU, .*TRITON_INTERPRET=1"):
        dispatch(call, wanted="triton")


def built(tmp_path: Path, *options: str) -> None:
    """Compile for a GPU: in a process of its own, whose programs are not interpreted."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_builds.py")), *options],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]


@pytest.mark.slow
def test_compile_for_a_gpu(tmp_path: Path) -> None:
    built(tmp_path, "small")


@pytest.mark.soak
def test_fit_on_the_chip_of_a_gpu(tmp_path: Path) -> None:
    built(tmp_path)
