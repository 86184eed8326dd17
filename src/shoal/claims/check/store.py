"""What the processes of a check leave for each other: tensors in safetensors, facts in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.claims.check.compare import Array
from shoal.core.files import write_atomic, write_json

if TYPE_CHECKING:
    from torch import Tensor


class CheckDirectory:
    """The directory of one check."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def settings(self) -> Path:
        """What to check."""
        return self.root / "settings.json"

    @property
    def one(self) -> Path:
        """Facts of the one-process side."""
        return self.root / "one.json"

    def one_tensors(self, step: int) -> Path:
        """Tensors of the one-process side after a step; -1 is before the first."""
        return self.root / f"one-{step}.safetensors"

    def result(self, rank: int) -> Path:
        """Facts of a rank."""
        return self.root / f"rank-{rank}.json"

    def evidence(self, rank: int) -> Path:
        """Tensors of a rank that differ."""
        return self.root / f"rank-{rank}.safetensors"

    def doing(self, who: str) -> Path:
        """What a process is doing: a number that grows, and a line."""
        return self.root / f"doing-{who}"

    def error(self, who: str) -> Path:
        """Why a process ended."""
        return self.root / f"error-{who}.json"

    def stack(self, who: str) -> Path:
        """Where a process was when it was asked."""
        return self.root / f"stack-{who}"

    def log(self, who: str) -> Path:
        """What a process printed."""
        return self.root / f"log-{who}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, widened to float64; complex ones as pairs."""
    import torch
    from safetensors.torch import save

    wide = {
        name: (torch.view_as_real(t) if t.is_complex() else t)
        .detach()
        .to(torch.float64)
        .contiguous()
        .clone()
        for name, t in tensors.items()
    }
    write_atomic(path, save(wide))


def read_tensors(path: Path) -> dict[str, Array]:
    """Read tensors."""
    from safetensors.numpy import load_file

    return {name: np.asarray(x, np.float64) for name, x in load_file(path).items()}


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write facts as JSON."""
    write_json(path, dict(facts))


def read_facts(path: Path) -> dict[str, Any]:
    """Read facts."""
    return dict(json.loads(path.read_text()))
