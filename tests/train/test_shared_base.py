"""A frozen base in memory once, for all fine-tuning jobs of a host."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from shoal.core.errors import PlanError, StoreError  # noqa: E402
from shoal.ir import TrainJob, TrainPlan  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.train.build import StoredWeights, weights_of  # noqa: E402
from shoal.train.peft import files  # noqa: E402
from shoal.train.peft.job import check_base  # noqa: E402
from shoal.train.peft.shared import SharedWeights, image_of  # noqa: E402
from shoal.train.run import execute  # noqa: E402
from shoal.train.zoo import random  # noqa: E402


@pytest.fixture
def base(tmp_path: Path) -> Path:
    huggingface.write(tmp_path / "model", random("shoal-0.3m"))
    return tmp_path / "model"


def same(one: Any, other: Any) -> bool:
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_an_image_is_the_model_and_stays_it(base: Path) -> None:
    plain = StoredWeights(base).model()
    shared = weights_of(TrainJob(model=str(base), base="shared", finetune={"name": "lora"}))
    assert isinstance(shared, SharedWeights)
    model = shared.model()
    assert same(model, plain) and model.training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(SharedWeights(base).model(), plain), "what one job writes is its own"
    written = shared.image.stat().st_mtime_ns
    assert image_of(base) == shared.image and shared.image.stat().st_mtime_ns == written
    assert torch.equal(shared.whole("embed.weight"), plain.embed.weight)


def test_another_model_in_the_directory_has_another_image(base: Path) -> None:
    first = SharedWeights(base)
    held = first.model()
    before = {name: p.clone() for name, p in held.named_parameters()}
    shutil.rmtree(base)
    huggingface.write(base, random("shoal-0.3m", seed=1))
    second = SharedWeights(base)
    assert second.image != first.image and not first.image.exists()
    assert same(second.model(), StoredWeights(base).model())
    assert all(torch.equal(p, before[name]) for name, p in held.named_parameters())


def test_a_disk_without_room(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"No space left .* base = own"):
        SharedWeights(base)
    monkeypatch.undo()
    place = SharedWeights(base).image.parent
    assert not [path for path in place.parent.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_shared(base: Path) -> None:
    job = TrainJob(model=str(base), base="shared", finetune={"name": "lora"})
    check_base(job)
    with pytest.raises(PlanError, match="a model directory"):
        check_base(job.model_copy(update={"model": "shoal-0.3m"}))


@contextlib.contextmanager
def job_at(base: Path, how: str, seed: int) -> Iterator[tuple[int, list[float]]]:
    """A job in a process of its own, after its steps: (pid, losses)."""
    script = Path(__file__).with_name("shared_base_job.py")
    command = [sys.executable, str(script), str(base), how, str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.pid, json.loads(process.stdout.readline())
        process.stdin.close()


def memory(pid: int, image: Path) -> tuple[int, int, int]:
    """Bytes of a process: its own alone, and of the image what is its own and its share."""
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    own = share = 0
    for part in Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:"):
        if str(image) in part:
            fields = _fields(part[part.index(str(image)) :].splitlines()[1:])
            own += fields["Private_Clean"] + fields["Private_Dirty"]
            share += fields["Pss"]
    return rollup["Private_Clean"] + rollup["Private_Dirty"], own, share


def _fields(lines: list[str]) -> dict[str, int]:
    pairs = (line.split(":") for line in lines if line.endswith("kB"))
    return {name: 1024 * int(value.split()[0]) for name, value in pairs}


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_a_second_job_adds_its_own_state_alone(tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=256, hidden=512, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64,
        ffn_hidden=1536, max_position=64,
    )  # fmt: skip
    base = tmp_path / "model"
    huggingface.write(base, random(config))
    image = image_of(base)
    size = image.stat().st_size
    with job_at(base, "own", 1) as (pid, want_1):
        alone, _, none = memory(pid, image)
        assert none == 0
    with job_at(base, "own", 2) as (_, want_2):
        assert want_1 != want_2
    with job_at(base, "shared", 1) as (first, got_1), job_at(base, "shared", 2) as (second, got_2):
        assert (got_1, got_2) == (want_1, want_2), "as the jobs alone, bit for bit"
        shares = []
        for pid in (first, second):
            private, own, share = memory(pid, image)
            assert own < 0.01 * size, "no page of the base is a job's own"
            assert private < alone - 0.9 * size
            shares.append(share)
        assert sum(shares) < 1.01 * size, "the base is in memory once"


@pytest.mark.multi
@pytest.mark.slow
def test_runs_on_one_base_are_the_runs_alone(
    make_plan: Callable[..., TrainPlan], base: Path, tmp_path: Path
) -> None:
    plan = make_plan(
        model="shoal-0.3m", steps=4, seq_len=32, finetune={"name": "lora", "r": 4}, threads=1
    )

    def run(name: str, how: str, seed: int) -> dict[str, Any]:
        changes = {"model": str(base), "base": how, "seed": seed}
        job = plan.job.model_copy(update=changes)
        execute(plan.model_copy(update={"job": job}), tmp_path / name)
        return dict(load_file(tmp_path / name / "adapter" / files.WEIGHTS))

    alone = [run(f"own-{seed}", "own", seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda seed: run(f"shared-{seed}", "shared", seed), (1, 2)))
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
