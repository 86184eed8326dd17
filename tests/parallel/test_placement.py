"""Every signature equals the unsharded operation; every transition sends the table's bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from placed import shares
from placed_transfer import disjoint_elements, transfer

from shoal.claims.lab.placed.kernels import KERNELS, run
from shoal.claims.lab.placed.placement import (
    GlobalTensor,
    RankMesh,
    apply,
    execute,
    from_local,
    to_global,
)
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.boxes import Box
from shoal.core.errors import PlanError
from shoal.core.meter import Meter
from shoal.cost.price.boxing import boxing
from shoal.ir.placement import Mesh, every_placement, show_placement
from shoal.ir.signatures import LINEAR, MONOTONE, NONLINEAR, OPERATIONS, legal, result_shape
from shoal.plan.sbp.search import Leaf, OpGraph, OpNode, place

Case = tuple[str, list[tuple[int, ...]], dict[str, Any]]

# Uneven on 2, 3 and 4 ranks; a few sizes smaller than the ranks, so that some hold nothing.
CASES: list[Case] = [
    *((name, [(5, 3)], {}) for name in (*MONOTONE, *NONLINEAR, *LINEAR)),
    *((name, [(5, 3), (5, 3)], {}) for name in ("add", "sub", "mul", "div", "maximum")),
    *((name, [(2, 5, 3), (5, 1)], {}) for name in ("add", "sub", "mul", "div", "maximum")),
    ("add", [(3,), (5, 3)], {}),
    *(
        (name, [(3, 5, 2)], {"dim": dim, "keepdim": keep})
        for name in ("sum", "mean", "amax")
        for dim, keep in ((1, False), (-1, True), (0, False))
    ),
    ("softmax", [(5, 3, 2)], {"dim": 1}),
    ("layer_norm", [(5, 3, 4), (4,), (4,)], {}),
    ("layer_norm", [(5, 4)], {}),
    ("rms_norm", [(5, 3, 4), (4,)], {}),
    ("matmul", [(5, 3), (3, 7)], {}),
    ("matmul", [(2, 5, 3), (3, 7)], {}),
    ("matmul", [(3, 1, 5, 3), (2, 3, 7)], {}),
    ("linear", [(2, 5, 3), (7, 3), (7,)], {}),
    ("linear", [(5, 3), (7, 3)], {}),
    ("embedding", [(3, 5), (7, 3)], {}),
    ("attention", [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 3)], {"causal": True}),
    ("attention", [(2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 3)], {}),
    ("attention", [(2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)], {"causal": True}),
    ("permute", [(5, 3, 2)], {"order": [2, 0, 1]}),
    ("reshape", [(4, 6)], {"shape": [4, 2, 3]}),
    ("reshape", [(4, 6, 5)], {"shape": [24, 5]}),
    ("reshape", [(6, 4)], {"shape": [4, 6]}),
    ("reshape", [(5, 1, 3)], {"shape": [5, 3]}),
    ("narrow", [(5, 3, 2)], {"dim": 1, "start": 1, "length": 2}),
    ("cat", [(5, 3), (5, 2)], {"dim": 1}),
]
OPTIONS: dict[str, dict[str, Any]] = {"scale": {"factor": 0.5}, "add_scalar": {"value": -0.5}}
MESHES: list[Mesh] = [(3,), (2, 2)]


def inputs_of(case: Case) -> list[torch.Tensor]:
    kind, shapes, _ = case
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.rand(s, generator=generator, dtype=torch.float64) + 0.5 for s in shapes]
    if kind in (*MONOTONE, "gelu", "silu", "neg", "amax", "maximum", "softmax"):
        inputs = [x - 1.0 for x in inputs]
    if kind == "embedding":
        inputs[0] = torch.randint(0, shapes[1][0], shapes[0], generator=generator)
    return inputs


def sent_bytes(meter: Meter) -> float:
    return sum(n for key, n in meter.totals().items() if key.startswith("wire_bytes"))


def one_rank(kind: str, xs: list[torch.Tensor], attributes: dict[str, Any]) -> torch.Tensor:
    """The operation by torch alone, written down again for those where a rank does more."""
    if kind == "embedding":
        return xs[1][xs[0]]
    if kind == "mean":
        return xs[0].mean(attributes["dim"], keepdim=attributes["keepdim"])
    if kind == "amax":
        return xs[0].amax(attributes["dim"], keepdim=attributes["keepdim"])
    if kind == "attention":
        q, k, v = xs
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if attributes.get("causal"):
            unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(unseen, -torch.inf)
        return scores.softmax(-1) @ v
    shape = result_shape(kind, [tuple(x.shape) for x in xs], attributes)
    alone: list[Any] = [None] * len(xs)
    return KERNELS[kind](xs, attributes, alone, shape)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_operation_has_a_kernel_and_a_case() -> None:
    assert set(KERNELS) == set(OPERATIONS) == {kind for kind, _, _ in CASES}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_signature_equals_the_unsharded_operation(mesh: Mesh) -> None:
    cases = []
    for kind, shapes, given in CASES:
        attributes = {**given, **OPTIONS.get(kind, {})}
        xs = inputs_of((kind, shapes, attributes))
        # Axes are independent of each other; of their combinations a part will do.
        signatures = legal(kind, shapes, attributes, mesh)[:: 1 if len(mesh) == 1 else 3]
        cases.append((kind, shapes, attributes, xs, one_rank(kind, xs, attributes), signatures))

    def rank(comm: ThreadComm) -> int:
        done = 0
        on = RankMesh(comm, mesh)
        for kind, shapes, attributes, xs, wanted, signatures in cases:
            for seed, signature in enumerate(signatures):
                placed = [
                    shares(x, p, on, seed + i)
                    for i, (x, p) in enumerate(zip(xs, signature.inputs, strict=True))
                ]
                made = run(kind, placed, attributes, tuple(wanted.shape), signature.output)
                where = f"{kind} {shapes} {attributes} {signature} on rank {comm.rank}"
                assert made.local.shape == made.box.shape, where
                torch.testing.assert_close(
                    made.whole(), wanted, rtol=1e-9, atol=1e-9, msg=lambda m, w=where: f"{w}: {m}"
                )
                done += 1
        return done

    counts = run_ranks(int(torch.tensor(mesh).prod()), rank)
    assert len(set(counts)) == 1
    assert counts[0] > 200


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [((4,), (8, 4)), ((3,), (5, 7)), ((4,), (2, 6)), ((2, 2), (5, 6)), ((2, 2), (4, 8))],
    ids=str,
)
def test_transitions_keep_the_tensor_and_send_the_bytes_of_the_table(
    mesh: Mesh, shape: tuple[int, ...]
) -> None:
    meter = Meter()
    x = torch.arange(0, shape[0] * shape[1], dtype=torch.float64).view(shape) + 1
    table = boxing(shape, mesh)
    pairs = list(itertools.product(table.placements, repeat=2))[:: 1 if len(mesh) == 1 else 7]

    def rank(comm: ThreadComm) -> None:
        on = RankMesh(comm, mesh)
        for seed, (source, target) in enumerate(pairs):
            given = shares(x, source, on, seed)
            comm.barrier()
            before = sent_bytes(meter)
            comm.barrier()
            made = given.to(target)
            comm.barrier()
            sent = sent_bytes(meter) - before
            where = f"{show_placement(source)} -> {show_placement(target)}"
            assert sent == pytest.approx(table.cost(source, target) * 8), where
            assert made.local.shape == made.box.shape, where
            comm.barrier()
            torch.testing.assert_close(made.whole(), x, rtol=1e-12, atol=1e-12)
            comm.barrier()

    run_ranks(int(torch.tensor(mesh).prod()), rank, meter=meter)


@pytest.mark.parametrize("p1", [2, 3])
def test_other_ranks_get_the_tensor_and_the_bytes_of_the_table(p1: int) -> None:
    p2 = 5 - p1
    x = torch.arange(35, dtype=torch.float64).view(5, 7) + 1
    meter = Meter()
    pairs = list(itertools.product(every_placement(2, 1), every_placement(2, 1)))

    def rank(comm: ThreadComm) -> None:
        first = list(range(p1))
        group = comm.split([first, list(range(p1, 5))])
        mesh = RankMesh(group, (p1 if comm.rank < p1 else p2,))
        for seed, (source, target) in enumerate(pairs):
            given = shares(x, source, mesh, seed) if comm.rank < p1 else None
            comm.barrier()
            before = sent_bytes(meter)
            comm.barrier()
            made = transfer(
                comm,
                given,
                None if comm.rank < p1 else mesh,
                shape=(5, 7),
                dtype=x.dtype,
                source=(first, (p1,), show_placement(source)),
                target=(list(range(p1, 5)), (p2,), show_placement(target)),
            )
            comm.barrier()
            sent = sent_bytes(meter) - before
            assert sent == pytest.approx(disjoint_elements(35, source, target, p1, p2) * 8)
            comm.barrier()
            assert (made is None) == (comm.rank < p1)
            if made is not None:
                torch.testing.assert_close(made.whole(), x)
            comm.barrier()

    run_ranks(5, rank, meter=meter)


def test_a_plan_equals_one_process() -> None:
    graph = OpGraph(
        leaves=(
            Leaf(name="x", shape=(5, 6), itemsize=8),
            Leaf(name="w", shape=(7, 6), itemsize=8),
            Leaf(name="v", shape=(6, 7), itemsize=8),
        ),
        ops=(
            OpNode(name="h", kind="linear", inputs=("x", "w")),
            OpNode(name="g", kind="gelu", inputs=("h",)),
            OpNode(name="y", kind="linear", inputs=("g", "v")),
            OpNode(name="z", kind="add", inputs=("x", "y")),
        ),
    )
    plan = place(graph, (2, 2), pins={"x": "B,B", "h": "S(1),P", "z": "S(0),B"})
    generator = torch.Generator().manual_seed(0)
    tensors = {
        leaf.name: torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        for leaf in graph.leaves
    }
    x, w, v = tensors.values()
    wanted = x + torch.nn.functional.gelu(x @ w.T) @ v.T
    meter = Meter()

    def rank(comm: ThreadComm) -> GlobalTensor:
        return execute(graph, plan, RankMesh(comm, (2, 2)), tensors)["z"]

    results = run_ranks(4, rank, meter=meter)
    assert sent_bytes(meter) == pytest.approx(plan.boxing_bytes)
    assert plan.boxing_bytes > 0
    for result in results:
        part = wanted[result.box.slices(Box.whole((5, 6)))]
        torch.testing.assert_close(result.local, part, rtol=1e-12, atol=1e-12)


def test_apply_chooses_and_refuses() -> None:
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)

    def rank(comm: ThreadComm) -> list[str]:
        mesh = RankMesh(comm, (2,))
        made = apply("matmul", [to_global(x, mesh, "S(1)"), to_global(w, mesh, "S(0)")])
        torch.testing.assert_close(made.whole(), x @ w)
        placed = apply("relu", [made], "S(0)")
        torch.testing.assert_close(placed.whole(), (x @ w).relu())
        said = [show_placement(made.placement), show_placement(placed.placement)]
        for wrong in (
            lambda: to_global(x, mesh, "S(2)"),
            lambda: to_global(x, mesh, "B,B"),
            lambda: from_local(x, mesh, "S(0)", (4, 6)),
            lambda: RankMesh(comm, (3,)),
            lambda: apply("matmul", [made, made]),
        ):
            with pytest.raises(PlanError) as caught:
                wrong()
            said.append(str(caught.value).split(" = ")[0])
        return said

    said = run_ranks(2, rank)[0]
    parts = "from_local: shape of the part"
    assert said == ["P(sum)", "S(0)", "placement", "placement", parts, "mesh", "matmul"]
