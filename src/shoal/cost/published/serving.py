"""The published serving rows: read, priced by what prices plans, for the engine that ran.

On accelerators that is :class:`~shoal.cost.step_cost.accelerated.AcceleratedStepCost`, on CPUs
:class:`~shoal.cost.step_cost.roofline.Roofline`. No row of this table sets a constant: those of
vLLM and TensorRT-LLM are set by measured closed loops of another publication
(:mod:`shoal.cost.published.silicon_calibration`), the others are counted, documented or assumed.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from shoal.core.errors import ConfigError, require
from shoal.cost.kernels.bounds import FORMATS
from shoal.cost.kernels.serving_engines import ENGINES, ServingEngine
from shoal.cost.published.devices import cpu, served_by
from shoal.cost.published.rows import UnplayableError
from shoal.cost.serving.closed_loop import Clients, arriving, drained_s, prompt_s
from shoal.cost.shapes import find
from shoal.cost.step_cost.accelerated import AcceleratedStepCost, Formats, ServingSplit
from shoal.cost.step_cost.roofline import Roofline
from shoal.cost.step_cost.sharded import ShardedStepCost
from shoal.ir import ModelShape

_MEANS = ("ttft_ms_mean", "tpot_ms_mean", "latency_ms_mean")
_METRICS = (
    "output_tokens_per_s_total",
    "output_tokens_per_s_per_gpu",
    "total_tokens_per_s_per_gpu",
    "decode_tokens_per_s",
    "decode_tokens_per_s_total",
    "prefill_tokens_per_s",
    "ttft_ms",
    "tpot_ms",
    "s_per_token",
    *_MEANS,
)
_NEEDED = ("id", "source", "engine", "model", "device", "workload", "metric", "value")
_GROUPS = (
    (r"TensorRT-LLM (docs|release)", "tensorrt-llm"),
    (r"XiongjieDai", "llama-bench"),
    (r"ikawrakow", "ik_llama.cpp"),
    (r"pytorch-labs/gpt-fast", "gpt-fast"),
    (r"efeslab/Nanoflow", "nanoflow"),
    (r"LMSYS", "sglang-xeon"),
    (r"casys-kaist", "llmservingsim"),
    (r"Lizonghang", "tpi-llm"),
    (r"GeeeekExplorer", "nano-vllm"),
)


@dataclass(frozen=True, eq=False)
class ServeRow:
    """One published measurement of serving.

    Args:
        group: the publication; what belongs to one project is one.
        metric: what was reported, with its unit.
        remembered: it was recalled, not read.
        raw: every cell.
    """

    id: str
    group: str
    source: str
    engine: str
    metric: str
    value: float
    remembered: bool
    raw: Mapping[str, str]

    def of(self, key: str) -> float:
        """A number of the workload; 0 if it is not stated."""
        match = re.search(rf"\b{key}=(\d+(?:\.\d+)?)", self.raw["workload"])
        return float(match.group(1)) if match else 0.0


def read_serving(path: Path | None = None) -> tuple[ServeRow, ...]:
    """All rows of the shipped table, or of another file of its form.

    Raises:
        ConfigError: a column is missing or a cell is not what it should be; names the line.
    """
    return _shipped() if path is None else _parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _shipped() -> tuple[ServeRow, ...]:
    text = resources.files("shoal.cost.published").joinpath("serving.csv")
    return _parse(text.read_text(encoding="utf-8"), "serving.csv")


def _parse(text: str, where: str) -> tuple[ServeRow, ...]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    require(not missing, where, missing, expected="a table of serving runs with these columns")
    rows = []
    for line, cells in enumerate(reader, 2):
        at = f"{where}, line {line}"
        try:
            value = float(cells["value"])
        except (TypeError, ValueError):
            raise ConfigError(f"{at}: value = {cells['value']!r}: expected a number") from None
        require(math.isfinite(value) and value > 0, f"{at}: value", value, expected="above 0")
        group = next((g for p, g in _GROUPS if re.match(p, cells["source"])), cells["source"][:40])
        rows.append(
            ServeRow(
                cells["id"],
                group,
                cells["source"],
                cells["engine"],
                cells["metric"],
                value,
                cells.get("confidence") == "memory",
                cells,
            )
        )
    return tuple(rows)


@dataclass(frozen=True)
class ServeReplay:
    """A row as a server under a load.

    Args:
        engine: that ran.
        prompt: tokens of a prompt; the mean where they differ.
        output: tokens of an answer, likewise.
        devices: all devices.
        run: degrees and formats, in short.
        filled: rules by which the row was completed.
    """

    row: ServeRow
    cost: AcceleratedStepCost | ShardedStepCost
    engine: ServingEngine
    prompt: int
    output: int
    devices: int
    run: str
    filled: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """The model."""
        cost = self.cost
        return cost.shape if isinstance(cost, AcceleratedStepCost) else cost.roofline.shape

    @property
    def on_cpu(self) -> bool:
        """It ran on a CPU."""
        return isinstance(self.cost, ShardedStepCost)


_NAMES = (
    (r"(Llama[- ]3(\.[13])?[- ]8B)", "Llama-3.1-8B"),
    (r"(Llama[- ]3(\.[13])?[- ]70B|DeepSeek-R1-Distill-Llama-70B)", "Llama-3.1-70B"),
    (r"Llama-3.1 405B", "Llama-3.1-405B"),
    (r"LLaMA 7B|Llama[- ]2[- ]7B", "Llama-2-7b"),
    (r"Llama[- ]2[- ]13B", "Llama-2-13b"),
    (r"LLaMA 70B|Llama[- ]2[- ]70B|Midnight Miqu 70B", "Llama-2-70b"),
    (r"Llama[- ]3.2[- ]3B", "Llama-3.2-3B"),
    (r"Qwen3-235B", "Qwen3-235B-A22B"),
    (r"Qwen3-30B", "Qwen3-30B-A3B"),
    (r"Qwen3-32B", "Qwen3-32B"),
    (r"Qwen3-0.6B", "Qwen3-0.6B"),
    (r"Qwen2-72B", "Qwen2-72B"),
    (r"Mixtral 8x7B", "Mixtral-8x7B-v0.1"),
    (r"DeepSeek-R1", "DeepSeek-R1"),
    (r"gpt-oss-120b", "gpt-oss-120b"),
    (r"gpt-oss-20b", "gpt-oss-20b"),
    (r"Llama-4 Maverick", "Llama-4-Maverick-17B-128E"),
)
_FORMATS = (
    (r"(?i)fp4", "nvfp4"),
    (r"Q4_K_M", "q4_k_m"),
    (r"Q4_K_S", "q4_k_s"),
    (r"Q4_0", "q4_0"),
    (r"IQ4_XS", "iq4_xs"),
    (r"int4.*32", "int4_g32"),
    (r"int4", "int4"),
    (r"Q8", "q8_0"),
    (r"int8", "int8"),
    (r"fp8", "fp8"),
)


def _shape(model: str) -> ModelShape:
    for pattern, name in _NAMES:
        if re.match(pattern, model):
            return find(name)
    if model.startswith("GPT-J"):
        return ModelShape(
            name="GPT-J 6B",
            num_layers=28,
            hidden=4096,
            num_heads=16,
            num_kv_heads=16,
            head_dim=256,
            ffn_hidden=16384,
            gated=False,
            vocab_size=50400,
            attention="MHA",
        )
    if model.startswith("DeepSeek 67B"):
        return ModelShape(
            name="DeepSeek 67B",
            num_layers=95,
            hidden=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden=22016,
            vocab_size=102400,
        )
    raise UnplayableError(f"there is no shape of {model}")


# Mean lengths of the traces, as their publications and NanoFlow's table 4 give them.
_TRACES = {"Splitwise": (1155, 211), "LMSYS-Chat": (102, 222), "ShareGPT": (246, 322)}
# Engines that no plan is for. vLLM before its version 0.6: prompts first, in steps of their own,
# and a host that takes 62 % of the time of 8B on an H100, some 25 ms with 256 requests (vLLM,
# Performance Update, September 2024); DeepSpeed-FastGen mixes them. NanoFlow (Zhu et al., 2024):
# two halves of a step of at most 2,048 tokens beside each other. TensorRT-LLM 0.5: a layer's
# kernels one by one. gpt-fast: compiled, with recorded graphs. ik_llama.cpp: rows repacked. SGLang
# on a CPU: PyTorch and the CPU's matrix units. Nothing else of them is measured elsewhere.
_VLLM_2024 = replace(ENGINES["vllm"], step_s=0.015, sequence_s=4e-5, mixed=False)
_LLAMA_CPP, _TRTLLM = ENGINES["llamacpp"], ENGINES["trtllm"]
_ENGINES: dict[tuple[str, str], ServingEngine] = {
    ("nanoflow", "vLLM"): _VLLM_2024,
    ("nanoflow", "DeepSpeed-FastGen"): replace(_VLLM_2024, mixed=True),
    ("nanoflow", "TensorRT-LLM"): replace(_TRTLLM, most=256),
    ("nanoflow", "NanoFlow"): replace(_TRTLLM, overlap=True),
    ("gpt-fast", "gpt-fast"): ServingEngine("gpt-fast"),
    ("ik_llama.cpp", "ik_llama.cpp"): replace(_LLAMA_CPP, products=1.0),
    ("sglang-xeon", "SGLang"): ServingEngine("SGLang", step_s=3e-4, packed="int8"),
    ("nano-vllm", "nano-vLLM"): ServingEngine(
        "nano-vLLM", step_s=2e-3, sequence_s=2e-5, mixed=False, most=512
    ),
}
_TRTLLM_05 = replace(_TRTLLM, layer_s=4e-5)
# Requests of a run of TensorRT-LLM's overview, by (prompt, answer).
_REQUESTS = {
    (128, 128): 30000,
    (128, 2048): 3000,
    (1000, 1000): 3000,
    (2048, 128): 3000,
    (2048, 2048): 1500,
    (5000, 500): 1500,
    (20000, 2000): 1000,
    (8192, 1024): 1500,
    (1024, 8192): 1500,
    (32768, 1024): 1000,
    (1024, 32768): 1000,
}


def replay_serving(row: ServeRow) -> ServeReplay:
    """The server and the load that a row describes.

    Raises:
        UnplayableError: what decides is not stated or not modelled.
        ShoalError: an unknown device, or degrees that do not fit the model.
    """
    raw, work = row.raw, row.raw["workload"]
    filled: list[str] = []
    if row.metric not in _METRICS:
        raise UnplayableError(f"metric {row.metric!r}: expected one of {', '.join(_METRICS)}")
    if row.group == "tpi-llm":
        raise UnplayableError("weights come from disk and over networks whose rates are not stated")
    if "+" in raw["device"]:
        raise UnplayableError("experts are split between a GPU and its host, which is not modelled")
    shape, devices = _shape(raw["model"]), int(raw["devices"] or 0)
    if row.group == "nanoflow" and not devices:
        devices = 1 if "8b" in row.id else 8
        filled.append(f"{devices} devices, as in its paper")
    devices = devices or 1
    engine = _engine(row)
    form = next((f for p, f in _FORMATS if re.search(p, raw["precision"])), "bf16")
    prompt = row.of("input_len") or row.of("input_len_mean")
    output = row.of("output_len") or row.of("output_len_mean")
    if trace := next((v for name, v in _TRACES.items() if f"trace={name}" in work), None):
        prompt, output = trace
        filled.append("mean lengths of the trace")
    elif row.group == "nano-vllm":
        prompt, output = 562, 523
        filled.append("mean lengths")
    cost: AcceleratedStepCost | ShardedStepCost
    if re.search(r"CPU|Xeon", raw["device"]):
        degree = devices if engine.name == "SGLang" else 1
        machine = cpu(raw["device"])
        width = None if form == "bf16" else FORMATS[form].weight_bytes
        roofline = Roofline(machine, shape, "bf16", weight_bytes=width, engine=engine)
        cost = ShardedStepCost(roofline, degree, 1, machine.link("node"))
        run = f"tp{degree} {form}"
    else:
        split, formats = _split(row, shape, devices, filled), _formats(row, shape, form)
        cost = AcceleratedStepCost(served_by(raw["device"]), shape, engine, split, formats)
        run = f"tp{split.tp} x {split.replicas} x {split.pp} {formats.dense}/{formats.experts}"
    run += f", {prompt:.0f} in, {output:.0f} out"
    return ServeReplay(row, cost, engine, round(prompt), round(output), devices, run, tuple(filled))


def _engine(row: ServeRow) -> ServingEngine:
    if row.group == "tensorrt-llm" and "0.5.0" in row.source:
        return _TRTLLM_05
    known = {engine.name: engine for engine in ENGINES.values()}
    engine = _ENGINES.get((row.group, row.engine)) or known.get(row.engine)
    if engine is None:
        raise UnplayableError(f"engine {row.engine!r}: expected one of {', '.join(known)}")
    return replace(engine, most=int(row.of("max_num_seqs")) or engine.most)


def _split(row: ServeRow, shape: ModelShape, devices: int, filled: list[str]) -> ServingSplit:
    degree, work = int(row.raw["tp"] or 1), row.raw["workload"]
    if row.group == "llama-bench":
        return ServingSplit(pp=devices)
    if row.group in ("nanoflow", "gpt-fast"):
        return ServingSplit(tp=1 if "GCD" in row.raw["device"] else devices)
    if "dp=2" in work or re.search(r"DEP(\d)", work):
        return ServingSplit(1, devices, 1, devices)
    if row.group == "tensorrt-llm" and shape.num_experts and devices > 1:
        filled.append("attention of each device for requests of its own (enable_attention_dp)")
        return ServingSplit(1, devices, 1, devices)
    return ServingSplit(tp=degree)


def _formats(row: ServeRow, shape: ModelShape, form: str) -> Formats:
    if row.group == "tensorrt-llm":
        if shape.family == "gpt-oss":
            # On Hopper its cache has 16 bits (kv_cache_config: auto).
            return Formats("bf16", "mxfp4", "bf16")
        if shape.family.startswith("DeepSeek"):
            return Formats("fp8_block", "nvfp4" if form == "nvfp4" else "fp8_block", "fp8")
        return Formats(form, form, "fp8")
    head = {"llama-bench": "q6_k" if form != "bf16" else form, "gpt-fast": form}
    return Formats(form, form, "bf16", head.get(row.group, "bf16"))


def predict_serving(replay: ServeReplay) -> float:
    """The row's quantity by the cost of its steps."""
    row, cost, engine = replay.row, replay.cost, replay.engine
    prompt, output, metric = replay.prompt, replay.output, row.metric
    before, batch = int(row.of("kv_len")), int(row.of("batch"))
    if metric == "prefill_tokens_per_s":
        return prompt / prompt_s(cost, engine, prompt, before)
    if metric == "ttft_ms":
        return 1e3 * prompt_s(cost, engine, prompt)
    step = cost.seconds([(before + prompt + output // 2, 1)] * max(1, batch))
    if metric.startswith("decode_tokens_per_s"):
        return max(1, batch) / step
    if metric == "tpot_ms":
        return 1e3 * step
    if not isinstance(cost, AcceleratedStepCost) or not (prompt and output):
        raise UnplayableError(f"{metric}: needs lengths, and an accelerator")
    if batch:
        # One batch from its prompts to its last token.
        whole = cost.seconds([(0, prompt)] * batch) + output * step
        return batch * output / whole
    many = min(engine.most * cost.split.replicas, cost.most_requests(prompt, output))
    if engine.overlap:
        many = min(many, engine.most * output / (prompt + output))
    clients = Clients(many, prompt, output)
    requests = row.of("requests")
    if metric in _MEANS:
        if not (requests and row.of("rate")):
            raise UnplayableError(f"{metric}: needs requests and their rate")
        seconds = arriving(cost, clients, row.of("rate"), int(requests))
        return 1e3 * seconds[_MEANS.index(metric)]
    if row.group == "tensorrt-llm":
        requests = _REQUESTS.get((prompt, output), 0)
    tokens = prompt + output if metric.startswith("total") else output
    rate = tokens / drained_s(cost, clients, requests or math.inf)
    return rate / replay.devices if metric.endswith("per_gpu") else rate
