"""Which API key may do what, for which tenants."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, require
from shoal.core.files import read_yaml
from shoal.fields.retrieve.search.protocols import SearchError

TENANT = "shoal-tenant"
"""Header that says for which tenant a request is."""

_LONGEST = 128


class KeyRights(Value):
    """What a key may do.

    Args:
        key: that callers send.
        tenants: whose points it sees and changes; None for all, with the right to make and
            remove collections and to write snapshots.
        write: it may change points.
    """

    key: Annotated[str, Field(repr=False)] = ""
    tenants: tuple[str, ...] | None = None
    write: bool = True


# Of who has no key, for routes that need none.
_NOTHING = KeyRights(tenants=(), write=False)


class _KeyFile(Value):
    """A file of keys.

    Args:
        keys: one after another.
    """

    keys: tuple[KeyRights, ...]


class KeyRing:
    """The keys of a server.

    Args:
        rights: of each key; none lets all users of this machine do everything.

    Raises:
        ConfigError: a key comes twice, or a tenant cannot be named so.
    """

    def __init__(self, rights: tuple[KeyRights, ...] = ()) -> None:
        self._rights: Mapping[str | None, KeyRights] = {one.key: one for one in rights}
        if len(self._rights) < len(rights):
            raise ConfigError("keys: one comes twice")
        for one in rights:
            for tenant in one.tenants or ():
                require(
                    _named(tenant), "keys: tenant", tenant,
                    expected=f"1 to {_LONGEST} printable ASCII characters",
                )  # fmt: skip
            require(
                one.tenants != (), "keys: tenants", "none", expected="names, or no entry for all"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(key for key in self._rights if key is not None)

    def of(self, key: str | None) -> KeyRights:
        """What a key that the guard let in may do."""
        return self._rights.get(key, _NOTHING) if self._rights else KeyRights()

    @classmethod
    def read(cls, file: str) -> KeyRing:
        """Those of a YAML file, and that of ``SHOAL_API_KEY``, which may do everything.

        Args:
            file: with ``keys``, a list of :class:`KeyRights`; empty for none.

        Raises:
            ConfigError: the file cannot be read, or a key cannot be used.
        """
        rights = [] if not file else [*parse(_KeyFile, read_yaml(Path(file)), where=file).keys]
        for one in rights:
            require(bool(one.key), f"{file}: key", "", expected="at least 8 characters")
        if key := os.environ.get("SHOAL_API_KEY"):
            rights.append(KeyRights(key=key))
        return cls(tuple(rights))


def tenant_of(rights: KeyRights, given: str | None) -> str:
    """For whom a request is.

    Args:
        rights: of its key.
        given: its header, if it has one.

    Raises:
        SearchError: the key is of other tenants, or of several and the request names none.
    """
    if given is not None and not _named(given):
        raise SearchError(f"{TENANT}: expected 1 to {_LONGEST} printable ASCII characters")
    if rights.tenants is None:
        return given or ""
    if given is None:
        if len(rights.tenants) > 1:
            raise SearchError(f"the key is of several tenants; name one in the header {TENANT}")
        return rights.tenants[0]
    if given not in rights.tenants:
        raise SearchError(f"{TENANT}: the key is of another tenant", status=403)
    return given


def _named(tenant: str) -> bool:
    return 0 < len(tenant) <= _LONGEST and tenant.isascii() and tenant.isprintable()
