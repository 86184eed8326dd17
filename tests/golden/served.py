"""Tiny models, the same requests for all of them, and what a request of a row comes to.

Everything is drawn from fixed seeds, the clock counts calls, and requests come and go by the number
of steps and tokens: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
from concurrent.futures import Future

import torch

from shoal.core.errors import ServeError
from shoal.core.random import generator
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.model.config import ModelConfig
from shoal.serve.engine.build import engine_of
from shoal.serve.text.grammar import grammar_of

VOCAB, END = 257, 0
BASE = {
    "vocab_size": VOCAB, "hidden": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "ffn_hidden": 96, "max_position": 192, "initializer_range": 0.15,
}  # fmt: skip
FAMILIES = {
    "llama": {"family": "llama", "tied": True},
    "qwen2": {"family": "qwen2", "attention_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "mixtral": {"family": "mixtral", "num_experts": 4, "top_k": 2},
    "mdlm": {
        "family": "mdlm", "tied": True, "vocab_size": 40, "mask_token_id": 39, "eos_token_id": 0,
        "initializer_range": 0.3,
    },
}  # fmt: skip


@functools.cache
def _model(family, dtype, changes):
    from shoal.model.transformer import Transformer

    config = ModelConfig(**{**BASE, **FAMILIES[family], **dict(changes)})
    model = Transformer(config).requires_grad_(False)
    source = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, config.initializer_range, generator=source)
        if name.endswith("norm.weight"):
            parameter.add_(1)
    return model.to(dtype)


def model_of(family="llama", dtype=torch.float64, **changes):
    """A model of one's own in which every parameter is random."""
    return copy.deepcopy(_model(family, dtype, tuple(sorted(changes.items()))))


JSON = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LENGTHS = (3, 17, 40, 64, 1, 90, 25, 16, 33, 8)
SAMPLINGS = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3, "temperature": 0.7},
    {"logit_bias": ((5, 4.0), (9, -6.0)), "temperature": 0.9},
    {"stop_ids": frozenset(range(1, 40))},
    {"temperature": 0.9, "min_p": 0.05, "stop_ids": frozenset(range(220, VOCAB))},
    {"logprobs": 2},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "logprobs": 3},
    {"min_tokens": 6, "stop_ids": frozenset(range(60))},
    {"max_tokens": 1},
    {"max_tokens": 40, "grammar": {"json": JSON}, "stop_ids": frozenset({END})},
    {
        "temperature": 1.5,
        "grammar": {"regex": "[a-c]{2,4}x?"},
        "stop_ids": frozenset({END}),
    },
    {"pooling": "mean"},
    {"max_tokens": 32},
    {"temperature": 0.6, "max_tokens": 28},
    {},
    {},
)
PREFIX = 48  # tokens that some prompts begin with
WAITS, LEAVES, LEAVES_EARLY = 31, 30, 32  # who is cancelled
LATE = 33  # those from here on come one a step
FEW = (0, 1, 3, 6, 9, 10, 13, 24)  # where eight are enough


def _prompt(number, length):
    return generator(11, purpose="prompts", index=number).integers(1, VOCAB, length).tolist()


def _sampling(number, changes):
    changes = dict(changes)
    if "grammar" in changes:
        changes["grammar"] = grammar_of(changes["grammar"])
    return SamplingParams(**{"max_tokens": 8 + 3 * (number % 6), "seed": number, **changes})


def _request(number, adapters):
    """One of the forty."""
    more, sampling = {}, {}
    prompt = _prompt(number, LENGTHS[number % 10])
    if number < 20:
        sampling = SAMPLINGS[number]
    elif number < 24:  # four answers to one prompt
        prompt, sampling = _prompt(20, 45), {"temperature": 1.0, "frequency_penalty": 0.3}
        more["fork_of"] = "r20" if number > 20 else None
    elif number < 30:
        prompt = _prompt(99, PREFIX) + prompt[: 1 + 7 * (number - 24)]
        sampling = {"temperature": 0.9} if number % 2 else {}
    elif number < 33:
        prompt, sampling = _prompt(number, 100 if number == LEAVES_EARLY else 20), {}
    elif number < 37:
        sampling = {"temperature": 0.7} if number % 2 else {}
        more["adapter"] = adapters[number % len(adapters)] if adapters else None
    else:  # prompts of others, who have been computed by now
        prompt = _prompt(number - 32, LENGTHS[(number - 32) % 10])
    params = _sampling(number, sampling)
    if params.pooling:
        more["salt"] = "pooled"
    more |= {"session": f"s{number % 5}", "priority": number % 3}
    return Request(f"r{number}", prompt, len(prompt), params, **more)


def requests_of(numbers=range(40), *, adapters=()):
    """The forty requests, or some of them."""
    return [_request(number, adapters) for number in numbers]


def small_requests():
    """Eight for models of forty tokens."""
    made = []
    for number in range(8):
        prompt = [token % 38 + 1 for token in _prompt(number, (3, 7, 1, 12, 20, 5, 33, 2)[number])]
        changes = ({}, {"temperature": 1.5}, {"stop_ids": frozenset(range(4))}, {})[number % 4]
        made.append(Request(f"r{number}", prompt, len(prompt), _sampling(number, changes)))
    return made


def worker_requests():
    """Sessions of two, of three and of one worker."""
    made = []
    for workers in (2, 3, 1):
        first = len(made)
        prompt = [3 + token % 200 for token in _prompt(first, 9)]
        for number in range(first, first + workers):
            changes = {"workers": workers, "max_tokens": 24}
            if workers > 1:  # 1 ends a step of theirs
                changes |= {"temperature": 1.2, "logit_bias": ((1, 5.0),)}
            params = _sampling(number, changes)
            fork_of = f"r{first}" if number > first else None
            made.append(Request(f"r{number}", [*prompt], 9, params, fork_of=fork_of))
    return made


class Clock:
    """A millisecond a look."""

    def __init__(self):
        self._looks = itertools.count()

    def __call__(self):
        return next(self._looks) / 1000


class InPlace:
    """A pool of threads that has none: what is submitted is done when that returns."""

    def __init__(self, *_, **__):
        pass

    def submit(self, work, *arguments):
        done = Future()
        try:
            done.set_result(work(*arguments))
        except BaseException as cause:
            done.set_exception(cause)
        return done

    def shutdown(self, **_):
        pass


def engine_for(model, directory="tiny", /, *, link=None, cost=None, **fields):
    """An engine in this process on a clock that counts."""
    fields = {
        "model": str(directory), "kv_tokens": 4096, "threads": 1, "max_running": 16,
        "max_step_tokens": 64, **fields,
    }  # fmt: skip
    engine = engine_of(ServeJob.model_validate(fields), model, link=link, cost=cost)[0]
    engine.clock = Clock()
    return engine


COUNTERS = (
    "steps_total", "tokens_prompt_total", "tokens_generated_total", "preemptions_total",
    "prefix_hit_tokens", "forks_total", "blocks_copied_total", "blocks_used",
    "swap_out_blocks_total", "swap_in_blocks_total", "swap_copies_total", "draft_trees_total",
    "draft_tokens_total", "draft_tokens_accepted_total", "diffusion_forwards_total",
    "diffusion_computed_tokens_total",
)  # fmt: skip


def serve(engine, requests, *, planned=True):
    """Serve requests and say what came of them, as a row that JSON can hold.

    Args:
        engine: without requests.
        requests: those from ``LATE`` on come one a step.
        planned: its steps depend on nothing but the requests, so they are part of the row.
    """
    numbers = {one.id: int(one.id[1:]) for one in requests}
    late = [one for one in requests if numbers[one.id] >= LATE]
    tokens = {one.id: [] for one in requests}
    infos, ends, vectors, plan = {}, {}, {}, hashlib.sha256()

    def add(request):
        try:
            engine.add(request)
        except ServeError:
            ends[request.id] = "refused"

    def leave(number):
        if number in numbers.values() and f"r{number}" not in ends:
            output = engine.abort(f"r{number}")
            ends[f"r{number}"] = output.finish if output is not None else "abort"

    for request in requests:
        if request not in late:
            add(request)
    leave(WAITS)
    for step in itertools.count():
        assert step < 5000, "requests that never end"
        if late and step >= 3:
            add(late.pop(0))
        outputs = engine.step()
        for output in outputs:
            tokens[output.request_id] += output.tokens
            infos.setdefault(output.request_id, []).extend(output.infos)
            if output.finish is not None:
                ends[output.request_id] = output.finish
        for one in engine.drain_events():
            if one["kind"] == "vector":
                vectors[one["id"]] = one["values"]
            elif one["kind"] != "began":
                ends[one["id"]] = one["kind"]
        if planned:
            chunks = [
                (numbers[c.request.id], c.start, c.length, c.drafts)
                for c in getattr(engine, "last_chunks", ())
            ]
            given = [(numbers[one.request_id], len(one.tokens)) for one in outputs]
            plan.update(json.dumps([chunks, given]).encode())
        if step == 0:
            leave(LEAVES_EARLY)
        if len(tokens.get(f"r{LEAVES}", ())) >= 5:
            leave(LEAVES)
        if not late and not engine.busy:
            break
    for request in requests:
        if ends[request.id] in ("stop", "length"):
            assert tokens[request.id] == request.tokens[request.n_prompt :], request.id
    row = {"tokens": [written(found) for found in tokens.values()]}
    row["ends"] = "".join(
        {"refused": "x", "error": "!"}.get(ends[one], ends[one][0]) for one in tokens
    )
    if planned:
        stats = engine.stats()
        row["counts"] = {name: int(stats[name]) for name in COUNTERS if stats.get(name)}
        row["plan"] = plan.hexdigest()
    row["sha256"] = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
    if planned:  # in other company a number has other last bits
        row["logprobs"] = {
            one: [
                [info.logprob.hex(), *(value.hex() for _, value in info.top)] for info in found[:5]
            ]
            for one, found in infos.items()
            if found
        }
        row["vectors"] = {one: [x.hex() for x in found[:4]] for one, found in vectors.items()}
    return row


def written(tokens):
    """Tokens below 36 ** 2, two characters each."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "".join(digits[token // 36] + digits[token % 36] for token in tokens)
