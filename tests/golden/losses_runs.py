"""Trains the rows of :mod:`losses_rows`: by the trainer itself, on threads or on real ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # for ranks that are processes

from losses_rows import DRAFTERS, JOB, MODEL, ROWS, STEPS, Row

from shoal.checkpoint.pieces import Piece
from shoal.claims.lab.same_as_one import SeededWeights
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.ir import Device, Link, Machine, MemoryTier, TrainJob
from shoal.ir.drafting import DrafterJob
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer
from shoal.parallel.engine import ParallelEngine
from shoal.plan.composition import check_composition
from shoal.train import loop, qat
from shoal.train.drafters import protocols as drafting
from shoal.train.drafters.execute import train_steps
from shoal.train.routers import train_routers
from shoal.train.simple import Trainer as SimpleTrainer

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}

MACHINE = Machine(
    name="described",
    device=Device(
        name="two cores",
        kind="cpu",
        num_cores=2,
        peak_flops={"bf16": 1e12, "fp32": 2e11},
        matmul_flops={"bf16": 6e11, "fp32": 1.5e11},
        memory=(MemoryTier(name="dram", capacity_bytes=16 * 2**30, read_bandwidth=2e10),),
    ),
    links=(Link(scope="loopback", bandwidth=1.5e9, latency_s=1e-4),),
)


class Text:
    """Documents of 3 to 40 tokens, in which the next token often follows from the last one."""

    def __init__(self, vocab_size: int, size: int = 6000) -> None:
        source = generator(0, purpose="golden text")
        self.end_of_text, self.learned = 0, None
        self._tokens = np.empty(size, dtype=np.int64)
        offsets, last = [0], 1
        surprise, drawn = source.random(size), source.integers(1, vocab_size - 1, size)
        lengths = iter(source.integers(3, 41, size).tolist())
        left = next(lengths)
        for place in range(size):
            left -= 1
            if left == 0 or place + 1 == size:
                self._tokens[place] = self.end_of_text
                offsets.append(place + 1)
                left = next(lengths)
                continue
            last = int(drawn[place]) if surprise[place] < 0.2 else last * 5 % (vocab_size - 2) + 1
            self._tokens[place] = last
        self.offsets = np.array(offsets)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def read(self, start: int, out_N: np.ndarray) -> None:
        """Fill ``out_N`` with the tokens from ``start`` on; after the last comes the first."""
        out_N[:] = self._tokens[(start + np.arange(len(out_N))) % len(self)]


class Tokens:
    """A corpus as a trainer reads it, in memory."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.train = Text(vocab_size)
        self.end_of_text = self.train.end_of_text


@contextlib.contextmanager
def weights_in(dtype: torch.dtype) -> Iterator[None]:
    """Trainers have weights of this type; those of jobs have fp32."""
    with mock.patch.object(loop, "ParallelEngine", functools.partial(ParallelEngine, dtype=dtype)):
        yield


def train(row: Row, dtype: str, place: Path) -> dict[str, Any]:
    """Train a row on threads.

    Args:
        row: what.
        dtype: of its weights.
        place: directory for what lies on disk.
    """
    job = TrainJob.model_validate({**JOB, **row.job})
    with weights_in(DTYPES[dtype]):
        ranks = run_ranks(
            job.parallel.world,
            lambda comm: on_rank(row, dtype, comm, place),
            ranks_per_node=row.nodes,
        )
    return together(ranks)


def on_rank(row: Row, dtype: str, comm: Any, place: Path) -> dict[str, Any]:
    """Train on one rank: what it saw of losses, holds of the state, and has sent."""
    job = TrainJob.model_validate({**JOB, **row.job})
    config = ModelConfig.model_validate({**MODEL, **row.model})
    check_composition(job)
    if not hasattr(comm, "beat"):
        comm.beat = None
    trainer = loop.RankTrainer(
        job,
        STEPS,
        SeededWeights(config, job.seed, DTYPES[dtype]),
        Tokens(config.vocab_size),  # type: ignore[arg-type]
        comm,
        place=place,
        machine=MACHINE,
    )
    with contextlib.closing(trainer):
        results, rounds = [], []
        for step in range(STEPS):
            results.append(trainer.step(step))
            rounds += [event["loss"] for kind, event in trainer.events().items() if kind == "round"]
        sent = wire(comm.meter)
        pieces = trainer.pieces()
        return {
            "losses": [result.loss.hex() for result in results],
            "norm": [results[-1].grad_norm.hex()],
            "rounds": [loss.hex() for loss in rounds],
            "sent": sent,
            "weights": digest({n: p for n, p in pieces.items() if n.startswith("model.")}),
            "state": digest({n: p for n, p in pieces.items() if not n.startswith("model.")}),
        }


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say: what is the same for all is said once."""
    result: dict[str, Any] = {}
    for key in ("losses", "norm", "rounds"):
        # Workers with rounds have losses of their own, and each of their ranks the worker's.
        each = list({tuple(rank[key]): None for rank in ranks})
        if any(each):
            result[key] = [list(one) for one in each]
    sent: dict[str, int] = {}
    for rank in ranks:
        for name, count in rank["sent"].items():
            sent[name] = sent.get(name, 0) + count
    if sent:
        result["sent"] = sent
    for key in ("weights", "state"):
        result[key] = hashlib.sha256("".join(r[key] for r in ranks).encode()).hexdigest()[:32]
    return result


def wire(meter: Meter) -> dict[str, int]:
    """Bytes that a rank has sent, by operation and tag."""
    numbers: dict[str, int] = {}
    for key, value in meter.totals().items():
        if key.startswith("wire_bytes{"):
            labels = dict(label.split("=") for label in key[:-1].partition("{")[2].split(","))
            name = f"{labels['op']} {labels['tag']} {labels['scope']}"
            numbers[name] = numbers.get(name, 0) + int(value)
    return {name: count for name, count in numbers.items() if count}


def digest(pieces: Mapping[str, Any]) -> str:
    """sha256 of what a rank holds, with its names and places."""
    result = hashlib.sha256()
    for name in sorted(pieces):
        for piece in pieces[name]:
            result.update(
                f"{name} {piece.offset} {piece.global_shape} {piece.tensor.dtype}".encode()
            )
            data = piece.tensor.detach().contiguous().view(-1)
            result.update(data.view(torch.uint8).numpy().tobytes() if len(data) else b"")
    return result.hexdigest()


def processes(comm: Any, *, rows: list[str], dtype: str, place: str) -> dict[str, dict[str, Any]]:
    """The same on one process of several, row after row."""
    processes = {}
    for name in rows:
        before = wire(comm.meter)
        with weights_in(DTYPES[dtype]):
            row = on_rank(ROWS[name], dtype, comm, Path(place))
        row["sent"] = {k: n - before.get(k, 0) for k, n in row["sent"].items()}
        row["sent"] = {k: n for k, n in row["sent"].items() if n}
        processes[name] = row
    return processes


class Features(NamedTuple):
    """What a target makes of the text, computed when it is asked for."""

    target: Any
    tokens: Tensor

    @property
    def index(self) -> Any:
        return SimpleNamespace(train=len(self.tokens))

    def rows(self, part: str, numbers: Sequence[int], dtype: torch.dtype) -> Any:
        some = self.tokens[list(numbers)]
        with torch.no_grad():
            return drafting.TargetRows(some, self.target.hidden(some).to(dtype))


def draft(name: str, place: Path) -> dict[str, Any]:
    """Train a drafter for fresh weights."""
    options = {"name": name, **DRAFTERS[name]}
    job = DrafterJob.model_validate(
        {
            "model": "target",
            "drafter": options,
            "seq_len": 16,
            "batch": 2,
            "tokens": STEPS * 2 * 16,
            "read_tokens": 8 * 16,
            "prompt_tokens": 4,
            "precision": "fp32",
        }
    )
    config = ModelConfig.model_validate(MODEL)
    target = SeededWeights(config).model().requires_grad_(False).eval()
    part = table("drafter").build(job.drafter)
    part.check(job, config.shape())
    tokens = torch.empty(8, 16, dtype=torch.int64)
    text = Text(config.vocab_size)
    for number, row in enumerate(tokens.numpy()):
        text.read(16 * number, row)
    learner = part.begin(target, job)
    events: list[dict[str, Any]] = []
    train_steps(
        job,
        cast("Any", Features(target, tokens)),
        learner,
        state=place / "state",
        resume=False,
        tell=lambda kind, **fields: events.append(fields) if kind == "step" else None,
    )
    return {
        "losses": [[event["loss"].hex() for event in events]],
        "norm": [[events[-1]["grad_norm"].hex()]],
        "weights": tensors_digest(learner.state()),
    }


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of whole tensors."""
    return digest({name: [Piece.whole(one)] for name, one in tensors.items()})[:32]


def simple(parallel: dict[str, int]) -> dict[str, Any]:
    """Train by three functions: an epoch's mean losses, and the whole weights."""

    def on(comm: Any) -> dict[str, Any]:
        source = generator(0, purpose="golden examples")
        inputs = torch.from_numpy(source.standard_normal((STEPS * 4, 6)))
        labels = source.integers(0, 4, len(inputs)).tolist()
        examples = list(zip(inputs, labels, strict=True))
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        with torch.no_grad():
            for name, value in net.named_parameters():
                drawn = generator(0, purpose=f"golden {name}").standard_normal(value.shape)
                value.copy_(torch.from_numpy(drawn) * 0.3)
        trainer = SimpleTrainer(
            net,
            lambda some: (torch.stack([x for x, _ in some]), torch.tensor([y for _, y in some])),
            lambda model, batch, train: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            parallel=parallel,
            lr=1e-2,
            batch=16,
            comm=comm,
        )
        losses = [row["loss"].hex() for row in trainer.fit(examples, epochs=4)]
        return {"losses": losses, "weights": tensors_digest(dict(trainer.model.state_dict()))}

    ranks = run_ranks(parallel.get("dp", 1) * parallel.get("tp", 1), on)
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    return {"losses": ranks[0]["losses"], "weights": [rank["weights"] for rank in ranks]}


def rounded() -> dict[str, Any]:
    """Train as if rounded: the loss of a batch before and after, and the codes."""
    model = _trainable(hidden=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_hidden=64)
    text = Text(model.config.vocab_size)
    before = _loss(model, text)
    codes = qat.finetune(
        model, "bipolar3-g32", "bipolar8", cast("Any", text), steps=STEPS, seq_len=16, batch=2
    )
    result = {
        f"{name}.{key}": one for name, code in codes.items() for key, one in code.tensors.items()
    }
    return {
        "losses": [before, _loss(model, text)],
        "weights": tensors_digest(dict(model.named_parameters())),
        "state": tensors_digest(result),
    }


def routers() -> dict[str, Any]:
    """Train the routers of big and small feed-forward layers, and nothing else."""
    model = _trainable(architecture={"ffn": {"name": "duo", "router": "linear"}})
    text = Text(model.config.vocab_size)
    before = _loss(model, text)
    train_routers(model, text, budget=0.4, steps=STEPS, seq_len=16, batch=2, lr=3e-2)
    return {
        "losses": [before, _loss(model, text)],
        "weights": tensors_digest(dict(model.named_parameters())),
    }


def _trainable(**changes: Any) -> Transformer:
    return SeededWeights(ModelConfig.model_validate({**MODEL, **changes})).model()


@torch.no_grad()
def _loss(model: Transformer, text: Text) -> str:
    tokens = torch.empty(2, 17, dtype=torch.int64)
    for number, row in enumerate(tokens.numpy()):
        text.read(100 * number, row)
    return (float(model.eval().loss_sum(tokens[:, :-1], tokens[:, 1:])) / 32).hex()
