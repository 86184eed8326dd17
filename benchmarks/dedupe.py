"""MinHash deduplication of short documents beside datatrove and text-dedup.

Usage: python benchmarks/dedupe.py --peers PYTHON [--documents N] [--rounds N] [--dry]

PYTHON is the interpreter of an environment with datatrove, text-dedup, spacy, datasets and pyarrow.
Each peer runs in a process of its own with one worker, after its imports; Shoal runs ``shoal run
dedupe`` in one process, from the same Parquet file to Parquet of what is kept. Documents are runs
of words of the standard library's text; a quarter are copies of earlier ones with some words
changed.

Timed are the peers' own defaults: 14 bands of 8 for datatrove with 64 bits of xxHash, 250 hash
functions for text-dedup at 0.7. The clusters have to be the same; for that datatrove runs once more
with 32 bits of SHA-1, as the hash functions are then those of ``scheme: datatrove``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import Row, record, require_quiet

from shoal.core.measure import bootstrap
from shoal.core.parts import Choice
from shoal.corpora.stdlib import Stdlib
from shoal.fields.data.dedupe.job import DedupeJob
from shoal.fields.data.dedupe.kind import DedupeKind
from shoal.machine import load

PEERS = Path(__file__).with_name("dedupe_peers.py")
_DATATROVE = {"bands": 14, "rows": 8, "seed": 1}
_SHA1, _XXHASH = {"precision": 32, "hash_fc": "sha1"}, {"precision": 64, "hash_fc": "xxhash"}
_TEXT_DEDUP = {"num_perm": 250, "threshold": 0.7}
_WANTED = {"datatrove": 3.0, "text_dedup": 5.0}


def ask(
    peers: str, name: str, data: str, place: Path, options: dict[str, Any], run: str = ""
) -> dict[str, Any]:
    """What a peer says in a process of its own; its files go to ``place / run``."""
    words = [peers, str(PEERS), name, data, str(place / run), json.dumps(options)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def write_documents(place: Path, count: int, peers: str) -> None:
    """Parquet with short documents, whose words are the same for all tokenizers."""
    text = "\n".join(one.text for one in Stdlib().documents())
    words = re.findall(r"[a-z]{2,}", text.lower())
    (place / "words.txt").write_text("\n".join(sorted(set(words))))
    whole = set(ask(peers, "whole_words", str(place / "words.txt"), place, {})["words"])
    stream = np.array([word for word in words if word in whole])
    draw = np.random.default_rng(0)
    documents: list[list[str]] = []
    for _ in range(count):
        if documents and draw.random() < 0.25:
            changed = list(documents[int(draw.integers(len(documents)))])
            for _ in range(int(draw.integers(0, 4))):
                changed[int(draw.integers(len(changed)))] = str(stream[draw.integers(len(stream))])
            documents.append(changed)
            continue
        # Runs of three words from many places: as many documents as wanted, none alike by chance.
        places = draw.integers(0, len(stream) - 3, int(draw.integers(10, 25)))
        documents.append([str(word) for at in places for word in stream[at : at + 3]])
    (place / "data").mkdir()
    table = pa.table({"id": [str(at) for at in range(count)], "text": map(" ".join, documents)})
    pq.write_table(table, place / "data" / "documents.parquet", row_group_size=50_000)


def ours(data: str, place: Path, options: dict[str, Any], seed: int, run: str) -> dict[str, Any]:
    """Seconds of a run, and the clusters of two and more."""
    choice = Choice(name="minhash", options={"scheme": "datatrove", **options})
    kind, machine = DedupeKind(), load("laptop")
    job = DedupeJob(data=data, columns=("text",), threshold=0.7, seed=seed, method=choice)
    plan = kind.plan(job, machine)[0]
    begin = time.perf_counter()
    kind.run(plan, place / run)
    seconds = time.perf_counter() - begin
    roots = pq.read_table(place / run / "clusters.parquet").column("cluster").to_numpy()
    several = np.isin(roots, roots[roots != np.arange(len(roots))])
    of = {int(row): int(roots[row]) for row in np.flatnonzero(several)}
    return {"seconds": seconds, "of": of}


def measure(peers: str, count: int, rounds: int) -> list[Row]:
    """Ours and each peer in turn; their clusters have to be ours."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dedupe-") as root:
        place = Path(root)
        write_documents(place, count, peers)
        data = str(place / "data")
        arms = {
            "datatrove": ({"num_perm": 112, "bands": 14, "rows": 8}, 1, _DATATROVE),
            "text_dedup": ({"num_perm": 250}, 42, _TEXT_DEDUP),
        }
        for name, (options, seed, theirs) in arms.items():
            same = theirs if name == "text_dedup" else {**theirs, "hash": _SHA1}
            timed = theirs if name == "text_dedup" else {**theirs, "hash": _XXHASH}
            one = ours(data, place, options, seed, f"{name}-ours")["of"]
            two = ask(peers, name, data, place, same, f"{name}-same")["of"]
            two = {int(at): first for at, first in two.items()}
            if one != two:
                apart = sum(one.get(at) != two.get(at) for at in one.keys() | two.keys())
                raise SystemExit(f"{name}: {apart} of {count} documents are in other clusters")
            runs = {
                "ours": partial(ours, data, place, options, seed),
                "peer": partial(ask, peers, name, data, place, timed),
            }
            spent: dict[str, list[float]] = {arm: [] for arm in runs}
            for turn in range(rounds):
                for arm in list(runs) if turn % 2 else reversed(list(runs)):
                    spent[arm].append(runs[arm](f"{name}-{arm}-{turn}")["seconds"])
            ratios = [b / a for a, b in zip(spent["ours"], spent["peer"], strict=True)]
            spread = bootstrap(ratios)
            rate = count / statistics.median(spent["ours"])
            rows.append(
                Row(
                    f"MinHash deduplication against {name.replace('_', '-')}",
                    spread.value,
                    "x",
                    ">=",
                    _WANTED[name],
                    f"{count:,} documents of 30 to 75 words, one worker each, {rounds} rounds in "
                    f"turn; ours {rate:,.0f} documents/s; the same {len(one):,} documents in the "
                    "same clusters",
                    low=spread.low,
                    high=spread.high,
                    samples={f"{arm}_s": seconds for arm, seconds in spent.items()},
                )
            )
    return rows


def main() -> None:
    """Measure, and record the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if not given.dry:
        require_quiet()
    rows = measure(given.peers, given.documents, given.rounds)
    if given.dry:
        for row in rows:
            print(f"{row.name}: {row.value:.2f} {row.unit} ({row.note})", row.samples)
        return
    record(rows)


if __name__ == "__main__":
    main()
