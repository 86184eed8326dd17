"""Web pages as text: one base page, one style sheet, templates that always escape.

The gallery and the dashboard look alike because both start here. Everything a page
needs (style sheet, scripts, icon) is a file of a package, so a page never asks another
machine for anything. See ``site.py``.
"""

from shoal.core.web.site import NavigationLink, WebSite, asset, render

__all__ = ["NavigationLink", "WebSite", "asset", "render"]
