"""Machines by name, by shorthand, or from a file.

``load`` reads

- ``local``: the saved probe of this machine;
- the name of a shipped description, such as ``H100`` or ``laptop``;
- a shorthand ``[COUNTx]NAME[@NETWORK]``: ``8xH100`` is one node of eight devices,
  ``16xH100`` two such nodes; ``@IB200`` gives each device 200 Gbit/s of InfiniBand
  between the nodes, ``@ETH25`` the same of Ethernet;
- the path of a YAML file.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from shoal.core.errors import ConfigError, MachineError, nearest, require
from shoal.ir.machine import Link, Machine

__all__ = ["compose", "load", "names"]

_DATA = Path(__file__).parent / "data"
_SHORTHAND = re.compile(
    r"(?:(?P<count>\d{1,6})x)?(?P<name>[A-Za-z][A-Za-z0-9.-]*?)"
    r"(?:@(?P<kind>IB|ETH)(?P<gbit>\d{1,5}))?"
)
# One message between nodes: RDMA verbs, and TCP through the kernel.
_LATENCY_S = {"IB": 5e-6, "ETH": 3e-5}
_NODE_SIZE = 8


@functools.cache
def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_DATA.glob("*.yaml"))}


def names() -> tuple[str, ...]:
    """The shipped descriptions."""
    return tuple(_shipped())


def load(name_or_path: str | Path) -> Machine:
    """The machine of this name, shorthand or file.

    Raises:
        MachineError: there is no such machine, or its numbers are impossible; the message
            names file, key and fix.
    """
    text = str(name_or_path)
    if text == "local":
        from shoal.machine.probing import saved_path

        path = saved_path()
        require(
            path.exists(),
            "machine",
            text,
            expected=f"a saved probe at {path}",
            hint="run: shoal probe",
            error=MachineError,
        )
        return _read(path)
    if text.endswith((".yaml", ".yml")) or "/" in text or isinstance(name_or_path, Path):
        path = Path(text).expanduser()
        require(
            path.is_file(),
            "machine",
            text,
            expected="a YAML file that exists, a shipped name or a shorthand",
            hint=f"there are {', '.join(names())}, and local",
            error=MachineError,
        )
        return _read(path)
    match = _SHORTHAND.fullmatch(text)
    require(
        match is not None,
        "machine",
        text,
        expected="local, a name, [COUNTx]NAME[@IBn or @ETHn] such as 16xH100@IB400, or a YAML file",
        error=MachineError,
    )
    assert match is not None
    stem = match["name"]
    found = {name.lower(): path for name, path in _shipped().items()}
    key = stem.lower()
    if key not in found:  # H100-SXM is H100, A100-80GB is A100
        key = next((k for k in found if key.startswith(k + "-")), key)
    require(
        key in found,
        "machine",
        text,
        expected=f"one of {', '.join(names())}, local, or a YAML file",
        hint=nearest(stem, names()),
        error=MachineError,
    )
    count = int(match["count"] or 1)
    gbit = int(match["gbit"]) if match["gbit"] else None
    return compose(_read(found[key]), count, network=match["kind"], gbit=gbit, name=text)


def compose(
    one: Machine,
    count: int,
    *,
    network: str | None = None,
    gbit: int | None = None,
    name: str = "",
) -> Machine:
    """``count`` devices of a described machine in nodes of eight.

    Args:
        one: a machine of one device, whose links say what joins several.
        count: number of devices.
        network: IB or ETH, to replace the link between nodes.
        gbit: Gbit/s of that network for each device.
        name: name of the result.

    Raises:
        MachineError: devices that do not fill the nodes, or that nothing joins.
    """
    size = one.devices_per_node if one.devices_per_node > 1 else _NODE_SIZE
    if one.device.kind == "cpu":
        size = 1
    require(
        count >= 1 and (count <= size or count % size == 0),
        "machine",
        name or count,
        expected=f"1 to {size} devices, or a multiple of {size} (nodes of {size})",
        hint="describe other nodes in a YAML file",
        error=MachineError,
    )
    links = {link.scope: link for link in one.links}
    sources = dict(one.sources)
    if network is not None and gbit is not None:
        require(gbit > 0, "machine", name, expected="a network above 0 Gbit/s", error=MachineError)
        links["node"] = Link(scope="node", bandwidth=gbit * 1e9 / 8, latency_s=_LATENCY_S[network])
        sources["links.node"] = f"the shorthand {name}: {gbit} Gbit/s for each device"
    fields = one.model_dump()
    fields.update(
        name=name or one.name,
        nodes=max(1, count // size),
        devices_per_node=min(count, size),
        links=[link.model_dump() for link in links.values()],
        sources=sources,
    )
    return Machine.model_validate(fields)


def _read(path: Path) -> Machine:
    try:
        return Machine.load(path)
    except (ConfigError, MachineError) as cause:
        text = str(cause)
        if str(path) not in text:
            text = f"{path}: {text}"
        raise MachineError(
            text
            if "; " in text
            else f"{text}; correct the file, or describe it anew with shoal probe"
        ) from None
