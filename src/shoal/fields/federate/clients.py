"""Clients as a job describes them: how many, on what device, behind what link, how slow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import ConfigError
from shoal.core.random import generator

_GROUP = re.compile(
    r"(?P<count>\d{1,5})(?:x(?P<device>[A-Za-z][\w.-]*))?"
    r"(?:@(?P<rate>\d+(?:\.\d+)?)(?P<unit>[KMG])bit)?"
)
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
_MOST = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSpec:
    """A client that a job describes.

    Args:
        name: ``c0``, ``c1`` ...
        device: name of a described machine; empty for one such as this.
        bytes_per_s: of its link in each direction; 0 for no limit.
    """

    name: str
    device: str = ""
    bytes_per_s: float = 0.0


def parse_clients(text: str) -> tuple[ClientSpec, ...]:
    """Read ``10xLaptop@20Mbit``, groups joined by ``+``.

    Raises:
        ConfigError: it is not written like that.
    """
    specs: list[ClientSpec] = []
    for term in text.replace(" ", "").split("+"):
        match = _GROUP.fullmatch(term)
        if match is None or not int(match["count"]):
            raise ConfigError(
                f"clients: {term!r}; expected COUNT, COUNTxDEVICE, COUNT@RATE such as 5, "
                "10xLaptop@20Mbit or 4@100Mbit+1@5Mbit"
            )
        rate = float(match["rate"]) * _UNITS[match["unit"]] / 8 if match["rate"] else 0.0
        if match["rate"] and not rate:
            raise ConfigError(f"clients: {term!r} has a link of rate 0; give one above")
        if len(specs) + int(match["count"]) > _MOST:
            raise ConfigError(f"clients: more than {_MOST:,}; give fewer")
        specs += [
            ClientSpec(name="", device=match["device"] or "", bytes_per_s=rate)
            for _ in range(int(match["count"]))
        ]
    width = len(str(len(specs) - 1))
    return tuple(
        ClientSpec(name=f"c{at:0{width}d}", device=one.device, bytes_per_s=one.bytes_per_s)
        for at, one in enumerate(specs)
    )


def slow_factors(
    speeds: str | Sequence[float], count: int, slowest: float, seed: int
) -> tuple[float, ...]:
    """How many times as long as the fastest each client computes.

    Drawn ones are divided by the smallest and held below ``slowest``, which one of them has.
    """
    if not isinstance(speeds, str):
        return tuple(map(float, speeds))
    if speeds == "equal" or count == 1:
        return (1.0,) * count
    draw = generator(seed, purpose="speeds of clients")
    times = draw.exponential(1.0, count) if speeds == "exponential" else draw.normal(1, 0.3, count)
    times = np.maximum(times, 1e-3)
    # The span of the draw is stretched to 1 ... slowest; its shape stays.
    share = (times - times.min()) / (times.max() - times.min())
    return tuple((1.0 + share * (slowest - 1.0)).tolist())
