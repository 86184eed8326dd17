"""The values of a network of ranking peers: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.ir import Job, Plan, Report


class RankPeersJob(Job):
    """Run peers that rank documents by each other's clicks, with simulated users.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: documents of every peer: ``packages``, a directory of texts, or a file of JSON lines.
        method: how peers rank.
        peers: processes, each with one user.
        groups: interest groups of the users.
        clicks: after which the run ends, of all users.
        checkpoints: numbers of clicks at which rankings are judged, besides the last.
        heldout: queries of each user on which rankings are judged.
        pause_s: seconds between queries of a user.
        period_s: seconds between exchanges that a peer begins.
        newest: own clicks that a peer sends at most at a time.
        sample: clicks of others that it sends at most at a time.
        quota: clicks of each peer that are kept.
        offline: peers that lose their network after half of the clicks, the last ones.
        seed: random seed.
    """

    job: Literal["rank_peers"] = "rank_peers"
    name: str = Field(default="peers", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str = "packages"
    method: Annotated[Choice, Kind("ranker")] = Choice(name="grank")
    peers: Annotated[int, Field(ge=2, le=64)] = 8
    groups: Annotated[int, Field(ge=1, le=64)] = 4
    clicks: PositiveInt = 2000
    checkpoints: tuple[NonNegativeInt, ...] = (0, 100, 500)
    heldout: PositiveInt = 50
    pause_s: PositiveFloat = 0.05
    period_s: PositiveFloat = 0.3
    newest: PositiveInt = 32
    sample: NonNegativeInt = 32
    quota: PositiveInt = 1000
    offline: NonNegativeInt = 1
    seed: NonNegativeInt = 0


class RankPeersPlan(Plan[RankPeersJob]):
    """The plan of such a network.

    Args:
        documents: that each peer has.
    """

    documents: int


class RankPeersReport(Report[RankPeersPlan]):
    """The report; its details have the ``curve`` of the rankings."""
