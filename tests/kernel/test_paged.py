"""paged_attention: every kernel is its reference, and the fast one has the same bits in company."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shoal.core.errors import KernelError  # noqa: E402
from shoal.kernel.calls import PagedAttentionCall  # noqa: E402
from shoal.kernel.dispatch import dispatch, kernels_of  # noqa: E402
from shoal.kernel.kv import kv_format  # noqa: E402
from shoal.kernel.tensors import dtype_of  # noqa: E402
from shoal.machine.described import load  # noqa: E402

BACKENDS = kernels_of("paged_attention")
# Rounding of results and of weights.
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-6, "bf16": 8e-3}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(call, lengths, requests=None, *, seed=0, wide=True, spare=3, strided=False):
    """Queries, a cache whose unused slots hold NaN, blocks in any order."""
    source = torch.Generator().manual_seed(seed)
    dtype = dtype_of(call.dtype)
    size = call.block_size
    count = len(lengths) if requests is None else max(requests) + 1
    most = [0] * count
    for row, seen in enumerate(lengths):
        request = row if requests is None else requests[row]
        most[request] = max(most[request], seen)
    held = [-(-seen // size) for seen in most]
    total = sum(held) + spare
    order = torch.randperm(total, generator=source)
    blocks = torch.full((count, max(held) + 1), -1)
    first = 0
    for row, number in enumerate(held):
        blocks[row, :number] = order[first : first + number]
        first += number
    slots, heads, d = total * size, call.kv_heads, call.head_dim
    sides = []
    for _ in range(2):
        x = torch.randn(slots, heads * (2 if strided else 1), d, generator=source)
        x = x[:, :heads] if strided else x
        if call.format == "plain":
            if call.dtype != "fp64":
                used = torch.zeros(slots, dtype=torch.bool)
                for row, number in enumerate(most):
                    for token in range(number):
                        used[blocks[row, token // size] * size + token % size] = True
                x = x.masked_fill(~used[:, None, None], float("nan")) if not strided else x
            sides.append(x.to(dtype))
        else:
            sides.append(kv_format(call.format).encode(x.to(dtype)))
    q = torch.randn(len(lengths), call.heads, d, generator=source).to(dtype)
    chosen = None if requests is None else torch.tensor(requests)
    blocks = blocks if wide else blocks.int()
    return q, sides[0], sides[1], blocks, torch.tensor(lengths), chosen


def error(call, out, wanted, most=1.0):
    """The largest error, in tolerances; with codes, weights are in bf16: so much of a value."""
    room = TOLERANCE["bf16" if call.format != "plain" else call.dtype]
    size = wanted.double().abs() + (most if call.format != "plain" else 1.0)
    return ((out.double() - wanted.double()).abs() / size).max() / room


def in_codes(call, q):
    """The queries that the integers of a kernel stand for: eight bits, as the cache rounds."""
    form = "int8" if call.format == "int8" else "bfp16-b" + call.format.split("-b")[1]
    return kv_format(form).decode(*kv_format(form).encode(q.float()))


@st.composite
def cases(draw):
    form = draw(st.sampled_from(["plain", "plain", "int8", "bfp12-b32", "bfp16-b32", "bfp16-b16"]))
    dtype = draw(st.sampled_from(["fp32", "bf16"]))
    d = draw(st.sampled_from([64, 128, 160] if form.startswith("bfp") else [4, 18, 64, 80, 128]))
    if form == "bfp12-b32" and draw(st.booleans()):
        form = "bfp12-b64" if d % 64 == 0 else form
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 4), (1, 7)]))
    call = PagedAttentionCall(
        1,
        1,
        kv_heads * group,
        kv_heads,
        d,
        draw(st.sampled_from([1, 5, 16, 64])),
        dtype,
        form,
        queries=draw(st.sampled_from([1, 64])),
    )
    lengths = draw(st.lists(st.sampled_from([1, 2, 31, 64, 65, 130, 257, 300]), min_size=1,
                            max_size=4))  # fmt: skip
    requests = None
    if draw(st.booleans()):
        requests = sorted(draw(st.integers(0, 2)) for _ in lengths)
    return call, lengths, requests, draw(st.integers(0, 99)), draw(st.booleans())


@settings(max_examples=25, deadline=None)
@given(cases())
def test_equals_the_reference(case):
    call, lengths, requests, seed, flag = case
    given_ = make(call, lengths, requests, seed=seed, wide=flag, strided=not flag)
    wanted = BACKENDS["reference"].prepare(call)(*given_)
    for backend, kernel in BACKENDS.items():
        if backend == "reference" or kernel.interpreted(call) or kernel.refuses(call) is not None:
            continue
        # Padded tokens have no weight, but NaN times zero is NaN: the peer needs zeros there.
        args = [x.nan_to_num() if torch.is_tensor(x) and x.is_floating_point() else x
                for x in given_] if backend == "torch" else given_  # fmt: skip
        q, k, v, *where = given_
        expected, most = wanted, 1.0
        if call.format != "plain":
            most = float(kv_format(call.format).decode(*v).abs().max())
        if backend == "cpp" and call.format != "plain":
            rounded = dataclasses.replace(call, dtype="fp32")
            expected = BACKENDS["reference"].prepare(rounded)(in_codes(call, q), k, v, *where)
        out = kernel.prepare(call)(*args)
        assert out.dtype == wanted.dtype
        assert error(call, out, expected, most) < 1, backend


def test_reference_is_attention_in_double():
    call = PagedAttentionCall(1, 1, 4, 2, 8, 4, "fp64")
    q, k, v, blocks, lengths, _ = make(call, [7, 1])
    out = BACKENDS["reference"].prepare(call)(q, k, v, blocks, lengths)
    for row, seen in enumerate([7, 1]):
        slots = [int(blocks[row, t // 4]) * 4 + t % 4 for t in range(seen)]
        for head in range(4):
            scores = (k[slots, head // 2] @ q[row, head]) / 8**0.5
            wanted = torch.softmax(scores, 0) @ v[slots, head // 2]
            torch.testing.assert_close(out[row, head], wanted)


def able(call, backend="cpp"):
    kernel = BACKENDS[backend]
    reason = kernel.refuses(call)
    if reason is not None:
        pytest.skip(f"{backend} {reason}")
    return kernel.prepare(call)


@pytest.mark.parametrize("form", ["plain", "int8", "bfp12-b32", "bfp16-b32"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_same_bits_in_any_company(backend, dtype, form):
    """Of a request alone, among others, in one chunk or in many, and on any number of threads."""
    call = PagedAttentionCall(1, 1, 6, 2, 64, 16, dtype, form)
    run = able(call, backend)
    lengths = [700, 3, 256, 257, 64, 511]
    q, k, v, blocks, seen, _ = make(call, lengths)
    together = run(q, k, v, blocks, seen)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(run(q, k, v, blocks, seen), together)
        for row in range(len(lengths)):
            one = slice(row, row + 1)
            assert torch.equal(run(q[one], k, v, blocks[one], seen[one])[0], together[row])
    torch.set_num_threads(2)
    # The last twenty tokens of a prompt, beside a request that decodes.
    prompt = torch.arange(238, 258)
    queries = torch.randn(21, 6, 64).to(q.dtype)
    rows = torch.tensor([3] * 20 + [0])
    whole = run(queries, k, v, blocks, torch.cat([prompt, seen[:1]]), rows)
    for row in (0, 7, 19):
        alone = run(queries[row : row + 1], k, v, blocks, prompt[row : row + 1], rows[:1])
        assert torch.equal(alone[0], whole[row])
    parts = [run(queries[a:b], k, v, blocks, prompt[a:b], rows[a:b]) for a, b in ((0, 3), (3, 20))]
    assert torch.equal(torch.cat(parts), whole[:20])


def test_short_contexts_do_not_make_the_reference_the_fastest():
    """It goes query by query, and each takes longer than all of them take in one call."""
    machine = load("laptop")

    def seconds(backend, batch):
        call = PagedAttentionCall(batch, 16, 4, 2, 32, 16, "fp32")
        return BACKENDS[backend].estimate(call, machine).step_s.value

    for batch in (1, 4, 64):
        assert seconds("reference", batch) > seconds("torch", batch)
    assert seconds("reference", 64) > 30 * seconds("reference", 1)


def test_integers_are_what_floats_of_the_same_codes_are():
    """Scores from mantissas are those of the decoded keys and of the queries' own codes."""
    for form in ("bfp12-b32", "bfp16-b32", "bfp12-b64"):
        call = PagedAttentionCall(1, 1, 4, 2, 128, 16, "fp32", form)
        q, k, v, blocks, lengths, _ = make(call, [300, 40])
        eight = kv_format("bfp16-b" + form.split("-b")[1])
        rounded = eight.decode(*eight.encode(q))
        decoded = [kv_format(form).decode(*side) for side in (k, v)]
        plain = PagedAttentionCall(1, 1, 4, 2, 128, 16, "fp32")
        wanted = BACKENDS["reference"].prepare(plain)(rounded, *decoded, blocks, lengths)
        out = able(call)(q, k, v, blocks, lengths)
        # Weights are rounded to bf16, nothing else is.
        torch.testing.assert_close(out, wanted, rtol=0, atol=4e-3)


def test_large_scores_and_nan_where_a_key_is():
    call = PagedAttentionCall(1, 1, 2, 1, 32, 16, "fp32")
    run = able(call)
    q, k, v, blocks, lengths, _ = make(call, [200, 90])
    out = run(q * 100, k * 100, v, blocks, lengths)
    wanted = BACKENDS["reference"].prepare(call)(q * 100, k * 100, v, blocks, lengths)
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)
    k[blocks[0, 0] * 16] = float("nan")
    out = run(q, k, v, blocks, lengths)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [0, 5]}, r"lengths\[0\] = 0: expected 1 to 48"),
        ({"lengths": [20, 49]}, r"lengths\[1\] = 49: expected 1 to 48"),
        ({"block": 99}, r"blocks\[0, 0\] = 99: expected 0 to 6"),
        ({"block": -1}, r"blocks\[0, 0\] = -1"),
        ({"requests": [0, 2]}, r"requests\[1\] = 2: expected a row of blocks, 0 to 1"),
        ({"q": torch.zeros(2, 3, 8)}, r"queries: torch.float32 \[2, 3, 8\], expected"),
        ({"q": torch.zeros(3, 2, 8)}, r"lengths: torch.int64 \[2\], expected int64 \[3\]"),
    ],
)
def test_bad_input_is_named(backend, change, message):
    call = PagedAttentionCall(1, 1, 2, 1, 8, 16, "fp32")
    if backend == "cpp":
        able(call)
    q, k, v, blocks, lengths, requests = make(call, [20, 30])
    if "block" in change:
        blocks[0, 0] = change["block"]
    if "lengths" in change:
        lengths = torch.tensor(change["lengths"])
    if "requests" in change:
        requests = torch.tensor(change["requests"])
    with pytest.raises(KernelError, match=message):
        BACKENDS[backend].prepare(call)(change.get("q", q), k, v, blocks, lengths, requests)


def test_what_cannot_be_read_is_refused():
    refuses = BACKENDS["cpp"].refuses
    assert "do not divide heads of 80" in refuses(
        PagedAttentionCall(1, 1, 2, 1, 80, format="bfp12-b32")
    )
    assert "at least 32" in refuses(PagedAttentionCall(1, 1, 2, 1, 64, format="bfp12-b16"))
    assert "multiple of the 2" in refuses(PagedAttentionCall(1, 1, 3, 2, 64, dtype="fp32"))
    assert "takes fp32, bf16" in refuses(PagedAttentionCall(1, 1, 2, 1, 64, dtype="fp16"))
    with pytest.raises(KernelError, match="expected plain, int8, or block floats"):
        kv_format("int3")


def test_numbers_of_a_head_that_lie_apart_are_refused():
    call = PagedAttentionCall(1, 1, 2, 1, 8, 16, "fp32")
    run = able(call)
    q, k, v, blocks, lengths, _ = make(call, [20, 30])
    with pytest.raises(KernelError, match="last stride of 1"):
        run(q, k.repeat(1, 1, 2)[..., ::2], v, blocks, lengths)


def test_fewer_bits_move_fewer_bytes_and_exact_takes_the_invariant():
    plain = PagedAttentionCall(64, 1024, 32, 8, 128)
    few = PagedAttentionCall(64, 1024, 32, 8, 128, format="bfp12-b32")
    assert plain.moved_bytes / few.moved_bytes == pytest.approx(16 / 4.25, rel=0.02)
    if BACKENDS["cpp"].refuses(plain) is None:
        assert dispatch(plain, exact=True).backend == "cpp"


@pytest.mark.parametrize("backend", ["packed", "amx"])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "size"), [(16, 8, 64, 16), (6, 2, 96, 5)])
def test_chunks_of_prompts_by_blocks_equal_the_reference_however_they_are_cut(
    backend, heads, kv_heads, d, size
):
    call = PagedAttentionCall(1, 256, heads, kv_heads, d, size, "bf16", queries=64)
    if BACKENDS[backend].refuses(call):
        pytest.skip(str(BACKENDS[backend].refuses(call)))
    lengths = [*range(1, 41), *range(101, 251), *range(300, 303)]
    requests = [0] * 40 + [1] * 150 + [2] * 3
    args = make(call, lengths, requests, seed=3)
    run = BACKENDS[backend].prepare(call)
    whole = run(*args)
    assert error(call, whole, BACKENDS["reference"].prepare(call)(*args), 1.0) < 1
    q, keys, values, blocks, seen, owner = args
    threads = torch.get_num_threads()
    try:
        for count, first, last in ((1, 0, 193), (3, 7, 60), (2, 100, 101), (1, 33, 192)):
            torch.set_num_threads(count)
            part = run(q[first:last], keys, values, blocks, seen[first:last], owner[first:last])
            assert torch.equal(part, whole[first:last])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["reference", "torch", "cpp"])
@pytest.mark.parametrize(("root", "rows"), [(5, 7), (60, 9), (63, 64), (0, 3), (250, 20)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_branch_of_a_tree_sees_its_own_path_alone(backend, root, rows, dtype):
    """Beside a request without a tree; the oracle picks what is seen, token by token."""
    call = PagedAttentionCall(1, 1, 4, 2, 32, 16, dtype, tree=True)
    if BACKENDS[backend].refuses(call) is not None:
        pytest.skip(str(BACKENDS[backend].refuses(call)))
    source = torch.Generator().manual_seed(root)
    parents = [-1] + [
        int(torch.randint(max(0, row - 4), row, (1,), generator=source)) for row in range(1, rows)
    ]
    bits = []
    for row, parent in enumerate(parents):
        bits.append((bits[parent] if row else 0) | 1 << row)
    lengths = [root + rows] * rows + [90]
    requests = [0] * rows + [1]
    q, k, v, blocks, seen, owner = make(call, lengths, requests, seed=1)
    if backend == "torch":
        k, v = k.nan_to_num(), v.nan_to_num()
    signed = [one - (1 << 64) if one >> 63 else one for one in bits]
    tree = torch.tensor([[root] * rows + [90], [*signed, 0]])
    out = BACKENDS[backend].prepare(call)(q, k, v, blocks, seen, owner, tree)
    wanted = torch.empty_like(q)
    for row in range(rows + 1):
        mine = requests[row]
        visible = [
            token
            for token in range(lengths[row])
            if mine or token < root or bits[row] >> (token - root) & 1
        ]
        slots = [int(blocks[mine, t // 16]) * 16 + t % 16 for t in visible]
        for head in range(4):
            scores = (k[slots, head // 2].double() @ q[row, head].double()) / 32**0.5
            wanted[row, head] = torch.softmax(scores, 0) @ v[slots, head // 2].double()
    assert error(call, out, wanted) < 1


def test_trees_are_named_when_they_are_too_large_and_blocks_refuse_them():
    call = PagedAttentionCall(1, 1, 2, 1, 8, 16, "fp32", tree=True)
    q, k, v, blocks, lengths, _ = make(call, [80, 30])
    tree = torch.tensor([[15, 30], [1, 0]])
    if BACKENDS["cpp"].refuses(call) is None:
        with pytest.raises(
            KernelError, match=r"tree\[0, 0\] = 15: expected a position less than 64"
        ):
            BACKENDS["cpp"].prepare(call)(q, k, v, blocks, lengths, None, tree)
    with pytest.raises(KernelError, match=r"tree: torch\.float32"):
        BACKENDS["reference"].prepare(call)(q, k, v, blocks, lengths, None, tree.float())
    branches = dataclasses.replace(call, head_dim=64, dtype="bf16", queries=64)
    assert all("form a tree" in BACKENDS[name].refuses(branches) for name in ("packed", "amx"))


@pytest.mark.parametrize("backend", ["packed", "amx"])
def test_blocks_refuse_what_they_cannot_do(backend):
    kernel = BACKENDS[backend]
    call = PagedAttentionCall(1, 256, 4, 2, 64, queries=64)
    assert "multiples of 32" in kernel.refuses(dataclasses.replace(call, head_dim=80))
    assert "8 queries" in kernel.refuses(dataclasses.replace(call, queries=1))
    assert "int8" in kernel.refuses(dataclasses.replace(call, format="int8"))
