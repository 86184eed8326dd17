"""Emitted launch files: what they say, against the engines' own parsers or argument lists.

``facts`` holds names of options and keys as the engines publish them. Where an engine's
package is installed, its own parser reads the files too.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.errors import PlanError, UnknownPartError
from shoal.cost.shapes import resolve
from shoal.ir import ServeJob, ServePlan, TrainJob, TrainPlan
from shoal.machine.described import load
from shoal.plan.emit import EMITTERS
from shoal.plan.emit.protocols import Emitter

FACTS = {
    path.stem: json.loads(path.read_text())
    for path in sorted(Path(__file__).with_name("facts").glob("*.json"))
}
TRAINERS = ("torchtitan", "megatron", "deepspeed", "accelerate")
SERVERS = ("vllm", "sglang", "llamacpp")


def train(model: str, parallel: dict[str, Any], machine: str = "16xH100", **job: Any) -> TrainPlan:
    given = {"steps": 100, "seq_len": 2048, "global_batch": 64, "microbatch": 1, **job}
    return TrainPlan(
        job=TrainJob(model=model, parallel=parallel, **given),
        machine=load(machine),
        shape=resolve(model),
    )


def serve(machine: str = "H100", model: str = "Qwen3-8B", **job: Any) -> ServePlan:
    given = {"max_running": 64, "max_step_tokens": 8192, "max_position": 8192, **job}
    return ServePlan(
        job=ServeJob(model=model, **given), machine=load(machine), shape=resolve(model)
    )


HYBRID = {"name": "hybrid", "within": 8}
TRAIN_PLANS = {
    "dp": train("Llama-3.2-1B", {"dp": 16}),
    "zero1": train("Llama-3.2-1B", {"dp": 16}, shard="zero1"),
    "zero2": train("Llama-3-8B", {"dp": 16}, shard="zero2", lr_schedule="wsd"),
    "zero3": train("Llama-3-8B", {"dp": 8, "tp": 2}, shard="zero3", recompute="full"),
    "hybrid": train("Llama-3.2-1B", {"dp": 16}, shard=HYBRID),
    "pp": train(
        "Qwen3-14B",
        {"dp": 2, "tp": 4, "pp": 2, "sp": True},
        shard="zero1",
        recompute="full",
    ),
    "vpp": train(
        "Qwen3-14B",
        {"dp": 4, "tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved"},
        microbatch=2,
    ),
    "zbv": train("Llama-3-8B", {"dp": 4, "tp": 2, "pp": 2, "schedule": "zbv", "vpp": 2}),
    "cp": train("Llama-3-8B", {"dp": 2, "tp": 4, "cp": 2, "sp": True}, shard="zero3"),
    "usp": train("Llama-3-8B", {"dp": 4, "cp": 4, "context": "usp"}, shard="zero1"),
    "stages": train("Llama-3-8B", {"dp": 4, "pp": 4, "stages": (7, 9, 9, 7)}),
    "uneven": train("Llama-3-8B", {"dp": 2, "pp": 3}, machine="8xH100"),
    "moe": train("Qwen3-30B-A3B", {"dp": 16, "ep": 8}, shard="zero3"),
    "overlapped": train(
        "DeepSeek-V3",
        {"dp": 4, "pp": 4, "ep": 4, "vpp": 4, "schedule": "interleaved", "overlap": "experts"},
        engine="megatron",
        shard="zero1",
        recompute="selective",
    ),
    "shared": train("DeepSeek-V2-Lite", {"dp": 16, "ep": 8}, shard="zero2"),
    "gpt": train("GPT-3 175B", {"tp": 8, "pp": 2, "sp": True}),
    "fp32": train("Llama-3.2-1B", {"dp": 16}, precision="fp32"),
    "compiled": train("Llama-3.2-1B", {"dp": 16}, compile=True),
    "cpu": train("Llama-3.2-1B", {"dp": 2}, machine="2xlaptop"),
    "one": train("Llama-3.2-1B", {}, machine="H100"),
}
SERVE_PLANS = {
    "gpu": serve(kv_tokens=100_000),
    "whole": serve(
        scheduler={"name": "fcfs", "chunked": False},
        kv={"name": "paged", "prefix_reuse": False, "block_size": 32},
        precision="fp32",
    ),
    "static": serve(scheduler="static", kv="contiguous"),
    "cpu": serve("laptop"),
    "groups": serve(
        "16xH200",
        "DeepSeek-V3",
        weights="fp8",
        engine="sglang",
        kv_tokens=1_000_000,
        parallel={"tp": 2, "dp": 8, "ep": 16},
    ),
    "fp8": serve(weights="fp8"),
}
CASES = [
    (engine, name, plan)
    for engines, plans in ((TRAINERS, TRAIN_PLANS), (SERVERS, SERVE_PLANS))
    for engine in engines
    for name, plan in plans.items()
    if not EMITTERS.build(engine).refuses(plan)
]
each_case = pytest.mark.parametrize(
    ("engine", "name", "plan"), CASES, ids=[f"{engine}-{name}" for engine, name, _ in CASES]
)


def emit(engine: str, plan: TrainPlan | ServePlan) -> dict[str, str]:
    files: dict[str, str] = EMITTERS.build(engine).emit(plan)
    return files


def words(text: str, after: str) -> list[str]:
    """Words of the command behind ``after``, its variables at their defaults or X."""
    line = next(line for line in text.replace("\\\n", " ").splitlines() if line.startswith("exec "))
    assert after in line
    rest = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line.split(after, 1)[1])
    return shlex.split(re.sub(r"\$\{[^}]*\}|\$\([^)]*\)", "X", rest))


def options(argv: list[str]) -> dict[str, str | None]:
    """Option -> value; None for a switch."""
    options: dict[str, str | None] = {}
    for place, word in enumerate(argv):
        if word.startswith("--"):
            assert word not in options, f"{word} stands twice"
            follow = argv[place + 1] if place + 1 < len(argv) else "--"
            options[word] = None if follow.startswith("--") else follow
    return options


def check_options(engine: str, found: dict[str, str | None]) -> None:
    known = FACTS[engine]["options"]
    for name, value in found.items():
        assert name in known, f"{engine} has no option {name}"
        assert (known[name] is None) == (value is None), name
        if isinstance(known[name], list):
            assert value in known[name], name


@pytest.mark.parametrize("name", list(EMITTERS))
def test_protocol(name: str) -> None:
    part = EMITTERS.build(name)
    assert isinstance(part, Emitter)
    assert part.job == ("train" if name in TRAINERS else "serve")


def test_every_engine_has_cases() -> None:
    assert {engine for engine, _, _ in CASES} == set(EMITTERS)
    assert set(FACTS) == set(EMITTERS)


@each_case
def test_scripts_are_shell(engine: str, name: str, plan: TrainPlan) -> None:
    files = emit(engine, plan)
    assert files == emit(engine, plan)
    assert "launch.sh" in files
    assert str(Path.home()) not in "".join(files.values())
    done = subprocess.run(["sh", "-n"], input=files["launch.sh"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "plan"), [(n, p) for e, n, p in CASES if e == "megatron"], ids=lambda v: str(v)[:12]
)
def test_megatron_options_exist(name: str, plan: TrainPlan) -> None:
    argv = words(emit("megatron", plan)["launch.sh"], 'pretrain_gpt.py"')
    result = options(argv)
    check_options("megatron", result)
    job, split = plan.job, plan.job.parallel
    assert int(result["--micro-batch-size"] or 0) == job.microbatch
    assert int(result["--tensor-model-parallel-size"] or 0) == split.tp
    assert int(result["--num-layers"] or 0) == plan.shape.num_layers
    layout = result.get("--pipeline-model-parallel-layout")
    if layout is not None:
        assert layout.startswith("E")
        assert layout.endswith("L")
        blocks = [int(part.strip("EtL*")) for part in layout.split("|")]
        assert (len(blocks), sum(blocks)) == (split.pp * split.vpp, plan.shape.num_layers)


def test_megatron_says_what_was_planned() -> None:
    result = options(words(emit("megatron", TRAIN_PLANS["vpp"])["launch.sh"], 'pretrain_gpt.py"'))
    assert result["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert result["--num-query-groups"] == "8"
    assert "--sequence-parallel" not in result
    usp = options(words(emit("megatron", TRAIN_PLANS["usp"])["launch.sh"], 'pretrain_gpt.py"'))
    assert (usp["--cp-comm-type"], usp["--context-parallel-size"]) == ("a2a+p2p", "4")
    wsd = options(words(emit("megatron", TRAIN_PLANS["zero2"])["launch.sh"], 'pretrain_gpt.py"'))
    assert (wsd["--lr-decay-style"], wsd["--lr-wsd-decay-iters"]) == ("WSD", "70")
    assert wsd["--data-parallel-sharding-strategy"] == "optim_grads"
    # Its fully sharded weights refuse a single queue.
    assert "CONNECTIONS=1" not in emit("megatron", TRAIN_PLANS["zero3"])["launch.sh"]
    shared = options(
        words(
            emit("megatron", train("Mixtral-8x7B-v0.1", {"dp": 4, "tp": 2, "pp": 2, "ep": 4}))[
                "launch.sh"
            ],
            'pretrain_gpt.py"',
        )
    )
    assert (shared["--num-experts"], shared["--expert-model-parallel-size"]) == ("8", "4")


def test_megatron_says_how_tokens_travel_to_experts() -> None:
    text = emit("megatron", TRAIN_PLANS["overlapped"])["launch.sh"]
    near = options(words(text, 'pretrain_gpt.py"'))
    # All ranks of an expert group are on one node; of eight groups of experts a token sees four.
    assert near["--moe-token-dispatcher-type"] == "alltoall"
    assert (near["--moe-router-num-groups"], near["--moe-router-group-topk"]) == ("8", "4")
    assert {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"} <= set(near)
    assert "CONNECTIONS=32" in text
    plan = train("Qwen3-30B-A3B", {"dp": 16, "ep": 16}, shard="zero1")
    text = emit("megatron", plan)["launch.sh"]
    far = options(words(text, 'pretrain_gpt.py"'))
    assert far["--moe-token-dispatcher-type"] == "flex"
    assert far["--moe-flex-dispatcher-backend"] == "hybridep"
    assert "--overlap-moe-expert-parallel-comm" not in far and "CONNECTIONS=1\n" in text
    assert "--moe-router-num-groups" not in far


def titan_calls(text: str) -> dict[str, dict[str, Any]]:
    """Class -> keyword -> value of a literal, of the calls in an emitted module."""
    titan_calls: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.keywords:
            values = {}
            for word in node.keywords:
                try:
                    values[str(word.arg)] = ast.literal_eval(word.value)
                except ValueError:
                    values[str(word.arg)] = ast.unparse(word.value)
            titan_calls[ast.unparse(node.func)] = values
    return titan_calls


@pytest.mark.parametrize(
    ("name", "plan"), [(n, p) for e, n, p in CASES if e == "torchtitan"], ids=lambda v: str(v)[:12]
)
def test_torchtitan_fields_exist(name: str, plan: TrainPlan) -> None:
    text = emit("torchtitan", plan)["shoal_plan.py"]
    calls = titan_calls(text)
    for cls, fields in FACTS["torchtitan"]["fields"].items():
        if cls in calls:
            assert set(calls[cls]) <= set(fields), cls
    flavors = FACTS["torchtitan"]["flavors"]
    module = re.search(r"torchtitan\.models\.(\w+) import model_registry", text)
    flavor = re.search(r'model_registry\("([^"]+)"\)', text)
    assert module
    assert flavor
    assert flavor[1] in flavors[module[1]]
    split, parallel = plan.job.parallel, calls["ParallelismConfig"]
    ranks = parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"]
    assert ranks == split.dp
    local = calls["TrainingConfig"]["local_batch_size"]
    assert plan.job.global_batch % (local * split.dp) == 0


def test_torchtitan_knows_all_its_models() -> None:
    from shoal.plan.emit.torchtitan import MODELS

    flavors = FACTS["torchtitan"]["flavors"]
    for shape, (module, flavor) in MODELS.items():
        assert resolve(shape).name == shape
        assert flavor in flavors[module]


def test_torchtitan_says_what_was_planned() -> None:
    calls = titan_calls(emit("torchtitan", TRAIN_PLANS["vpp"])["shoal_plan.py"])
    parallel = calls["ParallelismConfig"]
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallel["pipeline_parallel_layers_per_stage"] == 10
    assert parallel["pipeline_parallel_microbatch_size"] == 2
    assert calls["TrainingConfig"]["local_batch_size"] == 16
    assert calls["TrainingConfig"]["disable_cuda_graphs"] is True
    stages = titan_calls(emit("torchtitan", TRAIN_PLANS["stages"])["shoal_plan.py"])
    parts = stages["ParallelismConfig"]["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [8, 9, 9, 9]
    assert (parts[0][0], parts[-1][-1]) == ("tok_embeddings", "lm_head")
    hybrid = titan_calls(emit("torchtitan", TRAIN_PLANS["hybrid"])["shoal_plan.py"])
    assert hybrid["ParallelismConfig"]["data_parallel_replicate_degree"] == 2
    assert "FullAC" in emit("torchtitan", TRAIN_PLANS["zero3"])["shoal_plan.py"]


def check_keys(engine: str, raw: dict[str, Any]) -> None:
    known = FACTS[engine]["keys"]
    assert set(raw) <= set(known[""])
    for key, inner in raw.items():
        if isinstance(inner, dict):
            assert set(inner) <= set(known[key]), key


@pytest.mark.parametrize(
    ("name", "plan"), [(n, p) for e, n, p in CASES if e == "deepspeed"], ids=lambda v: str(v)[:12]
)
def test_deepspeed_keys_exist_and_batches_add_up(name: str, plan: TrainPlan) -> None:
    raw = json.loads(emit("deepspeed", plan)["ds_config.json"])
    check_keys("deepspeed", raw)
    ranks = plan.job.parallel.dp
    micro = raw["train_micro_batch_size_per_gpu"]
    assert raw["train_batch_size"] == micro * raw["gradient_accumulation_steps"] * ranks
    stage = {"replicated": 0, "zero1": 1, "zero2": 2, "zero3": 3}[plan.job.shard.name]
    assert raw["zero_optimization"]["stage"] == stage
    assert raw["bf16"]["enabled"] == (plan.job.precision == "bf16")


@pytest.mark.parametrize(
    ("name", "plan"), [(n, p) for e, n, p in CASES if e == "accelerate"], ids=lambda v: str(v)[:12]
)
def test_accelerate_keys_exist_and_degrees_multiply(name: str, plan: TrainPlan) -> None:
    raw = yaml.safe_load(emit("accelerate", plan)["accelerate.yaml"])
    check_keys("accelerate", raw)
    assert raw["num_processes"] == plan.job.parallel.world
    if "parallelism_config" in raw:
        degrees = [v for k, v in raw["parallelism_config"].items() if k.endswith("_size")]
        product = 1
        for degree in degrees:
            product *= degree
        assert product == raw["num_processes"]


@pytest.mark.parametrize(
    ("engine", "name", "plan"), [case for case in CASES if case[0] in ("vllm", "sglang")]
)
def test_serving_keys_exist(engine: str, name: str, plan: ServePlan) -> None:
    raw = yaml.safe_load(emit(engine, plan)[f"{engine}.yaml"])
    check_options(engine, {f"--{k}": None if v is True else str(v) for k, v in raw.items()})


def test_servers_say_what_was_planned() -> None:
    vllm = yaml.safe_load(emit("vllm", SERVE_PLANS["gpu"])["vllm.yaml"])
    assert (vllm["num-gpu-blocks-override"], vllm["max-num-seqs"]) == (6250, 64)
    assert vllm["enable-chunked-prefill"]
    whole = yaml.safe_load(emit("vllm", SERVE_PLANS["whole"])["vllm.yaml"])
    assert whole["no-enable-chunked-prefill"]
    assert whole["no-enable-prefix-caching"]
    assert (whole["dtype"], whole["block-size"]) == ("float32", 32)
    sglang = yaml.safe_load(emit("sglang", SERVE_PLANS["whole"])["sglang.yaml"])
    assert (sglang["chunked-prefill-size"], sglang["disable-radix-cache"]) == (-1, True)


def test_groups_with_attention_of_their_own() -> None:
    vllm = yaml.safe_load(emit("vllm", SERVE_PLANS["groups"])["vllm.yaml"])
    assert (vllm["tensor-parallel-size"], vllm["data-parallel-size"]) == (2, 8)
    # Limits and blocks are those of a group.
    assert (vllm["max-num-seqs"], vllm["num-gpu-blocks-override"]) == (64, 1_000_000 // 8 // 16)
    assert vllm["enable-expert-parallel"]
    sglang = yaml.safe_load(emit("sglang", SERVE_PLANS["groups"])["sglang.yaml"])
    assert (sglang["tp-size"], sglang["dp-size"], sglang["ep-size"]) == (16, 8, 16)
    assert (sglang["max-running-requests"], sglang["chunked-prefill-size"]) == (512, 65_536)


def test_servers_of_several_nodes_meet() -> None:
    sglang = emit("sglang", SERVE_PLANS["groups"])["launch.sh"]
    assert "--nnodes 2" in sglang and '--node-rank "${1:?' in sglang and ":20000" in sglang
    made = emit("vllm", SERVE_PLANS["groups"])
    vllm = yaml.safe_load(made["vllm.yaml"])
    assert vllm["distributed-executor-backend"] == vllm["data-parallel-backend"] == "ray"
    assert "RAY_ADDRESS" in made["launch.sh"]
    for engine in ("vllm", "sglang"):
        alone = emit(engine, SERVE_PLANS["gpu"])
        assert "nnodes" not in alone["launch.sh"] and "RAY" not in alone["launch.sh"]


def test_who_quantizes_the_weights() -> None:
    for engine in ("vllm", "sglang"):
        made = emit(engine, SERVE_PLANS["fp8"])
        assert yaml.safe_load(made[f"{engine}.yaml"])["quantization"] == "fp8"
        published = emit(engine, SERVE_PLANS["groups"])
        assert "quantization" not in yaml.safe_load(published[f"{engine}.yaml"])
        packed = emit(engine, serve(weights="int4-g128"))
        assert "whose files hold the weights in int4-g128" in packed["launch.sh"]


@pytest.mark.parametrize("engine", SERVERS)
def test_servers_listen_on_this_host_alone_unless_asked(engine: str) -> None:
    plan = SERVE_PLANS["gpu"]
    files = emit(engine, plan)
    names: dict[str, str] = EMITTERS.build({"name": engine, "host": "0.0.0.0"}).emit(plan)
    if engine == "llamacpp":
        assert options(words(files["launch.sh"], "llama-server"))["--host"] == "127.0.0.1"
        assert options(words(names["launch.sh"], "llama-server"))["--host"] == "0.0.0.0"
    else:
        assert yaml.safe_load(files[f"{engine}.yaml"])["host"] == "127.0.0.1"
        assert yaml.safe_load(names[f"{engine}.yaml"])["host"] == "0.0.0.0"
    from shoal.core.errors import ConfigError

    for host in ("", "a b", "$(id)"):
        with pytest.raises(ConfigError, match=rf"emit\.{engine}\.host"):
            EMITTERS.build({"name": engine, "host": host})


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_lost_ranks_are_started_again(engine: str) -> None:
    text = emit(engine, TRAIN_PLANS["dp"])["launch.sh"]
    assert text.index("torchrun ") < text.index('--max-restarts "${RESTARTS:-3}"')


@pytest.mark.parametrize(
    ("name", "plan"), [(n, p) for e, n, p in CASES if e == "llamacpp"], ids=lambda v: str(v)[:12]
)
def test_llamacpp_options_exist(name: str, plan: ServePlan) -> None:
    result = options(words(emit("llamacpp", plan)["launch.sh"], "llama-server"))
    check_options("llamacpp", result)
    if plan.job.kv.name == "contiguous":
        assert int(result["--ctx-size"] or 0) == 64 * 8192
        assert "--no-kv-unified" in result
        assert "--no-cont-batching" in result
    if plan.machine.device.kind == "cpu":
        assert result["--n-gpu-layers"] == "0"


@pytest.mark.parametrize(
    ("engine", "plan", "message"),
    [
        (
            "torchtitan",
            TRAIN_PLANS["zero1"],
            "zero1: use replicated, zero2, zero3 or hybrid",
        ),
        ("torchtitan", TRAIN_PLANS["gpt"], "model = GPT-3 175B: it has DeepSeek"),
        ("torchtitan", TRAIN_PLANS["cpu"], "accelerators"),
        ("torchtitan", TRAIN_PLANS["usp"], "parallel.context = usp: use zigzag"),
        ("torchtitan", SERVE_PLANS["gpu"], "a serving plan, and torchtitan trains"),
        (
            "torchtitan",
            train("Llama-3-8B", {"dp": 4, "pp": 4, "vpp": 2}),
            "parallel.vpp = 2 with schedule = 1f1b: use 1, or schedule = interleaved",
        ),
        (
            "torchtitan",
            train("Llama-3-8B", {"dp": 4, "pp": 4, "schedule": "interleaved"}),
            "parallel.vpp = 1 with schedule = interleaved: use 1f1b",
        ),
        (
            "torchtitan",
            train("Llama-3-8B", {"dp": 4, "pp": 4, "schedule": "zbv"}),
            "parallel.vpp = 1 with schedule = zbv: use 2",
        ),
        (
            "torchtitan",
            train("Llama-3-8B", {"dp": 4, "pp": 4}, global_batch=8),
            "2 micro-batches with schedule = 1f1b: use at least pp = 4",
        ),
        (
            "torchtitan",
            train(
                "Llama-3-8B",
                {"dp": 4, "pp": 4, "vpp": 2, "schedule": "interleaved"},
                global_batch=36,
            ),
            "9 micro-batches with schedule = interleaved: use a multiple of their 2 rounds",
        ),
        (
            "megatron",
            train("Llama-3-8B", {"dp": 4, "pp": 4, "vpp": 2}),
            "parallel.vpp = 2 with schedule = 1f1b",
        ),
        (
            "megatron",
            train(
                "Llama-3-8B",
                {"dp": 4, "pp": 4, "vpp": 2, "schedule": "interleaved"},
                global_batch=40,
            ),
            "10 micro-batches with parallel.vpp = 2: use a multiple of pp = 4",
        ),
        ("megatron", train("Llama-3-8B", {"dp": 16, "vpp": 2}), "parallel.vpp = 2 with pp = 1"),
        ("megatron", TRAIN_PLANS["zbv"], "parallel.schedule = zbv: use 1f1b or interleaved"),
        ("megatron", TRAIN_PLANS["hybrid"], "shard = hybrid"),
        ("megatron", TRAIN_PLANS["compiled"], "compile = true"),
        ("megatron", train("Llama-3-8B", {"dp": 2, "pp": 8}, shard="zero3"), "use zero1"),
        ("torchtitan", TRAIN_PLANS["overlapped"], "parallel.overlap = experts: use none"),
        (
            "megatron",
            train(
                "Qwen3-30B-A3B",
                {"dp": 16, "ep": 16, "overlap": "experts"},
                engine="megatron",
                recompute="full",
            ),
            "recompute none or selective",
        ),
        ("deepspeed", TRAIN_PLANS["pp"], "parallel.pp = 2"),
        ("deepspeed", TRAIN_PLANS["moe"], "parallel.ep = 8"),
        ("accelerate", TRAIN_PLANS["vpp"], "trains without pipelines"),
        ("vllm", SERVE_PLANS["static"], "scheduler = static.*kv = contiguous"),
        ("vllm", serve(kv={"name": "paged", "block_size": 4}), "block_size = 4: use 8"),
        (
            "vllm",
            serve(scheduler={"name": "fcfs", "chunked": False}, max_step_tokens=512),
            "max_step_tokens = 512 below max_position = 8192",
        ),
        ("vllm", SERVE_PLANS["cpu"], "use llamacpp"),
        ("vllm", TRAIN_PLANS["dp"], "a training plan, and vllm serves"),
        ("sglang", SERVE_PLANS["static"], "scheduler = static"),
        (
            "vllm",
            serve("8xH100", "gpt-oss-120b"),
            "weights = plain: the files of gpt-oss-120b hold mxfp4",
        ),
        ("vllm", serve(kv_format="int8"), "kv_format = int8"),
        ("sglang", serve(preempt="swap"), "preempt = swap"),
        ("llamacpp", serve(max_running=300), "at most 256 slots"),
        ("llamacpp", SERVE_PLANS["whole"], "it cuts long prompts"),
        ("accelerate", TRAIN_PLANS["dp"].model_copy(update={"fits": False}), "fits = False"),
        (
            "torchtitan",
            train("Llama-3-8B", {"dp": 16}, optimizer="muon", recompute="stage", dropout=0.1),
            "recompute = stage.*optimizer = muon.*dropout = 0.1",
        ),
        (
            "megatron",
            train("Llama-3-8B", {"dp": 16}, layers=[{"blocks": 16}, {"blocks": 16}]),
            "layers: groups",
        ),
        ("deepspeed", train("Llama-3-8B", {"dp": 16}, sync="co2"), "sync = co2: use every_step"),
    ],
)
def test_what_cannot_be_expressed_is_named(
    engine: str, plan: TrainPlan | ServePlan, message: str
) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        emit(engine, plan)
    assert str(raised.value).startswith(f"--emit {engine}: ")


def test_torchtitan_cuts_as_many_stages_as_planned() -> None:
    # From 36 blocks in 8 stages it would make 5 a stage, and 8 stages; from 40 in 12, 10 of 4.
    for model, pp, vpp, stages in (("Qwen3-8B", 4, 2, 8), ("Qwen3-14B", 4, 3, 12)):
        split = {"dp": 4, "pp": pp, "vpp": vpp, "schedule": "interleaved"}
        calls = titan_calls(emit("torchtitan", train(model, split))["shoal_plan.py"])
        given = calls["ParallelismConfig"]
        modules = given.get("module_fqns_per_model_part")
        layers = resolve(model).num_layers
        if modules is None:
            assert -(-layers // given["pipeline_parallel_layers_per_stage"]) == stages
        else:
            assert len(modules) == stages and all(modules)
            assert sum(name.startswith("layers.") for part in modules for name in part) == layers


def test_unknown_engines_and_options() -> None:
    with pytest.raises(UnknownPartError, match="megatron"):
        EMITTERS.build("megatorn", where="--emit")
    from shoal.core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"emitter\.vllm\.memory"):
        EMITTERS.build({"name": "vllm", "memory": 1.5})
    with pytest.raises(ConfigError, match=r"emitter\.llamacpp\.port"):
        EMITTERS.build({"name": "llamacpp", "port": 0})


# ------------------------------------------------------------- the engines' own parsers


@pytest.mark.slow
def test_accelerate_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for engine, name, plan in CASES:
        if engine == "accelerate":
            path = tmp_path / f"{name}.yaml"
            path.write_text(emit(engine, plan)["accelerate.yaml"])
    # In a process of its own: it warns, and it imports much.
    code = (
        "import sys, json, pathlib\n"
        "from accelerate.commands.config.config_args import load_config_from_file\n"
        "from accelerate.commands.launch import (\n"
        "    _validate_launch_command, launch_command_parser)\n"
        "found = {}\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.yaml')):\n"
        "    load_config_from_file(str(path))\n"
        "    words = ['--config_file', str(path), 'train.py']\n"
        "    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))\n"
        "    found[path.stem] = [args.num_processes, args.use_fsdp, args.use_deepspeed]\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout.splitlines()[-1])
    assert data["zero3"] == [16, True, False]
    assert data["zero1"] == [16, False, True]
    assert data["cpu"][0] == 2


def test_torchtitan_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("torchtitan.config.manager")
    for engine, _name, plan in CASES:
        if engine == "torchtitan":
            (tmp_path / "shoal_plan.py").write_text(emit(engine, plan)["shoal_plan.py"])
            monkeypatch.syspath_prepend(str(tmp_path))
            monkeypatch.delitem(sys.modules, "shoal_plan", raising=False)
            words = ["--module", "shoal_plan", "--config", "plan"]
            config = manager.ConfigManager().parse_args(words)
            assert config.parallelism.tensor_parallel_degree == plan.job.parallel.tp
