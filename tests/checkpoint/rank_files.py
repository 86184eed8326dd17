"""Rank files made by hand, and models to cut: what the tests of the universal form start from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.store import Store
from shoal.checkpoint.universal.protocols import Coord, Fragment, RankLayout, Scalar
from shoal.checkpoint.universal.spec import UniversalSpec
from shoal.core.random import generator
from shoal.model.config import ModelConfig
from shoal.parallel.tensor.slices import whole_shapes

Local = tuple[str, str, Coord, torch.Tensor]


@dataclass
class MemoryFile:
    path: Path
    held: list[Fragment | Scalar]

    def contents(self) -> Iterator[Fragment | Scalar]:
        yield from self.held


class Dumps:
    """Rank files whose contents are in memory: one for each rank."""

    def __init__(
        self,
        path: Path,
        layout: RankLayout,
        rules: str | Sequence[Any],
        held: Mapping[Coord, Sequence[Fragment | Scalar]],
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.layout = path, layout
        self.meta: dict[str, Any] = {"step": 3}
        self._spec = UniversalSpec.parse(rules)
        self._files = []
        for number, entries in enumerate(held.values()):
            (path / f"rank{number}").write_bytes(b"x")
            self._files.append(MemoryFile(path / f"rank{number}", list(entries)))

    def files(self) -> list[MemoryFile]:
        return self._files

    def spec(self) -> UniversalSpec:
        return self._spec


def rank_files(
    locals_: Sequence[Local], dp: int = 1, cuts: Sequence[float] = ()
) -> dict[Coord, list[Fragment | Scalar]]:
    """Each local tensor cut into ``dp`` runs, at the given places of its flat elements."""
    files: dict[Coord, list[Fragment | Scalar]] = {}
    for name, key, at, tensor in locals_:
        flat = tensor.reshape(-1)
        places = sorted(int(cut * flat.numel()) for cut in cuts) or [
            flat.numel() * n // dp for n in range(1, dp)
        ]
        edges = [0, *places, flat.numel()]
        for rank, (start, stop) in enumerate(itertools.pairwise(edges)):
            where = at._replace(dp=rank)
            files.setdefault(where, []).append(
                Fragment(name, key, where, tuple(tensor.shape), start, flat[start:stop])
            )
    return files


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "family": "llama",
            "vocab_size": 29,
            "hidden": 8,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 2,
            "ffn_hidden": 12,
            "max_position": 32,
            **changes,
        }
    )


def state_of(of: ModelConfig, seed: int = 0, moments: int = 2) -> dict[str, torch.Tensor]:
    """Weights, moments and a step of every parameter."""
    state = {}
    for name, shape in whole_shapes(of).items():
        keys = [f"optimizer.{name}.{key}" for key in ("exp_avg", "exp_avg_sq")[:moments]]
        for place in (f"model.{name}", *keys):
            values = generator(seed, purpose=place).standard_normal(math.prod(shape))
            state[place] = torch.from_numpy(values).float().reshape(shape)
        state[f"optimizer.{name}.step"] = torch.tensor(7.0)
    return state


def saved(root: Path, of: ModelConfig, seed: int = 0, step: int = 7, moments: int = 2) -> Path:
    """A store with one step of a model."""
    meta = {"model": of.model_dump(mode="json"), "run": {"data": "x", "seed": 1}}
    Store(root).save(step, state_of(of, seed, moments), meta)
    return root
