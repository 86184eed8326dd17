"""What a served collection takes: memory, latency and rate, for each way to answer."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.parts import Choice, table
from shoal.fields.kinds import choices
from shoal.fields.retrieve.grank.documents import read_documents
from shoal.fields.retrieve.grank.text import terms
from shoal.fields.retrieve.search.job import SearchJob, SearchPlan
from shoal.fields.retrieve.search.protocols import SearchMethod, SearchWork, TextEmbedder
from shoal.fields.retrieve.search.rates import search_rates
from shoal.ir import Interval, Machine

# The interpreter with the server, as it was measured.
_RUNTIME = 1.1e8
# Words of a text, and the share of points that a query's words have together, of no known load.
_WORDS, _SHARE = 80.0, 0.2
# The slowest of a hundred queries over the median one.
_SLOWEST = 2.5
_SAMPLE = 200


def load_documents(job: SearchJob) -> list[tuple[str, str]]:
    """(text, query) of the documents of a load; a query is a title, which its text lacks.

    Raises:
        DataError: they cannot be read.
    """
    documents = read_documents(job.documents)
    bodies = documents.bodies()
    pairs = [(bodies[name], title) for name, title in documents.titles.items()]
    return [one for one in pairs if terms(one[0]) and terms(one[1])][: job.points]


def plan_search(job: SearchJob, machine: Machine) -> list[SearchPlan]:
    """A plan of each method, those that answer most queries in a second first.

    Raises:
        ShoalError: the documents of the load cannot be read.
    """
    documents = load_documents(job) if job.documents else []
    embedder: TextEmbedder = table("embedder").build(job.embedder, where="embedder")
    dim = embedder.dim_of(job.dim)
    count = len(documents) if job.documents else job.points
    words, postings = _looked_at(documents) if documents else (_WORDS, _SHARE * count)
    work = SearchWork(points=count, dim=dim, k=job.k, postings=postings)
    plans = [
        _plan(job, machine, choice, work, words) for choice in choices(job.method, "search_method")
    ]
    return sorted(plans, key=lambda one: -one.predicted["queries_per_s"].value)


def _looked_at(documents: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Mean words of a text, and postings of a query."""
    frequency: dict[str, int] = {}
    total = 0
    for text, _ in documents:
        every = terms(text)
        total += len(every)
        for word in set(every):
            frequency[word] = frequency.get(word, 0) + 1
    some = documents[:: max(1, len(documents) // _SAMPLE)]
    postings = sum(frequency.get(word, 0) for _, query in some for word in set(terms(query)))
    return total / len(documents), postings / len(some)


def _plan(
    job: SearchJob, machine: Machine, choice: Choice, work: SearchWork, words: float
) -> SearchPlan:
    method: SearchMethod = table("search_method").build(choice, where="method")
    rates = search_rates(machine)
    own_s = method.query_s(rates, work)
    alone_s = rates.request_s + own_s
    # The server's own part of each query is done one after the other.
    rate = min(job.clients / alone_s, 1 / (rates.server_s + own_s))
    point_bytes = 4.0 * work.dim + rates.point_bytes + words * (rates.word_bytes + 6)
    memory = _RUNTIME + work.points * point_bytes
    upsert_s = rates.point_s + words * rates.word_s
    p50 = job.clients / rate
    return SearchPlan(
        job=job.model_copy(update={"method": table("search_method").spell(method)}),
        machine=machine,
        predicted={
            "queries_per_s": Interval.around(rate, rates.spread),
            "query_p50_s": Interval.around(p50, rates.spread),
            "query_p99_s": Interval.around(_SLOWEST * p50, 2 * rates.spread),
            "upserts_per_s": Interval.around(1 / upsert_s, 2 * rates.spread),
            "memory_bytes": Interval.around(memory, 0.3),
        },
        planner="rates of this machine",
        fits=memory <= machine.device.main_memory.capacity_bytes,
        why=(
            f"{choice.name}: {work.points:,} points of {work.dim} numbers; the request takes "
            f"{rates.server_s * 1e3:.1f} ms of the server, the search {own_s * 1e3:.1f} ms"
        ),
        notes=()
        if job.documents
        else (
            f"texts are assumed to have {_WORDS:.0f} words, and a query's words to be in "
            f"{_SHARE:.0%} of them",
        ),
        points=work.points,
    )
