"""Tokens of the same requests by every part of the serving engine, as they were recorded.

Forty requests for who decides what runs, who holds the cache, who gives way and who guesses; eight
for the others. Tokens, ends, and what each step computed are compared exactly. The models are in
fp64, so that another kind of CPU has the same tokens; what can only be served in fp32 or bf16 is
compared on the recording's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serve")]

from cpp_first import cpp_first  # noqa: E402
from drafters import write_all  # noqa: E402
from recorded import settle  # noqa: E402
from served import (  # noqa: E402
    FEW,
    VOCAB,
    Clock,
    InPlace,
    engine_for,
    model_of,
    requests_of,
    serve,
    small_requests,
    worker_requests,
)
from thread_ranks import thread_engine  # noqa: E402

from shoal.core.parts import table  # noqa: E402
from shoal.cost.step_cost.fitted import FittedStepCost  # noqa: E402
from shoal.ir import HostLink, ServeJob  # noqa: E402
from shoal.kernel import dispatch  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting, RowCosts  # noqa: E402
from shoal.serve.engine.build import prepare  # noqa: E402

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4  # of log probabilities in fp32, on another kind of CPU

SMALL = {"kv_tokens": 256}  # of requests that want 600 at a time
LINK = HostLink(copy_s=1e-6, bytes_per_s=4e10, block_bytes=4096, layers=2)
DEAD_LINK = HostLink(copy_s=1.0, bytes_per_s=4e7, block_bytes=4096, layers=2)
SLOW_LINK = HostLink(copy_s=1e-4, bytes_per_s=4e7, block_bytes=4096, layers=2)
COST = FittedStepCost(step=1e-3, token=1e-4, prompt_pair=0, decode_key=0, chunk=0)
MARKOV = {"name": "fair", "policy": "markov", "frequency": 0.3}


def compare(row, actual, *, anywhere=True):
    settle("tokens", row, actual, tolerance=TOLERANCE, anywhere=anywhere)


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """One thread, no measured times, and kernels that no saved probe chooses."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    costs = RowCosts(rows=(1, 64), seconds_of=(1.0, 2.0))
    monkeypatch.setattr("shoal.serve.decode.build.measure_costs", lambda *_: costs)
    monkeypatch.setattr("shoal.serve.decode.heads.prompted._paying", lambda *_: 16)
    monkeypatch.setattr("shoal.serve.cache.host.ThreadPoolExecutor", InPlace)
    monkeypatch.setattr(dispatch, "_remembered", cpp_first())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Name -> directory of three adapters, as if they had been trained."""
    from shoal.train.peft import files

    folder, adapters = tmp_path_factory.mktemp("adapters"), {}
    for number, name in enumerate(("lora", "dylora", "vera")):
        part = {"name": name, "targets": "*.q_proj|*.v_proj|*.o_proj|*.gate_proj|*.down_proj"}
        own = model_of(dtype=torch.float32)
        options = {} if name == "vera" else {"r": 3 + number}
        handle = table("peft").build({**part, **options}).inject(own, seed=number)
        source = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for value in handle.trainable().values():
                value.add_(torch.randn(value.shape, generator=source) * 0.2)
        files.write(folder / name, handle)
        adapters[name] = str(folder / name)
    return adapters


SCHEDULERS = {
    "fcfs": {},
    "fcfs whole": {"scheduler": {"name": "fcfs", "chunked": False}, "max_step_tokens": 128},
    "fair vtc": {"scheduler": {"name": "fair", "frequency": 0.3}, **SMALL},
    "fair markov": {"scheduler": MARKOV, **SMALL},
    "fair uniform": {"scheduler": {"name": "fair", "policy": "uniform", "frequency": 0.2}},
    "fair fixed": {"scheduler": {"name": "fair", "frequency": 0}, **SMALL},
    "prefill_first": {"scheduler": "prefill_first", "max_step_tokens": 128},
    "static": {"scheduler": "static", "max_step_tokens": 128},
    "temporal_fusion": {"scheduler": {"name": "temporal_fusion", "lane_tokens": 24}},
}


@pytest.mark.parametrize("row", SCHEDULERS)
def test_schedulers(row, home, adapters):
    engine = engine_for(model_of(), home / "target", adapters=adapters, **SCHEDULERS[row])
    result = serve(engine, requests_of(adapters=(None, *adapters)))
    assert set(result["ends"]) == {"s", "l", "a"}
    assert result["ends"].count("a") == 3
    if "kv_tokens" in SCHEDULERS[row]:
        assert result["counts"]["preemptions_total"] > 0
    compare(f"scheduler={row}", result)


KV = {
    "paged": {},
    "paged of 4": {"kv": {"name": "paged", "block_size": 4}},
    "paged alone": {"kv": {"name": "paged", "prefix_reuse": False}, **SMALL},
    "blockgroups": {"kv": {"name": "blockgroups", "init": 4}},
    "blockgroups small": {"kv": {"name": "blockgroups", "init": 3, "block_size": 8}, **SMALL},
    "contiguous": {"kv": "contiguous", "kv_tokens": 640},
    "slots": {"kv": {"name": "slots", "max_len": 192}, "kv_tokens": 1536},
}


@pytest.mark.parametrize("row", KV)
def test_kv_managers(row, home):
    compare(f"kv={row}", serve(engine_for(model_of(), home / "target", **KV[row]), requests_of()))


class Lending:
    """Instances in this process that lend each other memory, as one engine."""

    def __init__(self, directory, sockets):
        from shoal.plan.batching.cache.loans import LoanRegistry
        from shoal.serve.cluster.distkv import EvenCost
        from shoal.serve.cluster.distkv_instance import DistKVInstance

        job = {
            "model": str(directory), "kv": {"name": "distributed", "instances": 3, "block_size": 8},
            "kv_tokens": 96, "max_running": 8, "max_step_tokens": 32, "threads": 1,
            "max_position": 192,
        }  # fmt: skip
        described = ServeJob.model_validate(job).model_dump(mode="json")
        words = {"job": described, "directory": str(sockets), "dtype": "fp32"}
        self.instances = [DistKVInstance({**words, "instance": n}, self) for n in range(3)]
        for one in self.instances:
            paths = [[n, str(sockets / f"lender{n}")] for n in range(3) if n != one.number]
            one.handle({"kind": "peers", "paths": paths})
            one.handle({"kind": "room", "blocks": 22})
        self.registry, self.owner = LoanRegistry(3, 8, EvenCost()), {}

    def send(self, message):
        """What instances say to a parent that they do not have."""

    def add(self, request):
        one = self.owner[request.id] = self.instances[len(self.owner) % 3]
        one.engine.add(request)

    def abort(self, request):
        return self.owner[request].engine.abort(request)

    @property
    def busy(self):
        return any(one.engine.busy or one.kv.borrowed for one in self.instances)

    def step(self):
        outputs = []
        for one in self.instances:
            if one.engine.busy:
                outputs += one.engine.step()
            else:
                one.lending.settle()
            self.registry.beat(one.lending.beat(), 0.0)
        for debt in self.registry.recalls():
            self.instances[debt.debtor].lending.recall(debt.creditor, debt.blocks)
        for debt in self.registry.loans():
            self.instances[debt.debtor].lending.borrow(debt.creditor, debt.blocks)
        return outputs

    def drain_events(self):
        return [word for one in self.instances for word in one.engine.drain_events()]


def test_kv_distributed(home, tmp_path):
    lending = Lending(home / "target", tmp_path)
    try:
        result = serve(lending, requests_of(), planned=False)
        stats = [one.engine.stats() for one in lending.instances]
    finally:
        for one in lending.instances:
            one.close()
    assert sum(one["helped_tokens_total"] for one in stats) > 0
    compare("kv=distributed", result, anywhere=False)


SWAP = {"name": "swap", "asynchronous": "never"}
PREEMPT = {
    "recompute": ({}, LINK),
    "recompute fair": ({"scheduler": MARKOV}, LINK),
    "swap": ({"preempt": SWAP}, LINK),
    "swap plain": ({"preempt": {**SWAP, "keep_host_copies": False, "join": False}}, LINK),
    "swap fair": ({"preempt": {**SWAP, "park": False}, "scheduler": MARKOV}, LINK),
    "swap always": ({"preempt": {**SWAP, "asynchronous": "always"}, "scheduler": MARKOV}, LINK),
    "swap auto": ({"preempt": "swap", "scheduler": MARKOV}, LINK),
    "swap blockgroups": ({"preempt": SWAP, "kv": {"name": "blockgroups", "init": 2}}, LINK),
    "auto copies": ({"preempt": "auto", "scheduler": MARKOV}, LINK),
    "auto does both": ({"preempt": "auto", "scheduler": MARKOV}, SLOW_LINK),
    "auto computes": ({"preempt": "auto", "scheduler": MARKOV}, DEAD_LINK),
}


@pytest.mark.parametrize("row", PREEMPT)
def test_preemption(row, home):
    fields, link = PREEMPT[row]
    engine = engine_for(model_of(), home / "target", link=link, cost=COST, **SMALL, **fields)
    result = serve(engine, requests_of())
    assert result["counts"]["preemptions_total"] > 3
    swaps = row.startswith(("swap", "auto copies", "auto does"))
    assert (result["counts"].get("swap_in_blocks_total", 0) > 0) == swaps
    compare(f"preempt={row}", result)


SPECULATIVE = {
    "ngram": {"longest": 3, "shortest": 1},
    "ngram small": {"longest": 3, "shortest": 1},
    "ngram fair swap": {"longest": 3, "shortest": 1},
    "draft_model": {"depth": 4},
    "draft_model tree": {"depth": 3, "breadth": 3, "nodes": 7},
    "draft_model prompts": {"depth": 4, "prompts": "draft_ppd"},
    "easyspec": {"group": 3},
    "easyspec sequential": {"group": [1, 4, 1], "breadth": 2, "realise": "sequential"},
    "easyspec full": {"group": 2, "stale": "full", "calibrate": False},
    "falcon": {},
    "medusa": {},
    "medusa chain": {"heads": 2, "tree": "chain"},
    "medusa cartesian": {"tree": {"name": "cartesian", "widths": [2, 2, 1]}},
    "medusa paths": {"tree": {"name": "paths", "paths": [[0], [1], [0, 0]]}},
    "ppd": {},
}
GUESSING = {
    "ngram small": SMALL,
    "ngram fair swap": {"scheduler": MARKOV, "preempt": SWAP, **SMALL},
}
PATHS = {"draft_model": "draft", "easyspec": "deep"}


def guessing(home, name, options, **fields):
    """An engine that guesses six tokens in every step."""
    deep = name == "easyspec"
    chosen = {"name": name, **options}
    if name != "ngram":
        chosen["path"] = str(home / PATHS.get(name, name))
    if "prompts" in chosen and isinstance(chosen["prompts"], str):
        chosen["prompts"] = str(home / chosen["prompts"])
    model = model_of(num_layers=6) if deep else model_of()
    directory = home / ("deep" if deep else "target")
    engine = engine_for(model, directory, speculative=chosen, link=LINK, **fields)
    engine.scheduler.drafting = FixedDrafting(6)
    return engine


@pytest.mark.parametrize("row", SPECULATIVE)
def test_speculation(row, home):
    name, _, _ = row.partition(" ")
    engine = guessing(home, name, SPECULATIVE[row], **GUESSING.get(row, {}))
    result = serve(engine, requests_of())
    assert result["counts"]["draft_tokens_accepted_total"] > 0
    if row in GUESSING:
        assert result["counts"]["preemptions_total"] > 0
    compare(f"speculative={row}", result)


@pytest.mark.multi
def test_speculation_by_a_drafter_in_another_process(home):
    engine = guessing(home, "dovetail", {"depth": 3, "breadth": 3, "nodes": 7, "cores": []})
    try:
        result = serve(engine, requests_of())
    finally:
        engine.runner.drafter.close()
    assert result["counts"]["draft_trees_total"] > 0
    compare("speculative=dovetail", result)


ACCEPTANCES = ("greedy", "rejection", "sample_match", "typical")


@pytest.mark.parametrize("breadth", [1, 3])
@pytest.mark.parametrize("rule", ACCEPTANCES)
def test_acceptance(rule, breadth, home):
    options = {"depth": 3, "breadth": breadth, "accept": rule}
    result = serve(guessing(home, "draft_model", options), requests_of(FEW))
    assert ("x" in result["ends"]) == (rule == "greedy")
    compare(f"accept={rule} breadth {breadth}", result)


DIFFUSION = {
    "unmask=fixed": {"unmask": {"name": "fixed", "steps": 3}},
    "unmask=threshold": {"unmask": {"name": "threshold", "tau": 0.4}},
    "unmask=factor": {"unmask": {"name": "factor", "f": 3.0}},
    "unmask=hierarchical": {"unmask": {"name": "hierarchical", "tau": 0.6, "low": 0.2}},
    "unmask=credit": {"unmask": {"name": "credit", "tau": 0.5}},
    "refresh=none": {"refresh": "none", "unroll": 3},
    "refresh=prefix": {"refresh": "prefix"},
    "refresh=dual": {"refresh": "dual"},
    "refresh=vicinity": {
        "refresh": {"name": "vicinity", "a": 4, "b": 4, "warmup": 2, "every": 3}
    },
    "iteration=hard": {"unmask": {"name": "threshold", "tau": 0.3}, "iteration": "hard"},
    "iteration=smooth": {
        "unmask": {"name": "threshold", "tau": 0.3},
        "iteration": {"name": "smooth", "bar_from": 0.5},
    },
    "decode=diffusion": {"block": 32, "max_running": 3},
}  # fmt: skip


@pytest.mark.parametrize("row", DIFFUSION)
def test_diffusion(row):
    from shoal.serve.decode.diffusion.build import diffusion_engine

    options = {"block": 8, **DIFFUSION[row]}
    running = options.pop("max_running", 16)
    job = {
        "model": "tiny", "kv_tokens": 256, "threads": 1, "max_running": running,
        "decode": {"name": "diffusion", **options},
    }  # fmt: skip
    engine = diffusion_engine(ServeJob.model_validate(job), model_of("mdlm"))[0]
    compare(row, serve(engine, small_requests()))


LAYOUTS = ("contiguous", "interleaved", "combined")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("realise", ["queries", "keys"])
def test_concurrent_workers(layout, realise, home):
    from shoal.serve.decode.hogwild.engine import HogwildEngine
    from shoal.serve.decode.hogwild.part import Hogwild
    from shoal.serve.decode.hogwild.words import WorkerWords

    part = Hogwild(layout=layout, realise=realise, workers=3, probe_every=9)

    def words(number):
        if number == 1:
            return WorkerWords(piece=lambda token: b"w")
        return WorkerWords(
            rules=[20, 21],
            headers={"history": [10, 11], "others": [12, 13, 14], "own": [15]},
            prefixes=[[30 + worker, 50] for worker in range(number)],
            probe=[70, 71],
            early_answer=[80],
            marker="ANSWER",
            piece=lambda token: {1: b"w\n\n", 2: b"ANSWER"}.get(token, b"w"),
        )

    engine = HogwildEngine(model_of(), part, words, kv_tokens=2000, max_position=192)
    compare(f"hogwild_layout={layout} {realise}", serve(engine, worker_requests()))


def shipped(home, fields, model, **more):
    """An engine as ``shoal serve`` makes it, of fp32 weights, with kernels of inference."""
    fields = {"model": str(home / "target"), "threads": 1, "max_position": 192, **fields}
    prepared = prepare(ServeJob.model_validate(fields), model)
    return engine_for(prepared, home / "target", **fields, **more)


PRECISIONS = {
    "precision=fp32": {},
    "precision=fp32 exact": {"exact": True},
    "precision=fp32 ngram": {"speculative": {"name": "ngram", "shortest": 1}},
    "precision=bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("row", PRECISIONS)
def test_recorded_steps_of_kernels(row, home):
    engine = shipped(home, PRECISIONS[row], model_of(dtype=torch.float32))
    if "ngram" in row:
        engine.scheduler.drafting = FixedDrafting(6)
    compare(row, serve(engine, requests_of()), anywhere=False)


MEMORY = {
    "resident": {"name": "resident"},
    "peer": {"name": "peer", "fraction": 0.5},
    "peer waits": {"name": "peer", "prefetch": False, "fraction": 0.5},
    "superpipeline": {"name": "superpipeline", "k": 4, "k_prime": 2},
}


@pytest.mark.parametrize("row", MEMORY)
def test_memory(row, home):
    engine = shipped(home, {"memory": MEMORY[row]}, model_of(dtype=torch.float32, num_layers=8))
    compare(f"memory={row}", serve(engine, requests_of(FEW)), anywhere=False)


KV_FORMATS = {
    "plain": "plain",
    "int8": "int8",
    "bfp": {"name": "bfp", "block": 16},
    "bfp of 16 bits": {"name": "bfp", "bits": 16, "block": 16},
}


@pytest.mark.parametrize("row", KV_FORMATS)
def test_formats_of_the_cache(row, home):
    engine = engine_for(model_of(), home / "target", kv_format=KV_FORMATS[row])
    compare(f"kv_format={row}", serve(engine, requests_of(FEW)))


@pytest.mark.parametrize("ksort", ["pairs", "free"])
def test_caches_with_sorted_channels(ksort, home):
    form = {"name": "bfp", "ksort": ksort, "block": 16}
    engine = shipped(home, {"kv_format": form}, model_of(dtype=torch.float32))
    compare(f"kv_format=bfp {ksort}", serve(engine, requests_of(FEW)), anywhere=False)


WEIGHTS = (
    "int8-channel", "int4-g32", "int4-g32-2:4", "uint3-g16", "float4_e2m1-g32", "bipolar3-g32",
    "bfp4-g32", "nf4-g32",
)  # fmt: skip


@pytest.mark.parametrize("text", WEIGHTS)
def test_formats_of_weights(text, home):
    engine = shipped(home, {"weights": text}, model_of(dtype=torch.float32))
    compare(f"weight_format={text}", serve(engine, requests_of(FEW)), anywhere=False)


QUANTIZERS = ("rtn", "gptq", "awq")


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name, home, tmp_path):
    from shoal.kernel.formats import weight_format
    from shoal.model import huggingface
    from shoal.model.quantize.blocks import quantize

    text = torch.randint(0, VOCAB, (4, 64), generator=torch.Generator().manual_seed(2))
    part = table("quantizer").build(name)
    fmt = weight_format("int4-g32")
    plain = model_of(dtype=torch.float32)
    made = quantize(plain, fmt, part, text if part.calibrated else None)
    state = {key: one.detach() for key, one in made.model.named_parameters()}
    huggingface.write_state(tmp_path / "m", plain.config, state, packed=made.packed, method=name)
    engine = shipped(home, {}, huggingface.read(tmp_path / "m"))
    compare(f"quantizer={name}", serve(engine, requests_of(FEW)), anywhere=False)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral"])
def test_families(family, home):
    compare(
        f"family={family}", serve(engine_for(model_of(family), home / "target"), requests_of(FEW))
    )


RANKS = {
    "tp": ("llama", {"tp": 2}, {}),
    "tp of experts": ("mixtral", {"tp": 2}, {}),
    "pp": ("llama", {"pp": 2}, {}),
    "tp and pp": ("llama", {"tp": 2, "pp": 2, "in_flight": 4}, {}),
    "tp static": ("llama", {"tp": 2}, {"scheduler": "static"}),
    "tp swap": ("llama", {"tp": 2}, {"preempt": SWAP, **SMALL}),
    "pp small": ("llama", {"pp": 2}, SMALL),
}


@pytest.mark.parametrize("row", RANKS)
def test_ranks(row, home):
    """As threads; the sums of two ranks have the same bits in either order."""
    family, parallel, fields = RANKS[row]
    job = {
        "model": str(home / "target"), "kv_tokens": 4096, "threads": 1, "max_running": 16,
        "max_step_tokens": 64, "max_position": 192, "parallel": parallel, **fields,
    }  # fmt: skip
    engine, ranks = thread_engine(ServeJob.model_validate(job), model_of(family, torch.float32))
    engine.clock = Clock()
    try:
        result = serve(engine, requests_of())
    finally:
        ranks.close()
    assert ("preemptions_total" in result["counts"]) == ("kv_tokens" in fields)
    compare(f"parallel={row}", result, anywhere=False)


@pytest.mark.multi
def test_ranks_that_are_processes(home):
    from shoal.serve.ranks.workers import ranked_engine

    job = {
        "model": str(home / "target"), "kv_tokens": 4096, "threads": 1, "max_running": 16,
        "max_step_tokens": 64, "parallel": {"tp": 2},
    }  # fmt: skip
    engine = ranked_engine(ServeJob.model_validate(job), model_of().config)
    try:
        result = serve(engine, requests_of(FEW), planned=False)
    finally:
        engine.close()
    compare("parallel=tp by processes", result, anywhere=False)


class Apart:
    """Instances for prompts and for generation, as one engine."""

    def __init__(self, several):
        self.several, self.add, self.abort = several, several.add, several.abort
        self.drain_events = several.drain_events

    @property
    def busy(self):
        return self.several.num_open > 0

    def step(self):
        return self.several.step(5.0)


@pytest.mark.multi
def test_phases(home):
    from shoal.serve.cluster.disagg import DisaggEngine

    job = {
        "model": str(home / "target"), "kv_tokens": 512, "threads": 1, "max_running": 8,
        "max_step_tokens": 64, "disagg": {"prefill": 1, "decode": 1},
    }  # fmt: skip
    with DisaggEngine(ServeJob.model_validate(job)) as several:
        result = serve(Apart(several), requests_of(FEW), planned=False)
    compare("phase=prefill", result, anywhere=False)


# Every part of these tables has a row, whose name begins with that of the part.
COVERED = {
    "scheduler": SCHEDULERS,
    "kv": [*KV, "distributed"],
    "preempt": PREEMPT,
    "speculative": [*SPECULATIVE, "dovetail"],
    "accept": ACCEPTANCES,
    "unmask": DIFFUSION,
    "refresh": DIFFUSION,
    "iteration": DIFFUSION,
    "hogwild_layout": LAYOUTS,
    "memory": MEMORY,
    "kv_format": KV_FORMATS,
    "weight_format": WEIGHTS,
    "quantizer": QUANTIZERS,
}


@pytest.mark.parametrize("kind", COVERED)
def test_every_part_is_served(kind):
    rows = [row.removeprefix(f"{kind}=") for row in COVERED[kind]]
    for name in table(kind):
        assert any(row.startswith(name) for row in rows), f"{kind} = {name}: no row of it here"
