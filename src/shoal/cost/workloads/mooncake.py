"""The Mooncake trace: an hour of conversations with the identity of every prompt block.

A row names its time in ms, its lengths, and a hash for each 512 tokens of its prompt;
equal hashes are equal tokens. The tokens are drawn at random from the hash, so
prompts share exactly the prefixes that they shared in production.

Source: Qin et al., Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving,
2024 (kvcache-ai/Mooncake, Apache-2.0).
"""

from __future__ import annotations

from typing import Any, ClassVar

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.cost.workloads.drawing import (
    Positive,
    Requests,
    Scale,
    check_sizes,
    clipped,
    token_ids,
)
from shoal.cost.workloads.trace import find_data, number_of, read_lines, retimed
from shoal.ir import Arrival

SOURCE = "github.com/kvcache-ai/Mooncake (FAST25-release/traces/conversation_trace.jsonl)"
HASHED_TOKENS = 512
"""Tokens of a prompt for which a hash stands."""


@part
class Mooncake:
    """A production trace of conversations whose prompts share prefixes, as JSONL.

    Args:
        path: path of the file, also searched in the directory ``SHOAL_DATA``.
        requests: number of first requests to take; None for all.
        rate: requests per second to which the times are stretched; None keeps them.
        scale: divides all lengths, those of the hashed blocks too, for small models and
            machines; 16 makes blocks of 32 tokens.
    """

    path: str
    requests: Requests | None = 500
    rate: Positive | None = None
    scale: Scale = 1.0

    usual_path: ClassVar = "mooncake-trace/conversation_trace.jsonl"

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        """See :class:`~shoal.cost.workloads.protocols.Workload`.

        Raises:
            DataError: the file is missing, or a line is wrong; names the line and the fix.
        """
        check_sizes(count, vocab_size, max_position)
        path = find_data("workload.mooncake.path", self.path, SOURCE)
        block = max(1, round(HASHED_TOKENS / self.scale))
        blocks: dict[int, tuple[int, ...]] = {}
        results = []
        for where, row in read_lines(path, count or self.requests):
            at, length, generated, hashes = _row(where, row)
            size, output = clipped(
                round(length / self.scale), round(generated / self.scale), max_position
            )
            prompt: list[int] = []
            for number in hashes[: -(-size // block)]:
                if number not in blocks:
                    blocks[number] = token_ids(
                        block, vocab_size, seed, purpose="mooncake", index=number
                    )
                prompt.extend(blocks[number])
            results.append(Arrival(at / 1000, tuple(prompt[:size]), output))
        if not results:
            raise DataError(f"{path}: no request in it; get the file from {SOURCE}")
        results.sort(key=lambda arrival: arrival.at)
        return retimed(results, self.rate)


def _row(where: str, row: dict[str, Any]) -> tuple[float, int, int, list[int]]:
    """(ms, prompt tokens, generated tokens, a hash for each 512 tokens of the prompt)."""
    at = number_of(where, row, "timestamp", least=0)
    length = int(number_of(where, row, "input_length", least=1))
    generated = int(number_of(where, row, "output_length", least=0))
    hashes = row.get("hash_ids")
    needed = -(-length // HASHED_TOKENS)
    if not isinstance(hashes, list) or any(type(one) is not int or one < 0 for one in hashes):
        raise DataError(f"{where}: hash_ids: expected a list of whole numbers")
    if len(hashes) != needed:
        raise DataError(
            f"{where}: hash_ids has {len(hashes)} entries: expected {needed}, one for each "
            f"{HASHED_TOKENS} of its {length} tokens"
        )
    return at, length, generated, hashes
