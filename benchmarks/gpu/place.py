"""Where a stage measures, for which machine it predicts, and who measured."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import MachineError
from shoal.cost.gpu.nearest import nearest
from shoal.ir import Machine
from shoal.machine.described import load
from shoal.machine.fingerprint import versions

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """One device.

    Args:
        device: of torch: cuda, or cpu in a dry run, where sizes are tiny.
        machine: that is priced.
        stamp: device, driver, versions, date, and which machine was priced.
        out: where results go.
        scratch: a directory of its own.
    """

    device: str
    machine: Machine
    stamp: dict[str, Any]
    out: Path
    scratch: Path

    @property
    def dry(self) -> bool:
        """Nothing that is measured means anything."""
        return self.device == "cpu"

    def pick(self, full: T, tiny: T) -> T:
        """A size on a GPU, or in a dry run."""
        return tiny if self.dry else full

    def free(self) -> None:
        """Give the memory of a case back."""
        import torch

        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()


def here(out: Path, *, dry: bool = False) -> Place:
    """The GPU of this machine; or its CPU, in a dry run.

    Raises:
        MachineError: torch sees no CUDA device.
    """
    import torch

    scratch = Path(tempfile.mkdtemp(prefix="shoal-gpu-"))
    if dry:
        machine = load("H200")
        stamp = {"device": "cpu, dry run", "torch": torch.__version__}
        return Place("cpu", machine, stamp, out, scratch)
    if not torch.cuda.is_available():
        raise MachineError(
            f"torch {torch.__version__} sees no CUDA device; on a machine without one: "
            "scripts/gpu --dry-run"
        )
    facts = torch.cuda.get_device_properties(0)
    machine, note = nearest(facts.name)
    stamp = {
        "device": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": facts.total_memory,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "versions": {**versions(), "triton": metadata.version("triton")},
        "commit": _output("git", "rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "priced": machine.name,
    }
    if note:
        stamp["note"] = note
        print(note, flush=True)
    return Place("cuda", machine, stamp, out, scratch)


@functools.cache
def _output(*command: str) -> str:
    """The first line that a program prints; unknown where there is none."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0].strip()


def interpreted() -> None:
    """Let Triton interpret its programs on a CPU; before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
