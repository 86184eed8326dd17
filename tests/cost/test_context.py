"""Memory rules of sequence parallelism, loads of links, and the advice that follows."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from shoal.core.errors import PlanError
from shoal.cost.context import (
    Links,
    Split,
    advise_context,
    attention_memory,
    largest_batch,
    link_bytes,
    mlp_memory,
)
from shoal.cost.context_traffic import ring_traffic, tokenring_traffic, ulysses_traffic
from shoal.ir import Link

SPLITS: tuple[Split, Split] = ("tensor", "sequence")
SHARED: tuple[Links, Links] = ("half_duplex", "ring")
FAST = Link(scope="device", bandwidth=100e9, latency_s=1e-6)


@pytest.mark.parametrize("world", [2, 4, 64])
@pytest.mark.parametrize("hidden", [768, 1024])
def test_mlp_is_smaller_by_sequence_above_32_h(hidden: int, world: int) -> None:
    for batch, length in itertools.product((1, 4, 47, 48, 49, 64), (512, 1024)):
        tensor, sequence = (
            mlp_memory(split, batch=batch, length=length, hidden=hidden, world=world).total
            for split in SPLITS
        )
        assert (sequence < tensor) == (batch * length > 32 * hidden)


@pytest.mark.parametrize("world", [2, 12, 64])
def test_attention_is_smaller_by_sequence_above_16_a_z(world: int) -> None:
    heads, dim = 12, 64
    for batch in (1, 23, 24, 25, 64):
        tensor, sequence = (
            attention_memory(
                split,
                batch=batch,
                length=512,
                hidden=768,
                heads=heads,
                head_dim=dim,
                world=world,
            ).total
            for split in SPLITS
        )
        assert (sequence < tensor) == (batch * 512 > 16 * heads * dim)


def test_the_largest_batch_and_projected_scores() -> None:
    def at(split: Split, batch: int, world: int = 8) -> Any:
        return mlp_memory(split, batch=batch, length=512, hidden=768, world=world)

    budget = 1e9
    for split in SPLITS:
        most = largest_batch(lambda batch, split=split: at(split, batch), budget)  # type: ignore[misc]
        assert at(split, most).total <= budget < at(split, most + 1).total
    assert largest_batch(lambda batch: at("sequence", batch), 1.0) == 0
    shape: dict[str, Any] = {"batch": 1, "hidden": 768, "heads": 12, "head_dim": 64, "world": 8}
    dense = attention_memory("sequence", length=65536, **shape)
    sparse = attention_memory("sequence", length=65536, projected=64, **shape)
    assert dense.activations > 100 * sparse.activations


def _ring_loads(messages: list[tuple[int, int, float, int]], world: int) -> float:
    """Busiest directed link of a physical ring; messages (source, target, bytes, direction)."""
    load: dict[tuple[int, int], float] = {}
    for source, target, size, direction in messages:
        place = source
        while place != target:
            load[place, direction] = load.get((place, direction), 0.0) + size
            place = (place + direction) % world
    return max(load.values())


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_loads_of_a_physical_ring_are_those_of_its_messages(world: int) -> None:
    shape: dict[str, Any] = {
        "tokens": 4,
        "heads": world,
        "kv_heads": world,
        "head_dim": 2,
        "world": world,
    }
    token = tokenring_traffic(**shape).forward
    onward, back = (size / (world - 1) for size in token.by_direction(2))
    messages = [
        (rank, (rank + 1) % world, onward, 1) for rank in range(world) for _ in range(world - 1)
    ] + [(rank, (rank - j) % world, back, -1) for rank in range(world) for j in range(1, world)]
    assert link_bytes("tokenring", links="ring", **shape)[0] == _ring_loads(messages, world)
    ring = ring_traffic(**shape).forward.num_bytes(2) / (world - 1)
    messages = [(r, (r + 1) % world, ring, 1) for r in range(world) for _ in range(world - 1)]
    assert link_bytes("zigzag", links="ring", **shape)[0] == _ring_loads(messages, world)
    # All-to-all: the shorter way; the opposite rank half each way.
    each = ulysses_traffic(**shape).forward.num_bytes(2) / (world - 1)
    messages = []
    for rank, j in itertools.product(range(world), range(1, world)):
        target = (rank + j) % world
        if world == 2:
            messages.append((rank, target, each, 1 if rank == 0 else -1))
        elif 2 * j == world:
            messages += [(rank, target, each / 2, way) for way in (1, -1)]
        else:
            messages.append((rank, target, each, 1 if 2 * j < world else -1))
    expected = _ring_loads(messages, world)
    assert link_bytes("ulysses", links="ring", **shape)[0] == pytest.approx(expected)


def test_loads_of_usp_on_a_physical_ring() -> None:
    shape: dict[str, Any] = {"tokens": 4, "heads": 4, "kv_heads": 4, "head_dim": 2}
    swap = ulysses_traffic(world=4, **shape).forward.num_bytes(2) / 3
    around = ring_traffic(16, 1, 1, 2, 2).forward.num_bytes(2)
    messages = [
        (a + base, b + base, swap, 1 if b > a else -1)
        for base in (0, 4)
        for a, b in itertools.permutations(range(4), 2)
    ] + [(rank, (rank + 4) % 8, float(around), 1) for rank in range(8)]
    found = link_bytes("usp", world=8, group=4, links="ring", **shape)[0]
    assert found == _ring_loads(messages, 8)


def test_tokenring_halves_the_busier_direction_of_many_heads() -> None:
    shape: dict[str, Any] = {"tokens": 512, "heads": 32, "head_dim": 128, "world": 4}
    ring = link_bytes("ring", kv_heads=32, **shape)
    token = link_bytes("tokenring", kv_heads=32, **shape)
    assert 1.9 < ring[0] / token[0] <= 2.0  # 4 bytes of statistics for 256 of output
    assert ring[1] / token[1] > 2.5  # gradients of keys and values travel in fp32
    # Grouped queries turn it round, half-duplex links and a physical ring too.
    assert (
        link_bytes("ring", kv_heads=4, **shape)[0] < link_bytes("tokenring", kv_heads=4, **shape)[0]
    )
    for links in SHARED:
        there = link_bytes("tokenring", kv_heads=32, links=links, **shape)
        assert there[0] >= link_bytes("ring", kv_heads=32, links=links, **shape)[0]


def _names(**changes: Any) -> list[str]:
    given: dict[str, Any] = {
        "heads": 32,
        "kv_heads": 32,
        "head_dim": 128,
        "tokens": 8192,
        "world": 4,
        "link": FAST,
    }
    return [each.name for each in advise_context(**(given | changes)) if each.possible]


def test_advice_follows_heads_and_links() -> None:
    # Ulysses sends least while there are heads; beyond them it is not possible.
    assert _names()[0] == "ulysses"
    found = advise_context(heads=5, kv_heads=5, head_dim=128, tokens=8192, world=4, link=FAST)
    assert found[0].name == "tokenring"
    impossible = [each for each in found if not each.possible]
    assert {each.name for each in impossible} == {"ulysses", "usp"}
    assert "cannot be split 4 ways" in " ".join(impossible[-1].reasons + impossible[0].reasons)
    assert found[-1] in impossible
    # With few key/value heads they are the smaller load.
    assert _names(heads=5, kv_heads=1)[0] == "zigzag"
    (token,) = [
        each
        for each in advise_context(
            heads=8, kv_heads=1, head_dim=64, tokens=4096, world=8, link=FAST, links="ring"
        )
        if each.name == "tokenring"
    ]
    assert any("4 hops" in reason for reason in token.reasons)
    assert any("grouped queries" in reason for reason in token.reasons)


def test_advice_hides_what_computation_covers() -> None:
    given: dict[str, Any] = {
        "heads": 5,
        "kv_heads": 1,
        "head_dim": 64,
        "tokens": 65536,
        "world": 4,
        "link": FAST,
        "flops_per_s": 1e13,
    }
    found = {each.name: each for each in advise_context(**given)}
    assert found["zigzag"].exposed_s == 0 < found["zigzag"].seconds
    assert found["ring"].exposed_s > found["zigzag"].seconds
    assert any("1.75 times" in reason for reason in found["ring"].reasons)
    full = {each.name: each for each in advise_context(**given, causal=False)}
    assert full["ring"].exposed_s == 0
    assert next(iter(found)) == "zigzag"  # of equals the one with small buffers
    copied = advise_context(heads=8, kv_heads=2, head_dim=64, tokens=4096, world=8, link=FAST)
    (ulysses,) = [each for each in copied if each.name == "ulysses"]
    assert ulysses.options == {"replicate_kv": True}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 8191}, "multiple of cp = 4"),
        ({"kv_heads": 5}, "multiple of the key/value heads"),
        ({"world": 0}, "at least 1"),
        ({"links": "torus"}, "mesh, ring or half_duplex"),
    ],
)
def test_wrong_questions(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        _names(**change)
    with pytest.raises(PlanError, match="sequence or tensor"):
        mlp_memory(cast(Any, "rows"), batch=1, length=1, hidden=1, world=1)
    with pytest.raises(PlanError, match="none with tensor"):
        attention_memory(
            "tensor", batch=1, length=1, hidden=1, heads=1, head_dim=1, world=1, projected=1
        )
