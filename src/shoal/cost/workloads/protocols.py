"""What a workload promises."""

from __future__ import annotations

from typing import Protocol

from shoal.ir import Arrival


class Workload(Protocol):
    """A part of kind ``workload``: requests with times, prompts and lengths of output.

    The same options, arguments and seed give the same arrivals on every machine. All tokens
    are below ``vocab_size``, and no prompt with its output is longer than ``max_position``:
    longer ones are cut. Prompts that share a prefix share its tokens.
    """

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        """``count`` requests in the order of time; the part's own number if None.

        Raises:
            DataError: a trace that cannot be read.
            ConfigError: a count, vocabulary or length that no request fits.
        """
