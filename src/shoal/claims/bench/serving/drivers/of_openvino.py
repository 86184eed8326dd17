"""OpenVINO GenAI: its pipeline of continuous batching on a paged cache.

Optimum Intel exports the directory once, with the bytes of its weights; NNCF compresses them to 8
or 4 bits as ``optimum-cli export openvino --weight-format int8`` or ``int4 --sym`` does.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import openvino
import openvino_genai
from loop import Loaded, made, main

_MODEL = "openvino_model.xml"
# What NNCF is asked for; at 4 bits, embeddings and head stay at 8.
_MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8_asym", {}),
    "int4": ("int4_sym", {"group_size": 128, "ratio": 1.0}),
}
# Of the paged cache of the CPU plugin, in tokens.
_BLOCK = 32
# At most, of a step; more is not faster here.
_STEP = 512


def _directory(options: dict[str, Any]) -> Path:
    """The model in OpenVINO's format and in a form, written once."""
    scratch, form = Path(options["scratch"]), options["form"]
    if form not in ("bf16", *_MODES):
        raise ValueError(f"form {form}: expected bf16, {' or '.join(_MODES)}")

    def export(place: Path) -> None:
        from optimum.exporters.openvino import main_export

        main_export(
            options["model"],
            place,
            task="text-generation-with-past",
            library_name="transformers",
            local_files_only=True,
        )
        # Tracing keeps torch's model until it is collected.
        gc.collect()

    def compress(place: Path) -> None:
        import nncf

        mode, how = _MODES[form]
        model = openvino.Core().read_model(plain / _MODEL)
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode(mode), **how)
        openvino.save_model(model, place / _MODEL, compress_to_fp16=False)
        for name in ("config.json", "generation_config.json"):
            shutil.copyfile(plain / name, place / name)

    plain: Path = made(scratch / "openvino-bf16", export)
    if form == "bf16":
        return plain
    target: Path = made(scratch / f"openvino-{form}", compress)
    return target


def load(options: dict[str, Any]) -> Loaded:
    """See :mod:`loop`."""
    directory = _directory(options)
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "ENABLE_CPU_PINNING": True,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    native = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if native else "f32"
    properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    if options["form"] != "bf16":
        # Of inputs, which become int8 as well; the default of 32 is a quarter slower here.
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 128
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = options["kv_tokens"] // _BLOCK
    scheduler.max_num_seqs = options["max_running"]
    scheduler.max_num_batched_tokens = _STEP
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        params = []
        for count in new:
            one = openvino_genai.GenerationConfig()
            one.max_new_tokens = count
            one.do_sample = False
            one.ignore_eos = True
            # It refuses a config without one, even where it is ignored.
            one.set_eos_token_id(0)
            one.stop_token_ids = {0}
            params.append(one)
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        answers = pipeline.generate(ids, params)
        return [list(answer.m_generation_ids[0]) for answer in answers]

    settings = f"{json.dumps(properties)}, at most {_STEP} tokens a step"
    weights = "" if native or options["form"] != "bf16" else "fp32"
    return Loaded(generate, openvino_genai.__version__, settings, weights)


if __name__ == "__main__":
    main(load)
