"""Clusters: the shorthand's grammar, and what is made of it."""

import math

import pytest

from shoal.core.errors import MachineError
from shoal.ir import Fabric, Machine
from shoal.machine.composition import compose, join
from shoal.machine.described import load, names
from shoal.machine.shorthand import ALIASES, NodeGroup, ParsedShorthand, parse


@pytest.mark.parametrize(
    ("text", "nodes", "each"),
    [
        ("H100", 1, 1),
        ("1xH100", 1, 1),
        ("4xRTX-4090", 1, 4),
        ("4xRTX-4090@ETH10", 1, 4),
        ("4x1xRTX-4090@ETH10", 4, 1),
        ("8xh200", 1, 8),
        ("16xH100", 2, 8),
        ("64xA100-80GB", 8, 8),
        ("8xNVIDIA H100", 1, 8),
        ("2x8xh800", 2, 8),
        ("72xGB300", 1, 72),
        ("2xGH200", 2, 1),
        ("16xTrn2", 1, 16),
        ("8xTPU-v5e", 2, 4),
        ("2x5090", 1, 2),
        ("H100-SXM", 1, 1),
        ("laptop", 1, 1),
        ("3xlaptop", 3, 1),
        ("2xM4-Max", 2, 1),
        ("8xA100@IB200", 1, 8),
        ("2x8xA100@IB200", 2, 8),
        ("2x4xA100", 2, 4),
        ("3072xH100", 384, 8),
        ("Frontier", 1, 8),
        ("128xFrontier", 128, 8),
        ("64xTPU-v5p", 16, 4),
        ("72xGB200", 1, 72),
        ("2x64xGB200", 2, 64),
        ("1x64xGB200", 1, 64),
        ("16xMI300X@ROCE400", 2, 8),
        ("8xH100+8xH100@WAN10", 2, 8),
        ("2x8xA100@IB200+2x8xA100@IB200@WAN1", 4, 8),
        ("4xFrontier+4xFrontier+4xFrontier@WAN100", 12, 8),
    ],
)
def test_shorthand(text, nodes, each):
    machine = load(text)
    assert (machine.nodes, machine.devices_per_node, machine.name) == (nodes, each, text)
    assert machine.num_devices == nodes * each


@pytest.mark.parametrize("name", names())
def test_every_description_composes(name):
    one = load(name)
    each = one.node_size
    two = load(f"2x{name}") if one.devices_per_node > 1 else load(f"2x{each}x{name}")
    assert (two.nodes, two.devices_per_node) == (2, each)
    assert two.device == one.device
    assert two.usd_per_device_hour == one.usd_per_device_hour


def test_aliases_mean_what_exists():
    assert set(ALIASES.values()) <= {name.lower() for name in names()}
    assert load("4xA100-80GB").device == load("A100").device
    assert load("A100-40GB").device.main_memory.capacity_bytes == 40e9


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("Tesla T4", "T4"),
        ("NVIDIA GB10", "DGX-Spark"),
        ("AMD Instinct MI355X", "MI355X"),
        ("intel gaudi 3", "Gaudi3"),
        ("Trillium", "TPU-v6e"),
        ("apple_m3_ultra", "M3-Ultra"),
        ("rtx3090", "RTX-3090"),
    ],
)
def test_names_as_people_and_drivers_write_them(spelled, name):
    assert load(spelled).device == load(name).device


def test_an_unknown_device_names_the_nearest_and_how_to_describe_it():
    with pytest.raises(MachineError, match=r"8xH101.*did you mean 'H100'.*or.*plan-a-cluster.md"):
        load("8xH101")


def test_the_grammar():
    assert parse("2x8xA100@IB200") == ParsedShorthand(NodeGroup("A100", 2, 8, "IB", 200.0))
    assert parse("16xH100") == ParsedShorthand(NodeGroup("H100", None, 16))
    assert parse("laptop@ETH2.5") == ParsedShorthand(NodeGroup("laptop", None, None, "ETH", 2.5))
    joined = parse("8xH100+8xH100@WAN0.5")
    assert (joined.sites, joined.wan_gbit) == (2, 0.5)


def test_the_network_can_be_chosen():
    slow, fast = load("16xA100@ETH25"), load("16xA100@IB400")
    assert slow.link("node").bandwidth == 25e9 / 8
    assert fast.link("node").bandwidth == 50e9
    assert fast.link("node").latency_s < slow.link("node").latency_s
    assert fast.link("device") == load("A100").link("device")
    assert "400 Gbit/s" in fast.sources["links.node"]


def test_sites_share_their_way_to_the_others():
    machine = load("8xH100+8xH100@WAN10")
    assert (machine.sites, machine.nodes) == (2, 2)
    wan = machine.link("wan")
    # 10 Gbit/s a site, shared by its eight devices.
    assert math.isclose(8 * wan.bandwidth, 10e9 / 8)
    assert wan.latency_s > machine.link("node").latency_s
    assert "links.wan" in machine.sources


def test_a_part_of_a_node_answers_for_its_part_of_the_rest():
    whole, one = load("8xH100"), load("1xH100")
    assert one.overhead_watts == whole.overhead_watts / 8
    assert load("16xH100").overhead_watts == whole.overhead_watts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12xH100", "multiple of 8.*2x6xH100"),
        ("0xH100", "1 to 8 devices"),
        ("0x8xH100", "1 node or more"),
        ("2x0xH100", "1 node or more"),
        ("16xH1000", "did you mean 'H100'"),
        ("H100-NVL", "did you mean 'H100'"),
        ("x", "expected one of A10, A100"),
        ("8 x H100", r"\[COUNTx\]NAME"),
        ("2x2x2xH100", r"\[COUNTx\]NAME"),
        ("8xH100@TIN200", r"\[COUNTx\]NAME"),
        ("8xH100@IB", r"\[COUNTx\]NAME"),
        ("8xH100@IB0", "above 0 Gbit/s"),
        ("2x4xFrontier", "a number of nodes, such as 4xFrontier"),
        ("8xH100@WAN1", "several clusters"),
        ("8xH100+8xH100", "at the end, such as"),
        ("8xH100+8xH100@WAN0", "above 0 Gbit/s"),
        ("8xH100+8xA100@WAN1", "nodes of a machine must be equal"),
        ("8xH100+16xH100@WAN1", "nodes of a machine must be equal"),
        ("8xH100+@WAN1", r"\[COUNTx\]NAME"),
        ("", r"\[COUNTx\]NAME"),
    ],
)
def test_wrong_shorthands_say_what_is_right(text, message):
    with pytest.raises(MachineError, match=message) as raised:
        load(text)
    assert str(raised.value).startswith("machine")


def test_a_composed_machine_survives_saving(tmp_path):
    machine = load("2x8xA100@IB200+2x8xA100@IB200@WAN1")
    machine.save(tmp_path / "m.yaml")
    assert Machine.load(tmp_path / "m.yaml") == machine


def test_a_new_network_needs_new_switches():
    fabric = Fabric(leaves=1, hosts_per_leaf=2, spines=0, uplinks=1, port_bandwidth=1e9)
    machine = load("16xH100").model_copy(update={"fabric": fabric})
    assert compose(machine, network="ETH", gbit=25).fabric is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: join(load("8xH100"), 1, 1.0), "machine.sites"),
        (lambda: join(load("8xH100"), 2, 0.0), "machine.wan"),
        (lambda: compose(load("H100"), 8, network="TIN", gbit=1), "machine.network"),
    ],
)
def test_wrong_compositions_name_the_field(make, message):
    with pytest.raises(MachineError, match=message):
        make()


def test_uplinks_may_be_slower_than_ports():
    fabric = Fabric(
        leaves=2, hosts_per_leaf=8, spines=2, uplinks=2, port_bandwidth=1e9, uplink_bandwidth=5e8
    )
    assert fabric.oversubscription == 4.0
