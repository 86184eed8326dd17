"""The zoo: one family of mini-models, trained by recipe when first asked for.

The shapes are shipped with the others (:mod:`shoal.cost.shapes`); a recipe is a training
job on the default corpus. What was trained lies under ``shoal_home()/zoo``, in a
directory named by model and recipe, so a changed recipe is a new model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ModelError, ShoalError, nearest
from shoal.core.files import shoal_home
from shoal.cost import shapes
from shoal.ir import TrainJob
from shoal.ir.job import Evaluation
from shoal.model.config import ModelConfig

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer

__all__ = ["config", "found", "names", "random", "recipe", "trained"]

_FAMILY = "Shoal"

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
    "shoal-mdlm-3m": (4_500_000, 80, 64, 3e-3),
    "shoal-ar-3m": (4_500_000, 80, 64, 3e-3),
}

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
        hint = nearest(name, _RECIPES)
        raise ModelError(
            f"zoo model = {name!r}: expected one of {', '.join(_RECIPES)}"
            + (f"; {hint}" if hint else "")
        )
    return name


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


def recipe(name: str) -> TrainJob:
    """How a mini-model is trained.

    Raises:
        ModelError: there is no such model in the zoo.
    """
    tokens, seq_len, batch, lr = _RECIPES[_known(name)]
    fields: dict[str, Any] = {
        "name": name,
        "model": name,
        "seq_len": seq_len,
        "global_batch": batch,
        "microbatch": batch,  # so that no planner changes the order of sums
        "tokens": tokens,
        "optimizer": {"name": "adamw", "lr": lr},
        "evaluation": Evaluation(every=0, final=False, sample_tokens=0),
    }
    return TrainJob.model_validate(fields | _OTHER.get(name, {}))


def _digest(job: TrainJob) -> str:
    # What a recipe leaves open is no part of it: keys that jobs get later change no name.
    later = {"kernel", "finetune"} | ({"learn_after"} if job.learn_after is None else set())
    text = json.dumps(job.model_dump(mode="json", exclude=later), sort_keys=True)
    shape = json.dumps(shapes.find(job.model).model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256((text + shape).encode()).hexdigest()[:12]


def found(name: str) -> Path | None:
    """The directory of a mini-model that was trained before; None if it was not.

    Raises:
        ModelError: there is no such model in the zoo.
    """
    place = shoal_home() / "zoo" / f"{name}-{_digest(recipe(name))}"
    return place if (place / "config.json").is_file() else None


def trained(name: str) -> Path:
    """The Hugging Face directory of a trained mini-model; trains it if it is not there yet.

    Training is planned for the saved probe of this machine; where there is none, a fast
    probe is made for the purpose, and not saved.

    Raises:
        ModelError: there is no such model in the zoo.
        ShoalError: its training failed.
    """
    job = recipe(name)
    home = shoal_home() / "zoo"
    place = home / f"{name}-{_digest(job)}"
    if (place / "config.json").is_file():
        return place
    from shoal.machine.described import load
    from shoal.machine.probing import probe, saved_path
    from shoal.train.run import train

    machine = load("local") if saved_path().is_file() else probe(fast=True)
    run_dir = home / f".{place.name}.run"
    try:
        # What an interrupted training left is not continued: another process may own it
        # no longer, and the recipe takes minutes at most.
        shutil.rmtree(run_dir, ignore_errors=True)
        home.mkdir(parents=True, exist_ok=True)
        train(job, run_dir, ranks=1, machine=machine)
        (run_dir / "export").rename(place)
    except OSError as cause:
        if (place / "config.json").is_file():  # another process was first
            return place
        raise ShoalError(
            f"{place}: cannot be written ({cause.strerror or cause}); free some space or set "
            "SHOAL_HOME to another place"
        ) from cause
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    return place
