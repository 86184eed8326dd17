"""Each probe on tiny sizes: what it returns, what it refuses, what it skips."""

import dataclasses
import math
import platform
import re
import shutil
import subprocess

import pytest

from shoal.core.errors import ConfigError, MachineError, MissingExtraError
from shoal.core.native import compiler
from shoal.machine import host
from shoal.machine.native import library
from shoal.machine.probes import framework, gpu, matmul, units
from shoal.machine.probes.loopback import Loopback
from shoal.machine.probes.memory_bandwidth import KERNELS, MemoryBandwidth, bandwidth_samples
from shoal.machine.probes.memory_latency import MemoryLatency, PointerChain, footprints
from shoal.machine.probes.system import SystemProbe
from shoal.machine.probes.units import INSTRUCTIONS, Units, refuses
from shoal.machine.protocols import Probe, ProbeContext
from shoal.parallel.comm import measure
from shoal.train import PROBES

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture
def context(tmp_path):
    with ProbeContext(home=tmp_path) as made:
        yield made


def by(found):
    return {item.quantity: item for item in found}


@pytest.mark.parametrize("name", list(PROBES))
def test_every_probe_is_a_part(name):
    probe = PROBES.build(name)
    assert isinstance(probe, Probe)
    assert PROBES.build(PROBES.spell(probe)) == probe
    with pytest.raises(ConfigError, match="no such key"):
        PROBES.build({"name": name, "nonsense": 1})


@pytest.mark.parametrize("name", list(PROBES))
def test_repeats_are_not_negative(name):
    cls = PROBES.load(name)
    assert "repeats" in {field.name for field in dataclasses.fields(cls)}
    with pytest.raises(ConfigError, match="repeats"):
        cls(repeats=-1)


# -- memory latency ---------------------------------------------------------


@pytest.mark.parametrize("bytes_", [128, 4096, 5760, 65536, 2**20])
def test_the_chase_visits_every_line_exactly_once(bytes_):
    with PointerChain(bytes_, huge=False, seed=3) as chain:
        following = chain.follow()
    assert sorted(following) == list(range(chain.lines))
    at, seen = 0, 0
    while True:
        at, seen = following[at], seen + 1
        if at == 0:
            break
    assert seen == chain.lines  # one single cycle


def test_the_order_is_random_and_the_sequential_one_is_not():
    with PointerChain(2**18, huge=False, seed=1) as chain:
        scattered = chain.follow()
    with PointerChain(2**18, huge=False, random=False) as chain:
        walk = chain.follow()
    neighbours = sum(after == line + 1 for line, after in enumerate(scattered))
    assert neighbours < 0.01 * len(scattered)
    assert walk == [*range(1, len(walk)), 0]


def test_latency_curve_and_levels(context):
    result = MemoryLatency(largest_bytes=2**16, repeats=2).run(context)
    curve = [item for item in result if item.quantity == "latency"]
    assert [item.at for item in curve] == [float(size) for size in footprints(4096, 2**16)]
    assert all(item.median > 1e-10 for item in curve)
    assert "dram.latency" in by(result)
    assert len(context.samples) == len(result)


def test_huge_pages_that_are_not_granted_are_skipped_with_a_reason(context, monkeypatch):
    class Refused(PointerChain):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.granted = False

    monkeypatch.setattr("shoal.machine.probes.memory_latency.PointerChain", Refused)
    result = MemoryLatency(largest_bytes=2**15, repeats=1).run(context)
    assert "grants no huge pages" in context.skipped["memory_latency.latency"]
    assert {item.quantity for item in result if item.at} == {"latency_small_pages"}


def test_a_footprint_above_the_free_memory_is_refused(context, monkeypatch):
    monkeypatch.setattr(host, "memory_available", lambda: 2**20)
    with pytest.raises(MachineError, match=r"free memory.*largest_bytes"):
        MemoryLatency(largest_bytes=2**24).run(context)
    with pytest.raises(MachineError, match=r"free memory.*largest_bytes"):
        MemoryBandwidth(largest_bytes=2**24).run(context)


def test_footprints_are_half_octaves_of_whole_lines():
    sizes = footprints(4096, 2**20)
    assert sizes[::2] == [2**i for i in range(12, 21)]
    assert all(size % 64 == 0 for size in sizes)


@pytest.mark.parametrize(
    "options",
    [
        {"smallest_bytes": 64},
        {"largest_bytes": 4096},
        {"huge_pages": "maybe"},
        {"order": "backwards"},
    ],
)
def test_bad_latency_options(options):
    with pytest.raises(ConfigError, match=f"memory_latency.{next(iter(options))}"):
        MemoryLatency(**options)


# -- memory bandwidth -------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_bandwidth_kernels(kernel):
    if not library("bandwidth").bandwidth_has(KERNELS.index(kernel)):
        pytest.skip("no non-temporal stores on this CPU")
    for cpus in (host.cpus()[:1], host.cpus()):
        rates = bandwidth_samples(kernel, 2**16, cpus, repeats=3, sample_bytes=1e6)
        assert len(rates) == 3
        assert all(1e7 < rate < 1e14 for rate in rates)


def test_bandwidth_covers_one_and_all_threads(context):
    result = MemoryBandwidth(smallest_bytes=8192, largest_bytes=2**16, repeats=2).run(context)
    counts = {1, len(context.cpus)}
    assert {f"read_{count}threads" for count in counts} <= set(by(result))
    assert {item.at for item in result} == {8192.0, 32768.0, 65536.0}


# -- units ------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize("unit", INSTRUCTIONS, ids=lambda unit: unit.function)
def test_the_instruction_is_in_the_disassembly(unit):
    built = library("units")
    for chains in (1, *unit.chains):
        symbol = f"unit_{unit.function}_{chains}"
        if not hasattr(built, symbol):
            pytest.skip(f"not built for this CPU: {refuses(unit, built)}")
        text = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={symbol}", built._name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        hits = [line for line in text.splitlines() if re.search(rf"\b{unit.mnemonic}\b", line)]
        # Every chain has its own instruction: nothing was deleted or merged.
        assert len(hits) >= chains


def test_units_that_this_cpu_has_are_measured(context):
    result = by(Units(repeats=2, blocks=1000).run(context))
    assert result["clock"].unit == "Hz"
    names = {unit.quantity for unit in INSTRUCTIONS}
    skipped = {place.removeprefix("units.") for place in context.skipped}
    assert names == (set(result) & names) | skipped
    for name in names & set(result):
        assert result[name].median > 0
        assert f"{name}.latency" in result


def test_unsupported_instructions_are_skipped_with_the_reason(context, monkeypatch):
    monkeypatch.setattr(units, "cpu_flags", lambda: frozenset({"fpu"}))
    result = by(Units(repeats=1, blocks=100).run(context))
    assert set(result) == {"clock"}
    assert set(context.skipped) == {f"units.{unit.quantity}" for unit in INSTRUCTIONS}
    if platform.machine() == "x86_64":
        assert "this CPU has no" in context.skipped["units.fma_fp32"]


def test_other_architectures_are_refused(monkeypatch):
    monkeypatch.setattr(units.platform, "machine", lambda: "aarch64")
    assert "x86 instruction" in refuses(INSTRUCTIONS[0], library("units"))


# -- the system -------------------------------------------------------------


def test_system(context, tmp_path):
    result = by(SystemProbe(file_bytes=2**20, repeats=2).run(context))
    assert {"thread_wake", "page_fault", "memcpy", "disk_write", "file_read_warm"} <= set(result)
    assert ("core_to_core" in result) == (len(context.cpus) > 1)
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_a_full_disk_is_a_reason(context, monkeypatch):
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shoal.machine.probes.system.shutil.disk_usage", lambda _: full)
    result = by(SystemProbe(file_bytes=2**20, repeats=1).run(context))
    assert "disk_write" not in result
    assert "only 1000 bytes are free" in context.skipped["system.disk"]


def test_a_home_that_cannot_be_made_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with ProbeContext(home=tmp_path / "file" / "home") as context:
        SystemProbe(file_bytes=2**20, repeats=1).run(context)
    assert "system.disk" in context.skipped


def test_loopback(context):
    result = by(Loopback(bulk_bytes=2**20, repeats=2).run(context))
    assert result["round_trip"].median > 0
    assert result["bandwidth"].median > 1e6


# -- the framework ----------------------------------------------------------


def test_without_torch_numpy_is_measured_and_the_rest_skipped(context, monkeypatch):
    def missing(self):
        raise MissingExtraError("torch", "run", "measuring the framework")

    monkeypatch.setattr(ProbeContext, "worker", missing)
    result = matmul.Matmul(sizes=(64,), repeats=2).run(context)
    assert [item.quantity for item in result] == ["matmul_fp32"]
    assert result[0].median > 0
    assert framework.Framework(repeats=1).run(context) == []
    assert measure.CollectiveProbe(repeats=1).run(context) == []
    assert all("pip install 'shoal-ml[run]'" in context.skipped[p] for p in context.skipped)
    assert {"matmul.torch", "framework", "collective"} <= set(context.skipped)


@pytest.mark.multi
@pytest.mark.slow
def test_torch_is_measured_in_a_child(context):
    pytest.importorskip("torch")
    import torch

    before = torch.get_num_threads()
    products = matmul.Matmul(sizes=(32, 64), repeats=2).run(context)
    counts = {1, len(context.cpus)}
    assert {item.note for item in products} == {f"threads={count}" for count in counts}
    assert {item.at for item in products} == {32.0, 64.0}
    rest = by(framework.Framework(bytes_each=2**16, repeats=2).run(context))
    assert 1e-8 < rest["op_overhead"].median < 1e-2
    assert rest["op_overhead_train"].median > 0
    ring = by(measure.CollectiveProbe(large_bytes=2**16, repeats=2).run(context))
    assert ring["latency"].median > 0
    assert ring["bandwidth"].median > 0
    assert torch.get_num_threads() == before


def test_a_call_that_fails_in_the_child_is_reported(context):
    pytest.importorskip("torch")
    with pytest.raises(MachineError, match=r"AttributeError.*no_such_call"):
        context.worker().call("no_such_call")
    child = context.worker()
    child.close()
    child.close()
    with pytest.raises(MachineError, match="has ended"):
        child.call("hello")


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (matmul.Matmul, {"sizes": (4,)}),
        (matmul.Matmul, {"dtypes": ("fp7",)}),
        (framework.Framework, {"bytes_each": 1}),
        (measure.CollectiveProbe, {"small_bytes": 2**30}),
        (Loopback, {"message_bytes": 0}),
        (SystemProbe, {"file_bytes": 5}),
        (gpu.GpuProbe, {"sizes": ()}),
        (Units, {"blocks": 0}),
        (MemoryBandwidth, {"smallest_bytes": 1}),
    ],
)
def test_bad_options_name_the_place(cls, options):
    with pytest.raises(ConfigError, match=rf"probe\.\w+\.{next(iter(options))}"):
        cls(**options)


# -- the GPU ----------------------------------------------------------------


def test_without_a_driver_the_gpu_is_skipped(context, monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda _: None)
    monkeypatch.setattr(gpu.Path, "exists", lambda _: False)
    assert gpu.GpuProbe().run(context) == []
    assert context.skipped["gpu"] == "no NVIDIA driver on this machine"


class FakeWorker:
    """A child that answers like one with a GPU of 1 TFLOP/s and 1 TB/s."""

    def call(self, name, **options):
        if name == "gpu_facts":
            return {"name": "Card", "count": 2, "memory_bytes": 2**34, "l2_bytes": 2**25}
        seconds = {
            "matmul": lambda: 2 * options["m"] ** 3 / 1e12,
            "elementwise": lambda: 3 * options["bytes_"] / 1e12,
            "copy": lambda: options["bytes_"] / 1e10,
        }
        if name == "overhead":
            return {"add": [5e-6] * 3, "train": [2e-5] * 3}
        return [seconds[name]()] * 3


def test_gpu_numbers(context, monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(ProbeContext, "worker", lambda self: FakeWorker())
    result = by(gpu.GpuProbe(sizes=(1024,), repeats=3).run(context))
    assert math.isclose(result["matmul_bf16"].median, 1e12)
    assert math.isclose(result["memory"].median, 1e12)
    assert math.isclose(result["host_to_device"].median, 1e10)
    assert context.facts["gpu"]["name"] == "Card"


@pytest.mark.gpu
def test_the_real_gpu(context):
    result = by(gpu.GpuProbe(sizes=(1024,), repeats=3).run(context))
    if "gpu" in context.skipped:
        pytest.skip(context.skipped["gpu"])
    assert result["matmul_bf16"].median > 1e11
