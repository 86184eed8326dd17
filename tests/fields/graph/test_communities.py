"""Signatures of neighbours: equal however edges come, unbiased, and queries beside exact sets."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice
from shoal.fields.data.minhash import Bands, MinHasher, bands_reaching, collision
from shoal.fields.graph import CSRGraph
from shoal.fields.graph.communities import AdjacencySets, SignatureGraph, native
from shoal.fields.graph.communities import building as building_module
from shoal.fields.graph.communities.adjacency import sets_of
from shoal.fields.graph.communities.agglomerative import Agglomerative
from shoal.fields.graph.communities.building import SignatureBuilder
from shoal.fields.graph.communities.mean_similarity import MeanSimilarity
from shoal.fields.graph.communities.pagerank import SimilarityPageRank, personalised_pagerank
from shoal.fields.graph.communities.picture import network
from shoal.fields.graph.communities.protocols import CommunityError
from shoal.fields.graph.communities.walktrap import walktrap

FEW = {"hashes": 200, "threshold": 0.05}


def same(a: SignatureGraph, b: SignatureGraph) -> None:
    for name in ("ids", "signatures", "degrees", "bands"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


def groups(nodes: int = 400, each: int = 50, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Edges of communities of consecutive nodes, and a few of any."""
    draw = np.random.default_rng(seed)
    source = draw.integers(0, nodes, nodes * 12)
    near = source // each * each + draw.integers(0, each, len(source))
    anywhere = draw.random(len(source)) < 0.2
    return source, np.where(anywhere, draw.integers(0, nodes, len(source)), near)


@pytest.fixture(scope="module")
def graph() -> CSRGraph:
    return CSRGraph.from_edges(*groups(), num_nodes=402)  # two without neighbours


@pytest.fixture(scope="module")
def signed(graph) -> SignatureGraph:
    return SignatureGraph.from_edges(graph, **FEW)


# Building


@given(
    edges=st.lists(
        st.tuples(st.integers(0, 30), st.one_of(st.integers(31, 60), st.just(2**40))), min_size=1
    ),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    side=st.sampled_from(["in", "out", "both"]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_shards_in_any_order_are_as_one(edges, cuts, side, order) -> None:
    whole = SignatureGraph.from_edges([np.array(edges).T], side=side, hashes=32, bands=(8, 2))
    mixed = order.sample(edges, len(edges)) + edges[:2]
    cuts = [0, *sorted(cuts), len(mixed)]
    shards = [
        np.array(mixed[begin:end], np.int64).reshape(-1, 2).T
        for begin, end in itertools.pairwise(cuts)
    ]
    parts = SignatureGraph.from_edges(shards, side=side, hashes=32, bands=(8, 2), threads=2)
    np.testing.assert_array_equal(whole.ids, parts.ids)
    np.testing.assert_array_equal(whole.signatures, parts.signatures)
    np.testing.assert_array_equal(whole.bands, parts.bands)
    builders = []
    for shard in shards:
        builders.append(SignatureBuilder(32))
        for vertices, members in (shard, shard[::-1])[side == "in" : 1 + (side != "out")]:
            builders[-1].add(vertices, members)
    for other in builders[1:]:
        builders[0].merge(other)
    np.testing.assert_array_equal(builders[0].ids, whole.ids)
    np.testing.assert_array_equal(builders[0].signatures, whole.signatures)


def test_signatures_are_those_of_datasketch(graph, signed) -> None:
    datasketch = pytest.importorskip("datasketch")
    for row in (0, 7, 399):
        one = datasketch.MinHash(200, seed=1, hashfunc=int, scheme="affine32")
        one.update_batch(graph.indices[graph.indptr[row] : graph.indptr[row + 1]].tolist())
        np.testing.assert_array_equal(one.hashvalues, signed.signatures[row])


def test_a_graph_is_as_its_edges(graph, signed, monkeypatch) -> None:
    rows, columns = graph.edges()
    once = rows < columns
    same(signed, SignatureGraph.from_edges([(rows[once], columns[once])], **FEW))
    # Small pieces, and several threads, change nothing.
    monkeypatch.setattr(building_module, "_ENTRIES", 50)
    monkeypatch.setattr(building_module, "_ROWS", 7)
    same(signed, SignatureGraph.from_edges(graph, threads=3, **FEW))


def test_sides_of_directed_edges() -> None:
    graph = CSRGraph.from_edges([0, 1, 2], [9, 9, 0], num_nodes=10, directed=True)
    for side, ids, degrees in (
        ("in", [0, 9], [1, 2]),
        ("out", [0, 1, 2], [1, 1, 1]),
        ("both", [0, 1, 2, 9], [2, 1, 1, 2]),
    ):
        one = SignatureGraph.from_edges(graph, side=side, hashes=24)
        two = SignatureGraph.from_edges([([0, 1], [9, 9]), ([2], [0])], side=side, hashes=24)
        assert one.ids.tolist() == ids and one.degrees.tolist() == degrees
        same(one, two)


def test_few_neighbours_are_not_signed() -> None:
    edges = [([0, 1, 2, 0], [5, 5, 5, 6])]
    graph = CSRGraph.from_edges(*edges[0], num_nodes=8)
    for given_edges in (graph, edges):
        one = SignatureGraph.from_edges(given_edges, least_degree=2, hashes=24)
        assert one.ids.tolist() == [0, 5] and {1, 2, 6} <= set(one.others.tolist())
        with pytest.raises(CommunityError, match="vertex 6 has 1 neighbours: expected at least 2"):
            one.expand([6], 3)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("side", ["in", "both"])
def test_insertion_is_exact(text, side) -> None:
    source, target = groups(seed=1)
    late = np.arange(len(source)) % 10 == 0
    late |= (source > 395) | (target > 395)  # of vertices that are new

    def of(keep: np.ndarray) -> SignatureGraph:
        names = np.array([f"v{at:03}" for at in range(400)])
        # From the same names, so that the keys of members are the same.
        ends = (source[keep], target[keep])
        graph = CSRGraph.from_edges(
            *ends, num_nodes=400, directed=True, ids=names if text else None
        )
        return SignatureGraph.from_edges(graph, side=side, **FEW)

    grown, whole = of(~late), of(np.ones(len(late), bool))
    names = np.array([f"v{at:03}" for at in range(400)]) if text else np.arange(400)
    pieces = np.array_split(np.flatnonzero(late), 3)
    for piece in pieces:
        assert grown.insert([(names[source[piece]], names[target[piece]])], side=side) == 0
    np.testing.assert_array_equal(grown.ids, whole.ids)
    np.testing.assert_array_equal(grown.signatures, whole.signatures)
    np.testing.assert_array_equal(grown.bands, whole.bands)
    assert grown.insert([], side=side) == 0


def test_insertion_passes_over_the_unsigned() -> None:
    edges = [([0, 1, 2, 0], [5, 5, 5, 6])]
    one = SignatureGraph.from_edges(edges, least_degree=2, hashes=24)
    before = one.ids.tolist()
    assert one.insert([([1, 7], [6, 8])]) == 4
    assert one.ids.tolist() == before and 7 in one.others
    assert one.other_degrees[one.others.tolist().index(6)] == 2
    one.insert([([3, 3], [0, 5])])  # a new vertex that has enough at once
    assert 3 in one.ids and one.degrees[one.ids.tolist().index(0)] == 3


def test_names_have_the_same_hashes_in_every_process() -> None:
    ids = np.array(["apt", "bash", "dpkg", "perl-base"])
    graph = CSRGraph.from_edges([0, 1, 2], [3, 3, 3], ids=ids)
    one = SignatureGraph.from_edges(graph, hashes=4, threshold=0.9)
    assert one.signatures[3].tolist() == [1362685752, 2712780998, 186574814, 51816534]


# Estimates


def pairs_of(similarity: tuple[int, int], pairs: int, seed: int) -> tuple[list[np.ndarray], float]:
    """Pairs of sets, one behind the other, and their Jaccard similarity."""
    both, rest = similarity
    draw, sets = np.random.default_rng(seed), []
    for _ in range(pairs):
        base = draw.choice(2**31, both + 2 * rest, replace=False)
        sets += [base[: both + rest], np.r_[base[:both], base[both + rest :]]]
    return sets, both / (both + 2 * rest)


@pytest.mark.parametrize("similarity", [(3, 12), (10, 10), (25, 3)])
def test_the_estimate_is_unbiased(similarity, monkeypatch) -> None:
    """A z-test over 10,000 pairs, and the variance of the formula."""
    pairs, hashes = 10_000, 64
    draw = np.random.default_rng(similarity[0])
    both, rest = similarity
    members = draw.integers(0, 2**32, (pairs, both + 2 * rest), np.uint64)
    jaccard = both / (both + 2 * rest)
    sets = np.concatenate(
        [members[:, : both + rest], np.delete(members, np.s_[both : both + rest], axis=1)], axis=1
    )
    signatures = np.full((2 * pairs, hashes), 2**32 - 1, np.uint32)
    ends = np.arange(2 * pairs + 1, dtype=np.int64) * (both + rest)
    MinHasher(hashes).lower(signatures, sets.ravel(), ends)
    found = (signatures[::2] == signatures[1::2]).mean(axis=1)
    deviation = np.sqrt(jaccard * (1 - jaccard) / hashes)
    assert abs(found.mean() - jaccard) < 4 * deviation / np.sqrt(pairs)
    assert found.std() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("cut", [Bands(10, 1), Bands(16, 2), Bands(6, 5)])
def test_candidates_follow_the_collision_curve(cut) -> None:
    sets, jaccard = pairs_of((8, 4), 1500, 1)
    vertices = np.repeat(np.arange(len(sets)), [len(one) for one in sets])
    one = SignatureGraph.from_edges(
        [(vertices, np.concatenate(sets))], side="out", hashes=32, bands=tuple(cut)
    )
    share = np.mean([at + 1 in one.candidates(np.array([at])) for at in range(0, len(sets), 2)])
    expected = collision(jaccard, cut)
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 1500)


def test_bands_reach_the_recall_that_is_wanted() -> None:
    for threshold, recall in ((0.05, 0.9), (0.1, 0.9), (0.5, 0.99), (1.0, 0.9)):
        cut = bands_reaching(threshold, recall, 1000)
        assert collision(threshold, cut) >= recall and cut.bands * cut.rows <= 1000
        if cut.bands > 1:
            assert collision(threshold, Bands(cut.bands - 1, cut.rows)) < recall
        longer = cut.rows + 1
        assert collision(threshold, Bands(1000 // longer, longer)) < recall or threshold == 1
    with pytest.raises(ConfigError, match="230 slots are needed, and there are 100"):
        bands_reaching(0.01, 0.9, 100)


def test_loops_are_those_of_numpy(signed, graph) -> None:
    rows, others = np.array([3, 0, 9, 11, 5, 6, 7, 8, 2]), np.array([1, 3, 380])
    for slots in (1, 15, 16, 200):
        some = np.ascontiguousarray(signed.signatures[:, :slots])
        np.testing.assert_array_equal(
            native.equal_slots(some, rows, others),
            native.equal_slots(some, rows, others, library=None),
        )
    keys = signed.bands[:, [5, 8]]
    for one, two in zip(
        native.band_mates(signed.bands, keys),
        native.band_mates(signed.bands, keys, library=None),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)
    before, after = signed.signatures[0], np.minimum(*signed.signatures[:2])
    counts = [(signed.signatures == before).sum(axis=1).astype(np.int32) for _ in range(2)]
    native.follow_slots(signed.signatures, before, after, counts[0])
    native.follow_slots(signed.signatures, before, after, counts[1], library=None)
    np.testing.assert_array_equal(*counts)
    np.testing.assert_array_equal(counts[0], (signed.signatures == after).sum(axis=1))
    sets = AdjacencySets(sets_of(graph, "both"))
    for later in (False, True):
        exact = native.jaccard_rows(sets.sets, sets.inverse, rows, later=later)
        plain = native.jaccard_rows(sets.sets, sets.inverse, rows, later=later, library=None)
        np.testing.assert_array_equal(exact, plain)
    own = [
        set(graph.indices[graph.indptr[at] : graph.indptr[at + 1]].tolist()) for at in range(402)
    ]
    brute = [
        [len(own[a] & own[b]) / max(len(own[a] | own[b]), 1) for b in range(402)] for a in rows
    ]
    np.testing.assert_allclose(sets.similarity(rows, np.arange(402)), brute, atol=1e-6)


# Expansions


def brute_union(sets: list[set[int]], seeds: list[int], count: int) -> list[int]:
    union: set[int] = set().union(*(sets[one] for one in seeds))
    left, chosen = [at for at in range(len(sets)) if at not in seeds], []
    for _ in range(count):
        best = max(left, key=lambda at: (len(union & sets[at]) / len(union | sets[at]), -at))
        union |= sets[best]
        left.remove(best)
        chosen.append(best)
    return chosen


def test_expansions_of_exact_sets_are_those_of_brute_force(graph) -> None:
    exact = AdjacencySets(sets_of(graph, "both"))
    seeds = np.array([0, 3, 9])
    own = [
        set(graph.indices[graph.indptr[at] : graph.indptr[at + 1]].tolist()) for at in range(402)
    ]
    grown = Agglomerative().expand(exact, seeds, 10)
    assert grown.rows.tolist() == brute_union(own[:400], [0, 3, 9], 10)
    near = MeanSimilarity().expand(exact, seeds, 10)
    scores = exact.with_all(seeds).astype(float).mean(axis=0)
    scores[seeds] = -1
    assert near.rows.tolist() == np.argsort(-scores, kind="stable")[:10].tolist()
    np.testing.assert_allclose(near.scores, scores[near.rows])


@pytest.mark.parametrize("method", ["mean_similarity", "agglomerative", "pagerank"])
def test_communities_are_those_that_were_planted(graph, signed, method) -> None:
    exact = AdjacencySets(sets_of(graph, "both"))
    shares = {"signed": [], "exact": []}
    for group in range(8):
        seeds = group * 50 + np.array([3, 14, 15, 41])
        found = signed.expand(seeds, 24, method)
        assert len(set(found.members.tolist())) == 24 and found.candidates < 400
        shares["signed"].append(np.mean(found.added // 50 == group))
        part = signed_part(method).expand(exact, seeds, 20)
        shares["exact"].append(np.mean(part.rows // 50 == group))
    assert np.mean(shares["exact"]) > 0.9
    assert np.mean(shares["signed"]) > np.mean(shares["exact"]) - 0.1


def signed_part(method):
    from shoal.core.parts import table

    return table("community_expander").build(method)


def test_a_union_of_signatures_is_the_signature_of_the_union(signed) -> None:
    candidates = np.arange(20, 60)
    union = signed.union(np.array([1, 2]), candidates)
    for at in (4, 30, 4):
        union.add(at)
    least = signed.signatures[[1, 2, 24, 50]].min(axis=0)
    np.testing.assert_array_equal(
        union.scores(), (signed.signatures[candidates] == least).mean(axis=1)
    )


@given(seed=st.integers(0, 10**6), n=st.integers(2, 12))
@settings(max_examples=25, deadline=None)
def test_pagerank_is_that_of_networkx(seed, n) -> None:
    networkx = pytest.importorskip("networkx")
    draw = np.random.default_rng(seed)
    weights = np.triu(draw.random((n, n)) * (draw.random((n, n)) < 0.5), 1)
    weights += weights.T  # now and then a vertex has no edge
    start = np.zeros(n)
    start[: 1 + n // 4] = 1 / (1 + n // 4)
    expected = networkx.pagerank(
        networkx.from_numpy_array(weights), alpha=0.85,
        personalization=dict(enumerate(start)), tol=1e-13, max_iter=1000,
    )  # fmt: skip
    found = personalised_pagerank(weights, start, 0.85)
    np.testing.assert_allclose(found, [expected[at] for at in range(n)], atol=1e-8)


def test_a_pool_is_four_times_what_is_wanted(signed) -> None:
    assert len(SimilarityPageRank(pool=1).expand(signed, np.array([0]), 5).rows) == 5
    found = signed.expand([0], 6, Choice(name="pagerank", options={"damping": 0.5}))
    assert len(found.added) == 5


def test_fewer_candidates_give_a_smaller_community() -> None:
    one = SignatureGraph.from_edges([([0, 1, 2, 3], [7, 7, 8, 9])], side="out", hashes=64)
    for method in ("mean_similarity", "agglomerative", "pagerank"):
        assert one.expand([0, 0], 10, method).members.tolist() == [0, 1]
        alone = one.expand([3], 10, method)
        assert alone.members.tolist() == [3] and alone.candidates == 0


def test_only_the_nearest_candidates_are_compared(signed) -> None:
    limited = SignatureGraph(
        signed.ids, signed.signatures, signed.degrees, cut=signed.cut, bands=signed.bands
    )
    limited.most = 30
    some = limited.candidates(np.array([0, 1]))
    every = signed.candidates(np.array([0, 1]))
    assert len(some) == 30 and set(some) < set(every)
    shared, _ = native.band_mates(signed.bands, building_keys(signed, [0, 1]))
    assert shared[some].min() >= np.delete(shared[every], np.searchsorted(every, some)).max()


def building_keys(signed, rows):
    from shoal.fields.data.minhash.lsh import band_keys

    return band_keys(signed.signatures[rows], signed.cut)


def test_empty_sets_are_similar_to_nothing(graph, signed) -> None:
    assert signed.num_vertices == 400 and signed.others.tolist() == [400, 401]
    exact = AdjacencySets(sets_of(graph, "both"))
    assert exact.similarity(np.array([400]), np.array([400, 401, 0])).tolist() == [[0, 0, 0]]
    with pytest.raises(CommunityError, match="vertex 400 has 0 neighbours: expected at least 1"):
        signed.expand([400], 10)


# Views


@pytest.mark.parametrize(
    ("name", "weighted", "count", "modularity"),
    [  # as igraph 1.0 divides them in four steps
        ("karate_club_graph", True, 4, 0.4402),
        ("les_miserables_graph", True, 9, 0.5402),
        ("les_miserables_graph", False, 8, 0.5214),
    ],
)
def test_walktrap_is_that_of_igraph(name, weighted, count, modularity) -> None:
    networkx = pytest.importorskip("networkx")
    given = getattr(networkx, name)()
    weights = networkx.to_numpy_array(given, weight="weight" if weighted else None)
    found = walktrap(weights)
    assert len(set(found.tolist())) == count
    parts = [set(np.flatnonzero(found == one).tolist()) for one in set(found.tolist())]
    plain = networkx.from_numpy_array(weights)
    assert networkx.community.modularity(plain, parts) == pytest.approx(modularity, abs=5e-5)


def test_views_have_groups_and_a_picture(signed) -> None:
    names = [0, 1, 2, 3, 4, 100, 101, 102, 103]
    view = signed.view(names)
    assert view.names.tolist() == names and (view.weights == view.weights.T).all()
    assert len(set(view.groups[:5].tolist())) == 1 and view.groups[0] != view.groups[5]
    picture = network(view, 2)
    assert picture == network(view, 2) and picture.count("<circle") == 9
    assert "&lt;b&gt;" in network(replace(view, names=np.array(["<b>"] * 9)), 2)
    assert "<svg" in network(signed.view([5]), 1)
    assert walktrap(np.zeros((3, 3))).tolist() == [0, 1, 2]


# Files


def test_saved_signatures_are_mapped(signed, tmp_path) -> None:
    opened = SignatureGraph.open(signed.save(tmp_path / "signatures"))
    assert isinstance(opened.signatures, np.memmap) and isinstance(opened.bands, np.memmap)
    same(opened, signed)
    for method in ("mean_similarity", "agglomerative", "pagerank"):
        a, b = (one.expand([3, 4], 20, method) for one in (opened, signed))
        np.testing.assert_array_equal(a.members, b.members)
    opened.insert([([3], [200])])  # a copy; the files stay as they are
    same(SignatureGraph.open(tmp_path / "signatures"), signed)
    with pytest.raises(DataError, match="exists"):
        signed.save(tmp_path / "signatures")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("signatures", lambda a: a[:-1], "signatures"),
        ("signatures", lambda a: a.astype(np.int64), "signatures"),
        ("bands", lambda a: a[:, :-1], "bands"),
        ("degrees", lambda a: a[:3], "degrees"),
        ("ids", lambda a: a[::-1].copy(), "ids"),
        ("others", lambda a: a[:1], "other_degrees"),
    ],
)
def test_damaged_files_are_refused(signed, tmp_path, name, change, said) -> None:
    place = signed.save(tmp_path / "signatures")
    np.save(place / f"{name}.npy", change(np.load(place / f"{name}.npy")))
    with pytest.raises(DataError, match=said):
        SignatureGraph.open(place)


def test_other_damage(signed, tmp_path) -> None:
    with pytest.raises(DataError, match="not a graph of signatures"):
        SignatureGraph.open(tmp_path)
    place = signed.save(tmp_path / "signatures")
    bands = np.load(place / "bands.npy")
    bands |= np.uint64(0xFFFFFFFF)  # rows that do not exist
    np.save(place / "bands.npy", bands)
    with pytest.raises(DataError, match="expected rows that exist"):
        SignatureGraph.open(place).expand([0], 5)
    for scalars in ("{", "[]", json.dumps({"cut": [500, 2], "seed": 1, "least_degree": 1})):
        (place / "signatures.json").write_text(scalars)
        with pytest.raises(DataError):
            SignatureGraph.open(place)


# What cannot be done


def test_unknown_vertices_have_neighbours_by_name(signed) -> None:
    with pytest.raises(CommunityError, match="vertex 999: there is none of this name; the nearest"):
        signed.expand([0, 999], 5)
    ids = np.array(["bash", "python3", "python3-numpy", "zsh"])
    graph = CSRGraph.from_edges([0, 1, 2], [3, 3, 3], ids=ids)
    one = SignatureGraph.from_edges(graph, hashes=24)
    with pytest.raises(CommunityError, match=r"'pyton3': there is none of this name; .*python3"):
        one.expand(["pyton3"], 3)
    for wrong in ("", "1.5", -1, None, 2**70):
        with pytest.raises(CommunityError, match="none of this name"):
            signed.expand([wrong], 5)
    assert signed.expand(["3"], 5).seeds.tolist() == [3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bands": (101, 2)}, "202 slots are needed, num_perm = 200"),
        ({"bands": (0, 2)}, "bands = .*two numbers above 0"),
        ({"threshold": 0.001}, "slots are needed"),
        ({"threshold": 0.0}, "threshold = 0.0: expected"),
        ({"recall": 1.0}, "recall = 1.0: expected"),
        ({"side": "left"}, "side = 'left'"),
        ({"least_degree": 0}, "least_degree = 0"),
        ({"least_degree": 10_000}, "no vertex has 10000 neighbours"),
        ({"threads": 0}, "threads = 0"),
        ({"hashes": 0}, "num_perm = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"hashes": 10**6}, "num_perm = 1000000"),
    ],
)
def test_options_beyond_their_range(graph, options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        SignatureGraph.from_edges(graph, **{**FEW, **options})


@pytest.mark.parametrize(
    "shard",
    [
        ([0, 1], [2]),
        ([0.5], [1]),
        ([-1], [1]),
        (["a"], ["b"]),
        ([[0]], [[1]]),
        5,
        ([0],),
        0,
        (np.array([2**63], np.uint64), [0]),
    ],
)
def test_edges_of_another_form(signed, shard) -> None:
    with pytest.raises(CommunityError, match=r"edges\[0\]"):
        SignatureGraph.from_edges([shard], hashes=24)
    with pytest.raises(CommunityError, match=r"edges\[0\]"):
        signed.insert([shard])


def test_queries_that_cannot_be_answered(signed) -> None:
    with pytest.raises(CommunityError, match="seeds"):
        signed.expand([], 5)
    with pytest.raises(CommunityError, match="size = 2: expected more than the 2 seeds"):
        signed.expand([0, 1], 2)
    with pytest.raises(ConfigError, match="'pagerang': expected one of"):
        signed.expand([0], 5, "pagerang")
    with pytest.raises(CommunityError, match="edges = 'int'"):
        SignatureGraph.from_edges(5)
    with pytest.raises(CommunityError, match="edges = 'int'"):
        signed.insert(5)
    for edges in ([], CSRGraph.from_edges([], [], num_nodes=3)):
        with pytest.raises(CommunityError, match="no vertex has 1 neighbours"):
            SignatureGraph.from_edges(edges, hashes=24)


def test_signatures_that_do_not_fit_are_refused(graph, monkeypatch) -> None:
    monkeypatch.setattr(building_module, "memory_available", lambda: 100_000)
    with pytest.raises(CommunityError, match=r"hashes = 200: expected at most 62: 400 signatures"):
        SignatureGraph.from_edges(graph, **FEW)


def test_shards_of_other_hashes_do_not_merge() -> None:
    with pytest.raises(CommunityError, match="24 hashes"):
        SignatureBuilder(32).merge(SignatureBuilder(24))
    with pytest.raises(CommunityError, match="same seed"):
        SignatureBuilder(32).merge(SignatureBuilder(32, seed=2))


# HTTP


def test_queries_over_http(signed) -> None:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    from shoal.core.errors import ServeError
    from shoal.fields.graph.communities.serving import community_server
    from shoal.serve.http.app_server import AppOptions

    with community_server(signed) as url:
        with urlopen(f"{url}/v1/communities?seeds=3,4&size=9", timeout=30) as response:
            said = json.load(response)
        assert said["added"] == signed.expand([3, 4], 9).added.tolist()
        assert said["seeds"] == [3, 4] and len(said["groups"]) == 9 and said["candidates"] > 7
        assert said["seconds"] > 0
        for wrong, word in (
            ("", "seeds = 0"),
            ("seeds=3&size=1", "size = 1"),
            ("seeds=3&size=100000", "size = '100000'"),
            ("seeds=3&size=-1", "size = '-1'"),
            ("seeds=7777", "vertex '7777'"),
            ("seeds=3&method=%3Cb%3E", "expected one of"),
        ):
            with pytest.raises(HTTPError) as caught:
                urlopen(f"{url}/v1/communities?{wrong}", timeout=30)
            assert caught.value.code == 400
            assert word in json.load(caught.value)["error"]["message"]
        with urlopen(f"{url}/?seeds=3,4&size=9&method=pagerank", timeout=30) as response:
            page = response.read().decode()
        assert "<svg" in page and "<option selected>pagerank" in page
        assert " candidates, in " in page
        with urlopen(f"{url}/?seeds=%3Cscript%3E", timeout=30) as response:
            page = response.read().decode()
        assert "<script>" not in page and "none of this name" in page
        taken = AppOptions(port=int(url.rpartition(":")[2]))
        with pytest.raises(ServeError, match="port"), community_server(signed, taken):
            pass
