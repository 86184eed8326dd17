"""Tables of features: what is gathered, what is counted, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, DataError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.fields.graph import FeatureTable  # noqa: E402
from shoal.fields.graph.gather.costs import gather_work, rates_of, timed  # noqa: E402
from shoal.fields.graph.gather.native import gather_rows, requests_of  # noqa: E402
from shoal.fields.graph.gather.protocols import GatherError, GatherRates  # noqa: E402
from shoal.fields.graph.loading import planted_graph  # noqa: E402
from shoal.fields.graph.sample.neighbours import (  # noqa: E402
    NeighbourSampler,
    epoch_samples,
)
from shoal.machine import load  # noqa: E402

PLACEMENTS = ["direct", "staged", "resident", {"name": "resident", "share": 1.0}]
ON_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


def at_line(rows: int, width: int, skew: int = 0) -> np.ndarray:
    """A table that begins so many floats behind the beginning of a line."""
    raw = np.empty(rows * width + 96, np.float32)
    begin = -raw.ctypes.data % 128 // 4 + skew
    result = raw[begin : begin + rows * width].reshape(rows, width)
    result[:] = np.random.default_rng(width).standard_normal((rows, width), np.float32)
    return result


def by_lanes(base: int, width: int, row: int, aligned: bool) -> tuple[int, int, list[int]]:
    """Requests and iterations of one warp, lane by lane, as the paper draws it; what it reads."""
    begin = base + 4 * width * row
    shift = begin % 128 // 4 if aligned else 0
    warps, requests, read = -(-width // 32), 0, []
    for k in range(warps):
        lines = set()
        for lane in range(32):
            at = 32 * k + lane - shift
            at = at + 32 * warps if at < 0 else at
            if at < width:
                lines.add((begin + 4 * at) // 128)
                read.append(at)
        requests += len(lines)
    return requests, warps, read


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_width_and_order_is_the_table_bit_by_bit(placement):
    draw = np.random.default_rng(0)
    orders = [
        np.zeros(0, np.int64), np.array([5]), np.full(4, 3), draw.permutation(9),
        draw.integers(0, 9, 30),
    ]  # fmt: skip
    for width in range(1, 301):
        values = at_line(9, width, skew=width % 32)
        values[2, 0] = np.nan
        with FeatureTable(values, placement, batch_rows=30, heat=np.arange(9)) as features:
            moved = 0
            for rows in orders:
                got = features.gather(rows, out=features.buffers[0][: len(rows)]).wait()
                assert got.numpy().tobytes() == values[rows].tobytes()
                moved += got.nbytes
            counts = features.counters()
            assert counts.device_written == moved and counts.rows == sum(map(len, orders))
            assert features.gather([]).wait().shape == (0, width)


@pytest.mark.parametrize(
    ("width", "wanted"),
    [(100, 1.656), (129, 1.775), (257, 1.861), (602, 1.854), (32, 1.0), (64, 1.0), (320, 1.0)],
)
def test_requests_are_those_of_the_paper(width, wanted):
    values, rows = at_line(64, width), np.arange(64)
    out = np.empty_like(values)
    counts = {}
    for aligned in (True, False):
        counts[aligned] = gather_rows(values, rows, out, aligned=aligned)
        assert np.array_equal(out, values) and counts[aligned].read == values.nbytes
    assert counts[False].requests / counts[True].requests == pytest.approx(wanted, abs=6e-4)


@pytest.mark.parametrize("skew", [0, 1, 16, 31])
def test_counts_are_those_of_lanes(skew):
    for width in [*range(1, 70), 127, 128, 129, 257, 300]:
        values, rows = at_line(5, width, skew), np.array([0, 3, 3, 1])
        base, out = values.ctypes.data, np.empty((4, width), np.float32)
        for aligned in (True, False):
            lanes = [by_lanes(base, width, int(row), aligned) for row in rows]
            assert all(sorted(read) == list(range(width)) for _, _, read in lanes)
            wanted = sum(one[0] for one in lanes), sum(one[1] for one in lanes)
            moved = gather_rows(values, rows, out, aligned=aligned)
            assert (moved.requests, moved.iterations) == wanted
            assert requests_of(base, width, rows, aligned=aligned) == wanted
            if aligned:  # a request for each line that a row overlaps, and no iteration more
                first = base + 4 * width * rows
                lines = (first + 4 * width - 1) // 128 - first // 128 + 1
                assert moved.requests == lines.sum()
                assert moved.iterations == 4 * -(-width // 32)
            plain = gather_rows(values, rows, out.copy(), aligned=aligned, library=None)
            assert plain == moved


def test_bytes_of_each_tier():
    values, rows = at_line(40, 33), np.arange(0, 40, 2)
    size = 4 * 33 * 20
    counts = {}
    for name in table("feature_source"):
        heat = np.arange(40)[::-1]  # the first quarter is hot
        with FeatureTable(values, name, batch_rows=20, heat=heat) as features:
            assert features.gather(rows, out=features.buffers[1]).wait().shape == (20, 33)
            counts[name] = features.counters()
            assert features.host.stats.peak <= features.host.capacity
    assert counts["staged"].host_read == 2 * size and counts["staged"].host_written == size
    assert counts["direct"].host_read == size and counts["direct"].host_written == 0
    assert counts["staged"].host_bytes == 3 * counts["direct"].host_bytes
    assert counts["resident"].device_read == size // 4
    assert counts["resident"].host_read == size - size // 4
    assert counts["direct"].requests and not counts["staged"].requests


def test_a_link_holds_back_all_that_the_host_moves():
    values, rows = at_line(100, 64), np.arange(100)
    rate = 4.0 * 64 * 100 / 0.05
    for placement, times in [("direct", 1), ("staged", 3)]:
        with FeatureTable(values, placement, host_bytes_per_s=rate) as features:
            pending = features.gather(rows)
            assert torch.equal(pending.wait(), torch.from_numpy(values)) and pending.done()
            counts = features.counters()
            assert counts.stalls == 1 and counts.stall_s >= 0.9 * times * 0.05


def test_gathers_under_way_are_finished_before_the_memory_goes():
    values = at_line(1000, 64)
    features = FeatureTable(values, "staged", host_bytes_per_s=4.0 * 64 * 1000 / 0.02)
    pending = [features.gather(np.arange(1000)) for _ in range(2)]
    features.close()
    assert all(one.done() for one in pending)
    assert torch.equal(pending[1].wait(), torch.from_numpy(values))
    with pytest.raises(GatherError, match="closed"):
        features.gather([0])
    features.close()


def test_a_file_is_mapped(tmp_path):
    values = at_line(30, 7)
    np.save(tmp_path / "x.npy", values)
    with FeatureTable.open(tmp_path / "x.npy", placement="direct") as features:
        assert (features.num_rows, features.dim, features.note) == (30, 7, "")
        assert np.array_equal(features.gather([29, 0]).wait().numpy(), values[[29, 0]])
    for name, array in [("d", values.astype(float)), ("v", values[0]), ("o", np.array([None]))]:
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
        with pytest.raises(DataError, match=f"{name}.npy"):
            FeatureTable.open(tmp_path / f"{name}.npy")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:200])
    np.savez(tmp_path / "two.npz", values, values)
    for name in ("cut.npy", "none.npy", "two.npz"):
        with pytest.raises(DataError, match=name):
            FeatureTable.open(tmp_path / name)


def test_what_cannot_be_gathered():
    values = at_line(10, 8)
    for given in (values.T, values[:, :4], values.astype(np.float64), values[0], [[1.0]]):
        with pytest.raises(GatherError, match=r"table.*expected"):
            FeatureTable(given)
    with pytest.raises(GatherError, match=r"heat: \[3\]; expected \[10\]"):
        FeatureTable(values, "resident", heat=np.ones(3))
    with pytest.raises(GatherError, match="which rows are hot"):
        FeatureTable(values, "resident")
    with pytest.raises(ConfigError, match="expected one of direct"):
        FeatureTable(values, "pinned")
    if not torch.cuda.is_available():
        with pytest.raises(GatherError, match="no GPU here; expected cpu"):
            FeatureTable(values, device="cuda")
    with pytest.raises(ConfigError, match="share"):
        FeatureTable(values, {"name": "resident", "share": 0.0})
    with FeatureTable(values) as features:
        for rows, said in [([10], "rows: 10; expected 0 to 9"), ([3, -1], "rows: -1")]:
            with pytest.raises(GatherError, match=said):
                features.gather(rows)
        for rows in (np.zeros((2, 2), int), np.zeros(2, np.float32)):
            with pytest.raises(GatherError, match=r"expected int64 \[n\]"):
                features.gather(rows)
        for out in (torch.empty(3, 8), torch.empty(2, 8, dtype=torch.float64), torch.empty(8, 2).T):
            with pytest.raises(GatherError, match="out: "):
                features.gather([0, 1], out=out)
        assert features.counters().gathers == 0


def test_pages_that_cannot_be_locked_are_staged(monkeypatch, caplog):
    def refused(self):
        raise RuntimeError("cannot lock memory\nmore")

    values = at_line(10, 8)
    features = FeatureTable(values)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    features.device = torch.device("cuda")  # as if it were there
    for name in ("direct", "resident"):
        part = features._locked(table("feature_source").build(name))
        assert table("feature_source").spell(part).name == "staged"
        assert "cannot lock memory); rows are staged" in features.note in caplog.text
    features.device = torch.device("cpu")
    features.close()


def test_estimates():
    machine = load("laptop")
    rates = rates_of(machine)
    graph = planted_graph(2000)
    sampler = NeighbourSampler(graph, (5, 5))
    samples = list(epoch_samples(sampler, np.arange(300), 100, 0))
    heat = np.zeros(2000)
    heat[:500] = 1 + np.arange(500)

    def costs(width, where=machine, rates=rates, host=None):
        work = gather_work(samples, heat, width, rates, host)
        made = {name: table("feature_source").build(name) for name in table("feature_source")}
        return work, {name: one.estimate(work, where) for name, one in made.items()}

    work, slow = costs(602, host=1e6)
    assert work.rows == np.mean([len(one.nodes) for one in samples])
    among = np.mean(np.concatenate([one.nodes for one in samples]) < 500)
    assert work.hot[25] == pytest.approx(among) and work.hot[100] == 1
    host = {name: cost.wire_bytes["host"] for name, cost in slow.items()}
    assert host["staged"] == 3 * host["direct"] == pytest.approx(3 * work.nbytes)
    assert host["resident"] == pytest.approx((1 - work.hot[25]) * work.nbytes)
    for name, cost in slow.items():  # the link decides
        assert cost.step_s.value == pytest.approx(host[name] / 1e6, rel=0.01)
        assert sum(cost.terms_s.values()) == pytest.approx(cost.step_s.value)
    assert slow["resident"].memory_bytes["device"] == 4 * 602 * 500
    # A GPU: whole lines are read, of which narrow rows use little.
    gpu = load("h100")
    _, wide = costs(602, gpu, rates_of(gpu))
    _, narrow = costs(4, gpu, rates_of(gpu))
    assert wide["resident"].step_s.value < wide["direct"].step_s.value < wide["staged"].step_s.value
    assert min(narrow, key=lambda name: narrow[name].step_s.value) == "staged"


@pytest.mark.slow
def test_rates_are_timed():
    rates = timed()
    assert isinstance(rates, GatherRates)
    assert all(value > 0 for value in rates.model_dump().values())


@pytest.mark.skipif(ON_GPU, reason="Triton runs on the GPU here")
@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 129, 257])
def test_the_program_of_a_gpu_interpreted(width, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from shoal.fields.graph.gather.triton import gather

    values = torch.from_numpy(at_line(9, width, skew=5))
    rows, places = torch.tensor([8, 0, 3, 3]), torch.tensor([3, 1, 0, 2])
    for aligned in (True, False):
        out = torch.full((4, width), -1.0)
        gather(values, rows, out, aligned=aligned)
        assert torch.equal(out, values[rows])
        gather(values, rows, out, places, aligned=aligned)
        assert torch.equal(out[places], values[rows])
    gather(values, rows[:0], out)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS[:3], ids=str)
def test_a_gpu_reads_the_memory_of_its_host(placement):
    draw = np.random.default_rng(0)
    for width in (1, 33, 100, 257, 602):
        values = at_line(500, width, skew=3)
        rows = draw.integers(0, 500, 2000)
        with FeatureTable(
            values, placement, batch_rows=2000, device="cuda", heat=np.arange(500)
        ) as features:
            got = features.gather(rows, out=features.buffers[0]).wait()
            assert got.is_cuda and np.array_equal(got.cpu().numpy(), values[rows])
            assert features.counters().device_written == got.nbytes and not features.note
