"""vLLM on a CPU: ``LLM.generate`` in one process, prompts as token ids."""

from __future__ import annotations

import os
from typing import Any

from loop import Loaded, main


def load(options: dict[str, Any]) -> Loaded:
    """See :mod:`loop`."""
    threads = options["threads"]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    model = vllm.LLM(
        options["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=options["max_position"],
        max_num_seqs=options["max_running"],
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(
                temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in new
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = model.generate(requests, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return Loaded(
        generate,
        str(vllm.__version__),
        f"bfloat16, {os.environ['VLLM_CPU_KVCACHE_SPACE']} GiB of cache",
    )


if __name__ == "__main__":
    main(load)
