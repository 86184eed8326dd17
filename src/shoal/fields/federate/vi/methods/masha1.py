"""MASHA1: extragradient from a reference point, with unbiased compression of differences.

Source: Beznosikov, Richtarik, Diskin, Ryabinin, Gasnikov, Distributed Methods with Compressed
Communication for Solving Variational Inequalities, with Theoretical Guarantees, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Self

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.protocols import UpdateCompressor
from shoal.fields.federate.vi.methods.moments import AdamMoments
from shoal.fields.federate.vi.protocols import MeanExchange, Place, Steps, ViCosts, ViError, ViWork
from shoal.ir import Machine


@part
class Masha1:
    """Send only compressed differences from a reference point, which is refreshed now and then.

    Both steps are taken from a mean of the newest point and the reference. Near a solution both are
    close, so what is compressed, and the noise of compressing it, vanishes.

    Args:
        refresh: probability of a refresh in an iteration; None for the ratio of a compressed
            message to a whole one, so that both cost the same.
        participants: workers that send in an iteration; 0 for all.
        stochastic: evaluate differences on drawn data.
        adam: scale the estimate by Adam's moments; a heuristic for networks.
    """

    refresh: Annotated[float, Gt(0), Le(1)] | None = None
    participants: Annotated[int, Ge(0)] = 0
    stochastic: bool = False
    adam: bool = False

    @classmethod
    def candidates(cls, work: ViWork, machine: Machine) -> Iterator[Self]:
        """With unbiased compressors."""
        if work.up.kind == work.down.kind == "unbiased":
            yield cls()

    def check(self, work: ViWork) -> None:
        """Both compressors are unbiased, and there are enough workers."""
        for where, one in (("compressor", work.up), ("server_compressor", work.down)):
            if one.kind != "unbiased":
                raise ViError(
                    f"{where}: {one} is biased, and masha1 needs an unbiased one such as rand_k, "
                    "natural, dithering or blocks8; masha2 takes this one"
                )
        if self.participants > work.workers:
            raise ViError(
                f"method.masha1.participants = {self.participants} of {work.workers} workers; "
                "take at most so many, or 0 for all"
            )

    def bound(self, work: ViWork) -> float | None:
        """The smaller of sqrt(p) / (2 C) and p / (2 mu), where C bounds the compressed operator."""
        if work.constants is None:
            return None
        p = refresh_of(self.refresh, work.up, work.size)
        q, served = (one.omega(work.size) for one in (work.up, work.down))
        # Of M workers, r that are drawn have a noise as if each sent with q M / r.
        q *= work.workers / (self.participants or work.workers)
        squares = sum(q * one**2 for one in work.constants.lipschitz)
        others = (work.workers - 1) * work.workers * work.constants.mean_lipschitz**2
        c = math.sqrt(served * (squares + others)) / work.workers
        mu = work.constants.monotone
        return min(math.sqrt(p) / (2 * c), p / (2 * mu) if mu > 0 else math.inf)

    def costs(self, work: ViWork, step: float) -> ViCosts:
        """A compressed vector in each iteration, a whole one in each refresh."""
        p = refresh_of(self.refresh, work.up, work.size)
        share = (self.participants or work.workers) / work.workers
        mu = work.constants.monotone if work.constants else 0.0
        whole = 32.0 * work.size
        return ViCosts(
            iterations=work.log_error * max(1 / p, 1 / (step * mu)) if mu else None,
            up_bits=work.up.bits(work.size) * share + p * whole,
            down_bits=work.down.bits(work.size) + p * whole,
            exchanges=1 + p,
            evaluations=1 + p,
        )

    def steps(self, place: Place) -> Steps:
        """One compressed mean in each iteration."""
        p = refresh_of(self.refresh, place.up, place.operator.size)
        z = w = place.operator.start()
        moments = AdamMoments(len(z), used=self.adam)
        mine = place.value(w)
        all_w = yield place.whole(mine)
        while True:
            center = (1 - p) * z + p * w
            half = place.prox(center - place.step * moments.tried(all_w))
            sample = place.sample(self.stochastic)
            before = place.value(w, sample) if sample else mine
            members = place.members(self.participants)
            out = members is not None and place.worker not in members
            change = mine if out else place.value(half, sample) - before
            g = yield MeanExchange(vector=change, up=place.up, down=place.down, members=members)
            z = place.prox(center - place.step * moments.added(all_w + g))
            refreshed = place.coin(p)
            place.done(z)
            if refreshed:
                w, mine = z, place.value(z)
                all_w = yield place.whole(mine)


def refresh_of(refresh: float | None, compressor: UpdateCompressor, size: int) -> float:
    """The probability of a refresh: as given, or the ratio of bits of a compressed vector."""
    return min(1.0, compressor.bits(size) / (32 * size)) if refresh is None else refresh
