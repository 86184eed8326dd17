"""What benchmarks/dedupe.py runs in the environment of the peers: prints one line of JSON.

Usage: python dedupe_peers.py NAME DATA PLACE OPTIONS, where OPTIONS is JSON.

Imports are not timed. ``datatrove`` is its four stages; ``text_dedup`` its command. Both say which
documents they keep together: the first document of each document's cluster.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any


def _first(of: dict[int, Any]) -> dict[int, int]:
    """Document -> the first document of its cluster."""
    first: dict[Any, int] = {}
    for at in sorted(of):
        first.setdefault(of[at], at)
    return {at: first[of[at]] for at in of}


def whole_words(data: str, place: str, options: dict[str, Any]) -> dict[str, Any]:
    """The words of a file that datatrove's English tokenizer does not cut or change."""
    from datatrove.utils.text import simplify_text
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    tokenizer = load_word_tokenizer("eng")
    words = Path(data).read_text().split()
    return {"words": [w for w in words if tokenizer.word_tokenize(simplify_text(w)) == [w]]}


def datatrove(data: str, place: str, options: dict[str, Any]) -> dict[str, Any]:
    """Signatures, buckets, clusters, filter, each with one worker."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter
    from datatrove.utils.hashing import HashConfig

    config = minhash.MinhashConfig(
        num_buckets=options["bands"],
        hashes_per_bucket=options["rows"],
        seed=options["seed"],
        hash_config=HashConfig(**options["hash"]),
    )
    reader = ParquetReader(data, text_key="text", id_key="id")
    names = [f"{place}/{name}" for name in ("signatures", "buckets", "remove", "kept")]
    signatures, buckets, remove, kept = names
    stages = [
        ([reader, minhash.MinhashDedupSignature(signatures, config)], 1),
        ([minhash.MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets),
        ([minhash.MinhashDedupCluster(buckets, remove, config, save_cluster_id=True)], 1),
        ([reader, minhash.MinhashDedupFilter(remove), ParquetWriter(kept)], 1),
    ]
    begin = time.perf_counter()
    for pipeline, tasks in stages:
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{place}/logs").run()
    seconds = time.perf_counter() - begin
    raw = Path(remove, "000000.clusters").read_bytes()
    return {"seconds": seconds, "of": _first(dict(struct.iter_unpack("<II", raw)))}


def text_dedup(data: str, place: str, options: dict[str, Any]) -> dict[str, Any]:
    """Its command, with one process."""
    from text_dedup import minhash

    files = [str(path) for path in sorted(Path(data).glob("*.parquet"))]
    words = [
        *("--path", "parquet", "--data_files", files[0], "--split", "train"),
        *("--cache_dir", f"{place}/cache", "--output", f"{place}/kept", "--column", "text"),
        *("--num_perm", str(options["num_perm"]), "--threshold", str(options["threshold"])),
        *("--ngram", "5", "--num_proc", "1"),
    ]
    begin = time.perf_counter()
    minhash.main(words, standalone_mode=False)
    seconds = time.perf_counter() - begin
    clusters = {at: minhash.uf.find(at) for at in list(minhash.uf.parent)}
    return {"seconds": seconds, "of": _first(clusters)}


if __name__ == "__main__":
    name, data, place, options = sys.argv[1:]
    run = {"datatrove": datatrove, "text_dedup": text_dedup, "whole_words": whole_words}[name]
    print("\n" + json.dumps(run(data, place, json.loads(options))))
