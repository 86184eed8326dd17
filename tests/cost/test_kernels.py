"""Kernel tables: what they say where they were measured, of other devices, and damaged files."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, PlanError
from shoal.cost.gpu.device import gpu_of
from shoal.cost.kernels.bounds import expert_bound_s
from shoal.cost.kernels.serving_engines import ENGINES, serving_engine
from shoal.cost.kernels.tables import VERSION, Grid, read_table, shipped
from shoal.cost.kernels.times import kernel_times, table_of
from shoal.cost.published.devices import gpu
from shoal.cost.shapes import find
from shoal.cost.step_cost.accelerated import AcceleratedStepCost, Formats, ServingSplit
from shoal.machine.described import load, names

TABLES = [
    "a100_sxm",
    "b200_sxm",
    "b300_sxm",
    "gb200",
    "gb300",
    "h100_sxm",
    "h200_sxm",
    "l40s",
    "rtx_pro_6000_server",
]


def test_a_grid_gives_its_points_and_what_lies_between_and_beyond() -> None:
    values = np.log2([[1.0, 4.0], [2.0, 8.0]])  # us = m * k**2 at m, k of 1 and 2
    grid = Grid([[1, 2], [1, 2]], values, (1, 2))
    assert grid.seconds(1, 2) == pytest.approx(4e-6)
    assert grid.seconds(2, 1) == pytest.approx(2e-6)
    assert grid.seconds(math.sqrt(2), math.sqrt(2)) == pytest.approx(2 * math.sqrt(2) * 1e-6)
    assert grid.seconds(8, 4) == pytest.approx(8 * 16 * 1e-6)
    assert grid.seconds(0, 0) == grid.seconds(1, 1)  # the least that a kernel takes


@pytest.mark.parametrize("name", TABLES)
def test_shipped_tables_say_what_they_are_and_how_far_off(name: str) -> None:
    table = shipped(name)
    assert table.device == name
    assert "AIConfigurator" in table.source and "Apache-2.0" in table.source
    assert {one.split("/")[0] for one in table.grids} == {
        "gemm", "decode", "prompt", "latent_decode", "latent_prompt", "collective",
    }  # fmt: skip
    assert table.errors.keys() == {*table.grids, *(f"experts/{one}" for one in table.experts)}
    products = [error for one, error in table.errors.items() if one.startswith("gemm")]
    assert max(products) < 0.05
    assert max(table.errors.values()) < 0.3


def test_products_are_near_their_bound_where_they_are_large() -> None:
    """A large product reaches more than half of the sheet, and never more than all of it."""
    for name in TABLES:
        table = shipped(name)
        seconds = table.grids["gemm/bf16"].seconds(8192, 8192, 8192)
        assert 0.5 < 2 * 8192**3 / seconds / table.flops <= 1.0


def test_a_product_of_one_row_reads_its_weights_from_memory() -> None:
    """Weights that a large cache held while the table was measured are not there in a model."""
    for name in ("L40S", "H100"):
        device = gpu_of(load(name))
        assert kernel_times(device).product("bf16", 1, 4096, 4096) > 2 * 4096**2 / device.stream


def test_another_device_scales_by_its_bound() -> None:
    h100, h200 = gpu("H100-80GB"), gpu("H200")
    own = kernel_times(h100)
    assert own.table.device == "h100_sxm" and kernel_times(h200).table.device == "h200_sxm"
    grid = own.table.grids["gemm/bf16"]
    assert own.product("bf16", 4096, 4096, 4096) == pytest.approx(grid.seconds(4096, 4096, 4096))
    # An H20 has a seventh of the products of an H100.
    slow = gpu_of(load("H100"))
    slow = type(slow)(**{**vars(slow), "name": "H20", "peak": (("bf16", 148e12),)})
    ratio = kernel_times(slow).product("bf16", 8192, 8192, 8192) / own.product(
        "bf16", 8192, 8192, 8192
    )
    assert ratio == pytest.approx(989 / 148, rel=0.03)


def test_every_described_accelerator_has_times() -> None:
    for name in names():
        machine = load(name)
        if machine.device.kind == "gpu":
            times = kernel_times(gpu_of(machine))
            few, many = (times.product("bf16", m, 4096, 4096) for m in (1, 8192))
            assert 0 < few < many < 1
    assert table_of("NVIDIA GeForce RTX 5090") == "rtx_pro_6000_server"
    assert table_of("something new") == "h100_sxm"
    # A probed host has a name of its own; its device says which kernels it has.
    probed = load("RTX-4090").model_copy(update={"name": "canada-3"})
    assert kernel_times(gpu_of(probed)).table.device == "l40s"


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8_block", "nvfp4", "mxfp4", "int8", "int4"])
def test_formats_with_fewer_bits_read_faster(form: str) -> None:
    """A stated format has an effect, also on a device whose table lacks it."""
    for name in ("A100", "H100", "B200"):
        times = kernel_times(gpu_of(load(name)))
        plain = times.product("bf16", 4, 8192, 28672)
        low = times.product(form, 4, 8192, 28672)
        assert low < 0.8 * plain if form != "bf16" else low == plain


def test_experts_grow_with_tokens_and_follow_the_nearest_shape() -> None:
    times = kernel_times(gpu("H200"))
    shape = (7168, 2048, 8, 256, 8)
    seconds = [times.experts("fp8_block", tokens, *shape) for tokens in (1, 16, 256, 4096)]
    assert seconds == sorted(seconds)
    bound = expert_bound_s("fp8_block", 256, *shape, flops=989e12, stream=4.8e12)
    assert bound < seconds[2] < 4 * bound
    near = times.experts("fp8_block", 256, 7000, 2048, 8, 256, 8)
    assert near == pytest.approx(seconds[2], rel=0.1)


def test_collectives_reach_what_their_links_are_known_to_give() -> None:
    # Bus rates of NCCL's own tests: some 230 GB/s on eight A100s, 20 of PCIe 4.
    for device, low, high in (("A100-80GB", 190e9, 260e9), ("H100-80GB", 370e9, 500e9)):
        size = 2.0**28
        seconds = kernel_times(gpu(device)).collective("all_reduce", 8, size)
        assert low < 2 * 7 / 8 * size / seconds < high
    pair = kernel_times(gpu("L40S")).collective("all_reduce", 2, 2.0**28)
    assert 15e9 < 2.0**28 / pair < 25e9


def test_a_chunk_costs_the_pairs_that_it_adds() -> None:
    times = kernel_times(gpu("H100-80GB"))
    whole = times.prompt(128, 32, 8192, 0)
    halves = times.prompt(128, 32, 4096, 0) + times.prompt(128, 32, 4096, 4096)
    assert halves == pytest.approx(whole, rel=0.1)
    # A short one behind many is no slower a pair than the whole, and no faster than alone.
    alone, behind = times.prompt(128, 32, 64, 0), times.prompt(128, 32, 64, 8128)
    assert alone <= behind < 4 * whole / 128


def test_engines_that_fuse_nothing_pass_more_bytes() -> None:
    device, shape = gpu_of(load("RTX-4090")), find("Llama-3.1-8B")
    formats = Formats(dense="q4_0")
    plain = AcceleratedStepCost(device, shape, serving_engine("llamacpp"), formats=formats)
    fused = AcceleratedStepCost(device, shape, serving_engine("shoal"), formats=formats)
    for chunks in ([(1024, 1)], [(0, 512)], [(4096, 512)]):
        assert plain.seconds(chunks) > fused.terms(chunks).memory
    extra = plain.terms([(8192, 512)]).memory - plain.terms([(0, 512)]).memory
    scores = 20.0 * 32 * 32 * 512 * 8192
    assert extra == pytest.approx(scores / (0.85 * 1.008e12), rel=0.01)
    # Units and their clock follow from the description.
    assert device.turns == pytest.approx(128 * 2.52e9, rel=0.01)
    assert not plain.measured


def damaged(path: Path, **changes: Any) -> Path:
    """An H100's table with another header."""
    from importlib import resources

    source = resources.files("shoal.cost.kernels") / "tables" / "h100_sxm.npz"
    with source.open("rb") as file, np.load(file) as arrays:
        parts = {name: arrays[name] for name in arrays.files}
    header = {**json.loads(parts["header"].tobytes()), **changes}
    parts["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, **parts)  # type: ignore[arg-type]
    path.write_bytes(out.getvalue())
    return path


def test_refuses_tables_of_another_version_and_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"other.npz: version 2; this release reads {VERSION}"):
        read_table(damaged(tmp_path / "other.npz", version=2))
    (tmp_path / "text.npz").write_text("no table")
    with pytest.raises(ConfigError, match=r"text.npz: no kernel table"):
        read_table(tmp_path / "text.npz")
    with pytest.raises(ConfigError, match=r"none.npz: no kernel table"):
        read_table(tmp_path / "none.npz")
    objects = tmp_path / "objects.npz"
    np.savez(objects, header=np.array([{"version": 1}], dtype=object))
    with pytest.raises(ConfigError, match=r"objects.npz: no kernel table"):
        read_table(objects)


def test_splits_and_engines_are_checked() -> None:
    with pytest.raises(PlanError, match=r"experts = .1 devices of an expert x 4.: expected 8"):
        ServingSplit(tp=8, expert_tp=1, experts_over=4)
    with pytest.raises(PlanError, match="tp = 3: expected a divisor of the 32 heads"):
        AcceleratedStepCost(gpu("H200"), find("Llama-3.1-8B"), ENGINES["vllm"], ServingSplit(tp=3))
    with pytest.raises(ConfigError, match=r"engine = 'vlm'.*did you mean 'vllm'"):
        serving_engine("vlm")


def test_more_devices_share_a_step() -> None:
    """Tensor parallelism divides kernels and adds sums; replicas divide the cache's reading."""
    shape, device = find("DeepSeek-V3"), gpu("H200")
    formats = Formats("fp8_block", "fp8_block", "fp8")
    chunks = [(4096, 1)] * 256
    one = AcceleratedStepCost(device, shape, ENGINES["sglang"], ServingSplit(), formats).terms(
        chunks
    )
    shared = AcceleratedStepCost(device, shape, ENGINES["sglang"], ServingSplit(tp=8), formats)
    apart = AcceleratedStepCost(
        device, shape, ENGINES["sglang"], ServingSplit(replicas=8, experts_over=8), formats
    )
    assert one.communication == 0 < shared.terms(chunks).communication
    products = [terms.matmul + terms.memory for terms in (one, shared.terms(chunks))]
    assert products[1] < products[0] / 3
    # Latent keys lie on every rank of a layer, but each replica has its own requests' only.
    assert apart.terms(chunks).attention < 0.6 * shared.terms(chunks).attention


# Published or widely reproduced: NVIDIA and SGLang on DeepSeek-V3, 16 H200: 11 to 41 ms a token
# by concurrency; vLLM on Llama-3.1-70B in fp8 on four H100: about 15 ms at small batches.
def test_well_known_steps_are_where_they_are_known_to_be() -> None:
    deepseek = AcceleratedStepCost(
        gpu("H200"),
        find("DeepSeek-V3"),
        ENGINES["sglang"],
        ServingSplit(replicas=16, experts_over=16),
        Formats("fp8_block", "fp8_block", "fp8"),
    )
    for clients in (16, 64, 256):
        assert 0.011 < deepseek.decode_terms(clients, 2048).total < 0.041
    llama = AcceleratedStepCost(
        gpu("H100-80GB"), find("Llama-3.1-70B"), ENGINES["vllm"], ServingSplit(tp=4),
        Formats("fp8", "fp8", "fp8"),
    )  # fmt: skip
    assert 0.009 < llama.decode_terms(8, 1024).total < 0.017
