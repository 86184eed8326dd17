"""Where a frozen base lies changes no bit: in the type of the products, or divided over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.same_as_one import SeededWeights  # noqa: E402
from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.core.traits import traits  # noqa: E402
from shoal.cost.training.step import estimate  # noqa: E402
from shoal.ir import Machine, TrainJob, Work  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.train.build import StoredWeights  # noqa: E402
from shoal.train.loop import RankTrainer  # noqa: E402
from shoal.train.peft.job import FineTuned  # noqa: E402
from shoal.train.peft.run import frozen  # noqa: E402

MODEL: dict[str, Any] = {
    "name": "small", "family": "llama", "vocab_size": 53, "hidden": 16, "num_layers": 3,
    "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_hidden": 24, "max_position": 32,
}  # fmt: skip
# The second begins from what the first has changed.
STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "adapter_drop": {"drop": 1},
    "offsite": {"first": 1, "last": 1, "keep": 0.5},
    "streams": {"num": 2, "prefix": 2},
    "adalora": {"r": 4, "target": 2},
}


class Tokens:
    """One endless document."""

    vocab_size, end_of_text, num_documents, learned = 53, 0, 1, None

    @property
    def train(self) -> Tokens:
        return self

    def __len__(self) -> int:
        return 4000

    def read(self, start: int, out_N: np.ndarray) -> None:
        """Tokens that follow from their places."""
        out_N[:] = 1 + (start + np.arange(len(out_N))) ** 2 % 51


class Rounded(SeededWeights):
    """Weights that are exact in bf16."""

    def whole(self, name: str) -> Any:
        """One parameter."""
        return super().whole(name).bfloat16().to(self._dtype)


class Trained(NamedTuple):
    """What a rank has of its steps."""

    losses: list[str]
    adapter: dict[str, Any]
    arenas: dict[str, int]
    sent: float
    base: str


def train(
    weights: type[SeededWeights] = SeededWeights, model: dict[str, Any] | None = None, **job: Any
) -> list[Trained]:
    """Some steps of a job, on each rank."""
    made = TrainJob.model_validate(
        {
            "model": "shoal-0.3m", "seq_len": 16, "global_batch": 4, "microbatch": 1,
            "steps": STEPS,
            "finetune": "lora", "optimizer": {"name": "adamw", "lr": 1e-2}, **job,
        }
    )  # fmt: skip
    config = ModelConfig.model_validate({**MODEL, **(model or {})})

    def on(comm: Any) -> Trained:
        comm.beat = None
        trainer = RankTrainer(made, STEPS, weights(config), Tokens(), comm)  # type: ignore[arg-type]
        arenas: dict[str, int] = {}
        with contextlib.closing(trainer):
            losses = []
            for step in range(STEPS):
                losses.append(trainer.step(step).loss.hex())
                arenas |= trainer.events().get("arenas", {})
            totals = comm.meter.totals().items()
            sent = sum(size for key, size in totals if "wire_bytes" in key and "tag=base" in key)
            pieces = trainer.pieces()
            state = {name: piece[0].tensor.clone() for name, piece in pieces.items() if piece}
            hook = next(hook for hook in trainer.hooks if hook.kind == "finetune")
            return Trained(losses, state, arenas, sent, hook.identity()["base"])

    return run_ranks(made.parallel.world, on)


def same(one: list[Trained], other: list[Trained]) -> None:
    """Bit for bit the same losses and adapters, of the same base."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine.losses == theirs.losses and mine.base == theirs.base
        assert mine.adapter.keys() == theirs.adapter.keys()
        assert all(torch.equal(x, theirs.adapter[name]) for name, x in mine.adapter.items())


@contextlib.contextmanager
def in_fp32() -> Iterator[None]:
    """The base stays as it was read."""
    with mock.patch.object(frozen, "narrow", lambda handle, *, exact: None):
        yield


def each(*without: str) -> list[Any]:
    """Methods that state none of these traits; those that work as another one does are slow."""
    plain = ("lora", "qlora", "fishmask", "mezo", "prompt")
    return [
        pytest.param(name, marks=() if name in plain else pytest.mark.slow)
        for name in table("peft")
        if not traits("peft", name) & {*without}
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", each())
def test_a_base_in_bf16_changes_no_bit(method: str) -> None:
    finetune = {"name": method, **OPTIONS.get(method, {})}
    for weights in (SeededWeights, Rounded):
        with in_fp32():
            plain = train(weights, finetune=finetune)
        narrow = train(weights, finetune=finetune)
        same(narrow, plain)
        part = table("peft").build(finetune)
        moves = getattr(part, "forward_only", False)
        stays = weights is SeededWeights and "reads_base" in traits("peft", method)
        before, after = plain[0].arenas["base"], narrow[0].arenas["base"]
        assert after == before if moves or stays else after < before


def test_experts_in_bf16_change_no_bit() -> None:
    model = {"family": "mixtral", "num_experts": 4, "top_k": 2}
    with in_fp32():
        plain = train(model=model)
    narrow = train(model=model)
    same(narrow, plain)
    assert narrow[0].arenas["base"] < 0.55 * plain[0].arenas["base"]


@pytest.mark.slow
@pytest.mark.parametrize("method", each("reads_base", "replaces_base"))
def test_a_divided_base_is_a_whole_one(method: str) -> None:
    alike: dict[str, Any] = {
        "finetune": {"name": method, **OPTIONS.get(method, {})},
        "parallel": {"dp": 2},
    }
    ways: list[dict[str, Any]] = [{"precision": "fp32"}, {"precision": "bf16"}]
    if "own_blocks" not in traits("peft", method):
        ways.append({"precision": "bf16", "recompute": "full"})
        ways.append({"precision": "bf16", "recompute": "selective"})
    for way in ways:
        same(train(**alike, **way, base="divided"), train(**alike, **way))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_those_of_the_estimate(precision: str, recompute: str, machine: Machine) -> None:
    changes: dict[str, Any] = {
        "precision": precision, "recompute": recompute, "parallel": {"dp": 2},
        "finetune": {"name": "lora", "r": 4, "targets": "*_proj"},
    }  # fmt: skip
    whole, divided = train(**changes)[0], train(**changes, base="divided")[0]
    config = ModelConfig.model_validate(MODEL)
    job = TrainJob(seq_len=16, global_batch=4, microbatch=1, steps=STEPS, **changes)
    own, parted = (
        estimate(Work(shape=config.shape(), job=job.model_copy(update={"base": base})), machine)
        for base in ("own", "divided")
    )
    width = 2 if precision == "bf16" else 4
    matrices = width * (whole.arenas["base"] - divided.arenas["base"]) * 2 // width
    assert matrices == pytest.approx(2 * (own.memory_bytes["base"] - parted.memory_bytes["base"]))
    assert whole.arenas["base"] == own.memory_bytes["base"]
    predicted = parted.wire_bytes["loopback"] - own.wire_bytes["loopback"]
    # The input of the first block has no gradient, so its first matrix is not gathered for it.
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    first = 2 * width * rows * config.hidden / 2
    assert divided.sent / STEPS == predicted - first and whole.sent == 0


def test_a_directory_is_divided_while_it_is_read(tmp_path: Any) -> None:
    config = ModelConfig.model_validate({**MODEL, "attention_bias": True, "family": "qwen2"})
    huggingface.write(tmp_path / "model", SeededWeights(config).model())
    job = TrainJob(
        model=str(tmp_path / "model"), finetune="lora", base="divided", precision="fp32",
        global_batch=4, parallel={"dp": 2},
    )  # fmt: skip
    weights = StoredWeights(tmp_path / "model")
    whole: Any = weights.model()
    alone = FineTuned(weights, job)
    alone.model()
    linears = [m for m in whole.blocks.modules() if isinstance(m, torch.nn.Linear)]

    def read(comm: Any) -> tuple[str, int]:
        made = FineTuned(weights, job, comm)
        model: Any = made.model()
        linear = model.blocks[1].attention.qkv_proj.base
        plain = whole.blocks[1].attention.qkv_proj
        assert torch.equal(linear.dense(), plain.weight) and torch.equal(linear.bias, plain.bias)
        parts = [m for m in model.blocks.modules() if isinstance(m, frozen.DividedLinear)]
        return made.base, sum(part.weight.numel() for part in parts)

    divide: Any = frozen.divide

    def divided(model: Any, *args: Any, **low: bool) -> None:
        divide(model, *args, **low)
        linears = [m for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)]
        assert all(m.weight.is_meta for m in linears), "none is whole behind the one that is read"

    with mock.patch.object(frozen, "divide", divided):
        ranks = run_ranks(2, read)
    assert {base for base, _ in ranks} == {alone.base}
    assert [size for _, size in ranks] == [sum(m.weight.numel() for m in linears) / 2] * 2
