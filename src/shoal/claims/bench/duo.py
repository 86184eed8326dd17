"""``shoal explain duo``: what routes of tokens cost and give, and who chooses them well.

A model whose feed-forward layers are big, small or skipped answers the same held-out text with
routes chosen in four ways: by chance, one pattern for all tokens, by its trained routers, and by an
oracle that knows every token's loss on every pattern, the tokens before it all big. Only
feed-forward operations are counted, in every arm. The difficulty of a token is what its best
pattern gains over all small ones: more computation can buy nothing of a hopeless token.

Shapes: K patterns, L layers, B sequences, T tokens, N = B T.

Source: Alizadeh et al., Duo-LLM, 2024, sections 3.3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from shoal.claims.lab.route_oracle import best, difficulty, patterns, search
from shoal.core.errors import ModelError, PlanError, require
from shoal.core.random import generator
from shoal.model.duo import (
    BIG,
    SKIP,
    SMALL,
    computing,
    ffn_flops,
    pattern_losses,
    routed,
    router_routes,
)
from shoal.train.routers import calibrate

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.transformer import Transformer

Search = Literal["exhaustive", "beam", "descent"]
Progress = Callable[[str, float], None]

_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
# Sequences whose patterns are evaluated together, and patterns of a fixed curve tried at most.
_TOGETHER, _FIXED = 4, 256


@dataclass(frozen=True)
class Arm:
    """One way to choose routes, at one amount of computation.

    Args:
        name: random, fixed, router or oracle.
        chosen: which of them: a share, a pattern, a budget.
        share: of the all-big model's feed-forward operations, as it was spent.
        loss: mean loss of a token, nats.
    """

    name: str
    chosen: str
    share: float
    loss: float


@dataclass(frozen=True)
class DuoResult:
    """What was found.

    Args:
        arms: of every way, cheapest first.
        layers: route -> name of who chose -> share of the tokens that take it, by layer.
        difficulty: of some tokens, nats.
        losses: of the same tokens, all big.
        correlation: of both, over all tokens.
        tokens: that were judged.
        evaluations: patterns that the oracle evaluated of each token.
        budget: most big layers of the oracle whose difficulty and routes these are.
    """

    arms: tuple[Arm, ...]
    layers: dict[str, dict[str, list[float]]]
    difficulty: list[float]
    losses: list[float]
    correlation: float
    tokens: int
    evaluations: int
    budget: int

    def of(self, name: str) -> list[Arm]:
        """The curve of one way."""
        return [arm for arm in self.arms if arm.name == name]


@torch.no_grad()
def each_loss(model: Transformer, inputs_BT: Tensor, targets_BT: Tensor) -> np.ndarray:
    """Loss [B, T] of every token, nats."""
    import torch.nn.functional as F

    logits = model(inputs_BT).float().flatten(0, 1)
    loss = F.cross_entropy(logits, targets_BT.flatten(), reduction="none")
    losses: np.ndarray = loss.view(targets_BT.shape).double().numpy()
    return losses


def random_routes(share: float, model: Transformer, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random routes [L, B, T] of an expected computation: big or not, else small or nothing.

    Args:
        share: of the all-big model's feed-forward operations.
        model: of ``ffn: duo``.
        shape: [B, T].
        seed: of the draws.
    """
    layers = model.config.num_layers
    big, small = (float(ffn_flops(model.config, torch.tensor([one]))) for one in (BIG, SMALL))
    small /= big
    # p + (1 - p) small / 2 = share; below that, small or nothing alone.
    p = min(1.0, max(0.0, (share - small / 2) / (1 - small / 2)))
    some = min(1.0, share / small) if share < small / 2 else 0.5
    odds = [p, (1 - p) * some, (1 - p) * (1 - some)]
    drawn = generator(seed, purpose="random routes").choice(
        [BIG, SMALL, SKIP], size=(layers, *shape), p=odds
    )
    return torch.from_numpy(drawn)


def study(
    model: Transformer,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    calibration_BT: Tensor,
    *,
    budget: int = 1,
    search_by: Search = "exhaustive",
    width: int = 4,
    seed: int = 0,
    progress: Progress = lambda text, done: None,
) -> DuoResult:
    """Compare all ways on the same text.

    Args:
        model: of ``ffn: duo``, not in training.
        inputs_BT: held-out tokens.
        targets_BT: next tokens.
        calibration_BT: other text, on which routers are set to shares.
        budget: most big layers of a token of the oracle whose routes are shown.
        search_by: how the oracle looks for patterns.
        width: of its beam.
        seed: of chance.
        progress: called with (text, share done).

    Raises:
        PlanError: a budget beyond the layers, or too many patterns for an exhaustive search.
        ModelError: the model has no routes.
    """
    config = model.config
    require(
        config.architecture.ffn.duo,
        "duo",
        config.name,
        expected="a model of ffn = duo",
        hint="train one with architecture: {ffn: duo}",
        error=ModelError,
    )
    layers = config.num_layers
    require(
        0 <= budget <= layers,
        "--budget",
        budget,
        expected=f"0 to {layers} big layers",
        error=PlanError,
    )
    if search_by == "exhaustive":
        patterns(layers)  # refused before anything is computed
    costs = ffn_flops(config, torch.tensor([[BIG], [SMALL], [SKIP]])).double().numpy()
    costs = costs / costs[BIG]

    def spent(routes_LN: np.ndarray) -> float:
        return float(costs[routes_LN].mean())

    def on(routes_LBT: Tensor) -> np.ndarray:
        with routed(model, routes_LBT):
            return each_loss(model, inputs_BT, targets_BT).reshape(-1)

    progress("random routes and patterns", 0.05)
    shape = tuple(inputs_BT.shape)
    arms: list[Arm] = []
    for share in _SHARES:
        routes = random_routes(share, model, shape, seed)
        arms.append(Arm("random", f"{share:.0%}", spent(routes.numpy()), float(on(routes).mean())))
    for pattern in _fixed(layers):
        routes = torch.from_numpy(pattern).view(-1, 1, 1).expand(-1, *shape)
        arms.append(Arm("fixed", _spelled(pattern), spent(pattern), float(on(routes).mean())))
    arms = _best_fixed(arms)
    progress("routers", 0.3)
    chosen = None
    if config.architecture.ffn.router != "random":
        chosen, more = _routers(model, inputs_BT, targets_BT, calibration_BT, spent)
        arms += more
    progress("evaluating the oracle", 0.5)
    all_big = on(torch.full((layers, *shape), BIG))
    all_small = on(torch.full((layers, *shape), SMALL))
    oracle = _Oracle(model, inputs_BT, targets_BT, search_by, width)
    budgets = sorted({*range(min(layers, 2) + 1), budget, layers})
    result = {}
    for number, big in enumerate(budgets):
        progress("evaluating the oracle", 0.5 + 0.5 * number / len(budgets))
        routes_NL, losses_N = result[big] = oracle.best(big)
        name = f"{big} big" if big < layers else "any"
        arms.append(Arm("oracle", name, spent(routes_NL.T), float(losses_N.mean())))
    routes_NL, losses_N = result[budget]
    hard = difficulty(all_small, losses_N)
    shown = np.linspace(0, len(hard) - 1, min(len(hard), 500)).astype(int)
    by = {"oracle": routes_NL.T}
    if chosen is not None:
        by["router"] = chosen.reshape(layers, -1)
    names = {"big": BIG, "small": SMALL, "skip": SKIP}
    return DuoResult(
        arms=tuple(sorted(arms, key=lambda arm: (arm.name, arm.share))),
        layers={
            route: {
                who: [float((of[layer] == number).mean()) for layer in range(layers)]
                for who, of in by.items()
            }
            for route, number in names.items()
        },
        difficulty=[float(x) for x in hard[shown]],
        losses=[float(x) for x in all_big[shown]],
        correlation=float(np.corrcoef(hard, all_big)[0, 1]),
        tokens=len(hard),
        evaluations=oracle.asked,
        budget=budget,
    )


def _routers(
    model: Transformer,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    calibration_BT: Tensor,
    spent: Callable[[np.ndarray], float],
) -> tuple[np.ndarray, list[Arm]]:
    """Routes that routers choose by themselves, and losses at the shares that they are set to."""
    ffn = model.config.architecture.ffn
    chosen = router_routes(model, inputs_BT)
    with routed(model, chosen):
        loss = each_loss(model, inputs_BT, targets_BT).mean()
    arms = [Arm("router", "as trained", spent(chosen.numpy()), float(loss))]
    known = ffn.model_copy(update={"shifts": ffn.shifts or calibrate(model, calibration_BT)})
    for share in _SHARES:
        with computing(model, torch.tensor(known.shift(share))):
            routes = router_routes(model, inputs_BT)
            loss = each_loss(model, inputs_BT, targets_BT).mean()
        arms.append(Arm("router", f"{share:.0%}", spent(routes.numpy()), float(loss)))
    return chosen.numpy(), arms


class _Oracle:
    """The best patterns of tokens, all patterns evaluated once where that is possible."""

    def __init__(
        self, model: Transformer, inputs_BT: Tensor, targets_BT: Tensor, by: Search, width: int
    ) -> None:
        self._model, self._inputs, self._targets = model, inputs_BT, targets_BT
        self._by: Search = by
        self._width = width
        self._layers = model.config.num_layers
        self._table: np.ndarray | None = None
        self.asked = 0

    def best(self, big: int) -> tuple[np.ndarray, np.ndarray]:
        """Routes [N, L] with at most so many big layers, and losses [N]."""
        if self._by == "exhaustive":
            every = patterns(self._layers)
            if self._table is None:
                self._table = self._losses(torch.from_numpy(every))
                self.asked = len(every)
            allowed = (every == BIG).sum(1) <= big
            result = best(self._table[allowed], every[allowed])
            return result.routes, result.losses
        result = search(
            lambda asked_KNL: self._losses(
                torch.from_numpy(asked_KNL).view(len(asked_KNL), *self._inputs.shape, self._layers)
            ),
            self._layers,
            self._inputs.numel(),
            big=big,
            method=self._by,
            width=self._width,
        )
        self.asked = max(self.asked, result.evaluations)
        return result.routes, result.losses

    def _losses(self, asked: Tensor) -> np.ndarray:
        """Losses [K, N]."""
        parts = []
        for start in range(0, len(self._inputs), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            inputs = self._inputs[some]
            reference = torch.full((self._layers, *inputs.shape), BIG)
            own = asked if asked.dim() == 2 else asked[:, some]
            parts.append(pattern_losses(self._model, inputs, self._targets[some], own, reference))
        table: np.ndarray = torch.cat(parts, 1).flatten(1).double().numpy()
        return table


def _fixed(layers: int) -> np.ndarray:
    """Patterns of big and small layers; of many layers those that are big at one end."""
    if 2**layers <= _FIXED:
        places = np.arange(2**layers)[:, None] >> np.arange(layers) & 1
        positions: np.ndarray = np.where(places == 1, BIG, SMALL)
        return positions
    first = [[BIG] * count + [SMALL] * (layers - count) for count in range(layers + 1)]
    return np.array([*first, *(one[::-1] for one in first)])


def _best_fixed(arms: list[Arm]) -> list[Arm]:
    """Of fixed patterns the best at each amount of computation."""
    kept: dict[float, Arm] = {}
    others = []
    for arm in arms:
        if arm.name != "fixed":
            others.append(arm)
            continue
        key = round(arm.share, 9)
        if key not in kept or arm.loss < kept[key].loss:
            kept[key] = arm
    return [*others, *kept.values()]


def _spelled(pattern_L: np.ndarray) -> str:
    return "".join("BS-"[route] for route in pattern_L)
