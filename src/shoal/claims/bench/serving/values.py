"""What is asked of the engines, and what they reached."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from shoal.core.config import Value
from shoal.core.measure import Spread, bootstrap

Form = Literal["bf16", "int8", "int4"]


class ServingCase(Value):
    """One kind of work.

    Args:
        name: of the row.
        requests: how many at once.
        prompt: tokens of each prompt; where ``spread`` is set, their median.
        new: tokens of each answer; where ``spread`` is set, their median.
        spread: sigma of the lognormal lengths; 0 for equal ones.
        what: decode: time beyond that of the first tokens; whole: all of it.
        forms: precisions of the weights.
    """

    name: str
    requests: int
    prompt: int
    new: int
    spread: float = 0.0
    what: Literal["decode", "whole"] = "whole"
    forms: tuple[Form, ...] = ("bf16",)


CASES: tuple[ServingCase, ...] = (
    ServingCase(
        name="decode, batch 1",
        requests=1,
        prompt=32,
        new=32,
        what="decode",
        forms=("bf16", "int8", "int4"),
    ),
    ServingCase(name="decode, batch 8", requests=8, prompt=32, new=24, what="decode"),
    ServingCase(name="decode, batch 32", requests=32, prompt=32, new=16, what="decode"),
    ServingCase(name="prefill, 1,024 tokens", requests=1, prompt=1024, new=1),
    ServingCase(name="mixed lengths, 24 requests", requests=24, prompt=80, new=24, spread=0.8),
)


GOALS: dict[tuple[str, str, str], float] = {
    ("decode, batch 1", "bf16", "llama.cpp"): 1.1,
    ("decode, batch 1", "bf16", "vllm"): 1.5,
    ("decode, batch 1", "int8", "llama.cpp"): 1.2,
    ("decode, batch 1", "int4", "llama.cpp"): 1.2,
    ("decode, batch 8", "bf16", "vllm"): 1.2,
    ("decode, batch 32", "bf16", "vllm"): 1.2,
    ("prefill, 1,024 tokens", "bf16", "vllm"): 1.2,
    ("prefill, 1,024 tokens", "bf16", "llama.cpp"): 1.1,
    ("mixed lengths, 24 requests", "bf16", "vllm"): 1.1,
    ("mixed lengths, 24 requests", "bf16", "transformers"): 1.5,
    ("mixed lengths, 24 requests", "bf16", "transformers, continuous"): 2.0,
    **{
        (case.name, form, engine): 1.0
        for engine in ("openvino-genai", "onnxruntime-genai")
        for case in CASES
        for form in case.forms
    },
}
"""(case, weights, engine) -> how many times as fast Shoal should be."""


class ServingPeer(Value):
    """An engine.

    Args:
        name: as its makers call it.
        driver: module of ``drivers``.
        python: interpreter of its environment.
        lacks: precision -> why it is not asked for it.
        needed: the others are compared with it, so that its failure ends the comparison.
    """

    name: str
    driver: str
    python: str
    lacks: dict[Form, str] = {}
    needed: bool = False


class EngineResult(Value):
    """What one engine reached in one case.

    Args:
        case: name of the case.
        form: precision of the weights.
        engine: name of the engine.
        seconds: one a round.
        tokens: that count in this case, of one round.
        agreement: share of answers whose first four tokens are those of Shoal.
        equal: share of tokens that are those of transformers; none where it did not run.
        weights: what they are in this engine, if not what the form says.
    """

    case: str
    form: Form
    engine: str
    seconds: tuple[float, ...]
    tokens: int
    agreement: float
    equal: float | None = None
    weights: str = ""

    @property
    def rate(self) -> Spread:
        """Tokens per second."""
        return bootstrap([self.tokens / s for s in self.seconds])


class ServingTable(Value):
    """A run of the table.

    Args:
        model: what was served, in words.
        threads: of every engine.
        versions: engine -> version.
        settings: "engine, form" -> what it was given, in words.
        missing: engine, or "engine, form" -> why it has no rows.
        entries: rows.
        machine: fingerprint.
        date: of the day, UTC.
        commit: of the checkout; empty outside one.
    """

    model: str
    threads: int
    versions: dict[str, str]
    settings: dict[str, str] = {}
    missing: dict[str, str] = {}
    entries: tuple[EngineResult, ...]
    machine: dict[str, JsonValue] = {}
    date: str = ""
    commit: str = ""

    @property
    def rounds(self) -> int:
        """Timed rounds of each row."""
        return max((len(entry.seconds) for entry in self.entries), default=0)

    def find(self, case: str, form: str, engine: str) -> EngineResult | None:
        """The entry of an engine, if it has one."""
        for entry in self.entries:
            if (entry.case, entry.form, entry.engine) == (case, form, engine):
                return entry
        return None

    def ratio(self, case: str, form: str, engine: str, over: str = "shoal") -> Spread | None:
        """How much faster ``over`` is than ``engine``: the median ratio of the rounds."""
        one, other = self.find(case, form, over), self.find(case, form, engine)
        if one is None or other is None:
            return None
        return bootstrap([b / a for a, b in zip(one.seconds, other.seconds, strict=True)])
