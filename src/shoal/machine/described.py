"""Machines by name, by shorthand, or from a file.

``load`` reads

- ``local``: the saved probe of this machine;
- the name of a shipped description, such as ``H100``, ``Frontier`` or ``laptop``;
- a shorthand: ``8xH100`` is one node of eight devices, ``16xH100`` two such nodes,
  ``2x4xH100`` two nodes of four; ``@IB200`` gives each device 200 Gbit/s of InfiniBand
  between the nodes, ``@ETH25`` the same of Ethernet; ``8xH100+8xH100@WAN10`` joins two sites
  (see :mod:`shoal.machine.shorthand`);
- the path of a YAML file.
"""

from __future__ import annotations

import functools
from pathlib import Path

from shoal.core.errors import ConfigError, MachineError, require
from shoal.core.files import expanded
from shoal.ir.machine import Machine
from shoal.machine.composition import compose, join
from shoal.machine.shorthand import canonical, parse

__all__ = ["compose", "load", "names"]

_DATA = Path(__file__).parent / "data"


@functools.cache
def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_DATA.glob("*.yaml"), key=lambda path: path.stem)}


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
        path = expanded(text)
        require(
            path.is_file(),
            "machine",
            text,
            expected="a YAML file that exists, a shipped name or a shorthand",
            hint=f"there are {', '.join(names())}, and local",
            error=MachineError,
        )
        return _read(path)
    spelled = parse(text)
    each = spelled.cluster
    one = _read(_shipped()[canonical(each.name, names(), text)])
    site = compose(
        one, each.count, nodes=each.nodes, network=each.network, gbit=each.gbit, name=text
    )
    if spelled.wan_gbit is None:
        return site
    return join(site, spelled.sites, spelled.wan_gbit, name=text)


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
            else f"{text}; correct the file, or create it again with shoal probe"
        ) from None
