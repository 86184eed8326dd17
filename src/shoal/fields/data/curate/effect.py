"""What a choice of rows does to a model: the same training on them and on all rows.

Both see as many tokens, from the same first weights, once for each seed, and are scored on the
same rows that neither has seen: on those of all, and on those that the method keeps. A token is a
byte, so that losses of different texts are in one unit, bits a byte.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Lt

from shoal.core.config import Value
from shoal.core.errors import DataError
from shoal.core.extras import require_extra
from shoal.fields.data.curate.keeping import write_rows
from shoal.fields.data.curate.protocols import CurateProblem, Curator
from shoal.fields.data.readers import arrow
from shoal.fields.data.sources import open_source
from shoal.ir import Interval

if TYPE_CHECKING:
    from torch import Tensor

ALL, KEPT = "all rows", "kept rows"

_WINDOW, _BATCH = 128, 16
_LR = 3e-3
# Bytes of text that are looked at for each token of training, so that what is kept suffices.
_READ = 8


class EffectSettings(Value):
    """How the effect on loss is measured.

    Args:
        model: of the zoo, with fresh weights.
        tokens: bytes that each training sees; what is kept is read again where it is less.
        seeds: trainings on each choice of rows.
        heldout: share of the rows that no training sees.
    """

    model: str = "shoal-0.3m"
    tokens: Annotated[int, Ge(_WINDOW * _BATCH)] = 500_000
    seeds: Annotated[int, Ge(2)] = 3
    heldout: Annotated[float, Gt(0), Lt(1)] = 0.1


def effect_of(
    method: Curator,
    problem: CurateProblem,
    settings: EffectSettings,
    say: Callable[[float, str], None] = lambda done, text: None,
) -> dict[str, Any]:
    """Choose among some of the rows, train on what is kept and on all, and compare.

    Args:
        method: that chooses.
        problem: its rows; files go to ``effect`` in its place.
        settings: how.
        say: called with (share done, what is done).

    Returns:
        JSON: ``losses`` (choice of rows -> held-out rows -> bits a byte for each seed), ``change``
        (held-out rows -> value, low and high of kept over all, minus one), ``epochs`` and
        ``settings``.

    Raises:
        DataError: there is no text, or too little of it is kept.
    """
    require_extra("torch", purpose="measuring the effect on loss")
    place = problem.place / "effect"
    texts = {
        name: chosen(method, problem, place / name) for name in split_rows(problem, place, settings)
    }
    train, heldout = ({ALL: every, KEPT: kept} for every, kept in texts.values())
    losses = compare(train, heldout, settings, say)
    return {
        "settings": settings.model_dump(mode="json"),
        "epochs": {name: round(settings.tokens / _size(some), 2) for name, some in train.items()},
        "losses": losses,
        "change": {
            rows: change(losses[KEPT][rows], losses[ALL][rows]).model_dump() for rows in heldout
        },
    }


def split_rows(problem: CurateProblem, place: Path, settings: EffectSettings) -> tuple[str, str]:
    """Write some of the rows as ``train.parquet`` and ``heldout.parquet``; equal texts go together.

    Raises:
        DataError: there is no text.
    """
    pa, sides = arrow(), ("train", "heldout")
    if not problem.text:
        raise DataError("data: no column of text; the effect on loss needs one")
    place.mkdir(parents=True, exist_ok=True)
    batches: dict[str, list[Any]] = {side: [] for side in sides}
    size, limit = 0, _READ * settings.tokens
    shards = problem.source.shards()
    for shard in shards:
        taken = 0
        for batch in shard.batches(1024):
            column = batch.column(problem.text).cast(pa.large_string()).fill_null("")
            out = np.array(
                [
                    zlib.crc32(text.encode()) % 10_000 < 1e4 * settings.heldout
                    for text in column.to_pylist()
                ]
            )
            for side, mask in zip(sides, (~out, out), strict=True):
                batches[side].append(batch.filter(pa.array(mask)))
            taken += batch.nbytes
            if taken > limit / len(shards):
                break
        size += taken
        if size > limit:
            break
    for side in sides:
        write_rows(place / f"{side}.parquet", problem.source.schema, iter(batches[side]))
    return sides


def chosen(method: Curator, problem: CurateProblem, place: Path) -> tuple[list[str], list[str]]:
    """Texts of ``place`` with the ending ``.parquet``: all of them, and those a method keeps."""
    source = open_source(f"{place}.parquet")
    some = dataclasses.replace(
        problem, source=source, place=place, pool=None, workers=1, tick=lambda done, text: None
    )
    method.curate(some)
    kept = open_source(str(place / "kept"), pattern="*.parquet")
    return tuple(
        [text for batch in one.batches() for text in batch.column(problem.text).to_pylist() if text]
        for one in (source, kept)
    )  # type: ignore[return-value]


def compare(
    train: Mapping[str, Sequence[str]],
    heldout: Mapping[str, Sequence[str]],
    settings: EffectSettings,
    say: Callable[[float, str], None] = lambda done, text: None,
) -> dict[str, dict[str, list[float]]]:
    """Train on each choice of rows with each seed, and score on each set of held-out rows.

    Args:
        train: choice -> texts.
        heldout: name of a set -> texts.
        settings: how.
        say: called with (share done, what is done).

    Returns:
        Choice -> set -> bits a byte for each seed.

    Raises:
        DataError: a choice or a set has less text than a batch.
    """
    rows = {name: _windows(texts, name) for name, texts in train.items()}
    tests = {name: _windows(texts, f"held-out {name}") for name, texts in heldout.items()}
    losses: dict[str, dict[str, list[float]]] = {
        name: {test: [] for test in tests} for name in train
    }
    total = settings.seeds * len(rows)
    for seed in range(settings.seeds):
        for at, (name, windows) in enumerate(rows.items()):
            say((seed * len(rows) + at) / total, f"training on {name}, seed {seed}")
            for test, loss in _trained(windows, tests, settings, seed).items():
                losses[name][test].append(loss)
    return losses


def change(losses: Sequence[float], base: Sequence[float]) -> Interval:
    """Loss over the base's, minus one: the mean over seeds, with a 90 % interval (Student's t).

    Args:
        losses: of each seed.
        base: of the same seeds.
    """
    from scipy.stats import t

    ratios = np.asarray(losses) / np.asarray(base) - 1
    half = float(t.ppf(0.95, len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios)))
    mean = float(ratios.mean())
    return Interval(value=mean, low=mean - half, high=mean + half)


def _size(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) + 1 for text in texts)


def _windows(texts: Sequence[str], name: str) -> Any:
    """Uint8 [windows, _WINDOW + 1] of the texts one after the other, a zero behind each."""
    stream = np.frombuffer(b"".join(text.encode() + b"\0" for text in texts), np.uint8)
    count = (len(stream) - 1) // _WINDOW
    if count < _BATCH:
        raise DataError(
            f"{name}: {len(stream)} bytes of text; the effect on loss needs "
            f"{_BATCH * _WINDOW + 1}, so give more rows, or filters that keep more"
        )
    windows = np.lib.stride_tricks.sliding_window_view(stream, _WINDOW + 1)
    return windows[: count * _WINDOW : _WINDOW]


def _trained(
    windows: Any, tests: Mapping[str, Any], settings: EffectSettings, seed: int
) -> dict[str, float]:
    """Bits a byte on each held-out set, of a model that has seen so many tokens."""
    import torch

    from shoal.train import zoo
    from shoal.train.simple import Trainer

    def collate(examples: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.stack(examples).astype(np.int64))

    def loss(model: Any, batch: Tensor, train: bool) -> Tensor:
        total: Tensor = model.loss_sum(batch[:, :-1], batch[:, 1:])
        return total / batch[:, 1:].numel()

    model = zoo.random(settings.model, seed)
    trainer = Trainer(model, collate, loss, lr=_LR, batch=_BATCH, seed=seed)
    steps = settings.tokens // (_WINDOW * _BATCH)
    trainer.fit(windows, epochs=-(-steps * _BATCH // len(windows)) + 1, steps=steps)
    return {name: trainer.evaluate(test)["loss"] / math.log(2) for name, test in tests.items()}
