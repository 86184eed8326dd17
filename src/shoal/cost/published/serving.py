"""The published serving rows: read, turned into servers and loads, predicted."""

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
from shoal.cost.gpu.serve import (
    Load,
    ServeCalibration,
    Server,
    batch_of,
    full_load_s,
    prefill_s,
    step_s,
)
from shoal.cost.published.hosts import host_of
from shoal.cost.published.rows import UnplayableError
from shoal.cost.shapes import find
from shoal.ir import ModelShape

__all__ = ["ServeReplay", "ServeRow", "predict_serving", "read_serving", "replay_serving"]

METRICS = (
    "output_tokens_per_s_total",
    "output_tokens_per_s_per_gpu",
    "total_tokens_per_s_per_gpu",
    "decode_tokens_per_s",
    "decode_tokens_per_s_total",
    "prefill_tokens_per_s",
    "ttft_ms",
    "tpot_ms",
    "ttft_ms_mean",
    "tpot_ms_mean",
    "latency_ms_mean",
    "s_per_token",
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
        id: of the row.
        group: the publication; what belongs to one project is one.
        source: as published.
        engine: the program.
        metric: what was reported, with its unit.
        value: the number.
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
        row: the row.
        server: who serves.
        load: what is asked.
        devices: all devices.
        filled: rules by which the row was completed.
    """

    row: ServeRow
    server: Server
    load: Load
    devices: int
    filled: tuple[str, ...] = ()


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
# Bytes of a weight. The k-quants of llama.cpp keep some matrices wider: averages of its files.
_WEIGHT = (
    (r"(?i)fp4|nvfp4", 0.5625),
    (r"Q4_K_M", 0.613),
    (r"Q4_K_S|Q4_0", 0.575),
    (r"IQ4_XS", 0.54),
    (r"(?i)int4", 0.5625),
    (r"Q8|int8|fp8|(?i:q8)", 1.06),
    (r"(?i)fp32", 4.0),
)


def _bytes(precision: str) -> float:
    return next((size for pattern, size in _WEIGHT if re.search(pattern, precision)), 2.0)


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
_TRACES = {"Splitwise": (1155.0, 211.0), "LMSYS-Chat": (102.0, 222.0), "ShareGPT": (246.0, 322.0)}


def replay_serving(row: ServeRow) -> ServeReplay:
    """The server and the load that a row describes.

    Raises:
        UnplayableError: what decides is not stated or not modelled.
    """
    raw = row.raw
    filled: list[str] = []
    if row.metric not in METRICS:
        raise UnplayableError(f"metric {row.metric!r}: expected one of {', '.join(METRICS)}")
    if row.group == "tpi-llm":
        raise UnplayableError("weights come from disk and over networks whose rates are not stated")
    if "+" in raw["device"]:
        raise UnplayableError("experts are split between a GPU and its host, which is not modelled")
    shape = _shape(raw["model"])
    host = host_of(raw["device"])
    devices = int(raw["devices"] or 0)
    tp = int(raw["tp"] or 0)
    precision = raw["precision"]
    if row.group == "nanoflow" and not devices:
        devices = 1 if "8b" in row.id else 8
        filled.append(f"{devices} devices, as in its paper")
    devices = devices or 1
    weight = _bytes(precision)
    quantised = bool(re.search(r"Q\d|IQ\d|int4|int8", precision))
    server = Server(shape, host, weight_bytes=weight, quantised=quantised)
    work = raw["workload"]
    if row.group == "tensorrt-llm":
        old = "0.5.0" in row.source
        server = replace(
            server,
            dtype="fp4" if precision == "fp4" else "fp8",
            kv_bytes=1.0,
            tp=tp or 1,
            gap=1.0 if old else 0.35,
            kernels=14 if old else 10,
            step=0.0 if old else 1.0,
            most=int(row.of("batch")) or 2048,
            dense_bytes=2.0 if "gpt-oss" in raw["model"] else 0.0,
        )
        if "gpt-oss" in raw["model"]:
            # Its experts are four bits wide; Hopper multiplies them as bf16.
            server = replace(server, weight_bytes=0.53, dtype="bf16", quantised=True)
        if re.search(r"DEP(\d)", work):
            server = replace(server, tp=1, experts_dp=devices)
            if "deepseek" in row.id and precision == "fp4":
                server = replace(server, dense_bytes=1.0)
    elif row.group == "nanoflow":
        fast = row.engine == "NanoFlow"
        shares = {"NanoFlow": 1.0, "TensorRT-LLM": 1.0, "vLLM": 1.0}
        server = replace(
            server,
            tp=devices,
            gap=0.35 if row.engine in ("TensorRT-LLM", "NanoFlow") else 1.0,
            step=0.0 if fast else 1.0 if row.engine == "TensorRT-LLM" else 8.0,
            overlap=fast,
            most=2048 if fast else 256,
            products=shares.get(row.engine, 1.0),
        )
    elif row.group == "gpt-fast":
        server = replace(server, tp=devices)
        if "MI250X" in raw["device"]:
            server = replace(server, tp=1)
    elif row.group == "llama-bench":
        server = replace(server, stages=devices, kernels=14, chunk=512.0, plain=True)
    elif row.group == "ik_llama.cpp":
        server = replace(server, kernels=0, chunk=512.0, products=_repacked(work, precision))
    elif row.group == "sglang-xeon":
        fast = row.engine == "SGLang"
        server = replace(
            server, kernels=10, gap=0.6, products=1.0 if fast else 0.25, tp=devices if fast else 1
        )
    elif row.group == "llmservingsim":
        server = replace(
            server,
            tp=devices if "tp=" not in work and "dp=" not in work else 1,
            experts_dp=2 if "dp=2" in work else 1,
            most=int(row.of("max_num_seqs")) or 256,
            gap=0.5,
        )
    elif row.group == "nano-vllm":
        server = replace(server, gap=0.5, most=256 if row.engine == "vLLM" else 512)
    trace = next((v for name, v in _TRACES.items() if f"trace={name}" in work), None)
    if trace:
        load = Load(*trace)
        filled.append("mean lengths of the trace")
    elif row.group == "nano-vllm":
        load = Load(562.0, 523.0)
    else:
        load = Load(
            row.of("input_len") or row.of("input_len_mean"),
            row.of("output_len") or row.of("output_len_mean"),
        )
    return ServeReplay(row, server, load, devices, tuple(filled))


def _repacked(work: str, precision: str) -> float:
    """Share of the usual efficiency of products on a CPU, by how weights lie in memory."""
    if "repacking" in work or "R8" in precision:
        return 1.0
    return 0.4


def predict_serving(replay: ServeReplay, k: ServeCalibration) -> float:
    """The row's quantity by the model."""
    row, server, load = replay.row, replay.server, replay.load
    metric = row.metric
    stages = server.stages
    if metric == "prefill_tokens_per_s":
        tokens = load.prompt
        return tokens / prefill_s(server, k, tokens, row.of("kv_len"))
    if metric in ("decode_tokens_per_s", "decode_tokens_per_s_total"):
        batch = row.of("batch") or 1.0
        context = row.of("kv_len") + load.prompt + load.output / 2
        return batch / step_s(server, k, batch, context)
    if metric == "ttft_ms":
        return 1e3 * prefill_s(server, k, load.prompt)
    if metric == "tpot_ms":
        return 1e3 * step_s(server, k, 1.0, load.prompt + load.output / 2)
    if row.group == "llmservingsim":
        return _queued(replay, k)
    if row.of("batch"):
        batch = row.of("batch")
        prompt = prefill_s(server, k, batch * load.prompt)
        step = step_s(server, k, batch, load.prompt + load.output / 2)
        return batch * load.output / (prompt + load.output * step)
    seconds = full_load_s(server, k, load)
    if metric == "total_tokens_per_s_per_gpu":
        return (load.prompt + load.output) / seconds / replay.devices
    rate = load.output / seconds
    if metric == "output_tokens_per_s_per_gpu":
        return rate / replay.devices
    assert stages >= 1
    return rate


def _queued(replay: ServeReplay, k: ServeCalibration) -> float:
    """Mean milliseconds of 300 requests that arrive ten a second, in arrival order."""
    row, server, load = replay.row, replay.server, replay.load
    number, rate = int(row.of("requests")), 10.0
    slots = int(min(batch_of(server, load), server.most * server.experts_dp))
    prompt = prefill_s(server, k, 2048.0) * load.prompt / 2048.0
    now, arrived, done = 0.0, 0, 0
    running: list[list[float]] = []
    waiting: list[float] = []
    first: list[float] = []
    whole: list[float] = []
    each: list[float] = []
    while done < number:
        while arrived < number and arrived / rate <= now:
            waiting.append(arrived / rate)
            arrived += 1
        spent = 0.0
        if waiting and len(running) < slots:
            entered = waiting.pop(0)
            spent += prompt
            running.append([entered, now + prompt, 0.0])
            first.append(now + prompt - entered)
        if not running:
            now = max(now, arrived / rate)
            continue
        spent += step_s(server, k, float(len(running)), load.prompt + load.output / 2)
        spent += server.step * k.step_s
        # Several steps at a time while nothing can change.
        steps = 1.0 if waiting and len(running) < slots else 4.0
        now += spent * steps
        for item in running:
            item[2] += steps
        for item in [i for i in running if i[2] >= load.output]:
            running.remove(item)
            done += 1
            whole.append(now - item[0])
            each.append((now - item[1]) / load.output)
    result = {"ttft_ms_mean": first, "tpot_ms_mean": each, "latency_ms_mean": whole}[row.metric]
    return 1e3 * sum(result) / len(result)
