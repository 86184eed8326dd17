"""Shapes of the well-known open models and of the zoo, shipped as facts.

``shapes.csv`` beside this file holds one model a row, each with its source and whether
the source was read or the row stands from memory.
"""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.core.config import parse
from shoal.core.errors import ConfigError, ModelError, nearest
from shoal.core.files import read_yaml
from shoal.ir import ModelShape, TrainJob
from shoal.ir.architecture import Architecture

__all__ = ["ARCHITECTURES", "find", "from_huggingface", "names", "published", "resolve", "shape_of"]


@functools.cache
def _rows() -> dict[str, dict[str, str]]:
    text = resources.files("shoal.cost").joinpath("shapes.csv").read_text(encoding="utf-8")
    return {row["name"]: row for row in csv.DictReader(text.splitlines())}


def names() -> tuple[str, ...]:
    """Names of all shipped shapes: the zoo first, then the open models."""
    return tuple(_rows())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "", name.lower())


@functools.cache
def _plain_names() -> dict[str, str]:
    return {_plain(name): name for name in _rows()}


@functools.cache
def find(name: str) -> ModelShape:
    """The shipped shape called ``name``; letter case, spaces and dashes do not matter.

    A Hugging Face repository name such as ``Qwen/Qwen3-14B`` is found by its last part.

    Raises:
        ModelError: there is none; the message has the nearest names.
    """
    known = _plain_names()
    spelled = known.get(_plain(name)) or known.get(_plain(name.rpartition("/")[2]))
    if spelled is None:
        hint = nearest(name, _rows()) or nearest(_plain(name), known)
        raise ModelError(
            f"model = {name!r}: expected one of the {len(known)} shipped shapes, a directory with "
            f"a config.json, or a YAML file of a shape" + (f"; {hint}" if hint else "")
        )
    return _shape(_rows()[spelled])


def published(name: str) -> tuple[float, float]:
    """Published parameters of a shipped shape: (all, active for one token)."""
    row = _rows()[find(name).name]
    return float(row["params_b_total"]) * 1e9, float(row["params_b_active"]) * 1e9


def _shape(row: Mapping[str, str]) -> ModelShape:
    def number(key: str) -> int:
        return int(row[key] or 0)

    mechanism = re.match(r"[A-Z]+", row["attention"])
    detail = row["attention"][mechanism.end() if mechanism else 0 :].strip(" ;:")
    notes = [row["source"]]
    if detail:
        notes.append(f"attention: {detail}")
    if row["confidence"] != "read":
        notes.append("from memory")
    return ModelShape(
        name=row["name"],
        num_layers=number("layers"),
        hidden=number("hidden"),
        num_heads=number("heads"),
        num_kv_heads=number("kv_heads"),
        head_dim=number("head_dim"),
        ffn_hidden=number("ffn_hidden"),
        gated=row["ffn_gated"] == "yes",
        num_experts=number("experts"),
        num_shared_experts=number("shared_experts"),
        top_k=number("top_k"),
        expert_hidden=number("expert_ffn"),
        num_dense_layers=number("dense_layers"),
        vocab_size=number("vocab"),
        max_position=number("max_position"),
        tied=row["tied_embeddings"] == "yes",
        qk_norm=row["qk_norm"] == "yes",
        attention_bias=row["attention_bias"] == "yes",
        attention=mechanism.group() if mechanism else "GQA",
        family=row["family"],
        source="; ".join(notes),
    )


def resolve(model: str) -> ModelShape:
    """The shape that ``TrainJob.model`` means: a name, a Hugging Face directory, a shape file.

    Raises:
        ModelError: none of the three; or the directory's architecture is not supported.
        ConfigError: the shape file has a wrong key or value.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return from_huggingface(_read_config(path / "config.json"), name=path.resolve().name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ModelError(f"model = {model!r}: there is no such file; give a shape file's path")
        return parse(ModelShape, read_yaml(path), where=model)
    if path.suffix == ".json":
        return from_huggingface(_read_config(path), name=path.resolve().parent.name)
    return find(model)


def shape_of(job: TrainJob) -> ModelShape:
    """The shape of the model that a job trains.

    Raises:
        ShoalError: as :func:`resolve`, or the model cannot have the job's architecture.
    """
    shape = resolve(job.model)
    job.architecture.moe.check(shape.num_experts, shape.top_k)
    return (
        shape.model_copy(update={"architecture": job.architecture})
        if job.architecture.says
        else shape
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise ModelError(f"{path}: not text in UTF-8; a model's config.json is expected") from cause
    except OSError as cause:
        raise ModelError(
            f"{path}: cannot be read ({cause.strerror}); a model directory has a config.json"
        ) from cause
    try:
        config = json.loads(text)
    except json.JSONDecodeError as cause:
        raise ModelError(
            f"{path}, line {cause.lineno}, column {cause.colno}: not JSON ({cause.msg})"
        ) from cause
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected an object of keys, found {type(config).__name__}")
    return config


def _dense(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": bool(config.get("attention_bias", False))}


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True, "attention_bias": bool(config.get("attention_bias", False))}


def _mixtral(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": config.get("num_local_experts", 8),
        "top_k": config.get("num_experts_per_tok", 2),
        "expert_hidden": config.get("intermediate_size", 14336),
    }


def _mdlm(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "family": "mdlm",
        "qk_norm": bool(config.get("qk_norm", False)),
        "attention_bias": bool(config.get("attention_bias", False)),
    }


# model_type -> (architecture class, what differs from the plain decoder)
ARCHITECTURES: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _dense),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "shoal_mdlm": ("ShoalForMaskedDiffusion", _mdlm),
}


def from_huggingface(config: Mapping[str, Any], *, name: str = "") -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Args:
        config: the parsed file.
        name: what to call the model if the file does not say.

    Raises:
        ModelError: the architecture is not supported, or a number is missing or wrong.
    """
    label = str(config.get("_name_or_path") or "").rpartition("/")[2] or name or "model"
    architecture, config = Architecture.from_huggingface(dict(config), f"config.json of {label}")
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(f"{key} ({value[0]})" for key, value in ARCHITECTURES.items())
        given = kind if kind is not None else config.get("architectures")
        raise ModelError(
            f"{label}: model_type = {given!r}: expected one of {known}; "
            "convert the model to one of these, or plan it from a shape file"
        )
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    kv_heads = config.get("num_key_value_heads")
    raw = {
        "name": label,
        "num_layers": config.get("num_hidden_layers"),
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "ffn_hidden": config.get("intermediate_size"),
        "vocab_size": config.get("vocab_size"),
        "max_position": config.get("max_position_embeddings", 2048),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "family": str(kind),
        "source": "config.json",
        "architecture": architecture,
        **ARCHITECTURES[str(kind)][1](config),
    }
    missing = [key for key, value in raw.items() if value is None]
    if missing:
        raise ModelError(f"{label}: config.json lacks what gives {', '.join(missing)}; add it")
    raw["attention"] = (
        "MHA" if raw["num_kv_heads"] == heads else "MQA" if raw["num_kv_heads"] == 1 else "GQA"
    )
    try:
        return parse(ModelShape, raw, where=label)
    except ConfigError as cause:
        raise ModelError(f"config.json of {cause}") from cause
