"""Drafters of the zoo: one of each kind for a target, trained by recipe when first asked for.

They lie under ``shoal_home()/drafters``, each in a directory named by kind, target and recipe.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ModelError, suggestion
from shoal.core.files import shoal_home, write_json
from shoal.core.parts import Choice, table
from shoal.ir import DrafterJob, Machine
from shoal.train.zoo.places import stored_directory

# Tokens of text.
_TEXT = 300_000
# An LSTM goes over a sequence place by place, and over many short ones at once as fast as over one.
_SHORT = {"seq_len": 128, "batch": 16}
# Kind -> options of the part, tokens of training, and what else of the job is not as usual.
_RECIPES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "medusa": ({"heads": 4}, 1_000_000, {}),
    "falcon": ({"k": 2}, 1_000_000, _SHORT),
    "ppd": ({}, 400_000, {}),
    "dovetail": ({}, 1_000_000, {}),
}
# Ways to guess whose draft model is one of the zoo.
_DRAFTS = {"draft_model": "shoal-draft-1m", "easyspec": "shoal-draft-8l"}


def drafters() -> tuple[str, ...]:
    """Kinds of drafters that have a recipe."""
    return tuple(_RECIPES)


def drafter_recipe(
    kind: str,
    target: Path,
    *,
    data: Choice | None = None,
    tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> DrafterJob:
    """How a drafter is trained: on its target's text, all kinds on the same of its states.

    Args:
        kind: of drafter.
        target: a model directory.
        data: the text; of a model of the zoo, its own corpus, if not given, and of others, none:
            the target writes it.
        tokens: of training, in the place of the recipe's.
        seed: of the training.
        options: of the drafter, in the place of the recipe's.

    Raises:
        ModelError: there is no recipe for this kind.
    """
    if kind not in _RECIPES:
        raise ModelError(
            f"drafter = {kind!r}: expected one of {', '.join(_RECIPES)}"
            + suggestion(kind, _RECIPES)
        )
    own, usual, more = _RECIPES[kind]
    fields: dict[str, Any] = more | ({"seed": seed} if seed else {})
    return DrafterJob(
        name=kind,
        model=str(target),
        drafter=Choice(name=kind, options={**own, **options}),
        data=data or _corpus(target),
        tokens=tokens or usual,
        read_tokens=_TEXT,
        **fields,
    )


def _corpus(target: Path) -> Choice | None:
    from shoal.train import zoo

    for name in zoo.names():
        if zoo.trained_directory(name) == target:
            return zoo.corpus(name)
    return None


def drafter(
    kind: str,
    target: Path,
    *,
    data: Choice | None = None,
    tokens: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Path:
    """The directory of a drafter for a target; trains it if it is not there yet.

    Args:
        kind: of drafter.
        target: a model directory.
        data: see :func:`drafter_recipe`.
        tokens: of training, in the place of the recipe's.
        seed: of the training.
        say: receives how long training took, which ``training.json`` beside the weights says too if
            it was not interrupted.
        options: of the drafter, in the place of the recipe's.

    Raises:
        ModelError: there is no recipe for this kind, or the target cannot be read.
        ShoalError: its training failed.
    """
    from shoal.model.drafters.files import fingerprint
    from shoal.plan.drafting import plan_drafter
    from shoal.train.drafters.execute import execute

    job = drafter_recipe(kind, target, data=data, tokens=tokens, seed=seed, **options)
    result = job.model_dump(mode="json", exclude={"model", "name", "threads"}, exclude_unset=True)
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:12]
    place = shoal_home() / "drafters" / f"{kind}-{fingerprint(target)}-{digest}"

    def make(run_dir: Path, machine: Machine, left: bool) -> Path:
        begun = time.perf_counter()
        execute(plan_drafter(job, machine), run_dir, resume=left)
        if not left:  # else it is unknown
            took = time.perf_counter() - begun
            write_json(run_dir / "drafter" / "training.json", {"seconds": took})
        return run_dir / "drafter"

    return stored_directory(place, "drafter.json", make, say)


def method_of(
    name: str, target: Path, given: Mapping[str, Path], say: Callable[[str], None]
) -> dict[str, Any]:
    """The part of kind ``speculative``, its drafter trained if it is not there.

    Args:
        name: of the part.
        target: directory of the model that it drafts for.
        given: name -> directory of drafters that are there.
        say: receives what is trained.
    """
    from shoal.train import zoo

    table("speculative").load(name, where="--methods")
    if name in given:
        return {"name": name, "path": str(given[name])}
    if name in _RECIPES:
        return {"name": name, "path": str(drafter(name, target, say=say))}
    if name in _DRAFTS:
        return {"name": name, "path": str(zoo.trained(_DRAFTS[name], say))}
    return {"name": name}
