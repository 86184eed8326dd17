"""llama.cpp through llama-cpp-python's low-level API: many sequences in one context.

The model is written as GGUF once, from the same bytes; Q8_0 and Q4_0 are quantized from it by
llama.cpp itself. Source of the format: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from loop import Loaded, main

_FILE_TYPES = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_CHUNK = 512


def write_gguf(model: Path, target: Path) -> None:
    """A Llama directory as GGUF in bf16; queries and keys in the order of llama.cpp's rope."""
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type {config['model_type']}: this driver supports llama only")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
            return
        raw = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                tensor = tensors.get_tensor(name)
                words = name.split(".")
                if name == "model.embed_tokens.weight":
                    add("token_embd.weight", tensor)
                elif name == "model.norm.weight":
                    add("output_norm.weight", tensor)
                elif name == "lm_head.weight":
                    add("output.weight", tensor)
                else:
                    part = ".".join(words[3:-1])
                    count = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(part)
                    if count:
                        # Halves of a head become pairs of neighbours.
                        rows, columns = tensor.shape
                        pairs = tensor.view(count, 2, rows // count // 2, columns)
                        tensor = pairs.transpose(1, 2).reshape(rows, columns)
                    add(f"blk.{words[2]}.{_NAMES[part]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _file(options: dict[str, Any]) -> Path:
    scratch = Path(options["scratch"])
    plain = scratch / "model-bf16.gguf"
    if not plain.exists():
        part = plain.with_suffix(".part")
        write_gguf(Path(options["model"]), part)
        part.rename(plain)
    if options["form"] == "bf16":
        return plain
    target = scratch / f"model-{options['form']}.gguf"
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _FILE_TYPES[options["form"]]
        part = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(plain).encode(), str(part).encode(), params):
            raise RuntimeError(f"llama.cpp cannot quantize {plain}")
        part.rename(target)
    return target


def load(options: dict[str, Any]) -> Loaded:
    """See :mod:`loop`."""
    file = _file(options)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(file).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options["kv_tokens"]
    params.n_batch = params.n_ubatch = _CHUNK
    params.n_seq_max = options["max_running"]
    params.n_threads = params.n_threads_batch = options["threads"]
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context of that size")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(max(_CHUNK, options["max_running"]), 0, 1)
    memory = llama_cpp.llama_get_memory(context)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """(token, position, sequence, wants logits) of one step -> best tokens by sequence."""
        batch.n_tokens = len(tokens)
        for place, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = wanted
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama.cpp cannot decode: the cache is full")
        result = {}
        for place, (_, _, sequence, wanted) in enumerate(tokens):
            if wanted:
                row = llama_cpp.llama_get_logits_ith(context, place)
                result[sequence] = int(np.ctypeslib.as_array(row, shape=(vocab,)).argmax())
        return result

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        """Continuous batching as llama.cpp's server does it: decodes first, then prompts."""
        llama_cpp.llama_memory_clear(memory, False)
        answers: list[list[int]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        waiting = list(range(len(prompts)))[::-1]
        free = list(range(options["max_running"]))
        # Sequence of the context -> which prompt it is.
        running: dict[int, int] = {}
        while waiting or running:
            while waiting and free:
                running[free.pop()] = waiting.pop()
            step: list[tuple[int, int, int, bool]] = []
            for sequence, one in running.items():
                if answers[one]:
                    place = len(prompts[one]) + len(answers[one]) - 1
                    step.append((answers[one][-1], place, sequence, True))
            for sequence, one in running.items():
                prompt = prompts[one]
                stop = min(len(prompt), done[one] + max(0, _CHUNK - len(step)))
                for place in range(done[one], stop):
                    step.append((prompt[place], place, sequence, place == len(prompt) - 1))
                done[one] = max(done[one], stop)
            for sequence, token in decode(step).items():
                one = running[sequence]
                answers[one].append(token)
                if len(answers[one]) == new[one]:
                    del running[sequence]
                    free.append(sequence)
                    llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
        return answers

    return Loaded(generate, llama_cpp.__version__, f"cache of f16, at most {_CHUNK} tokens a step")


if __name__ == "__main__":
    main(load)
