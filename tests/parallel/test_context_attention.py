"""Every context-parallel part equals full attention, and sends what its closed form says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import ConfigError
from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.ir.mask import Mask

PARTS: dict[str, Any] = {
    "zigzag": "zigzag",
    "ring": "ring",
    "rsa": "rsa",
    "tokenring": "tokenring",
    "all_gather": "all_gather",
    "ulysses": {"name": "ulysses", "replicate_kv": True},
    "usp": {"name": "usp", "replicate_kv": True},
    "usp4": {"name": "usp", "ulysses": 4, "replicate_kv": True},
    "double_ring": "double_ring",
    "double_ring4": {"name": "double_ring", "inner": 4},
}
# World sizes that four heads and groups of two or four can share, besides 1.
WORLDS = {
    "ulysses": [1, 2, 4],
    "usp": [1, 4, 8],
    "usp4": [8],
    "double_ring": [1, 4, 8],
    "double_ring4": [8],
}
LENGTH = 80
CASES = [(part, world) for part in PARTS for world in WORLDS.get(part, [1, 2, 5, 8])]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _inputs(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, dtype: torch.dtype
) -> list[Tensor]:
    rng = torch.Generator().manual_seed(5)
    shapes = [(batch, heads, length, dim)] + [(batch, kv_heads, length, dim)] * 2
    shapes.append(shapes[0])
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def _full(inputs: list[Tensor], masks: Sequence[Mask]) -> list[Tensor]:
    """Output and gradients of plain attention in float64, by autograd."""
    q, k, v, grad = (x.double() for x in inputs)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = torch.from_numpy(np.stack([mask.dense() for mask in masks])).unsqueeze(1)
    scores = (q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~seen, -1e300), -1) * seen
    out = weights @ values
    torch.autograd.backward(out, grad)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def _run(
    choice: Any, world: int, inputs: list[Tensor], masks: Sequence[Mask], meter: Meter | None = None
) -> list[Tensor]:
    """Output and gradients of the part, gathered from all ranks."""
    part = table("context").build(choice)
    positions = [torch.from_numpy(x) for x in part.positions(inputs[0].shape[2], world)]

    def rank(comm: ThreadComm) -> list[Tensor]:
        q, k, v, grad = (x[:, :, positions[comm.rank]] for x in inputs)
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = part.attend(q, k, v, masks, comm)
        assert out.dtype == q.dtype
        out.backward(grad)
        return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]

    ranks = run_ranks(world, rank, meter=meter)
    whole = [torch.empty_like(inputs[i]) for i in (0, 0, 1, 2)]
    for places, tensors in zip(positions, ranks, strict=True):
        for total, piece in zip(whole, tensors, strict=True):
            total[:, :, places] = piece
    return whole


def _sent(meter: Meter) -> dict[str, float]:
    """Bytes on the wire by tag, all ranks."""
    values: dict[str, float] = {}
    for name, value in meter.totals().items():
        if name.startswith("wire_bytes"):
            tag = name.split("tag=")[1].split(",")[0].rstrip("}")
            values[tag] = values.get(tag, 0.0) + value
    return values


def _masks(length: int) -> dict[str, list[Mask]]:
    third = length // 3
    rows = [
        np.repeat([0, 1, 2], [third, 1, length - third - 1]),
        np.repeat([5, 4], [length - 2, 2]),
    ]
    return {
        "causal": [Mask.causal(length)],
        "full": [Mask.full(length)],
        "document": [Mask.document(ids) for ids in rows],
        "full_document": [Mask.document(rows[0], causal=False), Mask.causal(length)],
        "sliding": [Mask.sliding(length, 5)],
        "wide_sliding": [Mask.sliding(length, length // 2, causal=False)],
        "padded": [Mask.padded(length, length // 2 + 1)],
        "padded_full": [Mask.padded(length, length // 2 + 1, causal=False)],
        "blocks": [Mask.random_blocks(length, 4, 0.2, 1)],
        "nothing": [Mask.padded(length, 0)],
    }


@pytest.mark.parametrize(
    ("part", "world", "mask"),
    [
        (part, world, mask)
        for part, world in CASES
        for i, mask in enumerate(_masks(LENGTH))
        if (i + world) % 3 == 0 or world in (4, 5)
    ],
)
def test_a_part_is_full_attention(part: str, world: int, mask: str) -> None:
    masks = _masks(LENGTH)[mask]
    # Multi-head and grouped queries 4:1 take turns.
    kv_heads = 4 if (len(mask) + world) % 2 else 1
    inputs = _inputs(2, 4, kv_heads, LENGTH, 8, torch.float64)
    result = _run(PARTS[part], world, inputs, masks)
    for got, expected in zip(result, _full(inputs, masks), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("part", ["zigzag", "rsa", "tokenring", "all_gather"])
@pytest.mark.parametrize("world", [3, 6, 7])
def test_any_number_of_ranks(part: str, world: int) -> None:
    masks = [Mask.causal(84)]
    inputs = _inputs(1, 5, 5, 84, 4, torch.float64)  # five heads: N need not divide them
    result = _run(part, world, inputs, masks)
    for got, expected in zip(result, _full(inputs, masks), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("part", list(PARTS))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=["fp32", "bf16"]
)
def test_narrow_types_are_near(part: str, dtype: torch.dtype, tolerance: float) -> None:
    masks = [Mask.document(np.repeat([0, 1], [30, 50]))]
    inputs = _inputs(1, 4, 2, LENGTH, 16, dtype)
    result = _run(PARTS[part], 4, inputs, masks)
    for got, expected in zip(result, _full(inputs, masks), strict=True):
        assert got.dtype == dtype
        error = (got.double() - expected).norm() / expected.norm()
        assert error <= tolerance


@pytest.mark.parametrize(("part", "world"), CASES)
def test_bytes_are_the_closed_form(part: str, world: int) -> None:
    for dtype, kv_heads in ((torch.float64, 4), (torch.float64, 1), (torch.bfloat16, 2)):
        _check_bytes(part, world, dtype, kv_heads)


def _check_bytes(part: str, world: int, dtype: torch.dtype, kv_heads: int) -> None:
    batch, heads, dim, tokens = 1, 4, 4, LENGTH // world
    chosen, meter = table("context").build(PARTS[part]), Meter()
    inputs = _inputs(batch, heads, kv_heads, LENGTH, dim, dtype)
    _run(PARTS[part], world, inputs, [Mask.full(LENGTH)], meter)
    form = chosen.traffic(batch * tokens, heads, kv_heads, dim, world)
    expected = form.forward.num_bytes(dtype.itemsize) + form.backward.num_bytes(dtype.itemsize)
    assert sum(_sent(meter).values()) == world * expected
    if dtype == torch.float64:
        elements = chosen.wire_elements(batch * tokens, heads, kv_heads, dim, world)
        assert world * sum(elements) * 8 == sum(_sent(meter).values())


def test_formulas_of_the_papers() -> None:
    n, a, kv, d, world = 6, 8, 2, 4, 5  # tokens, heads, key/value heads, head_dim
    hops = world - 1
    build = table("context").build
    assert build("ring").wire_elements(n, a, kv, d, world)[0] == hops * 2 * n * kv * d
    token = build("tokenring").traffic(n, a, kv, d, world)
    assert token.forward.data == hops * n * a * d
    assert token.forward.returned + token.forward.returned_wide == hops * n * (a * d + a)
    swapped = build("ulysses").wire_elements(n, a, kv, d, 2)[0]
    assert swapped == n * (2 * a * d + 2 * kv * d) // 2


def test_tokenring_returns_what_was_seen_alone() -> None:
    # Two documents of half the sequence and zigzag positions: with four ranks every block
    # has something; with one document a chunk, ranks see nothing of each other but chunks.
    world, batch, heads, dim = 4, 1, 2, 4
    inputs = _inputs(batch, heads, heads, LENGTH, dim, torch.float64)
    masks = [Mask.document(np.arange(LENGTH) // (LENGTH // 8))]
    meter = Meter()
    result = _run("tokenring", world, inputs, masks, meter)
    for got, expected in zip(result, _full(inputs, masks), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    sent = _sent(meter)
    assert sent.get("context.out", 0) == sent.get("context.q_grad", 0) == 0
    # The queries go round whoever sees them.
    tokens = LENGTH // world
    assert sent["context.q"] == world * (world - 1) * 3 * tokens * heads * dim * 8


def test_no_gradient_is_needed() -> None:
    inputs = _inputs(1, 4, 4, LENGTH, 8, torch.float64)
    expected = _full(inputs, [Mask.causal(LENGTH)])[0]
    part = table("context").build("zigzag")
    positions = [torch.from_numpy(x) for x in part.positions(LENGTH, 2)]

    def rank(comm: ThreadComm) -> Tensor:
        with torch.no_grad():
            q, k, v = (x[:, :, positions[comm.rank]] for x in inputs[:3])
            tensor: Tensor = part.attend(q, k, v, [Mask.causal(LENGTH)], comm)
        return tensor

    for places, result in zip(positions, run_ranks(2, rank), strict=True):
        torch.testing.assert_close(result, expected[:, :, places])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_scores_are_kept_by_rsa_alone(world: int) -> None:
    heads, dim, tokens = 4, 8, LENGTH // world
    own = 3 * heads * tokens * dim  # queries, keys, values
    expected = {
        "rsa": own + heads * tokens * LENGTH,
        "zigzag": own + heads * tokens * (dim + 1),  # output and statistics
        "all_gather": own + heads * tokens * (dim + 1),
        "tokenring": own + heads * tokens * (dim + 1),
    }
    for name, elements in expected.items():
        part = table("context").build(name)

        def rank(comm: ThreadComm, part: Any = part) -> int:
            saved: list[int] = []

            def pack(x: Tensor) -> Tensor:
                saved.append(x.numel())
                return x

            q, k, v = (torch.zeros(1, heads, tokens, dim, requires_grad=True) for _ in range(3))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                part.attend(q, k, v, [Mask.causal(LENGTH)], comm)
            return sum(saved)

        assert run_ranks(world, rank) == [elements] * world


@pytest.mark.parametrize("world", [2, 4, 8])
def test_balance_of_causal_work(world: int) -> None:
    length = 128 * world
    mask = Mask.causal(length)
    ratios = {}
    for name in ("ring", "zigzag"):
        work = [mask.area(p) for p in table("context").build(name).positions(length, world)]
        ratios[name] = max(work) / (sum(work) / world)
    assert ratios["zigzag"] == 1.0
    assert ratios["ring"] == pytest.approx((2 * world - 1) / world, rel=0.01)


@pytest.mark.parametrize("part", list(PARTS))
def test_positions_are_shared_out(part: str) -> None:
    for world in WORLDS.get(part, [1, 2, 5, 8]):
        positions = table("context").build(PARTS[part]).positions(LENGTH, world)
        assert [len(x) for x in positions] == [LENGTH // world] * world
        assert np.array_equal(np.sort(np.concatenate(positions)), np.arange(LENGTH))


@pytest.mark.parametrize(
    ("choice", "length", "world", "words"),
    [
        ("zigzag", 81, 4, "multiple of 8 for 4 ranks, such as 80 or 88"),
        ("zigzag", 4, 4, "such as 8"),
        ("ring", 81, 4, "multiple of 4 for 4 ranks, such as 80 or 84"),
        ("usp", 82, 4, "multiple of 4 for 4 ranks, such as 80 or 84"),
        ("usp", 84, 3, "divisor of cp = 3"),
        ("double_ring", 84, 3, "divisor of cp = 3"),
        ({"name": "usp", "ulysses": 0}, 80, 4, "at least 1"),
        ({"name": "double_ring", "inner": 0}, 80, 4, "at least 1"),
    ],
)
def test_lengths_and_groups_that_cannot_be(
    choice: Any, length: int, world: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        table("context").build(choice).positions(length, world)


def test_heads_that_cannot_be_split() -> None:
    build = table("context").build
    build("zigzag").check(5, 5, 4)
    build("ulysses").check(8, 2, 2)
    build({"name": "ulysses", "replicate_kv": True}).check(8, 2, 8)
    with pytest.raises(ConfigError, match=r"ranks = 4: expected one of 1, 2, .*replicate_kv"):
        build("ulysses").check(8, 2, 4)
    with pytest.raises(ConfigError, match="zigzag"):
        build("ulysses").check(5, 5, 4)
    with pytest.raises(ConfigError, match=r"usp\.ulysses = 4"):
        build({"name": "usp", "ulysses": 4}).check(8, 2, 8)
    build({"name": "usp", "ulysses": 2}).check(8, 2, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"masks": [Mask.causal(LENGTH // 2)]}, r"shape of the mask = \[40, 40\].*\[80, 80\]"),
        ({"masks": [Mask.causal(LENGTH)] * 3}, "number of masks = 3: expected 1, or one for each"),
        ({"masks": []}, "number of masks = 0"),
        ({"heads": 3}, "K a divisor of H"),
        ({"dtype": torch.float32}, "one type"),
    ],
)
def test_inputs_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    part = table("context").build("zigzag")

    def rank(comm: ThreadComm) -> None:
        q = torch.zeros(2, 4, LENGTH // 2, 8, dtype=torch.float64)
        k = torch.zeros(
            2, change.get("heads", 4), LENGTH // 2, 8, dtype=change.get("dtype", torch.float64)
        )
        part.attend(q, k, k, change.get("masks", [Mask.causal(LENGTH)]), comm)

    with pytest.raises(ConfigError, match=words):
        run_ranks(2, rank)
