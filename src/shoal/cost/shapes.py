"""Shapes of the well-known open models and of the zoo, shipped as facts.

``shapes.csv`` beside this file holds one model a row, each with its source and whether
the source was read or the row stands from memory.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import combinations

from shoal.core.config import parse
from shoal.core.errors import ModelError, nearest
from shoal.core.files import expanded, read_yaml
from shoal.cost.configs import from_huggingface, read_config
from shoal.ir import ModelShape, TrainJob

# Other names of shipped shapes: what people say, and models of the same shape.
_ALIASES = {
    "bloom": "BLOOM-176B",
    "deepseek-r1-distill-llama-8b": "Llama-3.1-8B",
    "deepseek-r1-distill-llama-70b": "Llama-3.3-70B-Instruct",
    "deepseek-r1-distill-qwen-7b": "Qwen2.5-7B",
    "deepseek-r1-distill-qwen-14b": "Qwen2.5-14B",
    "deepseek-r1-distill-qwen-32b": "Qwen2.5-32B",
    "gpt2": "GPT-2 small",
    "llama-4-maverick": "Llama-4-Maverick-17B-128E",
    "llama-4-scout": "Llama-4-Scout-17B-16E",
    "mistral-nemo": "Mistral-Nemo-12B",
    "nemotron-3-nano": "Nemotron-3-Nano-30B-A3B",
    "phi-3-medium-4k": "Phi-3-medium-14B",
}
# Words of a name that say how a model was trained last, in which format it is stored, when it was
# made, or by whom; its shape is the same without them.
_ASIDE = re.compile(
    r"instruct|chat|base|it|pt|hf|sft|dpo|think|thinking|exp|preview|terminus|meta|nvidia|unsloth|"
    r"fp8|fp4|fp16|bf16|nvfp4|mxfp4|awq|gptq|int4|int8|gguf|mlx|bnb|qat|[2-8]bit|w\d+a\d+|g128|"
    r"dynamic|static|block|pertensor|quantized\.w\d+a\d+|q\d|0|k|m|s|v0\.\d|v1\.0|\d{4}"
)
_MOST_ASIDE = 8
# Words of them that say how the files of a repository hold the weights.
_FORMATS = {
    "bf16": "plain",
    "fp8": "fp8",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "awq": "int4-g128",
    "gptq": "int4-g128",
    "int4": "int4-g128",
    "int8": "int8-channel",
    "bnb": "nf4-g64",
}


@functools.cache
def _rows() -> dict[str, dict[str, str]]:
    text = resources.files("shoal.cost").joinpath("shapes.csv").read_text(encoding="utf-8")
    return {row["name"]: row for row in csv.DictReader(text.splitlines())}


def names() -> tuple[str, ...]:
    """Names of all shipped shapes: the zoo first, then the open models."""
    return tuple(_rows())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "", name.lower())


def _without_asides(name: str) -> Iterator[str]:
    """A name, and what remains of it with fewer and fewer of the words that are no shape's."""
    words = re.split(r"[-_/ ]+", name.lower())
    asides = [at for at, word in enumerate(words) if _ASIDE.fullmatch(word)][-_MOST_ASIDE:]
    for kept in range(len(asides), -1, -1):
        for some in combinations(asides, kept):
            yield _plain("".join(w for at, w in enumerate(words) if at not in asides or at in some))


@functools.cache
def _plain_names() -> dict[str, str]:
    exact = {_plain(name): name for name in _rows()}
    exact |= {_plain(other): name for other, name in _ALIASES.items()}
    bare = {list(_without_asides(name))[-1]: name for name in reversed(_rows())}
    return {**bare, **exact}


@functools.cache
def find(name: str) -> ModelShape:
    """The shipped shape called ``name``; letter case, spaces and dashes do not matter.

    Of a Hugging Face repository, such as ``Qwen/Qwen3-14B-Instruct-FP8``, the part behind the
    slash counts; words for training, format and date are dropped where the rest names a shape. A
    word for a format says how its files hold the ``weights``.

    Raises:
        ModelError: there is none; the message has the nearest names.
    """
    known = _plain_names()
    ways = (_plain(name), *_without_asides(name.rpartition("/")[2]))
    spelled = next((known[way] for way in ways if way in known), None)
    if spelled is None:
        last = name.rpartition("/")[2]
        hint = nearest(last, _rows(), most=3) or nearest(last.lower(), _ALIASES, most=3)
        raise ModelError(
            f"model = {name!r}: expected one of the {len(_rows())} shipped shapes, a directory "
            f"with a config.json, or a YAML file of a shape; {hint}{' ' if hint else ''}or "
            "describe your own in eight lines of YAML (docs/tutorials/plan-a-cluster.md, section "
            "2) and name the file"
        )
    shape = _shape(_rows()[spelled])
    if _plain(name) in known:
        return shape
    words = re.split(r"[-_/. ]+", name.rpartition("/")[2].lower())
    held = next((_FORMATS[word] for word in words if word in _FORMATS), shape.weights)
    return shape.model_copy(update={"weights": held})


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
        # Our own models are trained, and kept, in fp32; published ones are in bf16.
        stored="fp32" if row["family"] == "Shoal" else "bf16",
        weights=row["weights"] or "plain",
        rope_base=float(row["rope_base"]) if row["rope_base"] else None,
        source="; ".join(notes),
    )


def resolve(model: str) -> ModelShape:
    """The shape that ``TrainJob.model`` means: a name, a Hugging Face directory, a shape file.

    Raises:
        ModelError: none of the three; or the directory's architecture is not supported.
        ConfigError: the shape file has a wrong key or value, or this can be no path.
    """
    if not model.strip():
        raise ModelError(
            f"model = {model!r}: is empty; name a model such as Qwen3-14B, a directory with a "
            "config.json, or a YAML file of a shape"
        )
    path = expanded(model)
    if path.is_dir():
        return from_huggingface(read_config(path / "config.json"), name=path.resolve().name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ModelError(f"model = {model!r}: no such file; give a shape file's path")
        return parse(ModelShape, read_yaml(path), where=model)
    if path.suffix == ".json":
        return from_huggingface(read_config(path), name=path.resolve().parent.name)
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
