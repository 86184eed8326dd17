"""Products in row tiles: a tile's communication travels while the next tile is computed.

The product of a split linear layer ends in a reduce-scatter (every rank has a summand of every
row) or begins with an all-gather (every rank has some of the rows). Both go round a ring in
steps of one rank's rows, so the product is taken in the same order. Rank r begins with the rows
of rank r + 1 and ends with its own: what it sends on is then what the next rank computes next,
and no two ranks begin with the same rows (the staggered order).

::

    reduce-scatter, 2 ranks     rank 0: rows of 1 | rows of 0      all rows of 1 travel while the
                                rank 1: rows of 0 | rows of 1      rows of 0 are computed

A share is cut in ``tiles`` tiles, so that only the first tile's product, or the last one's
message, is not overlapped. With a product of G seconds and messages of C that is
max(G, G / (world * tiles) + C) instead of G + C.

Source: Pati et al., T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives, 2024; here a program does what its hardware does.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import require
from shoal.parallel.overlap import TILES
from shoal.parallel.tensor.operators import TAG, local_tokens

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm, Pending


def cut(rows: int, tiles: int | None = None) -> list[slice]:
    """``rows`` rows in ``tiles`` tiles that differ by one row at most.

    Args:
        rows: of a rank.
        tiles: None for four, or as many as there are rows.

    Raises:
        ConfigError: fewer rows than tiles.
    """
    if tiles is None:
        tiles = max(1, min(TILES, rows))
    require(tiles >= 1, "overlap.tiles", tiles, expected="at least 1")
    require(
        rows >= tiles,
        "overlap.tiles",
        tiles,
        expected=f"at most the {rows} rows that a rank has",
        hint="use fewer tiles, or larger micro-batches",
    )
    ends = [rows * i // tiles for i in range(tiles + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _receives_first(comm: Comm) -> bool:
    """Whether this rank posts a receive before the send that goes with it.

    Where messages have tags it does: Gloo signals the sender that it may begin, and this must
    not queue behind a tile. Without tags the messages of a pair of ranks go one after the other,
    so of two ranks one must send while the other receives.
    """
    return comm.device == "cpu" or comm.world > 2 or comm.rank == 0


class _Arriving:
    """The rest of a reduce-scatter: own rows to which the last summands are still coming."""

    def __init__(
        self,
        parts: list[tuple[Tensor, Tensor, Pending]],
        sends: list[tuple[Tensor, Pending]],
    ) -> None:
        self._parts, self._sends = parts, sends

    def wait(self) -> None:
        for out, summand, pending in self._parts:
            pending.wait()
            out += summand
        for _, send in self._sends:
            send.wait()
        self._parts, self._sends = [], []


def scattered_product(
    x_NI: Tensor,
    weight_IO: Tensor,
    comm: Comm,
    *,
    tiles: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Pending]:
    """This rank's rows of the sum over the ranks of ``x_NI @ weight_IO``.

    The last rows of the last ranks are zero where the ranks do not divide N. A rank sends
    (world - 1) / world of the product's bytes, as a ring's reduce-scatter does.

    Args:
        x_NI: this rank's [N, I].
        weight_IO: this rank's [I, O].
        comm: the ranks.
        tiles: of a rank's n = ceil(N / world) rows; as for :func:`cut`.
        out: contiguous [n, O] for the result; made if not given.

    Returns:
        [n, O], and what to wait for before it is looked at.

    Raises:
        ConfigError: fewer rows than tiles, or an output of another shape or not contiguous.
    """
    world, rank, width = comm.world, comm.rank, weight_IO.shape[1]
    rows = local_tokens(len(x_NI), world)
    parts = cut(rows, tiles)
    if out is None:
        out = x_NI.new_empty(rows, width)
    require(
        tuple(out.shape) == (rows, width) and out.is_contiguous(),
        "overlap.out",
        f"{list(out.shape)} with strides {list(out.stride())}",
        expected=f"a contiguous [{rows}, {width}]",
    )
    missing = rows * world - len(x_NI)
    x = F.pad(x_NI, (0, 0, 0, missing)) if missing else x_NI
    ahead, behind = (rank - 1) % world, (rank + 1) % world
    early = _receives_first(comm)
    # What the next step adds arrives while this step is computed.
    arrived = [x.new_empty(rows, width) for _ in range(min(2, world - 1))]
    receives: list[list[Pending]] = [[], []]
    sends: list[tuple[Tensor, Pending]] = []
    rest: list[tuple[Tensor, Tensor, Pending]] = []
    for step in range(world):
        chunk, last = (behind + step) % world, step == world - 1
        here = out if last else x.new_empty(rows, width)
        summands = arrived[step % len(arrived)] if step else None
        incoming = receives[step % 2]
        receives[(step + 1) % 2] = []
        for i, part in enumerate(parts):
            buffer = arrived[(step + 1) % len(arrived)][part] if not last else None
            if buffer is not None and early:
                receives[(step + 1) % 2].append(comm.receive(buffer, behind, tag=TAG))
            start = chunk * rows
            torch.mm(x[start + part.start : start + part.stop], weight_IO, out=here[part])
            if summands is not None and last:
                # No rank waits for own rows: the rest of them is computed first.
                rest.append((here[part], summands[part], incoming[i]))
            elif summands is not None:
                incoming[i].wait()
                here[part].add_(summands[part])
            if not last:
                sends.append((here, comm.send(here[part], ahead, tag=TAG)))
            if buffer is not None and not early:
                receives[(step + 1) % 2].append(comm.receive(buffer, behind, tag=TAG))
    return out, _Arriving(rest, sends)


def reduced_product(
    x_NI: Tensor, weight_IO: Tensor, comm: Comm, *, tiles: int | None = None
) -> tuple[Tensor, Pending]:
    """The sum over the ranks of ``x_NI @ weight_IO``, whole on every rank.

    Its reduce-scatter overlaps with the product; only its all-gather is exposed.

    Returns:
        [N, O], equal to the bit on all ranks.

    Raises:
        ConfigError: fewer rows than tiles.
    """
    own_nO, pending = scattered_product(x_NI, weight_IO, comm, tiles=tiles)
    pending.wait()
    whole = own_nO.new_empty(comm.world * len(own_nO), own_nO.shape[1])
    return whole[: len(x_NI)], comm.all_gather(whole, own_nO, tag=TAG)


def gathered_product(
    x_nI: Tensor, weight_IO: Tensor, comm: Comm, total: int, *, tiles: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of all ranks, and their product with this rank's weight.

    The mirror of :func:`scattered_product`: own rows are computed while the next ones come.

    Args:
        x_nI: this rank's rows [n, I], contiguous.
        weight_IO: this rank's [I, O].
        comm: the ranks.
        total: rows N of all ranks together.
        tiles: of a rank's rows; as for :func:`cut`.

    Returns:
        Rows [N, I] and product [N, O].

    Raises:
        ConfigError: fewer rows than tiles, or rows that are not contiguous.
    """
    require(
        x_nI.is_contiguous(),
        "overlap.rows",
        f"{list(x_nI.shape)} with strides {list(x_nI.stride())}",
        expected="contiguous rows",
    )
    world, rank, rows = comm.world, comm.rank, len(x_nI)
    parts = cut(rows, tiles)
    ahead, behind = (rank - 1) % world, (rank + 1) % world
    whole = x_nI.new_empty(world * rows, x_nI.shape[1])
    out = x_nI.new_empty(world * rows, weight_IO.shape[1])
    whole[rank * rows : (rank + 1) * rows] = x_nI

    def place(step: int, part: slice) -> slice:
        start = (rank + step) % world * rows
        return slice(start + part.start, start + part.stop)

    receives: list[list[Pending]] = []
    sends: list[Pending] = []
    for early in (True, False):
        if early == _receives_first(comm):
            # All of them at once: each has its own place, and they come in order.
            receives = [
                [comm.receive(whole[place(step, part)], behind, tag=TAG) for part in parts]
                for step in range(1, world)
            ]
        elif world > 1:
            sends = [comm.send(whole[place(0, part)], ahead, tag=TAG) for part in parts]
    for step in range(world):
        for i, part in enumerate(parts):
            tile = place(step, part)
            if step:
                receives[step - 1][i].wait()
                if step + 1 < world:
                    sends.append(comm.send(whole[tile], ahead, tag=TAG))
            torch.mm(whole[tile], weight_IO, out=out[tile])
    for send in sends:
        send.wait()
    return whole[:total], out[:total]
