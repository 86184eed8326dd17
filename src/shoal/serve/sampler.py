"""From logits to tokens: all rows of a step together.

A row's random number is a function of its request's seed and of the number of the token,
so what a request gets does not depend on what else runs. Rows choose what
:func:`shoal.model.generate.sample` would choose for the same number, without sorting the
whole vocabulary: a few hundred best tokens decide nearly always, and rows that they do
not decide are done again with all.

Shapes: R rows, V vocabulary, M candidates.

Source of top-p: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.ir import Request, SamplingParams, TokenInfo

__all__ = ["choose", "log_probabilities", "sample_rows"]

# Candidates of the first try.
_FEW = 256


def choose(
    logits_RV: Tensor, requests: Sequence[Request]
) -> tuple[list[int], dict[str, tuple[TokenInfo, ...]]]:
    """The next token of every row, and the log probabilities that were asked for.

    Args:
        logits_RV: scores of all tokens.
        requests: whose rows they are.
    """
    tokens_R = logits_RV.argmax(-1)
    rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if rows:
        chosen = [requests[row] for row in rows]
        everything = len(rows) == len(requests)
        picked = sample_rows(
            logits_RV if everything else logits_RV[rows],
            [request.params for request in chosen],
            [_uniform(request) for request in chosen],
        )
        if everything:
            tokens_R = picked
        else:
            tokens_R[rows] = picked
    tokens: list[int] = tokens_R.tolist()
    wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    infos: dict[str, tuple[TokenInfo, ...]] = {}
    if wanted:
        found = log_probabilities(
            logits_RV[wanted],
            [tokens[row] for row in wanted],
            [requests[row].params.logprobs or 0 for row in wanted],
        )
        infos = {requests[row].id: (info,) for row, info in zip(wanted, found, strict=True)}
    return tokens, infos


def _uniform(request: Request) -> float:
    source = generator(request.params.seed, purpose="generate", step=request.n_generated)
    return float(source.random())


def sample_rows(
    logits_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Sample each row by its own parameters and its own number in [0, 1); temperatures > 0."""
    device = logits_RV.device
    exact = torch.float64
    temperature_R = torch.tensor([p.temperature for p in params], dtype=exact, device=device)
    vocab_size = logits_RV.shape[-1]
    top_k_R = torch.tensor([p.top_k or vocab_size for p in params], device=device)
    top_p_R = torch.tensor([p.top_p for p in params], dtype=exact, device=device)
    uniform_R = torch.tensor(list(uniforms), dtype=exact, device=device)
    tokens_R, sure_R = _pick(logits_RV, temperature_R, top_k_R, top_p_R, uniform_R, _FEW)
    if not bool(sure_R.all()):
        open_ = (~sure_R).nonzero()[:, 0]
        tokens_R[open_], _ = _pick(
            logits_RV[open_],
            temperature_R[open_],
            top_k_R[open_],
            top_p_R[open_],
            uniform_R[open_],
            vocab_size,
        )
    return tokens_R


def _pick(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    uniform_R: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Tokens by the ``width`` best of each row, and whether these were enough to tell."""
    vocab_size = logits_RV.shape[-1]
    whole = width >= vocab_size
    scores_RV = logits_RV.double() / temperature_R[:, None]
    if whole:
        scores_RM, token_RM = scores_RV.sort(dim=-1, descending=True, stable=True)
        width = vocab_size
    else:
        # By falling score, and by token where scores are equal, as a stable sort has it.
        token_RM = logits_RV.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
        scores_RM, order_RM = scores_RV.gather(-1, token_RM).sort(
            dim=-1, descending=True, stable=True
        )
        token_RM = token_RM.gather(-1, order_RM)
    best_R1 = scores_RM[:, :1]
    weight_RM = (scores_RM - best_R1).exp()
    place_M = torch.arange(width, device=logits_RV.device)
    all_R = top_k_R >= vocab_size
    inside_RM = place_M < top_k_R[:, None]
    total_R = torch.where(
        all_R, (scores_RV - best_R1).exp().sum(-1), (weight_RM * inside_RM).sum(-1)
    )
    p_RM = weight_RM / total_R[:, None]
    cumulative_RM = p_RM.cumsum(-1)
    kept_RM = inside_RM & ((cumulative_RM - p_RM < top_p_R[:, None]) | (top_p_R == 1)[:, None])
    num_kept_R = kept_RM.sum(-1).clamp_(min=1)
    end_R = cumulative_RM.gather(-1, num_kept_R[:, None] - 1)[:, 0]
    cut_R = num_kept_R >= width  # more tokens than these may take part
    if not whole:
        end_R = torch.where(cut_R, (all_R & (top_p_R == 1)).double(), end_R)
    place_R = (cumulative_RM <= (uniform_R * end_R)[:, None]).sum(-1)
    last_R = torch.minimum(place_R, num_kept_R - 1)
    tokens_R = token_RM.gather(-1, last_R[:, None])[:, 0]
    if whole:
        return tokens_R, torch.ones_like(cut_R)
    # Without the whole vocabulary: the sum is known only if nothing was cut or nothing
    # limits it, and among equals of the last candidate any may be missing.
    chosen_R = scores_RM.gather(-1, last_R[:, None])[:, 0]
    known_R = ~cut_R | ((top_p_R == 1) & all_R & (place_R < width))
    return tokens_R, known_R & (chosen_R > scores_RM[:, -1])


def log_probabilities(
    logits_RV: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenInfo]:
    """Log probabilities of the model itself, temperature and cuts left out.

    Args:
        logits_RV: scores of all tokens.
        tokens: the chosen ones.
        counts: how many of the best ones each row reports.
    """
    logs_RV = torch.log_softmax(logits_RV.float(), -1)
    place_R1 = torch.tensor(list(tokens), device=logits_RV.device)[:, None]
    chosen = logs_RV.gather(-1, place_R1)[:, 0].tolist()
    best = logs_RV.topk(min(max(counts), logs_RV.shape[-1]), dim=-1)
    return [
        TokenInfo(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, ids, values, count in zip(
            chosen, best.indices.tolist(), best.values.tolist(), counts, strict=True
        )
    ]
