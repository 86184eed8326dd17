"""Codes against their peers and against every loss; shares against what they were cut from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.inmemory import MEMORY_CODES
from shoal.checkpoint.inmemory import field as field_module
from shoal.checkpoint.inmemory.field import (
    PRODUCTS,
    Bytes,
    add_scaled,
    generator_matrix,
    invert,
    matmul,
)
from shoal.checkpoint.inmemory.layout import BoxEntry, coding_groups, piece_bytes, shares
from shoal.checkpoint.inmemory.stripes import Stripes, pass_on
from shoal.core.errors import CheckpointError, ConfigError
from shoal.core.random import generator

GROUPS: list[tuple[Any, int]] = [
    ("xor", 2),
    ("xor", 3),
    ("xor", 5),
    ({"name": "rs", "losses": 1}, 3),
    ({"name": "rs", "losses": 2}, 5),
    ({"name": "rs", "losses": 3}, 6),
    ("copies", 2),
    ({"name": "copies", "copies": 2}, 4),
]


def drawn(stripes: Stripes) -> list[Bytes]:
    source = generator(0, purpose="pieces")
    return [source.integers(0, 256, stripes.kept, np.uint8) for _ in range(stripes.members)]


def reader(kept: Sequence[Bytes], stripes: Stripes) -> Any:
    def read(member: int, block: int, offset: int, length: int) -> Bytes:
        return kept[member][block * stripes.block + offset :][:length]

    return read


def there(stripes: Stripes, lost: Sequence[int]) -> list[range]:
    return [range(0 if m in lost else stripes.blocks) for m in range(stripes.members)]


@pytest.mark.parametrize(("code", "members"), GROUPS)
def test_every_loss_that_the_code_survives_is_rebuilt(code: Any, members: int) -> None:
    stripes = Stripes.of(MEMORY_CODES.build(code), members, 1500)
    kept = drawn(stripes)
    stripes.encode(kept)
    for count in range(1, stripes.parity + 1):
        for lost in itertools.combinations(range(members), count):
            assert stripes.unrecoverable(there(stripes, lost)) == []
            for member in lost:
                out = np.full(stripes.kept, 7, np.uint8)
                left = there(stripes, lost)
                stripes.rebuild(member, reader(kept, stripes), left, out, bucket=100)
                assert np.array_equal(out, kept[member])


@pytest.mark.parametrize(("code", "members"), GROUPS)
def test_more_losses_are_told_and_nothing_is_made_up(code: Any, members: int) -> None:
    stripes = Stripes.of(MEMORY_CODES.build(code), members, 1500)
    kept = drawn(stripes)
    stripes.encode(kept)
    for lost in itertools.combinations(range(members), stripes.parity + 1):
        gone = stripes.unrecoverable(there(stripes, lost))
        if stripes.blocks == members:
            assert gone, "all stripes meet all members"
        for member in gone:
            with pytest.raises(CheckpointError, match="go back to a checkpoint on the disk"):
                stripes.rebuild(
                    member,
                    reader(kept, stripes),
                    there(stripes, lost),
                    np.empty(stripes.kept, np.uint8),
                    bucket=4096,
                )


@pytest.mark.parametrize(("code", "members"), GROUPS)
def test_the_ring_computes_what_one_process_does(code: Any, members: int) -> None:
    stripes = Stripes.of(MEMORY_CODES.build(code), members, 1500)
    kept = drawn(stripes)
    alone = [x.copy() for x in kept]
    stripes.encode(alone)
    wires: list[Queue[Bytes]] = [Queue() for _ in range(members)]
    sent = [0] * members

    def member(number: int) -> None:
        def exchange(data: Bytes) -> Bytes:
            sent[number] += data.size
            wires[(number + 1) % members].put(data.copy())
            return wires[number].get(timeout=10)

        pass_on(
            stripes,
            kept[number],
            exchange,
            bucket=96,
            scratch=np.empty(96 * stripes.parity, np.uint8),
        )

    with ThreadPoolExecutor(members) as pool:
        list(pool.map(member, range(members)))
    assert all(np.array_equal(x, y) for x, y in zip(kept, alone, strict=True))
    assert len(set(sent)) == 1, "nobody sends more than others"


@pytest.mark.parametrize(("code", "members"), GROUPS)
def test_a_piece_and_its_parity_take_what_the_code_says(code: Any, members: int) -> None:
    part = MEMORY_CODES.build(code)
    stripes = Stripes.of(part, members, 10_000)
    assert stripes.kept / (stripes.block * stripes.data) == pytest.approx(
        1 + part.parity(members) / part.data(members)
    )
    assert 10_000 <= stripes.data * stripes.block < 10_000 + 64 * stripes.data
    for member, number in itertools.product(range(members), range(stripes.blocks)):
        stripe = stripes.stripe(member, number)
        assert (member, number) in stripe
        assert len({m for m, _ in stripe}) == stripes.blocks, "each with another member"


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (3, 2), (5, 3), (10, 4)])
def test_parities_equal_zfec(data: int, parity: int) -> None:
    zfec = pytest.importorskip("zfec")
    blocks = generator(1).integers(0, 256, (data, 333), np.uint8)
    theirs = zfec.Encoder(data, data + parity).encode([row.tobytes() for row in blocks])
    ours = matmul(generator_matrix(data, parity), blocks)
    assert [row.tobytes() for row in ours] == [bytes(x) for x in theirs]


def test_codewords_equal_reedsolo() -> None:
    """Their code is another matrix over the same field: its rows are what it makes of units."""
    reedsolo = pytest.importorskip("reedsolo")
    data, parity = 5, 3
    codec = reedsolo.RSCodec(parity)
    rows = np.array(
        [list(codec.encode(bytes(int(i == j) for i in range(data)))) for j in range(data)], np.uint8
    ).T
    blocks = generator(2).integers(0, 256, (data, 50), np.uint8)
    ours = matmul(rows, blocks)
    for column in range(50):
        assert bytes(ours[:, column]) == bytes(codec.encode(blocks[:, column].tobytes()))
    # Both decode every loss to the same.
    for lost in itertools.combinations(range(data + parity), parity):
        left = [row for row in range(data + parity) if row not in lost]
        assert np.array_equal(matmul(invert(rows[left]), ours[left]), blocks)
        torn = bytearray(ours[:, 0])
        for place in lost:
            torn[place] = 0
        assert bytes(codec.decode(torn, erase_pos=list(lost))[0]) == blocks[:, 0].tobytes()


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255))
def test_it_is_a_field(a: int, b: int, c: int) -> None:
    assert PRODUCTS[a, b] == PRODUCTS[b, a]
    assert PRODUCTS[a, PRODUCTS[b, c]] == PRODUCTS[PRODUCTS[a, b], c]
    assert PRODUCTS[a, b ^ c] == PRODUCTS[a, b] ^ PRODUCTS[a, c]
    assert PRODUCTS[a, 1] == a
    if a:
        assert sorted(PRODUCTS[a]) == list(range(256)), "every element has an inverse"


@pytest.mark.parametrize("built", [True, False])
def test_the_loop_is_the_table(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(field_module, "native", lambda: None)
    source = generator(3)
    for size in (1, 31, 64, 200, 4099):
        x, before = source.integers(0, 256, (2, size), np.uint8)
        for factor in (0, 1, 2, 29, 255):
            out = before.copy()
            add_scaled(out, factor, x)
            assert np.array_equal(out, before ^ PRODUCTS[factor][x])


def test_a_singular_matrix_is_refused() -> None:
    with pytest.raises(CheckpointError, match="do not determine"):
        invert(np.array([[1, 2], [1, 2]], np.uint8))


@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=8),
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=8, max_size=8),
)
def test_shares_hold_every_byte_once(sizes: list[int], holders: list[set[int]]) -> None:
    entries = [BoxEntry(f"t{i}", "uint8", (n,), (0,), (n,), n) for i, n in enumerate(sizes)]
    held = {
        rank: [e for e, h in zip(entries, holders, strict=False) if rank in h] for rank in range(4)
    }
    kept = shares(held)
    for entry, owners in zip(entries, holders, strict=False):
        spans = sorted(
            (s.first, s.last, rank) for rank in kept for s in kept[rank] if s.name == entry.name
        )
        assert {rank for _, _, rank in spans} <= owners, "nobody keeps what it does not hold"
        assert [first for first, _, _ in spans] == [0, *(last for _, last, _ in spans[:-1])]
        assert spans[-1][1] == entry.nbytes
    for rank in kept:
        places = sorted((s.at, s.at + s.last - s.first) for s in kept[rank])
        assert all(a[1] == b[0] for a, b in itertools.pairwise(places))


def test_replicas_keep_equal_shares() -> None:
    entries = [
        BoxEntry(f"t{i}", "float32", (n,), (0,), (n,), 4 * n) for i, n in enumerate((999, 5000))
    ]
    sizes = [piece_bytes(s) for s in shares(dict.fromkeys(range(4), entries)).values()]
    assert sum(sizes) == 4 * 5999
    assert max(sizes) - min(sizes) <= 64 * 4


def test_groups_have_one_member_on_a_node() -> None:
    assert coding_groups(range(4), group=0, ranks_per_node=1) == [[0, 1, 2, 3]]
    assert coding_groups(range(4), group=0, ranks_per_node=2) == [[0, 2], [1, 3]]
    assert coding_groups(range(4), group=2, ranks_per_node=1) == [[0, 1], [2, 3]]
    # tp = 2 inside a node: the replicas of a part are every other rank.
    assert coding_groups([1, 3, 5, 7], group=0, ranks_per_node=2) == [[1, 3, 5, 7]]
    with pytest.raises(ConfigError, match="cannot be put in groups of 3"):
        coding_groups(range(4), group=3, ranks_per_node=1)
    with pytest.raises(ConfigError, match="cannot be put in groups"):
        coding_groups(range(3), group=0, ranks_per_node=2)


def test_wrong_options() -> None:
    for name, option, value in [
        ("xor", "every", 0),
        ("xor", "group", 1),
        ("xor", "group", 256),
        ("xor", "ranks_per_node", 0),
        ("xor", "bucket", 100),
        ("xor", "max_overhead", 0),
        ("rs", "losses", 0),
        ("copies", "copies", 0),
    ]:
        with pytest.raises(ConfigError, match=rf"memory.*{option} = {value}"):
            MEMORY_CODES.build({"name": name, option: value})
    with pytest.raises(ConfigError, match="parity on the node that holds the data"):
        Stripes.of(MEMORY_CODES.build("xor"), 1, 100)
    with pytest.raises(ConfigError, match=r"losses = 2: expected fewer than the 2"):
        Stripes.of(MEMORY_CODES.build("rs"), 2, 100)
    with pytest.raises(ConfigError, match=r"copies = 2: expected fewer than the 2"):
        Stripes.of(MEMORY_CODES.build({"name": "copies", "copies": 2}), 2, 100)
