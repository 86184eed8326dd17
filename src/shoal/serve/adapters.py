"""Adapters of a model that is served: several in one step, each for the requests that asked for it.

Behind every linear layer of the blocks stands one that adds x A_i B_i to the rows of requests for
adapter i. A step says once whose each row is. Runs of rows for one adapter, as prompts are, are
multiplied by its matrices; single rows of many adapters by the matrices of all of them at once,
with the products that are not a row's own set to zero in between: two products of matrices for any
mixture.

Source: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023, section 4 (segments of rows
gathered by adapter); Hu et al., LoRA, 2021, section 4.2 (switching).

Shapes: N rows of a step, I inputs, O outputs of a site, S adapters in memory, R rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ServeError, ShoalError, require
from shoal.core.parts import table
from shoal.ir import Chunk
from shoal.model.transformer import Transformer

if TYPE_CHECKING:
    from shoal.train.peft.run.sites import Site

__all__ = ["SERVED", "AdapterBank", "pairs_of"]

SERVED = ("lora", "rslora", "lora_fa", "dylora", "adalora", "vera")
"""Methods that are a product of two thin matrices, which is what is served beside others."""

_MODULES = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

# Runs of rows that are multiplied one by one; more of them are multiplied together.
_MOST_RUNS = 3
# A run of so many rows is multiplied by itself: the products of others would be wasted work.
_LONG = 8


@dataclass
class _Rows:
    """Whose each row of a step is.

    Args:
        runs: (first row, behind the last, slot) of rows that have an adapter.
        single: rows that are multiplied together, int64; none where all are in runs.
        mask: [rows, S] 1 where the slot is the row's own.
    """

    runs: list[tuple[int, int, int]]
    single: Tensor | None = None
    mask: Tensor | None = None
    spread: dict[int, Tensor] = field(default_factory=dict)

    def own(self, ranks: int) -> Tensor:
        """The mask, a column for each rank of each site of each slot."""
        assert self.mask is not None
        if ranks not in self.spread:
            self.spread[ranks] = self.mask.repeat_interleave(ranks, 1)
        return self.spread[ranks]


@dataclass
class _Stack:
    """The matrices of all adapters for one module.

    Args:
        down: [S, sites * R, I].
        ups: first row, behind the last, and [S, R, O] of each site.
        rank: R.
    """

    down: Tensor
    ups: list[tuple[int, int, Tensor]]
    rank: int

    def __post_init__(self) -> None:
        # Views that every step wants.
        self.every_down = self.down.flatten(0, 1).t()
        self.every_up = [up.flatten(0, 1) for _, _, up in self.ups]


class _Layered(nn.Module):
    """A linear layer and what adapters add to it.

    Args:
        base: the layer.
        bank: whose rows these are.
        last: it is behind the attention of the last block, where some rows are not needed any more.
    """

    def __init__(self, base: nn.Module, bank: AdapterBank, *, last: bool) -> None:
        super().__init__()
        self.base = base
        self._bank = [bank]  # a plain list: the bank is no module of the model
        self._last = last
        self.stack: _Stack | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[N, I] to [N, rows]."""
        out: Tensor = self.base(x)
        bank = self._bank[0]
        rows = bank.needed if self._last else bank.rows
        if rows is None or self.stack is None:
            return out
        stack = self.stack
        for start, stop, slot in rows.runs:
            _add(out[start:stop], x[start:stop] @ stack.down[slot].t(), stack, slot)
        if rows.single is not None:
            self._mixed(out, x, rows, stack)
        return out

    def _mixed(self, out: Tensor, x: Tensor, rows: _Rows, stack: _Stack) -> None:
        """Add to single rows what is theirs of the products of all adapters."""
        assert rows.single is not None
        every = len(rows.single) == len(x)
        some = x if every else x[rows.single]
        sites = len(stack.ups)
        inner = torch.mm(some, stack.every_down)  # [N, S * sites * R]
        inner.mul_(rows.own(sites * stack.rank))
        for place, (start, stop, _) in enumerate(stack.ups):
            own = inner
            if sites > 1:
                own = inner.view(len(some), -1, sites, stack.rank)[:, :, place].flatten(1)
            if every:
                out[:, start:stop].addmm_(own, stack.every_up[place])
            else:
                out[rows.single, start:stop] += own @ stack.every_up[place]


def _add(out: Tensor, inner: Tensor, stack: _Stack, slot: int) -> None:
    """Add the products of one adapter to some rows."""
    for place, (start, stop, up) in enumerate(stack.ups):
        own = inner[:, place * stack.rank : (place + 1) * stack.rank]
        out[:, start:stop].addmm_(own, up[slot])


Pairs = dict[str, tuple["Site", Tensor, Tensor]]
"""Name of a site -> the site, A [R, I] and B [R, O] with the factor in it."""


def pairs_of(model: Transformer, directory: Path) -> Pairs:
    """The thin matrices of an adapter directory for a model.

    Raises:
        ServeError: the adapter cannot be served beside others, or is of another model.
    """
    from shoal.model.initialise import empty
    from shoal.train.peft import files
    from shoal.train.peft.run.handle import Handle
    from shoal.train.peft.run.low_rank import LowRankPart
    from shoal.train.peft.run.sites import find_sites

    stored = files.read(directory)
    require(
        stored.method.name in SERVED,
        f"{directory}: method",
        stored.method.name,
        expected=f"one of {', '.join(SERVED)}, which are served beside others",
        hint="merge it into a model of its own",
        error=ServeError,
    )
    part: Any = table("peft").build(stored.method, where=str(directory))
    shapes = empty(model.config)
    handle = Handle(shapes, part.name, part, mergeable=True)
    sites = find_sites(shapes, part.targets, f"{directory}: targets")
    part.prepare(handle, sites, 0)
    for site in sites:
        handle.sites[site.name] = site, part.place(handle, site, 0).eval()
    handle.load(stored.state)
    found: Pairs = {}
    weight = model.weight
    with torch.no_grad():
        for site, made in handle.sites.values():
            assert isinstance(made, LowRankPart)
            down, up, scale = made.pair()
            found[site.name] = site, down.to(weight), (up * scale).t().contiguous().to(weight)
    return found


class AdapterBank:
    """The adapters of one model in memory, and whose the rows of the step under way are.

    Args:
        model: as it is served; its linear layers get stand-ins.
        most: adapters at a time.
        max_rank: largest rank of one.

    Attributes:
        rows: of the step under way; None where it needs no adapter.
        needed: of the rows that the step needs behind its last attention.
    """

    def __init__(self, model: Transformer, *, most: int, max_rank: int) -> None:
        self.most, self.max_rank = most, max_rank
        self.rows: _Rows | None = None
        self.needed: _Rows | None = None
        self._model = model
        self._pairs: dict[str, Pairs] = {}
        self._keys: dict[str, str] = {}
        self._slots: dict[str, int] = {}
        self._open: Counter[str] = Counter()
        self._loads = 0
        self._layers: dict[str, _Layered] = {}
        self._known: tuple[list[tuple[int, int]], _Rows] | None = None
        last = len(model.blocks) - 1
        for layer, block in enumerate(model.blocks):
            for path in _MODULES:
                owner, _, leaf = path.partition(".")
                inner = block.get_submodule(owner)
                base = getattr(inner, leaf, None)
                if not isinstance(base, nn.Module):
                    continue  # the matrices of experts are no layers
                behind = layer == last and path != "attention.qkv_proj"
                stand_in = _Layered(base, self, last=behind)
                setattr(inner, leaf, stand_in)
                self._layers[f"blocks.{layer}.{path}"] = stand_in

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters that requests may ask for."""
        return tuple(self._keys)

    def load(self, name: str, directory: Path) -> None:
        """Read an adapter into memory.

        Raises:
            ServeError: the name is taken, there is no room, or it cannot be served.
        """
        require(
            name not in self._keys,
            "adapter",
            name,
            expected="a name that none has",
            hint="unload that one first",
            error=ServeError,
        )
        require(
            len(self._keys) < self.most,
            f"adapter {name!r}: adapters in memory",
            len(self._keys),
            expected=f"fewer than max_adapters = {self.most}",
            hint="unload one first",
            error=ServeError,
        )
        try:
            pairs = pairs_of(self._model, directory)
        except ServeError:
            raise
        except ShoalError as cause:
            raise ServeError(str(cause)) from None
        rank = max(len(down) for _, down, _ in pairs.values())
        require(
            rank <= self.max_rank,
            f"adapter {name!r}: rank",
            rank,
            expected=f"at most max_adapter_rank = {self.max_rank}",
            error=ServeError,
        )
        odd = sorted({s.owner for s, _, _ in pairs.values()} - self._layers.keys())
        if odd:
            raise ServeError(f"adapter {name!r}: changes {odd[0]}, which cannot be served")
        # A later adapter of this name must find nothing of this one in the cache.
        self._loads += 1
        self._keys[name] = f"{name}#{self._loads}"
        self._pairs[self._keys[name]] = pairs
        self._stack()

    def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            ServeError: there is none of that name, or requests for it are open.
        """
        require(
            name in self._keys,
            "adapter",
            name,
            expected=f"one of {', '.join(self._keys) or 'none'}",
            error=ServeError,
        )
        key = self._keys[name]
        require(
            self._open[key] == 0,
            f"adapter {name!r}: open requests",
            self._open[key],
            expected="none",
            hint="wait until they have ended",
            error=ServeError,
        )
        del self._keys[name], self._pairs[key]
        self._stack()

    def take(self, name: str) -> str:
        """The identity of an adapter, for a request that begins.

        Raises:
            ServeError: there is none of that name.
        """
        if name not in self._keys:
            listed = ", ".join(self._keys) or "none"
            raise ServeError(f"adapter = {name!r}: no such adapter; there are {listed}")
        self._open[self._keys[name]] += 1
        return self._keys[name]

    def leave(self, key: str) -> None:
        """A request for this adapter has ended."""
        self._open[key] -= 1

    def _stack(self) -> None:
        """Lay the matrices of all adapters beside each other, module by module."""
        self._slots = {key: slot for slot, key in enumerate(self._pairs)}
        self._known = None
        by_owner: dict[str, dict[str, list[tuple[int, Site, Tensor, Tensor]]]] = {}
        for key, pairs in self._pairs.items():
            for site, down, up in pairs.values():
                sites = by_owner.setdefault(site.owner, {})
                sites.setdefault(site.name, []).append((self._slots[key], site, down, up))
        weight = self._model.weight
        with torch.inference_mode(False):
            for owner, layer in self._layers.items():
                sites = by_owner.get(owner, {})
                layer.stack = None
                if not sites:
                    continue
                every = [one for some in sites.values() for one in some]
                rank = max(len(down) for _, _, down, _ in every)
                columns = every[0][1].columns
                downs = weight.new_zeros(len(self._slots), len(sites), rank, columns)
                ups = []
                for place, some in enumerate(sites.values()):
                    site = some[0][1]
                    stacked = weight.new_zeros(len(self._slots), rank, site.rows)
                    for slot, _, down, up in some:
                        downs[slot, place, : len(down)] = down
                        stacked[slot, : len(up)] = up
                    ups.append((site.start, site.stop, stacked))
                layer.stack = _Stack(downs.flatten(1, 2), ups, rank)

    # ------------------------------------------------------------------ steps

    def begin(self, chunks: Sequence[Chunk]) -> bool:
        """Take in whose the rows of a step are; whether any is an adapter's."""
        self.rows = self.needed = None
        if not any(chunk.request.adapter for chunk in chunks):
            return False
        given = [
            (self._slots.get(chunk.request.adapter or "", -1), chunk.length) for chunk in chunks
        ]
        # From one step of decoding to the next it is mostly the same.
        if self._known is None or self._known[0] != given:
            self._known = given, self._rows(given)
        self.needed = self.rows = self._known[1]
        return True

    def select(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
        """Only these rows are needed behind the last attention."""
        if self.rows is None:
            return
        owner = [
            self._slots.get(chunk.request.adapter or "", -1)
            for chunk in chunks
            for _ in range(chunk.length)
        ]
        self.needed = self._rows([(owner[row], 1) for row in rows])

    def _rows(self, given: Sequence[tuple[int, int]]) -> _Rows:
        """Runs of rows, and which are multiplied together."""
        runs: list[tuple[int, int, int]] = []
        at = 0
        for slot, length in given:
            if runs and runs[-1][2] == slot:
                runs[-1] = runs[-1][0], at + length, slot
            else:
                runs.append((at, at + length, slot))
            at += length
        runs = [run for run in runs if run[2] >= 0]
        if len(runs) <= _MOST_RUNS:
            return _Rows(runs)
        long = [run for run in runs if run[1] - run[0] >= _LONG]
        short = [run for run in runs if run[1] - run[0] < _LONG]
        if not short:
            return _Rows(long)
        places = [row for start, stop, _ in short for row in range(start, stop)]
        slots = [slot for start, stop, slot in short for _ in range(start, stop)]
        weight = self._model.weight
        single = torch.tensor(places, device=weight.device)
        mask = weight.new_zeros(len(places), len(self._slots))
        mask[torch.arange(len(places)), torch.tensor(slots)] = 1.0
        return _Rows(long, single, mask)
