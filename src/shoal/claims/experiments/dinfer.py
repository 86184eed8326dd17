"""[107] dInfer: many tokens a forward pass of a diffusion model, and as many right answers?

Source: Ma et al., dInfer: An Efficient Inference Framework for Diffusion Language Models, 2025.

Problems with one right answer each, of seeds that the model was not trained on; the arms take turns
problem by problem: one token an iteration without a cache; Fast-dLLM's threshold of 0.9 with a dual
cache; and the whole recipe, with a lighter smoothing chosen on problems of another seed. Also
reported: the paper's smoothing, none, the other policy, and an autoregressive model of the same
shape. The A/A run puts one token an iteration in the place of the recipe; the quick run counts with
a fresh model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge

from shoal.claims.bench.decode import distinct_runs
from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import requests, serve_job, served
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.corpora.tasks import NAMES, QuestionAnswer, is_right, problem
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.kernel.threads import torch_threads
from shoal.train import zoo

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.serve.engine.loop import Engine

_ONE = "one token an iteration, no cache"
_FAST = "threshold 0.9, dual cache"
_FULL = "hierarchical, smoothing, vicinity"
_AR = "autoregressive"
_NEAR = {"name": "vicinity", "a": 16, "b": 16}
_ARMS: dict[str, dict[str, Any]] = {
    _ONE: {"unmask": "fixed", "refresh": "none"},
    _FAST: {"unmask": {"name": "threshold", "tau": 0.9}, "refresh": "dual"},
    _FULL: {
        "unmask": "hierarchical",
        "refresh": _NEAR,
        "iteration": {"name": "smooth", "weight": 0.05, "most": 0.15},
    },
}
# Reported, not judged.
_BESIDE: dict[str, dict[str, Any]] = {
    "hierarchical, smoothing of the paper, vicinity": {
        "unmask": "hierarchical",
        "refresh": _NEAR,
        "iteration": "smooth",
    },
    "hierarchical, vicinity": {"unmask": "hierarchical", "refresh": _NEAR},
    "credit, vicinity": {"unmask": "credit", "refresh": _NEAR},
}
_EVERY = _ARMS | _BESIDE
_MODEL, _OTHER = "shoal-mdlm-3m", "shoal-ar-3m"
# A request is as long as what the models were trained on; its answer ends in the first block.
_BLOCK, _LENGTH = 32, 64
# Of the quick run: blocks, masks, and prompts long enough for windows to leave some of them out.
_SMALL, _FEW, _PROMPTS = 8, 12, (61, 70)
# Below, an answer repeats itself; it says nothing about decoding.
_DISTINCT = 0.5


class _Answer(NamedTuple):
    """What decoding one problem gave."""

    right: bool
    tokens: int
    forwards: int
    seconds: float
    distinct: float


@part
class DInfer(BaseClaim, row=107):
    """Answers and their price, by arm.

    Args:
        problems: problems that are answered, a third of each task.
        rounds: groups of problems; each is a sample of every timing.
    """

    problems: int = 900
    rounds: Annotated[int, Ge(1)] = 10

    def __post_init__(self) -> None:
        require(
            self.problems >= self.rounds * len(NAMES),
            "claim.dinfer.problems",
            self.problems,
            expected=f"at least {len(NAMES)} in each of {self.rounds} rounds",
        )

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        with torch_threads(1):
            self._count(run)
            if run.quick:
                return
            answers = run.remember("answers", lambda: self._answers(run.context))
        full, one, fast = (answers[arm] for arm in (run.pick(_FULL, _ONE), _ONE, _FAST))
        run.put("tokens_a_pass", map(_tokens_a_pass, full), map(_tokens_a_pass, one))
        run.put("over_one", map(_seconds, full), map(_seconds, one))
        run.put("accuracy_beside_one", _right(full), _right(one))
        run.put("tokens_a_pass_over_fast", map(_tokens_a_pass, full), map(_tokens_a_pass, fast))
        run.put("accuracy_beside_fast", _right(full), _right(fast))
        run.profile = "; ".join(_said(arm, rounds) for arm, rounds in answers.items())

    # ------------------------------------------------------------------ a trained model

    def _answers(self, context: ExperimentContext) -> dict[str, list[list[_Answer]]]:
        """Answers of every arm by rounds; those that loop in any arm are left out of all."""
        context.progress("training the models, minutes the first time", 0.0)
        places = {arm: zoo.trained(_MODEL) for arm in _EVERY} | {_AR: zoo.trained(_OTHER)}
        engines = {arm: _Asked(place, _EVERY.get(arm)) for arm, place in places.items()}
        warm = problem("train", 0)
        for request in engines.values():
            request(warm)
        answers: dict[str, list[list[_Answer]]] = {arm: [] for arm in engines}
        size = self.problems // self.rounds
        for turn in range(self.rounds):
            context.progress("answers", 0.1 + 0.9 * turn / self.rounds)
            kept: dict[str, list[_Answer]] = {arm: [] for arm in engines}
            for number in range(turn * size, (turn + 1) * size):
                asked_for = problem("heldout", number, context.seed)
                one = {arm: asked(asked_for) for arm, asked in engines.items()}
                if min(answer.distinct for answer in one.values()) >= _DISTINCT:
                    for arm, answer in one.items():
                        kept[arm].append(answer)
            for arm, some in kept.items():
                answers[arm].append(some)
        return answers

    # ------------------------------------------------------------------ a fresh model

    def _count(self, run: ClaimRun) -> None:
        """What a model with random weights is enough for."""
        import torch

        model = zoo.random(_MODEL, run.seed).double().requires_grad_(False).eval()
        model.embed.weight.mul_(8.0)  # so that guesses differ
        random = generator(run.seed, purpose="dinfer prompts")
        prompts = [random.integers(1, 250, size).tolist() for size in _PROMPTS]
        computed = {}
        for arm in (_ONE, _FULL):
            engine = _engine(model, _ARMS[run.pick(arm, _ONE)], _SMALL)
            _decode(engine, prompts)
            stats = engine.stats()
            computed[arm] = (
                stats["diffusion_computed_tokens_total"] / stats["diffusion_request_forwards_total"]
            )
        differing = 0
        for arm, options in _EVERY.items():
            together = _decode(_engine(model, options, _SMALL), prompts)
            for prompt, result in zip(prompts, together, strict=True):
                alone = _decode(_engine(model, options, _SMALL), [prompt])[0]
                differing += sum(a != b for a, b in zip(alone, result, strict=True))
                if arm == _ONE:
                    wanted = _published(model, prompt, torch)
                    differing += sum(a != b for a, b in zip(wanted, result, strict=True))
        run.put("computed_tokens", computed[_FULL], computed[_ONE])
        run.put("differing_tokens", differing)


def _published(model: Transformer, prompt: Sequence[int], torch: Any) -> list[int]:
    """Low-confidence decoding of whole sequences, one token a forward pass."""
    mask = model.config.mask_token_id
    ids = torch.tensor([[*prompt, *[mask] * _FEW]])
    for start in range(len(prompt), ids.shape[1], _SMALL):
        block = slice(start, min(start + _SMALL, ids.shape[1]))
        while bool((ids[0, block] == mask).any()):
            logits = model(ids)[0, block]
            logits[:, mask] = -torch.inf
            sure, token = logits.softmax(-1).max(-1)
            place = int(torch.where(ids[0, block] == mask, sure, -1.0).argmax())
            ids[0, start + place] = token[place]
    numbers: list[int] = ids[0, len(prompt) :].tolist()
    return numbers


def _job(model: str, decode: dict[str, Any] | None, block: int = _BLOCK) -> ServeJob:
    diffusion = None if decode is None else {"name": "diffusion", "block": block, **decode}
    how = diffusion or "autoregressive"
    return serve_job(model, max_running=4, kv_tokens=1024, max_position=96, decode=how)


def _engine(model: Transformer, decode: dict[str, Any], block: int = _BLOCK) -> Engine:
    from shoal.serve.decode.diffusion.build import diffusion_engine

    return diffusion_engine(_job("fresh", decode, block), model)[0]


def _decode(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """New tokens of prompts that are decoded together."""
    return served(engine, requests(prompts, _FEW))


class _Asked:
    """A trained model that answers problems, one at a time."""

    def __init__(self, place: Path, decode: dict[str, Any] | None) -> None:
        from shoal.corpora import tokenizer
        from shoal.serve.engine.build import engine_of, load_model

        job = _job(str(place), decode)
        model = load_model(job)
        self._diffuses = decode is not None
        self._engine = _engine(model, decode) if decode else engine_of(job, model)[0]
        self._tokenizer = tokenizer.load(place)
        self._end = tokenizer.end_of_text(self._tokenizer, place)

    def __call__(self, asked: QuestionAnswer) -> _Answer:
        """Decode one problem and check what came."""
        ids = self._tokenizer.encode(asked.prompt, add_special_tokens=False).ids
        params = SamplingParams(max_tokens=_LENGTH - len(ids), stop_ids=frozenset({self._end}))
        request = Request(asked.prompt, list(ids), len(ids), params)
        before = self._forwards()
        began = time.perf_counter()
        (new,) = served(self._engine, [request])
        seconds = time.perf_counter() - began
        text = self._tokenizer.decode(new[:-1] if new[-1] == self._end else new)
        forwards, right = round(self._forwards() - before), is_right(asked.prompt, text)
        return _Answer(right, len(new), forwards, seconds, distinct_runs(new))

    def _forwards(self) -> float:
        return self._engine.stats()["diffusion_forwards_total" if self._diffuses else "steps_total"]


def _tokens_a_pass(some: Sequence[_Answer]) -> float:
    return sum(one.tokens for one in some) / sum(one.forwards for one in some)


def _seconds(some: Sequence[_Answer]) -> float:
    return sum(one.seconds for one in some) / sum(one.tokens for one in some)


def _right(rounds: Sequence[Sequence[_Answer]]) -> float:
    return float(np.mean([one.right for some in rounds for one in some]))


def _said(arm: str, rounds: Sequence[Sequence[_Answer]]) -> str:
    """What an arm did, in numbers."""
    every = [one for some in rounds for one in some]
    seconds = sum(one.seconds for one in every) / sum(one.forwards for one in every)
    return (
        f"{arm}: {1e3 * seconds:.2f} ms a pass, {_tokens_a_pass(every):.2f} tokens, "
        f"{_right(rounds):.3f} right"
    )
