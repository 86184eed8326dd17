"""What layers, links and their overlap cost on this machine: every rank of a job measures at once.

A block is timed between two others, the embedding before one block and the output layer after
one, for several numbers of sequences and degrees of tensor parallelism; of the latter a rank
computes its part, without other ranks
(:class:`~shoal.claims.lab.measure_passes.SingleRankComm`). Links are timed between the ranks
themselves. The fits are :mod:`shoal.cost.training.layer_fit`'s.

Source: Miao et al., Galvatron, 2023, section 3.4.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.claims.lab.measure_passes import PlaceholderWeights, SingleRankComm
from shoal.core.parts import table
from shoal.cost.training.layer_fit import (
    LayerProfile,
    LinkFit,
    Overlap,
    PassFit,
    fit_link,
    fit_pass,
)
from shoal.ir import Parallel
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.pipeline.stage import Stage
from shoal.parallel.protocols import MicroBatch
from shoal.train.replan import link_calls

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm, Pending

_TAG = "probe"
# A middle stage of so many blocks is timed, and a share of it is a block.
_BLOCKS = 2
_SIZES = (16384, 262144, 1048576)
_IN_A_ROW = 2097152  # bytes


def measure_layers(
    comm: Comm,
    *,
    config: ModelConfig,
    seq_len: int,
    sizes: Sequence[int],
    tps: Sequence[int] = (1,),
    repeats: int = 7,
    optimizer: str = "adamw",
) -> dict[str, Any]:
    """Times on this rank, as plain JSON; all ranks call it, and compute side by side.

    Returns ``passes``: layer/tp -> rows of sequences, T, forward s, backward s; ``links``: op ->
    rows of bytes that a rank sends, s; ``compute_slowdown`` and ``communication_slowdown`` while
    both are under way; ``per_parameter_s``.
    """
    passes: dict[str, list[list[float]]] = {}
    for tp in tps:
        stages = _stages(config, tp)
        for count in sizes:
            result = {}
            for name, stage in stages.items():
                comm.barrier()
                result[name] = _time(stage, config, count, seq_len, repeats)
            block = tuple(seconds / _BLOCKS for seconds in result["middle"])
            _row(passes, f"block/{tp}", count, seq_len, block)
            for end in ("embed", "head"):
                rest = tuple(
                    max(1e-7, whole - one) for whole, one in zip(result[end], block, strict=True)
                )
                _row(passes, f"{end}/{tp}", count, seq_len, rest)
    links = _links(comm, repeats)
    slow = _slowdowns(comm, _stages(config, 1)["middle"], config, max(sizes), seq_len, repeats)
    return {
        "passes": passes,
        "links": links,
        "compute_slowdown": slow[0],
        "communication_slowdown": slow[1],
        "per_parameter_s": _update(config, optimizer, repeats),
    }


def profile_of(ranks: Sequence[Mapping[str, Any]], *, step_s: float = 0.0) -> LayerProfile:
    """The fits of what :func:`measure_layers` returned; of each time the slowest rank's."""
    forward: dict[str, PassFit] = {}
    backward: dict[str, PassFit] = {}
    for name in ranks[0]["passes"]:
        rows = [rank["passes"][name] for rank in ranks]
        for fits, column in ((forward, 2), (backward, 3)):
            points = [
                (row[0][0], row[0][1], max(one[column] for one in row))
                for row in zip(*rows, strict=True)
            ]
            fits[name] = fit_pass(points)
    links: list[LinkFit] = []
    for op in ranks[0]["links"]:
        rows = [rank["links"][op] for rank in ranks]
        group = 2 if op == "send" else len(ranks)
        slowest = [(row[0][0], max(one[1] for one in row)) for row in zip(*rows, strict=True)]
        links.append(fit_link(op, slowest, group=group))
    return LayerProfile(
        forward=forward,
        backward=backward,
        links=tuple(links),
        overlap=Overlap(
            compute=max(1.0, *(float(rank["compute_slowdown"]) for rank in ranks)),
            communication=max(1.0, *(float(rank["communication_slowdown"]) for rank in ranks)),
            source="measured between these ranks",
        ),
        step_s=step_s,
        per_parameter_s=max(float(rank["per_parameter_s"]) for rank in ranks),
    )


def _row(
    passes: dict[str, list[list[float]]],
    name: str,
    count: int,
    seq_len: int,
    seconds: Sequence[float],
) -> None:
    passes.setdefault(name, []).append([float(count), float(seq_len), *seconds])


def _stages(config: ModelConfig, tp: int) -> dict[str, Stage]:
    """A middle stage, one with the embedding and one with the output layer."""
    parallel = Parallel(tp=tp)
    ranks = ranks_of(SingleRankComm(0, tp), parallel)
    weights = PlaceholderWeights(config)
    last = config.num_layers - 1
    cuts = {
        "middle": (range(1, 1 + _BLOCKS), False, False),
        "embed": (range(1), True, False),
        "head": (range(last, last + 1), False, True),
    }
    stages = {}
    for name, (layers, first, end) in cuts.items():
        stage = Stage(config, layers, first=first, last=end, parallel=parallel, ranks=ranks)
        stage.load(weights.whole)
        stages[name] = stage.train()
    return stages


def _batch(config: ModelConfig, count: int, seq_len: int) -> MicroBatch:
    tokens = torch.arange(count * seq_len).view(count, seq_len) % config.vocab_size
    return MicroBatch(tokens, tokens, torch.arange(seq_len), None, 0, 0)


def _once(stage: Stage, x: Tensor | None, mb: MicroBatch) -> tuple[float, float]:
    """Seconds of a forward and a backward pass."""
    begin = time.perf_counter()
    out = stage(x, mb)
    middle = time.perf_counter()
    out.backward(torch.ones_like(out))
    return middle - begin, time.perf_counter() - middle


def _input(stage: Stage, config: ModelConfig, mb: MicroBatch) -> Tensor | None:
    if stage.first:
        return None
    return torch.full((mb.tokens.numel(), config.hidden), 0.01, requires_grad=True)


def _time(
    stage: Stage, config: ModelConfig, count: int, seq_len: int, repeats: int
) -> tuple[float, float]:
    mb = _batch(config, count, seq_len)
    rows = []
    for turn in range(repeats + 2):
        x = _input(stage, config, mb)
        both = _once(stage, x, mb)
        if turn >= 2:
            rows.append(both)
    return statistics.median(r[0] for r in rows), statistics.median(r[1] for r in rows)


def _links(comm: Comm, repeats: int) -> dict[str, list[list[float]]]:
    """Rows of bytes sent and seconds of sums, gathers and messages among all ranks."""
    links: dict[str, list[list[float]]] = {}
    if comm.world == 1:
        return links
    for size in _SIZES:
        # In a row, as a step has them: a link that lets some bytes pass at once after a pause
        # does so for the first of them only.
        row = max(2, _IN_A_ROW // size)
        for op, (sent, call) in link_calls(comm, size, tag=_TAG).items():
            links.setdefault(op, []).append([sent, _median(comm, call, repeats, row)])
    return links


def _median(comm: Comm, call: Callable[[], None], repeats: int, row: int = 1) -> float:
    """Seconds of one of ``row`` calls that follow one another."""
    results = []
    for turn in range(repeats + 1):
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(row):
            call()
        if turn:
            results.append((time.perf_counter() - begin) / row)
    return statistics.median(results)


def _slowdowns(
    comm: Comm, stage: Stage, config: ModelConfig, count: int, seq_len: int, repeats: int
) -> tuple[float, float]:
    """How much longer computing, and a sum, take while the other is under way."""
    if comm.world == 1:
        return 1.0, 1.0
    mb = _batch(config, count, seq_len)

    def compute(passes: int) -> float:
        begin = time.perf_counter()
        for _ in range(passes):
            _once(stage, _input(stage, config, mb), mb)
        return time.perf_counter() - begin

    data = torch.zeros(_SIZES[-1] // 4)
    compute(1)
    one = statistics.median(compute(1) for _ in range(repeats))
    alone = _median(comm, lambda: comm.all_reduce(data, tag=_TAG).wait(), repeats)
    # Shorter than the sum, so that it is under way all the time; and longer, so that computing is.
    short, long = max(1, int(0.5 * alone / one)), max(2, int(3.0 * alone / one) + 1)
    slow, late = [], []
    for _ in range(repeats):
        comm.barrier()
        pending = comm.all_reduce(data, tag=_TAG)
        during = compute(short)
        pending.wait()
        slow.append(during / (short * one))
        comm.barrier()
        ended: list[float] = []
        begin = time.perf_counter()
        pending = comm.all_reduce(data, tag=_TAG)

        def wait(pending: Pending = pending, ended: list[float] = ended) -> None:
            pending.wait()
            ended.append(time.perf_counter())

        waits = threading.Thread(target=wait)
        waits.start()
        compute(long)
        waits.join()
        late.append((ended[0] - begin) / alone)
    return max(1.0, statistics.median(slow)), max(1.0, statistics.median(late))


def _update(config: ModelConfig, optimizer: str, repeats: int) -> float:
    """Seconds of the update of one parameter, with the norm and the scaling of its gradient."""
    weights = PlaceholderWeights(config)
    names = [f"blocks.0.{n}" for n in ("attention.o_proj.weight", "mlp.down_proj.weight")]
    parameters = {name: torch.nn.Parameter(weights.whole(name)) for name in names}
    updater = table("optimizer").build(optimizer).build(parameters)
    count = sum(p.numel() for p in parameters.values())
    results = []
    for turn in range(repeats + 2):
        for p in parameters.values():
            p.grad = torch.full_like(p, 0.01)
        begin = time.perf_counter()
        norm = sum(float(p.grad.square().sum()) for p in parameters.values() if p.grad is not None)
        for p in parameters.values():
            if p.grad is not None:
                p.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        updater.step(1.0)
        if turn >= 2:
            results.append((time.perf_counter() - begin) / count)
    return statistics.median(results)
