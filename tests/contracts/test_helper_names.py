"""Helper modules of tests and benchmarks are imported by their bare names: no two share one."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_two_helpers_have_the_same_name():
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    # Files of a package are imported through it.
    names = Counter(
        file.stem
        for file in files
        if not (file.parent / "__init__.py").exists() and file.name != "conftest.py"
        and not file.name.startswith("test_")
    )  # fmt: skip
    assert {name for name, times in names.items() if times > 1} == set()
