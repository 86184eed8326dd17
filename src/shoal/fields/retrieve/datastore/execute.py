"""A datastore from a plan to a report: build, search once, sample often, read."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import expanded, write_atomic, write_json
from shoal.core.parts import Choice
from shoal.cost.scaling.curve import CurvePoint
from shoal.cost.scaling.fit import FittedLaw, fit
from shoal.cost.scaling.picture import picture
from shoal.fields.data.shards import opened
from shoal.fields.retrieve.datastore.building import build_datastore
from shoal.fields.retrieve.datastore.job import DatastoreJob
from shoal.fields.retrieve.datastore.passages import PassageMap, TextFile, map_passages
from shoal.fields.retrieve.datastore.planning import divided
from shoal.fields.retrieve.datastore.store import MANIFEST, Datastore
from shoal.fields.retrieve.datastore.sweep import SampledLists, StoreSweep
from shoal.fields.retrieve.datastore.windows import EvalWindow, PassageReader, eval_windows
from shoal.fields.running import RunOutcome, RunProgress

ALL, FILTERED = "all", "filtered"
"""Names of the two sets of filters."""


class SizePoint(NamedTuple):
    """What a reader makes of a datastore of one size.

    Args:
        reader: its name.
        filters: name of the set.
        share: of the passages.
        seed: of the sample.
        tokens: of the sample.
        loss: mean over the windows, nats a token.
    """

    reader: str
    filters: str
    share: float
    seed: int
    tokens: int
    loss: float


def execute(job: DatastoreJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Build or open a datastore, and measure it.

    Raises:
        ShoalError: data, datastore or readers cannot be read, or do not go together.
    """
    places = [reader_directory(name) for name in job.readers]
    stored, heldout = divided(job)
    begin = time.perf_counter()
    store = _store(job, choice, stored, places, progress)
    build_s = time.perf_counter() - begin
    readers = {
        name: PassageReader(place, digest=store.manifest["tokenizer"], threads=job.threads)
        for name, place in zip(job.readers, places, strict=True)
    }
    windows = _windows(job, heldout, readers)
    progress.say(0.5, f"searching for {len(windows)} queries")
    queries = [one.query for one in windows]
    begin = time.perf_counter()
    store.search(queries, job.depth)
    query_s = (time.perf_counter() - begin) / len(queries)
    begin = time.perf_counter()
    sweep = StoreSweep(
        store, queries, against=[one.text for one in windows], options=job.retrieval(),
        filters={ALL: ()} | ({FILTERED: job.filters} if job.filters else {}),
    )  # fmt: skip
    settings = [
        (filters, share, seed)
        for filters in ([ALL, FILTERED] if job.filters else [ALL])
        for share in sorted(job.shares)
        for seed in range(job.seed, job.seed + (job.seeds if share < 1 else 1))
    ]
    lists = {
        (filters, share, seed): sweep.first(share, seed, filters)
        for filters, share, seed in settings
    }
    sweep_s = time.perf_counter() - begin
    begin = time.perf_counter()
    points: list[SizePoint] = []
    bare: dict[str, float] = {}
    for number, (name, reader) in enumerate(readers.items()):
        bare[name] = float(reader.losses(windows, [()] * len(windows)).mean())
        for at, ((filters, share, seed), some) in enumerate(lists.items()):
            texts = texts_of(store.passages, some)
            loss = float(reader.losses(windows, texts).mean())
            tokens = store.passages.tokens(share, seed)
            points.append(SizePoint(name, filters, share, seed, tokens, loss))
            done = (number + (at + 1) / len(lists)) / len(readers)
            progress.tick(0.6 + 0.4 * done, f"{name}: perplexity {math.exp(loss):.2f}")
    measured = {
        "build_s": build_s, "query_s": query_s, "sweep_s": sweep_s,
        "index_bytes": float(store.num_bytes), "passages": float(len(store)),
    }  # fmt: skip
    if readers:
        measured["read_s"] = time.perf_counter() - begin
        last = [one for one in points if one.reader == job.readers[0] and one.filters == ALL]
        measured["bare_perplexity"] = math.exp(bare[job.readers[0]])
        measured["perplexity"] = math.exp(last[-1].loss)
    measured["total_s"] = progress.seconds
    details = _written(job, progress.directory, points, bare, readers)
    details |= {
        "overlap": sweep.overlap,
        "dropped": sweep.dropped,
        "short": {f"{at}": some.short for at, some in lists.items() if some.short},
        "refilled": {f"{at}": some.refilled for at, some in lists.items() if some.refilled},
        "cut_prompts": {name: reader.cut for name, reader in readers.items()},
    }
    return RunOutcome(measured=measured, details=details)


def reader_directory(name: str) -> Path:
    """The directory of a reader; a model of the zoo is trained if it was not yet.

    Raises:
        ModelError: neither a directory nor a model of the zoo.
    """
    from shoal.train import zoo

    zoo.require_known(name)
    path = expanded(name)
    return path if path.is_dir() else zoo.trained(name)


def texts_of(passages: PassageMap, some: SampledLists) -> list[list[str]]:
    """Texts of the passages of each query, the best first."""
    ids = some.lists.ids
    known = np.unique(ids[ids >= 0])
    texts = dict(zip(known.tolist(), passages.texts(known), strict=True))
    return [[texts[one] for one in row if one >= 0] for row in ids.tolist()]


def _store(
    job: DatastoreJob,
    choice: Choice,
    stored: Sequence[TextFile],
    readers: Sequence[Path],
    progress: RunProgress,
) -> Datastore:
    place = expanded(job.store) if job.store else progress.directory / "store"
    if job.store or (place / MANIFEST).exists():
        return Datastore.open(place, threads=job.threads)
    with opened(job.pool) as pool:
        return build_datastore(
            place, stored, method=choice, passage_words=job.passage_words,
            sentences=job.sentences, shard_passages=job.shard_passages,
            tokenizer=readers[0] if readers else None, seed=job.seed,
            pool=pool, workers=job.workers, threads=job.threads,
            tick=lambda done, text: progress.tick(0.5 * done, text, {"done": done}),
        )  # fmt: skip


def _windows(
    job: DatastoreJob, heldout: Sequence[TextFile], readers: dict[str, PassageReader]
) -> list[EvalWindow]:
    if readers:
        tokenizer = next(iter(readers.values())).tokenizer
        return eval_windows(
            heldout, tokenizer, window=job.window, stride=job.stride, most=job.windows
        )
    # Without a tokenizer a query is a passage of what is held out.
    rows = map_passages(heldout, job.passage_words)
    there = PassageMap(heldout, [one.path.stat().st_size for one in heldout], rows)
    if not len(there):
        raise DataError(f"data = {job.data!r}: the held-out files have no words; give longer ones")
    chosen = np.unique(np.linspace(0, len(there) - 1, min(job.windows, len(there))).astype(int))
    return [EvalWindow(np.empty(0, np.int64), text, text) for text in there.texts(chosen)]


def _written(
    job: DatastoreJob,
    directory: Path,
    points: Sequence[SizePoint],
    bare: dict[str, float],
    readers: dict[str, PassageReader],
) -> dict[str, Any]:
    """Files of the curves, their laws, and the front."""
    if not points:
        return {}
    curve = curve_of(points)
    laws: dict[str, str] = {}
    drawn: dict[str, tuple[Sequence[CurvePoint], FittedLaw | None]] = {}
    for reader in readers:
        for filters in sorted({one.filters for one in points}):
            name = reader if filters == ALL else f"{reader}, {filters}"
            some = [one for one in points if (one.reader, one.filters) == (reader, filters)]
            row = [CurvePoint(size=one.tokens, value=math.exp(one.loss)) for one in some]
            law = None
            try:
                law = fit("power", row, seed=job.seed)
                beta = law.parameters["beta"]
                laws[name] = (
                    f"{name}: perplexity ~ tokens^{beta.value:.4f}, 95 % interval "
                    f"{beta.low:.4f} to {beta.high:.4f}"
                )
            except DataError as cause:  # too few sizes, or no fall
                laws[name] = f"{name}: no power law ({cause})"
            drawn[name] = (row, law)
    front = front_of(job, points, readers)
    image = picture(
        drawn, title="perplexity over tokens that can be looked up",
        x_label="tokens in the datastore", y_label="perplexity",
    )  # fmt: skip
    write_atomic(directory / "curve.svg", image)
    write_json(directory / "points.json", [one._asdict() for one in points])
    return {
        "points": [one._asdict() for one in points],
        "curve": curve,
        "laws": laws,
        "front": front,
        "bare": {name: math.exp(loss) for name, loss in bare.items()},
        "files": {"curve.svg": "picture", "points.json": "points"},
    }


def curve_of(points: Sequence[SizePoint]) -> list[dict[str, Any]]:
    """Perplexity by reader, filters and share: tokens and losses as means over the seeds."""
    groups: dict[tuple[str, str, float], list[SizePoint]] = {}
    for one in points:
        groups.setdefault((one.reader, one.filters, one.share), []).append(one)
    return [
        {
            "reader": reader,
            "filters": filters,
            "tokens": sum(one.tokens for one in some) / len(some),
            "perplexity": math.exp(sum(one.loss for one in some) / len(some)),
        }
        for (reader, filters, _), some in groups.items()
    ]


def front_of(
    job: DatastoreJob, points: Sequence[SizePoint], readers: dict[str, PassageReader]
) -> list[dict[str, Any]]:
    """Readers and sizes that none with fewer FLOPs of training beats: 6 for a weight and token.

    Where the tokens of training are not given, FLOPs are those of one token.
    """
    read = dict(zip(job.readers, job.training_tokens or (1,) * len(readers), strict=True))
    every = [
        {"flops": 6.0 * readers[one["reader"]].parameters * read[one["reader"]], **one}
        for one in curve_of(points)
    ]
    front: list[dict[str, Any]] = []
    for one in sorted(every, key=lambda row: (row["flops"], row["perplexity"])):
        if not front or one["perplexity"] < front[-1]["perplexity"]:
            front.append(one)
    return front
