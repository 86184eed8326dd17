"""What ``shoal plan context`` shows: ways for ranks to share a sequence, cheapest first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shoal.app.show import console, table
from shoal.core.config import parse
from shoal.core.errors import nearest, require
from shoal.core.sizes import human_bytes
from shoal.cost.context import Advice, Duplex, Links, advise_context
from shoal.ir import Link

__all__ = ["Question", "advice", "show", "summary", "warnings"]

_LINKS: tuple[Links, ...] = ("switch", "mesh", "ring")
_DUPLEX: tuple[Duplex, ...] = ("full", "half")
_ITEMSIZE = {"bf16": 2, "fp32": 4}
_MOST_RANKS = 65_536


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is shared, among whom, and over what.

    Args:
        heads: query heads of one rank.
        kv_heads: key/value heads of one rank.
        head_dim: width of a head.
        tokens: length of the sequence.
        cp: ranks that share it.
        links: ``switch``, ``mesh`` or ``ring``.
        duplex: ``full`` or ``half``.
        bandwidth: byte/s of a link in one direction.
        latency: seconds of a small message.
        precision: of what is sent, ``bf16`` or ``fp32``.
        causal: a query sees what came before it, not all.
        tflops: that the attention kernel of a rank reaches; 0 if nothing is to be hidden.
    """

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    cp: int
    links: str
    duplex: str
    bandwidth: float
    latency: float
    precision: str
    causal: bool
    tflops: float


def advice(asked: Question) -> list[Advice]:
    """Every way, cheapest first.

    Raises:
        ConfigError: a number or word that cannot be.
    """
    for name in ("heads", "kv_heads", "head_dim"):
        value = getattr(asked, name)
        require(value >= 1, f"--{name.replace('_', '-')}", value, expected="at least 1")
    require(
        asked.heads % asked.kv_heads == 0,
        "--heads, --kv-heads",
        f"{asked.heads}, {asked.kv_heads}",
        expected="query heads that are a multiple of the key/value heads",
    )
    require(
        2 <= asked.cp <= _MOST_RANKS,
        "--cp",
        asked.cp,
        expected=f"2 to {_MOST_RANKS} ranks that share a sequence",
    )
    pieces = 2 * asked.cp
    below = asked.tokens // pieces * pieces
    require(
        asked.tokens >= 1 and asked.tokens % pieces == 0,
        "--tokens",
        asked.tokens,
        expected=f"a multiple of 2 cp = {pieces}, an early and a late chunk for each rank, "
        f"such as {f'{below} or ' if below > 0 else ''}{below + pieces}",
    )
    for flag, word, words in (
        ("--links", asked.links, _LINKS),
        ("--duplex", asked.duplex, _DUPLEX),
        ("--precision", asked.precision, tuple(_ITEMSIZE)),
    ):
        allowed = ", ".join(words)
        require(word in words, flag, word, expected=f"one of {allowed}", hint=nearest(word, words))
    require(
        0 <= asked.tflops < float("inf"),
        "--tflops",
        asked.tflops,
        expected="TFLOP/s of attention, or 0 if nothing is to be hidden behind it",
    )
    link = parse(
        Link,
        {"scope": "device", "bandwidth": asked.bandwidth, "latency_s": asked.latency},
        where="--bandwidth, --latency",
    )
    return advise_context(
        heads=asked.heads,
        kv_heads=asked.kv_heads,
        head_dim=asked.head_dim,
        tokens=asked.tokens,
        world=asked.cp,
        link=link,
        links=next(word for word in _LINKS if word == asked.links),
        duplex=next(word for word in _DUPLEX if word == asked.duplex),
        itemsize=_ITEMSIZE[asked.precision],
        causal=asked.causal,
        flops_per_s=1e12 * asked.tflops or None,
    )


def warnings(asked: Question) -> list[str]:
    """What the user should know before the ranking."""
    if asked.duplex == "half":
        return [
            "--duplex half: links carry one direction at a time, so tokenring gains nothing from "
            "sending results back while queries go onward"
        ]
    return []


def summary(asked: Question, rows: list[Advice]) -> dict[str, Any]:
    """Question and answer as plain values."""
    return {
        "question": vars(asked),
        "warnings": warnings(asked),
        "ranked": [row._asdict() | {"parallel": _parallel(asked, row)} for row in rows],
    }


def show(asked: Question, rows: list[Advice]) -> None:
    """Print the ranking, and what of it goes into a job."""
    title = (
        f"{asked.tokens:,} tokens over {asked.cp} ranks, {asked.heads} query and "
        f"{asked.kv_heads} key/value heads of {asked.head_dim}, {asked.links}, "
        f"{asked.duplex} duplex; one layer, forward and backward"
    )
    columns = ("", "context", "busiest link", "wire", "exposed", "buffers", "why")
    shown = []
    for place, row in enumerate(rows, start=1):
        name = " ".join((row.name, *(f"{key}={_word(row.options[key])}" for key in row.options)))
        numbers: tuple[object, ...] = ("", "", "", "")
        if row.possible:
            numbers = (
                human_bytes(row.forward_bytes + row.backward_bytes),
                _ms(row.seconds),
                _ms(row.exposed_s),
                human_bytes(row.buffer_bytes),
            )
        shown.append((place if row.possible else "-", name, *numbers, "; ".join(row.reasons)))
    table(title, columns, shown, numeric="r rrrr")
    best = json.dumps(_parallel(asked, rows[0])).replace('"', "")
    console().print(f"in a job: parallel: {best}", markup=False)


def _parallel(asked: Question, row: Advice) -> dict[str, Any]:
    context = {"name": row.name, **row.options} if row.options else row.name
    return {"cp": asked.cp, "context": context}


def _word(option: int | bool) -> str:
    return str(option).lower()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"
