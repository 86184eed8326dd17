"""What claims of decoding share: a target, drafters trained for it, and answers that are timed.

Targets and drafters are trained once and kept; a claim says how long that took, apart from its
own time. Prompts are text that neither was trained on. A text that repeats itself makes every
drafter look perfect: answers with few distinct 4-grams are left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.claims.protocols import Context
from shoal.core.errors import DataError
from shoal.core.files import shoal_home, write_json
from shoal.core.parts import Choice
from shoal.ir import Drafting, Request, SamplingParams, ServeJob

__all__ = ["Answer", "Server", "distinct", "drafter", "kept", "prompts", "target"]

# Answers below this share of distinct 4-grams are loops.
LOOPS = 0.5

_PROMPT = 64


def target(context: Context) -> Path:
    """The directory of the model that is decoded: the user's, or the mini-model for this."""
    from shoal.train import zoo

    if context.model is not None:
        return Path(context.model)
    context.progress("the target", 0.01)
    return zoo.trained("shoal-27m")


def _text() -> Choice:
    from shoal.train import zoo

    return zoo.corpus("shoal-27m")


def drafter(
    context: Context, model: Path, options: Mapping[str, Any], tokens: int, seed: int = 0
) -> tuple[Path, float]:
    """A drafter for a model, trained when first asked for; and the seconds that it took.

    Args:
        context: of the claim.
        model: the target's directory.
        options: of the drafter, its name among them.
        tokens: of its training.
        seed: of its training.
    """
    from shoal.ir import DrafterJob
    from shoal.machine.described import load
    from shoal.machine.probing import probe, saved_path
    from shoal.model.drafters.files import fingerprint
    from shoal.plan.drafting import plan_drafter
    from shoal.train.drafters.execute import execute

    rest = {key: value for key, value in options.items() if key != "name"}
    job = DrafterJob(
        model=str(model),
        drafter=Choice(name=options["name"], options=rest),
        data=_text(),
        text="own",
        tokens=tokens,
        seed=seed,
    )
    told = job.model_dump(mode="json", exclude={"model"})
    told["target"] = fingerprint(model)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]
    place = shoal_home() / "zoo" / f"drafter-{options['name']}-{digest}"
    if not (place / "drafter.json").is_file():
        context.progress(f"training {options['name']}", 0.02)
        machine = context.machine
        if machine is None:
            machine = load("local") if saved_path().is_file() else probe(fast=True)
        run_dir = shoal_home() / "zoo" / f".{place.name}.run"
        shutil.rmtree(run_dir, ignore_errors=True)
        began = time.perf_counter()
        execute(plan_drafter(job, machine), run_dir)
        taken = time.perf_counter() - began
        write_json(run_dir / "drafter" / "seconds.json", taken)
        (run_dir / "drafter").rename(place)
        shutil.rmtree(run_dir, ignore_errors=True)
    return place, float(json.loads((place / "seconds.json").read_text()))


def prompts(model: Path, count: int) -> list[list[int]]:
    """Beginnings of held-out text, spread over all of it.

    Raises:
        DataError: there is too little of it.
    """
    from shoal.corpora.tokens import prepare
    from shoal.model import huggingface

    config = huggingface.read_config(model)
    split = prepare(_text(), str(model / "tokenizer.json"), config.vocab_size).heldout
    windows = len(split) // _PROMPT
    if windows < count:
        raise DataError(f"held-out text: {windows} windows of {_PROMPT} tokens; {count} are asked")
    rows = np.empty((count, _PROMPT), dtype=np.int64)
    for row in range(count):
        split.read(row * (windows // count) * _PROMPT, rows[row])
    return rows.tolist()


def distinct(tokens: Sequence[int]) -> float:
    """Share of distinct 4-grams."""
    grams = [tuple(tokens[place : place + 4]) for place in range(len(tokens) - 3)]
    return len(set(grams)) / max(1, len(grams))


class Answer(NamedTuple):
    """What a server said to one prompt.

    Args:
        tokens: new ones.
        seconds: from the first of them to the last.
        steps: that gave those after the first.
    """

    tokens: list[int]
    seconds: float
    steps: int

    @property
    def per_step(self) -> float:
        """Tokens of a step."""
        return (len(self.tokens) - 1) / max(1, self.steps)


class Server:
    """A model that answers one prompt after the other.

    Args:
        model: its directory.
        speculative: who guesses; None decodes plainly.
        precision: bf16, or fp64 to compare tokens.
        threads: that compute.
    """

    def __init__(
        self,
        model: Path,
        speculative: Mapping[str, Any] | None = None,
        *,
        precision: str = "bf16",
        threads: int = 0,
    ) -> None:
        import torch

        from shoal.model import huggingface
        from shoal.serve.build import engine_of, load_model

        raw: dict[str, Any] = {
            "model": str(model),
            "kv_tokens": 4096,
            "threads": threads,
            "max_position": 512,
            "speculative": speculative and dict(speculative),
        }
        if precision == "fp64":
            job = ServeJob.model_validate(raw)
            loaded = huggingface.read(model, torch.float64).requires_grad_(False)
        else:
            job = ServeJob.model_validate({**raw, "precision": precision})
            loaded = load_model(job)
        self.engine, _, self.runner = engine_of(job, loaded)
        self._number = 0

    @property
    def drafting(self) -> Any:
        """How much is guessed."""
        return self.engine.scheduler.drafting  # type: ignore[attr-defined]

    @drafting.setter
    def drafting(self, chosen: Drafting) -> None:
        self.engine.scheduler.drafting = chosen  # type: ignore[attr-defined]

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Greedy, so many tokens."""
        self._number += 1
        request = Request(
            f"claim {self._number}", list(prompt), len(prompt), SamplingParams(max_tokens=tokens)
        )
        self.engine.add(request)
        while request.n_generated == 0:
            self.engine.step()
        steps, began = 0, time.perf_counter()
        while self.engine.busy:
            self.engine.step()
            steps += 1
        return Answer(request.tokens[request.n_prompt :], time.perf_counter() - began, steps)


def kept(answers: Sequence[Answer]) -> list[int]:
    """Numbers of the answers that are no loops."""
    return [number for number, one in enumerate(answers) if distinct(one.tokens) >= LOOPS]
