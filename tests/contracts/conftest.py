"""What the contract tests share: every registered part, with example options, and one job."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from shoal.core.config import Kind
from shoal.core.parts import KINDS, table
from shoal.ir import Device, Link, Machine, MemoryTier, ServeJob, TrainJob, kinds

# Requests made up for these tests, in the forms of the public traces.
TRACES = Path(__file__).with_name("traces")
# A module and a table as users of federations have them.
FEDERATION = Path(__file__).with_name("federation")
# What plans read of drafters; their weights are no part of it.
DRAFTERS = Path(__file__).with_name("drafters")

# Options that a part cannot be built without. Complete: a test compares it with what
# the parts ask for.
EXAMPLES: dict[tuple[str, str], dict[str, Any]] = {
    ("study", "balance"): {"lengths": "lengths.txt"},
    ("study", "moe_overlap"): {"model": "Mixtral-8x7B-v0.1"},
    ("study", "scaling"): {"curve": "curve.csv"},
    ("study", "schedule"): {"schedule": "1f1b"},
    ("study", "stride"): {"host": 1.5e9, "device": 25e9, "link": 12e9},
    ("study", "swap"): {
        "forward": 1.0,
        "backward": 2.0,
        "again": 1.0,
        "activations": 10**9,
        "parameters": 1e8,
    },
    ("study", "sync"): {"model": "gpt2-xl"},
    ("study", "autotp"): {"config": "config.json"},
    ("study", "longctx"): {"model": "shoal-1m"},
    ("study", "price"): {"model": "shoal-1m"},
    ("study", "memory"): {"model": "shoal-1m"},
    ("study", "peft"): {"model": "shoal-1m"},
    ("study", "routes"): {"network": "net.yaml"},
    ("study", "sbp"): {"file": "model.py", "mesh": "4"},
    ("study", "decode"): {"drafters": ["drafter"]},
    ("study", "duo"): {"directory": "routed"},
    ("study", "gossip_rates"): {"topology": "barbell"},
    ("study", "gemm"): {"m": 64, "n": 64, "k": 64},
    ("study", "pack"): {"datatype": "vector(13, 100, 128, float32)"},
    ("study", "topology"): {"clusters": "clusters.yaml", "model": "shoal-27m"},
    ("study", "tune"): {"model": "shoal-27m"},
    ("sink", "jsonl"): {"path": "events.jsonl"},
    ("sink", "tensorboard"): {"path": "curves"},
    ("corpus", "text"): {"path": "corpus.txt"},
    ("corpus", "jsonl"): {"path": "corpus.jsonl"},
    ("corpus", "parquet"): {"path": "corpus.parquet"},
    ("corpus", "chat"): {"path": "chats.jsonl"},
    ("speculative", "medusa"): {"path": str(DRAFTERS / "medusa")},
    ("speculative", "ppd"): {"path": str(DRAFTERS / "ppd")},
    ("speculative", "falcon"): {"path": str(DRAFTERS / "falcon")},
    ("corpus", "mixed"): {"sources": {"code": "stdlib"}},
    ("speculative", "dovetail"): {"path": str(DRAFTERS / "dovetail")},
    ("speculative", "draft_model"): {"path": str(DRAFTERS / "draft")},
    ("speculative", "easyspec"): {"path": str(DRAFTERS / "draft")},
    ("topology", "edge_list"): {"file": str(TRACES / "graph.json")},
    ("workload", "azure"): {"path": str(TRACES / "azure.csv")},
    ("workload", "mooncake"): {"path": str(TRACES / "mooncake.jsonl")},
    ("workload", "trace"): {"path": str(TRACES / "trace.jsonl")},
    ("learner", "module"): {"path": f"{FEDERATION / 'nets.py'}:Net"},
    ("learner", "lora"): {"model": "shoal-1m"},
    ("example_source", "file"): {"path": str(FEDERATION / "visits.csv"), "label": "readmitted"},
    ("preparation", "drop_columns"): {"columns": ["id"]},
    ("preparation", "stratified"): {"column": "city"},
    ("preparation", "k_anonymity"): {"columns": ["age"]},
    ("preparation", "noised_aggregates"): {"bounds": {"age": [0, 120]}},
}


_TEXTS: dict[str, Any] = {"data": {"name": "text", "packages": 3}, "partition": "natural"}
# What a job says beside a part that does not go with its example.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("learner", "cnn_digits"): {"data": "digits"},
    ("learner", "tiny_lm"): _TEXTS,
    ("learner", "lora"): _TEXTS,
    ("example_source", "text"): {"learner": "tiny_lm"},
    ("vi_method", "masha2"): {"compressor": "top_k"},
    ("vi_problem", "robust_regression"): {"step": 0.01},
    ("vi_problem", "adversarial_lm"): {"step": 0.01},
    ("partitioner", "natural"): {**_TEXTS, "learner": "tiny_lm"},
    ("feature_source", "direct"): {"fanouts": [5, 5]},
    ("feature_source", "staged"): {"fanouts": [5, 5]},
    ("feature_source", "resident"): {"fanouts": [5, 5]},
}


def _choosers() -> dict[str, str]:
    """Kind of part -> the job that has a key for it, where exactly one has."""
    result: dict[str, set[str]] = {}
    for kind in kinds().values():
        for field in kind.job_type.model_fields.values():
            # One that may be left out, or several, carry their kind inside.
            perhaps = get_args(field.annotation)
            inside = [
                m
                for one in (*perhaps, *(each for some in perhaps for each in get_args(some)))
                for m in getattr(one, "__metadata__", ())
            ]
            for note in (*field.metadata, *inside):
                if isinstance(note, Kind):
                    result.setdefault(note.kind, set()).add(kind.job_type.__name__)
    return {kind: jobs.pop() for kind, jobs in result.items() if len(jobs) == 1}


# How the parts of a kind come into play. The name of a Job says that a key of it chooses
# them, checked against the jobs themselves; the others name the verb that reaches them.
# Complete over KINDS.
REACHED: dict[str, str] = {
    **_choosers(),
    "job": "plan KIND, run KIND",
    "study": "explain",
    "pool": "launcher of a ServeJob, pool of a job on data",
    "text_filter": "method of a CurateJob, filters of a DatastoreJob",
    "embedder": "embedder of a SearchJob, rerank of a DatastoreJob",
    "example_source": "FederateJob",
    "partitioner": "FederateJob",
    "learner": "FederateJob",
    "update_compressor": "FederateJob",
    "topology": "GossipJob",
    "gossip_policy": "GossipJob",
    "corpus": "TrainJob",
    "lr_schedule": "TrainJob",
    "schedule": "TrainJob",
    "context": "TrainJob",
    "placer": "TrainJob",
    "save_mode": "TrainJob",
    "phase": "serve --disagg, plan serve --slo",
    "probe": "probe -> Machine -> every Plan",
    "law": "claims, model size and data of a Plan",
    "planner": "plan --planner",
    "tuner": "explain tune --tuner",
    "emitter": "plan --emit",
    "federation_emitter": "plan federate --emit",
    "path_planner": "explain paths --policy",
    "mapper": "explain mapping --mapper",
    "kernel": "serve --set kernel.OPERATOR=BACKEND, bench kernels",
    "weight_format": "model quantize, ServeJob.weights",
    "accept": "ServeJob.speculative.accept",
    "tree": "ServeJob.speculative.tree",
    "unmask": "decode.unmask of a ServeJob",
    "refresh": "decode.refresh of a ServeJob",
    "iteration": "decode.iteration of a ServeJob",
    "hogwild_layout": "serve --set decode.layout=LAYOUT",
    "family": "model directories of a Job, export of a Run",
    "gate": "architecture.moe.gate of a TrainJob, model convert --architecture moe.gate=GATE",
    "attention_kernel": "bench attention --kernels",
    "quantizer": "model quantize --method",
    "log": "score --import",
    "sink": "what a Run writes",
    "pattern": "model convert --spec",
    "checkpoint_format": "model convert --to, train --from",
    "launch": "files that start a Plan",
    "peft": "train --set finetune=METHOD",
    "locator": "train --robust --locator, train diagnose --locator",
    "memory_code": "train, checkpoint.memory of a TrainJob",
    "data_scorer": "method.scorer of a CurateJob",
    "data_selector": "method.selector of a CurateJob",
    "claim": "claims run",
}


def registered() -> Iterator[tuple[str, str]]:
    """(kind, name) of every part whose table can be imported."""
    for kind in KINDS:
        try:
            names = list(table(kind))
        except ImportError:
            continue  # test_every_kind_has_a_table fails for it
        yield from ((kind, name) for name in names)


PARTS = sorted(registered())


def choice(kind: str, name: str) -> dict[str, Any]:
    """The part with the options it cannot do without."""
    return {"name": name, **EXAMPLES.get((kind, name), {})}


def small_job(**changes: Any) -> TrainJob:
    """A job that every planner can place on :func:`small_machine`."""
    return TrainJob(
        **{"model": "shoal-0.3m", "steps": 10, "seq_len": 64, "global_batch": 8, **changes}
    )


def small_serve_job(**changes: Any) -> ServeJob:
    """A serving job whose cache is so small that its bookkeeping matters."""
    return ServeJob(
        **{
            "model": "shoal-0.3m",
            "precision": "fp32",
            "kv_tokens": 1024,
            "max_running": 8,
            "max_step_tokens": 128,
            **changes,
        }
    )


def small_machine() -> Machine:
    """Two slow devices: every cost is visible."""
    return Machine(
        name="two",
        devices_per_node=2,
        device=Device(
            name="toy",
            kind="cpu",
            num_cores=2,
            peak_flops={"fp32": 1e10, "bf16": 2e10},
            matmul_flops={"fp32": 8e9, "bf16": 1.6e10},
            memory=(
                MemoryTier(
                    name="dram",
                    capacity_bytes=2**33,
                    read_bandwidth=1e10,
                    write_bandwidth=8e9,
                ),
            ),
        ),
        links=(
            Link(scope="loopback", bandwidth=1e9, latency_s=2e-5),
            Link(scope="device", bandwidth=1e9, latency_s=2e-5),
        ),
    )


# Runs with torch blocked; says for every part and module what went wrong, if anything.
BLOCKED = """
    import importlib, json, pkgutil, sys, tracemalloc

    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError("torch is blocked below the torch line", name="torch")

    sys.meta_path.insert(0, Block())
    given = json.load(sys.stdin)
    from shoal.core.parts import table
    from shoal.ir import Machine, TrainJob, Work

    def attempt(run):
        try:
            return run() or ""
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    modules = []
    for room in given["rooms"]:
        package = importlib.import_module(room)
        modules += [room, *(
            info.name for info in pkgutil.walk_packages(package.__path__, room + ".")
            if not info.name.endswith("__main__")
        )]
    imports = {name: attempt(lambda: importlib.import_module(name) and "") for name in modules}
    doors = {name: attempt(lambda: importlib.import_module(name) and "") for name in given["doors"]}

    def part(kind, choice, estimates):
        instance = table(kind).build(choice)
        if not estimates:
            return ""
        from shoal.cost.shapes import resolve
        job = TrainJob.model_validate(given["job"])
        work = Work(shape=resolve(job.model), job=job.model_copy(update={"microbatch": 4}))
        machine = Machine.model_validate(given["machine"])
        first = instance.estimate(work, machine)
        tracemalloc.start()
        second = instance.estimate(work, machine)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if first != second:
            return "two estimates of the same work differ"
        if peak > 1_000_000:
            return f"its estimate allocates {peak} bytes"
        return ""

    parts = {
        f"{kind}.{choice['name']}": attempt(lambda: part(kind, choice, estimates))
        for kind, choice, estimates in given["parts"]
    }
    assert "torch" not in sys.modules
    json.dump({"imports": imports, "doors": doors, "parts": parts}, sys.stdout)
"""

TORCH_FREE = ("shoal.core", "shoal.ir", "shoal.machine", "shoal.cost", "shoal.plan")
ROOMS = (
    *TORCH_FREE,
    "shoal.fields",
    "shoal.kernel",
    "shoal.model",
    "shoal.memory",
    "shoal.parallel",
    "shoal.checkpoint",
    "shoal.corpora",
    "shoal.train",
    "shoal.serve",
    "shoal.claims",
    "shoal.api",
    "shoal.app",
)


@pytest.fixture(scope="session")
def without_torch() -> dict[str, dict[str, str]]:
    """imports, doors, parts -> name -> complaint (empty when all is well), torch blocked."""
    given = {
        "rooms": TORCH_FREE,
        "doors": ROOMS,
        "parts": [(kind, choice(kind, name), REACHED[kind] == "TrainJob") for kind, name in PARTS],
        "job": small_job().model_dump(mode="json"),
        "machine": small_machine().model_dump(mode="json"),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BLOCKED)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    data: dict[str, dict[str, str]] = json.loads(done.stdout)
    return data
