"""ONNX Runtime GenAI: ``Generator`` over batches padded on the right, to the longest answer.

Its continuous batching (``Engine`` with paged attention) is for CUDA alone. On a CPU its model
builder makes graphs that compute in fp32, with weights in fp32, int8 or int4: the CPU provider
lacks operators in bf16, and the graph in fp16 fails. So bf16 weights are widened to fp32.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import onnxruntime_genai
from loop import Loaded, made, main

_PRECISIONS = {"bf16": "fp32", "int8": "int8", "int4": "int4"}
# As the batches of of_transformers.py.
_BATCH = 32
# Weights that share a scale; the builder's 32 are a third slower here.
_GROUP = 128
# Never a token of a prompt, since padding is known by its id; the gather takes the last row for it.
_PADDING = -1


def _source(options: dict[str, Any]) -> Path:
    """The model's directory with what the builder demands: an end token and a tokenizer."""
    given = Path(options["model"])

    def write(place: Path) -> None:
        config = json.loads((given / "config.json").read_text())
        if config.get("eos_token_id") is None:
            config["eos_token_id"] = config["vocab_size"] - 1
        for file in given.iterdir():
            if file.name != "config.json":
                (place / file.name).symlink_to(file.resolve())
        (place / "config.json").write_text(json.dumps(config))
        if not any((place / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
            from tokenizers import Tokenizer, models

            words = {f"<{token}>": token for token in range(config["vocab_size"])}
            tokenizer = Tokenizer(models.WordLevel(words))
            tokenizer.save(str(place / "tokenizer.json"))
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (place / "tokenizer_config.json").write_text(json.dumps(kind))

    target: Path = made(Path(options["scratch"]) / "onnx-source", write)
    return target


def _directory(options: dict[str, Any]) -> Path:
    """The model in ONNX Runtime GenAI's format and in a form, written once."""
    form = options["form"]
    if form not in _PRECISIONS:
        raise ValueError(f"form {form}: expected {', '.join(_PRECISIONS)}")

    def write(place: Path) -> None:
        from onnxruntime_genai.models.builder import create_model, parse_extra_options

        cache = place.with_suffix(".cache")
        what = ("", str(source), str(place), _PRECISIONS[form], "cpu", str(cache))
        # With ``prune_lm_head``, rows padded on the right would have the logits of the padding.
        extra = ["hf_token=false", f"block_size={_GROUP}"]
        create_model(*what, **parse_extra_options(*what, extra))

    source = _source(options)
    target: Path = made(Path(options["scratch"]) / f"onnx-{_PRECISIONS[form]}", write)
    return target


def load(options: dict[str, Any]) -> Loaded:
    """See :mod:`loop`."""
    directory, threads = _directory(options), options["threads"]
    session: dict[str, Any] = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    if len(cores) == threads > 1:
        # The calling thread works too; the others are named by cores that count from 1.
        others = ";".join(str(core + 1) for core in cores[1:])
        session["session.intra_op_thread_affinities"] = others
    config = onnxruntime_genai.Config(str(directory))
    changed = {"pad_token_id": _PADDING, "decoder": {"session_options": session}}
    config.overlay(json.dumps({"model": changed}))
    model = onnxruntime_genai.Model(config)
    if len(cores) == threads:
        os.sched_setaffinity(0, cores[:1])

    def batch(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        width, most = max(map(len, prompts)), max(new)
        ids = np.full((len(prompts), width), _PADDING, dtype=np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        params = onnxruntime_genai.GeneratorParams(model)
        # At least as many as at most: the end token is never chosen.
        params.set_search_options(
            batch_size=len(prompts),
            min_length=width + most,
            max_length=width + most,
            do_sample=False,
        )
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(ids)
        columns = []
        while not generator.is_done():
            generator.generate_next_token()
            columns.append(generator.get_next_tokens().copy())
        rows = np.stack(columns, axis=1)
        return [row[:count].tolist() for row, count in zip(rows, new, strict=True)]

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        results = []
        for first in range(0, len(prompts), _BATCH):
            results += batch(prompts[first : first + _BATCH], new[first : first + _BATCH])
        return results

    precision = _PRECISIONS[options["form"]]
    settings = f"computes in fp32; {json.dumps(session)}; static batches, padded on the right"
    if precision != "fp32":
        settings += f"; groups of {_GROUP}, accuracy_level 4"
    weights = "" if precision == options["form"] else precision
    return Loaded(generate, onnxruntime_genai.__version__, settings, weights)


if __name__ == "__main__":
    main(load)
