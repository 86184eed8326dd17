"""Docstrings spell references as Sphinx does; pages show them as plain code.

The gallery of claims is written from ``results/`` into the site, as files that links
are checked against like any other.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?(?:[\w.]*\.)?(\w+)</code>")
_ROOT = Path(__file__).parent.parent


def on_page_content(html: str, **_: Any) -> str:
    """Replace ``:class:`~shoal.ir.Plan``` by ``Plan``."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the gallery under ``gallery/``."""
    if str(_ROOT / "src") not in sys.path:
        sys.path.insert(0, str(_ROOT / "src"))
    from shoal.claims.gallery.publish import gallery_files

    for name, content in gallery_files(_ROOT / "results"):
        files.append(File.generated(config, f"gallery/{name}", content=content))
    return files
