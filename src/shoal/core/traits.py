"""Traits: what a part says of itself that decides whether others go with it.

A part states them as a class variable, ``traits: ClassVar[frozenset[str]]``; one that says nothing
has none. Rules of legality, planners and emitters ask for a trait and never for a name, so a part
of another package is judged like those that ship.
"""

from __future__ import annotations

import functools

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, table

# Trait -> what it means.
TRAITS: dict[str, str] = {
    "chooses_by_price": "preemption takes the cheaper of recomputing and swapping",
    "copies_weights": "there are several copies of what is sharded",
    "draws_guesses": "draft tokens are sampled, and accepted by their probabilities",
    "experts_stay": "every expert is on its owner only",
    "fixed_batches": "a batch is fixed until all of its requests are finished",
    "fixed_iterations": "the number of iterations of a block is fixed",
    "fixed_size_blocks": "a request's cache is blocks of one pool",
    "follows_guesses": "the shape of a draft tree follows from its calibration",
    "groups_of_microbatches": "the number of micro-batches is a multiple of the pipeline ranks",
    "keeps_beginnings": "the end of a document longer than a sequence is dropped",
    "learns_answers": "the loss is on some tokens of a document, such as the assistant's turns",
    "lends_blocks": "the cache of a request may be in other instances",
    "levels": "weights, gradients and optimizer state are divided over different groups of ranks",
    "local_updates": "workers update independently and synchronize once per round",
    "lr_by_size": "the default learning rate falls with the model size",
    "moves_activations": "saved activations leave the device",
    "moves_weights": "weights are copied to the device block by block",
    "one_document": "every sequence is the beginning of one document",
    "own_blocks": "the trained blocks are not blocks of the base",
    "phase_decode": "decode instances",
    "phase_prefill": "prefill instances",
    "prompts_apart": "a step is prefill or decode, not both",
    "quotes_prompts": "answers often repeat parts of their prompts",
    "reads_base": "a fine-tuning method uses the values of base matrices",
    "reads_no_clock": "what comes next follows from the steps before, however long they took",
    "recomputes_cache": "the cache of a preempted request is computed again",
    "recorded": "a recorded workload, replayed as a whole",
    "remote": "workers may be on other hosts",
    "replaces_base": "a fine-tuning method replaces matrices of the base",
    "saves_behind": "a save goes to disk while training goes on",
    "sees_no_documents": "attention crosses document boundaries",
    "separates_documents": "attention does not cross from one document to another",
    "several_sources": "texts are mixed from several corpora",
    "several_stages": "a rank has several stages of a pipeline",
    "shards_gradients": "a rank keeps its share of the gradients",
    "shards_optimizer": "a rank keeps its share of the optimizer's state",
    "shards_weights": "a rank keeps its share of the weights between passes",
    "skips_stages": "a micro-batch visits some stages only",
    "splits_backward": "gradients of inputs and of weights are separate passes",
    "swaps_cache": "the cache of a preempted request is swapped to host memory",
    "takes_back": "the newest tokens of a cache can be removed",
    "token_by_token": "tokens are decoded one after another",
    "updates_in_passes": "weights change while a step makes its passes",
    "weights_stay": "all weights are in the device's memory",
    "whole_blocks": "several positions are decoded at once",
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
