"""The best hit rate of drawn streams, beside a loop over their events."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from shoal.claims.lab.recommend_arms import best_hits
from shoal.core.random import generator
from shoal.fields.retrieve.recommend.events import drawn_streams, split_events


def test_the_best_hit_rate_is_that_of_a_loop() -> None:
    records, seed = 60, 3
    events = drawn_streams(records, seed=seed)
    of = generator(seed, purpose="event streams").permutation(np.arange(4000) % 40)
    hits = []
    for record in range(54, 60):
        released = int(4000 * (0.4 + 0.6 * record / records))
        size = [sum(int(of[item]) == one for item in range(released)) for one in range(40)]
        row = events.items[record * 64 : (record + 1) * 64]
        for at in range(1, 64):
            seen = [int(of[item]) for item in row[:at]]
            hits.append(max(10 * seen.count(one) / at / size[one] for one in set(seen)))
    split = split_events(events, leave_last=False, length=63)
    assert best_hits(records, split, seed) == pytest.approx(np.mean(hits), rel=1e-12)
