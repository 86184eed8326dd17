"""The parallel scaling law: what P streams of the same weights are worth in parameters.

With N parameters and P streams::

    L(N, P) = E + (A * 1e9 / (N * (k * ln P + 1))) ** alpha

so P streams are as good as N (k ln P + 1) parameters. It is fitted by a Huber loss on log losses,
from a grid of starts, by L-BFGS. The published tables of both corpora are here as data.

Source: Chen et al., Parallel Scaling Law for Language Models, 2025: the law, the fit, and the
losses of 24 models on each corpus.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from shoal.core.config import Value
from shoal.core.errors import ConfigError, require
from shoal.cost.arithmetic import parameters
from shoal.ir import Machine, ModelShape

_DELTA = 1e-3
_FEWEST = 5
_BYTES = 2.0  # of a weight and of a number in the cache: bf16


class StreamPoint(Value):
    """A trained model.

    Args:
        params: parameters without the embedding, N.
        loss: nats a token.
    """

    params: PositiveFloat
    streams: PositiveInt
    loss: PositiveFloat


class ParallelLaw(Value):
    """The law's numbers.

    Args:
        floor: E, nats.
        scale: A, in 1e9 parameters.
        k: what a stream is worth: P streams are N (k ln P + 1) parameters.
        r2: share of the losses' variance that the fit explains.
    """

    floor: float = Field(ge=0)
    scale: PositiveFloat
    exponent: PositiveFloat
    k: float = Field(ge=0)
    r2: float = 1.0

    def effective(self, params: float, streams: float) -> float:
        """Parameters of the model of one stream that is as good."""
        return params * (self.k * math.log(streams) + 1)

    def loss(self, params: float, streams: float = 1) -> float:
        """Nats a token."""
        beyond: float = (self.scale * 1e9 / self.effective(params, streams)) ** self.exponent
        return self.floor + beyond


def _points(
    rows: Sequence[tuple[int, Sequence[float], Sequence[float]]],
) -> tuple[StreamPoint, ...]:
    return tuple(
        StreamPoint(params=params, streams=streams, loss=loss)
        for streams, sizes, losses in rows
        for params, loss in zip(sizes, losses, strict=True)
    )


_SIZES = {
    1: (535813376, 693753856, 1088376320, 1571472384, 2774773760, 4353203200),
    2: (538195842, 696738818, 1092762882, 1577522690, 2784937986, 4368529922),
    4: (540577412, 699722756, 1097148164, 1583571460, 2795100164, 4383854084),
    8: (545340552, 705690632, 1105918728, 1595669000, 2815424520, 4414502408),
}

PUBLISHED: dict[str, tuple[StreamPoint, ...]] = {
    "stack": _points(
        (
            (1, _SIZES[1], (1.1722, 1.1496, 1.1131, 1.0817, 1.0451, 1.0213)),
            (2, _SIZES[2], (1.1507, 1.1262, 1.0940, 1.0623, 1.0244, 1.0025)),
            (4, _SIZES[4], (1.1354, 1.1124, 1.0808, 1.0490, 1.0126, 0.9906)),
            (8, _SIZES[8], (1.1231, 1.0997, 1.0688, 1.0383, 1.0016, 0.9794)),
        )
    ),
    "pile": _points(
        (
            (1, _SIZES[1], (2.1113, 2.0671, 2.0027, 1.9539, 1.8876, 1.8451)),
            (2, _SIZES[2], (2.0772, 2.0363, 1.9730, 1.9266, 1.8610, 1.8137)),
            (4, _SIZES[4], (2.0544, 2.0128, 1.9509, 1.9040, 1.8394, 1.7938)),
            (8, _SIZES[8], (2.0364, 1.9933, 1.9318, 1.8856, 1.8218, 1.7772)),
        )
    ),
}
"""Losses of 24 models each, trained on Stack-V2 (Python) and on the Pile."""


def fit_parscale(points: Sequence[StreamPoint]) -> ParallelLaw:
    """Fit the law.

    Args:
        points: at least five, of two numbers of streams and two of parameters.

    Raises:
        ConfigError: too few, or the same everywhere in what a number of the law follows from.
    """
    import scipy.optimize

    minimize: Any = scipy.optimize.minimize  # its overloads know no options of a method

    require(
        len(points) >= _FEWEST,
        "parscale points",
        len(points),
        expected=f"at least {_FEWEST} of (parameters, streams, loss): the law has four numbers",
    )
    for what, names, unknown in (
        ({point.streams for point in points}, "streams", "k, what a stream is worth"),
        ({point.params for point in points}, "params", "alpha and A"),
    ):
        if len(what) < 2:
            raise ConfigError(
                f"parscale points: {names} = {what.pop():g} in all {len(points)} of them, so "
                f"{unknown}, cannot be told; add models of another number of {names}"
            )
    log_n = np.log([point.params / 1e9 for point in points])
    log_p = np.log([float(point.streams) for point in points])
    wanted = np.log([point.loss for point in points])

    def logs(theta: np.ndarray) -> np.ndarray:
        log_e, log_a, alpha, k = theta
        grown = alpha * (log_a - log_n - np.log1p(k * log_p))
        logs: np.ndarray = np.logaddexp(log_e, grown)
        return logs

    def lost(theta: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss in units of delta, so that the optimizer's tolerances mean something."""
        log_e, log_a, alpha, k = theta
        result = logs(theta)
        error = (result - wanted) / _DELTA
        size = np.abs(error)
        slope = np.clip(error, -1, 1) / _DELTA
        share = -np.expm1(np.minimum(log_e - result, 0.0))  # of the loss above the floor
        grown = log_a - log_n - np.log1p(k * log_p)
        steps = (1 - share, share * alpha, share * grown, -share * alpha * log_p / (1 + k * log_p))
        value = float(np.where(size <= 1, size**2 / 2, size - 0.5).sum())
        return value, np.array([float((slope * step).sum()) for step in steps])

    least = float(wanted.min())
    grid = itertools.product((least - 1, least - 0.3), (-4.0, -1.0, 2.0), (0.15, 0.5), (0.5,))
    bounds = [(None, least), (None, None), (1e-4, 4.0), (0.0, 50.0)]
    how = {"maxiter": 2000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-10}
    first = [
        minimize(
            lost, start, jac=True, method="L-BFGS-B", bounds=bounds, options={**how, "maxiter": 60}
        )
        for start in grid
    ]
    best = min(
        (
            minimize(lost, one.x, jac=True, method="L-BFGS-B", bounds=bounds, options=how)
            for one in sorted(first, key=lambda one: float(one.fun))[:3]
        ),
        key=lambda one: float(one.fun),
    )
    losses, result = np.exp(wanted), np.exp(logs(best.x))
    spread = float(((losses - losses.mean()) ** 2).sum())
    log_e, log_a, alpha, k = (float(one) for one in best.x)
    return ParallelLaw(
        floor=math.exp(log_e),
        scale=math.exp(log_a),
        exponent=alpha,
        k=k,
        r2=1 - float(((losses - result) ** 2).sum()) / spread if spread else 1.0,
    )


class EqualLoss(Value):
    """P streams beside the dense model that is as good, both as they decode.

    Args:
        loss: of both, by the law.
        dense_params: parameters of the dense model.
        memory_bytes: weights, prefixes, aggregator and cache of the streams.
        dense_memory_bytes: the same of the dense model.
        step_s: seconds of a decoding step of the streams, by the roofline.
        dense_step_s: the same of the dense model.
        memory_saved: how many times smaller the streams' increase of memory over one stream is.
        latency_saved: the same of seconds of a step.
    """

    streams: int
    loss: float
    dense_params: float
    memory_bytes: float
    dense_memory_bytes: float
    step_s: float
    dense_step_s: float
    memory_saved: float | None
    latency_saved: float | None


def equal_loss(
    law: ParallelLaw,
    shape: ModelShape,
    machine: Machine,
    *,
    params: float | None = None,
    streams: Sequence[int] = (1, 2, 4, 8),
    batch: int = 1,
    context: int = 1024,
) -> list[EqualLoss]:
    """What streams cost in decoding, and what the dense model of equal loss would.

    A step reads the weights once, the prefixes and aggregator of the streams among them, and the
    cache of every stream, and computes every stream. The dense model grows in width, so its cache
    grows with the root of its parameters.

    Args:
        law: says which loss.
        shape: of the model that is asked about.
        machine: its first device decodes.
        params: parameters N; the shape's, if not given. The cache then scales as the dense one's.
        streams: the numbers P that are asked about.
        batch: requests at once.
        context: tokens of each in the cache.
    """
    own = float(parameters(shape))
    base = params or own
    kv_bytes = 2.0 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _BYTES
    device = machine.device
    rate = device.matmul_flops.get("bf16") or device.peak_flops.get("bf16")
    speed = device.main_memory.read_bandwidth
    if rate is None or speed is None:
        raise ConfigError(
            f"machine {machine.name}: no bf16 rate or no read_bandwidth of its memory is known; "
            "probe it with shoal probe, or name another machine"
        )

    def cost(count: float, num: int) -> tuple[float, float]:
        wider = math.sqrt(count / own)
        cache = num * batch * context * kv_bytes * wider
        read = count * _BYTES + cache
        if num > 1:
            prefixes = num * shape.architecture.streams.prefix * kv_bytes * wider
            read += prefixes + num * (shape.hidden * wider) ** 2 * _BYTES
        return read, max(read / speed, 2.0 * count * num * batch / rate)

    one_bytes, one_s = cost(base, 1)
    rows = []
    for num in streams:
        require(num >= 1, "parscale.streams", num, expected="at least 1")
        dense = law.effective(base, num)
        (memory, step), (dense_memory, dense_step) = cost(base, num), cost(dense, 1)
        more, more_s = memory - one_bytes, step - one_s
        rows.append(
            EqualLoss(
                streams=num,
                loss=law.loss(base, num),
                dense_params=dense,
                memory_bytes=memory,
                dense_memory_bytes=dense_memory,
                step_s=step,
                dense_step_s=dense_step,
                memory_saved=(dense_memory - one_bytes) / more if more > 0 else None,
                latency_saved=(dense_step - one_s) / more_s if more_s > 0 else None,
            )
        )
    return rows
