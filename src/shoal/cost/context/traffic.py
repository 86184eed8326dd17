"""What context-parallel attention puts on the wire: closed forms of one rank and one layer.

Letters: N ranks, n tokens of one rank, a query heads, d = a * head_dim, d_kv the same of the
key/value heads. Numbers of the inputs' own type are ``data``; statistics, and gradients that
are summed on their way, are ``wide``: 4 bytes an element (8 in fp64) whatever the inputs are.

==============  ==========================  ===================================================
part            forward                     backward
==============  ==========================  ===================================================
ring, zigzag,   (N - 1) 2 n d_kv            the same again, and as much in wide gradients
rsa, double_
ring, all_
gather
tokenring       onward (N - 1) n d, back    onward (N - 1) 2 n (d + a),
                (N - 1) n (d + a)           back (N - 1) n d
ulysses         (N - 1) / N n (2 d +        as forward
                2 d_kv)
usp             ulysses of a group, and a   as these
                ring of groups
projected       4 (N - 1) / N k d_kv        as forward
==============  ==========================  ===================================================

The a in the rows of tokenring counts wide elements; projected sends wide ones alone.

Source: Li et al., Sequence Parallelism, 2021; Wang et al., TokenRing, 2024; Jacobs et al.,
DeepSpeed-Ulysses, 2023; Fang and Zhao, USP, 2024.
"""

from __future__ import annotations

from typing import NamedTuple


def wide_bytes(itemsize: int) -> int:
    """Bytes of a wide element beside inputs of ``itemsize`` bytes."""
    return max(itemsize, 4)


class SentElements(NamedTuple):
    """Elements that one rank sends in one pass.

    Args:
        data: onward, in the type of the inputs.
        wide: onward, at least fp32.
        returned: the other way, in the type of the inputs.
        returned_wide: the other way, at least fp32.
    """

    data: int = 0
    wide: int = 0
    returned: int = 0
    returned_wide: int = 0

    @property
    def elements(self) -> int:
        """All of them."""
        return sum(self)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes sent, inputs having ``itemsize`` bytes."""
        return sum(self.by_direction(itemsize))

    def by_direction(self, itemsize: int) -> tuple[int, int]:
        """Bytes sent onward and bytes sent back."""
        wide = wide_bytes(itemsize)
        return (
            self.data * itemsize + self.wide * wide,
            self.returned * itemsize + self.returned_wide * wide,
        )


class ContextTraffic(NamedTuple):
    """What one rank sends for one layer.

    Args:
        forward: in the forward pass.
        backward: in the backward pass.
        messages: messages that one rank sends one after another, in both passes.
        hidden: whether communication overlaps with the computation of blocks.
    """

    forward: SentElements
    backward: SentElements
    messages: int
    hidden: bool = True


def ring_traffic(
    tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
) -> ContextTraffic:
    """Chunks of keys and values go round, and in the backward pass their gradients.

    A gradient starts at the first rank after its owner, which adds its own share at home, so
    it makes N - 1 hops as the chunk does.
    """
    del heads
    moved = (world - 1) * 2 * tokens * kv_heads * head_dim
    return ContextTraffic(SentElements(moved), SentElements(moved, moved), messages=3 * (world - 1))


def tokenring_traffic(
    tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
) -> ContextTraffic:
    """Queries go onward, results come back; keys and values stay."""
    del kv_heads
    moved = (world - 1) * tokens * heads * head_dim
    statistics = (world - 1) * tokens * heads
    return ContextTraffic(
        SentElements(moved, 0, moved, statistics),
        SentElements(2 * moved, 2 * statistics, moved),
        messages=4 * (world - 1),
    )


def ulysses_traffic(
    tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
) -> ContextTraffic:
    """Heads are swapped for sequence and the output back; nothing is computed meanwhile.

    With fewer key/value heads than ranks each rank gets one, which several ranks get.
    """
    kv_each = max(1, kv_heads // world)
    moved = (world - 1) * tokens * head_dim * (2 * (heads // world) + 2 * kv_each)
    return ContextTraffic(
        SentElements(moved), SentElements(moved), messages=4 * (world - 1), hidden=False
    )


def usp_traffic(
    tokens: int, heads: int, kv_heads: int, head_dim: int, world: int, group: int
) -> ContextTraffic:
    """Ulysses among ``group`` ranks and a ring of ``world / group`` groups."""
    swap = ulysses_traffic(tokens, heads, kv_heads, head_dim, group)
    kv_each = max(1, kv_heads // group)
    ring = ring_traffic(tokens * group, heads // group, kv_each, head_dim, world // group)
    return ContextTraffic(
        SentElements(swap.forward.data + ring.forward.data),
        SentElements(swap.backward.data + ring.backward.data, ring.backward.wide),
        messages=swap.messages + ring.messages,
        hidden=world > group,
    )
