"""Greedy decoding against full passes, and sampling against its definition."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ModelError  # noqa: E402
from shoal.model.generate import generate, sample  # noqa: E402


def test_greedy_equals_full_passes(config, make):
    model, ids = make(config), [3, 1, 4]
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert generate(model, [3, 1, 4], 20) == ids[3:]
    stop = ids[8]
    first = ids.index(stop, 3)
    assert generate(model, [3, 1, 4], 20, eos=[stop]) == ids[3 : first + 1]


def test_greedy_under_autocast(config, make):
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(make(config), [1], 5)) == 5


def test_sampling_follows_its_seed(config, make):
    model = make(config)
    options = {"temperature": 5.0, "seed": 1}
    first = generate(model, [1, 2], 12, **options)
    assert generate(model, [1, 2], 12, **options) == first
    assert generate(model, [1, 2], 12, temperature=5.0, seed=2) != first
    assert generate(model, [1, 2], 12, top_k=1, **options) == generate(model, [1, 2], 12)


def test_sample_inverts_the_distribution():
    p = torch.tensor([0.1, 0.5, 0.0625, 0.3375])
    logits = p.log()
    grid = [(i + 0.5) / 1000 for i in range(1000)]

    def shares(**options):
        drawn = [sample(logits, temperature=1.0, uniform=u, **options) for u in grid]
        return [drawn.count(token) / 1000 for token in range(4)]

    assert shares() == pytest.approx(p.tolist(), abs=2e-3)
    assert shares(top_k=2) == pytest.approx([0, 0.5 / 0.8375, 0, 0.3375 / 0.8375], abs=2e-3)
    assert shares(top_p=0.6) == pytest.approx([0, 0.5 / 0.8375, 0, 0.3375 / 0.8375], abs=2e-3)
    assert shares(top_p=0.4) == [0, 1, 0, 0]
    assert sample(logits, temperature=0.0) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "at least one token"),
        ({"prompt_ids": [128]}, "token ids below vocab_size = 128"),
        ({"max_new_tokens": 200}, "at most 127 after a prompt of 1 tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_bad_requests(changes, message, make):
    from shoal.model.config import ModelConfig

    config = ModelConfig(
        vocab_size=128,
        hidden=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        ffn_hidden=16,
        max_position=128,
    )
    arguments = {"prompt_ids": [1], "max_new_tokens": 2, **changes}
    with pytest.raises(ModelError, match=message):
        generate(make(config), **arguments)
