"""The pages of the gallery as text; where they link is the caller's to say."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.claims.gallery.papers import EVIDENCE, MEANINGS, Paper, counts, needs
from shoal.claims.gallery.pictures import MetricOverview, samples_chart
from shoal.core.web import NavigationLink, WebSite

PACKAGE = "shoal.claims.gallery"

GROUPS = {"status": "Status", "room": "Room", "evidence": "Evidence"}


@dataclass(frozen=True, kw_only=True)
class GalleryPaths:
    """Where the pages lie, as the links say it.

    Args:
        index: the list of all papers.
        paper: a paper's page; has ``{id}``.
        group: the papers of one status, room or grade of evidence; has ``{kind}`` and
            ``{value}``.
        results: a results file; has ``{claim}``.
    """

    index: str = "index.html"
    paper: str = "paper-{id}.html"
    group: str = "{kind}-{value}.html"
    results: str = "results/{claim}.json"

    def of_paper(self, paper: Paper) -> str:
        """Link to a paper."""
        return self.paper.format(id=paper.row.id)

    def of_group(self, kind: str, value: str) -> str:
        """Link to a group of papers."""
        return self.group.format(kind=kind, value=re.sub(r"[^a-z0-9]+", "-", value.lower()))

    def of_results(self, paper: Paper) -> str:
        """Link to a results file."""
        return self.results.format(claim=paper.row.claim)


@functools.cache
def site() -> WebSite:
    """Templates and assets of the static gallery."""
    nav = (
        NavigationLink("All papers", "index.html"),
        NavigationLink("Works", "status-works.html"),
        NavigationLink("Falls short", "status-falls-short.html"),
        NavigationLink("Noisy", "status-noisy.html"),
        NavigationLink("Planned", "status-planned.html"),
        NavigationLink("Published runs", "scoreboard.html"),
    )
    return WebSite(PACKAGE, assets="assets/", nav=nav)


def facets(papers: Sequence[Paper]) -> dict[str, dict[str, int]]:
    """The groups that papers can be shown by: kind -> value -> number of papers."""
    rooms = sorted({paper.row.room for paper in papers})
    return {
        "status": counts(papers),
        "room": {room: sum(paper.row.room == room for paper in papers) for room in rooms},
        "evidence": {g: sum(paper.evidence == g for paper in papers) for g in EVIDENCE},
    }


def render_index(
    papers: Sequence[Paper],
    *,
    every: Sequence[Paper] | None = None,
    group: tuple[str, str] | None = None,
    pages: WebSite | None = None,
    places: GalleryPaths | None = None,
) -> str:
    """The list of papers as a page.

    Args:
        papers: what is listed, in this order.
        every: all papers, whose counts stand above the list; ``papers`` if not given.
        group: (kind, value) of the group that ``papers`` is, if it is not all of them.
        pages: site whose base page is used.
        places: where links lead.
    """
    places = places or GalleryPaths()
    here = places.of_group(*group) if group else places.index
    return (pages or site()).render(
        "gallery_index.html",
        papers=papers,
        total=len(every if every is not None else papers),
        facets=facets(every if every is not None else papers),
        group=group,
        groups=GROUPS,
        meanings=MEANINGS,
        grades=EVIDENCE,
        glance=_glance,
        places=places,
        here=here,
    )


def render_row(
    paper: Paper,
    *,
    pages: WebSite | None = None,
    places: GalleryPaths | None = None,
    here: str = "",
) -> str:
    """A paper's page.

    Args:
        paper: what is shown.
        pages: site whose base page is used.
        places: where links lead.
        here: entry of the navigation that is marked as the current one.
    """
    return (pages or site()).render(
        "gallery_paper.html",
        paper=paper,
        charts=[samples_chart(one) for one in paper.measured],
        meanings=MEANINGS,
        grades=EVIDENCE,
        needs=needs,
        places=places or GalleryPaths(),
        here=here,
    )


def _glance(paper: Paper) -> MetricOverview | None:
    return MetricOverview(paper.measured, paper.row.name) if paper.measured else None
