"""Neighbours that are drawn, and batches whose features are gathered ahead."""

from __future__ import annotations

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.core.random import seed64  # noqa: E402
from shoal.fields.graph import CSRGraph, FeatureTable, GraphSAGE, NeighborLoader  # noqa: E402
from shoal.fields.graph.gather.protocols import GatherError  # noqa: E402
from shoal.fields.graph.graph import GraphError  # noqa: E402
from shoal.fields.graph.loading import planted_graph  # noqa: E402
from shoal.fields.graph.sample.neighbours import NeighbourSampler, most_nodes  # noqa: E402

GRAPH = planted_graph(600)
MASK = 2**64 - 1


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def drawn(graph, node, fanout, key):
    """Neighbours of a node, as the kernel draws them (Floyd's method), in plain Python."""
    row = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
    if fanout < 0 or len(row) <= fanout:
        return row.tolist()
    own, chosen = mix(key ^ mix(node)), set()
    for j in range(fanout):
        last = len(row) - fanout + j
        one = (mix((own + j) & MASK) * (last + 1)) >> 64
        chosen.add(last if one in chosen else one)
    return row[sorted(chosen)].tolist()


@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("fanouts", [(3,), (4, 2), (2, -1, 3), (100, 100)])
def test_blocks_are_those_of_plain_python(fanouts, wide):
    graph = CSRGraph(GRAPH.indptr, GRAPH.indices.astype(wide))
    sampler = NeighbourSampler(graph, fanouts, seed=7)
    seeds = np.array([5, 400, 17, 599])
    found = sampler.sample(seeds, epoch=2, batch=9)
    nodes = seeds.tolist()
    for at, (fanout, block) in enumerate(zip(fanouts, reversed(found.blocks), strict=True)):
        key = seed64(7, purpose="neighbours of a batch", step=2, layer=at, index=9)
        assert len(block.ptr) - 1 == len(nodes)
        for place, node in enumerate(list(nodes)):
            wanted = drawn(graph, node, fanout, key)
            nodes += [one for one in wanted if one not in nodes]
            got = block.neighbours[block.ptr[place] : block.ptr[place + 1]]
            assert [nodes[one] for one in got] == wanted
        assert block.num_nodes == len(nodes)
    assert found.nodes.tolist() == nodes and found.seeds.tolist() == seeds.tolist()
    assert len(nodes) <= most_nodes(graph, fanouts, len(seeds))


def test_bounds_edges_and_what_decides():
    pairs = set(zip(*(end.tolist() for end in GRAPH.edges()), strict=True))
    sampler = NeighbourSampler(GRAPH, (5, 3), seed=1)
    seeds = np.arange(100)
    one, again, other = (sampler.sample(seeds, epoch=e, batch=4) for e in (0, 0, 1))
    degrees = np.diff(GRAPH.indptr)
    for block, fanout in zip(reversed(one.blocks), (5, 3), strict=True):
        sizes = np.diff(block.ptr)
        assert (sizes == np.minimum(degrees[one.nodes[: len(sizes)]], fanout)).all()
        rows = np.repeat(np.arange(len(sizes)), sizes)
        edges = list(zip(one.nodes[rows], one.nodes[block.neighbours], strict=True))
        assert set(edges) <= pairs and len(set(edges)) == len(edges)
    assert len(np.unique(one.nodes)) == len(one.nodes)
    assert np.array_equal(one.nodes, again.nodes) and not np.array_equal(one.nodes, other.nodes)
    # What a node draws does not depend on those that are drawn for beside it.
    alone = sampler.sample(seeds[40:41], batch=4).blocks[-1]
    mine = one.blocks[-1]
    first = one.nodes[mine.neighbours[mine.ptr[40] : mine.ptr[41]]]
    assert np.array_equal(first, sampler.sample(seeds[40:41], batch=4).nodes[alone.neighbours])


def test_every_neighbour_is_as_likely():
    star = CSRGraph.from_edges(np.zeros(8, int), np.arange(1, 9))
    sampler = NeighbourSampler(star, (3,))
    counts = np.zeros(9)
    for batch in range(4000):
        counts[sampler.sample(np.array([0]), batch=batch).nodes] += 1
    assert counts[0] == 4000 and counts.sum() == 4 * 4000
    # 1500 expected, standard deviation 31.
    assert abs(counts[1:] - 1500).max() < 5 * 31


@pytest.mark.parametrize("name", ["mean", "sum", "max", "lcm"])
def test_all_neighbours_are_the_whole_graph(name):
    torch.manual_seed(0)
    network = GraphSAGE(8, 16, 3, layers=2, aggregator=name).eval()
    x = torch.randn(600, 8)
    whole = network(x, torch.from_numpy(GRAPH.indptr), torch.from_numpy(GRAPH.indices).long())
    with FeatureTable(x) as features:
        loader = NeighborLoader(GRAPH, (-1, -1), features, batch_size=64)
        seen = []
        for batch in loader:
            scores = network.on_blocks(batch.x, batch.blocks)
            torch.testing.assert_close(scores, whole[batch.seeds], rtol=1e-5, atol=1e-6)
            seen += batch.seeds.tolist()
    assert sorted(seen) == list(range(600)) != seen


def test_blocks_in_torch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    network = GraphSAGE(8, 16, 3, layers=1).eval()
    theirs = geometric.SAGEConv(16, 16, aggr="mean")
    theirs.lin_l.load_state_dict(network.convs[0].of_pooled.state_dict())
    theirs.lin_r.load_state_dict(network.convs[0].of_self.state_dict())
    with FeatureTable(torch.randn(600, 8)) as features:
        for batch in NeighborLoader(GRAPH, (4,), features, batch_size=200):
            [(ptr, neighbours)] = batch.blocks
            rows = torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff())
            x = torch.relu(network.enter(batch.x))
            edges = torch.stack([neighbours, rows])
            wanted = network.leave(torch.relu(theirs((x, x[: len(ptr) - 1]), edges)))
            torch.testing.assert_close(network.on_blocks(batch.x, batch.blocks), wanted)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("placement", ["direct", "staged", "resident"])
def test_batches_are_the_same_however_they_come(placement, overlap):
    values = torch.randn(600, 5)
    with FeatureTable(
        values, placement, batch_rows=600, heat=np.diff(GRAPH.indptr), host_bytes_per_s=1e8
    ) as features:
        loader = NeighborLoader(
            GRAPH, (3, 2), features, nodes=np.arange(0, 600, 2), batch_size=32, overlap=overlap
        )
        assert len(loader) == 10
        wanted = list(loader.sampled(3))
        for batch, sampled in zip(loader.epoch(3), wanted, strict=True):
            assert batch.nodes.tolist() == sampled.nodes.tolist()
            assert torch.equal(batch.x, values[batch.nodes])
        assert features.counters().rows == sum(len(one.nodes) for one in wanted)


def test_an_epoch_that_is_left_ends_its_thread():
    with FeatureTable(torch.randn(600, 5), batch_rows=600) as features:
        loader = NeighborLoader(GRAPH, (3, 2), features, batch_size=16)
        epoch = loader.epoch(0)
        next(epoch)
        with pytest.raises(GraphError, match="another one is under way"):
            next(loader.epoch(1))
        epoch.close()
        assert not [one for one in threading.enumerate() if one.name == "neighbours"]
        values = features.values
        assert all(torch.equal(batch.x, values[batch.nodes]) for batch in loader)
        epoch = loader.epoch(0)
        next(epoch)
        features.close()
        with pytest.raises(GatherError, match="closed"):
            list(epoch)


def test_what_cannot_be_drawn():
    for fanouts in ((), (0,), (3, 0), (-2,)):
        with pytest.raises(GraphError, match="fanouts"):
            NeighbourSampler(GRAPH, fanouts)
    sampler = NeighbourSampler(GRAPH, (2,))
    for seeds, said in [([600], "node 600"), ([-1], "node -1"), ([3, 4, 3], "twice")]:
        with pytest.raises(GraphError, match=said):
            sampler.sample(np.array(seeds))
    assert sampler.sample(np.zeros(0, np.int64)).nodes.tolist() == []
    assert len(sampler.sample(np.array([3, 4])).nodes) > 2  # nothing is left of what went wrong
    with pytest.raises(GraphError, match="expected a table of 600 rows"):
        NeighborLoader(GRAPH, (2,), FeatureTable(torch.randn(5, 5)))
    with FeatureTable(torch.randn(600, 2)) as features:
        with pytest.raises(GraphError, match="batch_size"):
            NeighborLoader(GRAPH, (2,), features, batch_size=0)
        with pytest.raises(GraphError, match="nodes"):
            NeighborLoader(GRAPH, (2,), features, nodes=[])
