"""Serving: the values that engine, simulator and schedulers exchange.

Who exchanges them is in :mod:`shoal.ir.engine`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# arriving: it holds blocks, and what belongs in them is on the way from the host.
# computing: it is in a step that is under way while others are planned.
RequestState = Literal["waiting", "arriving", "running", "computing", "finished"]
FinishReason = Literal["stop", "length", "abort"]

# Below it sampling is greedy in all but name, and scores divided by it leave the range of floats.
MIN_TEMPERATURE = 1e-4
MIN_REPETITION_PENALTY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Args:
        max_tokens: most new tokens.
        temperature: 0 takes the best token; else at least :data:`MIN_TEMPERATURE`.
        top_k: sample from so many of the best tokens; 0 for all.
        top_p: sample from the best tokens that together have this probability.
        seed: the same seed, prompt and options give the same tokens.
        stop_ids: tokens that end the request; the ending token is part of its output.
        logprobs: report the log probability of each token and of so many best ones; None for
            no report.
        prompt_logprobs: the same of every token of the prompt but the first, which needs a
            ``salt`` of its own, since what is found in the cache is not computed.
        min_p: sample from tokens of at least this share of the best one's probability.
        repetition_penalty: a token that prompt or output has is this many times less likely:
            its score is divided by it if positive, else multiplied; at least
            :data:`MIN_REPETITION_PENALTY`.
        frequency_penalty: taken from a token's score for each time that the output has it.
        presence_penalty: taken from a token's score once the output has it.
        logit_bias: (token, what is added to its score).
        min_tokens: no token of ``stop_ids`` before so many new tokens.
        grammar: what the output must be, in the words of the library that masks tokens; it
            ends with a token of ``stop_ids``.
        pooling: also give a vector of the prompt: the mean of its final hidden states, which
            needs a ``salt`` of its own, or the last one; None for none.
        streams: how many of a model's parallel streams compute it; None for all of them, 1 for the
            base model without a prefix.
        compute: share of the all-big model's feed-forward operations that the request is to take,
            in (0, 1], of a model whose tokens choose among layers of two sizes; None leaves it to
            the model.
        workers: it is one of so many requests with the same prompt that are answered together, the
            later ones forks of the first, where the engine has concurrent workers.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: str | None = None
    pooling: Literal["mean", "last"] | None = None
    streams: int | None = None
    compute: float | None = None
    workers: int = 1

    @property
    def reads_prompt(self) -> bool:
        """Whether hidden states of the prompt are wanted beside that of its last token."""
        return self.pooling is not None or self.prompt_logprobs is not None


class Prompt(tuple[int, ...]):
    """Tokens of a prompt that many simulations serve, with what is derived from them once."""

    @functools.cached_property
    def digests(self) -> dict[tuple[int, str | None, str], tuple[Sequence[int], Sequence[bytes]]]:
        """Tokens of the last request with it and digests of their full blocks.

        By tokens of a block, adapter and salt.
        """
        return {}

    def __reduce__(self) -> tuple[type[Prompt], tuple[tuple[int, ...]]]:
        return Prompt, (tuple(self),)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what has been generated of it.

    Args:
        id: unique among the requests of an engine.
        tokens: the prompt, then the generated tokens.
        n_prompt: tokens of the prompt.
        params: how to sample.
        arrival: s, on the clock of the scheduler's caller.
        n_computed: tokens whose keys and values are in the cache.
        n_cached: tokens of the prompt that were found in the cache at the last admission.
        priority: a smaller number goes first, where a scheduler looks at it.
        adapter: name of the adapter it is for; part of the identity of its cache blocks.
        salt: requests share cache blocks only with those of the same salt.
        session: the conversation or client it belongs to, where a scheduler shares fairly.
        fork_of: id of an earlier request with the same prompt, adapter and salt, whose cache it
            may begin with; None for none. Without that request it is one like any other.
        blocks: numbers of the cache blocks that hold its tokens, in order.
        state: where it is in its life.
        preemptions: how often its cache was taken away, to be recomputed or swapped in.
        switch_s: s in which its cache was on the way to the host or back.
        began: when its first step began; None before.
        prompt: what is known of its prompt by simulations before; None for nothing.
    """

    id: str
    tokens: list[int]
    n_prompt: int
    params: SamplingParams
    arrival: float = 0.0
    n_computed: int = 0
    n_cached: int = 0
    priority: float = 0.0
    adapter: str | None = None
    salt: str = ""
    session: str = ""
    fork_of: str | None = None
    blocks: list[int] = field(default_factory=list)
    state: RequestState = "waiting"
    preemptions: int = 0
    switch_s: float = 0.0
    began: float | None = None
    prompt: Prompt | None = None

    @property
    def n_generated(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.n_prompt


# Schedulers make these by the million: a tuple is made in half the time of a frozen class.
class Chunk(NamedTuple):
    """Tokens ``start .. start + length`` of a request, computed in one step.

    A decode is a chunk of length 1. A chunk that reaches the request's last token
    yields the next one. Beside a decode up to ``drafts`` guessed tokens may be computed, for
    which its request holds room: it yields one token more for each that is right.
    """

    request: Request
    start: int
    length: int
    drafts: int = 0

    @property
    def stop(self) -> int:
        """First token after the chunk."""
        return self.start + self.length

    @property
    def yields(self) -> bool:
        """Whether a new token follows from it."""
        return self.stop == len(self.request.tokens)


class Copy(NamedTuple):
    """A run of consecutive blocks that is copied at once.

    Args:
        source: first block, where they are.
        target: first block, where they go.
        num_blocks: how many.
    """

    source: int
    target: int
    num_blocks: int


Fetched = Literal["ready", "arriving", "busy"]

# From the cache to the host, from the host to the cache, inside the cache (copy-on-write).
TransferKind = Literal["out", "in", "own"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks of one request on their way, beside the steps to come.

    Args:
        id: rises with every transfer of a scheduler.
        kind: from where to where.
        request_id: whose blocks they are.
        copies: runs of blocks.
        after: earlier transfers that must be over before it starts, since they touch its blocks.
    """

    id: int
    kind: TransferKind
    request_id: str
    copies: tuple[Copy, ...]
    after: tuple[int, ...] = ()


class InFlight:
    """Blocks of one memory that transfers under way read or write.

    A transfer is under way from when it is decided until the runner says that it is over.
    A user of such a block waits for the transfers that touch it, and for no other.
    """

    def __init__(self) -> None:
        self._touched_by: dict[int, set[int]] = {}
        self._blocks_of: dict[int, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._touched_by)

    def __contains__(self, block: object) -> bool:
        return block in self._touched_by

    def begin(self, transfer: int, blocks: Iterable[int]) -> None:
        """A transfer touches these blocks from now on."""
        self._blocks_of[transfer] = touched = tuple(blocks)
        for block in touched:
            self._touched_by.setdefault(block, set()).add(transfer)

    def over(self, transfer: int) -> None:
        """A transfer is over."""
        for block in self._blocks_of.pop(transfer):
            touching = self._touched_by[block]
            touching.remove(transfer)
            if not touching:
                del self._touched_by[block]

    def touching(self, blocks: Iterable[int]) -> set[int]:
        """Transfers under way that touch any of these blocks."""
        if not self._touched_by:
            return set()
        return set().union(*(self._touched_by.get(block, ()) for block in blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """How long copies between cache and host take; each direction is a lane of its own.

    Args:
        copy_s: s that any copy takes, however short it is.
        bytes_per_s: B/s beside that.
        block_bytes: B of a block in all layers.
        layers: copies that a run of blocks takes, one a layer.
    """

    copy_s: float
    bytes_per_s: float
    block_bytes: float
    layers: int = 1

    def seconds(self, copies: Sequence[Copy]) -> float:
        """Seconds of these runs, one after the other."""
        blocks = sum(copy.num_blocks for copy in copies)
        return (
            self.copy_s * self.layers * len(copies) + blocks * self.block_bytes / self.bytes_per_s
        )


# Step and StepResult are not frozen: each step makes one of both, in a third of the time.
@dataclass(slots=True)
class Step:
    """What one iteration computes.

    Args:
        chunks: decodes first, then prompts; at most one chunk of a request.
        preempted: requests whose blocks were taken; they wait, to be recomputed or swapped in.
        transfers: what starts to move before anything is computed, in this order.
        wait_for: transfers, of this step or of earlier ones, that must be over before anything
            is computed. A step without chunks that waits for some ends when the first is over.
        scrub: blocks that are set to zero before anything else, for they hold numbers that are not
            finite: a weight of 0 does not hide these from the blocks' next owner.
        moves: runs of blocks that are copied inside the cache before anything is computed, one
            after another; chunks have the blocks of afterwards.
        at: s, when it was planned, on the clock of the scheduler's caller.
        decodes: of a simulation: requests that compute one token each beside the chunks.
        contexts: tokens that all of these have in the cache.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    wait_for: tuple[int, ...] = ()
    at: float = 0.0
    moves: tuple[Copy, ...] = ()
    scrub: tuple[int, ...] = ()
    decodes: int = 0
    contexts: int = 0

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes or self.transfers or self.wait_for)

    @property
    def num_requests(self) -> int:
        """Requests that have a part in it."""
        return len(self.chunks) + self.decodes

    @property
    def num_tokens(self) -> int:
        """Tokens it computes, guessed ones included."""
        return sum(chunk.length + chunk.drafts for chunk in self.chunks) + self.decodes


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Log probabilities at one token.

    Args:
        logprob: of the token that is there.
        top: (token, logprob) of the best ones, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepResult:
    """What executing a step gave.

    Args:
        tokens: request id -> new tokens, for every chunk that yields; all but the last of them
            are in the cache.
        infos: request id -> log probabilities, where they were asked for; as many.
        seconds: how long it took, or is predicted to take.
        done: transfers, of this step or of earlier ones, that are over now; each reported once.
        vectors: request id -> vector of its prompt, where one was asked for.
        prompts: request id -> place of a token of its prompt, and log probabilities from it on,
            where they were asked for.
        failed: request id -> why it cannot go on; others are not affected.
        errors: the same, for requests that are in order: what went wrong is the server's.
        guessed: request id -> guessed tokens that were computed beside its own, for requests that
            were to guess.
    """

    tokens: Mapping[str, Sequence[int]]
    infos: Mapping[str, Sequence[TokenInfo]] = field(default_factory=dict)
    seconds: float = 0.0
    done: frozenset[int] = frozenset()
    vectors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    prompts: Mapping[str, tuple[int, Sequence[TokenInfo]]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    guessed: Mapping[str, int] = field(default_factory=dict)


class Output(NamedTuple):
    """What a step gave one request.

    Args:
        tokens: new tokens; empty for one that was aborted.
        infos: their log probabilities, where asked for.
        finish: why it ended; None while it goes on.
        cached: tokens of the prompt that were found in the cache at the last admission.
    """

    request_id: str
    tokens: tuple[int, ...]
    infos: tuple[TokenInfo, ...] = ()
    finish: FinishReason | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What a scheduler keeps to.

    Args:
        max_running: maximum number of requests in a step.
        max_step_tokens: most tokens in one step.
        max_position: most tokens of one request, prompt and output together.
    """

    max_running: int
    max_step_tokens: int
    max_position: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Args:
        at: s after the start.
        prompt: token ids; what matters to a simulator is their number and which prefixes
            are shared.
        output_tokens: tokens it generates.
        session: requests of one conversation share it.
    """

    at: float
    prompt: tuple[int, ...]
    output_tokens: int
    session: str = ""
