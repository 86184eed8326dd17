"""Filters of text: the share of the reading rate that they reach, datatrove beside them, and loss.

Usage: python benchmarks/filters.py [rates] [peer --python PYTHON] [effect] [--mb N] [--dry]

Documents are the text of this machine: documentation, licences, source code and tables of its
Python packages and of /usr/share. `peer` wants a Python that has datatrove: make a virtual
environment and install datatrove[processing]==0.10.1 and spacy there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import RESULTS, Row, finish, require_quiet

from shoal.core.measure import interleave
from shoal.core.parts import table
from shoal.fields.data.curate.effect import (
    ALL,
    EffectSettings,
    change,
    chosen,
    compare,
    split_rows,
)
from shoal.fields.data.curate.protocols import CurateProblem
from shoal.fields.data.filters.method import FilterChain, FilteredRows
from shoal.fields.data.filters.protocols import FilterBatch, TextFilter
from shoal.fields.data.sources import Source, open_source

TABLE = RESULTS.parent / "data" / "filters.json"
ENDINGS = (".md", ".rst", ".txt", ".py", ".json", ".csv", ".html", ".xml", ".c", ".h", ".1", "")
RULES = ("length", "gopher_quality", "fineweb", "gopher_repetition", "c4", "pii")
# What datatrove has too.
PEERS = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
LARGEST = 200_000
LEAST_SHARE = 0.6


def texts_of_this_machine(limit: int) -> Iterator[dict[str, str]]:
    """Documents of its packages, a part of each directory; ``limit`` bytes of them."""
    places = [Path(sysconfig.get_paths()["purelib"]), Path("/usr/share")]
    files = sorted(
        Path(root, name)
        for place in places
        for root, _, names in os.walk(place)
        for name in names
        if name.endswith(ENDINGS[:-1]) or "." not in name
    )
    # In an order that has nothing to do with where they lie.
    order = np.random.default_rng(0).permutation(len(files))
    size = 0
    for at in order:
        try:
            text = files[at].read_bytes()[:LARGEST].decode()
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) < 100 or "\0" in text:
            continue
        yield {"name": str(files[at].name), "text": text}
        size += len(text)
        if size > limit:
            return


def written(place: Path, megabytes: int) -> dict[str, Source]:
    """The documents as JSON Lines and as Parquet."""
    rows = list(texts_of_this_machine(megabytes * 10**6))
    lines, columns = place / "documents.jsonl", place / "documents.parquet"
    lines.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), columns, compression="zstd", row_group_size=2000)
    return {"jsonl": open_source(str(lines)), "parquet": open_source(str(columns))}


def read(source: Source, part: TextFilter | None) -> int:
    """Read all rows, through a filter if there is one; rows that are kept."""
    chain = None if part is None else FilterChain(("filter",), (part,), "text")
    return sum(
        (batch if chain is None else chain.kept(batch)).num_rows
        for shard in source.shards()
        for batch in shard.batches(4096)
    )


def rates(sources: dict[str, Source], against: Sequence[str], pairs: int) -> dict[str, Any]:
    """Seconds of reading alone and of reading through each filter, turn by turn, one process."""
    filters: dict[str, TextFilter] = {name: table("text_filter").build(name) for name in RULES}
    if against:
        options = {"name": "decontaminate", "against": tuple(against)}
        filters["decontaminate"] = table("text_filter").build(options)
    result = {}
    for form, source in sources.items():
        arms = {"read": lambda source=source: read(source, None)}
        for name, part in filters.items():
            arms[name] = lambda source=source, part=part: read(source, part)
        times = interleave(arms, pairs, warmup=1)
        result[form] = {
            "bytes": source.num_bytes,
            "seconds": {name: list(taken) for name, taken in times.seconds.items()},
            "share": {
                name: {"value": one.value, "low": one.low, "high": one.high}
                for name in filters
                for one in [times.ratio("read", name)]
            },
        }
    return result


def beside_datatrove(source: Source, python: str, count: int, pairs: int) -> dict[str, Any]:
    """Verdicts and documents a second of datatrove on the same documents, in its own Python."""
    rows = [text for batch in source.batches() for text in batch.column("text").to_pylist()][:count]
    script = Path(__file__).with_name("filters_peer.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        [python, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(message: dict[str, Any]) -> Any:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    ask({"texts": rows})
    texts, result = pa.array(rows, pa.large_string()), {}
    for name in PEERS:
        part = table("text_filter").build(name)
        ours = part.judge(FilterBatch(texts)).broken
        answers = {words: ask({"filter": name, "words": words}) for words in ("spaces", "own")}
        seconds: dict[str, list[float]] = {"shoal": [], "datatrove": []}
        for _ in range(pairs):
            begin = time.perf_counter()
            part.judge(FilterBatch(texts))
            seconds["shoal"].append(time.perf_counter() - begin)
            seconds["datatrove"].append(ask({"filter": name, "words": "own"})["seconds"])
        result[name] = {
            "seconds": seconds,
            "kept": int((ours < 0).sum()),
            "documents": len(rows),
            "differ": {
                words: sorted(
                    (part.reasons[at] if at >= 0 else "kept", their or "kept", rows[row][:80])
                    for row, (at, their) in enumerate(zip(ours, answer["verdicts"], strict=True))
                    if (at >= 0) != bool(their)
                )
                for words, answer in answers.items()
            },
        }
    process.stdin.close()
    process.wait()
    return result


def effects(
    source: Source, place: Path, settings: EffectSettings, names: Sequence[str]
) -> dict[str, Any]:
    """Held-out bits a byte after training on what each filter keeps, and on all rows."""
    default = FilteredRows()
    problem = CurateProblem(source, "text", ("text",), 1.0, place)
    for side in split_rows(problem, place, settings):
        assert side in ("train", "heldout")
    everything, prose = chosen(default, problem, place / "heldout")
    heldout = {ALL: everything, "rows kept by the default filters": prose}
    train: dict[str, list[str]] = {}
    for name in names:
        one = table("curator").build({"name": "filters", "filters": [name]})
        (place / name).mkdir(exist_ok=True)
        (place / name / "train.parquet").hardlink_to(place / "train.parquet")
        train[ALL], train[name] = chosen(one, problem, place / name / "train")
    (place / "default").mkdir()
    (place / "default" / "train.parquet").hardlink_to(place / "train.parquet")
    _, train["default"] = chosen(default, problem, place / "default" / "train")
    losses = compare(train, heldout, settings, lambda done, text: print(f"{done:4.0%} {text}"))
    return {
        "settings": settings.model_dump(mode="json"),
        "bytes": {name: sum(map(len, texts)) for name, texts in train.items()},
        "losses": losses,
        "change": {
            name: {rows: change(one[rows], losses[ALL][rows]).model_dump() for rows in heldout}
            for name, one in losses.items()
            if name != ALL
        },
    }


def rows_of(parts: dict[str, Any]) -> list[Row]:
    """What is judged."""
    rows = []
    for form, one in parts.get("rates", {}).items():
        for name in ("length", "gopher_quality", "fineweb", "gopher_repetition", "c4"):
            share = one["share"][name]
            note = f"reading alone over reading through {name}, one process, {form}"
            rows.append(
                Row(
                    f"filters: {name} of the reading rate, {form}",
                    share["value"], "", ">=", LEAST_SHARE, note, share["low"], share["high"],
                )
            )  # fmt: skip
    for name, one in parts.get("peer", {}).items():
        ours, theirs = (np.array(one["seconds"][who]) for who in ("shoal", "datatrove"))
        ratio = theirs / ours
        rows.append(
            Row(
                f"filters: {name} over datatrove, documents a second",
                float(np.median(ratio)), "x", ">=", 1.0,
                f"{one['documents']} documents in memory, one process each",
                float(ratio.min()), float(ratio.max()),
            )
        )  # fmt: skip
        same = 1 - len(one["differ"]["spaces"]) / one["documents"]
        rows.append(
            Row(
                f"filters: {name}, verdicts as datatrove's with the same words",
                same, "", ">=", 1.0 if name != "c4" else 0.99, "share of the documents",
            )
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=["rates", "peer", "effect"])
    parser.add_argument("--python", help="a Python that has datatrove")
    parser.add_argument("--against", nargs="*", default=[], help="benchmarks of decontaminate")
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--documents", type=int, default=2000, help="that datatrove judges")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--filters", nargs="*", default=RULES, help="whose effect is measured")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    if not given.busy:
        require_quiet()
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sources = written(place, given.mb)
        if "rates" in given.what:
            parts["rates"] = rates(sources, given.against, given.pairs)
        if "peer" in given.what:
            if given.python is None:
                parser.error("peer: give --python, a Python that has datatrove")
            parts["peer"] = beside_datatrove(
                sources["parquet"], given.python, given.documents, given.pairs
            )
        if "effect" in given.what:
            settings = EffectSettings(tokens=given.tokens, seeds=given.seeds)
            parts["effect"] = effects(sources["parquet"], place / "effect", settings, given.filters)
    print(json.dumps(parts, indent=1)[:20_000])
    finish(TABLE, parts, rows_of(parts), dry=given.dry)


if __name__ == "__main__":
    main()
