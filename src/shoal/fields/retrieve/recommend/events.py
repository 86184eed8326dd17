"""Events from tables, drawn streams of them, and what is held out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import DataError
from shoal.core.random import generator
from shoal.fields.data.sources import open_source
from shoal.fields.retrieve.recommend.protocols import EventError, UserEvents

_STREAMS = "streams"
# Of drawn streams.
_ITEMS, CATEGORIES, _LENGTH, _MOST_CATEGORIES = 4000, 40, 64, 5
_READY, _CONCENTRATION = 0.4, 500.0
# Share of streams, at the end, that is held out.
_HELD = 0.1


class EventSplit(NamedTuple):
    """What is learned from, and what is judged.

    Args:
        train: events to learn from.
        test: whole sequences.
        judged: bool, for each event of ``test`` but the first of each user: it was held out.
    """

    train: UserEvents
    test: UserEvents
    judged: np.ndarray


def read_events(data: str, *, columns: tuple[str, str, str], sort: bool, seed: int) -> UserEvents:
    """Events of a table (Parquet, CSV, JSON Lines), or ``streams:N``, N drawn sequences.

    Args:
        data: a path or ``streams:N``.
        columns: of users, items and times; times may be missing, then the order of rows counts.
        sort: bring events into the order of time; without, it is an error if they are not.
        seed: of drawn streams.

    Raises:
        DataError: it cannot be read.
        EventError: a column is missing; a time is no number; events are not in order.
    """
    if data.partition(":")[0] == _STREAMS:
        return drawn_streams(num_streams(data), seed=seed)
    import pyarrow as pa

    source = open_source(data)
    user, item, time = columns
    names = source.schema.names
    for name in (user, item):
        if name not in names:
            raise EventError(f"{data}: no column {name!r}; it has {', '.join(names)}")
    wanted = [name for name in columns if name in names]
    parts = [pa.Table.from_batches([one]).select(wanted) for one in source.batches()]
    whole = pa.concat_tables(parts) if parts else None
    if whole is None or not len(whole):
        raise EventError(f"{data}: no events")
    users, _ = _codes(whole[user], data, user)
    items, item_names = _codes(whole[item], data, item)
    times = np.arange(len(whole), dtype=np.float64)
    if time in wanted:
        times = _seconds(whole[time], data, time)
    order = np.lexsort((times, users)) if sort else np.argsort(users, kind="stable")
    users, items, times = users[order], items[order], times[order]
    early = (np.diff(times) < 0) & (np.diff(users) == 0)
    if early.any():
        at = order[int(early.argmax()) + 1]
        raise EventError(
            f"{data}: row {at + 1}: earlier than the event before it of the same user; sort the "
            "rows by time, or give --set sort=true"
        )
    offsets = np.concatenate([[0], np.cumsum(np.bincount(users))]).astype(np.int64)
    return UserEvents(offsets, items, times, item_names, timed=time in wanted)


def _codes(column: Any, data: str, name: str) -> tuple[np.ndarray, list[str]]:
    """Numbers from 0 in the order in which values come, and the values as text."""
    if column.null_count:
        raise EventError(f"{data}: column {name!r}: {column.null_count} rows have no value")
    coded = column.combine_chunks().dictionary_encode()
    return coded.indices.to_numpy().astype(np.int64), [str(x) for x in coded.dictionary.to_pylist()]


def _seconds(column: Any, data: str, name: str) -> np.ndarray:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        times = column.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy() / 1e6
    else:
        try:
            times = column.cast(pa.float64()).to_numpy()
        except pa.ArrowException as cause:
            raise EventError(f"{data}: column {name!r}: expected numbers or times") from cause
    if not np.isfinite(times).all():
        raise EventError(f"{data}: column {name!r}: a time is missing or is not finite")
    result: np.ndarray = times
    return result


def num_streams(data: str) -> int:
    """How many sequences ``streams:N`` asks for.

    Raises:
        DataError: it is no number from 100 on.
    """
    count = data.partition(":")[2]
    if not count.isdigit() or int(count) < 100:
        raise DataError(f"{data}: expected streams:N with N of at least 100")
    return int(count)


def stream_categories(items: int, categories: int, draw: np.random.Generator) -> np.ndarray:
    """The category of each item of drawn streams, the first that their generator draws."""
    of: np.ndarray = draw.permutation(np.arange(items) % categories)
    return of


def released_items(items: int, share: float) -> int:
    """How many items of drawn streams there are after a share of the records."""
    return int(items * (_READY + (1 - _READY) * share))


def drawn_streams(
    records: int,
    *,
    items: int = _ITEMS,
    categories: int = CATEGORIES,
    length: int = _LENGTH,
    seed: int = 0,
) -> UserEvents:
    """Sequences whose items appear over time: a test of vocabularies that change.

    The first 40 % of all items are there from the beginning, the others are released evenly. A
    record likes up to five categories, drawn from weights of its own; the category of an event is a
    new one with probability a / (a + n), or one it had, in proportion to how often; its item is any
    that is released.

    Source: Zhai et al., Actions Speak Louder than Words, 2024, appendix on synthetic data.

    Args:
        records: sequences.
        items: in all; those of a category are spread over the time of release.
        categories: of items.
        length: events of a sequence.
        seed: random seed.
    """
    draw = generator(seed, purpose="event streams")
    of = stream_categories(items, categories, draw)
    members = [np.flatnonzero(of == one) for one in range(categories)]
    chosen = np.empty((records, length), np.int64)
    for record in range(records):
        released = released_items(items, record / records)
        pool = [one[: np.searchsorted(one, released)] for one in members]
        weights = draw.dirichlet(np.ones(categories))
        weights *= [len(one) > 0 for one in pool]
        liked = draw.choice(
            categories, min(_MOST_CATEGORIES, int((weights > 0).sum())), replace=False,
            p=weights / weights.sum(),
        )  # fmt: skip
        alpha = draw.uniform(1, _CONCENTRATION)
        counts = np.zeros(len(liked))
        coins, spots = draw.random((length, 2)), draw.random(length)
        for at in range(length):
            fresh = counts == 0
            if fresh.any() and coins[at, 0] * (alpha + at) < alpha:
                one = int(fresh.argmax())  # in the order of its weights
            else:
                one = int(np.searchsorted(np.cumsum(counts), coins[at, 1] * counts.sum(), "right"))
            counts[one] += 1
            some = pool[liked[one]]
            chosen[record, at] = some[int(spots[at] * len(some))]
    return UserEvents(
        offsets=np.arange(records + 1, dtype=np.int64) * length,
        items=chosen.reshape(-1),
        times=np.tile(np.arange(length, dtype=np.float64), records),
        item_names=[str(one) for one in range(items)],
        timed=False,
    )


def split_events(events: UserEvents, *, leave_last: bool, length: int) -> EventSplit:
    """Hold out the last event of each user, or the last tenth of the sequences.

    Users with fewer than three events are learned from and not judged.

    Args:
        events: all.
        leave_last: of each user; whole sequences without.
        length: most events of a sequence that are looked at before one that is judged.

    Raises:
        EventError: nothing is left to learn from or to judge.
    """
    lengths, users = events.lengths, np.arange(len(events))
    if leave_last:
        tested = users[lengths >= 3]
        train = events.chosen(users, 0 * users, lengths - (lengths >= 3))
    else:
        tested = users[int(len(users) * (1 - _HELD)) :]
        some = users[: len(users) - len(tested)]
        train = events.chosen(some, 0 * some, lengths[some])
    ends = lengths[tested]
    test = events.chosen(tested, np.maximum(0, ends - length - 1), ends)
    judged = np.ones(len(test.items) - len(test), bool)
    if leave_last and len(test):
        judged[:] = False
        judged[np.cumsum(test.lengths - 1) - 1] = True
    if not judged.any() or not (train.lengths > 1).any():
        raise EventError(
            f"{len(events.items)} events of {len(events)} users: too few to learn from and to "
            "judge; expected users with at least 3"
        )
    return EventSplit(train, test, judged)


def is_drawn(data: str) -> bool:
    """Whether it is ``streams:N``."""
    return data.partition(":")[0] == _STREAMS


def kept_events(lengths: np.ndarray, alpha: float, longest: int, draw: Any) -> list[np.ndarray]:
    """Which events of each history are looked at: stochastic length.

    A history of n events, more than m = N^(alpha / 2) of the N that are possible, is kept whole
    with probability (m / n)^2; else m of its events are drawn.

    Args:
        lengths: events of each history [B].
        alpha: between 1 and 2; with 2 all are kept.
        longest: N.
        draw: generator of numpy.

    Returns:
        Positions, rising, for each.
    """
    most = max(1, round(longest ** (alpha / 2)))
    result = []
    for n in map(int, lengths):
        if n <= most or draw.random() < min(1.0, most**2 / n**2):
            result.append(np.arange(n))
        else:
            result.append(np.sort(draw.choice(n, most, replace=False)))
    return result
