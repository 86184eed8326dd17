"""The options of concurrent workers, and the words between them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from shoal.core.errors import ServeError, require
from shoal.core.parts import part, table

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig

_MOST_WORKERS = 16

_RULES = """

I will work on this together with other workers. We write at the same time, and each of us sees what
the others write, token by token. Rules:
- Say which part you take before you work on it; never redo what another has done or is doing.
- Write short steps and end each with a blank line.
- If another finds an error in your step, correct it; if you find one in theirs, say so.
- Whoever has the result writes it as: Final answer: ...

Example 1
Alice: I take the first half of the cases.
Bob: Alice has the first half; I take the second.

Example 2
Alice: I compute 12 * 7 = 84.
Bob: Alice's 84 is right, so I go on with 84 - 20 = 64 and do not compute it again.
"""


@part
class Hogwild:
    """Several workers of one model generate concurrently; each attends to the others' tokens.

    With one worker the prompt is unchanged and decoding is autoregressive.

    Args:
        workers: default and largest number of workers of a request.
        layout: what a worker attends to, in which order.
        realise: how blocks get their positions: rotate the queries for each block, or rotate the
            keys (the definition in the paper; slower).
        names: names of the workers; further workers are called Worker 3 and so on.
        prefix: text at the beginning of each step of a worker, with its ``{name}``.
        rules: text added to the prompt: roles, rules, examples.
        history_header: text before the finished steps.
        others_header: text before the unfinished steps of the other workers.
        own_header: text before a worker's own step.
        separator: ends a step.
        probe_every: tokens of a worker between two probes for repeated work; 0 for no probes.
        probe: the question of a probe.
        marker: regular expression of a final answer; when one worker writes it, all stop.
        early_answer: text that is written for the first worker when the token budget is nearly used
            up.
        answer_tokens: tokens that are reserved for the answer then.
    """

    workers: Annotated[int, Ge(1), Le(_MOST_WORKERS)] = 2
    layout: str = "combined"
    realise: Literal["queries", "keys"] = "queries"
    names: tuple[str, ...] = ("Alice", "Bob")
    prefix: str = "{name}: "
    rules: str = _RULES
    history_header: str = "\n### Steps so far\n\n"
    others_header: str = "### Work in progress (others)\n\n"
    own_header: str = "\n\n### Work in progress (own)\n\n"
    separator: str = "\n\n"
    probe_every: Annotated[int, Ge(0)] = 1024
    probe: str = "\n\nQuick check: am I repeating what another worker does? (yes/no): "
    marker: str = r"Final answer:[^\n]*\S[^\n]*\n"
    early_answer: str = "\n\nThe tokens are used up. Final answer:"
    answer_tokens: Annotated[int, Ge(0)] = 32

    def __post_init__(self) -> None:
        where = "decode.hogwild"
        table("hogwild_layout").build(self.layout, where=f"{where}.layout")
        require(
            len({*self.names}) == len(self.names),
            f"{where}.names",
            self.names,
            expected="names that differ",
        )
        require(bool(self.separator), f"{where}.separator", "", expected="some text")
        try:
            self.prefix.format(name="")
        except (KeyError, IndexError, ValueError) as cause:
            require(
                False,
                f"{where}.prefix",
                self.prefix,
                expected=f"text with {{name}} ({cause})",
            )
        try:
            re.compile(self.marker)
        except re.error as cause:
            require(
                False, f"{where}.marker", self.marker, expected=f"a regular expression ({cause})"
            )

    def factory(self) -> str | None:
        return "shoal.serve.decode.hogwild.engine:build_engine"

    def check(self, config: ModelConfig) -> None:
        require(
            config.causal,
            "decode",
            "hogwild",
            expected=f"diffusion for {config.name}, whose tokens see those behind them",
            hint="serve it with --set decode=diffusion",
            error=ServeError,
        )

    def name_of(self, worker: int) -> str:
        """What a worker is called."""
        return self.names[worker] if worker < len(self.names) else f"Worker {worker + 1}"
