"""A recommender from a plan to a report: learn, judge, write."""

from __future__ import annotations

import time

import numpy as np

from shoal.core.files import write_json
from shoal.core.parts import Choice, table
from shoal.fields.rates import timed_call
from shoal.fields.retrieve.recommend.job import RecommendJob
from shoal.fields.retrieve.recommend.planning import split_of, task_of
from shoal.fields.retrieve.recommend.protocols import Recommender, measures
from shoal.fields.running import RunOutcome, RunProgress

# Requests that are timed.
_ASKED = 100


def execute(job: RecommendJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Learn, and judge what was held out against all items.

    Raises:
        ShoalError: the events cannot be read or used.
    """
    from shoal.kernel.threads import torch_threads

    progress.say(0.0, "reading")
    split = split_of(job)
    task = task_of(job, split)
    method: Recommender = table("recommender").build(choice, where="method")
    with torch_threads(job.threads):
        train_s, trained = timed_call(
            lambda: method.train(
                task, split.train, lambda done, text: progress.tick(0.9 * done, text, {})
            )
        )
        progress.say(0.9, "judging")
        ranks = trained.ranks(split.test)[split.judged]
        seconds = []
        for user in range(min(_ASKED, len(split.test))):
            rows = slice(split.test.offsets[user], split.test.offsets[user + 1])
            begin = time.perf_counter()
            trained.scores(split.test.items[rows], split.test.times[rows])
            seconds.append(time.perf_counter() - begin)
    files = [*trained.save(progress.directory), "items.json"]
    write_json(progress.directory / "items.json", list(split.train.item_names))
    return RunOutcome(
        measured={
            "train_s": train_s,
            "request_s": float(np.median(seconds)),
            **measures(ranks),
        },
        details={"files": files, "judged": len(ranks)},
    )
