"""What methods share that change linear layers: their targets, and counts from a shape alone.

A target is a linear layer by the name that Hugging Face gives it, such as
``model.layers.0.self_attn.q_proj``; where several lie in one matrix, it is some of its rows.
"""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn

    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart

ATTENTION = "*.q_proj|*.v_proj"
EVERY = "*.q_proj|*.k_proj|*.v_proj|*.o_proj|*.gate_proj|*.up_proj|*.down_proj"


def matches(name: str, targets: str) -> bool:
    """Whether a name fits one of the patterns joined by a bar; a bare leaf fits at any depth."""
    return any(
        fnmatch.fnmatchcase(name, word) or name.endswith(f".{word}")
        for word in (piece.strip() for piece in targets.split("|"))
        if word
    )


def shape_sites(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of the linear layers of all blocks; those of experts are none."""
    width, heads = shape.hidden, shape.head_dim
    query, key, ffn = shape.num_heads * heads, shape.num_kv_heads * heads, shape.ffn_hidden
    every = [("q", query, width), ("k", key, width), ("v", key, width), ("o", width, query)]
    dense = [("gate", ffn, width)] * shape.gated + [("up", ffn, width), ("down", width, ffn)]
    for layer in range(shape.num_layers):
        for letter, rows, columns in every:
            yield f"model.layers.{layer}.self_attn.{letter}_proj", rows, columns
        if not shape.num_experts or layer < shape.num_dense_layers:
            for letter, rows, columns in dense:
                yield f"model.layers.{layer}.mlp.{letter}_proj", rows, columns


class SiteMethod:
    """Base of the methods that put a small part beside each of some linear layers.

    Args:
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    name: ClassVar[str]
    mergeable: ClassVar[bool] = True

    # Fields of the parts, which are dataclasses.
    targets: str

    @abstractmethod
    def count(self, rows: int, columns: int) -> float:
        """Parameters that are trained for one matrix [rows, columns]."""

    def parameters(self, shape: ModelShape) -> float:
        return sum(self.count(rows, columns) for rows, columns in self.targeted(shape))

    def targeted(self, shape: ModelShape) -> list[tuple[int, int]]:
        """(rows, columns) of the matrices of the shape that the targets match."""
        return [
            (rows, columns)
            for name, rows, columns in shape_sites(shape)
            if matches(name, self.targets)
        ]

    @abstractmethod
    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        """The part for one site."""

    def inject(
        self, model: nn.Module, targets: str | None = None, *, seed: int = 0
    ) -> ModelPeftHandle:
        from shoal.train.peft.run.handle import ModelPeftHandle
        from shoal.train.peft.run.sites import find_sites

        handle = ModelPeftHandle(
            model, self.name, self, targets or self.targets, mergeable=self.mergeable
        )
        sites = find_sites(model, targets or self.targets, f"finetune.{self.name}.targets")
        with handle.building():
            self.prepare(handle, sites, seed)
            for site in sites:
                handle.put(site, self.place(handle, site, seed))
        return handle

    def prepare(self, handle: ModelPeftHandle, sites: list[Site], seed: int) -> None:
        """What is done once, before the sites are filled."""
