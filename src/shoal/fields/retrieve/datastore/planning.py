"""Plans of a datastore: every way to find passages, tried on some of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, table
from shoal.core.scratch import scratch_directory
from shoal.corpora.protocols import is_heldout
from shoal.cost.arithmetic import active_parameters
from shoal.cost.shapes import resolve
from shoal.fields.kinds import choices
from shoal.fields.rates import timed_call
from shoal.fields.retrieve.datastore.building import build_datastore
from shoal.fields.retrieve.datastore.job import DatastoreJob, DatastorePlan
from shoal.fields.retrieve.datastore.passages import TextFile, text_files
from shoal.fields.retrieve.datastore.protocols import DatastoreError, PassageIndex
from shoal.fields.retrieve.datastore.store import Datastore
from shoal.fields.retrieve.datastore.sweep import StoreSweep
from shoal.ir import Interval, Machine

# Bytes of text that are tried, and queries.
_BYTES, _QUERIES = 1_000_000, 8
# The interpreter with numpy, pyarrow and faiss, and with PyTorch, as they were measured.
_RUNTIME, _TORCH = 2.2e8, 3.5e8
# Of a shard while it is built, for each byte of its text; of lists, for each passage of a query.
_SHARD_BYTES, _LIST_BYTES = 12.0, 12_000.0
# Tokens of a word of text, and the share of a core's peak that reading reaches.
_TOKENS, _REACHED = 2.0, 0.3


def divided(job: DatastoreJob) -> tuple[list[TextFile], list[TextFile]]:
    """Files that are stored, and files that are held out.

    Raises:
        DataError: a place cannot be read.
        DatastoreError: nothing is left on one side, or a held-out file would be stored.
        ConfigError: not as many numbers of tokens as readers, or fewer passages are searched than
            are wanted.
    """
    job.retrieval()
    if job.training_tokens and len(job.training_tokens) != len(job.readers):
        raise ConfigError(
            f"training_tokens: {len(job.training_tokens)} numbers for {len(job.readers)} readers; "
            "give one for each"
        )
    files: list[TextFile] = []
    for at, where in enumerate((job.data, *job.sources)):
        some = text_files(where, job.pattern)
        files += [one._replace(name=f"{at}/{one.name}") for one in some] if job.sources else some
    if job.heldout:
        heldout = text_files(job.heldout, job.pattern)
        judged = {one.path.resolve() for one in heldout}
        stored = files if job.store else [one for one in files if one.path.resolve() not in judged]
    else:
        heldout = [one for one in files if is_heldout(one.name)]
        stored = [one for one in files if not is_heldout(one.name)]
    if not stored or not heldout:
        raise DatastoreError(
            f"data = {job.data!r}: {len(stored)} files to store and {len(heldout)} held out; give "
            "more files, or held-out text with heldout"
        )
    return stored, heldout


class _Trial(NamedTuple):
    """Seconds and bytes of a small datastore."""

    passages: int
    build_s: float
    query_s: float
    entry_s: float
    index_bytes: int


def plan_datastore(job: DatastoreJob, machine: Machine) -> list[DatastorePlan]:
    """A plan of each way to find passages, the quickest first.

    Raises:
        ShoalError: the data cannot be read, or what goes together does not.
    """
    stored, heldout = divided(job)
    known = Datastore.open(job.store) if job.store else None
    sizes = [one.path.stat().st_size for one in stored]
    sample, taken = _sample(stored, sizes)
    given = Choice.model_validate(known.manifest["method"]) if known is not None else job.method
    plans = []
    for choice in choices(given, "passage_index"):
        trial = _tried(job, choice, sample, heldout)
        passages = len(known) if known else round(trial.passages * sum(sizes) / taken)
        plans.append(_plan(job, machine, choice, trial, passages, sum(sizes), known is not None))
    return sorted(plans, key=lambda one: (not one.fits, one.predicted["total_s"].value))


def _sample(files: Sequence[TextFile], sizes: Sequence[int]) -> tuple[list[TextFile], int]:
    """Files that lie evenly among all and have about so many bytes together, and their bytes."""
    step = max(1, sum(sizes) // _BYTES)
    chosen = list(range(0, len(files), step))
    return [files[at] for at in chosen], sum(sizes[at] for at in chosen)


def _tried(
    job: DatastoreJob, choice: Choice, sample: Sequence[TextFile], heldout: Sequence[TextFile]
) -> _Trial:
    queries = []
    for file in heldout[:_QUERIES]:
        words = file.path.read_bytes().decode("utf-8", "replace").split()[: job.window // 4]
        queries.append(" ".join(words) or file.name)
    with scratch_directory("datastore") as root:
        build_s, store = timed_call(
            lambda: build_datastore(
                root / "store", sample, method=choice, passage_words=job.passage_words,
                sentences=job.sentences, seed=job.seed, threads=job.threads,
            )
        )  # fmt: skip
        depth = min(job.depth, len(store))
        store.search(queries, depth)  # what is loaded when it is first used
        query_s = timed_call(lambda: store.search(queries, depth))[0] / len(queries)
        options = job.retrieval()
        sweep_s, _ = timed_call(
            lambda: StoreSweep(store, queries, against=queries, options=options)
        )
        entry_s = max(sweep_s / len(queries) - query_s, 0.0)
        return _Trial(len(store), build_s, query_s, entry_s / depth, store.num_bytes)


def _plan(
    job: DatastoreJob,
    machine: Machine,
    choice: Choice,
    trial: _Trial,
    passages: int,
    num_bytes: int,
    there: bool,
) -> DatastorePlan:
    method: PassageIndex = table("passage_index").build(choice, where="method")
    more = method.growth(trial.passages, passages)
    depth = min(job.depth, passages)
    query_s = trial.query_s * more.query
    build_s = 0.0 if there else trial.build_s * more.build / (job.workers if job.pool else 1)
    sweep_s = job.windows * (query_s + trial.entry_s * depth) * (1.5 if job.filters else 1.0)
    read_s = _read_s(job, machine)
    index = trial.index_bytes * more.memory
    shard = _SHARD_BYTES * num_bytes * min(1.0, job.shard_passages / passages)
    lists = _LIST_BYTES * depth * min(job.windows, 32)
    memory = _RUNTIME + (_TORCH if job.readers else 0.0) + max(0.0 if there else shard, lists)
    memory += index
    predicted = {
        "total_s": Interval.around(build_s + query_s * job.windows + sweep_s + read_s, 0.8),
        "build_s": Interval.around(build_s, 0.6),
        "sweep_s": Interval.around(sweep_s, 0.8),
        "query_s": Interval.around(query_s, 0.6),
        "index_bytes": Interval.around(index, 0.3),
        "memory_bytes": Interval.around(memory, 0.6),
        "passages": Interval.around(passages, 0.0 if there else 0.2),
    }
    if job.readers:
        predicted["read_s"] = Interval.around(read_s, 1.5)
    return DatastorePlan(
        job=job.model_copy(update={"method": table("passage_index").spell(method)}),
        machine=machine,
        predicted=predicted,
        planner="a trial of each index",
        fits=memory <= machine.device.main_memory.capacity_bytes,
        why=(
            f"{choice}: {passages:,} passages; a query takes {query_s * 1e3:.1f} ms, and "
            f"{len(job.shares)} sizes of {job.seeds} samples one search"
        ),
        notes=(f"tried with {trial.passages:,} passages on this machine",),
        passages=passages,
        num_bytes=num_bytes,
    )


def _read_s(job: DatastoreJob, machine: Machine) -> float:
    """Seconds of the readers: every sample gives every window a prompt of its own, at most."""
    samples = sum(job.seeds if share < 1 else 1 for share in job.shares)
    prompts = job.windows * (1 + samples * (2 if job.filters else 1))
    tokens = job.window + _TOKENS * job.passage_words * job.k
    weights = sum(active_parameters(resolve(name)) for name in job.readers)
    cores = machine.device.num_cores or 1
    peak = machine.device.peak_flops.get("fp32", 1e11 * cores) * min(job.threads, cores) / cores
    return float(2.0 * weights * tokens * prompts / (_REACHED * peak))
