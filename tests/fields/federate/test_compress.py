"""Compressors: the mean, the constant, the bytes, and tensors that are not theirs."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.parts import Choice, table
from shoal.fields.federate.compress.packing import pack_bits, unpack_bits
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.protocols import LocalJob, UpdateCompressor, UpdateRefusedError

CHOICES = [
    "identity",
    {"name": "rand_k", "share": 0.1},
    {"name": "top_k", "share": 0.1},
    "natural",
    {"name": "dithering", "levels": 3},
    {"name": "dithering", "levels": 64},
    {"name": "blocks8", "block": 16},
    {"name": "power_sgd", "rank": 2},
]
DRAWS = 400


def made(choice: object) -> UpdateCompressor:
    compressor: UpdateCompressor = table("update_compressor").build(choice)  # type: ignore[arg-type]
    return compressor


def vectors() -> list[np.ndarray]:
    """Ordinary, heavy-tailed, sparse, tiny, and zero ones."""
    draw = np.random.default_rng(3)
    sparse = np.zeros(101, np.float32)
    sparse[[3, 50]] = 1, -3
    return [
        draw.normal(size=101).astype(np.float32),
        (draw.normal(size=150) ** 5).astype(np.float32),
        sparse,
        (draw.normal(size=33) * 1e-30).astype(np.float32),
        np.zeros(17, np.float32),
        np.array([0.75], np.float32),
    ]


def test_every_compressor_is_in_the_list_of_this_test() -> None:
    names = {choice if isinstance(choice, str) else choice["name"] for choice in CHOICES}
    assert names == set(table("update_compressor"))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_mean_constant_and_bytes(choice: object) -> None:
    compressor = made(choice)
    for x in vectors():
        size = len(x)
        sent = compressor.encode(x, 5)
        assert sum(one.nbytes for one in sent.values()) == -(-compressor.bits(size) // 8)
        found = np.stack(
            [
                compressor.decode(compressor.encode(x, key), size, key)
                for key in range(1000, 1000 + DRAWS)
            ]
        ).astype(np.float64)
        squared = float((x.astype(np.float64) ** 2).sum())
        if compressor.kind == "unbiased":
            energy = (found**2).sum(1)
            error = energy.std() / np.sqrt(DRAWS)
            assert energy.mean() <= compressor.omega(size) * squared * (1 + 1e-5) + 3 * error
            # Projected on a few directions, so that 3 standard errors are not met by chance.
            for way in (x.astype(np.float64), np.ones(size), np.arange(size) % 3 - 1.0):
                along = found @ way
                slack = 3 * along.std() / np.sqrt(DRAWS) + 1e-5 * np.abs(x * way).sum() + 1e-44
                assert abs(along.mean() - x.astype(np.float64) @ way) <= slack
        else:
            left = ((found - x) ** 2).sum(1)
            error = left.std() / np.sqrt(DRAWS)
            assert left.max() <= squared * (1 + 1e-5)
            assert (
                left.mean()
                <= (1 - 1 / compressor.omega(size)) * squared + 3 * error + 1e-6 * squared
            )


def test_a_compressor_reaches_its_constant() -> None:
    """A stated constant that were far too large would make every bound useless."""
    worst = np.full(1000, 4 / 3, np.float32)
    natural = made("natural")
    energy = [
        (natural.decode(natural.encode(worst, key), 1000, key) ** 2).sum() for key in range(30)
    ]
    assert np.mean(energy) / (worst**2).sum() == pytest.approx(9 / 8, rel=0.01)
    flat = np.ones(1000, np.float32)
    top = made({"name": "top_k", "share": 0.25})
    left = ((top.decode(top.encode(flat, 0), 1000, 0) - flat) ** 2).sum()
    assert left == pytest.approx(1000 * (1 - 1 / top.omega(1000)))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_it_does_not_write_is_refused(choice: object) -> None:
    compressor = made(choice)
    x = np.random.default_rng(1).normal(size=64).astype(np.float32)
    sent = dict(compressor.encode(x, 1))
    name = next(iter(sent))
    wrong = [
        {},
        {**sent, "more": x},
        {**sent, name: sent[name][:-1]},
        {**sent, name: sent[name].astype(np.float64)},
    ]
    floats = [key for key, one in sent.items() if one.dtype == np.float32]
    wrong += [{**sent, key: np.full_like(sent[key], np.nan)} for key in floats]
    for tensors in wrong:
        with pytest.raises(UpdateRefusedError, match="update"):
            compressor.decode(tensors, 64, 1)


@pytest.mark.parametrize(
    ("choice", "tensor", "value"),
    [("top_k", "places", 255), ("natural", "codes", 255), ("dithering", "levels", 255),
     ("blocks8", "codes", 255)],
)  # fmt: skip
def test_codes_that_stand_for_nothing_are_refused(choice: str, tensor: str, value: int) -> None:
    compressor = made(choice)
    sent = dict(compressor.encode(np.ones(100, np.float32), 1))
    sent[tensor] = np.full_like(sent[tensor], value)
    with pytest.raises(UpdateRefusedError):
        compressor.decode(sent, 100, 1)


def test_bits_come_back() -> None:
    draw = np.random.default_rng(0)
    for width in (1, 5, 8, 9, 21, 32):
        for count in (0, 1, 7, 8, 300_000):
            values = draw.integers(0, 1 << width, count, np.uint64).astype(np.uint32)
            assert (unpack_bits(pack_bits(values, width), count, width) == values).all()


@pytest.mark.parametrize(
    "choice", [{"name": "top_k", "share": 0.1}, {"name": "power_sgd", "rank": 1}]
)
def test_a_client_sends_later_what_it_left_out(choice: dict[str, object]) -> None:
    """Sums of what arrives follow sums of what was learned: the rest stays bounded."""
    exchange = Exchange(FederateJob(compressor=Choice.model_validate(choice)), ("c0", "c1"))
    draw = np.random.default_rng(2)
    learned = arrived = np.zeros(100)
    norms = []
    for number in range(1, 200):
        job = LocalJob(number=number, client="c0", version=0, steps=1, started=0.0)
        delta = (np.ones(100) + draw.normal(size=100)).astype(np.float32)
        learned = learned + delta
        arrived = arrived + exchange.decode(job, exchange.encode(job, delta), 100)
        norms.append(float(np.linalg.norm(learned - arrived)))
    assert norms[-1] <= 1.5 * max(norms[:100])
    assert np.linalg.norm(arrived) > 0.8 * np.linalg.norm(learned)
