"""Which blocks of a group are coded together, and where they lie.

A member keeps ``data`` blocks of its own piece and, behind them, ``parity`` blocks for others.
Of ``n`` members there are ``n`` stripes; block ``p`` of member ``i`` belongs to stripe
``(i - p) mod n``, in which it is number ``p``. So no two blocks of a stripe lie with one member,
every block is covered by the parities of its stripe, and all members keep equally much.

While a ring passes sums on, every member does the same: at hop ``p`` it adds its own block ``p``
to what comes from the member before it, or keeps a sum that is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.checkpoint.inmemory.field import Bytes, add_scaled, invert, matmul
from shoal.core.errors import CheckpointError

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.protocols import MemoryCode

_ALIGN = 64


@dataclass(frozen=True)
class Stripes:
    """The stripes of one group.

    Args:
        data: blocks of a stripe that are of the state.
        parity: blocks of a stripe that are computed.
        matrix: rows [data + parity, data].
        block: bytes of a block.
    """

    members: int
    data: int
    parity: int
    matrix: Bytes
    block: int

    @classmethod
    def of(cls, code: MemoryCode, members: int, piece: int) -> Stripes:
        """Stripes for pieces of at most ``piece`` bytes.

        Raises:
            ConfigError: the code cannot serve so many members.
        """
        code.check(members)
        data = code.data(members)
        block = max(1, -(-piece // (data * _ALIGN))) * _ALIGN
        return cls(members, data, code.parity(members), code.matrix(members), block)

    @property
    def blocks(self) -> int:
        """Blocks that a member keeps."""
        return self.data + self.parity

    @property
    def kept(self) -> int:
        """Bytes that a member keeps."""
        return self.blocks * self.block

    def stripe(self, member: int, number: int) -> list[tuple[int, int]]:
        """(member, block) of all blocks of the stripe that a member's block belongs to."""
        first = (member - number) % self.members
        return [((first + p) % self.members, p) for p in range(self.blocks)]

    def encode(self, kept: Sequence[Bytes]) -> None:
        """Fill in the parities of all members at once, where one process has them all."""
        for member in range(self.members):
            for number in range(self.data, self.blocks):
                out = self._block(kept[member], number)
                out[:] = 0
                for other, p in self.stripe(member, number)[: self.data]:
                    add_scaled(out, int(self.matrix[number, p]), self._block(kept[other], p))

    def unrecoverable(self, there: Sequence[Collection[int]]) -> list[int]:
        """Members of whose blocks some can neither be read nor rebuilt.

        Args:
            there: member -> its blocks that can be read.
        """
        lost: set[int] = set()
        for member in range(self.members):
            stripe = self.stripe(member, 0)
            missing = [(m, p) for m, p in stripe if p not in there[m]]
            if len(missing) > self.parity:
                lost |= {other for other, p in missing if p < self.data}
        return sorted(lost)

    def rebuild(
        self,
        member: int,
        read: Callable[[int, int, int, int], Bytes],
        there: Sequence[Collection[int]],
        out: Bytes,
        *,
        bucket: int,
    ) -> None:
        """Restore everything that a lost member kept.

        Args:
            member: the lost one.
            read: bytes of (member, block, offset, length).
            there: member -> its blocks that can be read.
            out: receives the blocks [kept].
            bucket: bytes that are read at a time.

        Raises:
            CheckpointError: too much is lost; nothing wrong is ever written as if it were right.
        """
        for number in range(self.blocks):
            stripe = self.stripe(member, number)
            left = [(m, p) for m, p in stripe if m != member and p in there[m]][: self.data]
            if len(left) < self.data:
                raise CheckpointError(
                    f"of a stripe of {self.blocks} blocks {len(left)} are left and {self.data} "
                    f"are needed: more than {self.parity} members of the group of {self.members} "
                    "are lost; go back to a checkpoint on the disk"
                )
            # The lost block is this sum of those that are left.
            rows = self.matrix[[p for _, p in left]]
            factors = matmul(self.matrix[number : number + 1], invert(rows))[0]
            target = self._block(out, number)
            target[:] = 0
            for start in range(0, self.block, bucket):
                part = target[start : start + bucket]
                for (m, p), factor in zip(left, factors, strict=True):
                    if factor:
                        add_scaled(part, int(factor), read(m, p, start, len(part)))

    def _block(self, kept: Bytes, number: int) -> Bytes:
        return kept[number * self.block : (number + 1) * self.block]


def pass_on(
    stripes: Stripes,
    kept: Bytes,
    exchange: Callable[[Bytes], Bytes],
    *,
    bucket: int,
    scratch: Bytes,
) -> None:
    """One member's part of coding a version, in a ring; all members of the group do it at once.

    Args:
        stripes: of the group.
        kept: what this member keeps [kept]; its parities are written.
        exchange: gives bytes to the next member and returns as many from the one before, which
            may be written to until the next but one are returned.
        bucket: bytes of a block per message.
        scratch: room for the first sums [parity * bucket].
    """
    factors = stripes.matrix[stripes.data :]
    for start in range(0, stripes.block, bucket):
        size = min(bucket, stripes.block - start)
        blocks = [kept[p * stripes.block + start :][:size] for p in range(stripes.blocks)]
        if factors[:, 0].tolist() == [1]:
            sums = blocks[0].reshape(1, size)  # the block is the sum, and goes as it lies
        else:
            sums = scratch[: stripes.parity * size].reshape(-1, size)
            sums[:] = 0
            _add(sums, factors[:, 0], blocks[0])
        for hop in range(1, stripes.blocks):
            sums = exchange(sums.reshape(-1)).reshape(-1, size)
            if hop < stripes.data:
                _add(sums, factors[:, hop], blocks[hop])
            else:
                blocks[hop][:] = sums[0]
                sums = sums[1:]


def _add(sums: Bytes, factors: Bytes, block: Bytes) -> None:
    for total, factor in zip(sums, factors, strict=True):
        add_scaled(total, int(factor), block)
