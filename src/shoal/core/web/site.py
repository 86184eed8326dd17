"""Templates and assets of packages, layered over the shared base page.

A package with pages has two directories: ``templates/`` (Jinja, ``*.html``) and
``assets/`` (what pages link). A template of it says ``{% extends "base.html" %}`` and
fills the blocks ``title``, ``head``, ``main`` and ``scripts``::

    site = WebSite("shoal.app.dash", assets="/assets/", nav=(NavigationLink("Runs", "/runs"),))
    html = site.render("runs.html", here="/runs", runs=runs)
    css = site.asset("style.css")

Every value is escaped and an undefined one is an error. A :class:`~shoal.core.svg.Chart`
is drawn by ``{{ chart | draw }}``; nothing else needs to be marked as safe.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import jinja2
from markupsafe import Markup

from shoal.core.errors import ConfigError, require
from shoal.core.sizes import human_bytes

_HERE = Path(__file__).parent
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9]+)+")

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}


@runtime_checkable
class Drawing(Protocol):
    """What ``draw`` draws, such as a :class:`~shoal.core.svg.Chart`."""

    def render(self) -> str:
        """The SVG element as text, with everything in it escaped."""


@dataclass(frozen=True)
class NavigationLink:
    """An entry of the page's navigation.

    Args:
        text: what it says.
        href: where it leads.
    """

    text: str
    href: str


class WebSite:
    """Pages and assets of some packages, over those of this one.

    Args:
        *packages: packages with ``templates/`` and ``assets/``, such as
            ``shoal.claims.gallery``; the first that has a file wins.
        assets: what stands before an asset's name in a link.
        nav: the navigation of every page.
        home: where the name of the product leads.
        filters: further filters of the templates, by name.
    """

    def __init__(
        self,
        *packages: str,
        assets: str = "assets/",
        nav: Sequence[NavigationLink] = (),
        home: str = "index.html",
        filters: Mapping[str, Callable[..., object]] | None = None,
    ) -> None:
        self._roots = (*(_root(package) for package in packages), _HERE)
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([root / "templates" for root in self._roots]),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.globals.update(assets=assets, nav=tuple(nav), home=home, here="")
        self._environment.filters.update(
            draw=_draw, number=number, seconds=seconds, size=size, status=status
        )
        self._environment.filters.update(filters or {})

    def render(self, template: str, **values: object) -> str:
        """A page, or a fragment of one, as text.

        Args:
            template: file under ``templates/``.
            **values: what it shows; ``assets``, ``nav``, ``home`` and ``here`` (the href
                of the navigation's current entry) may be given here too.

        Raises:
            ConfigError: no such template, or a value that it shows is missing.
        """
        try:
            return self._environment.get_template(template).render(**values)
        except jinja2.TemplateNotFound as cause:
            raise ConfigError(
                f"template {template!r}: there is no {str(cause)!r}; "
                f"there are {', '.join(sorted(self._environment.list_templates()))}"
            ) from cause
        except jinja2.UndefinedError as cause:
            raise ConfigError(f"template {template!r}: {cause}; give it to render()") from cause

    def render_alone(self, template: str, **values: object) -> str:
        """A page that is one file without links to others: style, script and icon stand in it.

        Args:
            template: one that extends ``alone.html``.
            **values: what it shows.
        """
        # Files of packages, which stand in the page as they are.
        style, script, icon = (
            Markup(self.asset(name).decode())  # noqa: S704
            for name in ("style.css", "theme.js", "favicon.svg")
        )
        return self.render(template, style=style, script=script, icon=icon, **values)

    def asset(self, name: str) -> bytes:
        """Content of a file under ``assets/``.

        Raises:
            ConfigError: there is no such asset; a path is none.
        """
        # Only plain names: a page's address must not reach other files.
        if _NAME.fullmatch(name):
            for root in self._roots:
                path = root / "assets" / name
                if path.is_file():
                    return path.read_bytes()
        raise ConfigError(f"asset {name!r}: expected one of {', '.join(self.assets())}")

    def assets(self) -> tuple[str, ...]:
        """Names of all assets."""
        return tuple(
            sorted(
                {
                    path.name
                    for root in self._roots
                    for path in (root / "assets").glob("*")
                    if path.is_file() and _NAME.fullmatch(path.name)
                }
            )
        )

    def media_type(self, name: str) -> str:
        """The media type to serve an asset with."""
        return MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream")


def render(template: str, *, package: str | None = None, **values: object) -> str:
    """Render a template of ``package``, or one of the shared ones; see :meth:`WebSite.render`."""
    return _site(package).render(template, **values)


def asset(name: str, *, package: str | None = None) -> bytes:
    """An asset of ``package``, or a shared one; see :meth:`WebSite.asset`."""
    return _site(package).asset(name)


def number(value: float | None, digits: int = 4) -> str:
    """A number as people read it: ``1,234``, ``0.01235``, ``1.2e-07``; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def seconds(value: float | None) -> str:
    """A duration: ``3.2 ms``, ``41 s``, ``2 h 05 min``; a dash for None."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 90:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def size(value: float | None) -> str:
    """An amount of memory: ``812 B``, ``1.50 GB``; a dash for None."""
    return "–" if value is None else human_bytes(value)


def status(name: str) -> str:
    """A status as people read it: ``falls_short`` becomes ``falls short``."""
    return name.replace("_", " ")


def _draw(drawing: Drawing | Iterable[Drawing]) -> Markup:
    """SVG of a drawing, which escapes its own texts."""
    charts = [drawing] if isinstance(drawing, Drawing) else drawing
    return Markup("").join(Markup(one.render()) for one in charts)  # noqa: S704 - see above


@functools.cache
def _site(package: str | None) -> WebSite:
    return WebSite(package) if package else WebSite()


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    where = spec.submodule_search_locations if spec is not None else None
    require(bool(where), "web.package", package, expected="an importable package")
    assert where is not None
    return Path(next(iter(where)))
