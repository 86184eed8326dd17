"""What an attention layer puts on the wire, in elements and bytes of one rank.

Numbers of the inputs' own type are ``data``; statistics and gradients that are summed on
their way are ``wide``: 4 bytes an element (8 in fp64), whatever the type of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sent", "Traffic", "wide_bytes"]


def wide_bytes(itemsize: int) -> int:
    """Bytes of a wide element beside inputs of ``itemsize`` bytes."""
    return max(itemsize, 4)


class Sent(NamedTuple):
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
        onward, back = self.by_direction(itemsize)
        return onward + back

    def by_direction(self, itemsize: int) -> tuple[int, int]:
        """Bytes sent onward and bytes sent back."""
        wide = wide_bytes(itemsize)
        return (
            self.data * itemsize + self.wide * wide,
            self.returned * itemsize + self.returned_wide * wide,
        )


class Traffic(NamedTuple):
    """What one rank sends for one layer.

    Args:
        forward: in the forward pass.
        backward: in the backward pass.
        messages: messages that one rank sends one after another, in both passes.
        hidden: whether they travel while blocks are computed.
    """

    forward: Sent
    backward: Sent
    messages: int
    hidden: bool = True
