"""A search by functions from a plan to a report: build, start, search again and again, bill."""

from __future__ import annotations

import statistics

import numpy as np

from shoal.core.files import write_json
from shoal.core.parts import Choice
from shoal.fields.retrieve.index.exact import recall
from shoal.fields.retrieve.index.osq.files import save_index
from shoal.fields.retrieve.serverless.gateway import FunctionGateway
from shoal.fields.retrieve.serverless.job import SearchFunctionsJob
from shoal.fields.retrieve.serverless.protocols import parse_tree
from shoal.fields.retrieve.serverless.search import FunctionSearch
from shoal.fields.retrieve.serverless.workload import built, filtered_data
from shoal.fields.running import RunOutcome, RunProgress


def execute(job: SearchFunctionsJob, backend: Choice, progress: RunProgress) -> RunOutcome:
    """Build an index and search it by functions; the first batch starts all containers.

    Raises:
        ShoalError: the vectors cannot be read or indexed, or a function fails.
    """
    tree = parse_tree(job.tree)
    progress.say(0.0, "reading")
    data = filtered_data(job)
    truth = data.truth(job.k, job)
    progress.say(0.2, "building")
    index = built(job, data)
    size = index.memory()
    directory = save_index(index, progress.directory / "osq")
    bills, seconds, share = [], [], 0.0
    with FunctionGateway(backend, directory, latency_s=job.latency_s, copies=job.copies) as runtime:
        search = FunctionSearch(runtime, tree)
        for at in range(job.batches + 1):
            progress.say(0.5 + 0.5 * at / (job.batches + 1), f"batch {at} of {job.batches}")
            found = search.search(data.queries, job.k, where=data.where)
            bill = found.bill(job.prices, job.memory_gb)
            bills.append({"seconds": found.seconds, **bill.model_dump()})
            seconds.append(found.seconds)
            share = recall(found.hits, truth)
        containers = runtime.containers
    write_json(progress.directory / "bills.json", bills)
    warm = bills[1:]
    return RunOutcome(
        measured={
            "batch_s": statistics.median(seconds[1:]),
            "cold_s": seconds[0],
            "usd_per_1000": statistics.median(one["usd_per_1000"] for one in warm),
            "calls": statistics.median(float(one["calls"]) for one in warm),
            "recall": share,
            "read_bytes": float(warm[0]["read_bytes"]),
            "index_bytes": float(sum(size.values())),
        },
        details={
            "batches": bills,
            "containers": containers,
            "bytes": dict(size),
            "passed": float(np.mean(data.passed)),
        },
    )
