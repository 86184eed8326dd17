"""[119] Duo-LLM: what an oracle of routes could gain, and how little of it routers find.

A mini-model of bytes whose feed-forward layers are big, small or skipped, trained on random routes;
then its routers alone, to a budget. All 81 patterns for every held-out token: the best with at most
one big layer beside all big. From left to right: the best pattern of one big layer beside the
trained routers and random routes of the same expected computation, of feed-forward layers alone.
The A/A run takes all big for the oracle, and random routes for the routers.

Source: Alizadeh et al., Duo-LLM: A Framework for Studying Adaptive Computation in Large Language
Models, 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.errors import require
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.transformer import Transformer

_LAYERS = 4
_LENGTH = 64


@part
class DuoLLM(BaseClaim, row=119):
    """The oracle, trained routers and chance, by the loss of held-out bytes.

    Args:
        steps: steps of the training on random routes.
        router_steps: steps of the training of the routers.
        hidden: width of the model.
        tokens: held-out bytes that are judged.
        groups: parts of them, each a sample.
    """

    steps: Annotated[int, Ge(1)] = 400
    router_steps: Annotated[int, Ge(1)] = 120
    hidden: Annotated[int, Ge(1)] = 192
    tokens: int = 2048
    groups: Annotated[int, Ge(1)] = 8

    def __post_init__(self) -> None:
        require(
            self.tokens % (self.groups * _LENGTH) == 0,
            "claim.duo_llm.tokens",
            self.tokens,
            expected=f"a multiple of groups * {_LENGTH}",
        )

    def collect(self, run: ClaimRun) -> None:
        """Compare patterns of a random model; then, unless it is quick, of a trained one."""
        self._count(run)
        if not run.quick:
            self._judge(run)

    def _count(self, run: ClaimRun) -> None:
        import torch

        from shoal.claims.experiments.arch_training import mini, text
        from shoal.claims.lab.route_oracle import best, patterns
        from shoal.model.duo import BIG, committed, pattern_losses, routed
        from shoal.train.zoo import random

        config = mini(64, _LAYERS, initializer_range=0.2, architecture={"ffn": "duo"})
        model = random(config, run.seed).eval()
        inputs, targets = _heldout(text(run.context.data).heldout, 2, 16)
        every = patterns(_LAYERS)
        big = torch.full((_LAYERS, *inputs.shape), BIG)
        losses = pattern_losses(model, inputs, targets, torch.from_numpy(every), big)
        table = losses.flatten(1).double().numpy()
        oracle = run.pick(best(table, every).losses, table[0])
        said, routes = committed(model, inputs, targets, torch.from_numpy(every))
        with torch.no_grad(), routed(model, routes):
            replayed = _each(model, inputs, targets)
        run.put("worse_than_a_pattern", (oracle > table).any(0).sum())
        run.put("replay", float((said - replayed).abs().max()))
        run.put("best_pattern_gain", (table[0] - oracle).mean())

    def _trained(self, run: ClaimRun) -> Transformer:
        import torch

        from shoal.claims.experiments.arch_training import Recipe, mini, text, train
        from shoal.model.duo import router_loss
        from shoal.train.zoo import random

        data, seed = text(run.context.data), run.seed
        duo = {"ffn": {"name": "duo", "router": "linear"}}
        config = mini(self.hidden, _LAYERS, ffn=4 * self.hidden, architecture=duo)
        run.progress("training on random routes", 0.1)
        model = train(random(config, seed), data.train, Recipe(steps=self.steps), seed)
        run.progress("training routers", 0.6)
        source = torch.Generator().manual_seed(seed)
        return train(
            model,
            data.train,
            Recipe(steps=self.router_steps, lr=1e-2),
            seed,
            first=self.steps,
            parameters=[p for name, p in model.named_parameters() if ".router." in name],
            loss=lambda inputs, targets, _: router_loss(
                model, inputs, targets, budget=self._budget(model), weight=4.0, source=source
            ),
        )

    def _budget(self, model: Transformer) -> float:
        """Share of the all-big computation of one big layer and small ones."""
        import torch

        from shoal.model.duo import BIG, SMALL, ffn_flops

        one = torch.tensor([BIG] + [SMALL] * (_LAYERS - 1))
        flops = ffn_flops(model.config, torch.stack([one, torch.full((_LAYERS,), BIG)]))
        return float(flops[0] / flops[1])

    def _judge(self, run: ClaimRun) -> None:
        import torch

        from shoal.claims.experiments.arch_training import text
        from shoal.claims.lab.route_oracle import best, patterns
        from shoal.model.duo import BIG, committed, ffn_flops, pattern_losses, routed, router_routes

        model = run.remember("model", lambda: self._trained(run))
        data = text(run.context.data)
        inputs, targets = _heldout(data.heldout, self.tokens // _LENGTH, _LENGTH)
        every, one_big = patterns(_LAYERS), patterns(_LAYERS, big=1)
        big = torch.full((_LAYERS, *inputs.shape), BIG)
        run.progress("evaluating the oracle", 0.8)

        def by_token(routes: Tensor | None) -> np.ndarray:
            with torch.no_grad(), routed(model, routes):
                return _each(model, inputs, targets).double().numpy()

        def independent() -> np.ndarray:
            parts = [
                pattern_losses(model, *rows, torch.from_numpy(every), big[:, : len(rows[0])])
                for rows in zip(torch.split(inputs, 4), torch.split(targets, 4), strict=True)
            ]
            return torch.cat(parts, 1).flatten(1).double().numpy()

        table = run.remember("patterns", independent)
        allowed = (every == BIG).sum(1) <= 1
        result = best(table[allowed], every[allowed])
        run.put("oracle_one_big", *map(self._means, (run.pick(result.losses, table[0]), table[0])))

        def left_to_right() -> np.ndarray:
            parts = [
                committed(model, *rows, torch.from_numpy(one_big))[0]
                for rows in zip(torch.split(inputs, 16), torch.split(targets, 16), strict=True)
            ]
            return torch.cat(parts).double().numpy()

        chosen = router_routes(model, inputs)
        whole = float(ffn_flops(model.config, big[:, 0, 0]))
        spent = float(ffn_flops(model.config, chosen.movedim(0, -1)).double().mean()) / whole
        chance = _chance(spent, whole, model, inputs.shape, run.seed)
        sequential = run.remember("sequential", left_to_right).reshape(-1)
        random = by_token(chance).reshape(-1)
        router = by_token(chosen).reshape(-1)
        by_chance, by_router, by_oracle = map(self._means, (random, router, sequential))
        run.put("oracle_below_router", run.pick(by_oracle, by_router), by_router)
        run.put("router_below_random", run.pick(by_router, by_chance), by_chance)
        run.put("captured", (by_chance - by_router) / (by_chance - by_oracle))

    def _means(self, losses: np.ndarray) -> np.ndarray:
        """Mean losses of the groups."""
        return np.asarray(losses.reshape(self.groups, -1).mean(1))


def _heldout(data: np.ndarray, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced sequences, and their next bytes."""
    from shoal.claims.experiments.arch_training import windows

    return windows(data, np.linspace(0, len(data) - length - 2, rows).astype(np.int64), length)


def _each(model: Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of every token [B, T]."""
    import torch.nn.functional as F

    logits = model(inputs).float().flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)


def _chance(
    spent: float, whole: float, model: Transformer, shape: tuple[int, ...], seed: int
) -> Tensor:
    """Random routes [L, B, T] of this expected computation: big or not, else small or nothing."""
    import torch

    from shoal.core.random import generator
    from shoal.model.duo import BIG, SKIP, SMALL, ffn_flops

    small = _LAYERS * float(ffn_flops(model.config, torch.tensor([SMALL]))) / whole
    # p + (1 - p) small / 2 = spent
    p = min(1.0, max(0.0, (spent - small / 2) / (1 - small / 2)))
    source = generator(seed, purpose="random routes")
    odds = [p, (1 - p) / 2, (1 - p) / 2]
    routes = source.choice([BIG, SMALL, SKIP], size=(_LAYERS, *shape), p=odds)
    return torch.from_numpy(routes)
