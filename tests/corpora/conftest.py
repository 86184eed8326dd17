from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shoal.corpora.tokens import TokenSet, prepare

# The tests of this room share modules that are no tests.
sys.path.insert(0, str(Path(__file__).parent))

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "one",
    "lazy",
    "dog",
    "in",
    "green",
    "hills",
)


def story(number: int, length: int = 40) -> str:
    picked = (WORDS[(number * 7 + i**3 + number * i) * 31 % 97 % 12] for i in range(length))
    return f"Story {number}: " + " ".join(picked) + f" {number**3}.\n"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    """200 short documents in shards so small that windows straddle them."""
    root = tmp_path_factory.mktemp("small")
    path = root / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": story(n, n % 50)}) + "\n" for n in range(200)))
    data = {"name": "jsonl", "path": str(path)}
    return prepare(data, vocab_size=320, cache=root / "cache", shard_bytes=1000)


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A directory of 60 text files."""
    root = tmp_path / "stories"
    for number in range(60):
        file = root / f"part{number % 3}" / f"{number:03d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(story(number))
    return root
