"""Hugging Face transformers with continuous batching over a paged cache."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from loop import Loaded, main

# Tokens of a page of the cache.
_PAGE = 32


def load(options: dict[str, Any]) -> Loaded:
    """See :mod:`loop`."""
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, attn_implementation="paged|sdpa"
    ).eval()
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(
            do_sample=False, max_new_tokens=1024, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=options["kv_tokens"] // _PAGE,
            max_batch_tokens=512,
            max_requests_per_batch=options["max_running"],
        ),
    )
    manager.start()

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        names = [
            manager.add_request(prompt, max_new_tokens=count)
            for prompt, count in zip(prompts, new, strict=True)
        ]
        outcome: dict[str, list[int]] = {}
        while len(outcome) < len(names):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching has stopped")
            elif result.is_finished():
                outcome[result.request_id] = list(result.generated_tokens)
        return [outcome[name] for name in names]

    return Loaded(generate, transformers.__version__, f"paged sdpa, pages of {_PAGE} tokens")


if __name__ == "__main__":
    main(load)
