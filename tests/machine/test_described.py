"""Machines by name, shorthand and file."""

import math

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


@pytest.mark.parametrize(
    ("text", "nodes", "each"),
    [
        ("H100", 1, 1),
        ("1xH100", 1, 1),
        ("4xRTX-4090", 1, 4),
        ("8xh200", 1, 8),
        ("16xH100", 2, 8),
        ("64xA100-80GB", 8, 8),
        ("H100-SXM", 1, 1),
        ("laptop", 1, 1),
        ("3xlaptop", 3, 1),
    ],
)
def test_shorthand(text, nodes, each):
    machine = load(text)
    assert (machine.nodes, machine.devices_per_node, machine.name) == (nodes, each, text)


def test_the_network_can_be_chosen():
    slow, fast = load("16xA100@ETH25"), load("16xA100@IB400")
    assert slow.link("node").bandwidth == 25e9 / 8
    assert fast.link("node").bandwidth == 50e9
    assert fast.link("node").latency_s < slow.link("node").latency_s
    assert fast.link("device") == load("A100").link("device")
    assert "400 Gbit/s" in fast.sources["links.node"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12xH100", "multiple of 8"),
        ("0xH100", "1 to 8 devices"),
        ("16xH1000", "did you mean 'H100'"),
        ("x", "expected one of A100"),
        ("8 x H100", r"\[COUNTx\]NAME"),
        ("8xH100@TIN200", r"\[COUNTx\]NAME"),
        ("8xH100@IB0", "above 0 Gbit/s"),
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
        (lambda raw: raw["links"][0].update(latency_s=-1), ["latency_s"]),
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
