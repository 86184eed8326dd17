"""How fast this machine trains towers and encodes a query."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveFloat

from shoal.core.config import Value
from shoal.fields.rates import least_seconds, machine_rates
from shoal.fields.retrieve.towers.protocols import Precision, TowerTask
from shoal.fields.retrieve.towers.shapes import block_parameters, tower_config
from shoal.ir import Machine
from shoal.model.config import ModelConfig

# A core of the machine on which the described rates were timed.
_CORE_FLOPS = 8e10
# Backbones that are timed: layers alone, narrow ones, wide ones. Texts and tokens of a step.
_TINY, _NARROW, _WIDE, _TEXTS, _TOKENS, _VOCAB = "4x32", "2x128", "4x384", 64, 32, 1000
# Forward and backward over forward.
_BOTH = 3


class TowerRates(Value):
    """Seconds of one core.

    Args:
        narrow_s: of a training step for each FLOP of its products, at width 128 and below.
        wide_s: the same at width 384 and above.
        step_layer_s: of each layer of a tower in a training step, however small it is.
        layer_s: of each layer of a single query, whatever its width.
        query_s: of a single query for each FLOP.
        spread: relative error of what they say.
    """

    narrow_s: PositiveFloat = 1.2e-11
    wide_s: PositiveFloat = 4e-12
    step_layer_s: PositiveFloat = 3e-3
    layer_s: PositiveFloat = 3e-4
    query_s: PositiveFloat = 3e-11
    spread: PositiveFloat = 0.35

    def step_s(self, config: ModelConfig) -> float:
        """Seconds of training for each FLOP of a backbone's products."""
        share = np.clip((config.hidden - 128) / (384 - 128), 0, 1)
        return float(self.narrow_s + share * (self.wide_s - self.narrow_s))

    def trained_s(self, config: ModelConfig, tokens: float, steps: float) -> float:
        """Seconds in which tokens go through a backbone and gradients back, in so many steps."""
        flops = 2.0 * block_parameters(config) * tokens
        return _BOTH * flops * self.step_s(config) + steps * config.num_layers * self.step_layer_s

    def seen_s(self, config: ModelConfig, tokens: float) -> float:
        """Seconds in which tokens of many texts go through a backbone."""
        return 2.0 * block_parameters(config) * tokens * self.step_s(config)

    def encode_s(self, config: ModelConfig, tokens: int) -> float:
        """Seconds to encode one query alone."""
        flops = 2.0 * block_parameters(config) * tokens
        return config.num_layers * self.layer_s + flops * self.query_s


def tower_rates(machine: Machine, precision: Precision) -> TowerRates:
    """Rates of a machine: timed and kept if it is this one.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    file = f"tower-rates-{precision}.json"
    return machine_rates(machine, file, TowerRates(), lambda: _timed(precision), _CORE_FLOPS)


def _timed(precision: Precision) -> TowerRates:
    from shoal.kernel.threads import torch_threads

    with torch_threads(1):
        tiny_s, tiny_query_s = _seconds(_TINY, precision, texts=2, tokens=4)
        narrow_s, _ = _seconds(_NARROW, precision, texts=_TEXTS, tokens=_TOKENS)
        wide_s, wide_query_s = _seconds(_WIDE, precision, texts=_TEXTS, tokens=_TOKENS)
    tiny = tower_config(_TINY, _VOCAB, _TOKENS)
    narrow, wide = (tower_config(one, _VOCAB, _TOKENS) for one in (_NARROW, _WIDE))
    # A step has two towers.
    step_layer_s, layer_s = tiny_s / (2 * tiny.num_layers), tiny_query_s / tiny.num_layers

    def by_flop(seconds: float, config: ModelConfig, passes: int, overhead: float) -> float:
        own = max(seconds - config.num_layers * overhead, 0.1 * seconds)
        return own / (2.0 * block_parameters(config) * passes)

    passes = _BOTH * 2 * _TEXTS * _TOKENS
    return TowerRates(
        narrow_s=by_flop(narrow_s, narrow, passes, 2 * step_layer_s),
        wide_s=by_flop(wide_s, wide, passes, 2 * step_layer_s),
        step_layer_s=step_layer_s,
        layer_s=layer_s,
        query_s=by_flop(wide_query_s, wide, _TOKENS, layer_s),
    )


def _seconds(
    backbone: str, precision: Precision, *, texts: int, tokens: int
) -> tuple[float, float]:
    """Seconds of a training step of two towers, and of a query alone."""
    from shoal.corpora.tokenizer import train
    from shoal.fields.retrieve.towers.contrastive import PairTraining
    from shoal.fields.retrieve.towers.pair import TowerPair
    from shoal.fields.retrieve.towers.tower import TextTower, TowerSettings

    rng = np.random.default_rng(0)
    rows = list(rng.integers(0, _VOCAB, (texts, tokens)).astype(np.int32))
    config = tower_config(backbone, _VOCAB, tokens)
    settings = TowerSettings(dim=config.hidden, length=tokens, prompt="", pooling="mean")
    tokenizer = train(["no text is timed"], 300)
    pair = TowerPair(*(TextTower.fresh(config, tokenizer, settings, 0) for _ in range(2)))
    learning = PairTraining(TowerTask(precision=precision), pair)
    learning.step(rows, rows, 0.5)
    step_s, _ = least_seconds(lambda: learning.step(rows, rows, 0.5))
    query_s, _ = least_seconds(lambda: pair.query.encode_tokens(rows[:1]), times=9)
    return step_s, query_s
