"""Who may talk to a federation: a key for each client, and the file that holds them."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import ssl
from collections.abc import Mapping
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.fields.federate.protocols import FederationError

_KEY = re.compile(r"[\x21-\x7e]{16,256}")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>\d{1,5})")


class Keys:
    """The keys of clients.

    Args:
        keys: client -> key.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = {name: _digest(key) for name, key in keys.items()}

    def __len__(self) -> int:
        return len(self._digests)

    def holds(self, name: str, authorization: str) -> bool:
        """Whether the header of a request has the key of this client."""
        given = _digest(authorization.removeprefix("Bearer "))
        # Compared as digests: equal lengths, so that the time says nothing about the key.
        wanted = self._digests.get(name, _digest(""))
        return hmac.compare_digest(given, wanted) and name in self._digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def read_keys(path: Path) -> dict[str, str]:
    """A YAML file ``name: key``, which its owner alone may read.

    Raises:
        FederationError: it cannot be read, others can read it, or a key is too short.
    """
    import yaml

    try:
        if path.stat().st_mode & 0o077:
            raise FederationError(f"keys: {path} can be read by others; run chmod 600 {path}")
        found = yaml.safe_load(path.read_text("utf-8"))
    except OSError as cause:
        raise FederationError(f"keys: {path}: {cause.strerror or cause}") from cause
    except (yaml.YAMLError, UnicodeDecodeError) as cause:
        raise FederationError(f"keys: {path} is not YAML; expected lines NAME: KEY") from cause
    if not isinstance(found, dict) or not found:
        raise FederationError(f"keys: {path} has no lines NAME: KEY")
    for name, key in found.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise FederationError(f"keys: {path}: {str(name)[:70]!r} is no name of a client")
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise FederationError(
                f"keys: {path}: the key of {name} is not text of 16 to 256 characters without "
                "blanks; make one with: openssl rand -hex 16"
            )
    if len(set(found.values())) < len(found):
        raise FederationError(f"keys: {path}: two clients have the same key; give each its own")
    return dict(found)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:8080`` or ``[::1]:0``.

    Raises:
        ConfigError: it is not written like that.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"listen: {text!r}; expected HOST:PORT such as 127.0.0.1:8080")
    return match["host"].strip("[]"), int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server_tls(certfile: str, keyfile: str) -> ssl.SSLContext:
    """TLS 1.2 and newer with a certificate.

    Raises:
        FederationError: the files cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as cause:
        raise FederationError(
            f"certfile, keyfile: {certfile}, {keyfile}: "
            f"{getattr(cause, 'strerror', None) or cause}; expected a certificate and its "
            "unencrypted key, both PEM"
        ) from cause
    return context
