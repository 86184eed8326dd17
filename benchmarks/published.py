"""Replay the published runs: two pages of docs, their pictures, results/curves/published.json.

python benchmarks/published.py            write them
python benchmarks/published.py --check    exit 1 when the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.cost.published.page import WRONG, markdown, misses, write
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.serving_scoreboard import score_serving

ROOT = Path(__file__).parent.parent
PICTURE = "assets/published-{kind}.svg"


def main(words: list[str]) -> int:
    """Write the page, or check it."""
    boards = (score_training(), score_serving())
    page = ROOT / "docs" / "scoreboard.md"
    if "--check" in words:
        wanted = {page: markdown(*boards, picture=PICTURE), page.with_name(WRONG): misses(*boards)}
        old = [path.name for path, text in wanted.items() if path.read_text() != text]
        if not old:
            return 0
        print(f"{', '.join(old)}: out of date: python benchmarks/published.py", file=sys.stderr)
        return 1
    write(page, ROOT / "docs" / "assets", ROOT / "results" / "curves" / "published.json", *boards)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
