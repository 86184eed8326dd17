"""Text from a model: greedy, or sampled with temperature, top-k, top-p and min-p.

Source of top-p: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020.
Source of min-p: Nguyen et al., Turning Up the Heat: Min-p Sampling, 2024.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from shoal.core.errors import ModelError, require
from shoal.core.random import generator
from shoal.model.attention import KVCache
from shoal.model.transformer import Transformer


def adjust(
    logits_V: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Sequence[tuple[int, float]] = (),
    banned: Collection[int] = (),
) -> Tensor:
    """Scores after penalties, bias and bans, in this order; one row, token by token.

    Args:
        logits_V: scores of all tokens.
        prompt: tokens of the prompt.
        output: tokens generated so far.
        repetition_penalty: divides positive scores of tokens of both, multiplies others.
        frequency_penalty: taken off for each time that the output has a token.
        presence_penalty: taken off once for each token of the output.
        logit_bias: (token, what is added).
        banned: tokens that must not be chosen.

    Source of the repetition penalty: Keskar et al., CTRL, 2019, section 4.1.
    """
    scores_V = logits_V.double()
    most = torch.finfo(torch.float32).max
    finite_V = scores_V.isfinite()
    for token in {*prompt, *output}:
        score = scores_V[token].item()
        scores_V[token] = score / repetition_penalty if score > 0 else score * repetition_penalty
    for token, count in Counter(output).items():
        scores_V[token] -= count * frequency_penalty + presence_penalty
    for token, bias in logit_bias:
        scores_V[token] += bias
    # What was finite stays so; what was not is the model's fault, and shows.
    scores_V = torch.where(finite_V, scores_V.clamp(-most, most), scores_V)
    for token in banned:
        scores_V[token] = float("-inf")
    return scores_V.to(torch.promote_types(logits_V.dtype, torch.float32))


def sample(
    logits_V: Tensor,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: float = 0.0,
) -> int:
    """Choose the next token.

    Args:
        logits_V: scores of all tokens.
        temperature: 0 takes the best token.
        top_k: only so many of the best tokens; 0 for all.
        top_p: only the best tokens that together have this probability; 1 for all.
        min_p: only tokens of at least this share of the best one's probability; comes before
            ``top_p``.
        uniform: the random number in [0, 1) that decides.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    # The best is taken off first: over a small temperature it may be infinite.
    wide_V = logits_V.double()
    scores, order = ((wide_V - wide_V.max()) / temperature).sort(descending=True, stable=True)
    if top_k:
        scores = scores[:top_k]
    if min_p:
        scores = scores[scores >= math.log(min_p)]
    p = torch.softmax(scores, -1)
    p = p[p > 0]  # what is banned stays banned, whatever the random number
    if top_p < 1:
        p = p[: max(1, int((p.cumsum(-1) - p < top_p).sum()))]
    cumulative = p.cumsum(-1)
    place = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(order[min(place, len(p) - 1)])


def stream(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: Sequence[int] | None = None,
) -> Iterator[int]:
    """Yield new tokens as they come; see :func:`generate`."""
    config = model.config
    eos = config.eos_ids if eos is None else eos
    require(
        len(prompt_ids) > 0,
        "prompt",
        list(prompt_ids),
        expected="at least one token",
        hint="begin with the token that begins a text",
        error=ModelError,
    )
    for token in prompt_ids:
        require(
            0 <= token < config.vocab_size,
            "prompt",
            token,
            expected=f"token ids below vocab_size = {config.vocab_size}",
            hint="use the tokenizer that belongs to the model",
            error=ModelError,
        )
    require(temperature >= 0, "temperature", temperature, expected="0 or more", error=ModelError)
    require(top_k >= 0, "top_k", top_k, expected="0 (all) or more", error=ModelError)
    require(0 < top_p <= 1, "top_p", top_p, expected="(0, 1]", error=ModelError)
    require(
        len(prompt_ids) + max_new_tokens <= config.max_position,
        "max_new_tokens",
        max_new_tokens,
        expected=f"at most {max(0, config.max_position - len(prompt_ids))} after a prompt of "
        f"{len(prompt_ids)} tokens; max_position = {config.max_position}",
        error=ModelError,
    )
    weight = model.embed.weight
    dtype = weight.dtype
    if torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    cache = KVCache(
        config,
        1,
        len(prompt_ids) + max_new_tokens,
        dtype=dtype,
        device=weight.device,
        streams=model.streams,
    )
    tokens = list(prompt_ids)
    for index in range(max_new_tokens):
        with torch.no_grad():
            fed = torch.tensor([tokens], dtype=torch.int64, device=weight.device)
            hidden = model.hidden(fed, cache=cache)[0, -1]
            logits = model.logits(hidden.unsqueeze(0))[0]
        uniform = 0.0
        if temperature:
            uniform = float(generator(seed, purpose="generate", step=index).random())
        token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform)
        yield token
        if token in eos:
            return
        tokens = [token]


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: Sequence[int] | None = None,
) -> list[int]:
    """Continue a prompt, with a cache of keys and values.

    Args:
        model: runs where its weights are.
        prompt_ids: tokens to continue, at least one.
        max_new_tokens: most tokens to add.
        temperature: 0 takes the best token each time.
        top_k: sample from so many of the best tokens; 0 for all.
        top_p: sample from the best tokens that together have this probability; 1 for all.
        seed: the same seed gives the same text.
        eos: tokens that end the text; the model's own if not given. The ending token is
            the last one returned.

    Returns:
        The new tokens.

    Raises:
        ModelError: an empty prompt, an unknown token, or more tokens than positions.
    """
    return list(
        stream(
            model,
            prompt_ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eos=eos,
        )
    )
