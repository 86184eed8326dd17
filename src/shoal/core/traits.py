"""Traits: what a part says of itself that decides whether others go with it.

A part states them as a class variable, ``traits: ClassVar[frozenset[str]]``; one that says nothing
has none. Rules of legality, planners and emitters ask for a trait and never for a name, so a part
of another package is judged like those that ship.
"""

from __future__ import annotations

import functools

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, table

__all__ = ["TRAITS", "check_beside", "traits"]

# Trait -> what it means.
TRAITS: dict[str, str] = {
    "chooses_by_price": "what happens to a preempted cache follows from what each way costs",
    "copies_weights": "there are several copies of what is sharded",
    "draws_guesses": "guesses are sampled, and their probabilities decide what is accepted",
    "experts_stay": "every expert is on its owner alone, in every step",
    "fixed_batches": "who is in a batch stays in it until all are done",
    "fixed_iterations": "a block takes a number of iterations that is known before",
    "fixed_size_blocks": "a request's cache is blocks of one pool",
    "follows_guesses": "the shape of a tree follows the calibration of its guesses",
    "groups_of_microbatches": "micro-batches come in groups of as many as there are ranks",
    "lends_blocks": "the cache of a request may lie in other instances",
    "levels": "weights, gradients and optimizer state are divided over ranks of their own",
    "local_updates": "workers make updates of their own, and agree once a round",
    "moves_activations": "saved activations leave the device",
    "moves_weights": "weights come to the device when their turn is, one block after the other",
    "one_document": "a sequence is one document, from its beginning",
    "own_blocks": "the blocks that are trained are not those of the base",
    "phase_decode": "an instance that generates",
    "phase_prefill": "an instance that reads prompts",
    "prompts_apart": "a step has prompts or generates, not both",
    "quotes_prompts": "answers often repeat parts of their prompts",
    "recomputes_cache": "the cache of a preempted request is computed again",
    "remote": "workers may be on other hosts",
    "sees_no_documents": "passes do not see where a document ends",
    "separates_documents": "attention does not cross from one document to another",
    "several_sources": "texts come from several corpora",
    "several_stages": "a rank has several stages of a pipeline",
    "shards_gradients": "a rank keeps its share of the gradients",
    "shards_optimizer": "a rank keeps its share of the optimizer's state",
    "shards_weights": "a rank keeps its share of the weights between passes",
    "skips_stages": "a micro-batch visits some stages only",
    "splits_backward": "gradients of inputs and of weights are passes of their own",
    "swaps_cache": "the cache of a preempted request goes to host memory",
    "takes_back": "tokens that were cached last can be given back",
    "token_by_token": "one token is decoded after the other",
    "updates_in_passes": "weights change while a step makes its passes",
    "weights_stay": "all weights are in the device's memory",
    "whole_blocks": "blocks of several places are decoded at once",
}


@functools.cache
def _of(kind: str, name: str) -> frozenset[str]:
    value: frozenset[str] = getattr(table(kind).load(name), "traits", frozenset())
    return value


def traits(kind: str, choice: Choice | str) -> frozenset[str]:
    """The traits of the chosen part.

    Raises:
        UnknownPartError: there is no such part.
    """
    return _of(kind, choice if isinstance(choice, str) else choice.name)


def check_beside(
    key: str, choice: Choice, trait: str, *, has: bool, beside: str, why: str, kind: str = ""
) -> None:
    """Refuse a part that does not go with another choice of the same job.

    Args:
        key: of the job, which holds the part.
        choice: the part.
        trait: that decides.
        has: whether the part must have it, or must not.
        beside: the other choice, such as ``speculative = ngram``.
        why: it needs that.
        kind: of the part; that of its key if not given.

    Raises:
        ConfigError: both choices, the trait and its meaning, and the parts that would be legal.
    """
    kind = kind or key
    if (trait in traits(kind, choice)) == has:
        return
    legal = [name for name in table(kind) if (trait in traits(kind, name)) == has]
    raise ConfigError(
        f"{key} = {choice.name} with {beside}: {choice.name} {'lacks' if has else 'has'} the trait "
        f"{trait} ({TRAITS.get(trait, 'of a part from elsewhere')}), and {why}; legal with it: "
        f"{', '.join(legal) or 'no part of this kind'}"
    )
