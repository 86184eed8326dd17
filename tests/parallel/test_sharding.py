"""Every sharding part equals one process, and sends the bytes it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.core.errors import ConfigError
from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.parallel.comm.collectives import TorchComm
from shoal.parallel.shard.zero1 import assign

CHOICES = [
    "replicated+adamw",
    "replicated+muon",
    "zero1+adamw",
    "zero1+muon",
    "zero2+adamw",
    "zero3+adamw",
]


def run_ranks(out: Path, world: int, choices: list[str]) -> None:
    program = Path(__file__).with_name("ranks_sharding.py")
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                program,
                out,
                ",".join(choices),
                f"file://{out}/meet-{world}",
            ],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        for rank in range(world)
    ]
    assert [child.wait(timeout=240) for child in children] == [0] * world


def whole(out: Path, choice: str, world: int) -> dict[str, torch.Tensor]:
    """Parameters assembled from all ranks' parts."""
    tensors: dict[str, torch.Tensor] = {}
    for rank in range(world):
        held = load_file(out / f"{choice}-{rank}.safetensors")
        for name, tensor in held.items():
            if name.endswith(("@", "!")) or name == "norms":
                continue
            place = held[f"{name}@"].tolist()
            offset, shape = place[: tensor.dim()], place[tensor.dim() :]
            full = tensors.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))
            full[tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))] = tensor
        tensors["norms"] = held["norms"]
    return tensors


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, CHOICES)
    (tmp_path / "one").mkdir()
    run_ranks(tmp_path / "one", 1, ["replicated+adamw", "replicated+muon"])
    for choice in CHOICES:
        optimizer = choice.partition("+")[2]
        expected = whole(tmp_path / "one", f"replicated+{optimizer}", 1)
        result = whole(tmp_path, choice, 2)
        assert result.keys() == expected.keys()
        # Muon iterates in bf16, so sums in another order differ by its rounding.
        tolerance = 1e-9 if optimizer == "adamw" else 2e-2
        for name, tensor in expected.items():
            assert torch.allclose(result[name], tensor, rtol=tolerance, atol=tolerance), (
                choice,
                name,
            )
    totals = json.loads((tmp_path / "totals-0.json").read_text())
    count = 11 * 6 + 3 * (6 * 6 + 6) + 5
    expected_bytes = {"replicated": 2, "zero1": 3}
    for choice in CHOICES:
        shard = choice.partition("+")[0]
        sent = sum(
            value
            for key, value in totals[choice].items()
            if "tag=gradients" in key or "tag=parameters" in key
        )
        if shard in expected_bytes:
            # 8 bytes a parameter in float64, half of the ring's two passes with two ranks.
            assert sent == expected_bytes[shard] * 8 * count / 2 * 3
        else:
            assert sent > 0
    # Each part of each parameter is written by some rank, whole ones by exactly one.
    for choice in CHOICES:
        ranks = [load_file(tmp_path / f"{choice}-{rank}.safetensors") for rank in range(2)]
        for name in ("embedding.weight", "unused", "blocks.0.weight"):
            writers = sum(int(rank.get(f"{name}!", torch.tensor(0))) for rank in ranks)
            assert writers == (2 if choice.startswith(("zero2", "zero3")) else 1)


def test_what_splits_matrices_refuses_muon() -> None:
    model = torch.nn.Linear(4, 4)
    comm = TorchComm(Meter([]), rank=0, world=1)
    for name in ("zero2", "zero3"):
        with pytest.raises(ConfigError, match="zero1 or replicated"):
            table("shard").build(name).apply(model, comm, whole_matrices=True)
        with pytest.raises(ConfigError, match="there is one"):
            table("shard").build(name).apply(model, comm, whole_matrices=False)


def test_bad_bucket() -> None:
    with pytest.raises(ConfigError, match=r"shard\.replicated\.bucket_mb = 0"):
        table("shard").build({"name": "replicated", "bucket_mb": 0})


def test_assignment_is_balanced_and_total() -> None:
    sizes = {f"p{i}": (i * 7919) % 101 + 1 for i in range(50)}
    owner = assign(sizes, 4)
    assert owner.keys() == sizes.keys()
    loads = [sum(sizes[name] for name in sizes if owner[name] == rank) for rank in range(4)]
    # Graham's bound for longest processing time first.
    assert max(loads) <= (4 / 3) * sum(sizes.values()) / 4 + max(sizes.values())
