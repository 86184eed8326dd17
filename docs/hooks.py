"""Docstrings spell references as Sphinx does; pages show them as plain code."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?(?:[\w.]*\.)?(\w+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Replace ``:class:`~shoal.ir.Plan``` by ``Plan``."""
    return _ROLE.sub(r"<code>\1</code>", html)
