"""Loading, for claim [102] ByteCheckpoint: who reads what, in any layout, and what data is left.

Counted on ranks that are threads: ``read_bytes`` of four replicas over what is stored; the share of
``layout_pairs`` that load bit for bit what was saved; ``samples_lost``, tokens given out too often
or never when four ranks become three and then two. In the A/A run every replica reads all, ranks
take the file of their number, and a loader's place is one number.

Source: Wan et al., ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model
Development, 2024.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.frame import ClaimRun
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    import torch

    from shoal.checkpoint.pieces import Piece
    from shoal.corpora.mixture import MixtureLoader
    from shoal.ir import TrainJob
    from shoal.ir.comm import Comm
    from shoal.model.config import ModelConfig


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"parallel": {}},
    "flat buffers cut anywhere, three ranks": {"parallel": {"dp": 3}, "shard": "zero1"},
    "sharded parameters, two ranks": {"parallel": {"dp": 2}, "shard": "zero3"},
    "tensor parallel": {"parallel": {"tp": 2}},
    "pipeline": {"parallel": {"pp": 2}},
    "data and tensor parallel, sharded": {"parallel": {"dp": 2, "tp": 2}, "shard": "zero3"},
}
_REPLICAS = 4


def measure_load(run: ClaimRun) -> None:
    """Take the samples of every metric of loading; the quick run has half of the layouts."""
    with torch_threads(1):
        run.progress("loading in other layouts", 0.02)
        place = run.work_dir / run.pick("load", "load-baseline")
        run.put("read_bytes", _read_bytes(place / "copies", run.as_baseline))
        run.put("layout_pairs", _pairs(place / "pairs", run.quick, run.as_baseline))
        seeds = range(run.seed, run.seed + (2 if run.quick else 6))
        run.put("samples_lost", (_lost(seed, run.as_baseline) for seed in seeds))


def _read_bytes(place: Path, as_baseline: bool) -> list[float]:
    """Of states of several sizes, what the replicas read over what is stored."""
    import torch

    from shoal.checkpoint.loading import load_pieces
    from shoal.checkpoint.pieces import Piece
    from shoal.checkpoint.store import Store
    from shoal.claims.lab.thread_ranks import run_ranks

    results = []
    for step, (rows, count) in enumerate(((300, 3), (1100, 5), (3000, 2))):
        state = {f"model.{n}": torch.full((rows, 64 + n), float(n)) for n in range(count)}
        Store(place).save(step, state, {})
        stored = sum(tensor.nbytes for tensor in state.values())

        def replica(comm: Comm, step: int = step, state: Any = state) -> int:
            wanted = {n: [Piece.whole(torch.empty_like(tensor))] for n, tensor in state.items()}
            saved = Store(place).open(step, verify=False)
            report = load_pieces(saved, wanted, None if as_baseline else comm)
            for name, (piece,) in wanted.items():
                if not torch.equal(piece.tensor, state[name]):
                    raise AssertionError(f"{name} is not what was saved")
            return report.read_bytes

        results.append(sum(run_ranks(_REPLICAS, replica)) / stored)
    return results


def _pairs(place: Path, quick: bool, as_baseline: bool) -> list[float]:
    """1 for every pair of layouts of which the second loads what the first has saved."""
    chosen = list(LAYOUTS)[1::2] if quick else list(LAYOUTS)
    pairs = []
    for saving in chosen:
        whole = saved_under(place / saving, saving)
        for loading in chosen:
            good, _ = layout_pair(place / saving, loading, whole, by_file=as_baseline)
            pairs.append(float(good))
    return pairs


def saved_under(place: Path, layout: str) -> dict[str, torch.Tensor]:
    """Train one step in a layout and save it; every tensor, whole, as it was saved."""
    from shoal import checkpoint
    from shoal.checkpoint.store import Store
    from shoal.claims.lab.same_as_one import SeededWeights, tokens
    from shoal.claims.lab.session import RankSession
    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.train.state import held_by

    job = _job(layout)

    def save(comm: Comm) -> dict[str, list[Piece]]:
        session = RankSession(comm, job, _model(), SeededWeights(_model()))
        every = tokens(job, _model().vocab_size, 0, documents=False)
        rows = session.rows(every.inputs, every.targets, 0)
        session.passes(rows, count=job.global_batch * job.seq_len)
        session.updater.step(1.0)
        session.engine.sharded.publish()
        held = held_by(session.engine, session.updater)
        # Pieces by name are a tree of one level, and so a state of their own.
        checkpoint.save(place, {"all": dict(held)}, comm=comm)
        return held

    held = run_ranks(job.parallel.world, save)
    saved = Store(place).open(0)
    whole = {name: saved.tensor(name) for name in saved.names()}
    for pieces in held:
        if not _equal({f"all.{name}": several for name, several in pieces.items()}, whole):
            raise AssertionError(f"{layout}: what was saved is not what a rank holds")
    return whole


def layout_pair(
    place: Path, layout: str, whole: dict[str, torch.Tensor], *, by_file: bool = False
) -> tuple[bool, int]:
    """Whether all ranks hold ``whole`` after loading, by plan or file; bytes they read."""
    import torch

    from shoal import checkpoint
    from shoal.checkpoint.shards import file_name
    from shoal.checkpoint.store import Store
    from shoal.claims.lab.session import RankSession
    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.train.reshard import EmptyWeights
    from shoal.train.state import held_by

    job = _job(layout)

    def load(comm: Comm) -> tuple[bool, int]:
        session = RankSession(comm, job, _model(), EmptyWeights(_model()))
        # What the optimizer will hold is there after a step.
        for parameter in session.engine.sharded.owned().values():
            parameter.grad = torch.zeros_like(parameter)
        session.updater.step(0.0)
        held = held_by(session.engine, session.updater)
        if by_file:
            index = Store(place).open(0, verify=False).index
            if comm.rank >= index.world:  # there is no file of its number
                return False, 0
            shard = index.shard(file_name(comm.rank))
            there = {(name, piece.box) for name, piece, _ in shard.pieces()}
            wanted = {(f"all.{name}", p.box) for name, several in held.items() for p in several}
            return wanted <= there, 0
        report = checkpoint.load(place, {"all": dict(held)}, comm=comm)
        return _equal(
            {f"all.{n}": several for n, several in held.items()}, whole
        ), report.read_bytes

    ranks = run_ranks(job.parallel.world, load)
    return all(good for good, _ in ranks), sum(read for _, read in ranks)


def _equal(pieces: dict[str, list[Piece]], whole: dict[str, torch.Tensor]) -> bool:
    import torch

    from shoal.core.boxes import Box

    return all(
        torch.equal(p.tensor, whole[name][p.box.slices(Box.whole(tuple(whole[name].shape)))])
        for name, several in pieces.items()
        for p in several
    )


def _job(layout: str) -> TrainJob:
    return train_job(
        seq_len=8,
        global_batch=6,
        microbatch=1,
        steps=2,
        optimizer={"name": "adamw", "lr": 1e-3},
        **LAYOUTS[layout],
    )


def _model() -> ModelConfig:
    return llama(16, 2, 4, kv_heads=2, vocab=29, ffn=24, length=32)


def _lost(seed: int, as_baseline: bool) -> int:
    """Tokens handed out too often or never in one epoch of 4, then 3, then 2 ranks."""
    from shoal.checkpoint.loader import merge, split
    from shoal.core.random import generator

    lengths = generator(seed, purpose="claim bytecheckpoint").integers(1, 30, 300)
    source = {"text": [[number + 1] * int(length) for number, length in enumerate(lengths)]}

    def loader(rank: int, world: int) -> MixtureLoader:
        from shoal.corpora.mixture import MixtureLoader

        return MixtureLoader(
            source, {"text": 1.0}, seq_len=31, batch=1, seed=seed, end=0, rank=rank, world=world
        )

    def take(one: MixtureLoader, count: int) -> None:
        for _ in range(count):
            handed.update(next(one).reshape(-1).tolist())

    handed: Counter[int] = Counter()
    loaders = [loader(rank, 4) for rank in range(4)]
    for world in (3, 2):
        for number, one in enumerate(loaders):
            take(one, 6 + number)
        states = [one.state() for one in loaders]
        loaders = [loader(rank, world) for rank in range(world)]
        if as_baseline:
            # All that is known is how many samples were drawn; they are drawn again.
            drawn = sum(reader.drawn for state in states for reader in state.own)
            for one in loaders:
                while sum(reader.drawn for reader in one.state().own) < drawn // world:
                    next(one)
        else:
            for one, state in zip(loaders, split(merge(states), world), strict=True):
                one.load_state(state)
    # The rest of the epoch is what the last readers would hand out of it.
    for one in loaders:
        for reader in one.state().own:
            for tokens in (*reader.packing, *reader.ready):
                handed.update(tokens)
            for span in reader.spans["text"]:
                for at in span:
                    handed.update(one.document("text", span.epoch, at))
    whole = Counter(token for text in source["text"] for token in (*text, 0))
    return sum(((handed - whole) + (whole - handed)).values())
