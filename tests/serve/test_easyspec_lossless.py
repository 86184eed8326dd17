"""Guesses drawn from stale layers: with their own probabilities the target's law is kept."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from test_accept import fits  # noqa: E402
from test_draft_model import engine_with, known_costs  # noqa: E402, F401

from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402

V, TOKENS, PROMPT = 12, 3, [0, 1]
SMALL = {
    "vocab_size": V, "hidden": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "ffn_hidden": 24, "max_position": 64, "initializer_range": 0.45,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(random_model, tmp_path_factory):
    """A target of two layers, and a draft of six that agrees with it by chance."""
    home = tmp_path_factory.mktemp("small")
    models = []
    for name, layers in (("target", 2), ("draft", 6)):
        config = ModelConfig(**SMALL, num_layers=layers, family="llama", tied=True)
        models.append(random_model(config, seed=layers))
        huggingface.write(home / name, models[-1])
    target, draft = (model.to(torch.float64) for model in models)
    return (target, home / "target", home / "draft"), draft


def chances(model):
    """Probabilities of the next token behind the prompt and every text of up to two tokens."""
    chances = {}
    for length in range(TOKENS):
        texts = list(itertools.product(range(V), repeat=length))
        p = model(torch.tensor([[*PROMPT, *text] for text in texts]))[:, -1].softmax(-1)
        chances |= dict(zip(texts, p, strict=True))
    return chances


def counted(pair, draws, *, q=None, **options):
    """How often each text of three tokens came; with the q of others, if given."""
    engine = engine_with(
        pair,
        {"max_running": 250, "kv_tokens": 16 * 1024, "max_step_tokens": 2048},
        name="easyspec",
        accept="rejection",
        depth=3,
        group=4,
        **options,
    )
    engine.scheduler.drafting = FixedDrafting(3)
    drafter = engine.runner.drafter
    propose = drafter.propose

    def spoilt(guesses):
        trees = propose(guesses)
        for guess, tree in zip(guesses, trees, strict=True):
            for row in () if tree is None or q is None else tree.q:
                before = [*guess.request.tokens[len(PROMPT) : -1], *tree.tokens[: row + 1].tolist()]
                tree.q[row] = q.get(tuple(before), tree.q[row])
        return trees

    drafter.propose = spoilt
    requests = [
        Request(
            str(seed),
            list(PROMPT),
            2,
            SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=seed),
        )
        for seed in range(draws)
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    assert engine.stats()["draft_tokens_accepted_total"] > draws / 10
    texts = np.array([request.tokens[2:] for request in requests])
    return np.bincount(texts @ [V * V, V, 1], minlength=V**TOKENS)


def joint(p):
    first = p[()].numpy()
    second = np.stack([p[a,].numpy() for a in range(V)])
    third = np.stack([[p[a, b].numpy() for b in range(V)] for a in range(V)])
    return (first[:, None, None] * second[:, :, None] * third).ravel()


@pytest.mark.slow
def test_the_law_is_the_targets_whatever_stale_layers_guess(small):
    pair, draft = small
    law = joint(chances(pair[0]))
    assert fits(counted(pair, 8000), law) > 1e-3
    # The probabilities of the exact draft are not those that guesses were drawn from.
    assert fits(counted(pair, 2500, q=chances(draft)), law) < 1e-3
