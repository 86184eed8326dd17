"""Memory rules of sequence parallelism, loads of links, and the advice that follows."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from shoal.claims.lab.thread_links import Links
from shoal.core.errors import PlanError
from shoal.cost.context.traffic import ring_traffic, tokenring_traffic, ulysses_traffic
from shoal.cost.context.ways import (
    Split,
    advise_context,
    attention_memory,
    layer_memory,
    link_bytes,
    mlp_memory,
)
from shoal.ir import Link

SPLITS: tuple[Split, Split] = ("tensor", "sequence")
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


def test_projected_scores() -> None:
    shape: dict[str, Any] = {"batch": 1, "hidden": 768, "heads": 12, "head_dim": 64, "world": 8}
    dense = attention_memory("sequence", length=65536, **shape)
    sparse = attention_memory("sequence", length=65536, projected=64, **shape)
    assert dense.activations > 100 * sparse.activations


def test_a_layer_keeps_what_the_tables_leave_out() -> None:
    shape: dict[str, Any] = {"batch": 4, "length": 512, "hidden": 768, "world": 8}
    heads: dict[str, Any] = {"heads": 16, "head_dim": 48}
    tokens = 4 * 512 * 768
    for split, more in (("sequence", 6 / 8), ("tensor", 4 / 8 + 2)):
        attention = attention_memory(cast(Split, split), **heads, **shape)
        mlp = mlp_memory(cast(Split, split), **shape)
        layer = layer_memory(cast(Split, split), **heads, **shape)
        assert layer.states == attention.states + mlp.states
        assert layer.activations == attention.activations + mlp.activations + more * tokens


def _busiest(messages: list[tuple[int, int, float]], world: int, shape: Any, half: bool) -> float:
    """Bytes on the busiest link, by the ways that linked ranks take."""
    links = Links(latency_s=0, bandwidth=1, shape=shape)
    load: dict[Any, float] = {}
    for source, target, size in messages:
        for link in links.way(source, target, world):
            key = frozenset(link) if half else link
            load[key] = load.get(key, 0.0) + size
    return max(load.values())


def _messages(name: str, world: int, group: int, shape: dict[str, Any]) -> list[Any]:
    """(source, target, bytes) of the forward pass of all ranks."""
    others = [(rank, j) for rank in range(world) for j in range(1, world)]
    if name == "tokenring":
        result = tokenring_traffic(world=world, **shape).forward
        onward, back = (size / (world - 1) for size in result.by_direction(2))
        return [(rank, (rank + 1) % world, onward) for rank, _ in others] + [
            (rank, (rank - j) % world, back) for rank, j in others
        ]
    if name == "zigzag":
        each = ring_traffic(world=world, **shape).forward.num_bytes(2) / (world - 1)
        return [(rank, (rank + 1) % world, each) for rank, _ in others]
    swap = ulysses_traffic(world=group, **shape).forward.num_bytes(2) / (group - 1)
    messages: list[tuple[int, int, float]] = [
        (a + base, b + base, swap)
        for base in range(0, world, group)
        for a, b in itertools.permutations(range(group), 2)
    ]
    heads, dim = shape["heads"] // group, shape["head_dim"]
    whole = ring_traffic(shape["tokens"] * group, heads, heads, dim, world // group)
    passed = float(whole.forward.num_bytes(2))
    return messages + [(r, (r + group) % world, passed) for r in range(world) if group < world]


@pytest.mark.parametrize("duplex", ["full", "half"])
@pytest.mark.parametrize("links", ["mesh", "ring"])
@pytest.mark.parametrize(
    ("name", "world", "group"),
    [(name, n, n) for name in ("tokenring", "zigzag", "ulysses") for n in (2, 3, 4, 5, 8)]
    + [("usp", 8, 4), ("usp", 8, 2), ("usp", 12, 4), ("usp", 4, 2)],
)
def test_loads_are_those_of_the_messages(
    name: str, world: int, group: int, links: Any, duplex: Any
) -> None:
    shape: dict[str, Any] = {"tokens": 4, "head_dim": 2, "heads": 120, "kv_heads": 120}
    messages = _messages(name, world, group, shape)
    result = link_bytes(name, world=world, group=group, links=links, duplex=duplex, **shape)[0]
    assert result == pytest.approx(_busiest(messages, world, links, duplex == "half"))
    sent = sum(size for source, _, size in messages if source == 0)
    port = link_bytes(name, world=world, group=group, duplex=duplex, **shape)[0]
    assert port == pytest.approx(sent * (2 if duplex == "half" else 1))


def test_tokenring_gains_where_returns_have_links_of_their_own() -> None:
    shape: dict[str, Any] = {"tokens": 512, "heads": 32, "head_dim": 128, "world": 8}

    def ratio(kv_heads: int, links: Any, duplex: Any = "full") -> list[float]:
        ring = link_bytes("ring", kv_heads=kv_heads, links=links, duplex=duplex, **shape)
        token = link_bytes("tokenring", kv_heads=kv_heads, links=links, duplex=duplex, **shape)
        return [a / b for a, b in zip(ring, token, strict=True)]

    # 14 chunks against 7 and one return, whose statistics are 4 bytes for 256.
    assert ratio(32, "mesh")[0] == pytest.approx(14 / 8, rel=0.01)
    # Backward, gradients of keys and values travel in fp32, those of queries once each.
    assert ratio(32, "mesh")[1] > 2.5
    assert ratio(32, "switch")[0] < 1
    assert ratio(32, "ring")[0] < 1
    assert ratio(8, "mesh")[0] < 1
    assert ratio(32, "mesh", "half")[0] < ratio(32, "mesh")[0]


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
    result = advise_context(
        heads=5, kv_heads=5, head_dim=128, tokens=8192, world=4, link=FAST, links="mesh"
    )
    assert result[0].name == "tokenring"
    assert any("of zigzag's links" in reason for reason in result[0].reasons)
    impossible = [each for each in result if not each.possible]
    assert {each.name for each in impossible} == {"ulysses", "usp"}
    assert "cannot be split 4 ways" in " ".join(impossible[-1].reasons + impossible[0].reasons)
    assert result[-1] in impossible
    # With few key/value heads they are the smaller load.
    assert _names(heads=5, kv_heads=1)[0] == "zigzag"
    (token,) = [
        each
        for each in advise_context(
            heads=8, kv_heads=1, head_dim=64, tokens=4096, world=8, link=FAST, links="ring"
        )
        if each.name == "tokenring"
    ]
    assert any("2.3 hops" in reason for reason in token.reasons)
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
    result = {each.name: each for each in advise_context(**given)}
    assert result["zigzag"].exposed_s == 0 < result["zigzag"].seconds
    assert result["ring"].exposed_s > result["zigzag"].seconds
    assert any("1.75 times" in reason for reason in result["ring"].reasons)
    full = {each.name: each for each in advise_context(**given, causal=False)}
    assert full["ring"].exposed_s == 0
    assert next(iter(result)) == "zigzag"  # of equals the one with small buffers
    copied = advise_context(heads=8, kv_heads=2, head_dim=64, tokens=4096, world=8, link=FAST)
    (ulysses,) = [each for each in copied if each.name == "ulysses"]
    assert ulysses.options == {"replicate_kv": True}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 8191}, "multiple of cp = 4"),
        ({"kv_heads": 5}, "multiple of the key/value heads"),
        ({"world": 0}, "at least 1"),
        ({"links": "torus"}, "switch, mesh or ring"),
        ({"duplex": "quarter"}, "full or half"),
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
