"""Parallel algorithms: every one, under every policy and chunking, is NumPy's."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from shoal.claims.lab import algorithms as lab
from shoal.core.errors import BuildError, KernelError
from shoal.core.native import compiler
from shoal.core.random import generator
from shoal.kernel import algorithms as alg
from shoal.kernel.algorithms import (
    CppExpression,
    Policy,
    auto,
    block,
    deterministic,
    dynamic,
    fork_join,
    guided,
    inline,
    max_cores,
    numa,
    par,
    par_unseq,
    seq,
    static,
    stream,
    task,
    work_stealing,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

EXECUTORS = (inline, fork_join, work_stealing, block)
CHUNKS = (static(), static(37), dynamic(), dynamic(41), guided(), guided(17), auto())
POLICIES = (
    seq,
    seq.with_(deterministic()),
    par_unseq,
    *(par.on(e).with_(c) for e in EXECUTORS for c in CHUNKS),
    *(par.on(e).with_(dynamic(), deterministic()) for e in EXECUTORS),
    par.with_(static(50), max_cores(1)),
)
SIZES = (0, 1, 2, 1000)

each_policy = pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: f"{p.name}-{p.executor.name}-{p.chunks.kind}{p.chunks.size}"
)


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def drawn(n: int, seed: int = 0) -> np.ndarray:
    return generator(seed, purpose="algorithms test").standard_normal(n)


@each_policy
def test_is_numpy(policy: Policy) -> None:
    for n in SIZES:
        a, b = drawn(n), drawn(n, 1)
        whole = (a * 1000).astype(np.int64)
        out, ints = np.empty(n), np.empty(n, dtype=np.int64)
        assert alg.transform(policy, a, b, out=out, f="a + s*b", s=3.0) is out
        np.testing.assert_allclose(out, a + 3.0 * b, rtol=1e-15, atol=1e-15)
        assert np.array_equal(alg.copy(policy, a, out), a)
        assert np.array_equal(alg.fill(policy, out, 7), np.full(n, 7.0))
        assert np.array_equal(
            alg.for_each(policy, whole.copy(), "a*2 if a > 0 else -a"),
            np.where(whole > 0, 2 * whole, -whole),
        )
        assert lab.reduce(policy, whole) == whole.sum()
        assert lab.transform_reduce(policy, a, b, f="a*b") == pytest.approx(float(a @ b), abs=1e-10)
        assert np.array_equal(lab.inclusive_scan(policy, whole, ints), np.cumsum(whole))
        expected = np.concatenate([[5], 5 + np.cumsum(whole)[:-1]])[:n]
        assert np.array_equal(lab.exclusive_scan(policy, whole, ints, init=5), expected)
        if n:
            assert lab.reduce(policy, a, "max") == a.max()
            assert lab.reduce(policy, a, "min") == a.min()
        assert lab.partition(policy, a, out, "a > s", s=0.1) == (a > 0.1).sum()
        assert np.array_equal(out, np.concatenate([a[a > 0.1], a[a <= 0.1]]))
        steps = np.sort(whole // 500)
        count = lab.unique(policy, steps, ints)
        assert np.array_equal(ints[:count], np.unique(steps))
        assert np.array_equal(
            lab.histogram(policy, a, 9, -2.0, 2.0), np.histogram(a, 9, (-2.0, 2.0))[0]
        )


@pytest.mark.parametrize("policy", [seq, par, par.with_(max_cores(2))])
def test_sort_is_numpys_and_stable(policy: Policy) -> None:
    for n in (0, 1, 2, 40_000):
        a = drawn(n)
        assert np.array_equal(lab.sort(policy, a.copy()), np.sort(a))
        assert np.array_equal(lab.sort(policy, a.copy(), descending=True), np.sort(a)[::-1])
    whole = generator(1).integers(0, 10_000, 40_000)
    result = lab.sort(policy, whole.copy(), key="a % m", m=7)
    assert np.array_equal(result, whole[np.argsort(whole % 7, kind="stable")])
    result = lab.sort(policy, whole.copy(), key="a % m", m=7, descending=True)
    assert np.array_equal(result, whole[np.argsort(-(whole % 7), kind="stable")])
    gaps = drawn(20_000)
    gaps[::9] = np.nan
    assert np.array_equal(lab.sort(policy, gaps.copy()), np.sort(gaps), equal_nan=True)
    down = lab.sort(policy, gaps.copy(), descending=True)
    assert np.isnan(down[-np.isnan(gaps).sum() :]).all()
    assert np.all(np.diff(down[: -np.isnan(gaps).sum()]) <= 0)
    same, few = np.ones(20_000), generator(2).integers(0, 3, 20_000).astype(np.uint8)
    assert np.array_equal(lab.sort(policy, same.copy()), same)
    assert np.array_equal(lab.sort(policy, few.copy()[::-1]), np.sort(few))
    wide = np.array([2**53 + 1, 2**53, 2**53 + 2])
    assert lab.sort(policy, wide.copy(), key="-a").tolist() == wide[[2, 0, 1]].tolist()


# Maps x -> p x + q modulo 251, as 256 p + q: composing them is associative, not commutative.
COMPOSE = "((x//256 * (y//256)) % 251) * 256 + ((x%256) * (y//256) + y%256) % 251"


@pytest.mark.parametrize("chunks", [static(), static(7), dynamic(13), guided(5), auto()])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_order_is_kept_where_it_matters(chunks: Any, executor: Any) -> None:
    policy = par.on(executor).with_(chunks)
    random = generator(3)
    maps = random.integers(0, 251, 500) * 256 + random.integers(0, 251, 500)
    expected, total = [], None
    for one in maps.tolist():
        if total is None:
            total = one
        else:
            p, q = total // 256, total % 256
            total = (p * (one // 256) % 251) * 256 + (q * (one // 256) + one % 256) % 251
        expected.append(total)
    given = {"op": COMPOSE, "assume_associative": True}
    assert lab.reduce(policy, maps, **given) == total
    assert lab.reduce(policy.with_(deterministic()), maps, **given) == total
    out = np.empty_like(maps)
    assert lab.inclusive_scan(policy, maps, out, **given).tolist() == expected
    assert lab.exclusive_scan(policy, maps, out, init=256, **given).tolist() == [
        256,
        *expected[:-1],
    ]
    for op, picked in (("x", maps[0]), ("y", maps[-1])):
        assert lab.reduce(policy, maps, op, assume_associative=True) == picked


def test_deterministic_sums_have_the_same_bits() -> None:
    a = drawn(100_000)
    result = set()
    for cores in (1, 2, 3):
        for executor in EXECUTORS:
            for chunks in (static(), dynamic(1000), guided(), auto()):
                policy = par.on(executor).with_(chunks, max_cores(cores), deterministic())
                result.add(lab.reduce(policy, a))
    result.add(lab.reduce(seq.with_(deterministic()), a))
    assert len(result) == 1
    assert result.pop() == pytest.approx(float(a.sum()), rel=1e-12)
    assert lab.reduce(seq, a) == pytest.approx(float(a.sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "bool"])
def test_types_strides_and_tensors(dtype: str) -> None:
    base = (drawn(300) * 4 + 8).astype(dtype)
    a, out = base[::3], np.zeros(200, dtype=dtype)[10:110]
    alg.copy(par.with_(static(9)), a, out)
    assert np.array_equal(out, a)
    back = base[::-1][:100]
    assert np.array_equal(alg.copy(seq, back, out), back)
    if dtype == "bool":
        assert lab.reduce(par, a) == int(a.sum())
        return
    alg.transform(par, back, a, out=out, f="max(a, b) - min(a, b)")
    assert np.array_equal(out, np.maximum(a, back) - np.minimum(a, back))
    assert lab.reduce(par, a) == pytest.approx(float(a.sum(dtype=np.float64)), rel=1e-12)
    tensor = torch.tensor(np.ascontiguousarray(a))
    assert lab.reduce(par, tensor) == lab.reduce(par, a)
    alg.fill(par, tensor, 3)
    assert tensor.eq(3).all()


def test_for_loop_reduces_while_it_writes() -> None:
    x, y = drawn(5000), drawn(5000, 1)
    before = y.copy()
    result = alg.for_loop(
        par.with_(static(700)),
        write={"y": "y + s*x"},
        reduce={"dot": ("+", "x*y"), "peak": ("max", "abs(x)"), "last": ("y", "i")},
        assume_associative=True,
        x=x,
        y=y,
        s=2.0,
    )
    np.testing.assert_allclose(y, before + 2.0 * x, rtol=1e-15, atol=1e-15)
    assert result["peak"] == np.abs(x).max()
    assert result["last"] == 4999
    assert result["dot"] == pytest.approx(float(x @ before), rel=1e-10)
    assert alg.for_loop(par, 100, reduce={"n": ("+", "i")}) == {"n": 4950}


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        ("a**2 + b**3", lambda a, b: a**2 + b**3),
        ("a**0.5", lambda a, b: np.abs(a) ** 0.5),
        ("where(a < b, a, b) + round(b)", lambda a, b: np.minimum(a, b) + np.round(b)),
        ("sqrt(a) + exp(-a) + log(a + 1)", lambda a, b: np.sqrt(a) + np.exp(-a) + np.log1p(a)),
        ("a // b + a % b", lambda a, b: a // b + a % b),
        ("(1 < a < 2) + (not b > 0)", lambda a, b: ((a > 1) & (a < 2)) + ~(b > 0) * 1.0),
        ("a if b > 0 and a > 1 or a > 3 else 1.5", None),
        ("tanh(sin(a)) * cos(b) + floor(a) - ceil(b) + tan(a)*0 + pow(a, 2)", None),
        ("isnan(b)", lambda a, b: np.isnan(b) * 1.0),
        (CppExpression("a > 1 ? a : b"), lambda a, b: np.where(a > 1, a, b)),
    ],
)
def test_expressions(f: Any, expected: Any) -> None:
    a, b = np.abs(drawn(257)) + 0.01, drawn(257, 1) + 0.001
    out = np.empty(257)
    alg.transform(par, a, b, out=out, f=f)
    if expected is None and "if" in f:
        expected = lambda a, b: np.where(((b > 0) & (a > 1)) | (a > 3), a, 1.5)  # noqa: E731
    elif expected is None:
        expected = (  # noqa: E731
            lambda a, b: np.tanh(np.sin(a)) * np.cos(b) + np.floor(a) - np.ceil(b) + a**2
        )
    np.testing.assert_allclose(out, expected(a, b), rtol=1e-12)


def test_integers_divide_as_in_python() -> None:
    a = np.arange(-20, 21)
    out, real = np.empty_like(a), np.empty(a.size)
    for d in (3, -3):
        assert np.array_equal(alg.transform(par, a, out=out, f="a // d", d=d), a // d)
        assert np.array_equal(alg.transform(par, a, out=out, f="a % d", d=d), a % d)
        assert np.array_equal(alg.transform(par, a, out=real, f="a / d", d=d), a / d)


def test_least_and_greatest_see_nan() -> None:
    a = drawn(1000)
    a[777] = np.nan
    for policy in (seq, par.with_(static(100))):
        assert np.isnan(lab.reduce(policy, a, "max"))
        assert np.isnan(lab.reduce(policy, a, "min"))
    a[777] = -np.inf
    assert lab.reduce(par, a, "min") == -np.inf


def test_small_ranges_stay_on_the_calling_thread() -> None:
    who = np.full(4096, -1.0)
    alone = 0
    # Time decides, and a call may be interrupted while it looks: not each, but one of many.
    for _ in range(50):
        alg.transform(par, who, out=who, f=CppExpression("omp_get_thread_num()"))
        alone += not who.any()
    assert alone
    alg.transform(par.with_(static()), who, out=who, f=CppExpression("omp_get_thread_num()"))
    assert set(who) == {0.0, 1.0, 2.0}


def test_block_gives_the_same_elements_to_the_same_thread() -> None:
    policy = par.on(numa).with_(static())
    first, again = alg.allocate(10_000, policy=policy), alg.allocate(10_000, policy=policy)
    assert not first.any()
    assert first.ctypes.data % 64 == 0
    for who in (first, again):
        alg.fill(policy, who, 0)
        alg.transform(policy, who, out=who, f=CppExpression("omp_get_thread_num()"))
    assert np.array_equal(first, again)
    assert np.all(np.diff(first) >= 0)
    assert alg.allocate(7, "int32").dtype == np.int32


def test_a_task_is_a_future() -> None:
    a = drawn(1000)
    future = lab.reduce(task(par), a, "max")
    assert isinstance(future, Future)
    assert future.result(timeout=30) == a.max()
    failing = lab.reduce(task(par), a, "maxx", assume_associative=False)
    with pytest.raises(KernelError, match="did you mean 'max'"):
        failing.result(timeout=30)


def test_errors_of_all_tasks_are_raised_together() -> None:
    a, out = np.ones(1000, dtype=np.int64), np.empty(1000, dtype=np.int64)
    b = np.ones(1000, dtype=np.int64)
    b[[105, 405, 905]] = 0
    policy = par.with_(static(100))
    with pytest.raises(KernelError, match=r"3 of its tasks failed.*100 to 199: integer division"):
        alg.transform(policy, a, b, out=out, f="a // b")
    with pytest.raises(KernelError, match="2 of its tasks failed"):
        lab.reduce(par.with_(static(500)), b, "x % y", assume_associative=True)
    with pytest.raises(KernelError, match=r"algorithms\.sort: 1 of its tasks"):
        lab.sort(seq, b.copy(), key="1 // a")
    with pytest.raises(KernelError, match="tasks failed"):
        lab.partition(policy, b, out, "1 // a > 0")
    b[0] = 0
    with pytest.raises(KernelError, match="elements 0 to"):
        alg.for_each(par, b, "1 // a")


SHORT, LONG = np.zeros(3), np.zeros(4)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: alg.transform(par, SHORT, LONG, out=SHORT, f="a"), "a 3, b 4, out 3"),
        (lambda: alg.transform(par, LONG[:3], out=LONG[1:], f="a"), "shifted"),
        (
            lambda: alg.transform(par, LONG, out=LONG, f="a + t"),
            "named 't'; expected one of a, i, out",
        ),
        (lambda: alg.transform(par, LONG, out=LONG, f="alpha", alpah=1), "did you mean 'alpah'"),
        (lambda: alg.transform(par, LONG, out=LONG, f="a +"), "expected one such as"),
        (lambda: alg.transform(par, LONG, out=LONG, f="sqr(a)"), "no function 'sqr'"),
        (lambda: alg.transform(par, LONG, out=LONG, f="sqrt(a, a)"), "takes 1 argument"),
        (lambda: alg.transform(par, LONG, out=LONG, f="[a]"), "List is not supported"),
        (lambda: alg.transform(par, LONG, out=LONG, f="a @ a"), "operator"),
        (lambda: alg.transform(par, LONG, out=LONG, f="a is a"), "compare"),
        (lambda: alg.transform(par, LONG, out=LONG, f="'x'"), "is no number"),
        (lambda: alg.transform(par, LONG, out=LONG, f="a" * 5000), "at most 4000"),
        (lambda: alg.transform(par, LONG, out=LONG, f=str(2**70)), "64 bits"),
        (lambda: alg.transform(par, LONG, out=LONG, f="a", new=1), "not a keyword of"),
        (lambda: alg.transform(par, LONG, out=LONG, f="a", s="3"), "s: str"),
        (lambda: alg.transform(par, LONG, out=LONG, f="a", s=2**64), "64 bits"),
        (lambda: alg.transform(par, out=LONG, f="1"), "one to three"),
        (lambda: alg.transform(par, [1.0], out=LONG, f="a"), "list; expected a NumPy"),
        (lambda: alg.transform(par, LONG * 1j, out=LONG, f="a"), "complex128"),
        (lambda: alg.transform(par, np.zeros((2, 2)), out=LONG, f="a"), "one dimension"),
        (lambda: lab.reduce(par, LONG, "-"), "needs an associative operator"),
        (lambda: lab.reduce(par, SHORT[:0], "max"), "give init"),
        (lambda: alg.for_loop(par, reduce={"m": ("max", "x")}, x=SHORT[:0]), "empty range"),
        (lambda: alg.for_loop(par, reduce={"m": ("max", "i")}), "there is no array"),
        (lambda: alg.for_loop(par, 4, reduce={"m": ("max", "x")}, x=SHORT), "3, as the arrays"),
        (lambda: alg.for_loop(par, write={"y": "x"}, x=SHORT), "one of the arrays x"),
        (lambda: lab.exclusive_scan(par, LONG, LONG, "max"), "init, which is missing"),
        (lambda: lab.inclusive_scan(par, LONG[:3], LONG[1:]), "shares memory"),
        (lambda: lab.unique(par, LONG, LONG), "another array"),
        (lambda: lab.partition(par, LONG, np.zeros(4, np.float32), "a"), "float64, as a has"),
        (lambda: lab.histogram(par, LONG, 0, 0, 1), "1 or more"),
        (lambda: lab.histogram(par, LONG, 3, 1, 0), "lower first"),
        (lambda: alg.allocate(-1), "0 or more"),
        (lambda: alg.allocate(1, "float16"), "one of float64"),
        (lambda: alg.transform("par", LONG, out=LONG, f="a"), "expected seq, par"),  # type: ignore[arg-type]
        (lambda: seq.on(block), "use par for threads"),
        (lambda: max_cores(0), "1 or more"),
        (lambda: static(-1), "elements of a task"),
    ],
)
def test_bad_input(run: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        run()


def test_cpp_that_does_not_compile_is_a_build_error() -> None:
    with pytest.raises(BuildError, match="nowhere"):
        alg.transform(par, LONG, out=LONG, f=CppExpression("nowhere(a)"))


def test_init_stands_before_the_first_element() -> None:
    a = np.arange(1, 6)
    assert lab.reduce(par, a, init=100) == 115
    assert lab.reduce(par, a, "x", init=42, assume_associative=True) == 42
    assert lab.reduce(par, a[:0], "max", init=3) == 3
    assert lab.reduce(par, a[:0]) == 0
    assert lab.reduce(par, a[:0], "*") == 1


def test_stream_is_stream() -> None:
    held = stream.arrays(5000)
    again = {name: x.copy() for name, x in held.items()}
    for name in stream.KERNELS:
        stream.own(name, held)()
        stream.native(name, again)()
        for one in "abc":
            assert np.array_equal(held[one], again[one])
    rates = stream.rates(1000, pairs=2)
    assert set(rates) == set(stream.KERNELS)
    assert all(rate > 0 for of in rates.values() for rate in of.values())
