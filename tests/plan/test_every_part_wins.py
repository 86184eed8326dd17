"""Every part that a plan of training may propose is in the first plan of some job.

``WINS`` is where, and ``NEVER`` says why a part is not proposed. The table of
``docs/how-to/choose-a-split.md`` is these two; record it with ``SHOAL_DOCS_RECORD=1``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.core.parts import table
from shoal.ir import Device, Machine, MemoryTier, TrainJob
from shoal.machine.described import load
from shoal.plan.strategy import PLANNERS

KINDS = ("schedule", "shard", "context", "sync", "placer", "offload", "activation")
PAGE = Path(__file__).parents[2] / "docs/how-to/choose-a-split.md"


class Win(NamedTuple):
    """A job whose first plan has a part.

    Args:
        part: kind and name.
        model: what is trained.
        machine: where, by its name; or GB of one device, its host and its disk.
        batch: sequences of a step.
        length: tokens of a sequence.
        search: options of the planner.
    """

    part: str
    model: str
    machine: str | tuple[int, int, int]
    batch: int
    length: int
    search: str = ""


OFFLOAD, SYNC = "offload=auto", "sync=auto"
WINS = (
    Win("schedule 1f1b", "Llama-3-70B", "24xA100", 32, 8192),
    Win("schedule interleaved", "Llama-2-13b", "16xRTX-4090@ETH10", 64, 2048),
    Win("schedule zb_h1", "Qwen2.5-7B", "4x1xL40S@ETH25", 16, 1024),
    Win("schedule zbv", "Llama-3-70B", "64xA100@IB100", 64, 4096),
    Win("schedule vhalf", "Llama-2-7b", "8x1xRTX-4090@ETH10", 16, 4096),
    Win("schedule vmin", "Llama-2-7b", "4x1xA100-40GB@ETH25", 16, 2048),
    Win("shard replicated", "Qwen3-0.6B", "8xA100", 64, 4096),
    Win("shard zero1", "Llama-3-8B", "8x1xL40S@ETH25", 16, 7168),
    Win("shard zero2", "Qwen3-1.7B", "8xA100", 8, 4096),
    Win("shard zero3", "Llama-3-8B", "8xH100", 64, 4096),
    Win("shard topo3", "Llama-2-13b", "16xH100@IB100", 256, 2048),
    Win("context zigzag", "Qwen2.5-7B", "16xA100@IB100", 2, 65536),
    Win("context tokenring", "SmolLM2-1.7B", "2x1xA100@IB400", 1, 8192),
    Win("context ulysses", "SmolLM2-1.7B", "2x1xA100@IB100", 1, 8192),
    Win("context usp", "Llama-3.1-8B", "16xH100@IB100", 1, 32768),
    Win("context double_ring", "Qwen2.5-7B", "2x8xL40S@ETH100", 1, 32768),
    Win("sync every_step", "Qwen3-0.6B", "8xH100", 64, 4096, SYNC),
    Win("sync co2", "Qwen3-0.6B", "2x1xRTX-4090@ETH10", 8, 2048, SYNC),
    Win("sync local_sgd", "Llama-3.2-1B", "4x1xA100-40GB@ETH10", 16, 2048, SYNC),
    Win("placer owners", "DeepSeek-V2-Lite", "16xH100", 64, 512),
    Win("offload zero_infinity", "Llama-3-8B", "1xRTX-4090", 8, 2048, OFFLOAD),
    Win("offload superpipeline", "Qwen2.5-7B", "1xL40S", 8, 2048, OFFLOAD),
    Win("offload fuyou", "SmolLM2-1.7B", (8, 4, 500), 8, 2048, OFFLOAD),
    Win("offload deep_optimizer_states", "Llama-3.2-1B", "1xRTX-4090", 8, 2048, OFFLOAD),
    Win("activation ssdtrain", "SmolLM2-1.7B", (80, 16, 2000), 8, 2048, OFFLOAD),
)
NEVER = {
    "schedule gpipe": "the bubble of 1f1b, and the activations of all micro-batches",
    "schedule skippipe": "changes what is computed: micro-batches skip stages",
    "shard hybrid": "topo3 has its groups, and divides the optimizer's state over all ranks",
    "context ring": "the messages of zigzag, and unbalanced work under a causal mask",
    "context rsa": "the bytes of ring in twice as many messages",
    "context all_gather": "the bytes of zigzag, and whole sequences of keys and values in memory",
    "sync diloco": "the memory of co2, and waits for averages that co2 sends behind the next round",
    "placer fssdp": "what copies save depends on a routing that no plan knows; state it",
    "activation keep": "what a job has that chooses nothing",
}


def machine_of(where: str | tuple[int, int, int]) -> Machine:
    """A machine by its name, or one device with so many GB of device, host and disk."""
    if isinstance(where, str):
        return load(where)
    sizes = [size * 10**9 for size in where]
    return Machine(
        name="one",
        device=Device(
            name="G",
            kind="gpu",
            matmul_flops={"bf16": 6e13, "fp32": 2e13},
            memory=(
                MemoryTier(name="hbm", capacity_bytes=sizes[0], read_bandwidth=1e12),
                MemoryTier(name="dram", capacity_bytes=sizes[1], read_bandwidth=2e11),
                MemoryTier(
                    name="disk",
                    capacity_bytes=sizes[2],
                    read_bandwidth=6e9,
                    write_bandwidth=4e9,
                ),
            ),
        ),
    )


def chosen(win: Win) -> set[str]:
    """Kinds and names of the parts of the first plan."""
    fields: dict[str, Any] = {"seq_len": win.length, "global_batch": win.batch, "grad_clip": 0}
    job = TrainJob.model_validate({"model": win.model, "steps": 10, **fields})
    option, _, value = win.search.partition("=")
    choice = {"name": "search", **({option: value} if option else {})}
    first = PLANNERS.build(choice).plan(job, machine_of(win.machine))[0]
    assert first.fits, first.why
    split = first.job.parallel
    parts = {
        "schedule": split.schedule if split.pp > 1 else None,
        "shard": first.job.shard,
        "context": split.context if split.cp > 1 else None,
        "sync": first.job.sync,
        "placer": split.placer if split.ep > 1 else None,
        "offload": first.job.offload,
        "activation": first.job.activation,
    }
    return {f"{kind} {part.name}" for kind, part in parts.items() if part is not None}


@pytest.mark.parametrize("win", WINS, ids=lambda win: win.part)
def test_it_is_in_the_first_plan(win: Win) -> None:
    assert win.part in chosen(win)


def test_every_part_wins_or_is_not_proposed() -> None:
    proposed = {f"{kind} {name}" for kind in KINDS for name in table(kind).proposable()}
    every = {f"{kind} {name}" for kind in KINDS for name in table(kind)}
    assert proposed == {win.part for win in WINS}
    assert every - proposed == set(NEVER)


def test_the_page_says_where() -> None:
    text = PAGE.read_text()
    pattern = re.compile(r"(<!-- wins -->\n).*?(\n<!-- /wins -->)", re.DOTALL)
    new = pattern.sub(lambda found: f"{found[1]}\n{written()}\n{found[2]}", text)
    if os.environ.get("SHOAL_DOCS_RECORD"):
        PAGE.write_text(new)
    assert new == text or os.environ.get("SHOAL_DOCS_RECORD")
    assert written() in new


def written() -> str:
    """Both tables in Markdown."""
    lines = ["| Part | Model | Machine | Sequences | Tokens of each | Planner |"]
    lines.append("|---|---|---|---|---|---|")
    for win in WINS:
        where = win.machine
        if not isinstance(where, str):
            where = "one GPU of {} GB, host {} GB, disk {} GB".format(*where)
        option = f"`--set planner.{win.search}`" if win.search else ""
        row = (win.part, win.model, where, str(win.batch), f"{win.length:,}", option)
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "| Not proposed | Why |", "|---|---|"]
    lines += [f"| {part} | {why} |" for part, why in NEVER.items()]
    return "\n".join(lines)
