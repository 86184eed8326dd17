"""The published rows: read, completed by stated rules, and turned into runs.

A row that leaves something open is completed by a rule, and says which; a row that lacks
what decides (how many devices, which model) is not replayed, and says why.
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

from shoal.core.errors import ConfigError, ModelError, require
from shoal.cost.gpu.device import Accelerator
from shoal.cost.published import devices
from shoal.cost.published.engines import engine_of, group_of
from shoal.cost.published.runs import PublishedRun
from shoal.cost.shapes import find
from shoal.ir import ModelShape

_NEEDED = ("id", "source", "model", "device", "reported_metric", "reported_value")
METRICS = ("tokens_per_s_per_gpu", "step_s", "mfu", "hfu", "tflops_per_gpu")


@dataclass(frozen=True, eq=False)
class PublishedRow:
    """One published measurement.

    Args:
        group: the publication; all tables of one project are one.
        remembered: the value or a deciding setting was recalled, not read.
        raw: every cell.
    """

    id: str
    group: str
    source: str
    metric: str
    value: float
    remembered: bool
    raw: Mapping[str, str]

    def number(self, key: str) -> int:
        """A cell as a whole number; 0 if it is empty."""
        text = self.raw.get(key, "")
        return int(float(text)) if text else 0


def read(path: Path | None = None) -> tuple[PublishedRow, ...]:
    """All rows of the shipped table, or of another file of its form.

    Raises:
        ConfigError: a column is missing or a cell is not a number; the message names the line.
    """
    return _shipped() if path is None else _parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _shipped() -> tuple[PublishedRow, ...]:
    text = resources.files("shoal.cost.published").joinpath("training.csv")
    return _parse(text.read_text(encoding="utf-8"), "training.csv")


def _parse(text: str, where: str) -> tuple[PublishedRow, ...]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    require(not missing, where, missing, expected="a table of runs with these columns")
    rows = []
    for line, cells in enumerate(reader, 2):
        at = f"{where}, line {line}"
        try:
            value = float(cells["reported_value"])
        except (TypeError, ValueError):
            raise ConfigError(
                f"{at}: reported_value = {cells['reported_value']!r}: expected a number"
            ) from None
        require(
            math.isfinite(value) and value > 0, f"{at}: reported_value", value, expected="above 0"
        )
        metric = cells["reported_metric"]
        rows.append(
            PublishedRow(
                cells["id"],
                group_of(cells["source"]),
                cells["source"],
                metric,
                value,
                cells.get("confidence") == "memory",
                cells,
            )
        )
    return tuple(rows)


@dataclass(frozen=True)
class TrainReplay:
    """A row as a run.

    Args:
        run: how it was run.
        gpu: on what.
        filled: rules by which the row was completed.
        open: what a search still has to choose.
    """

    row: PublishedRow
    run: PublishedRun
    gpu: Accelerator
    filled: tuple[str, ...]
    open: frozenset[str] = frozenset()


class UnplayableError(ModelError):
    """A row has no value for a required field."""


# Names of the rows' models among the shipped shapes.
_NAMED = (
    (r"Llama-3(\.1)? 8B", "Llama-3.1-8B"),
    (r"Llama-3(\.1)? 70B", "Llama-3.1-70B"),
    (r"Llama-3(\.1)? 405B", "Llama-3.1-405B"),
    (r"Llama-2 70B", "Llama-2-70b"),
    (r"DeepSeek-V3", "DeepSeek-V3"),
    (r"DeepSeek-V2", "DeepSeek-V2"),
    (r"gpt-oss-120b", "gpt-oss-120b"),
    (r"Qwen3-30B-A3B", "Qwen3-30B-A3B"),
    (r"Qwen3-235B-A22B", "Qwen3-235B-A22B"),
    (r"Kimi-K2", "Kimi-K2-Instruct"),
    (r"Mixtral 8x7B", "Mixtral-8x7B-v0.1"),
    (r"mixtral-8x22b", "Mixtral-8x22B-v0.1"),
    (r"qwen2-57b-a14b", "Qwen2-57B-A14B"),
    (r"OPT 175B", "OPT-175B"),
    (r"BLOOM 176B", "BLOOM-176B"),
    (r"PaLM 540B", "PaLM 540B"),
    (r"gpt2-124m", "GPT-2 small"),
    (r"gpt2-350m", "GPT-2 medium"),
    (r"gpt2-774m", "GPT-2 large"),
    (r"gpt2-1558m", "GPT-2 XL"),
    (r"GPT-3 17[57]B|gpt3-175b", "GPT-3 175B"),
)
# Shapes that a row names by size alone: layers, hidden, heads, feed-forward, vocabulary, tied,
# gated. nanotron's are those of its benchmark script, whose parameters they reproduce.
_SIZED = {
    ("nanotron", 1.34): (16, 2048, 32, 8192, 131072, True, True),
    ("nanotron", 3.57): (28, 3072, 24, 8192, 131072, True, True),
    ("nanotron", 8.86): (32, 4096, 32, 14336, 131072, False, True),
    ("nanotron", 80.0): (80, 8192, 64, 28672, 131072, False, True),
    ("bigscience", 1.3): (24, 2048, 16, 8192, 50304, True, False),
}


def shape_of(row: PublishedRow, filled: list[str]) -> ModelShape:
    """The model of a row."""
    number = row.number
    model = row.raw["model"]
    for pattern, name in _NAMED:
        if re.match(pattern, model):
            shape = find(name)
            layers = number("layers") or shape.num_layers
            change: dict[str, int] = {"num_layers": layers}
            if layers < shape.num_layers:
                change["num_dense_layers"] = min(shape.num_dense_layers, 1 if layers > 1 else 0)
            if row.group == "simumax" and shape.num_experts:
                change["num_dense_layers"] = 0
            if number("vocab"):
                change["vocab_size"] = number("vocab")
            return shape.model_copy(update=change)
    params = float(row.raw.get("params_b") or 0)
    if (row.group, params) in _SIZED:
        layers, D, heads, F, V, tied, gated = _SIZED[row.group, params]
        filled.append("shape by its parameter count")
        return _plain(model, layers, D, heads, heads, F, V, tied=tied, gated=gated)
    D = number("hidden")
    if not D:
        raise UnplayableError("no shape of the model is stated")
    layers, V = number("layers"), number("vocab") or 51200
    if not layers:
        if not params:
            raise UnplayableError("neither layers nor parameters are stated")
        pp = max(1, number("pp"))
        layers = max(1, round((params * 1e9 - V * D) / (12 * D * D) / pp)) * pp
        filled.append("layers from the parameter count, a multiple of the stages")
    heads = number("heads")
    if not heads and row.group == "bigscience":
        heads = 80
        filled.append("80 heads, recalled from the same notes")
    if not heads:
        near = [h for h in range(1, D + 1) if D % h == 0 and h % max(1, number("tp")) == 0]
        heads = min(near, key=lambda h: abs(h - D / 128))
        filled.append("heads of about 128")
    if not number("vocab"):
        filled.append("vocabulary of 51200")
    return _plain(
        model,
        layers,
        D,
        heads,
        number("kv_heads") or heads,
        number("ffn_hidden") or 4 * D,
        V,
        tied=True,
        gated=False,
    )


def _plain(
    name: str, layers: int, D: int, heads: int, kv: int, F: int, V: int, *, tied: bool, gated: bool
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden=D,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=D // heads,
        ffn_hidden=F,
        gated=gated,
        vocab_size=V,
        max_position=2**20,
        tied=tied,
        attention="MHA" if kv == heads else "GQA",
    )


_PRECISION = {
    "": "bf16",
    "bf16": "bf16",
    "amp_bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "amp_fp8": "fp8",
    "fp8-cs": "fp8",
    "fp8 tensorwise": "fp8",
    "fp8 rowwise": "fp8-rows",
    "mxfp8": "mxfp8",
    "fp8-mx": "mxfp8",
    "nvfp4": "fp4",
}


def _window(row: PublishedRow) -> tuple[int, float]:
    """Keys that a query sees at most, and the share of layers where that holds."""
    if "gpt-oss" in row.raw["model"]:
        return 128, 0.5
    # Its masks are documents and windows of 1024 tokens.
    return (1024, 1.0) if row.group == "modded-nanogpt" and row.number("seq_len") > 1024 else (0, 0)


def replay(row: PublishedRow) -> TrainReplay:
    """The run that a row describes.

    Raises:
        UnplayableError: what decides is not stated.
    """
    number = row.number
    filled: list[str] = []
    if row.metric not in METRICS:
        raise UnplayableError(f"metric {row.metric!r}: expected one of {', '.join(METRICS)}")
    if "offload" in row.source.lower():
        raise UnplayableError("weights and states are offloaded to the host, which is not modelled")
    if re.match(r"Nemotron-3", row.raw["model"]):
        raise UnplayableError(
            "most of its blocks are state-space layers, which a shape cannot state"
        )
    if row.raw["device"] == "TPU v3":
        raise UnplayableError("no shape of the model is stated")
    total = number("devices")
    if not total:
        raise UnplayableError("the number of devices is not stated")
    shape = shape_of(row, filled)
    engine = engine_of(row.source, row.id)
    ic = row.raw.get("interconnect", "")
    outside = 0.0
    if match := re.search(r"(\d+) Gb/s (?:RoCE )?per node", ic):
        outside = float(match.group(1)) * 1e9 / 8 / 8
    device = "B200-SimuMax" if row.group == "simumax" else row.raw["device"]
    gpu = devices.gpu(device, domain=number("devices_per_node"), outside=outside)
    seq = number("seq_len")
    if not seq:
        seq = 4096 if row.group == "nanotron" else 2048
        filled.append(f"sequences of {seq}, the program's own")
    open_: set[str] = set()
    tp, pp, cp = number("tp"), number("pp"), max(1, number("cp"))
    if row.group == "opt":
        pp = 1
    if not tp or not pp:
        open_.add("degrees")
        filled.append("degrees of the fastest plan that fits")
        tp = pp = 1
    dp = max(1, total // (tp * pp * cp))
    ep = max(1, number("ep"))
    vpp = max(1, number("vpp"))
    micro, batch = number("micro_batch"), number("global_batch_sequences")
    if row.group == "torchtitan" and pp > 1 and not micro:
        batch = batch or pp * dp
        micro = max(1, batch // dp // pp)
        filled.append("as many micro-batches as stages, the program's default")
    if not batch and pp > 1:
        raise UnplayableError("the batch, which decides the pipeline's bubble, is not stated")
    if not batch:
        batch = dp * (micro or 1)
        filled.append("one micro-batch of each rank a step")
    if batch % dp and "degrees" not in open_:
        batch = dp * max(1, round(batch / dp))
        filled.append(f"a batch of {batch}, a multiple of the ranks")
    if not micro:
        open_.add("micro_batch")
        filled.append("the fastest micro-batch that fits")
        micro = 1
    recompute = row.raw.get("recompute") or ""
    if not recompute:
        old = engine.attention == "plain"
        recompute = "full" if old or row.group == "palm" else "none"
        filled.append(f"recomputation: {recompute}")
    if recompute == "selective" and row.group == "torchtitan":
        recompute = "half"
    precision = _PRECISION[row.raw.get("precision", "")]
    if number("zero_stage") == 0 and row.raw.get("zero_stage", "") == "":
        zero = 1 if engine.sharded_update else 0
    else:
        zero = number("zero_stage")
        if row.group == "nanotron":
            engine = replace(engine, sharded_update=zero > 0)
    # Of Megatron-Bridge, as the recipes of its releases 0.1 to 0.5 say (scripts/performance).
    exchange = row.raw.get("expert_exchange", "")
    if "all-to-all" in exchange:
        engine = replace(engine, dedup=False)
    if row.raw.get("recorded"):
        engine = replace(engine, graphs=True)
    vocab = "pp" if re.search(r"vocab-1|interlaced", row.id) else "tp"
    modern = engine.name not in ("Megatron-LM 2021", "Megatron-DeepSpeed")
    if row.group == "megatron-core-readme" and pp > 1 and vpp == 1:
        open_.add("vpp")
        filled.append("chunks of a stage: the fastest")
    run = PublishedRun(
        shape=shape,
        seq_len=seq,
        micro_batch=micro,
        global_batch=batch,
        engine=engine,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        vpp=vpp,
        sp=modern and tp > 1,
        zero=zero,
        vocab="pp" if vocab == "pp" else "tp",
        recompute=recompute,  # type: ignore[arg-type]
        precision=precision,
        tuned="lora" if "LoRA" in row.raw["model"] else "all",
        overlap="experts" if "hidden" in exchange else "none",
        window=_window(row),
    )
    if row.group == "torchtitan" and run.pp > 1 and "interleaved" in row.raw.get("schedule", ""):
        run = replace(run, vpp=2)
    return TrainReplay(row, run, gpu, tuple(filled), frozenset(open_))
