"""Machines by name, shorthand and file."""

import math
import re

import pytest
import yaml

from shoal.core.errors import MachineError
from shoal.ir.machine import Machine
from shoal.machine.described import load, names
from shoal.machine.probing import saved_path


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))


def numbers(raw, prefix=""):
    """Dotted names of the facts of a description."""
    for key, value in raw.items():
        place = f"{prefix}.{key}" if prefix else key
        if key in ("memory", "links"):
            for item in value:
                yield f"{place}.{item.get('name') or item.get('scope')}"
        elif isinstance(value, dict):
            yield from numbers(value, place) if key == "device" else [place]
        elif isinstance(value, (int, float)):
            yield place


@pytest.mark.parametrize("name", names())
def test_every_shipped_number_has_a_source(name):
    machine = load(name)
    raw = machine.model_dump(exclude_defaults=True, exclude={"sources"})
    sources = machine.sources
    missing = [
        place
        for place in numbers(raw)
        if not any(place == s or place.startswith(s + ".") for s in sources)
    ]
    assert missing == []
    assert machine.provenance == "declared"
    assert all(len(text) > 15 for text in sources.values())


@pytest.mark.parametrize("name", names())
def test_shipped_numbers_are_possible(name):
    machine = load(name)
    device = machine.device
    for dtype, reached in device.matmul_flops.items():
        if dtype in device.peak_flops:
            assert reached < device.peak_flops[dtype]
    assert 1e10 < device.main_memory.read_bandwidth < 1e13
    # Sizes rise and bandwidths fall on the way down.
    sizes = [tier.capacity_bytes for tier in device.memory]
    assert sizes == sorted(sizes)


def test_a_published_number():
    device = load("H100").device
    assert math.isclose(device.peak_flops["bf16"], 989.4e12)
    assert device.main_memory.read_bandwidth == 3.35e12


def test_what_is_described():
    assert set(names()) >= {
        *("H100", "H200", "B200", "A100", "A100-40GB", "MI250X", "Frontier", "MI300X"),
        *("L40S", "RTX-4090", "TPU-v5p", "M4-Max", "laptop", "B300", "GB300", "H800", "H20"),
        *("GH200", "RTX-3090", "RTX-5090", "RTX-PRO-6000", "A10", "A6000", "L4", "T4", "MI325X"),
        *("MI355X", "TPU-v5e", "TPU-v6e", "Trainium2", "Gaudi3", "DGX-Spark", "M3-Ultra"),
    }


@pytest.mark.parametrize("name", names())
def test_prices_have_a_date_and_power_an_idle_draw(name):
    machine = load(name)
    assert 0 < machine.device.idle_watts < machine.device.power_watts
    if machine.usd_per_device_hour is not None:
        assert re.search(r"20\d\d-\d\d", machine.sources["usd_per_device_hour"])


def test_a_module_of_two_dies_is_two_devices():
    # AMD's data sheet speaks of a module: 383 TFLOP/s in bf16, 128 GB, 3,276.8 GB/s, 500 W.
    die = load("Frontier").device
    assert 2 * die.peak_flops["bf16"] == 383e12
    assert 2 * die.main_memory.capacity_bytes == 128e9
    assert math.isclose(2 * die.main_memory.read_bandwidth, 3276.8e9)
    assert 2 * die.power_watts == 500
    # Four ports of 200 Gbit/s a node, for eight dies.
    assert 8 * load("Frontier").link("node").bandwidth == 4 * 200e9 / 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.yaml", "a YAML file that exists"),
        ("local", "run: shoal probe"),
    ],
)
def test_wrong_names_say_what_is_right(text, message):
    with pytest.raises(MachineError, match=message):
        load(text)


def test_local_is_the_saved_probe():
    load("laptop").save(saved_path())
    assert load("local") == load("laptop")


def change(tmp_path, edit):
    raw = load("H100").model_dump(mode="json", exclude_none=True)
    edit(raw)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_a_file_reads_back(tmp_path):
    path = change(tmp_path, lambda raw: None)
    assert load(path) == load(str(path)) == load("H100")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda raw: raw["device"]["peak_flops"].update(bf16=9.9e20), ["bf16", "FLOP/s"]),
        (lambda raw: raw["device"]["peak_flops"].update(bf16=-1), ["peak_flops.bf16"]),
        (lambda raw: raw["device"]["matmul_flops"].update(bf16=9e15), ["matmul_flops.bf16"]),
        (lambda raw: raw["device"]["memory"][1].update(capacity_bytes=0), ["capacity_bytes"]),
        (lambda raw: raw["device"]["memory"][1].update(read_bandwidth=1e19), ["read_bandwidth"]),
        (lambda raw: raw["device"]["memory"].pop(1), ["dram or hbm"]),
        (lambda raw: raw["device"]["memory"][1].update(capacity_bytes=80), ["capacity_bytes"]),
        (lambda raw: raw["device"]["memory"][1].update(read_bandwidth=0), ["read_bandwidth"]),
        (lambda raw: raw["device"]["memory"][1].update(read_bandwidth=3350), ["read_bandwidth"]),
        (lambda raw: raw["device"]["memory"][1].update(read_bandwidth=3.35e6), ["read_bandwidth"]),
        (lambda raw: raw["device"]["memory"][1].update(latency_s=-1e-9), ["latency_s"]),
        (lambda raw: raw["device"]["peak_flops"].update(bf16=989), ["peak_flops.bf16", "1e12"]),
        (lambda raw: raw["device"]["matmul_flops"].update(bf16=700), ["matmul_flops.bf16"]),
        (lambda raw: raw["device"].update(idle_watts=701), ["idle_watts", "power_watts"]),
        (lambda raw: raw["device"].update(power_watts=0), ["power_watts"]),
        (lambda raw: raw["device"].update(op_overhead_s=5), ["op_overhead_s"]),
        (lambda raw: raw["links"][0].update(bandwidth=0), ["links.0.bandwidth"]),
        (lambda raw: raw["links"][0].update(bandwidth=450), ["links.device.bandwidth", "B/s"]),
        (lambda raw: raw["links"][0].update(latency_s=4), ["links.device.latency_s", "5e-6"]),
        (lambda raw: raw["links"][0].update(latency_s=-1), ["latency_s"]),
        (lambda raw: raw["links"][0].update(scope="node"), ["scope node", "twice"]),
        (lambda raw: raw.update(usd_per_device_hour=-1), ["usd_per_device_hour"]),
        (lambda raw: raw.update(nodes=3, sites=2), ["sites = 2", "3 nodes"]),
        (lambda raw: raw.update(nodes=4, sites=2), ["no link of scope wan"]),
        (
            lambda raw: raw.update(
                nodes=9,
                fabric={"leaves": 2, "hosts_per_leaf": 4, "spines": 1, "port_bandwidth": 5e10},
            ),
            ["fabric", "8 ports for 9 nodes"],
        ),
        (
            lambda raw: raw.update(
                fabric={"leaves": 1, "hosts_per_leaf": 4, "port_bandwidth": 400}
            ),
            ["fabric.port_bandwidth", "5e10"],
        ),
        (
            lambda raw: raw.update(
                fabric={"leaves": 1, "hosts_per_leaf": 4, "port_bandwidth": 1e9}
            ),
            ["links.node.bandwidth", "fabric ports"],
        ),
        (
            lambda raw: raw.update(
                fabric={"leaves": 2, "hosts_per_leaf": 4, "port_bandwidth": 5e10}
            ),
            ["fabric.spines"],
        ),
        (lambda raw: raw.update(nodes=2, links=[]), ["no link of scope node"]),
        (lambda raw: raw["device"].update(memroy=1), ["device.memroy", "no such key"]),
        (lambda raw: raw.pop("device"), ["device", "missing"]),
    ],
)
def test_impossible_numbers_name_file_key_and_fix(tmp_path, edit, words):
    path = change(tmp_path, edit)
    with pytest.raises(MachineError) as raised:
        load(path)
    text = str(raised.value)
    assert text.startswith(str(path))
    assert all(word in text for word in words)
    assert ";" in text  # and what to do


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "a: 1\na: 2\n", "\x00\x01"])
def test_broken_yaml(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(MachineError, match=r"broken\.yaml"):
        load(path)


def test_a_machine_survives_saving(tmp_path):
    machine = load("16xH100@IB400")
    machine.save(tmp_path / "m.yaml")
    assert Machine.load(tmp_path / "m.yaml") == machine
