"""Gates against their formulas, capacity against a loop, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError  # noqa: E402
from shoal.ir import Architecture  # noqa: E402
from shoal.ir.routing import Routing  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.architecture import rebuilt  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.feedforward import Experts, gate  # noqa: E402
from shoal.model.generate import generate  # noqa: E402
from shoal.model.initialise import init_weights  # noqa: E402
from shoal.model.routing import StepRouting, best  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402

E, D, T, B = 6, 16, 10, 2


def config(moe: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "family": "mixtral",
            "vocab_size": 29,
            "hidden": D,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 4,
            "ffn_hidden": 8,
            "max_position": 64,
            "num_experts": E,
            "top_k": 2,
            "architecture": {"moe": moe},
            **changes,
        }
    )


def layer(moe: dict[str, Any], **changes: Any) -> Experts:
    made = Experts(config(moe, **changes), 3).double()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source).abs() - 0.4)
    return made


def states() -> torch.Tensor:
    return torch.randn(B * T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens(*, training: bool = True, step: int = 5) -> Any:
    of = StepRouting(7, step, 4, 8)
    return of.over(torch.arange(T), T, B, training=training)


def outputs(made: Experts, x_ND: torch.Tensor) -> torch.Tensor:
    """What every expert makes of every token [E, N, D]."""
    up = [gate(x_ND @ one.T) for one in made.gate_up_proj]
    return torch.stack([y @ down.T for y, down in zip(up, made.down_proj, strict=True)])


def dense(made: Experts, x_ND: torch.Tensor, weight_NE: torch.Tensor) -> torch.Tensor:
    """The mixture by its formula: every expert, weighed, most of them by 0."""
    return torch.einsum("ne,end->nd", weight_NE, outputs(made, x_ND))


def only(weight_NE: torch.Tensor, keep: list[list[int]]) -> torch.Tensor:
    result = torch.zeros_like(weight_NE)
    for token, experts in enumerate(keep):
        for expert in experts:
            result[token, expert] = weight_NE[token, expert]
    return result


def by_formula(made: Experts, name: str, x_ND: torch.Tensor) -> torch.Tensor:
    """Weights [N, E] of a gate in inference, token by token."""
    rows = []
    for x in x_ND:
        logits = made.router.weight.detach() @ x
        if name == "xmoe":
            cosines = [
                torch.dot(logits, e) / (logits.norm() * e.norm())
                for e in made.router_experts.detach()
            ]
            logits = torch.stack(cosines) / made.router_temperature.detach()
        scores = logits.sigmoid() if name == "sigmoid" else logits.exp() / logits.exp().sum()
        ranked = scores + made.router_bias if name == "sigmoid" else scores
        chosen = sorted(range(E), key=lambda e: -float(ranked[e]))[: made.top_k]
        total = 1.0 if name == "switch" else sum(float(scores[e]) for e in chosen)
        rows.append(torch.stack([scores[e] / total * (e in chosen) for e in range(E)]))
    return torch.stack(rows).double()


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "switch", "gshard", "xmoe"])
def test_a_gate_is_its_formula(name):
    made = layer({"gate": name}, top_k=1 if name == "switch" else 2)
    if name == "xmoe":
        with torch.no_grad():
            made.router_temperature.fill_(0.3)
    x_ND = states()
    torch.testing.assert_close(made(x_ND), dense(made, x_ND, by_formula(made, name, x_ND)))


def test_experts_choose_as_many_tokens_of_every_sequence():
    made = layer({"gate": "expert_choice"})
    x_ND = states()
    share_NE = (x_ND @ made.router.weight.detach().T).softmax(-1)
    room = math.ceil(2 * T / E)
    weight_NE = torch.zeros_like(share_NE)
    for start in range(0, B * T, T):
        for expert in range(E):
            scores = share_NE[start : start + T, expert]
            for place in sorted(range(T), key=lambda t: -float(scores[t]))[:room]:
                weight_NE[start + place, expert] = scores[place]
    for training in (True, False):
        result = made(x_ND, tokens=tokens(training=training))
        torch.testing.assert_close(result, dense(made, x_ND, weight_NE))
    assert int((weight_NE > 0).sum(1).max()) > int((weight_NE > 0).sum(1).min())


def test_the_second_expert_comes_as_often_as_it_weighs():
    made = layer({"gate": "gshard"})
    x_ND = states()
    weight_NE = by_formula(made, "gshard", x_ND)
    second_N = weight_NE.topk(2, -1).values[:, 1]
    came = torch.zeros(B * T)
    steps = 400
    for step in range(steps):
        routed, _ = made.routed(x_ND, tokens(step=step))
        assert bool(routed.keep[:, 0].all())
        came += routed.keep[:, 1]
    wanted = (2 * second_N).clamp(max=1)
    assert float((came / steps - wanted).abs().max()) < 5 * 0.5 / steps**0.5
    again, _ = made.routed(x_ND, tokens(step=0))
    assert torch.equal(again.keep, made.routed(x_ND, tokens(step=0))[0].keep)


@pytest.mark.parametrize("scope", ["full-sequence", "sub-sequence"])
@pytest.mark.parametrize("factor", [0.3, 1.0])
def test_the_lowest_scores_are_dropped_beyond_capacity(scope, factor):
    made = layer({"capacity_factor": factor, "scope": scope})
    x_ND = states()
    share_NE = (x_ND @ made.router.weight.detach().T).softmax(-1)
    weight_NE = by_formula(made, "softmax", x_ND)
    size = T if scope == "full-sequence" else B * T
    room = math.ceil(factor * 2 * size / E)
    keep: list[list[int]] = [[] for _ in range(B * T)]
    dropped = 0
    for start in range(0, B * T, size):
        for expert in range(E):
            here = [t for t in range(start, start + size) if weight_NE[t, expert] > 0]
            here.sort(key=lambda t: -float(share_NE[t, expert]))
            dropped += len(here[room:])
            for token in here[:room]:
                keep[token].append(expert)
    assert dropped > 0
    result = made(x_ND, tokens=tokens())
    torch.testing.assert_close(result, dense(made, x_ND, only(weight_NE, keep)))
    assert float(made.tallies[4][E]) == dropped
    # Inference drops nobody, nor does scoring.
    torch.testing.assert_close(made(x_ND), dense(made, x_ND, weight_NE))
    whole = made(x_ND, tokens=tokens(training=False))
    torch.testing.assert_close(whole, dense(made, x_ND, weight_NE))


def test_of_equal_scores_the_first_token_stays():
    moe = Routing(capacity_factor=1.0)
    score = torch.full((2 * T, 1), 0.25, dtype=torch.float64)
    score += torch.randn(score.shape, generator=torch.Generator().manual_seed(0)) * 1e-16
    result = best(score, torch.zeros(2 * T, 1, dtype=torch.int64), tokens(), moe, 2, 1, ())
    assert result.view(2, T).tolist() == [[True] * 5 + [False] * 5] * 2


def test_the_balance_loss_is_that_of_switch_and_reaches_the_router():
    made = layer({"aux_loss": 0.5, "z_loss": 0.25})
    x_ND = states()
    logits_NE = x_ND @ made.router.weight.T
    share_NE = logits_NE.softmax(-1)
    chosen = share_NE.topk(2, -1).indices
    loss = torch.zeros((), dtype=torch.float64)
    for start in range(0, B * T, T):
        part = slice(start, start + T)
        for expert in range(E):
            fraction = float((chosen[part] == expert).sum()) / (2 * T)
            loss = loss + 0.5 * E * fraction * share_NE[part, expert].mean()
        loss = loss + 0.25 * (logits_NE[part].exp().sum(-1).log() ** 2).mean()
    (loss / 8).backward()  # of a step of eight sequences
    wanted = made.router.weight.grad.clone()
    made.zero_grad()
    (made(x_ND, tokens=tokens()) * 0.0).sum().backward()
    torch.testing.assert_close(made.router.weight.grad, wanted)


def test_the_bias_follows_the_sign_of_the_error_and_weighs_nothing():
    made = layer({"gate": {"name": "sigmoid", "bias_rate": 0.1}})
    assert not made.router_bias.requires_grad
    with torch.no_grad():
        made.router_bias.zero_()
        made.gate.settle(made.own, torch.tensor([4.0, 0.0, 2.0, 2.0, 2.0, 2.0]))
    assert made.router_bias.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0, 0.0, 0.0])
    with torch.no_grad():
        made.router_bias.copy_(torch.tensor([100.0, 100.0, 0, 0, 0, 0]))
    routed, _ = made.routed(states(), None)
    assert routed.experts.sort(-1).values.tolist() == [[0, 1]] * (B * T)
    torch.testing.assert_close(routed.weights.sum(-1), torch.ones(B * T, dtype=torch.float64))


@pytest.mark.parametrize(
    "moe",
    [
        {"gate": "sigmoid", "aux_loss": 0.01},
        {"gate": {"name": "xmoe", "dim": 4}},
        {"gate": "expert_choice"},
        {"gate": "softmax", "capacity_factor": 1.25},
    ],
    ids=lambda moe: str(moe["gate"]),
)
def test_a_directory_says_what_the_model_is(moe, tmp_path):
    model = Transformer(config(moe))
    init_weights(model, 3)
    if moe["gate"] == "sigmoid":
        assert float(model.blocks[0].mlp.router_bias.abs().max()) == 0.0
    directory = tmp_path / "model"
    huggingface.write(directory, model)
    again = huggingface.read(directory, torch.float32)
    here = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(again(here), model(here))
    name = model.config.architecture.name
    result = huggingface.read_config(directory).architecture.moe
    raw = (directory / "config.json").read_text()
    if name:
        assert f'"shoal_{name}"' in raw
        assert result == model.config.architecture.moe
    else:  # what Mixtral computes; that some tokens were dropped in training is no part of it
        assert '"model_type": "mixtral"' in raw
        assert result == Routing()


def test_a_mixtral_takes_another_gate():
    plain = Transformer(config({}))
    init_weights(plain, 0)
    made = rebuilt(plain, Architecture(moe={"gate": "xmoe"}))
    assert made.blocks[0].mlp.router.weight.shape == (3, D)
    assert torch.equal(made.blocks[1].mlp.down_proj, plain.blocks[1].mlp.down_proj)


def test_experts_that_choose_cannot_decode():
    model = Transformer(config({"gate": "expert_choice"})).eval()
    init_weights(model, 0)
    with pytest.raises(ModelError, match=r"whole sequence.*another gate"):
        generate(model, [1, 2, 3], 4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architecture": {"moe": {"gate": "switch"}}}, r"top_k = 2: expected 1 with gate switch"),
        ({"architecture": {"moe": {"gate": "gshard"}}, "top_k": 1}, "top_k = 1: expected 2"),
        ({"top_k": 7}, r"top_k = 7: expected 1 to num_experts = 6"),
        (
            {"architecture": {"moe": {"gate": "expert_choice", "aux_loss": 0.1}}},
            "loads are equal",
        ),
        (
            {"architecture": {"moe": {"gate": "sigmoid"}}, "num_experts": 0, "top_k": 0,
             "family": "llama"},
            "without experts",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_are_refused(changes, told):
    with pytest.raises(ModelError, match=told):
        config({}, **changes)


@pytest.mark.parametrize(
    ("moe", "told"),
    [
        ({"capacity_factor": 0}, "capacity_factor"),
        ({"capacity_factor": -1.0}, "capacity_factor"),
        ({"aux_loss": -0.1}, "aux_loss"),
        ({"scope": "whole"}, "scope"),
        ({"gate": "softmx"}, "did you mean"),
        ({"gate": {"name": "sigmoid", "bias_rate": -1}}, "bias_rate"),
    ],
)
def test_options_that_cannot_be_are_refused(moe, told):
    from shoal.core.config import parse

    with pytest.raises(ConfigError, match=told):
        parse(Architecture, {"moe": moe}, where="architecture")
