"""Hooks of a step: their order, what is refused, and what one from outside sees."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.same_as_one import SeededWeights  # noqa: E402
from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.errors import CheckpointError, ConfigError  # noqa: E402
from shoal.core.hooks import Hook, Hooks  # noqa: E402
from shoal.ir import TrainJob  # noqa: E402
from shoal.ir.hooks import ORDER, StepHook, TensorSource, TrainStep  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.train.hooks import RUN_ORDER, RunHook  # noqa: E402
from shoal.train.loop import RankTrainer  # noqa: E402

MODEL: dict[str, Any] = {
    "name": "small", "family": "llama", "vocab_size": 53, "hidden": 16, "num_layers": 2,
    "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden": 24, "max_position": 32,
}  # fmt: skip
MOMENTS = [
    "before_step", "passes step", "passes train", "after_backward", "finish", "after_reduce",
    "before_update", "changing", "after_update", "published",
]  # fmt: skip


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


def train(steps: int = 1, *hooks: StepHook, model: Any = None, **job: Any) -> list[list[str]]:
    """Make steps of a job; the kinds of hooks of each rank."""
    result = TrainJob.model_validate(
        {
            "model": "shoal-0.3m", "seq_len": 16, "global_batch": 4, "microbatch": 1,
            "precision": "fp32", "steps": steps, **job,
        }
    )  # fmt: skip
    config = ModelConfig.model_validate({**MODEL, **(model or {})})

    def on(comm: Any) -> list[str]:
        comm.beat = None
        trainer = RankTrainer(result, steps, SeededWeights(config), Tokens(), comm)  # type: ignore[arg-type]
        with contextlib.closing(trainer):
            for hook in hooks:
                trainer.hooks.add(hook)
            for step in range(steps):
                trainer.step(step)
            return [hook.kind for hook in trainer.hooks]

    return run_ranks(result.parallel.world, on)


class Sees(StepHook):
    """Notes every moment, and keeps a number."""

    kind = "mine"
    after = "finite"
    volatile = True

    def __init__(self, log: list[str] | None = None) -> None:
        self.log: list[str] = [] if log is None else log
        self.number = torch.zeros(1)

    @contextlib.contextmanager
    def passes(self, what: str, *inputs: Any) -> Iterator[None]:
        self.log.append(f"passes {what}")
        yield
        self.log.append(f"end of {what}")

    def before_step(self, step: TrainStep) -> None:
        self.log.append("before_step")

    def after_backward(self, step: TrainStep) -> None:
        assert step.own is not None
        self.log.append("after_backward")

    def finish(self) -> None:
        self.log.append("finish")

    def after_reduce(self, step: TrainStep) -> None:
        self.log.append("after_reduce")

    def before_update(self, step: TrainStep) -> None:
        assert step.loss > 0 and float(step.norm) > 0
        self.log.append("before_update")

    def changing(self, names: Collection[str] | None) -> None:
        if self.log[-1] != "changing":
            self.log.append("changing")

    def after_update(self, step: TrainStep) -> None:
        self.log.append("after_update")

    def published(self, step: TrainStep) -> None:
        self.number += 1
        self.log.append("published")

    def state(self) -> dict[str, Any]:
        return {"mine.number": self.number}

    def load(self, saved: TensorSource) -> None:
        self.number.copy_(saved.tensor("mine.number"))

    def events(self) -> dict[str, dict[str, Any]]:
        return {"step": {"mine": int(self.number)}, "counted": {"number": int(self.number)}}

    def close(self) -> None:
        self.log.append("close")


MIXTURE = {"family": "mixtral", "num_experts": 4, "top_k": 2}
COPIES = {"dp": 2, "ep": 2, "placer": {"name": "fssdp", "resharding_every": 1}}


@pytest.mark.parametrize(
    ("job", "model", "kinds"),
    [
        ({}, {}, ["watch", "finite"]),
        ({"finetune": "lora"}, {}, ["watch", "finetune", "finite"]),
        ({"parallel": {"dp": 2}, "sync": "local_sgd"}, {}, ["watch", "finite", "outer"]),
        ({"parallel": COPIES}, MIXTURE, ["watch", "routers", "copies", "finite", "owners"]),
        (
            {"parallel": {"dp": 2}, "finetune": "lora"},
            MIXTURE,
            ["watch", "finetune", "routers", "finite"],
        ),
    ],
)
def test_hooks_of_a_job_are_in_the_one_order(
    job: dict[str, Any], model: dict[str, Any], kinds: list[str]
) -> None:
    for result in train(model=model, **job):
        assert result == kinds
    assert [kind for kind in ORDER if kind in kinds] == kinds


def test_every_moment_calls_the_hooks_in_order_whatever_order_they_came_in() -> None:
    log: list[str] = []

    class Named(Sees):
        after = ""

        def __init__(self, kind: str) -> None:
            super().__init__(log)
            self.kind = kind  # type: ignore[misc]

        def before_update(self, step: TrainStep) -> None:
            log.append(self.kind)

        def close(self) -> None:
            log.append(f"close {self.kind}")

    train(1, Named("owners"), Named("saves"), Named("activation"))
    assert [word for word in log if word in ORDER] == ["activation", "saves", "owners"]
    assert log[-3:] == ["close owners", "close saves", "close activation"]


def test_a_hook_from_outside_sees_every_moment_once_and_in_order() -> None:
    hook = Sees()
    (kinds,) = train(2, hook)
    assert kinds == ["watch", "finite", "mine"]
    assert hook.log[-1] == "close"
    seen = [word for word in hook.log[:-1] if not word.startswith("end of")]
    once = [word for at, word in enumerate(seen) if word not in seen[:at]]
    assert once == MOMENTS
    assert seen.count("before_step") == seen.count("published") == 2


def test_what_hooks_keep_is_saved_loaded_and_reported() -> None:
    job = TrainJob(model="shoal-0.3m", seq_len=16, global_batch=2, precision="fp32", steps=3)
    config = ModelConfig.model_validate(MODEL)

    def on(comm: Any) -> None:
        comm.beat = None
        given = (job, 3, SeededWeights(config), Tokens(), comm)
        first, second = RankTrainer(*given), RankTrainer(*given)  # type: ignore[arg-type]
        hook, other = Sees(), Sees()
        first.hooks.add(hook)
        first.step(0)
        assert first.events()["step"]["mine"] == 1
        assert first.events()["counted"] == {"number": 1}
        pieces = first.pieces()
        assert pieces["mine.number"][0].volatile
        second.hooks.add(other)

        class Held:
            names = pieces.keys

            def shape(self, name: str) -> tuple[int, ...]:
                return pieces[name][0].global_shape

            def tensor(self, name: str, offset: Any = None, shape: Any = None) -> Any:
                return pieces[name][0].tensor

        second.load(Held())
        assert other.number.item() == 1
        first.close()
        second.close()

    run_ranks(1, on)


class Nameless(StepHook):
    kind = "mine"


class Lost(StepHook):
    kind: ClassVar[str] = "mine"
    after = "yours"


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        (Sees(), "hook Sees: kind = 'mine': expected a kind of which there is no hook yet"),
        (Nameless(), "hook Nameless: kind mine is not in the order, and after = ''"),
        (Lost(), "hook Lost: kind mine is not in the order, and after = 'yours': expected one of"),
    ],
)
def test_hooks_that_have_no_place_are_refused(hook: StepHook, match: str) -> None:
    hooks: Hooks[StepHook] = Hooks(ORDER)
    if isinstance(hook, Sees):
        hooks.add(Sees())
    with pytest.raises(ConfigError, match=match):
        hooks.add(hook)


def test_the_orders_name_a_kind_once() -> None:
    for order in (ORDER, RUN_ORDER):
        assert len(set(order)) == len(order)
    hooks: Hooks[Hook] = Hooks(RUN_ORDER)
    for kind in reversed(RUN_ORDER):
        hooks.add(type("Made", (RunHook,), {"kind": kind})())
    assert [hook.kind for hook in hooks] == list(RUN_ORDER)


def test_a_state_that_is_missing_is_an_error_of_the_checkpoint() -> None:
    job = TrainJob.model_validate(
        {
            "model": "shoal-0.3m", "seq_len": 16, "global_batch": 4, "precision": "fp32",
            "steps": 3, "parallel": {"dp": 2}, "sync": {"name": "diloco", "tau": 2},
        }
    )  # fmt: skip

    class Nothing:
        def names(self) -> list[str]:
            return []

    def on(comm: Any) -> None:
        comm.beat = None
        weights = SeededWeights(ModelConfig.model_validate(MODEL))
        trainer = RankTrainer(job, 3, weights, Tokens(), comm)  # type: ignore[arg-type]
        with contextlib.closing(trainer), pytest.raises(CheckpointError, match=r"outer\.place0"):
            trainer.hooks["outer"].load(Nothing())  # type: ignore[arg-type]

    run_ranks(2, on)
