"""Writing the gallery as a directory that works from the file system."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from shoal.claims.gallery.pages import GROUPS, GalleryPaths, facets, render_index, render_row
from shoal.claims.gallery.pages import site as gallery_site
from shoal.claims.gallery.papers import Paper, index_rows
from shoal.claims.gallery.scoreboard import SCOREBOARD, render_scoreboard
from shoal.claims.shipped import shipped_records
from shoal.core.errors import ConfigError, require
from shoal.core.files import write_dir_atomic

MARKER = "gallery.json"


def gallery_files(results: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of the gallery: (path inside it, content); the same for the same results.

    Args:
        results: directory of the results files.

    Raises:
        ConfigError: there is no such directory.
    """
    papers = _papers(results)
    names = []
    for name, content in _files(papers, GalleryPaths(), results):
        names.append(name)
        yield name, content()
    about = {"format": 1, "papers": len(papers), "files": sorted(names)}
    yield MARKER, (json.dumps(about, indent=1) + "\n").encode()


def gallery_names(results: Path) -> list[str]:
    """Paths of all files of the gallery inside it; no page is written.

    Args:
        results: directory of the results files.

    Raises:
        ConfigError: there is no such directory.
    """
    return [*(name for name, _ in _files(_papers(results), GalleryPaths(), results)), MARKER]


def write_gallery(results: Path, out: Path) -> Path:
    """Write the gallery, in place of an older one.

    Args:
        results: directory of the results files.
        out: the directory to write; made if it is missing. An older gallery in it is
            replaced once the new one is complete.

    Returns:
        Path: of the first page.

    Raises:
        ConfigError: there are no results, or ``out`` holds something else.
    """
    _require_results(results)  # before anything is made
    old = _replaceable(out)
    fresh = out.with_name(f".{out.name}.new.{os.getpid()}")
    with write_dir_atomic(fresh, error=ConfigError) as directory:
        for name, content in gallery_files(results):
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    aside = out.with_name(f".{out.name}.old.{os.getpid()}")
    try:
        if old:
            os.rename(out, aside)
        try:
            os.rename(fresh, out)
        except OSError:
            if old:
                os.rename(aside, out)
            raise
    except OSError as cause:
        raise ConfigError(
            f"{out}: cannot be replaced ({cause.strerror}); choose another place"
        ) from cause
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)
    return out / GalleryPaths().index


def _papers(results: Path) -> list[Paper]:
    _require_results(results)
    return index_rows(results)


def _require_results(results: Path) -> None:
    """Refuse a directory that is not there, where no verdicts came with the package."""
    require(
        results.is_dir() or bool(shipped_records()),
        "results",
        str(results),
        expected="a directory with results files",
        hint="run a claim first, or name the directory with --results",
    )


def _files(
    papers: list[Paper], places: GalleryPaths, results: Path
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Path of each file, and what makes its content."""
    yield places.index, lambda: render_index(papers).encode()
    by_kind = facets(papers)
    for kind in GROUPS:
        for value in by_kind[kind]:
            yield places.of_group(kind, value), partial(_group, papers, kind, value)
    for paper in papers:
        yield places.of_paper(paper), partial(_row, paper)
    yield SCOREBOARD, lambda: render_scoreboard(gallery_site()).encode()
    claims = {paper.row.claim: paper for paper in papers if paper.linked}
    for claim, paper in sorted(claims.items(), key=str):
        yield places.of_results(paper), (results / f"{claim}.json").read_bytes
    for name in gallery_site().assets():
        yield f"assets/{name}", partial(gallery_site().asset, name)


def _group(papers: list[Paper], kind: str, value: str) -> bytes:
    chosen = [paper for paper in papers if _value(paper, kind) == value]
    return render_index(chosen, every=papers, group=(kind, value)).encode()


def _row(paper: Paper) -> bytes:
    return render_row(paper).encode()


def _value(paper: Paper, kind: str) -> str | None:
    return {"status": paper.status, "room": paper.row.room, "evidence": paper.evidence}[kind]


def _replaceable(out: Path) -> bool:
    """Whether ``out`` holds an older gallery.

    Raises:
        ConfigError: it holds something that is not of a gallery.
    """
    if not out.exists() and not out.is_symlink():
        return False
    require(
        out.is_dir() and not out.is_symlink(),
        "out",
        str(out),
        expected="a directory that is new, empty or an older gallery",
    )
    result = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    if not result:
        return True
    foreign = sorted(result - _written(out / MARKER))
    require(
        not foreign,
        "out",
        str(out),
        expected="a directory that is new, empty or an older gallery",
        hint=f"it holds {foreign[0]!r}, which no gallery wrote; choose another place"
        if foreign
        else "",
    )
    return True


def _written(marker: Path) -> set[str]:
    """The files that an older gallery lists as its own."""
    try:
        files = json.loads(marker.read_text(encoding="utf-8"))["files"]
        return {MARKER, *map(str, files)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()  # no gallery wrote this directory, so all of it is foreign
