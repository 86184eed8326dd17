"""From logits to tokens: all rows of a step together.

A row's random number is a function of its request's seed and of the number of the token,
so what a request gets does not depend on what else runs. Rows choose what
:func:`shoal.model.generate.sample` would choose for the same number, without sorting the
whole vocabulary: a few hundred best tokens decide nearly always, and rows that they do
not decide are left to that function.

Shapes: R rows, V vocabulary, M candidates.

Source of top-p: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020.
Source of min-p: Nguyen et al., Turning Up the Heat: Min-p Sampling, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.ir import Request, SamplingParams, TokenInfo
from shoal.model.generate import sample

_CANDIDATES = 256

# Probabilities that differ by less may differ by the order of their sums alone.
_CLOSE = 1e-12


def choose(
    logits_RV: Tensor, requests: Sequence[Request], scores_RV: Tensor | None = None
) -> tuple[list[int], dict[str, tuple[TokenInfo, ...]], list[int]]:
    """The next token of every row, and the requested log probabilities.

    Args:
        logits_RV: scores of all tokens, by the model; log probabilities are theirs.
        requests: whose rows they are.
        scores_RV: what tokens are chosen by, where penalties or grammars changed them.

    Returns:
        Tokens, log probabilities, and the rows that have no token; see :func:`unsound`.
    """
    scores_RV = logits_RV if scores_RV is None else scores_RV
    tokens, bad = _picked(scores_RV, requests)
    wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    infos: dict[str, tuple[TokenInfo, ...]] = {}
    if wanted:
        result = log_probabilities(
            logits_RV[wanted],
            [tokens[row] for row in wanted],
            [requests[row].params.logprobs or 0 for row in wanted],
        )
        infos = {requests[row].id: (info,) for row, info in zip(wanted, result, strict=True)}
    return tokens, infos, bad


def pick_tokens(
    scores_RV: Tensor, requests: Sequence[Request], ahead: Sequence[int] | None = None
) -> list[int]:
    """The token of every row.

    Args:
        scores_RV: what tokens are chosen by.
        requests: whose rows they are.
        ahead: how many tokens each row's would come after the request's next one; 0 if not given.

    Returns:
        Tokens; of a row that has none, one whose score is not finite.
    """
    return _picked(scores_RV, requests, ahead)[0]


def unsound(scores_RV: Tensor, tokens: Sequence[int]) -> list[int]:
    """The rows whose chosen token has no finite score, so that nothing can be chosen of them.

    The best score of a row stands for all: it is NaN if any is, infinite if any overflowed, and
    -inf if no token is allowed. So one number a row is looked at, not all of the vocabulary.

    Args:
        scores_RV: what tokens were chosen by.
        tokens: of every row, its best one or one that was sampled of finite scores.
    """
    index_R1 = torch.tensor(list(tokens), device=scores_RV.device)[:, None]
    chosen = scores_RV.gather(-1, index_R1)[:, 0].tolist()
    return [row for row, score in enumerate(chosen) if not math.isfinite(score)]


def _picked(
    scores_RV: Tensor, requests: Sequence[Request], ahead: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """The token of every row, and the rows that have none."""
    tokens_R = _best(scores_RV)
    best: list[int] = tokens_R.tolist()
    bad = unsound(scores_RV, best)
    rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if bad:
        rows = [row for row in rows if row not in bad]
    if rows:
        chosen = [requests[row] for row in rows]
        everything = len(rows) == len(requests)
        picked = sample_rows(
            scores_RV if everything else scores_RV[rows],
            [request.params for request in chosen],
            [_uniform(requests[row], ahead[row] if ahead else 0) for row in rows],
        )
        if everything:
            tokens_R = picked
        else:
            tokens_R[rows] = picked
        best = tokens_R.tolist()
    return best, bad


def _best(scores_RV: Tensor) -> Tensor:
    """The first of the best tokens of each row."""
    if scores_RV.device.type != "cpu":
        return scores_RV.argmax(-1)
    # A tenth of the time that PyTorch takes for rows of bf16.
    wide = scores_RV.to(torch.promote_types(scores_RV.dtype, torch.float32))
    return torch.from_numpy(wide.numpy().argmax(-1))


def _uniform(request: Request, ahead: int) -> float:
    step = request.n_generated + ahead
    source = generator(request.params.seed, purpose="generate", step=step)
    return float(source.random())


def sample_rows(
    logits_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Sample each row by its own parameters and its own number in [0, 1); temperatures > 0."""
    tokens_R, sure_R = _pick(logits_RV, params, uniforms)
    for row in (~sure_R).nonzero()[:, 0].tolist():
        one = params[row]
        tokens_R[row] = sample(
            logits_RV[row],
            temperature=one.temperature,
            top_k=one.top_k,
            top_p=one.top_p,
            min_p=one.min_p,
            uniform=uniforms[row],
        )
    return tokens_R


def _pick(
    logits_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Tokens by the best candidates of each row, and whether these were enough to decide."""
    vocab_size = logits_RV.shape[-1]
    width = min(_CANDIDATES, vocab_size)
    settings_5R = torch.tensor(
        [
            [one.temperature for one in params],
            [one.top_k or vocab_size for one in params],
            [one.top_p for one in params],
            [math.log(one.min_p) if one.min_p else -math.inf for one in params],
            list(uniforms),
        ],
        dtype=torch.float64,
        device=logits_RV.device,
    )
    temperature_R1, top_k_R1, top_p_R1, log_R1, uniform_R1 = settings_5R.unsqueeze(-1)
    floor_R1 = log_R1 if any(one.min_p for one in params) else None
    top = logits_RV.topk(width, dim=-1, sorted=False)
    scores_RV = _scaled(logits_RV, top.values.amax(-1, keepdim=True), temperature_R1)
    # By falling score, and by token where scores are equal, as a stable sort has it.
    token_RM = top.indices.sort(dim=-1).values
    scores_RM, order_RM = scores_RV.gather(-1, token_RM).sort(dim=-1, descending=True, stable=True)
    token_RM = token_RM.gather(-1, order_RM)
    weight_RM = _weights(scores_RM, floor_R1)
    all_R1 = top_k_R1 >= vocab_size
    inside_RM = (torch.arange(width, device=logits_RV.device) < top_k_R1) & (weight_RM > 0)
    total_R1 = torch.where(
        all_R1,
        _weights(scores_RV, floor_R1).sum(-1, keepdim=True),
        (weight_RM * inside_RM).sum(-1, keepdim=True),
    )
    p_RM = weight_RM / total_R1
    cumulative_RM = p_RM.cumsum(-1)
    before_RM = cumulative_RM - p_RM
    unlimited_R1 = top_p_R1 == 1
    kept_RM = inside_RM & (p_RM > 0) & ((before_RM < top_p_R1) | unlimited_R1)
    # The best one always: a tiny top_p is 0 where floats that are not normal are flushed.
    num_kept_R1 = kept_RM.sum(-1, keepdim=True).clamp(min=1)
    # Tokens beyond the candidates may take part; then the end is known only where nothing
    # limits it.
    cut_R1 = (num_kept_R1 == width) & (top_k_R1 > width)
    free_R1 = all_R1 & unlimited_R1
    end_R1 = torch.where(free_R1, 1.0, cumulative_RM.gather(-1, num_kept_R1 - 1))
    aim_R1 = uniform_R1 * end_R1
    place_R1 = (cumulative_RM <= aim_R1).sum(-1, keepdim=True)
    last_R1 = torch.minimum(place_R1, num_kept_R1 - 1)
    # A border so close that the order of a sum decides is left to the reference, and so is
    # a score equal to the last candidate's, of which others may be missing.
    close_R1 = ((cumulative_RM - aim_R1).abs() < _CLOSE).any(-1, keepdim=True) | (
        ((before_RM - top_p_R1).abs() < _CLOSE).any(-1, keepdim=True) & ~unlimited_R1
    )
    equal_R1 = (scores_RM.gather(-1, last_R1) == scores_RM[:, -1:]) & (width < vocab_size)
    whole_R1 = all_R1 | (top_k_R1 <= width)  # else the sum of what is kept is not known
    known_R1 = whole_R1 & (~cut_R1 | (free_R1 & (place_R1 < width)))
    sure_R1 = known_R1 & ~close_R1 & ~equal_R1
    return token_RM.gather(-1, last_R1)[:, 0], sure_R1[:, 0]


def _scaled(logits_RV: Tensor, best_R1: Tensor, temperature_R1: Tensor) -> Tensor:
    """How far each score is below the best, over the temperature, in fp64; nothing overflows.

    The best comes first: a score over a small temperature may be infinite, and two of these have
    no difference.
    """
    return logits_RV.to(torch.float64, copy=True).sub_(best_R1).div_(temperature_R1)


def _weights(below: Tensor, floor_R1: Tensor | None) -> Tensor:
    """Probabilities over that of the best token; none for those under the floor."""
    return below.exp() if floor_R1 is None else below.exp() * (below >= floor_R1)


def probabilities(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What :func:`~shoal.model.generate.sample` draws from, in fp64 [R, V]; temperatures > 0."""
    settings = [(one.temperature, one.top_k or logits_RV.shape[-1], one.top_p) for one in params]
    temperature_R1, top_k_R1, top_p_R1 = torch.tensor(
        settings, dtype=torch.float64, device=logits_RV.device
    ).T.unsqueeze(-1)
    scores_RV = _scaled(logits_RV, logits_RV.amax(-1, keepdim=True), temperature_R1)
    if all(not one.top_k and not one.min_p and one.top_p == 1 for one in params):
        every_RV: Tensor = scores_RV.softmax(-1)
        return every_RV
    scores_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    floor_R1 = torch.tensor(
        [[math.log(one.min_p) if one.min_p else -math.inf] for one in params],
        dtype=torch.float64,
        device=logits_RV.device,
    )
    place_V = torch.arange(scores_RV.shape[-1], device=logits_RV.device)
    kept_RV = (place_V < top_k_R1) & (scores_RV >= floor_R1)
    p_RV = scores_RV.masked_fill(~kept_RV, -math.inf).softmax(-1)
    inside_RV = (p_RV.cumsum(-1) - p_RV < top_p_R1) | (top_p_R1 == 1) | (place_V == 0)
    p_RV = p_RV * inside_RV
    return torch.zeros_like(p_RV).scatter_(-1, order_RV, p_RV / p_RV.sum(-1, keepdim=True))


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
