"""The zoo: one family of mini-models, trained by recipe when first asked for.

The shapes are shipped with the others (:mod:`shoal.cost.shapes`); a recipe is a training
job, on the default corpus or, for ``shoal-27m`` and the models that draft for it, on one of
source code, JSON records, logs and arithmetic that they share with its tokenizer. What was
trained lies under ``shoal_home()/zoo``, in a directory named by model and recipe, so a changed
recipe is a new model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ModelError, suggestion
from shoal.core.files import shoal_home, write_json
from shoal.core.parts import Choice
from shoal.cost import shapes
from shoal.ir import Machine, TrainJob
from shoal.ir.job import Evaluation
from shoal.model.config import ModelConfig
from shoal.train.zoo.places import stored_directory

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer

__all__ = [
    "config",
    "corpus",
    "judge",
    "names",
    "random",
    "recipe",
    "require_known",
    "trained",
    "trained_directory",
]


# Model -> (tokens of training, sequence length, sequences of a step, peak learning rate).
# Seconds for the smallest to minutes for the largest, on two cores.
_RECIPES: dict[str, tuple[int, int, int, float]] = {
    "shoal-0.3m": (2_000_000, 128, 16, 5e-3),
    "shoal-1m": (2_500_000, 256, 8, 4e-3),
    "shoal-4m": (2_500_000, 256, 8, 3e-3),
    "shoal-4m-h128": (2_500_000, 256, 8, 3e-3),
    "shoal-8m": (2_000_000, 256, 8, 2e-3),
    "shoal-16m": (1_500_000, 256, 8, 1.5e-3),
    "shoal-moe-4m": (2_000_000, 256, 8, 3e-3),
    "shoal-draft-1m": (5_000_000, 512, 8, 4e-3),
    "shoal-draft-8l": (2_500_000, 512, 4, 3e-3),
    "shoal-draft-4m": (2_500_000, 512, 4, 3e-3),
    "shoal-27m": (3_000_000, 512, 4, 1.2e-3),
    "shoal-mdlm-3m": (5_000_000, 64, 64, 3e-3),
    "shoal-ar-3m": (5_000_000, 64, 64, 3e-3),
}

# Half source code, half text whose next words can be known from those before them: the models
# that read it are there to be decoded, by each other's help.
_DECODED = frozenset({"shoal-27m", "shoal-draft-1m", "shoal-draft-4m", "shoal-draft-8l"})
_TARGET = "shoal-27m"
_SHARE = 3_000_000
_KINDS = ("records", "logs", "arithmetic")

# What they learn instead of the default corpus: problems with one right answer.
_PROBLEMS = {
    "data": "tasks",
    "packing": "padded",
    "learn_after": "=",
    "optimizer": {"name": "muon", "lr": 3e-3},
}
_OTHER: dict[str, dict[str, Any]] = {"shoal-mdlm-3m": _PROBLEMS, "shoal-ar-3m": _PROBLEMS}


def names() -> tuple[str, ...]:
    """The mini-models, smallest first."""
    return tuple(_RECIPES)


def _known(name: str) -> str:
    if name not in _RECIPES:
        raise ModelError(
            f"zoo model = {name!r}: expected one of {', '.join(_RECIPES)}"
            + suggestion(name, _RECIPES)
        )
    return name


def require_known(model: str) -> None:
    """Refuse what is neither the directory of a model nor a name of the zoo; nothing is read.

    Raises:
        ModelError: names the nearest one.
    """
    if not Path(model).is_dir() and model not in names():
        raise ModelError(
            f"model = {model!r}: expected a Hugging Face directory or one of {', '.join(names())}"
            + suggestion(model, names())
        )


def config(name: str) -> ModelConfig:
    """The configuration of a mini-model.

    Raises:
        ModelError: there is no such model in the zoo.
    """
    return ModelConfig.from_shape(shapes.find(_known(name)))


def random(model: ModelConfig | str, seed: int = 0) -> Transformer:
    """A model with fresh weights that depend on ``seed`` alone.

    Args:
        model: a configuration, or a name of the zoo.
        seed: seed of the weights.

    Raises:
        ModelError: there is no such model in the zoo.
    """
    from shoal.model.initialise import empty, init_weights

    made = empty(config(model) if isinstance(model, str) else model)
    init_weights(made, seed)
    return made


def corpus(name: str) -> Choice:
    """The text that a mini-model is trained on.

    Raises:
        ModelError: there is no such model in the zoo.
    """
    if _known(name) not in _DECODED:
        return Choice(name="stdlib")
    made = {
        kind: Choice(name="synthetic", options={"kind": kind, "size_bytes": _SHARE})
        for kind in _KINDS
    }
    return Choice(
        name="mixed",
        options={
            "sources": {
                "code": "stdlib",
                **{kind: choice.model_dump(mode="json") for kind, choice in made.items()},
            },
            "limit_bytes": {"code": 3 * _SHARE},
        },
    )


def recipe(name: str) -> TrainJob:
    """How a mini-model is trained.

    Raises:
        ModelError: there is no such model in the zoo.
    """
    tokens, seq_len, batch, lr = _RECIPES[_known(name)]
    fields: dict[str, Any] = {
        "name": name,
        "model": name,
        "data": corpus(name),
        "seq_len": seq_len,
        "global_batch": batch,
        "microbatch": batch,  # so that no planner changes the order of sums
        "tokens": tokens,
        "optimizer": {"name": "adamw", "lr": lr},
        "evaluation": Evaluation(every=0, final=False, sample_tokens=0),
    }
    return TrainJob.model_validate(fields | _OTHER.get(name, {}))


def _digest(job: TrainJob) -> str:
    # What a recipe leaves open is no part of it: keys that jobs or shapes get later change no name.
    text = json.dumps(job.model_dump(mode="json", exclude_unset=True), sort_keys=True)
    facts = shapes.find(job.model).model_dump(mode="json", exclude_defaults=True)
    shape = json.dumps(facts, sort_keys=True)
    return hashlib.sha256((text + shape).encode()).hexdigest()[:12]


def judge(name: str, directory: Path, say: Callable[[str], None] | None = None) -> None:
    """Write beside a model what it has learned of its text, and refuse a target of too little.

    Raises:
        ShoalError: the target of decoding is hardly better than a bigram model.
    """
    from shoal.corpora.tokens import prepare
    from shoal.train.zoo.quality import learned

    job = recipe(name)
    tokens = prepare(job.data, job.tokenizer, config(name).vocab_size)
    result = learned(directory, tokens, job.data)
    if say is not None:
        for line in result.lines():
            say(f"{name}: {line}")
    if name == _TARGET:
        result.check(name)
    write_json(directory / "heldout.json", result.model_dump(mode="json"))


def trained_directory(name: str) -> Path | None:
    """The directory of a mini-model that was trained before; None if it was not.

    Raises:
        ModelError: there is no such model in the zoo.
    """
    place = _place(name)
    return place if (place / "config.json").is_file() else None


def trained(name: str, say: Callable[[str], None] | None = None) -> Path:
    """The Hugging Face directory of a trained mini-model; trains it if it is not there yet.

    Of a model that is there to be decoded, ``heldout.json`` beside its weights says what it has
    learned, source by source.

    Args:
        name: of the model.
        say: receives how long training took and what the model has learned, line by line.

    Raises:
        ModelError: there is no such model in the zoo.
        ShoalError: its training failed, or the target of decoding has learned too little.
    """
    from shoal.train.run import train

    job = recipe(name)

    def make(run_dir: Path, machine: Machine, left: bool) -> Path:
        train(job, run_dir, ranks=1, machine=machine, resume=left)
        if name in _DECODED:
            judge(name, run_dir / "export", say)
        return run_dir / "export"

    return stored_directory(_place(name), "config.json", make, say)


def _place(name: str) -> Path:
    return shoal_home() / "zoo" / f"{name}-{_digest(recipe(name))}"
