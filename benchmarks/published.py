"""Replay the published runs: docs/scoreboard.md, its pictures, results/curves/published.json.

python benchmarks/published.py            write them
python benchmarks/published.py --check    exit 1 when the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.cost.published.page import markdown, write
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.serving_scoreboard import score_serving

ROOT = Path(__file__).parent.parent
PICTURE = "assets/published-{kind}.svg"


def main(words: list[str]) -> int:
    """Write the page, or check it."""
    boards = (score_training(), score_serving())
    page = ROOT / "docs" / "scoreboard.md"
    if "--check" in words:
        if page.exists() and page.read_text() == markdown(*boards, picture=PICTURE):
            return 0
        print("docs/scoreboard.md is out of date: python benchmarks/published.py", file=sys.stderr)
        return 1
    write(page, ROOT / "docs" / "assets", ROOT / "results" / "curves" / "published.json", *boards)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
