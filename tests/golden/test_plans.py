"""What ``shoal plan train`` and ``shoal plan serve`` decide and predict, over described machines.

Each command runs with a home of its own and without a probe or a score, so nothing of this host
is in an answer. Of the ranked plans the first is kept whole, of the others how their jobs differ
and their headline figures. The machine and the shape are input and are left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from recorded import settle

import shoal_command

pytestmark = pytest.mark.slow

# Of a number on another kind of CPU than the recording's.
TOLERANCE = 1e-9
# Characters of a text that is kept as it is; of a longer one the length and a digest.
LONGEST = 3000
# Variables that change how output is written; those of SHOAL_ are settings of a job.
UNSET = ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")

# Name -> text of the files that commands read, in the directory where they run.
FILES = {
    "groups.yaml": """\
job: train
model: Llama-2-13b
seq_len: 4096
global_batch: 256
tokens: 2000000000
parallel: {dp: 16, tp: 1}
shard: zero3
microbatch: 2
layers:
  - {blocks: 24, recompute: full}
  - {blocks: 16, dp: 4, tp: 4}
""",
    "drafter.yaml": """\
job: drafter
model: Qwen3-0.6B
drafter: {name: medusa}
tokens: 2000000
""",
    "serve.yaml": """\
job: serve
model: shoal-16m
scheduler: prefill_first
workload: {name: code, requests: 30, rate: 4, scale: 2}
max_running: 8
seed: 3
""",
    "requests.jsonl": "".join(
        json.dumps({"at": 0.2 * i, "prompt": list(range(9 * i, 9 * i + 60)), "output_tokens": 20})
        + "\n"
        for i in range(25)
    ),
    "heads/drafter.json": json.dumps(
        {
            "name": "medusa",
            "target": "0" * 64,
            "vocab_size": 151936,
            "hidden": 4096,
            "calibration": [[0.6, 0.1, 0.05], [0.4, 0.1, 0.05], [0.25, 0.08, 0.04]],
        }
    ),
    "draft/config.json": json.dumps(
        {"num_attention_heads": 16, "hidden_size": 1024, "num_hidden_layers": 28}
    ),
    "draft/model.safetensors": " " * 100_000,
}

COMMANDS = {
    # Dense models, from one device to thousands.
    "one A100": "train Qwen3-0.6B -m 1xA100 --tokens 1B --emit accelerate",
    "a node of H100": "train Llama-3-8B -m 8xH100 --tokens 20B --top 8 --emit torchtitan",
    "64 H100": "train Llama-3-70B -m 64xH100 --tokens 100B --global-batch 512 --emit megatron",
    "512 H200": "train Llama-3.1-405B -m 512xH200 --tokens 1000B --global-batch 512",
    "1024 A100": "train 'GPT-3 175B' -m 1024xA100 --seq-len 2048 --global-batch 1536 --top 3",
    "3072 A100, split given": "train GPT-1T -m 3072xA100 --seq-len 2048 --global-batch 3072"
    " --set parallel.dp=6 --set parallel.tp=8 --set parallel.pp=64 --set recompute=full"
    " --set microbatch=1 --set shard=zero1 --set parallel.schedule=1f1b --set parallel.sp=true",
    "laptop": "train shoal-4m -m laptop --tokens 2M",
    "M4 Max, fp32": "train shoal-16m -m M4-Max --tokens 4M --precision fp32",
    "MI300X, least energy": "train phi-4 -m 8xMI300X --tokens 10B --objective energy"
    " --set shard=zero3 --emit deepspeed",
    "GB200": "train Qwen2.5-32B -m 72xGB200 --tokens 50B --global-batch 72",
    "Frontier, levels": "train pythia-12b -m 4xFrontier --seq-len 2048 --set shard=topo3",
    # Mixtures of experts.
    "eight experts": "train Mixtral-8x7B-v0.1 -m 16xH200 --tokens 20B",
    "latent attention": "train DeepSeek-V2-Lite -m 8xA100 --tokens 5B --seq-len 2048 --top 3",
    "experts, split given": "train DeepSeek-V2 -m 128xH100 --global-batch 256"
    " --set parallel.dp=32 --set parallel.pp=4 --set parallel.ep=32 --set recompute=full"
    " --set microbatch=2 --set shard=zero1 --set parallel.schedule=1f1b",
    "experts' chunks, auto": "train gpt-oss-20b -m 16xH100@IB100 --set parallel.dp=16"
    " --set parallel.ep=16 --set parallel.expert_chunks=auto --set parallel.expert_dispatch=2dh",
    "gradient slices, auto": "train Mixtral-8x7B-v0.1 -m 32xH200 --set parallel.dp=32"
    " --set parallel.ep=8 --set parallel.gradient_slices=auto",
    "experts' copies": "train shoal-moe-4m -m laptop --tokens 2M --global-batch 16"
    " --set parallel.dp=4 --set parallel.ep=4 --set parallel.placer=fssdp",
    # Long contexts.
    "131072 tokens": "train Llama-3.1-8B -m 32xH100 --seq-len 131072 --global-batch 32 --top 3",
    "Ulysses": "train Llama-3.1-8B -m 16xH100 --seq-len 65536 --global-batch 16"
    " --set parallel.cp=8 --set parallel.dp=2 --set parallel.context=ulysses",
    "a ring of rings": "train Qwen2.5-7B -m 2x8xA100@IB200 --seq-len 65536 --global-batch 16"
    " --set parallel.cp=16 --set parallel.context.name=double_ring"
    " --set parallel.context.inner=8",
    # Beyond the device's memory.
    "offload, auto": "train Llama-3-8B -m 1xRTX-4090 --tokens 20M --offload auto",
    "offload, given": "train Qwen2.5-7B -m 2xL40S --tokens 20M --set grad_clip=0"
    " --set offload.name=zero_infinity --set offload.param=host --set offload.optim=host",
    "some ways of offload": "train Llama-3.2-3B -m H100-PCIe --tokens 100M"
    " --set optimizer.fused=false --offload none,ssdtrain,deep_optimizer_states",
    # Fine-tuning.
    "fine-tuning, auto": "train Llama-3-8B -m 1xH100 --tokens 20M --finetune auto",
    "QLoRA": "train Llama-3-70B -m 1xH200 --tokens 20M --finetune qlora --seq-len 2048",
    "DoRA on four": "train Qwen3-4B -m 4xRTX-4090 --finetune dora --set packing=document"
    " --set parallel.dp=4 --set shard=replicated",
    # Text, optimizers, architectures, schedules.
    "padded, Muon": "train SmolLM2-1.7B -m 8xA100-40GB --tokens 5B --set optimizer=muon"
    " --set packing=padded --set lr_schedule=wsd",
    "ragged lengths": "train Llama-3.2-1B -m 8xH100 --tokens 1B --seq-len 8192"
    " --set batching=bytescale --set packing=document",
    "groups of blocks": "train groups.yaml -m 16xA100",
    "four streams, compiled": "train Qwen3-1.7B -m 8xH100 --set architecture.streams.num=4"
    " --set compile=true",
    "zbv": "train Llama-2-7b -m 8xA100 --set parallel.pp=4 --set parallel.dp=2"
    " --set parallel.vpp=2 --set parallel.schedule=zbv",
    "vocabulary over stages": "train Gemma-2-2b -m 8xA100 --set parallel.pp=4"
    " --set parallel.dp=2 --set parallel.vocab=pp",
    "a drafter": "drafter drafter.yaml -m laptop",
    # Slow links and an objective.
    "two sites, DiLoCo": "train Llama-3.2-3B -m 8xA100+8xA100@WAN1 --tokens 5B"
    " --set sync.name=diloco --set sync.within=8 --set parallel.dp=16",
    "Ethernet, CO2": "train 'GPT-2 medium' -m 2x4xH100@ETH10 --seq-len 1024 --tokens 2B"
    " --set sync.name=co2 --set sync.tau=auto",
    "cheapest": "train Qwen3-8B -m 16xH100@ETH10 --tokens 20B --objective cost",
    # The other planners.
    "rules": "train Qwen3-14B -m 16xH100 --tokens 20B --planner rules",
    "megatron": "train 'GPT-3 175B' -m 512xA100 --seq-len 2048 --global-batch 512"
    " --planner megatron --set planner.bubble=0.05",
    "galvatron": "train Llama-2-7b -m 8xA100-40GB --planner galvatron --global-batch 64"
    " --set planner.units=64 --set planner.layouts=4",
    "what if": "train Llama-3-8B -m 8xH100 --planner rules --what-if",
    # What does not fit, and what is refused.
    "too large": "train falcon-40b -m 4xA100 --seq-len 2048 --top 2",
    "too large, --fit": "train Llama-2-13b -m 2xRTX-4090 --seq-len 2048 --fit",
    "no legal split": "train Llama-3-8B -m 8xH100 --set parallel.tp=3",
    "nothing fits": "train Llama-3-70B -m RTX-4090 --offload none,superpipeline",
    # Serving: who runs now, and who holds the cache.
    "chat": "serve Qwen3-8B -m H100 --rate 20 --requests 40 --emit vllm",
    "a job's file": "serve serve.yaml -m laptop",
    "competitors": "serve Llama-3.2-3B -m RTX-4090 --requests 12 --set max_position=8192",
    "static": "serve Llama-3.1-8B -m L40S --scheduler static --kv contiguous --requests 24"
    " --set max_position=4096",
    "slots": "serve Qwen2.5-1.5B -m A100-40GB --scheduler temporal_fusion --workload code"
    " --requests 30 --set kv.name=slots --set kv.max_len=2048",
    "swapped": "serve Qwen3-4B -m RTX-4090 --scheduler fair --requests 40 --rate 30"
    " --set kv=blockgroups --set preempt=swap --set kv_tokens=12000 --set max_position=4096",
    "many turns": "serve Mistral-7B-v0.3 -m A100 --workload multiturn --requests 24 --rate 6"
    " --set preempt=auto --set kv_tokens=20000 --set max_position=8192",
    "lent memory": "serve Llama-3.1-8B -m H100 --workload summary --requests 16 --rate 4"
    " --set kv.name=distributed --set kv.instances=2 --set kv_tokens=65536"
    " --set max_position=32768",
    "replicas": "serve Qwen3-0.6B -m 4xL40S --workload shared_prefix --requests 40 --rate 60"
    " --set replicas=3 --set max_position=8192",
    "trace": "serve shoal-4m -m laptop --trace requests.jsonl --set scheduler.chunked=false",
    # Ranks, formats, guesses, adapters, masks, layers elsewhere.
    "four ranks": "serve Llama-3.1-70B -m 4xH100 --set parallel.tp=4 --requests 20 --rate 5"
    " --emit sglang",
    "stages": "serve Qwen3-235B-A22B -m 8xH200 --set parallel.tp=4 --set parallel.pp=2"
    " --requests 16 --set max_position=8192",
    "few bits": "serve Qwen3-14B -m H100 --requests 16 --set weights=int4-g128"
    " --set kv_format=int8 --set max_position=16384",
    "n-grams": "serve Qwen3-8B -m H100 --requests 20 --set speculative=ngram",
    "Medusa": "serve Qwen3-8B -m H100 --requests 20 --set"
    " 'speculative={name: medusa, path: heads}'",
    "a draft model": "serve Qwen3-14B -m H200 --requests 20 --set"
    " 'speculative={name: draft_model, path: draft, breadth: 2}'",
    "adapters": "serve Llama-3-8B -m A100 --requests 20 --set max_adapters=4"
    " --set max_adapter_rank=16",
    "masks": "serve shoal-mdlm-3m -m laptop --set decode=diffusion --requests 8"
    " --set workload.scale=8",
    # Targets, phases of their own, and what does not fit.
    "targets": "serve Qwen3-1.7B -m 2xH100 --workload code --set workload.scale=16"
    " --slo ttft=0.05,tpot=0.01 --emit vllm",
    "phases": "serve Qwen3-8B -m 4xA100 --requests 20 --rate 8"
    " --set 'disagg={prefill: {count: 1, tp: 2}, decode: 2}' --emit sglang",
    "llama.cpp": "serve Llama-3.2-1B -m laptop --requests 6 --set max_position=2048"
    " --emit llamacpp",
    "too large to serve": "serve Llama-3.1-70B -m H100",
}

# Commands that show more as text than as JSON.
AS_TEXT = {"what if", "too large, --fit", "competitors"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory where a command runs, with the files that it reads."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("row", COMMANDS)
def test_plans(row: str, place: Path) -> None:
    words = ["plan", *shlex.split(COMMANDS[row])]
    if row not in AS_TEXT:
        words += ["-o", "json"]
    if "--emit" in words:
        words += ["--emit-dir", "launch"]
    unset = (*UNSET, *(name for name in os.environ if name.startswith("SHOAL_")))
    done = shoal_command.shoal(*words, without=unset, SHOAL_HOME=str(place / "home"))
    actual: dict[str, Any] = {"command": COMMANDS[row], "status": done.returncode}
    if done.stderr:
        actual["stderr"] = done.stderr.splitlines()
    said, result = parsed(done.stdout)
    if said:
        actual["said"] = tidied(said)
    if result is not None:
        actual["plans"] = condensed(result)
    launch = place / "launch"
    if launch.exists():
        # The plan beside the files is that of the answer, with the machine.
        actual["files"] = {
            path.name: short(path.read_text())
            for path in sorted(launch.iterdir())
            if path.name != "plan.yaml"
        }
    settle("plans", row, uncounted(actual), tolerance=TOLERANCE)


def parsed(stdout: str) -> tuple[str, Any]:
    """(text, value) of what was printed: lines before the JSON, and the JSON, if there is any."""
    lines = stdout.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line[:1] in "[{"), len(lines))
    rest = "".join(lines[first:])
    return "".join(lines[:first]), json.loads(rest) if rest else None


def uncounted(actual: dict[str, Any]) -> Any:
    """Without how many plans were priced: every part that is added adds to them."""
    return json.loads(re.sub(r"of [\d,]+ plans priced", "of the plans priced", json.dumps(actual)))


def tidied(text: str) -> list[str]:
    """The lines of tables and sentences, without rules and the width of columns."""
    lines = (re.sub(" {2,}", "  ", line.strip(" ─")) for line in text.splitlines())
    return [line for line in lines if line]


def short(text: str) -> str:
    """The text, or of a long one its length and digest."""
    if len(text) <= LONGEST:
        return text
    return f"{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def condensed(found: Any) -> Any:
    """The first plan as it is, the others by their differences and headlines."""
    if isinstance(found, dict):
        return without_input(found)
    first, *others = found
    return [without_input(first), *(headline(one, first) for one in others)]


def without_input(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key not in ("machine", "shape")}


def headline(plan: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """How the plan differs from the first one, and its figures in short."""
    job, base, cost = flat(plan["job"]), flat(first["job"]), plan["estimate"]
    result = {
        "differs": {
            key: job.get(key)
            for key in sorted(job.keys() | base.keys())
            if job.get(key) != base.get(key)
        },
        "fits": plan["fits"],
        "step_s": cost["step_s"]["value"],
        "memory_bytes": math.fsum(cost["memory_bytes"].values()),
        "bound": cost["bound"],
        "why": plan["why"],
    }
    return result if plan["notes"] == first["notes"] else {**result, "notes": plan["notes"]}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Path -> value of everything in a job."""
    if not isinstance(value, dict):
        return {path: value}
    result: dict[str, Any] = {}
    for key, one in value.items():
        result |= flat(one, f"{path}.{key}" if path else key)
    return result
