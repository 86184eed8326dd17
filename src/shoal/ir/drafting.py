"""Training what drafts for a model: the job, its plan and its report."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shoal.core.config import Kind, Value
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.core.traits import check_beside
from shoal.ir.estimate import Interval
from shoal.ir.job_kind import Job
from shoal.ir.plan import ModelPlan, Report
from shoal.ir.shape import ModelShape


class DrafterJob(Job):
    """Train a drafter for a model, which itself stands still.

    What the model makes of the text is computed once and kept: drafters of every kind read it.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        model: Hugging Face directory of the target.
        drafter: the kind of draft model, and how it is trained.
        data: the training text; None lets the target generate it.
        text: what the draft model learns to predict: the text of `data`, or sampled output of the
            target; None: the data if given.
        temperatures: sampling temperatures of the target, in equal shares; 0 is greedy.
        seq_len: tokens per sequence, T.
        batch: sequences of one step.
        tokens: training tokens; rounded up to whole steps.
        read_tokens: tokens of text that are read or generated; training repeats them.
        calibration_prompts: held-out sequences; acceptance rates are measured on the target's
            greedy continuations of them.
        prompt_tokens: tokens of a prompt that the target continues.
        lr_schedule: the learning-rate schedule, a factor of the drafter's ``lr``.
        grad_clip: largest global gradient norm; 0 for no clipping.
        precision: fp32, or bf16 compute with fp32 weights.
        threads: threads that compute; 0 for all cores.
        seed: random seed.
        save_every: steps between saved states.
    """

    job: Literal["drafter"] = "drafter"
    name: str = Field(default="drafter", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: str
    drafter: Annotated[Choice, Kind("drafter")] = Choice(name="medusa")
    data: Annotated[Choice, Kind("corpus")] | None = None
    text: Literal["data", "own"] | None = None
    temperatures: tuple[Annotated[float, Field(ge=0.0, le=10.0)], ...] = (0.0, 0.3, 0.7, 1.0)
    seq_len: PositiveInt = 256
    batch: PositiveInt = 8
    tokens: PositiveInt = 1_000_000
    read_tokens: PositiveInt = 300_000
    calibration_prompts: PositiveInt = 64
    prompt_tokens: PositiveInt = 64
    lr_schedule: Annotated[Choice, Kind("lr_schedule")] = Choice(name="cosine")
    grad_clip: float = Field(default=1.0, ge=0.0)
    precision: Literal["fp32", "bf16"] = "bf16"
    threads: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    save_every: PositiveInt = 200

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.text == "data" and self.data is None:
            raise ConfigError("text = data: there is no data; give data, or text = own")
        if self.data is not None:
            check_beside(
                "data",
                self.data,
                "learns_answers",
                has=False,
                beside="a drafter",
                why="a drafter has a loss on all of its text",
                kind="corpus",
            )
        if not self.temperatures:
            raise ConfigError("temperatures: none is given; give at least one, such as 0.7")
        if self.prompt_tokens >= self.seq_len:
            raise ConfigError(
                f"prompt_tokens = {self.prompt_tokens}: sequences have seq_len = {self.seq_len} "
                "tokens; give fewer, so that the target has something to continue"
            )
        if self.read_tokens < self.batch * self.seq_len:
            raise ConfigError(
                f"read_tokens = {self.read_tokens}: one step takes {self.batch} sequences of "
                f"{self.seq_len}; give at least {self.batch * self.seq_len}"
            )
        return self

    @property
    def own_text(self) -> bool:
        """The target writes the text."""
        return (self.text or ("own" if self.data is None else "data")) == "own"

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return -(-self.tokens // (self.batch * self.seq_len))

    @property
    def sequences(self) -> int:
        """Sequences that are read or written for training."""
        return -(-self.read_tokens // self.seq_len)


class DrafterWork(Value):
    """What the estimate of a drafter reads."""

    shape: ModelShape
    job: DrafterJob


class DrafterPlan(ModelPlan[DrafterJob]):
    """A plan of a drafter's training, for the target's shape.

    Its estimate's ``features`` are what the target makes of the text, on disk and mapped into
    memory; it predicts ``parameters``, those that are trained, and ``drafter_bytes``.
    """

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, raw: Any) -> Any:
        """Files of version 0.1 have what is predicted as fields of their own."""
        old = {"parameters", "drafter_bytes"}
        if not isinstance(raw, dict) or not old & raw.keys():
            return raw
        predicted = {name: Interval.exact(float(raw[name])) for name in old & raw.keys()}
        return {key: value for key, value in raw.items() if key not in old} | {
            "predicted": predicted
        }


class DrafterReport(Report[DrafterPlan]):
    """A report of a drafter's training.

    Its details have ``calibration``: [k][i] = how often guess i of level k is what the target says.
    """

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, raw: Any) -> Any:
        """Reports of version 0.1 have the calibration as a field of its own."""
        if not isinstance(raw, dict) or "calibration" not in raw:
            return raw
        rest = {key: value for key, value in raw.items() if key != "calibration"}
        return rest | {"details": {"calibration": raw["calibration"]}}
