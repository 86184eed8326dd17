"""Kernel tables of one's own card: measured, kept, gone on with, and taken before shipped ones."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from own_home import own_home
from shoal.core.errors import ConfigError, MachineError
from shoal.cost.gpu.device import gpu_of
from shoal.cost.kernels.own import own_path, own_table, read_own, sweep_kernels
from shoal.cost.kernels.tables import VERSION
from shoal.cost.kernels.times import kernel_times
from shoal.cost.shapes import resolve
from shoal.cost.step_cost.accelerated import AcceleratedStepCost
from shoal.cost.step_cost.predicted import predicted_step_cost
from shoal.ir import ServeJob
from shoal.machine.described import load, names
from shoal.machine.probes.kernel_torch import kernel
from shoal.machine.protocols import ProbeContext
from shoal.plan.price_study import PriceStudy
from shoal.plan.serving.plans import plan_serve

TINY = {
    "gemm/bf16": [[1, 4, 16], [16, 64], [16, 64]],
    "decode/bf16/64": [[1, 4], [1, 4], [16, 64]],
    "prompt/bf16/64": [[1, 4], [16, 64]],
}
POINTS = 12 + 8 + 4


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A table that was really measured, on the CPU."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("own") / "cpu.npz"
    with ProbeContext() as context:
        first = sweep_kernels(context, budget_s=1e-6, device="cpu", path=path, grids=TINY)
        assert first.done == 1 and first.total == POINTS
        assert not read_own(path)[0].grids  # too little for a grid
        _, before = read_own(path)
        result = sweep_kernels(context, budget_s=60.0, device="cpu", path=path, grids=TINY)
        assert result.done == result.total == POINTS
        assert read_own(path)[1][:1] == before  # it went on
        again = sweep_kernels(context, budget_s=60.0, device="cpu", path=path, grids=TINY)
        assert again.done == POINTS
    return path.read_bytes()


def keep(data: bytes, device: str = "NVIDIA H100 80GB HBM3", **header: Any) -> Path:
    """The measured table as that of a card, with another header."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    head = {**json.loads(kept["header"].tobytes()), "device": device, **header}
    kept["header"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, **kept)
    path = own_path(device)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file.getvalue())
    return path


def test_the_file_is_read_back_by_the_reader_of_shipped_ones(measured: bytes) -> None:
    table, points = read_own(keep(measured))
    assert table.grids.keys() == TINY.keys()
    for point in points:
        assert point.seconds is not None
        assert table.grids[point.name].seconds(*point.sizes) == pytest.approx(
            point.seconds, rel=1e-4
        )
    assert "shoal probe gpu" in table.source and "torch" in table.source
    assert table.header["measured_by"]["date"] and table.flops > 0 and table.stream > 0


def test_it_wins_over_the_shipped_one_of_its_device_alone(measured: bytes) -> None:
    device = gpu_of(load("H100"))
    shipped = kernel_times(device)
    keep(measured)
    own, wrong = own_table(load("H100").device.name)
    assert own is not None and not wrong
    assert own_table("H100 80GB HBM3")[0] is own  # however the name is written
    assert own_table("A100")[0] is None
    times = kernel_times(device, own)
    assert times.product("bf16", 16, 64, 64) == own.grids["gemm/bf16"].seconds(16, 64, 64)
    assert times.decode("bf16", 64, 4, 4, 1, 64) == own.grids["decode/bf16/64"].seconds(4, 4, 64)
    assert times.prompt(64, 4, 64, 0) == own.grids["prompt/bf16/64"].seconds(4, 64)
    # What it does not have is the shipped one's.
    assert times.product("fp8", 16, 64, 64) == shipped.product("fp8", 16, 64, 64)
    assert times.source("gemm") == "own" and times.source("gemm", "fp8") == "h100_sxm"
    assert times.measured


def test_a_described_card_has_the_key_of_its_short_name_and_of_its_driver() -> None:
    for name in names():
        if "NVIDIA" in (written := load(name).device.name):
            assert own_path(written) == own_path(name)
    assert own_path("Tesla V100-SXM2-32GB") == own_path("V100")
    assert own_path("NVIDIA H100 PCIe") != own_path("NVIDIA H100 80GB HBM3")


def test_plans_take_it_and_say_so(measured: bytes) -> None:
    machine, shape = load("H100"), resolve("Qwen3-0.6B")
    job = ServeJob.model_validate({"model": "Qwen3-0.6B", "max_position": 512,
                                   "workload": {"name": "chat", "requests": 4}})  # fmt: skip
    before = plan_serve(job, machine)
    path = keep(measured)
    after = plan_serve(job, machine)
    assert after.predicted != before.predicted
    assert any("your own table" in note and "shoal probe gpu" in note for note in after.notes)
    cost = predicted_step_cost(machine, shape, "bf16")
    assert isinstance(cost, AcceleratedStepCost)
    calls, _ = cost.kernels([(100, 1)] * 4)
    assert {call.source for call in calls} == {"own"}
    study = PriceStudy(model="Qwen3-0.6B", job="serve")
    shown = "\n".join(map(str, study.explain(machine, lambda *_: None).blocks))
    assert "those of `own` on NVIDIA H100" in shown and "measured by shoal probe gpu" in shown
    path.unlink()
    assert plan_serve(job, machine) == before


def test_another_version_is_named_and_the_shipped_one_taken(measured: bytes) -> None:
    machine = load("H100")
    path = keep(measured, version=VERSION + 1)
    own, wrong = own_table(machine.device.name)
    assert own is None and path.name in wrong and f"version {VERSION + 1}" in wrong
    assert "shoal probe gpu" in wrong and "shipped" in wrong
    job = ServeJob.model_validate({"model": "Qwen3-0.6B", "max_position": 512,
                                   "workload": {"name": "chat", "requests": 4}})  # fmt: skip
    plan = plan_serve(job, machine)
    assert any(f"version {VERSION + 1}" in note for note in plan.notes)


@pytest.mark.parametrize(
    "header",
    [
        {"points": None},
        {"points": {"gemm/bf16": [[1, 1, 1, -1.0]]}},
        {"points": {"gemm/bf16": [[0.5, 1, 1, 1e-6]]}},
        {"points": {"gemm/bf16": [[]]}},
        {"measured_by": {"name": "x"}},
        {"measured_by": 3},
        {"axes": {"gemm": [[1, 2]]}},
        {"axes": {**TINY, "gemm/bf16": [[1, 2], [1, 2], [1, 2]]}},
    ],
)
def test_damaged_headers_are_refused(measured: bytes, header: dict[str, Any]) -> None:
    path = keep(measured, **header)
    with pytest.raises(ConfigError, match=path.name):
        read_own(path)
    own, wrong = own_table("H100")
    assert own is None and path.name in wrong


@pytest.mark.parametrize("share", [0.0, 0.1, 0.95])
def test_torn_files_are_refused(measured: bytes, share: float) -> None:
    path = keep(measured)
    whole = path.read_bytes()
    path.write_bytes(whole[: round(share * len(whole))])
    own, wrong = own_table("H100")
    assert own is None and path.name in wrong


def test_a_sweep_of_another_card_is_not_gone_on_with(measured: bytes) -> None:
    path = keep(measured, measured_by={"name": "other", "driver": "", "torch": "1"})
    with ProbeContext() as context, pytest.raises(MachineError, match="name was 'other'"):
        sweep_kernels(context, budget_s=1.0, device="cpu", path=path, grids=TINY)


@pytest.mark.gpu
def test_the_real_card(home: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    grids = {
        "gemm/bf16": [[1, 1024], [1024, 4096], [1024, 4096]],
        "gemm/fp8": [[16, 1024], [1024, 4096], [1024, 4096]],
        "decode/bf16/128": [[1, 8], [1, 64], [128, 4096]],
        "prompt/bf16/128": [[1, 32], [128, 4096]],
    }
    with ProbeContext() as context:
        result = sweep_kernels(context, budget_s=120.0, grids=grids)
    assert result.path.parent == home / "kernels" and result.done == result.total
    table, _ = read_own(result.path)
    gemm = table.grids["gemm/bf16"]
    assert 2 * 1024 * 4096**2 / gemm.seconds(1024, 4096, 4096) > 1e12
    # A product of one row is not paced by the host's launches: it was replayed from a graph.
    assert kernel("gemm/bf16", (1, 1024, 1024), "cuda", repeats=3, most_s=0.1)["replayed"]
    assert table.grids["decode/bf16/128"].seconds(8, 64, 4096) > 0
    name = torch.cuda.get_device_properties(0).name
    assert own_table(name)[0] is not None
