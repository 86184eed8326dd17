"""A real browser, for the tests of pages."""

from __future__ import annotations

import contextlib
import gc
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Chromium under Playwright; the test is skipped where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on this machine; install it with: apt-get install chromium")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
    # Playwright may end its loop before the pipe of its driver is closed, and leaves that to the
    # collector, which would warn of it in a later test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
