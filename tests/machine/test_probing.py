"""From measurements to a machine; noise; doctor; comparison; roofline."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from own_home import own_home
from shoal.core.errors import ConfigError, MachineError, NoisyMachineError
from shoal.core.native import compiler
from shoal.core.parts import Choice
from shoal.ir.machine import Device, Machine, Measurement, MemoryTier
from shoal.machine import doctor as doctor_module
from shoal.machine import host, noise, probing
from shoal.machine.comparing import compare, differences
from shoal.machine.described import load
from shoal.machine.fingerprint import fingerprint, versions
from shoal.machine.noise import NoiseReport, NoiseWatch
from shoal.machine.probing import assemble, probe, saved_path
from shoal.machine.protocols import ProbeContext
from shoal.machine.roofline import attainable, ridge, roofline_svg

TINY = (
    Choice(name="memory_latency", options={"largest_bytes": 2**16, "repeats": 2}),
    Choice(
        name="memory_bandwidth",
        options={"smallest_bytes": 8192, "largest_bytes": 2**16, "repeats": 2},
    ),
    Choice(name="units", options={"repeats": 2, "blocks": 500}),
    Choice(name="loopback", options={"bulk_bytes": 2**20, "repeats": 2}),
)
QUIET = NoiseReport(0.0, 0.0, 0.0, ())
BUSY = NoiseReport(3.0, 0.2, 0.4, ("load average 3.0 on 2 cores; stop other programs",))


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def number(probe_name, quantity, median, at=None, plausible=True, note=""):
    return Measurement(
        probe=probe_name,
        quantity=quantity,
        unit="1",
        median=median,
        low=0.9 * median,
        high=1.1 * median,
        repeats=5,
        at=at,
        plausible=plausible,
        note=note,
    )


def made(monkeypatch, *, extra=(), facts=None, quiet=QUIET):
    monkeypatch.setattr(host, "cpus", lambda: (0, 1))
    monkeypatch.setattr(host, "caches", lambda: {"l1d": 2**15, "l2": 2**20, "l3": 2**25})
    results = [
        number("units", "clock", 2e9),
        number("units", "fma_fp32", 64.0),
        number("units", "dot_bf16", 128.0),
        number("units", "tile_bf16", 1024.0),
        number("matmul", "matmul_fp32", 1e11, at=256),
        number("matmul", "matmul_fp32", 2e11, at=1024),
        number("matmul", "matmul_fp32_1core", 1.1e11, at=1024),
        number("matmul", "matmul_bf16", 2e12, at=1024),
        number("memory_latency", "l1d.latency", 1e-9),
        number("memory_latency", "l1d.capacity", 33000.0),
        number("memory_latency", "dram.latency", 1e-7),
        number("memory_bandwidth", "read_2threads", 4e11, at=16384),
        number("memory_bandwidth", "read_2threads", 2e11, at=65536),
        number("memory_bandwidth", "read_2threads", 9e12, at=262144, plausible=False),
        number("memory_bandwidth", "read_2threads", 3e10, at=2**28),
        number("framework", "op_overhead", 2e-6),
        number("collective", "latency", 5e-5),
        number("collective", "bandwidth", 1e9),
        number("system", "file_read_cold", 2e9),
        *extra,
    ]
    return assemble(results, {"gpu": "no NVIDIA driver on this machine"}, facts or {}, quiet)


def test_measurements_become_a_machine(monkeypatch):
    machine = made(monkeypatch)
    device = machine.device
    assert device.peak_flops == {"fp32": 64 * 2e9 * 2, "bf16": 1024 * 2e9 * 2}
    assert device.matmul_flops == {"fp32": 2e11, "bf16": 2e12}
    # No rate of one core was probed for bf16: that of all cores stands for it.
    assert device.matmul_flops_1core == {"fp32": 1.1e11, "bf16": 2e12}
    assert device.op_overhead_s == 2e-6
    tiers = {tier.name: tier for tier in device.memory}
    assert list(tiers) == ["l1d", "l2", "l3", "dram", "disk"]
    assert tiers["l1d"].capacity_bytes == 33000
    assert tiers["l1d"].latency_s == 1e-9
    assert tiers["l1d"].read_bandwidth == 4e11
    assert tiers["l2"].capacity_bytes == 2**20  # not probed: the OS's number, and it says so
    assert "operating system" in machine.sources["device.memory.l2.capacity_bytes"]
    assert tiers["l2"].read_bandwidth == 2e11  # the implausible one does not count
    assert tiers["l3"].read_bandwidth is None
    assert tiers["dram"].read_bandwidth == 3e10
    assert tiers["dram"].capacity_bytes == host.memory_total()
    assert tiers["disk"].read_bandwidth == 2e9
    link = machine.link("loopback")
    assert (link.latency_s, link.bandwidth) == (5e-5, 1e9)
    assert machine.sources["skipped.gpu"] == "no NVIDIA driver on this machine"
    assert machine.noise == pytest.approx(0.1)
    assert machine.provenance == "probed"
    assert machine.fingerprint["cores"] == "2"


def test_a_reached_rate_above_the_units_is_the_peak(monkeypatch):
    machine = made(monkeypatch, extra=[number("matmul", "matmul_fp32", 9e11, at=2048)])
    assert machine.device.peak_flops["fp32"] == 9e11


def test_a_busy_machine_is_marked(monkeypatch):
    assert made(monkeypatch, quiet=BUSY).sources["noise"].startswith("noisy: load average 3.0")


def test_a_gpu_is_the_device(monkeypatch):
    facts = {"gpu": {"name": "Card", "count": 2, "memory_bytes": 2**34, "l2_bytes": 2**25}}
    extra = [
        number("gpu", "matmul_bf16", 1e14, at=4096),
        number("gpu", "memory", 1e12),
        number("gpu", "op_overhead", 6e-6),
        number("gpu", "host_to_device", 2e10),
    ]
    machine = made(monkeypatch, extra=extra, facts=facts)
    assert (machine.device.kind, machine.device.name) == ("gpu", "Card")
    assert machine.devices_per_node == 2
    assert machine.device.matmul_flops == {"bf16": 1e14}
    assert machine.device.main_memory.capacity_bytes == 2**34
    assert machine.link("device").bandwidth == 2e10


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_probe_runs_saves_and_tells(tmp_path):
    notes = []
    machine = probe(
        probes=TINY,
        save=saved_path(),
        progress=lambda done, total, text: notes.append((done, text)),
    )
    assert load("local") == machine
    assert [text for _, text in notes[: len(TINY)]] == [choice.name for choice in TINY]
    assert {item.probe for item in machine.measurements} == {choice.name for choice in TINY}
    assert machine.device.main_memory.read_bandwidth > 0
    assert machine.link("loopback").bandwidth > 0


class Products:
    """A probe of products whose rates are those of a list, one a run."""

    def __init__(self, rates):
        self.rates = rates

    def run(self, context):
        return [number("matmul", "matmul_fp32", self.rates.pop(0), at=64)]


class Arithmetic:
    def run(self, context):
        return [number("units", "clock", 2e9), number("units", "fma_fp32", 64.0)]


@pytest.mark.parametrize(
    ("rates", "reached"),
    [([8e6, 2e11], {"fp32": 2e11}), ([8e6, 9e6], {}), ([1e10], {"fp32": 1e10})],
)
def test_products_far_below_the_peak_are_measured_again_or_left_out(monkeypatch, rates, reached):
    parts = probing.table("probe")
    built = {"units": Arithmetic(), "matmul": Products(rates)}
    monkeypatch.setattr(type(parts), "build", lambda self, choice, **_: built[choice.name])
    monkeypatch.setattr(host, "cpus", lambda: (0, 1))
    machine = probe(probes=["units", "matmul"])
    assert machine.device.matmul_flops == reached and not rates
    assert machine.device.peak_flops["fp32"] == 64 * 2e9 * 2
    why = machine.sources.get("skipped.matmul.fp32", "")
    assert why.startswith("0.00900 GFLOP/s, of a peak of 256") or reached
    doubtful = [item for item in machine.measurements if not item.plausible]
    assert [item.note for item in doubtful] == ([] if reached else [why])


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_without_a_place_nothing_is_saved():
    probe(probes=TINY[2:3])
    assert not saved_path().exists()


def test_wrong_probes_are_named():
    with pytest.raises(ConfigError, match="did you mean 'units'"):
        probe(probes=["unit"])


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_strict_refuses_a_busy_machine_and_saves_nothing(monkeypatch):
    monkeypatch.setattr(NoiseWatch, "seen", lambda self: BUSY)
    with pytest.raises(NoisyMachineError, match=r"too busy for measurements: load average 3\.0"):
        probe(probes=TINY[2:3], strict=True, save=saved_path())
    assert not saved_path().exists()
    machine = probe(probes=TINY[2:3])
    assert "noisy" in machine.sources["noise"]


def test_every_kind_of_noise_is_seen(monkeypatch):
    monkeypatch.setattr(host, "cpus", lambda: (0, 1))
    monkeypatch.setattr(host, "load_average", lambda: 3.0)
    ticks = iter([(100.0, 0.0), (200.0, 20.0)])
    monkeypatch.setattr(host, "ticks", lambda: next(ticks))
    monkeypatch.setattr(noise, "_spins", lambda: [1.0, 1.0, 1.5, 2.0])
    seen = NoiseWatch().seen()
    assert seen.steal == pytest.approx(0.2)
    assert [
        word in text
        for word, text in zip(("load average", "guests", "loop"), seen.reasons, strict=False)
    ] == [True] * 3


def test_a_quiet_machine_has_no_reasons(monkeypatch):
    monkeypatch.setattr(host, "load_average", lambda: 0.0)
    monkeypatch.setattr(host, "ticks", lambda: (1.0, 0.0))
    monkeypatch.setattr(noise, "_spins", lambda: [1.0] * 5)
    assert NoiseWatch().seen().reasons == ()


def test_samples_are_kept_and_summed_up():
    context = ProbeContext()
    result = context.measured("p", "q", "s", [float(i) for i in range(1, 102)], at=4.0)
    assert (result.low, result.median, result.high, result.repeats) == (6.0, 51.0, 96.0, 101)
    assert context.samples[0].values[-1] == 101.0
    assert not context.measured("p", "q", "s", [0.0]).plausible
    with pytest.raises(ConfigError, match="some samples"):
        context.measured("p", "q", "s", [])


# -- doctor -----------------------------------------------------------------


def test_doctor_looks_at_everything():
    checks = {check.name: check for check in doctor_module.doctor()}
    assert len(checks) == len(doctor_module.CHECKS)
    assert checks["python"].status == "ok"
    assert checks["probe"].status == "warn"  # an empty home
    for check in checks.values():
        assert check.detail
        assert bool(check.fix) == (check.status != "ok")


def test_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor_module, "compiler", lambda: None)
    monkeypatch.setattr(host, "memory_available", lambda: 2**20)
    monkeypatch.setattr(host, "cpus", lambda: (0,))
    monkeypatch.setattr(host, "load_average", lambda: 9.0)
    checks = {check.name: check for check in doctor_module.doctor()}
    assert checks["compiler"].status == checks["memory"].status == "fail"
    assert checks["cores"].status == checks["load"].status == "warn"
    assert "apt install g++" in checks["compiler"].fix


def test_doctor_reads_the_saved_probe():
    load("laptop").save(saved_path())
    assert "another CPU" in doctor_module._probed().detail
    saved_path().write_text("nonsense: 1\n")
    assert doctor_module._probed().status == "fail"


# -- fingerprint ------------------------------------------------------------


def test_fingerprint_is_text_and_stable():
    assert fingerprint() == fingerprint()
    assert all(isinstance(value, str) and value for value in fingerprint().values() if value != "")
    assert {"cpu", "cores", "kernel", "memory_bytes"} <= set(fingerprint())
    assert "numpy" in versions()


def test_the_room_imports_no_torch():
    code = (
        "import sys, shoal.machine\n"
        "from shoal.core.parts import table\n"
        "for name in table('probe'): table('probe').load(name)\n"
        "from shoal.machine import probing, described, doctor, comparing, roofline\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- comparison and roofline ------------------------------------------------


def test_compare_is_a_table_of_all_numbers():
    rows = {row.quantity: row for row in compare(load("A100"), load("H100"))}
    assert rows["device.peak_flops.bf16"][1:] == ("312 TFLOP/s", "989 TFLOP/s", "3.17x")
    assert rows["device.peak_flops.fp8"][1] == ""
    assert rows["links.device.latency_s"].a == "4 us"
    same = differences(load("H100"), load("H100"))
    assert all(found.ratio == 1.0 for found in same)


def simple(**fields):
    memory = MemoryTier(name="dram", capacity_bytes=2**30, read_bandwidth=1e10)
    device = Device(name="toy & co", kind="cpu", memory=(memory,), **fields)
    return Machine(name="toy", device=device)


def test_roofline_numbers():
    machine = simple(matmul_flops={"fp32": 1e12})
    assert ridge(machine) == 100
    assert attainable(machine, 10) == 1e11
    assert attainable(machine, 1000) == 1e12


@pytest.mark.parametrize("name", ["H100", "laptop"])
def test_the_roofline_is_a_valid_picture(name):
    root = ET.fromstring(roofline_svg(load(name)))
    assert root.tag.endswith("svg")
    lines = [item for item in root if item.tag.endswith("polyline")]
    device = load(name).device
    assert len(lines) == len({*device.matmul_flops, *device.peak_flops})
    for line in lines:
        points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
        assert points[1][1] == points[2][1] < points[0][1]  # rises, then is flat
        assert all(0 <= x <= 720 and 0 <= y <= 440 for x, y in points)


def test_names_are_escaped():
    assert "toy &amp; co" in roofline_svg(simple(matmul_flops={"fp32": 1e12}))


def test_a_machine_without_rates_has_no_roofline():
    with pytest.raises(MachineError, match="matmul_flops or peak_flops"):
        roofline_svg(simple())
    with pytest.raises(MachineError, match="expected one of fp32"):
        ridge(simple(matmul_flops={"fp32": 1e12}), "bf16")
