"""Machines in one word: how ``2x8xA100@IB200`` is read.

::

    CLUSTER   = [NODESx][COUNTx]NAME[@NETWORK]
    NETWORK   = IB | ROCE | ETH, then Gbit/s for each device, such as IB400 or ETH2.5
    SHORTHAND = CLUSTER, or CLUSTER+CLUSTER+...@WANn with n Gbit/s for each site

One number before the name counts devices, which fill nodes of the usual size; two count nodes
and the devices of each. A description of a whole node, such as Frontier, is counted in nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.errors import MachineError, nearest, require

_GBIT = r"\d{1,5}(?:\.\d{1,3})?"
_CLUSTER = re.compile(
    r"(?P<counts>(?:\d{1,6}x){0,2})(?P<name>(?:[A-Za-z]|[345]090)[A-Za-z0-9._ -]*?)"
    rf"(?:@(?P<kind>IB|ROCE|ETH)(?P<gbit>{_GBIT}))?"
)
_WAN = re.compile(rf"(?P<rest>.*?)(?:@WAN(?P<gbit>{_GBIT}))?", re.DOTALL)
FORMS = (
    "local, a name, [NODESx][COUNTx]NAME[@IBn, @ROCEn or @ETHn] such as 16xH100@IB400 or "
    "2x8xA100@IB200, equal clusters joined as 8xA100+8xA100@WAN1, or a YAML file"
)

# Other names of what is described, letters and digits alone, without a maker's words.
ALIASES = {
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "a10080gb": "a100",
    "a10080gbpcie": "a100-pcie",
    "a100pcie80gb": "a100-pcie",
    "a100sxm": "a100",
    "a100sxm4": "a100",
    "a100sxm40gb": "a100-40gb",
    "a100sxm440gb": "a100-40gb",
    "a100sxm480gb": "a100",
    "a100sxm80gb": "a100",
    "b200180gb": "b200",
    "b200sxm": "b200",
    "b200sxm180gb": "b200",
    "b300288gb": "b300",
    "b300sxm": "b300",
    "b300sxm270gb": "b300",
    "b300sxm6": "b300",
    "gb10": "dgx-spark",
    "gb10spark": "dgx-spark",
    "gb200nvl72": "gb200",
    "gb200onegpu": "gb200",
    "gb300nvl72": "gb300",
    "gb300onegpu": "gb300",
    "gh200480gb": "gh200",
    "gh20096gb": "gh200",
    "h10080gb": "h100",
    "h10080gbhbm3": "h100",
    "h10080gbpcie": "h100-pcie",
    "h100pcie80gb": "h100-pcie",
    "h100sxm": "h100",
    "h100sxm5": "h100",
    "h100sxm580gb": "h100",
    "h100sxm80gb": "h100",
    "h200141gb": "h200",
    "h200sxm": "h200",
    "h200sxm141gb": "h200",
    "h2096gb": "h20",
    "h20sxm": "h20",
    "h20sxm96gb": "h20",
    "h80080gb": "h800",
    "h800sxm": "h800",
    "h800sxm80gb": "h800",
    "hl325l": "gaudi3",
    "mi250xgcd": "mi250x",
    "mi300x192gb": "mi300x",
    "mi325x256gb": "mi325x",
    "mi355x288gb": "mi355x",
    "pro6000": "rtx-pro-6000",
    "rtxa6000": "a6000",
    "rtxpro6000blackwell": "rtx-pro-6000",
    "rtxpro6000blackwellserveredition": "rtx-pro-6000",
    "rtxpro6000blackwellworkstationedition": "rtx-pro-6000",
    "trillium": "tpu-v6e",
    "trn2": "trainium2",
    "v10032gb": "v100",
    "v100sxm2": "v100",
    "v100sxm232gb": "v100",
    "v5e": "tpu-v5e",
    "v5litepod": "tpu-v5e",
    "v5p": "tpu-v5p",
    "v6e": "tpu-v6e",
}
_MAKERS = re.compile(
    r"\b(?:nvidia|geforce|tesla|dgx|hgx|amd|instinct|google|cloud|aws|intel|habana|apple)\b"
)
OWN = (
    "or describe your own in six lines of YAML (docs/tutorials/plan-a-cluster.md, section 5) and "
    "give the file: -m mine.yaml"
)


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one description.

    Args:
        name: of the description, as it was written.
        nodes: number of nodes, if it was given beside the devices of each.
        count: devices of each node where ``nodes`` is given, else of all; None if not given.
        network: IB, ROCE or ETH, to replace the link between nodes.
        gbit: Gbit/s of that network for each device.
    """

    name: str
    nodes: int | None = None
    count: int | None = None
    network: str | None = None
    gbit: float | None = None


@dataclass(frozen=True)
class ParsedShorthand:
    """What a shorthand says.

    Args:
        cluster: what each site has.
        sites: number of sites.
        wan_gbit: Gbit/s of each site's way to the others.
    """

    cluster: NodeGroup
    sites: int = 1
    wan_gbit: float | None = None


def parse(text: str) -> ParsedShorthand:
    """Read a shorthand.

    Raises:
        MachineError: it is none, or it says something that no machine can be; the message
            says which part and what is right.
    """
    whole = _WAN.fullmatch(text)
    assert whole is not None
    terms = [_cluster(term, text) for term in whole["rest"].split("+")]
    wan = None if whole["gbit"] is None else float(whole["gbit"])
    if len(terms) == 1:
        require(
            wan is None,
            "machine",
            text,
            expected="several clusters before @WAN, such as 8xA100+8xA100@WAN1",
            error=MachineError,
        )
        return ParsedShorthand(terms[0])
    require(
        wan is not None,
        "machine",
        text,
        expected="the way between clusters at the end, such as 8xA100+8xA100@WAN1 for 1 Gbit/s",
        error=MachineError,
    )
    require(wan != 0, "machine", text, expected="a WAN link above 0 Gbit/s", error=MachineError)
    require(
        all(term == terms[0] for term in terms),
        "machine",
        text,
        expected="equal clusters on both sides of +",
        hint="the nodes of a machine must be equal; plan for each cluster separately, or for the "
        "slower kind",
        error=MachineError,
    )
    return ParsedShorthand(terms[0], sites=len(terms), wan_gbit=wan)


def _cluster(term: str, text: str) -> NodeGroup:
    match = _CLUSTER.fullmatch(term)
    require(match is not None, "machine", text, expected=FORMS, error=MachineError)
    assert match is not None
    counts = [int(word) for word in match["counts"].split("x") if word]
    gbit = None if match["gbit"] is None else float(match["gbit"])
    require(gbit != 0, "machine", text, expected="a network above 0 Gbit/s", error=MachineError)
    nodes = counts[0] if len(counts) == 2 else None
    return NodeGroup(match["name"], nodes, counts[-1] if counts else None, match["kind"], gbit)


def _plain(name: str) -> str:
    """Letters and digits of a name, without its maker's words."""
    return re.sub(r"[^a-z0-9]+", "", _MAKERS.sub("", name.lower().replace("_", " ")))


def device_key(name: str) -> str:
    """Letters and digits that are the same however people and drivers write a device's name."""
    key = _plain(name)
    return _plain(ALIASES.get(key, key))


def canonical(name: str, known: Iterable[str], text: str) -> str:
    """The description that ``name`` means; case, dashes and the maker's name do not matter.

    Args:
        name: as it was written.
        known: names of the descriptions.
        text: the whole shorthand, for the message.

    Raises:
        MachineError: there is none; the message has the nearest.
    """
    names = list(known)
    result = {_plain(word): word for word in names}
    key = device_key(name)
    near = nearest(name.upper(), names, most=3)
    require(
        key in result,
        "machine",
        text,
        expected="a described machine" if near else f"one of {', '.join(names)}, local",
        hint=f"{near} {OWN}".lstrip(),
        error=MachineError,
    )
    return result[key]
