"""How fast this machine trains towers and encodes a query."""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from shoal.core.config import Value
from shoal.fields.rates import least_seconds, machine_rates
from shoal.fields.retrieve.towers.protocols import Precision, TowerTask
from shoal.fields.retrieve.towers.shapes import block_parameters, tower_config
from shoal.ir import Machine
from shoal.model.config import ModelConfig

# A core of the machine on which the described rates were timed.
_CORE_FLOPS = 8e10
# Backbones that are timed, the tokens of a timed step, and words of a tokenizer.
_NARROW, _WIDE, _TEXTS, _TOKENS, _VOCAB = "2x128", "4x384", 64, 32, 1000
# Forward and backward over forward.
_BOTH = 3


class TowerRates(Value):
    """Seconds of one core.

    Args:
        narrow_s: of a training step for each FLOP of its products, at width 128 and below.
        wide_s: the same at width 384 and above.
        layer_s: of each layer of a single query, whatever its width.
        query_s: of a single query for each FLOP.
        spread: relative error of what they say.
    """

    narrow_s: PositiveFloat = 1.2e-11
    wide_s: PositiveFloat = 4e-12
    layer_s: NonNegativeFloat = 3e-4
    query_s: PositiveFloat = 3e-11
    spread: PositiveFloat = 0.35

    def step_s(self, config: ModelConfig) -> float:
        """Seconds of training for each FLOP of a backbone's products."""
        share = np.clip((config.hidden - 128) / (384 - 128), 0, 1)
        return float(self.narrow_s + share * (self.wide_s - self.narrow_s))

    def trained_s(self, config: ModelConfig, tokens: float, *, backward: bool = True) -> float:
        """Seconds in which tokens go through a backbone, and gradients back."""
        flops = 2.0 * block_parameters(config) * tokens
        return flops * self.step_s(config) * (_BOTH if backward else 1)

    def encode_s(self, config: ModelConfig, tokens: int) -> float:
        """Seconds to encode one query alone."""
        flops = 2.0 * block_parameters(config) * tokens
        return config.num_layers * self.layer_s + flops * self.query_s


def tower_rates(machine: Machine, precision: Precision) -> TowerRates:
    """Rates of a machine: timed and kept if it is this one.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    return machine_rates(
        machine, f"tower-rates-{precision}.json", TowerRates(), lambda: _timed(precision),
        _CORE_FLOPS,
    )  # fmt: skip


def _timed(precision: Precision) -> TowerRates:
    from shoal.fields.retrieve.towers.contrastive import PairTraining
    from shoal.fields.retrieve.towers.pair import TowerPair
    from shoal.fields.retrieve.towers.tower import TextTower, TowerSettings
    from shoal.kernel.threads import torch_threads

    rng = np.random.default_rng(0)
    rows = list(rng.integers(0, _VOCAB, (_TEXTS, _TOKENS)).astype(np.int32))
    task = TowerTask(precision=precision)
    step, one, flops, layers = {}, {}, {}, {}
    with torch_threads(1):
        for backbone in (_NARROW, _WIDE):
            config = tower_config(backbone, _VOCAB, _TOKENS)
            settings = TowerSettings(dim=config.hidden, length=_TOKENS, prompt="", pooling="mean")
            towers = [TextTower.fresh(config, None, settings, 0) for _ in range(2)]
            learning = PairTraining(task, TowerPair(*towers))
            learning.step(rows, rows, 0.5)
            seconds, _ = least_seconds(lambda one=learning: one.step(rows, rows, 0.5))
            each = 2.0 * block_parameters(config)
            step[backbone] = seconds / (_BOTH * each * 2 * _TEXTS * _TOKENS)
            towers[0].encode_tokens(rows[:1])
            one[backbone], _ = least_seconds(
                lambda one=towers[0]: one.encode_tokens(rows[:1]), times=9
            )
            flops[backbone], layers[backbone] = each * _TOKENS, config.num_layers
    # Two towers, two unknown numbers.
    matrix = np.array([[layers[name], flops[name]] for name in (_NARROW, _WIDE)])
    layer_s, query_s = np.linalg.solve(matrix, [one[name] for name in (_NARROW, _WIDE)])
    return TowerRates(
        narrow_s=step[_NARROW], wide_s=step[_WIDE],
        layer_s=max(float(layer_s), 0.0), query_s=max(float(query_s), 1e-13),
    )  # fmt: skip
