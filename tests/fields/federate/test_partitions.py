"""Who has which examples: every example has one owner, and the shapes are those asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.parts import table
from shoal.fields.federate.learn.partitions import ClassK, Dirichlet, DualDirichlet, Natural
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.protocols import FederationError


def examples(count: int = 600, classes: int = 10, owners: int = 0) -> Examples:
    y = np.arange(count) % classes
    owner = np.arange(count) % owners if owners else np.empty(0, np.int64)
    return Examples(x=np.zeros((count, 2), np.float32), y=y, classes=classes, owner=owner)


@given(clients=st.integers(1, 12), seed=st.integers(0, 100), owners=st.integers(12, 20))
def test_every_example_has_one_owner(clients: int, seed: int, owners: int) -> None:
    data = examples(owners=owners)
    for name in table("partitioner"):
        part = table("partitioner").build({"name": name, "k": 10} if name == "class_k" else name)
        rows = part.split(data, clients, seed)
        assert len(rows) == clients
        assert sorted(np.concatenate(rows).tolist()) == list(range(len(data)))


def test_class_k_gives_each_client_so_many_classes() -> None:
    data = examples()
    rows = ClassK(k=3).split(data, 5, 0)
    assert [len(set(data.y[some])) for some in rows] == [3] * 5


def test_a_small_alpha_makes_clients_differ_more() -> None:
    data = examples(5000)

    def spread(alpha: float) -> float:
        rows = Dirichlet(alpha=alpha).split(data, 5, 1)
        counts = np.array([np.bincount(data.y[some], minlength=10) / len(some) for some in rows])
        return float(counts.std(0).mean())

    assert spread(0.2) > 2 * spread(20.0)


def test_dual_dirichlet_draws_sizes() -> None:
    rows = DualDirichlet(sizes=1.0).split(examples(5000), 5, 0)
    sizes = np.array(list(map(len, rows)))
    assert sizes.max() > 1.5 * sizes.min()


def test_natural_keeps_owners_whole() -> None:
    data = examples(owners=7)
    rows = Natural().split(data, 3, 0)
    owners = [set(data.owner[some].tolist()) for some in rows]
    assert sum(map(len, owners)) == 7


@pytest.mark.parametrize(
    ("part", "clients", "says"),
    [
        (ClassK(k=11), 5, "k = 11 of 10 classes"),
        (ClassK(k=1), 5, "do not have all 10"),
        (Dirichlet(alpha=0.01), 60, "larger alpha"),
        (Natural(), 3, "no natural owners"),
    ],
)
def test_what_cannot_be_divided_says_what_can(part: object, clients: int, says: str) -> None:
    with pytest.raises(FederationError, match=says):
        part.split(examples(), clients, 0)  # type: ignore[attr-defined]


def test_no_client_is_empty() -> None:
    with pytest.raises(FederationError, match="would have no examples"):
        table("partitioner").build("iid").split(examples(20), 21, 0)
