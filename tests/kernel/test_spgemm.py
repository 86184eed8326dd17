"""Sparse products: every kernel equals the reference, which equals SciPy and brute force."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.claims.lab.rmat import grid, rmat
from shoal.claims.lab.spgemm import spgemm
from shoal.claims.lab.spgemm.product import multiply
from shoal.core.errors import ConfigError, KernelError
from shoal.core.native import compiler
from shoal.core.random import generator
from shoal.ir import Machine
from shoal.kernel import pages
from shoal.kernel.dispatch import candidates, here
from shoal.kernel.spgemm import csr as csr_module
from shoal.kernel.spgemm.call import SEMIRINGS, SpGemm
from shoal.kernel.spgemm.csr import Csr, from_any, transposed
from shoal.kernel.spgemm.hash import Hash, HashV1, HashV2

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

# Tables so small that rows go to pieces, and ones that hold all.
SMALL = 4096
HASHES = [
    Hash(),
    HashV1(),
    HashV2(),
    Hash(dense_ratio=0),
    Hash(dense_ratio=0, budget_bytes=SMALL),
    Hash(budget_bytes=SMALL, dense_ratio=1000),
    HashV1(budget_bytes=SMALL, dense_ratio=1),
    HashV2(exact=True, budget_bytes=SMALL),
    Hash(exact=True),
]


def drawn(
    rows: int, columns: int, share: float, seed: int, *, zeros: bool = False, twice: bool = False
) -> sp.csr_array:
    """Random entries, some zero, some standing twice."""
    random = generator(seed, purpose="spgemm test")
    there = random.random((rows, columns)) < share
    row, col = np.nonzero(there)
    if twice and row.size:
        again = random.integers(0, row.size, row.size // 3 + 1)
        row, col = np.concatenate([row, row[again]]), np.concatenate([col, col[again]])
    value = random.integers(-4, 5, row.size).astype(float) + (0 if zeros else 0.5)
    order = np.lexsort((col, row))
    row, col, value = row[order], col[order], value[order]
    ptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    return sp.csr_array((value, col.astype(np.int32), ptr.astype(np.int32)), shape=(rows, columns))


def brute(A: Any, B: Any, semiring: str) -> tuple[np.ndarray, np.ndarray]:
    """Dense values and pattern."""
    pattern = (pattern_of(A) @ pattern_of(B)) > 0
    none = np.inf if semiring == "min_plus" else 0.0
    out = np.full(pattern.shape, none)
    left, right = A.tocoo(), B.tocsr()
    for i, k, a in zip(left.row, left.col, left.data, strict=True):
        for q in range(right.indptr[k], right.indptr[k + 1]):
            j, b = right.indices[q], right.data[q]
            if semiring == "plus_times":
                out[i, j] += a * b
            elif semiring == "min_plus":
                out[i, j] = min(out[i, j], a + b)
            else:
                out[i, j] = max(out[i, j], float(bool(a) and bool(b)))
    return out, pattern


def pattern_of(matrix: Any) -> np.ndarray:
    dense = np.zeros(matrix.shape)
    coo = matrix.tocoo()
    dense[coo.row, coo.col] = 1
    return dense


def same(found: Csr, expected: Csr, *, exact: bool = True) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.ptr, expected.ptr)
    assert torch.equal(found.col, expected.col)
    assert found.val.dtype == expected.val.dtype
    torch.testing.assert_close(found.val, expected.val, rtol=0 if exact else 1e-12, atol=0)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(0, 9)] * 3),
    shares=st.tuples(*[st.sampled_from([0.0, 0.2, 0.6, 1.0])] * 2),
    semiring=st.sampled_from(SEMIRINGS),
    seed=st.integers(0, 99),
)
def test_reference_is_brute_force(
    sizes: tuple[int, int, int], shares: tuple[float, float], semiring: Any, seed: int
) -> None:
    M, K, N = sizes
    A = drawn(M, K, shares[0], seed, zeros=True, twice=True)
    B = drawn(K, N, shares[1], seed + 1, zeros=True, twice=True)
    C = spgemm(A, B, semiring, kernel="reference")
    values, pattern = brute(A, B, semiring)
    assert np.array_equal(pattern_of(C) > 0, pattern)
    assert np.array_equal(C.toarray(), np.where(pattern, values, 0))
    assert C.dtype == (bool if semiring == "or_and" else float)


@needs_compiler
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0, 1, 7, 300, 3000])),
    shares=st.tuples(*[st.sampled_from([0.0, 0.02, 0.3, 1.0])] * 2),
    kind=st.sampled_from(
        [
            ("plus_times", torch.float64),
            ("plus_times", torch.float32),
            ("min_plus", torch.int64),
            ("or_and", torch.float64),
        ]
    ),
    masked=st.sampled_from([None, 0.05, 0.9]),
    keep=st.booleans(),
    alpha=st.sampled_from([None, 2.0]),
    which=st.integers(0, len(HASHES) - 1),
    seed=st.integers(0, 99),
)
def test_hash_is_the_reference(
    sizes: Any,
    shares: Any,
    kind: Any,
    masked: float | None,
    keep: bool,
    alpha: float | None,
    which: int,
    seed: int,
) -> None:
    (M, K, N), (semiring, dtype) = sizes, kind
    A = from_any("A", drawn(M, K, shares[0], seed, zeros=True, twice=True))
    B = from_any("B", drawn(K, N, shares[1], seed + 1, zeros=True, twice=True))
    A, B = (x.with_values(x.val.round().to(dtype)) for x in (A, B))
    mask = None
    if masked is not None:
        mask = from_any("mask", drawn(M, N, masked, seed + 2, twice=True))
    given = {"mask": mask, "alpha": alpha, "keep": keep}
    expected = multiply(A, B, semiring, kernel="reference", **given)
    same(multiply(A, B, semiring, kernel=HASHES[which], **given), expected)


@needs_compiler
@pytest.mark.parametrize("kernel", ["inner", "outer", "scipy", "hash", "hash_v1", "hash_v2"])
def test_all_kernels_agree(kernel: str) -> None:
    A, B = drawn(70, 50, 0.1, 1, twice=True), drawn(50, 90, 0.2, 2, twice=True)
    expected = multiply(from_any("A", A), from_any("B", B), alpha=3.0, kernel="reference")
    result = multiply(from_any("A", A), from_any("B", B), alpha=3.0, kernel=kernel)
    same(result, expected, exact=False)
    assert result.counters is not None
    assert result.counters.multiplies == expected.counters.multiplies  # type: ignore[union-attr]
    sides = [from_any("", X).with_values(from_any("", X).val.float()) for X in (A, B)]
    same(multiply(*sides, kernel=kernel), multiply(*sides, kernel="reference"), exact=False)


@needs_compiler
@pytest.mark.parametrize("kernel", ["inner", "hash"])
def test_mask_of_a_graph(kernel: str) -> None:
    """Triangles: paths of two edges that an edge closes."""
    graph = rmat(7, 6)
    C = spgemm(graph, graph, mask=graph, kernel=kernel)
    expected = (graph @ graph).multiply(pattern_of(graph)).toarray()
    np.testing.assert_allclose(C.toarray(), expected, rtol=1e-12)


@needs_compiler
@pytest.mark.parametrize("kernel", HASHES, ids=str)
def test_skewed_graph_and_grid_are_scipys(kernel: Hash) -> None:
    for matrix in (rmat(9, 8), grid(24)):
        result, expected = spgemm(matrix, matrix, kernel=kernel), matrix @ matrix
        expected.sort_indices()
        assert np.array_equal(result.indptr, expected.indptr)
        assert np.array_equal(result.indices, expected.indices)
        np.testing.assert_allclose(result.data, expected.data, rtol=1e-12)


@needs_compiler
@pytest.mark.parametrize("semiring", SEMIRINGS)
@pytest.mark.parametrize("twice", [False, True])
def test_rows_that_repeat_the_one_before(semiring: Any, twice: bool) -> None:
    edge = 12
    mesh = grid(edge)
    mesh.data = generator(0, purpose="values of a mesh").integers(-3, 4, mesh.nnz).astype(float)
    mesh.data[::11] = -0.0
    # Rows of as many products, whose columns are not those of the row before moved along.
    for row in (50, 51, 90):
        mesh.indices[mesh.indptr[row + 1] - 1] += 3
    if twice:
        mesh.indices[mesh.indptr[:-1] + 1] = mesh.indices[mesh.indptr[:-1]]
    A = from_any("A", mesh)
    expected = multiply(A, A, semiring, kernel="reference")
    for kernel in (Hash(), HashV1(), Hash(dense_ratio=0), Hash(exact=True, budget_bytes=SMALL)):
        result = multiply(A, A, semiring, kernel=kernel)
        same(result, expected)
        assert torch.equal(result.val.double().signbit(), expected.val.double().signbit())
        assert result.counters is not None
        assert result.counters.repeated_rows > edge * edge // 3


@needs_compiler
def test_one_dense_row_and_one_dense_column() -> None:
    A = sp.csr_array(sp.vstack([sp.csr_array(np.ones((1, 60))), sp.eye_array(60)]))
    B = abs(drawn(60, 70_000, 0.01, 3))
    expected = A @ B
    expected.sort_indices()
    for kernel in HASHES:
        result = spgemm(A, B, kernel=kernel)
        assert np.array_equal(result.indices, expected.indices)
        np.testing.assert_allclose(result.data, expected.data, rtol=1e-12)
    column = sp.csr_array(np.ones((60, 1)))
    assert spgemm(B.T.tocsr(), column).shape == (70_000, 1)


@needs_compiler
def test_rows_have_the_same_bits_in_any_company_and_with_any_threads() -> None:
    graph = rmat(8, 10)
    whole = spgemm(graph, graph, kernel="hash")
    some = graph[37:59]
    for kernel in (Hash(dense_ratio=0), HashV1(), HashV2(budget_bytes=SMALL)):
        part = spgemm(some, graph, kernel=kernel)
        assert np.array_equal(part.data, whole[37:59].data)
    before = torch.get_num_threads()
    try:
        for count in (1, 3, 5):
            torch.set_num_threads(count)
            for kernel in (Hash(), HashV1(), HashV2()):
                assert np.array_equal(spgemm(graph, graph, kernel=kernel).data, whole.data)
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_unsorted_rows_have_the_same_entries() -> None:
    graph = rmat(8, 4)
    loose = spgemm(graph, graph, sort=False, kernel=Hash(dense_ratio=0))
    loose.sort_indices()
    assert np.array_equal(loose.data, spgemm(graph, graph).data)


@needs_compiler
@pytest.mark.parametrize("version", [Hash, HashV1, HashV2])
@pytest.mark.parametrize("stride", [1, 3, 64, 1024, 4096, 1 << 20])
def test_probes_stay_few_on_strided_columns(version: type[Hash], stride: int) -> None:
    K = 400
    A = from_any("A", sp.csr_array(np.ones((5, K))))
    col = (np.arange(K * 5) * stride % (K * 5 * stride)).reshape(K, 5)
    col = np.sort(col, axis=1).astype(np.int32)
    ptr = np.arange(0, K * 5 + 1, 5, dtype=np.int32)
    B = sp.csr_array((np.ones(K * 5), col.ravel(), ptr), shape=(K, int(col.max()) + 1))
    result = multiply(A, from_any("B", B), kernel=version(dense_ratio=0))
    counters = result.counters
    assert counters is not None
    assert counters.hash_rows >= 5
    assert 1.0 <= counters.probes <= 4.0
    assert counters.a_bytes > 0
    assert counters.b_bytes > counters.multiplies
    assert counters.c_bytes > result.nnz


@needs_compiler
def test_memory_is_that_of_the_tables() -> None:
    graph = from_any("A", rmat(11, 16))
    hashed = multiply(graph, graph, kernel=Hash(budget_bytes=1 << 16)).counters
    outer = multiply(graph, graph, kernel="outer").counters
    assert hashed is not None
    assert outer is not None
    assert outer.table_bytes == 12 * outer.multiplies
    assert hashed.table_bytes < 0.05 * outer.table_bytes
    assert hashed.windows > 8


@needs_compiler
@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="no pages to be had back")
def test_memory_of_a_result_that_is_gone_serves_the_next() -> None:
    pages._GONE.clear()
    mesh = from_any("A", grid(110))
    expected = multiply(mesh, mesh, kernel="reference")
    first = multiply(mesh, mesh, kernel="hash")
    held = first.val
    second = multiply(mesh, mesh, kernel="hash")
    assert not pages._GONE
    place = second.val.data_ptr()
    del second
    assert len(pages._GONE) == 2
    values = multiply(mesh, mesh, "min_plus", kernel="hash").scipy().data
    assert values.__array_interface__["data"][0] == place
    assert len(pages._GONE) == 1
    same(first, expected)
    del first, values
    assert len(pages._GONE) == 3
    torch.testing.assert_close(held, expected.val)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_keeps_the_kind_and_the_types() -> None:
    A = drawn(6, 6, 0.5, 1)
    assert isinstance(spgemm(A, A), sp.csr_array)
    assert isinstance(spgemm(sp.csr_matrix(A), A), sp.csr_matrix)
    assert isinstance(spgemm(A.tocsc(), A.tocoo()), sp.csr_array)
    assert spgemm(A.astype(np.float32), A).dtype == np.float64
    assert spgemm(A.astype(np.int32), A.astype(np.int8)).dtype == np.int64
    assert spgemm(A != 0, A != 0).dtype == np.int64
    dense = torch.tensor(A.toarray())
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        T = dense.to(dtype).to_sparse_csr()
        C = spgemm(T, T)
        assert C.layout == torch.sparse_csr
        assert C.dtype == dtype
        torch.testing.assert_close(C.to_dense(), dense.to(dtype) @ dense.to(dtype))
    assert spgemm(T, T, "or_and").dtype == torch.bool


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_dense_matrices(masked: bool) -> None:
    A, B = drawn(7, 5, 0.5, 1), drawn(5, 6, 0.6, 2)
    limit = drawn(7, 6, 0.4, 3)
    a, b = (from_any("", X) for X in (A, B))
    a_E, b_E = (x.val.clone().requires_grad_() for x in (a, b))
    mask = limit if masked else None
    C = spgemm(a.with_values(a_E), b.with_values(b_E), mask=mask, alpha=2.0)
    weight = torch.arange(1.0, C.nnz + 1, dtype=torch.float64)
    (C.val * weight).sum().backward()
    dense_a = torch.tensor(A.toarray(), requires_grad=True)
    dense_b = torch.tensor(B.toarray(), requires_grad=True)
    spread = torch.tensor(sp.csr_array(C.with_values(weight).scipy()).toarray())
    (2.0 * (dense_a @ dense_b) * spread).sum().backward()
    for values, sparse, dense in ((a_E, A, dense_a), (b_E, B, dense_b)):
        coo = sparse.tocoo()
        assert values.grad is not None
        assert dense.grad is not None
        torch.testing.assert_close(values.grad, dense.grad[coo.row, coo.col])


def test_transpose() -> None:
    A = drawn(9, 4, 0.4, 5)
    turned, place = transposed(from_any("A", A))
    assert np.array_equal(turned.scipy().toarray(), A.toarray().T)
    assert sorted(place.tolist()) == list(range(A.nnz))


def _broken(**changed: Any) -> sp.csr_array:
    A = drawn(4, 5, 0.9, 1)
    for name, value in changed.items():
        setattr(A, name, value)
    return A


@pytest.mark.parametrize(
    ("A", "B", "options", "message"),
    [
        (drawn(3, 4, 0.5, 1), drawn(5, 2, 0.5, 1), {}, r"B \[5, 2\].*a B with 4 rows"),
        (drawn(3, 4, 0.5, 1), np.ones((4, 4)), {}, "B: ndarray"),
        (torch.ones(2, 2), torch.ones(2, 2), {}, "to_sparse_csr"),
        (drawn(3, 3, 1, 1), drawn(3, 3, 1, 1), {"semiring": "plus_tims"}, "did you mean"),
        (drawn(3, 3, 1, 1), drawn(3, 3, 1, 1), {"kernel": "hsh"}, "did you mean"),
        (drawn(3, 3, 1, 1), drawn(3, 3, 1, 1), {"mask": drawn(2, 3, 1, 1)}, r"mask.*\[3, 3\]"),
        (drawn(3, 3, 1, 1) * 1j, drawn(3, 3, 1, 1), {}, "complex"),
        (drawn(3, 3, 1, 1).astype(int), drawn(3, 3, 1, 1).astype(int), {"alpha": 0.5}, "whole"),
        (
            drawn(3, 3, 1, 1),
            drawn(3, 3, 1, 1),
            {"semiring": "min_plus", "kernel": "outer"},
            "knows plus_times only",
        ),
        (
            drawn(3, 3, 1, 1),
            drawn(3, 3, 1, 1),
            {"mask": drawn(3, 3, 1, 1), "kernel": "scipy"},
            "takes no mask",
        ),
    ],
)
def test_bad_input(A: Any, B: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        spgemm(A, B, **options)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("with_compiler", [False, True])
def test_bad_entries(with_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_compiler:
        monkeypatch.setattr(csr_module, "compiler", lambda: None)
    good = from_any("A", drawn(4, 5, 0.9, 1))
    for bad, message in (
        (Csr((4, 5), good.ptr, good.col.flip(0), good.val), "row 0: unsorted columns"),
        (Csr((4, 3), good.ptr, good.col, good.val), "a column outside"),
        (Csr((4, 5), good.ptr, good.col - 1, good.val), "a column outside"),
        (Csr((4, 5), good.ptr + 1, good.col, good.val), "row pointers"),
        (Csr((4, 5), good.ptr.flip(0), good.col, good.val), "row pointers"),
        (Csr((3, 5), good.ptr, good.col, good.val), "row pointers"),
        (Csr((4, 5), good.ptr, good.col, good.val[1:]), "row pointers"),
    ):
        with pytest.raises(KernelError, match=message):
            spgemm(bad, bad)
    wide = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([2**33]), torch.ones(1), (1, 2**34),
        check_invariants=False,
    )  # fmt: skip
    with pytest.raises(KernelError, match="at most 2147483647"):
        from_any("A", wide)


def test_gradient_of_another_semiring_is_refused() -> None:
    a = from_any("A", drawn(3, 3, 1, 1))
    a = a.with_values(a.val.clone().requires_grad_())
    with pytest.raises(KernelError, match="plus_times, where gradients"):
        spgemm(a, a, "min_plus")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "v4"}, "v1, v2, v3"),
        ({"budget_bytes": 10}, "4096"),
        ({"dense_ratio": -1}, "0 or more"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Hash(**options)


@needs_compiler
def test_dispatch_takes_the_hash_for_skewed_graphs() -> None:
    machine: Machine = here()
    call = SpGemm(m=16384, k=16384, n=16384, nnz_a=200_000, nnz_b=200_000, multiplies=40_000_000)
    ranked = candidates(call, machine)
    assert ranked[0][0] == "hash"
    assert ranked[-1][0] == "reference"
    assert {name for name, _ in ranked} >= {"inner", "outer", "scipy", "hash_v1", "hash_v2"}
    assert all(seconds > 0 for _, seconds in ranked)
    assert call.moved_bytes > 12 * 400_000


def test_rmat_is_skewed_and_reproducible() -> None:
    graph = rmat(10, 8, seed=3)
    again = rmat(10, 8, seed=3)
    assert np.array_equal(graph.indices, again.indices)
    assert np.array_equal(graph.data, again.data)
    assert graph.has_canonical_format
    degrees = np.sort(np.diff(graph.indptr))[::-1]
    assert 6 * 1024 < graph.nnz <= 8 * 1024
    assert degrees[:102].sum() > 0.4 * graph.nnz
    even = rmat(10, 8, probabilities=(0.25, 0.25, 0.25, 0.25))
    assert np.diff(even.indptr).max() < 30
    assert rmat(5, 4, seed=1).shape == (32, 32)
    with pytest.raises(ConfigError, match=r"rmat\.scale"):
        rmat(0)
    with pytest.raises(ConfigError, match="edge_factor"):
        rmat(3, 0)
    with pytest.raises(ConfigError, match="add up to 1"):
        rmat(3, probabilities=(1.0, 1.0, 0.0, 0.0))
    assert grid(3).nnz == 9 + 2 * 12
    with pytest.raises(ConfigError, match=r"grid\.edge"):
        grid(0)
