"""Adapters of a model that is served: several in one step, each for the requests that asked for it.

Behind every linear layer of the blocks stands one that adds x A_i B_i to the rows of requests for
adapter i. A step says once whose each row is. Runs of rows for one adapter, as prompts are, are
multiplied by its matrices; single rows of many adapters by the matrices of all of them at once,
with the products that are not a row's own set to zero in between: two products of matrices for any
mixture.

An adapter that every request asks for can be *merged*: layers with its changes in their weights
take the place of those that it changes, and steps cost what those of the model alone do. The
model's own layers stay beside them, and are back, bit for bit, as soon as anything else is asked
for.

Source: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023, section 4 (segments of rows
gathered by adapter); Hu et al., LoRA, 2021, section 4.2 (switching).

Shapes: N rows of a step, I inputs, O outputs of a site, S adapters in memory, R rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ServeError, ShoalError, require
from shoal.core.parts import table
from shoal.ir import Chunk
from shoal.model.finite import check_finite
from shoal.model.transformer import Transformer
from shoal.serve.adapters.linear import AdapterRows, Layered, Stack

if TYPE_CHECKING:
    from shoal.train.peft.run.sites import Site

SERVED = ("lora", "rslora", "lora_fa", "dylora", "adalora", "vera")
"""Methods that are a product of two thin matrices, which is what is served beside others."""

_MODULES = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

# Runs of rows that are multiplied one by one; more of them are multiplied together.
_MOST_RUNS = 3
# A run of so many rows is multiplied by itself: the products of others would be wasted work.
_LONG = 8


Pairs = dict[str, tuple["Site", Tensor, Tensor]]
"""Name of a site -> the site, A [R, I] and B [R, O] with the factor in it."""


def pairs_of(model: Transformer, directory: Path) -> Pairs:
    """The thin matrices of an adapter directory for a model.

    Raises:
        ServeError: the adapter cannot be served beside others, or is of another model.
    """
    from shoal.model.initialise import empty
    from shoal.train.peft import files
    from shoal.train.peft.run.handle import ModelPeftHandle
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
    handle = ModelPeftHandle(shapes, part.name, part, mergeable=True)
    sites = find_sites(shapes, part.targets, f"{directory}: targets")
    part.prepare(handle, sites, 0)
    for site in sites:
        handle.sites[site.name] = site, part.place(handle, site, 0).eval()
    handle.load(stored.state)
    pairs: Pairs = {}
    weight = model.weight
    with torch.no_grad():
        for site, made in handle.sites.values():
            assert isinstance(made, LowRankPart)
            down, up, scale = made.pair()
            down, up = down.to(weight), (up * scale).t().contiguous().to(weight)
            for value in (down, up):
                check_finite(value, f"{directory}: adapter of {site.name}", error=ServeError)
            pairs[site.name] = site, down, up
    return pairs


class AdapterBank:
    """The adapters of one model in memory, and whose the rows of the step under way are.

    Args:
        model: as it is served; its linear layers get stand-ins.
        most: adapters at a time.
        max_rank: largest rank of one.

    Attributes:
        merged: name of the adapter that is merged into the weights, or None.
        switches: how often one was merged, or taken out again.
        rows: of the step under way; None where it needs no adapter.
        needed: of the rows that the step needs behind its last attention.
    """

    def __init__(self, model: Transformer, *, most: int, max_rank: int) -> None:
        self.most, self.max_rank = most, max_rank
        self.merged: str | None = None
        self.rows: AdapterRows | None = None
        self.needed: AdapterRows | None = None
        self.switches = 0
        self._model = model
        self._pairs: dict[str, Pairs] = {}
        self._keys: dict[str, str] = {}
        self._slots: dict[str, int] = {}
        self._open: Counter[str | None] = Counter()
        self._loads = 0
        self._layers: dict[str, Layered] = {}
        self._known: tuple[list[tuple[int, int]], AdapterRows] | None = None
        last = len(model.blocks) - 1
        for layer, block in enumerate(model.blocks):
            for path in _MODULES:
                owner, _, leaf = path.partition(".")
                inner = block.get_submodule(owner)
                base = getattr(inner, leaf, None)
                if not isinstance(base, nn.Module):
                    continue  # the matrices of experts are no layers
                behind = layer == last and path != "attention.qkv_proj"
                stand_in = Layered(base, self, last=behind)
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
        key = self._keys[name] = f"{name}#{self._loads}"
        self._pairs[key] = pairs
        try:
            self._stack()
        except Exception:  # no memory for it: it was never there
            del self._keys[name], self._pairs[key]
            self._stack()
            raise

    def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            ServeError: there is none of that name, or requests for it are open.
        """
        key = self._key_of(name)
        require(
            self._open[key] == 0,
            f"adapter {name!r}: open requests",
            self._open[key],
            expected="none",
            hint="wait until they have ended",
            error=ServeError,
        )
        if self.merged == name:
            self.unmerge(name)
        del self._keys[name], self._pairs[key]
        self._stack()

    def _key_of(self, name: str) -> str:
        require(
            name in self._keys,
            "adapter",
            name,
            expected=f"one of those in memory: {', '.join(self._keys) or 'none'}",
            error=ServeError,
        )
        return self._keys[name]

    def key_for(self, name: str | None) -> str | None:
        """The identity of an adapter, for a request that arrives; None for the model itself.

        What another adapter is merged into is itself again first.

        Raises:
            ServeError: there is none of that name.
        """
        if name is not None and name not in self._keys:
            listed = ", ".join(self._keys) or "none"
            raise ServeError(f"adapter = {name!r}: no such adapter; there are {listed}")
        if self.merged is not None and name != self.merged:
            self.unmerge(self.merged)
        return None if name is None else self._keys[name]

    def take(self, key: str | None) -> None:
        """A request for this adapter, or for the model itself, begins."""
        self._open[key] += 1

    def leave(self, key: str | None) -> None:
        """A request for this adapter, or for the model itself, has ended."""
        self._open[key] -= 1

    @torch.inference_mode(False)
    def merge(self, name: str) -> None:
        """Put an adapter into the weights; open requests for it go on with them.

        Raises:
            ServeError: there is none of that name, requests for others are open, or the weights
                are in few bits.
        """
        key = self._key_of(name)
        if self.merged == name:
            return
        others = sum(count for other, count in self._open.items() if other != key)
        require(
            others == 0,
            f"adapter {name!r}: open requests for the model itself or for other adapters",
            others,
            expected="none where it is merged",
            hint="wait until they have ended",
            error=ServeError,
        )
        if self.merged is not None:
            self.unmerge(self.merged)
        by_owner: dict[str, list[tuple[Site, Tensor, Tensor]]] = {}
        for site, down, up in self._pairs[key].values():
            by_owner.setdefault(site.owner, []).append((site, down, up))
        made = {owner: self._layers[owner].with_changes(some) for owner, some in by_owner.items()}
        for owner, layer in made.items():
            self._layers[owner].merged = layer
        self.merged = name
        self.switches += 1

    def unmerge(self, name: str) -> None:
        """Compute with the model's own weights again, which are what they were, bit for bit.

        Raises:
            ServeError: this adapter is not merged.
        """
        require(
            self.merged == name,
            "adapter",
            name,
            expected=f"the one that is merged: {self.merged or 'none'}",
            error=ServeError,
        )
        for layer in self._layers.values():
            layer.merged = None
        self.merged = None
        self.switches += 1

    def stats(self) -> dict[str, float]:
        """Gauges of now, and counters since the start, for metrics."""
        return {
            "adapter_merged": float(self.merged is not None),
            "adapter_switches_total": float(self.switches),
        }

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
                layer.stack = Stack(downs.flatten(1, 2), ups, rank)

    # ------------------------------------------------------------------ steps

    def begin(self, chunks: Sequence[Chunk]) -> bool:
        """Take in whose the rows of a step are; whether any is an adapter's."""
        self.rows = self.needed = None
        # Where one is merged, all requests are for it.
        if self.merged is not None or not any(chunk.request.adapter for chunk in chunks):
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

    def _rows(self, given: Sequence[tuple[int, int]]) -> AdapterRows:
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
            return AdapterRows(runs)
        long = [run for run in runs if run[1] - run[0] >= _LONG]
        short = [run for run in runs if run[1] - run[0] < _LONG]
        if not short:
            return AdapterRows(long)
        places = [row for start, stop, _ in short for row in range(start, stop)]
        slots = [slot for start, stop, slot in short for _ in range(start, stop)]
        weight = self._model.weight
        single = torch.tensor(places, device=weight.device)
        mask = torch.ones(len(places), len(self._slots), dtype=torch.bool, device=weight.device)
        mask[torch.arange(len(places)), torch.tensor(slots)] = False
        return AdapterRows(long, single, mask)
