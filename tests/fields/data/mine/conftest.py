"""Rates that are timed once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from own_home import own_home


@pytest.fixture(scope="session")
def _timed_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_home(tmp_path_factory.mktemp("mining") / "home")


@pytest.fixture
def shared_home(_timed_home: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", _timed_home)
    return Path(_timed_home)
