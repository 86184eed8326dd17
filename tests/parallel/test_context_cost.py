"""Estimates of context parallelism: bytes of the closed forms, seconds not hidden."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.parts import table
from shoal.cost.gpu.device import CALIBRATED
from shoal.ir import Device, Link, Machine, MemoryTier, ModelShape, TrainJob, Work

SHAPE = ModelShape(
    name="small",
    num_layers=6,
    hidden=64,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_hidden=128,
    vocab_size=256,
)


def _machine(kind: str, **link: float) -> Machine:
    return Machine(
        name="m",
        devices_per_node=8 if kind == "gpu" else 1,
        device=Device(
            name="d",
            kind=kind,
            num_cores=8,
            matmul_flops={"bf16": 1e12, "fp32": 1e12},
            memory=(MemoryTier(name="dram", capacity_bytes=2**33, read_bandwidth=1e10),),
        ),
        links=(
            Link(
                scope="device" if kind == "gpu" else "loopback",
                bandwidth=link.get("bandwidth", 1e9),
                latency_s=link.get("latency_s", 1e-6),
            ),
        ),
    )


def _work(context: Any, cp: int = 4, **parallel: Any) -> Work:
    job = TrainJob(
        model="small",
        seq_len=256,
        global_batch=4,
        microbatch=1,
        precision="bf16",
        parallel={"cp": cp, "context": context, **parallel},
    )
    return Work(shape=SHAPE, job=job)


@pytest.mark.parametrize("name", list(table("context")))
def test_bytes_are_those_of_the_closed_form(name: str) -> None:
    part = table("context").build(name)
    estimate = part.estimate(_work(name), _machine("gpu"))
    form = part.traffic(4 * 256 // 4, 8, 4, 8, 4)
    sent = 6 * (form.forward.num_bytes(2) + form.backward.num_bytes(2))
    assert estimate.wire_bytes == {"device": sent}
    assert estimate.terms_s == {"collective": estimate.step_s.value}
    # Of two tensor-parallel ranks each has half of the heads; of two stages, of the layers.
    split = part.estimate(_work(name, tp=2, pp=2), _machine("gpu"))
    halved = part.traffic(4 * 256 // 4, 4, 2, 8, 4)
    assert split.wire_bytes["device"] == 3 * (
        halved.forward.num_bytes(2) + halved.backward.num_bytes(2)
    )
    alone = part.estimate(_work(name, cp=1), _machine("gpu"))
    assert alone.step_s.value == 0
    assert alone.wire_bytes == {}


def test_seconds_are_what_blocks_do_not_hide() -> None:
    part = table("context").build("zigzag")
    cpu = part.estimate(_work("zigzag"), _machine("cpu", latency_s=0))
    assert cpu.step_s.value == pytest.approx(cpu.wire_bytes["loopback"] / 1e9)
    slow = part.estimate(_work("zigzag"), _machine("gpu", bandwidth=1e6, latency_s=0))
    sent = slow.wire_bytes["device"] / (CALIBRATED.wire * 1e6)
    assert 0.5 * sent < slow.step_s.value < sent
    fast = part.estimate(_work("zigzag"), _machine("gpu", bandwidth=1e12, latency_s=1e-9))
    assert fast.step_s.value == pytest.approx(6 * 1e-9)
    exposed = table("context").build("ulysses").estimate(_work("ulysses"), _machine("gpu"))
    assert exposed.step_s.value >= exposed.wire_bytes["device"] / 1e9
