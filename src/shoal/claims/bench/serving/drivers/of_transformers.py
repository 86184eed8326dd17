"""Hugging Face transformers: ``generate`` over left-padded batches, to the longest answer."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from loop import Loaded, main

# Larger batches take longer here on lengths that differ: padding grows faster than reuse.
_BATCH = 32


def load(options: dict[str, Any]) -> Loaded:
    """See :mod:`loop`."""
    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def batch(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        most = max(new)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=most,
                min_new_tokens=most,
            )
        return [row[width : width + count].tolist() for row, count in zip(out, new, strict=True)]

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        results = []
        for first in range(0, len(prompts), _BATCH):
            results += batch(prompts[first : first + _BATCH], new[first : first + _BATCH])
        return results

    return Loaded(
        generate,
        transformers.__version__,
        f"sdpa, static batches of at most {_BATCH}, padded on the left",
    )


if __name__ == "__main__":
    main(load)
