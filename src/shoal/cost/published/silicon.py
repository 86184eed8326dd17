"""Measured serving runs of 2025 and 2026 under a closed loop: read, and turned into plans.

Rows are the public ones of ai-dynamo/aiconfigurator (Apache-2.0): time to first token and time per
output token, with devices, degrees, formats and concurrency. What a row leaves out is filled by
rules that its ``filled`` names; a row whose settings contradict each other, or do not say how many
servers there are, is skipped with the reason.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shoal.core.errors import ConfigError, ShoalError, require
from shoal.cost.kernels.serving_engines import ENGINES, ServingEngine
from shoal.cost.published.devices import gpu
from shoal.cost.published.rows import UnplayableError
from shoal.cost.serving.closed_loop import Clients, ClosedLoop, closed_loop
from shoal.cost.shapes import find
from shoal.cost.step_cost.accelerated import AcceleratedStepCost, Formats, ServingSplit
from shoal.ir import ModelShape

_DEVICES = {
    "a100_sxm": "A100-80GB",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "h100_sxm": "H100-80GB",
    "h200_sxm": "H200",
}
_NEEDED = ("id", "backend", "model_path", "system", "mode", "isl", "osl", "silicon_ttft_ms")
# Lengths of InferenceX are drawn from 0.8 of the stated ones to these (random-range-ratio of its
# benchmark_serving.py); runs of aiconfigurator's own automation, whose source is the path of a
# file, have the stated ones.
_SPREAD, _AS_STATED = 0.2, re.compile(r"source_file=/")
# Families whose published eight-bit weights have a scale for each block.
_BLOCKS = ("DeepSeek V3", "MiniMax", "Qwen3.5")


@dataclass(frozen=True, eq=False)
class SiliconRun:
    """One measured run as the price sees it.

    Args:
        device: as published.
        loop: seconds by cause.
        ttft_s: measured s to the first token.
        tpot_s: measured s of a token.
        run: degrees and formats, in short.
        filled: rules by which the row was completed.
        clients: workload of the clients.
        splits: of a server that decodes; then of one of prompts, if these have their own.
        servers: of each of these kinds.
        formats: of weights and cache.
    """

    id: str
    model: str
    device: str
    engine: str
    loop: ClosedLoop
    ttft_s: float
    tpot_s: float
    run: str
    filled: tuple[str, ...]
    clients: Clients
    splits: tuple[ServingSplit, ...]
    servers: tuple[int, int]
    formats: Formats


def read_silicon(path: Path | None = None) -> tuple[dict[str, str], ...]:
    """Rows of the shipped table, or of another file with its columns.

    Raises:
        ConfigError: a column is missing.
    """
    if path is None:
        packed = resources.files("shoal.cost.published").joinpath("silicon.csv.gz").read_bytes()
        text, where = gzip.decompress(packed).decode(), "silicon.csv.gz"
    else:
        text, where = read_text(path), str(path)
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    require(not missing, where, missing, expected="measured serving runs with these columns")
    return tuple(reader)


def replay_silicon(row: Mapping[str, str]) -> SiliconRun:
    """A row as a run.

    Raises:
        UnplayableError: what it states contradicts itself or is not enough.
    """
    filled: list[str] = []
    try:
        shape = find(row["model_path"])
        require(row["system"] in _DEVICES, "system", row["system"], expected=", ".join(_DEVICES))
        require(row["backend"] in ENGINES, "backend", row["backend"], expected=", ".join(ENGINES))
        engine = ENGINES[row["backend"]]
        formats = _formats(row, shape, engine)
        split_mode = row["mode"] == "disagg"
        if split_mode and not row["decode_num_workers"]:
            raise UnplayableError("it does not say how many servers compute prompts and decode")
        decode = _cost(row, "decode_" if split_mode else "", shape, engine, formats, filled)
        prefill = _cost(row, "prefill_", shape, engine, formats, filled) if split_mode else None
        servers = _number(row, "decode_num_workers"), _number(row, "prefill_num_workers")
        number = _clients(row, decode, servers[0], filled)
        spread = 0.0 if _AS_STATED.search(row["silicon_data_source"]) else _SPREAD
        clients = Clients(number, int(row["isl"]), int(row["osl"]), spread)
        loop = closed_loop(decode, clients, prefill, decoders=servers[0], prefillers=servers[1])
    except ShoalError as error:
        raise UnplayableError(str(error)) from error
    own = decode.split
    return SiliconRun(
        id=row["id"],
        model=shape.name,
        device=row["system"],
        engine=row["backend"],
        loop=loop,
        ttft_s=_measured(row, "silicon_ttft_ms"),
        tpot_s=_measured(row, "silicon_tpot_ms"),
        run=f"{engine.name}, {row['mode']}, tp {own.tp} x {own.replicas}, experts over "
        f"{own.experts_over}, {formats.dense}/{formats.experts}, {clients.number:g} clients, "
        f"{clients.prompt} + {clients.output} tokens",
        filled=tuple(dict.fromkeys(filled)),
        clients=clients,
        splits=(own, *(() if prefill is None else (prefill.split,))),
        servers=servers,
        formats=formats,
    )


def _formats(row: Mapping[str, str], shape: ModelShape, engine: ServingEngine) -> Formats:
    if shape.family == "gpt-oss":
        return Formats("bf16", "mxfp4", "fp8" if engine.name == "TensorRT-LLM" else "bf16")
    named = {"fp8": "fp8", "fp4": "nvfp4"}.get(row["precision"], "bf16")
    dense = row["gemm_quant_mode"] or named
    experts = row["moe_quant_mode"] or dense
    if named == "bf16":
        dense = experts = "bf16"
    elif named == "fp8" and shape.family in _BLOCKS:
        dense = experts = "fp8_block"
    return Formats(dense, experts, "bf16" if dense == "bf16" else engine.kv_format)


def read_text(path: Path) -> str:
    """Text of a table, packed by gzip or not.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes()).decode()
        return path.read_text(encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _measured(row: Mapping[str, str], column: str) -> float:
    """Seconds of a column in ms."""
    text = row.get(column) or ""
    try:
        value = float(text) / 1e3
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UnplayableError(f"{column} = {text!r}: expected ms above 0")
    return value


def _number(row: Mapping[str, str], column: str) -> int:
    """A degree; 1 where it is empty or zero."""
    return max(1, int(float(row.get(column) or 1)))


def _cost(
    row: Mapping[str, str],
    side: str,
    shape: ModelShape,
    engine: ServingEngine,
    formats: Formats,
    filled: list[str],
) -> AcceleratedStepCost:
    device = gpu(_DEVICES[row["system"]])
    tp, replicas = _number(row, f"{side}tp_size"), _number(row, f"{side}attention_dp_size")
    each, over = _number(row, f"{side}moe_tp_size"), _number(row, f"{side}moe_ep_size")
    if tp * replicas > device.domain and each == over and each * over == tp * replicas:
        filled.append(f"degrees count devices twice: {over} devices, experts over all")
        tp, replicas, each = (over, 1, 1) if tp > 1 else (1, over, 1)
    if not shape.num_experts:
        each, over = tp * replicas, 1
    split = ServingSplit(tp, replicas, each, over, _number(row, f"{side}pp_size"))
    return AcceleratedStepCost(device, shape, engine, split, formats)


def _clients(
    row: Mapping[str, str], decode: AcceleratedStepCost, decoders: int, filled: list[str]
) -> float:
    if match := re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"]):
        return float(match.group(1))
    if row["batch_size"]:
        filled.append("clients: the batch")
        return float(row["batch_size"])
    if row["decode_batch_size"]:
        filled.append("clients: the batch of all servers")
        return float(row["decode_batch_size"]) * decoders * decode.split.replicas
    raise UnplayableError("it states no concurrency and no batch")
