"""Keys of pairs, streams of random integers, and real numbers as integers modulo 2^32."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.extras import import_extra

_PURPOSE = "secure aggregation"
LARGEST = 4.0
"""Coordinates of an update beyond this are cut."""


def _module(name: str) -> Any:
    return import_extra(f"cryptography.hazmat.primitives.{name}", extra="fields", purpose=_PURPOSE)


def new_key() -> tuple[bytes, bytes]:
    """A private and a public key of X25519, 32 bytes each."""
    key = _module("asymmetric.x25519").X25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, use: str) -> bytes:
    """The 32 bytes that two owners of keys share and nobody else knows.

    Args:
        private: of one.
        public: of the other.
        use: what they are for; other uses give other bytes.
    """
    x25519, hashes, hkdf = _module("asymmetric.x25519"), _module("hashes"), _module("kdf.hkdf")
    shared = x25519.X25519PrivateKey.from_private_bytes(private).exchange(
        x25519.X25519PublicKey.from_public_bytes(public)
    )
    derived: bytes = hkdf.HKDF(
        algorithm=hashes.SHA256(), length=32, salt=None, info=f"shoal {use}".encode()
    ).derive(shared)
    return derived


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypted and authenticated; a key is used once, so the nonce is 0."""
    sealed: bytes = _module("ciphers.aead").ChaCha20Poly1305(key).encrypt(bytes(12), text, None)
    return sealed


def unseal(key: bytes, sealed: bytes) -> bytes:
    """The text; an error of the package if it was changed."""
    text: bytes = _module("ciphers.aead").ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    return text


def expand(seed: bytes, size: int) -> np.ndarray:
    """Random integers uint32 [size]: the stream of ChaCha20 with a key of 32 bytes."""
    ciphers = _module("ciphers")
    stream = ciphers.Cipher(ciphers.algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(4 * size)), "<u4")


def to_fixed(x: np.ndarray, clients: int) -> np.ndarray:
    """Numbers within LARGEST as uint32 [P]; the sum of so many clients does not overflow."""
    scaled = np.rint(np.clip(x.astype(np.float64), -LARGEST, LARGEST) * _unit(clients))
    return scaled.astype(np.int64).astype(np.uint32)


def from_fixed(total: np.ndarray, clients: int) -> np.ndarray:
    """The sum float64 [P] that integers modulo 2^32 stand for."""
    result: np.ndarray = total.view(np.int32).astype(np.float64) / _unit(clients)
    return result


def _unit(clients: int) -> float:
    """Integers of 1.0."""
    return (2**31 - 1) // clients / LARGEST
