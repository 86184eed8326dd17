"""Twenty gigabytes of JSON Lines go through filters in four gigabytes of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from own_home import own_home
from shoal.corpora.stdlib import Stdlib

GIGABYTES = float(os.environ.get("SOAK_GB", "20"))
FILES, MOST = 8, 4e9


def written(place: Path) -> int:
    """Source code and docstrings, each document with its number; how many there are."""
    texts = [json.dumps(one.text[:20_000])[1:-1] for one in Stdlib().documents()]
    size, rows = 0, 0
    for at in range(FILES):
        with (place / f"{at}.jsonl").open("w") as file:
            while size < GIGABYTES * 1e9 * (at + 1) / FILES:
                line = f'{{"number": {rows}, "text": "{rows} {texts[rows % len(texts)]}"}}\n'
                size += file.write(line)
                rows += 1
    return rows


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process and of all that it started, pages that they share counted once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError):
            continue
    return total


@pytest.mark.soak
def test_more_than_memory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = written(tmp_path / "data")
    words = "run curate data --method filters --pool local --workers 2 -m laptop --anyway --dir run"
    environment = {**os.environ, "SHOAL_HOME": own_home(tmp_path / "home")}
    begin, most = time.monotonic(), 0
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *words.split()], cwd=tmp_path, env=environment
    ) as child:
        watched = psutil.Process(child.pid)
        while child.poll() is None:
            most = max(most, memory_of(watched))
            time.sleep(0.5)
    seconds = time.monotonic() - begin
    assert child.returncode == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    size = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    print(f"{size / 1e9:.1f} GB in {seconds:.0f} s, {most / 1e9:.2f} GB of memory at most")
    assert report["measured"]["rows"] == rows
    files = (tmp_path / "run" / "kept").glob("*.parquet")
    kept = sum(pq.read_metadata(file).num_rows for file in files)
    assert kept == round(report["measured"]["kept_share"] * rows)
    assert most <= MOST
