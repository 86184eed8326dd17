"""Keyed dropout: its statistics, and that it does not depend on who asks."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError  # noqa: E402
from shoal.core.random import seed64  # noqa: E402
from shoal.model.dropout import ATTENTION, FEED_FORWARD, Dropout  # noqa: E402


def over(p=0.25, seed=1, step=2, row=3, batch=4, length=256, positions=None):
    positions = torch.arange(length) if positions is None else positions
    return Dropout(p, seed).at(step, row).over(positions, length, batch)


def kept(drop, layer=0, site=ATTENTION, width=256):
    return drop.scale(layer, site, width, torch.float64) > 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    mask = kept(over(p)).double()
    count = mask.numel()
    sigma = math.sqrt(p * (1 - p) / count)
    assert abs(1 - mask.mean().item() - p) < 4 * sigma + 2**-16
    # By channel and by token too: nobody is dropped more often.
    for dim in (0, 1):
        means = mask.mean(dim)
        spread = math.sqrt(p * (1 - p) / mask.shape[dim])
        assert (means - (1 - p)).abs().max().item() < 6 * spread
        assert means.std().item() == pytest.approx(spread, rel=0.25)


def test_neighbours_are_independent():
    mask = kept(over(0.5)).double() - 0.5
    count = mask.numel()
    pairs = {
        "channel": (mask[:, 1:], mask[:, :-1]),
        "next hash": (mask[:, 4:], mask[:, :-4]),
        "token": (mask[1:], mask[:-1]),
        "row": (mask[256:], mask[:-256]),
        "layer": (mask, kept(over(0.5), layer=1).double() - 0.5),
        "site": (mask, kept(over(0.5), site=FEED_FORWARD).double() - 0.5),
        "step": (mask, kept(over(0.5, step=3)).double() - 0.5),
        "seed": (mask, kept(over(0.5, seed=2)).double() - 0.5),
    }
    for name, (a, b) in pairs.items():
        assert abs(4 * (a * b).mean().item()) < 4.5 / math.sqrt(count), name


def test_kept_values_are_scaled_by_what_is_kept():
    drop = over(0.1)
    scale = drop.scale(0, ATTENTION, 8, torch.float64)
    threshold = round(0.1 * 2**16)
    assert set(scale.unique().tolist()) == {0.0, 2**16 / (2**16 - threshold)}


def test_the_hash_is_splitmix64():
    drop = over(0.5, seed=9, step=1, row=0, batch=1, length=3)
    golden, whole = 0x9E3779B97F4A7C15, 2**64

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % whole
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % whole
        return z ^ (z >> 31)

    key = seed64(9, purpose="dropout attention", step=1, layer=5)
    expected = np.empty((3, 8), dtype=bool)
    for token in range(3):
        own = mix((token * golden + key) % whole)
        for group in range(2):
            bits = mix((own + (group + 1) * golden) % whole)
            for lane in range(4):
                word = (bits >> (16 * lane)) & 0xFFFF
                expected[token, 4 * group + lane] = (word ^ 0x8000) >= 2**15
    assert np.array_equal(kept(drop, layer=5, width=8).numpy(), expected)


def test_it_is_the_same_for_any_part_of_the_batch():
    whole = kept(over(batch=4, length=8), width=6).view(4, 8, 6)
    assert torch.equal(kept(over(row=5, batch=2, length=8), width=6).view(2, 8, 6), whole[2:])
    positions = torch.tensor([0, 1, 6, 7])  # a context-parallel rank's
    result = kept(over(batch=4, length=8, positions=positions), width=6)
    assert torch.equal(result.view(4, 4, 6), whole[:, positions])
    drop = over(batch=4, length=8)
    assert torch.equal(kept(drop.of(drop.tokens[5:9]), width=6), whole.view(32, 6)[5:9])


def test_no_dropout_costs_nothing():
    assert over(0.0) is None


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_wrong_shares_are_refused(p):
    with pytest.raises(ConfigError, match=r"dropout = .*a fraction in \[0, 1\)"):
        Dropout(p)


def test_the_model_drops_while_it_trains_and_recomputes_the_same(config, make):
    model = make(config, dtype=torch.float64)
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 9), generator=source)
    dropout = Dropout(0.3, 5)

    def gradients(recompute, step=1):
        model.zero_grad()
        loss = model.loss_sum(tokens, tokens, recompute=recompute, dropout=dropout.at(step, 0))
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters()]

    loss, grads = gradients(False)
    again, others = gradients(True)
    assert loss == again and all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert gradients(False, step=2)[0] != loss
    plain = model.loss_sum(tokens, tokens).item()
    assert plain != loss
    model.eval()
    assert model.loss_sum(tokens, tokens, dropout=dropout.at(1, 0)).item() == plain
