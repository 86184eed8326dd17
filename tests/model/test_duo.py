"""Duo-LLM: routes of tokens, what the oracle asks, training, the directory, and refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ModelError  # noqa: E402
from shoal.cost.arithmetic import parameters  # noqa: E402
from shoal.ir import Architecture  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.architecture import rebuilt  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.duo import (  # noqa: E402
    BIG,
    SKIP,
    SMALL,
    committed,
    drawn,
    ffn_flops,
    pattern_losses,
    routed,
    router_loss,
)
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.parallel.tensor.slices import whole_shapes  # noqa: E402
from shoal.train.zoo import random  # noqa: E402

LAYERS = 3


def model(ffn: Any = "duo", **changes: Any) -> Transformer:
    config = {
        "vocab_size": 53,
        "hidden": 24,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden": 64,
        "max_position": 64,
        "initializer_range": 0.3,
        "architecture": {"ffn": ffn},
    }
    return random(ModelConfig(**{**config, **changes})).double().eval()


def ids(length: int = 7) -> torch.Tensor:
    return torch.randint(0, 53, (2, length), generator=torch.Generator().manual_seed(0))


def every() -> torch.Tensor:
    return torch.tensor(list(itertools.product((BIG, SMALL, SKIP), repeat=LAYERS)))


def test_all_big_is_the_plain_model() -> None:
    duo, plain = model(), model("plain")
    plain.load_state_dict({n: p for n, p in duo.state_dict().items() if n in plain.state_dict()})
    want = plain(ids())
    assert torch.equal(duo(ids()), want)
    with routed(duo, torch.full((LAYERS, 2, 7), BIG)):
        assert torch.equal(duo(ids()), want)
    with routed(duo, torch.full((LAYERS, 2, 7), SMALL)):
        assert not torch.allclose(duo(ids()), want)


def test_each_token_takes_its_own_route() -> None:
    duo = model()
    block: Any = duo.blocks[1].mlp
    x = torch.randn(1, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block.routes = torch.tensor([[BIG, SKIP, SMALL]])
    out = block(x)
    gates, values = block.gate_up_proj(x).split(64, -1)
    big = block.down_proj(torch.nn.functional.silu(gates) * values)
    assert torch.allclose(out[0, 0], big[0, 0]) and torch.allclose(out[0, 2], block.small(x)[0, 2])
    assert not out[0, 1].any()


def test_patterns_in_a_batch_are_those_one_by_one() -> None:
    duo, tokens, targets = model(), ids(), ids().roll(-1, 1)
    reference = torch.randint(0, 3, (LAYERS, 2, 7), generator=torch.Generator().manual_seed(2))
    patterns = every()[[0, 5, 13, 26]]
    result = pattern_losses(duo, tokens, targets, patterns, reference)
    for number, pattern in enumerate(patterns):
        for place in range(7):
            routes = reference.clone()
            routes[:, :, place] = pattern.unsqueeze(1)
            with routed(duo, routes), torch.no_grad():
                logits = duo(tokens)[:, place].float()
            want = torch.nn.functional.cross_entropy(logits, targets[:, place], reduction="none")
            assert torch.allclose(result[number, :, place], want, atol=1e-5)


def test_what_is_committed_left_to_right_is_what_a_replay_gives() -> None:
    duo, tokens, targets = model(), ids(), ids().roll(-1, 1)
    losses, routes = committed(duo, tokens, targets, every())
    with routed(duo, routes), torch.no_grad():
        logits = duo(tokens).float()
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    assert torch.allclose(losses.flatten(), want, atol=1e-5)
    assert len(set(map(tuple, routes.flatten(1).T.tolist()))) > 1


def test_the_meter_counts_what_hand_counts() -> None:
    result = ffn_flops(model().config, torch.tensor([[BIG, BIG, SMALL], [SKIP, SMALL, SKIP]]))
    small = 2 * 3 * 24 * 8
    assert result.tolist() == [2 * (2 * 3 * 24 * 64) + small, small]


def test_routes_in_training_are_mixed_and_some_sequences_are_whole() -> None:
    tokens = torch.randint(0, 53, (64, 32), generator=torch.Generator().manual_seed(3))
    routes = drawn(tokens, torch.arange(32), LAYERS, training=True)
    whole = (routes == BIG).all(0).all(-1)
    assert 4 < int(whole.sum()) < 32
    shares = torch.bincount(routes[:, ~whole].flatten(), minlength=3) / routes[:, ~whole].numel()
    assert (shares - 1 / 3).abs().max() < 0.03
    assert torch.equal(routes, drawn(tokens, torch.arange(32), LAYERS, training=True))
    # Rows have routes of their own, whoever computes them.
    assert torch.equal(routes[:, 5:9], drawn(tokens[5:9], torch.arange(32), LAYERS, training=True))


def test_training_takes_random_routes_and_can_compute_again() -> None:
    results = []
    for recompute in (False, True):
        duo = model().train()
        duo.loss_sum(ids(), ids(), recompute=recompute).backward()
        results.append({n: p.grad for n, p in duo.named_parameters()})
        assert results[-1]["blocks.0.mlp.small.down_proj.weight"].any()
    assert all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip(results[0].values(), results[1].values(), strict=True)
    )


def test_routers_learn_their_budget() -> None:
    duo = model({"name": "duo", "router": "linear"})
    routers = [p for n, p in duo.named_parameters() if ".router." in n]
    optimizer = torch.optim.Adam(routers, lr=0.1)
    source = torch.Generator().manual_seed(0)
    for _ in range(40):
        optimizer.zero_grad()
        router_loss(duo, ids(), ids(), budget=0.1, weight=50.0, source=source).backward()
        optimizer.step()
    tokens = torch.randint(0, 53, (4, 32), generator=torch.Generator().manual_seed(3))
    duo(tokens)
    spent = []
    for block in duo.blocks:
        mlp: Any = block.mlp
        mlp.register_forward_hook(lambda m, i, _o: spent.append(m.router(i[0]).argmax(-1)))
    duo(tokens)
    flops = ffn_flops(duo.config, torch.stack([one.flatten() for one in spent], -1)).double()
    whole = ffn_flops(duo.config, torch.zeros(LAYERS, dtype=torch.int64))
    assert float(flops.mean() / whole) < 0.25


def test_a_trained_model_becomes_one_and_its_directory_says_so(tmp_path: Path) -> None:
    plain = model("plain")
    made = rebuilt(plain, Architecture(ffn="duo"))
    assert torch.equal(made(ids()), plain(ids()))  # fixed: always big
    huggingface.write(tmp_path / "duo", made.float())
    again = huggingface.read(tmp_path / "duo").eval()
    assert again.config.architecture.ffn.name == "duo"
    assert torch.equal(again(ids()), made(ids()))
    assert '"shoal_duo"' in (tmp_path / "duo" / "config.json").read_text()
    shapes = {name: tuple(p.shape) for name, p in made.named_parameters()}
    assert whole_shapes(made.config) == shapes
    assert parameters(made.config.shape()) == sum(p.numel() for p in made.parameters())


def test_bad_input() -> None:
    four_routes = routed(model(), torch.zeros(4, 1))
    with pytest.raises(ModelError, match="one for each of 3 layers"), four_routes:
        pass
    with pytest.raises(ModelError, match="one feed-forward layer"), routed(model("plain"), None):
        pass
    with pytest.raises(ModelError, match="experts"):
        model(family="mixtral", num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="small_ratio"):
        Architecture(ffn={"name": "duo", "small_ratio": 1.0})
    four = {**dict(model().config), "num_layers": 4}
    with pytest.raises(RuntimeError, match=r"blocks\.3"):
        model().load_state_dict(random(ModelConfig(**four)).state_dict())
