"""Hugging Face transformers with continuous batching over a paged cache."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from loop import Generate, main


def load(options: dict[str, Any]) -> tuple[Generate, str]:
    """See :mod:`loop`."""
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, attn_implementation="sdpa_paged"
    ).eval()
    block = 32
    paging = ContinuousBatchingConfig(
        block_size=block,
        num_blocks=options["kv_tokens"] // block,
        max_batch_tokens=512,
        use_cuda_graph=False,
    )

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        # Answers of one call are equally long; the manager takes one length a request.
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=max(new), eos_token_id=-1, pad_token_id=0
        )
        manager = model.init_continuous_batching(
            generation_config=config, continuous_batching_config=paging
        )
        manager.start()
        try:
            names = [
                manager.add_request(prompt, max_new_tokens=count)
                for prompt, count in zip(prompts, new, strict=True)
            ]
            found: dict[str, list[int]] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
        finally:
            manager.stop(block=True)
        return [found[name] for name in names]

    return generate, transformers.__version__


if __name__ == "__main__":
    main(load)
