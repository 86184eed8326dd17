"""Which choices of a job go together, by what they state of themselves.

A part states traits (:mod:`shoal.core.traits`), and so do the settings beside the parts: that
experts have a grid of their own, or that blocks are compiled. A rule names two traits that exclude
each other. Planners leave out what a rule excludes; a job that states it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.core.errors import PlanError
from shoal.core.parts import Choice, table
from shoal.core.traits import traits
from shoal.ir import Parallel, TrainJob


class CompositionRule(NamedTuple):
    """Two traits that exclude each other.

    Args:
        one: of what stays, as errors word it.
        other: of what has to change.
        why: a clause about what has ``one``.
    """

    one: str
    other: str
    why: str


def _rules(one: str, why: str, *others: str) -> tuple[CompositionRule, ...]:
    return tuple(CompositionRule(one, other, why) for other in others)


RULES: tuple[CompositionRule, ...] = (
    *_rules(
        "splits_backward",
        "which writes the gradients of weights in passes of their own",
        "shards_gradients",
        "leaves_device",
    ),
    *_rules(
        "passes_for_vocabulary",
        "whose passes read and write rows of their own",
        "shards_gradients",
        "leaves_device",
    ),
    *_rules(
        "skips_stages",
        "whose stages divide their gradients by numbers of their own",
        "shards_gradients",
        "leaves_device",
    ),
    *_rules(
        "local_updates",
        "whose workers differ within a round",
        "shards_gradients",
        "leaves_device",
        "fine_tunes",
        "layers_differ",
        "experts_apart",
        "skips_stages",
        "replans",
        "kept_in_memory",
        "dumps",
    ),
    *_rules(
        "passes_differ",
        "whose ranks have different numbers of passes, each of which needs no other rank",
        "shards_gradients",
        "experts_apart",
        "divides_model",
        "recomputes_stage",
        "compiled",
        "leaves_device",
        "fine_tunes",
        "moves_activations",
        "local_updates",
        "replans",
    ),
    *_rules("compiled", "whose code keeps what it saves itself", "moves_activations"),
    *_rules("compiled", "whose blocks send nothing", "divides_model"),
    *_rules(
        "keeps_products",
        "which keeps what products give on the device",
        "leaves_device",
        "moves_activations",
        "passes_differ",
        "layers_differ",
    ),
    *_rules("experts_apart", "whose tokens travel", "levels", "copies_weights", "compiled"),
    *_rules("experts_apart", "whose ranks divide the state already", "leaves_device"),
    *_rules("copies_experts", "which copies whole experts", "shards_gradients"),
    *_rules("slices_gradients", "which cuts whole gradients", "shards_gradients"),
    *_rules("whole_matrices", "which needs whole matrices", "shards_gradients", "divides_matrices"),
    *_rules(
        "fine_tunes",
        "whose model is whole on every rank",
        "divides_model",
        "experts_apart",
        "shards_optimizer",
    ),
    *_rules("fine_tunes", "whose method changes blocks", "compiled"),
    *_rules("fine_tunes", "whose gradients and moments are few", "leaves_device"),
    *_rules("fine_tunes", "whose checkpoints lack the base", "replans", "dumps"),
    *_rules(
        "divides_base",
        "whose ranks have parts of its matrices",
        "reads_base",
        "replaces_base",
        "layers_differ",
    ),
    *_rules("own_blocks", "whose blocks are not the base's", "recomputes", "layers_differ"),
    *_rules(
        "layers_apart",
        "whose blocks share out ranks and sequences in ways of their own",
        "local_updates",
        "passes_differ",
        "passes_for_vocabulary",
        "skips_stages",
        "experts_apart",
        "leaves_device",
        "fine_tunes",
        "kept_in_memory",
        "dumps",
        "compiled",
    ),
    *_rules("updates_in_passes", "whose weights move while passes are made", "kept_in_memory"),
    *_rules("sees_no_documents", "whose passes see no borders", "separates_documents"),
)


class _Fact(NamedTuple):
    """A choice of a job.

    Args:
        where: its key.
        given: what was chosen.
        plain: what a job has that chooses nothing here.
        traits: that it states.
        kind: its table, of a part.
    """

    where: str
    given: str
    plain: str
    traits: frozenset[str]
    kind: str = ""


# What all parts of a kind are, whatever they state of themselves.
_OF_KIND = {"offload": "leaves_device", "peft": "fine_tunes", "assigner": "passes_differ"}


@functools.cache
def part_traits(kind: str, name: str) -> frozenset[str]:
    """What a part states, and what all of its kind are."""
    part_traits = set(traits(kind, name))
    if kind in _OF_KIND:
        part_traits.add(_OF_KIND[kind])
    if kind == "placer" and "experts_stay" not in part_traits:
        part_traits.add("copies_experts")
    if kind == "optimizer" and getattr(table(kind).load(name), "whole_matrices", False):
        part_traits.add("whole_matrices")
    return frozenset(part_traits)


def _part(where: str, kind: str, choice: Choice | None) -> Iterator[_Fact]:
    if choice is not None:
        yield _Fact(where, choice.name, "nothing", part_traits(kind, choice.name), kind)


def _setting(where: str, given: object, plain: str, stated: bool, *trait: str) -> Iterator[_Fact]:
    if stated:
        yield _Fact(where, str(given), plain, frozenset(trait))


def _of_split(split: Parallel) -> Iterator[_Fact]:
    yield from _part("parallel.schedule", "schedule", split.schedule)
    yield from _part("parallel.placer", "placer", split.placer)
    whole, cut, tp = split.vocab == "pp", bool(split.gradient_slices), split.tp
    yield from _setting("parallel.tp", tp, "1", tp > 1, "divides_model", "divides_matrices")
    yield from _setting("parallel.pp", split.pp, "1", split.pp > 1, "divides_model")
    yield from _setting("parallel.cp", split.cp, "1", split.cp > 1, "divides_model")
    yield from _setting("parallel.vocab", split.vocab, "auto", whole, "passes_for_vocabulary")
    yield from _setting("parallel.ep", split.ep, "1, with etp = 1", split.folded, "experts_apart")
    yield from _setting("parallel.gradient_slices", "slices", "nothing", cut, "slices_gradients")


def _beside_split(job: TrainJob) -> Iterator[_Fact]:
    yield from _part("sync", "sync", job.sync)
    yield from _part("optimizer", "optimizer", job.optimizer)
    yield from _part("batching", "assigner", job.batching)
    yield from _part("finetune", "peft", job.finetune)
    yield from _part("offload", "offload", job.offload)
    yield from _part("activation", "activation", job.activation)
    yield from _part("packing", "packing", job.packing)
    again, saved = job.recompute, job.checkpoint
    parted = job.base == "divided"
    yield from _setting("base", job.base, "own", parted, "divides_base")
    yield from _setting("compile", "true", "false", job.compile, "compiled")
    yield from _setting("recompute", again, "none", again != "none", "recomputes")
    yield from _setting("recompute", again, "none or full", again == "stage", "recomputes_stage")
    kept = again == "selective"
    yield from _setting("recompute", again, "none or full", kept, "keeps_products")
    yield from _setting("layers", len(job.layers), "nothing", bool(job.layers), "layers_differ")
    apart = job.layers_apart
    yield from _setting("layers", "apart", "groups of equal degrees", apart, "layers_apart")
    yield from _setting("replan.enabled", "true", "false", job.replan.enabled, "replans")
    kept, dumped = saved.memory is not None, saved.dump is not None
    yield from _setting("checkpoint.memory", saved.memory, "nothing", kept, "kept_in_memory")
    yield from _setting("checkpoint.dump", saved.dump, "nothing", dumped, "dumps")


def split_traits(split: Parallel) -> frozenset[str]:
    """All that a split states."""
    return frozenset[str]().union(*(fact.traits for fact in _of_split(split)))


def work_traits(job: TrainJob) -> frozenset[str]:
    """All that a job states beside its split and its sharding."""
    return frozenset[str]().union(*(fact.traits for fact in _beside_split(job)))


@functools.lru_cache(maxsize=4096)
def clash(some: frozenset[str], others: frozenset[str]) -> CompositionRule | None:
    """The first rule by which something of ``some`` and something of ``others`` exclude each other.

    What one of them excludes of itself is not asked for.
    """
    for rule in RULES:
        for here, there in ((some, others), (others, some)):
            if rule.one in here and rule.other in there:
                return rule
    return None


def excluded_by(job: TrainJob, trait: str) -> str:
    """What of a job excludes a trait, such as ``sync diloco``; empty if nothing does."""
    facts = (*_of_split(job.parallel), *_beside_split(job))
    named = (f"{one.where} {one.given}" for one in facts if clash(one.traits, frozenset({trait})))
    return next(named, "")


def check_composition(job: TrainJob) -> None:
    """Refuse choices that exclude each other.

    Raises:
        PlanError: names both, their traits, and what would be legal in the place of each.
    """
    check_base(job)
    shard = _part("shard", "shard", job.shard)
    facts = [*_of_split(job.parallel), *_beside_split(job), *shard]
    for rule in RULES:
        one = next((fact for fact in facts if rule.one in fact.traits), None)
        other = next((fact for fact in facts if rule.other in fact.traits), None)
        if one is None or other is None or one is other:
            continue
        raise PlanError(
            f"{other.where} = {other.given}: expected {_legal(other, facts)} with "
            f"{one.where.removeprefix('parallel.')} {one.given}, {rule.why}; or {one.where}: "
            f"{_legal(one, facts)} ({rule.one} excludes {rule.other})"
        )


def check_base(job: TrainJob) -> None:
    """Refuse a base that lies elsewhere than in memory of each rank, where nothing is to lie there.

    Raises:
        PlanError: names what is missing.
    """
    if job.base != "own" and job.finetune is None:
        raise PlanError(
            f"base = {job.base} without finetune: every weight is trained, and none stands still; "
            "give finetune, or base = own"
        )
    if job.base == "divided" and job.parallel.dp == 1 and "parallel" in job.model_fields_set:
        raise PlanError(
            "base = divided with parallel.dp = 1: one rank has the whole base; give more "
            "data-parallel ranks, or base = own"
        )


def _legal(fact: _Fact, facts: Sequence[_Fact]) -> str:
    """What could stand in the place of a choice, beside all others."""
    if not fact.kind:
        return fact.plain
    rest = frozenset[str]().union(*(one.traits for one in facts if one is not fact))
    names = [name for name in table(fact.kind) if not clash(rest, part_traits(fact.kind, name))]
    return " or ".join(names) or fact.plain
