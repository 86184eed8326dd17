"""[91] TokenRing: do queries that go onward and results that come back halve a ring's step?

Four ranks share a sequence over full-duplex links, one between every two of them; attention has
as many key/value heads as query heads. Data really move, on virtual clocks that count messages
alone: the step is bound by communication, whatever time its blocks would take. A step is the
forward and the backward pass of one layer, in fp32. Where the ring wins is claimed as well: with
eight query heads a key/value head, and on links between neighbours alone, where a return takes
several hops. The A/A run puts the ring in TokenRing's place.

The forward pass alone stays below 2 (N - 1) / N, 1.5 with four ranks: on a mesh the link from a
rank to the next also carries the result that returns over the distance N - 1. Backward, gradients
of keys and values follow the ring's chunks, so TokenRing gains more. With inputs in bf16 these
gradients stay in fp32 and it gains more still; fp32 compares the two without that.

Source: Wang et al., TokenRing, 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.thread_links import LinkComm, Links, run_linked
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part, table
from shoal.cost.context.traffic import tokenring_traffic
from shoal.ir.mask import Mask

__all__ = ["LayerPasses", "TokenRingClaim", "TokenRingSetting", "passes"]

_BANDWIDTH = 20e9
_ITEMSIZE = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class TokenRingSetting:
    """What is sent, and over what.

    Args:
        world: ranks that share the sequence.
        tokens: of one rank.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        precision: of queries, keys and values: fp32 or bf16.
        shape: ``mesh``, a link between every two ranks; ``ring``, between neighbours.
        duplex: ``full``, both directions of a link at once; ``half``, one at a time.
        latency: of a link, as a share of the seconds that the keys of a rank take.
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
    """What both passes of one layer took.

    Args:
        forward_s: virtual seconds until the last rank has its output.
        backward_s: from there until the last rank has its gradients.
        sent: bytes of each rank in both passes.
    """

    forward_s: float
    backward_s: float
    sent: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


def passes(name: str, setting: TokenRingSetting, *, seed: int = 0) -> LayerPasses:
    """Run attention and its backward pass on ranks with links, and read their clocks.

    Args:
        name: of the context part.
        setting: what is sent, and over what.
        seed: of the inputs.
    """
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
class TokenRingClaim(BaseClaim):
    """Four ranks on a mesh of full-duplex links, and where a ring is the better one.

    Args:
        tokens: of one rank; what is compared does not depend on it.
        heads: query heads, a multiple of 8.
        head_dim: width of a head; statistics are 1 / head_dim of what returns.
        latency: of a link, as a share of the seconds that a rank's queries take.
    """

    tokens: Annotated[int, MultipleOf(2), Ge(2)] = 64
    heads: Annotated[int, MultipleOf(8), Ge(8)] = 8
    head_dim: Annotated[int, Ge(1)] = 128
    latency: Annotated[float, Ge(0), Lt(math.inf)] = 1 / 256

    rows: ClassVar[tuple[int, ...]] = (91,)

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
            "step_speedup": whole,
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
            rows[name.removesuffix("_speedup")] = _row(part_, ring)
            errors += [abs(sent / _formula(setting) - 1) for sent in part_.sent]
        run.put("byte_error", errors)
        run.bounds["step_speedup"] = 2.0
        if not run.quick and not run.as_baseline:
            for number, (name, setting) in enumerate(_others(whole).items()):
                run.progress(name, 3 / 8 + number / 16)
                rows[name] = _row(*_pair(run.context, ours, setting))


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
