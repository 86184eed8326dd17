"""[91] TokenRing: do queries that go onward and results that come back halve a ring's step?

Four processes with a full-duplex link between every two (namespaces; each direction of each link is
shaped by itself), as many key/value as query heads: seconds of attention over one sequence, forward
and with its backward pass, beside the zigzag ring. A rank has a quarter of the paper's 6,000 tokens
and an eighth of its 32 heads; the links' rate is such that keys and values of a ring's step travel
for as many times the seconds of a block as 7.6 ms are of an A10's 125 TFLOP/s.

A ring sends 2 (N - 1) chunks one after the other. TokenRing sends N - 1 chunks of queries and, last
of all, a result: the forward pass stays below 2 (N - 1) / N, which is 1.5 for four ranks.

The same on virtual clocks that count messages alone, also where the ring wins: with eight query
heads a key/value head, and on links between neighbours. Backward, gradients of keys and values
follow the ring's chunks; with bf16 inputs they stay in fp32 and TokenRing gains more, so fp32 is
compared. The A/A run puts the ring in TokenRing's place.

Source: Wang et al., TokenRing, 2024.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.thread_links import LinkComm, Links, run_linked
from shoal.claims.protocols import ExperimentContext
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.parts import part, table
from shoal.cost.context.traffic import tokenring_traffic
from shoal.ir.mask import Mask
from shoal.machine.emulate import emulate, unavailable

_RANKS, _WORLD = "shoal.claims.experiments.tokenring_ranks", 4
# Of the paper: tokens of a rank, query heads and their width, s of a ring's step; FLOP/s of an A10.
_TOKENS, _HEADS, _WIDTH, _STEP_S, _FLOPS = 6000, 32, 128, 7.6e-3, 125e12
_BANDWIDTH = 20e9
_ITEMSIZE = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class TokenRingSetting:
    """What is sent, and over what links: ``mesh`` or ``ring``, ``full`` or ``half`` duplex.

    ``tokens`` are those of one rank; ``latency`` is a share of the seconds that a rank's keys take.
    """

    world: int = 4
    tokens: int = 64
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    precision: Literal["fp32", "bf16"] = "fp32"
    shape: Literal["mesh", "ring"] = "mesh"
    duplex: Literal["full", "half"] = "full"
    latency: float = 0.0

    @property
    def chunk_s(self) -> float:
        """Seconds that as many numbers as a rank has in its queries take over one link."""
        itemsize = _ITEMSIZE[self.precision]
        return self.tokens * self.heads * self.head_dim * itemsize / _BANDWIDTH


@dataclass(frozen=True, kw_only=True)
class LayerPasses:
    """Virtual seconds of both passes of a layer until the last rank is done; bytes sent by rank."""

    forward_s: float
    backward_s: float
    sent: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


def passes(name: str, setting: TokenRingSetting, *, seed: int = 0) -> LayerPasses:
    """Run attention and its backward pass on ranks with links, and read their clocks."""
    import torch

    attention = table("context").build(name)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[setting.precision]
    masks = [Mask.causal(setting.tokens * setting.world)]

    def rank(comm: LinkComm) -> tuple[float, float, float]:
        source = torch.Generator().manual_seed(seed * setting.world + comm.rank)

        def drawn(heads: int) -> torch.Tensor:
            size = (1, heads, setting.tokens, setting.head_dim)
            return torch.randn(size, generator=source).to(dtype)

        q = drawn(setting.heads).requires_grad_()
        k, v = (drawn(setting.kv_heads).requires_grad_() for _ in range(2))
        out = attention.attend(q, k, v, masks, comm)
        forward_s = comm.now
        torch.autograd.backward(out, drawn(setting.heads))
        return forward_s, comm.now, sum(comm.meter.totals().values())

    links = Links(
        latency_s=setting.latency * setting.chunk_s,
        bandwidth=_BANDWIDTH,
        shape=setting.shape,
        duplex=setting.duplex,
    )
    forward, step, sent = zip(*run_linked(setting.world, rank, links), strict=True)
    return LayerPasses(forward_s=max(forward), backward_s=max(step) - max(forward), sent=sent)


@part
class TokenRingClaim(BaseClaim, row=91):
    """Four ranks on a mesh of full-duplex links, and where a ring is the better one.

    Args:
        tokens: tokens of one rank; what is compared does not depend on it.
        heads: query heads, a multiple of 8.
        head_dim: width of a head; statistics are 1 / head_dim of what returns.
        latency: latency of a link, as a share of the seconds that a rank's queries take.
        turns: number of times that the processes are timed.
    """

    tokens: Annotated[int, MultipleOf(2), Ge(2)] = 64
    heads: Annotated[int, MultipleOf(8), Ge(8)] = 8
    head_dim: Annotated[int, Ge(1)] = 128
    latency: Annotated[float, Ge(0), Lt(math.inf)] = 1 / 256
    turns: Annotated[int, Ge(1)] = 8

    def collect(self, run: ClaimRun) -> None:
        """Read the clocks; the full run also tries other precisions, wirings and rank numbers."""
        whole = TokenRingSetting(
            tokens=self.tokens,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            latency=self.latency,
        )
        judged = {
            "simulated_step": whole,
            "grouped_queries_speedup": replace(whole, kv_heads=self.heads // 8),
            "physical_ring_speedup": replace(whole, shape="ring"),
        }
        ours = run.pick("tokenring", "zigzag")
        rows = run.details["steps"] = {}
        errors: list[float] = []
        for number, (name, setting) in enumerate(judged.items()):
            run.progress(name.replace("_", " "), number / 8)
            part_, ring = _pair(run.context, ours, setting)
            run.put(name, part_.step_s, ring.step_s)
            rows[name] = _row(part_, ring)
            errors += [abs(sent / _formula(setting) - 1) for sent in part_.sent]
        run.put("byte_error", errors)
        if not run.quick and not run.as_baseline:
            for number, (name, setting) in enumerate(_others(whole).items()):
                run.progress(name, 3 / 8 + number / 16)
                rows[name] = _row(*_pair(run.context, ours, setting))
        if run.quick or run.lacks(unavailable(), "forward_speedup", "step_speedup"):
            return
        run.progress("four processes", 0.9)
        self._run(run)

    def _run(self, run: ClaimRun) -> None:
        """Seconds of attention on four processes over a mesh of shaped links."""
        tokens, heads = _TOKENS // 4, _HEADS // 8
        given: dict[str, Any] = {
            "tokens": tokens, "heads": heads, "head_dim": _WIDTH, "turns": self.turns
        }  # fmt: skip
        block = partial(on_ranks, f"{_RANKS}:blocks_s", _WORLD, **given)
        block_s = max(map(statistics.median, run.remember("block", block)))
        # Of the whole block, n x n, a causal mask leaves half.
        share = _STEP_S / (2 * _TOKENS**2 * _HEADS * _WIDTH / _FLOPS)
        chunk_s = share * block_s / 2
        bandwidth = tokens * heads * _WIDTH * 4 / chunk_s
        parts = {"method": run.pick("tokenring", "zigzag"), "baseline": "zigzag"}
        with emulate(_WORLD, bandwidth=bandwidth, packet=9000, mesh=True) as network:
            ranks = on_ranks(
                f"{_RANKS}:attention_s", _WORLD, network=network, parts=parts, timeout_s=600.0,
                **given,
            )  # fmt: skip
        run.profile = f"{bandwidth / 1e6:.0f} MB/s a link, {block_s:.3f} s a block"
        setting = TokenRingSetting(heads=heads, kv_heads=heads, head_dim=_WIDTH)
        limits = [passes(name, setting) for name in ("zigzag", "tokenring")]
        for name, which in (("forward_speedup", "forward"), ("step_speedup", "both")):
            ours, ring = (slowest(ranks, f"{arm} {which}") for arm in parts)
            ends = [one.forward_s if which == "forward" else one.step_s for one in limits]
            run.put(name, ours, ring, bound=ends[0] / ends[1])
            times = (statistics.median(one) / chunk_s for one in (ours, ring))
            run.profile += "; {}: {:.2f} times a chunk's seconds, the ring {:.2f}".format(
                which, *times
            )


def _others(whole: TokenRingSetting) -> dict[str, TokenRingSetting]:
    grouped = replace(whole, kv_heads=whole.heads // 8)
    return {
        "bf16": replace(whole, precision="bf16"),
        "bf16, grouped queries": replace(grouped, precision="bf16"),
        "bf16, physical ring": replace(whole, precision="bf16", shape="ring"),
        "grouped queries, physical ring": replace(grouped, shape="ring"),
        "two query heads a key/value head": replace(whole, kv_heads=whole.heads // 2),
        "half duplex": replace(whole, duplex="half"),
        "2 ranks": replace(whole, world=2),
        "8 ranks": replace(whole, world=8),
    }


def _pair(
    context: ExperimentContext, ours: str, setting: TokenRingSetting
) -> tuple[LayerPasses, LayerPasses]:
    """What ``ours`` and the ring took; each of them is run once."""
    results = [
        context.remember(f"{name} {setting}", partial(passes, name, setting, seed=context.seed))
        for name in (ours, "zigzag")
    ]
    return results[0], results[1]


def _formula(setting: TokenRingSetting) -> float:
    """Bytes that one rank sends in both passes, by the part's closed form."""
    form = tokenring_traffic(
        setting.tokens, setting.heads, setting.kv_heads, setting.head_dim, setting.world
    )
    itemsize = _ITEMSIZE[setting.precision]
    return float(form.forward.num_bytes(itemsize) + form.backward.num_bytes(itemsize))


def _row(ours: LayerPasses, ring: LayerPasses) -> dict[str, float]:
    return {
        "forward_speedup": ring.forward_s / ours.forward_s,
        "backward_speedup": ring.backward_s / ours.backward_s,
        "step_speedup": ring.step_s / ours.step_s,
        "step_s": ours.step_s,
        "ring_step_s": ring.step_s,
        "sent_bytes": ours.sent[0],
        "ring_sent_bytes": ring.sent[0],
    }
