"""``shoal explain context``: how should ranks share a long sequence?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import FiniteFloat

from shoal.core.config import parse
from shoal.core.counts import Count
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.cost.context.ways import ContextOption, Duplex, Links, advise_context
from shoal.ir import Explanation, Link, Machine, Progress

_ITEMSIZE = {"bf16": 2, "fp32": 4}
_HALF = (
    "--duplex half: links carry one direction at a time, so tokenring gains nothing from "
    "sending results back while queries go onward"
)
_Positive = Annotated[int, Ge(1)]


@part
class ContextStudy:
    """Rank the context-parallel methods for one long sequence.

    Shows for one layer the bytes on the busiest link, communication time, exposed time, and extra
    memory of a rank.

    **Examples**

        shoal explain context --heads 32 --kv-heads 8 --links mesh

        shoal explain context --heads 32 --links ring --cp 8 --tokens 131072 --tflops 400

        shoal explain context --kv-heads 4 --duplex half --bandwidth 6e9 -o json

    Args:
        heads: query heads of one rank.
        kv_heads: key/value heads of one rank; as many if not given.
        head_dim: width of a head.
        tokens: length of the sequence.
        cp: ranks that share it.
        links: switch; mesh, a link between every two ranks; or ring.
        duplex: full, or half for one direction at a time.
        bandwidth: byte/s of a link in one direction.
        latency: seconds of a small message.
        precision: dtype of messages: bf16 or fp32.
        causal: use a causal mask.
        tflops: TFLOP/s of a rank's attention, which overlaps with communication; 0 for no overlap.
    """

    machine: ClassVar = None

    heads: _Positive = 32
    kv_heads: _Positive | None = None
    head_dim: _Positive = 128
    tokens: Count = 32768
    cp: Annotated[int, Ge(2), Le(65_536)] = 4
    links: Links = "switch"
    duplex: Duplex = "full"
    bandwidth: float = 25e9
    latency: float = 1e-5
    precision: Literal["bf16", "fp32"] = "bf16"
    causal: bool = True
    tflops: Annotated[FiniteFloat, Ge(0)] = 0.0

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """Every way, cheapest first, and what of it goes into a job."""
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        require(
            self.heads % kv_heads == 0,
            "--heads, --kv-heads",
            f"{self.heads}, {kv_heads}",
            expected="query heads that are a multiple of the key/value heads",
        )
        pieces = 2 * self.cp
        below = self.tokens // pieces * pieces
        require(
            self.tokens % pieces == 0,
            "--tokens",
            self.tokens,
            expected=f"a multiple of 2 cp = {pieces}, an early and a late chunk for each rank, "
            f"such as {f'{below} or ' if below > 0 else ''}{below + pieces}",
        )
        link = parse(
            Link,
            {"scope": "device", "bandwidth": self.bandwidth, "latency_s": self.latency},
            where="--bandwidth, --latency",
        )
        ranked = advise_context(
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            tokens=self.tokens,
            world=self.cp,
            link=link,
            links=self.links,
            duplex=self.duplex,
            itemsize=_ITEMSIZE[self.precision],
            causal=self.causal,
            flops_per_s=1e12 * self.tflops or None,
        )
        warnings = [_HALF] if self.duplex == "half" else []
        table = Table(
            title=f"{self.tokens:,} tokens over {self.cp} ranks, {self.heads} query and "
            f"{kv_heads} key/value heads of {self.head_dim}, {self.links}, "
            f"{self.duplex} duplex; one layer, forward and backward",
            columns=("", "context", "busiest link", "wire", "exposed", "buffers", "why"),
            rows=tuple(_row(place, one) for place, one in enumerate(ranked, start=1)),
            right="r rrrr",
        )
        best = json.dumps(self._parallel(ranked[0])).replace('"', "")
        return Explanation(
            blocks=(*(f"warning: {one}" for one in warnings), table, f"in a job: parallel: {best}"),
            data={
                "question": {**asdict(self), "kv_heads": kv_heads},
                "warnings": warnings,
                "ranked": [one._asdict() | {"parallel": self._parallel(one)} for one in ranked],
            },
        )

    def _parallel(self, row: ContextOption) -> dict[str, Any]:
        context = {"name": row.name, **row.options} if row.options else row.name
        return {"cp": self.cp, "context": context}


def _row(place: int, row: ContextOption) -> tuple[str, ...]:
    name = " ".join((row.name, *(f"{key}={str(row.options[key]).lower()}" for key in row.options)))
    numbers: tuple[str, ...] = ("", "", "", "")
    if row.possible:
        numbers = (
            human_bytes(row.forward_bytes + row.backward_bytes),
            f"{digits(1e3 * row.seconds)} ms",
            f"{digits(1e3 * row.exposed_s)} ms",
            human_bytes(row.buffer_bytes),
        )
    return (str(place) if row.possible else "-", name, *numbers, "; ".join(row.reasons))
