"""Decoding by ``transformers`` with a static cache, and what is timed of an answer."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from gpu.place import Place
from shoal.ir import ModelShape


def middle(seconds: list[float]) -> float:
    """The median of the second half: prompts and what is prepared come first."""
    return statistics.median(seconds[len(seconds) // 2 :])


def decoder(
    place: Place, shape: ModelShape, batch: int, prompt: int, answer: int
) -> Callable[[], float]:
    """Median seconds between two tokens of its own Llama of a shape."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.generation.streamers import BaseStreamer

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn_hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=max(64, prompt + answer + 1),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(place.device):
        net = LlamaForCausalLM(config).to(place.device, torch.bfloat16).eval()
    times: list[float] = []

    class Clock(BaseStreamer):  # type: ignore[misc]
        """Notes when the tokens of a step are on the host."""

        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            """Nothing."""

    given = torch.randint(0, shape.vocab_size, (batch, prompt), device=place.device)
    mask = torch.ones_like(given)

    def run() -> float:
        times.clear()
        with torch.inference_mode():
            net.generate(
                given, attention_mask=mask, max_new_tokens=answer, do_sample=False,
                cache_implementation="static", streamer=Clock(),
            )  # fmt: skip
        return middle([b - a for a, b in itertools.pairwise(times)])

    return run
