"""Training jobs: what to do, on which text, and how it is split. Serving has a file of its own.

A choice that a room's part makes is a :class:`~shoal.core.parts.Choice` with its
kind; reading a job checks every name and option.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from shoal.core.config import Kind, Value, resolve
from shoal.core.counts import Count
from shoal.core.errors import ConfigError, PlanError, require
from shoal.core.parts import Choice, table
from shoal.core.traits import traits
from shoal.ir.architecture import Architecture
from shoal.ir.job_kind import Job
from shoal.ir.layout import Layout
from shoal.ir.watch import WatchPolicy

Recomputation = Literal["none", "selective", "full", "stage"]
"""What of a forward pass is computed again in the backward pass."""

TILES = 4
"""Row tiles of one rank's share of the tokens; N ranks cut a product in N times as many."""


_T = TypeVar("_T")


def _planned(name: str, value: _T | Literal["auto"]) -> _T:
    if value == "auto":
        raise PlanError(f"parallel.{name} = auto: the planner chooses it; give numbers, or plan")
    return value


class Parallel(Value):
    """How the work is split over ranks: the degrees, whose product is the number of ranks.

    Args:
        dp: data-parallel replicas (or shards, with ``shard``).
        tp: tensor-parallel ranks of a layer.
        pp: pipeline stages; with ``vpp`` chunks of layers on each rank.
        cp: context-parallel ranks, which share every sequence.
        ep: expert-parallel ranks, a divisor of dp * cp * tp.
        etp: tensor-parallel ranks of an expert.
        placer: which expert-parallel ranks hold copies of popular experts in a step.
        fold: experts' groups may take any ranks of a stage, neighbours first; else, as where all
            layers have one grid, only ranks that differ in dp, with etp = 1.
        vpp: pipeline stages of one rank.
        sp: shard norms and residuals over the tp ranks, by token (sequence parallelism).
        vocab: which ranks shard embedding and output layer: tp, pp (in separate passes), or none;
            auto is tp where tp > 1, else none.
        vocab_barriers: with vocab: pp, synchronizations per micro-batch: 1 or 2.
        scatter_gather: each tp rank sends its share of the states between stages, and the receivers
            gather them.
        schedule: the order of the pipeline's passes.
        context: context parallelism: how attention works on a sequence that ranks share (cp > 1).
        overlap: overlap of communication with computation: none; tile splits tensor-parallel linear
            layers into row tiles, which are sent while the next ones are computed; with experts,
            the tokens of one micro-batch are exchanged while another micro-batch is computed.
        expert_chunks: chunks of a layer's tokens for the exchange with experts, forward and
            backward (or one number for both); the exchange of a chunk overlaps with the computation
            of another. Auto lets the planner choose.
        expert_dispatch: all-to-all algorithm of expert parallelism: flat, directly between ranks;
            2dh, first inside the node, then between ranks with the same local index; 1dh, through
            the first rank of every node. 2dh and 1dh need the same number of ranks of an ep group
            on each node.
        gradient_slices: bytes of gradients of later blocks that are all-reduced during a block's
            experts and during the rest of its backward pass, for each block or one pair for all;
            empty: gradients are reduced as buckets fill. Auto lets the planner choose.
        order: axes from slowest to fastest; neighbours differ in the last.
        stages: blocks of each stage, in order; by default chosen so that the slowest stage is as
            fast as possible.
    """

    dp: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    placer: Annotated[Choice, Kind("placer")] = Choice(name="owners")
    fold: bool = True
    vpp: PositiveInt = 1
    sp: bool = False
    vocab: Literal["auto", "none", "tp", "pp"] = "auto"
    vocab_barriers: Literal[1, 2] = 1
    scatter_gather: bool = True
    schedule: Annotated[Choice, Kind("schedule")] = Choice(name="1f1b")
    context: Annotated[Choice, Kind("context")] = Choice(name="zigzag")
    overlap: Literal["none", "tile", "experts"] = "none"
    expert_chunks: tuple[PositiveInt, PositiveInt] | Literal["auto"] = (1, 1)
    expert_dispatch: Literal["flat", "1dh", "2dh"] = "flat"
    gradient_slices: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] | Literal["auto"] = ()
    order: str = "pp-dp-cp-tp"
    stages: tuple[PositiveInt, ...] = ()

    @field_validator("expert_chunks", mode="before")
    @classmethod
    def _both_passes(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, int) else value

    @field_validator("gradient_slices", mode="before")
    @classmethod
    def _all_blocks(cls, value: Any) -> Any:
        """One pair, which serves all blocks."""
        pair = isinstance(value, list | tuple) and all(isinstance(one, int) for one in value)
        return (tuple(value),) if pair and value else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(
            sorted(self.order.split("-")) == ["cp", "dp", "pp", "tp"],
            "parallel.order",
            self.order,
            expected="dp, pp, cp and tp, each once, such as pp-dp-cp-tp",
        )
        inner = self.dp * self.cp * self.tp
        require(
            inner % (self.ep * self.etp) == 0,
            "parallel.ep",
            self.ep,
            expected=f"with etp = {self.etp} a divisor of dp * cp * tp = {inner}",
        )
        require(
            self.fold or (self.dp % self.ep == 0 and self.etp == 1),
            "parallel.fold",
            self.fold,
            expected=f"true, or ep = {self.ep} that divides dp = {self.dp}, with etp = 1",
        )
        require(
            self.vocab != "tp" or self.tp > 1,
            "parallel.vocab",
            self.vocab,
            expected="none, auto or pp where tp = 1",
        )
        require(
            len(self.stages) in (0, self.pp * self.vpp),
            "parallel.stages",
            ", ".join(map(str, self.stages)),
            expected=f"the blocks of pp * vpp = {self.pp * self.vpp} stages, or nothing",
        )
        return self

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def chunks(self) -> tuple[int, int]:
        """``expert_chunks``, forward and backward, of a planned job."""
        return _planned("expert_chunks", self.expert_chunks)

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """``gradient_slices`` of a planned job."""
        return _planned("gradient_slices", self.gradient_slices)

    @property
    def vocab_split(self) -> Literal["none", "tp", "pp"]:
        """``vocab`` with auto resolved; one pipeline rank has nothing to share."""
        if self.vocab == "auto":
            return "tp" if self.tp > 1 else "none"
        return "none" if self.vocab == "pp" and self.pp == 1 else self.vocab

    @property
    def folded(self) -> bool:
        """Experts have a grid of their own; else the tp ranks share the width of each."""
        return self.ep * self.etp > 1

    def attention(self) -> Layout:
        """The grid of attention and of everything dense."""
        return Layout(tuple((axis, getattr(self, axis)) for axis in self.order.split("-")))

    def experts(self) -> Layout:
        """The grid of the experts over the same ranks.

        Ranks that hold the same experts differ in ``edp`` and, without ``fold``, in ``inner``,
        which is cp x tp.
        """
        inner = 1 if self.fold else self.cp * self.tp
        edp = self.dp * self.cp * self.tp // (self.ep * self.etp * inner)
        axes = {"pp": self.pp, "edp": edp, "ep": self.ep, "etp": self.etp, "inner": inner}
        return Layout(tuple(axes.items()))

    @property
    def edp(self) -> int:
        """Ranks that hold the same slices of the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)


class LayerGroup(Value):
    """Consecutive blocks that run in one way; what is not given is as the job says.

    Embedding, output layer and what stages hand on are as the job says, whatever the blocks do.

    Args:
        blocks: how many blocks.
        recompute: none, or full: only the blocks' inputs are kept.
        dp: data-parallel replicas of these blocks.
        tp: tensor-parallel ranks of these blocks.
        cp: context-parallel ranks of these blocks; dp * tp * cp is that of the job.
        shard: what is sharded over their data-parallel ranks.
    """

    blocks: PositiveInt
    recompute: Literal["none", "full"] | None = None
    dp: PositiveInt | None = None
    tp: PositiveInt | None = None
    cp: PositiveInt | None = None
    shard: Annotated[Choice, Kind("shard")] | None = None


class Evaluation(Value):
    """When and how much to evaluate.

    Args:
        every: steps between evaluations; 0 for only at the end.
        tokens: held-out tokens of one evaluation while training.
        final: evaluate on every held-out document at the end, context reset per document.
        sample_tokens: tokens of the text sample written with each evaluation; 0 for none.
    """

    every: NonNegativeInt = 100
    tokens: PositiveInt = 16384
    final: bool = True
    sample_tokens: NonNegativeInt = 64


class CheckpointLevel(Value):
    """A farther place that checkpoints are sent to behind training, given as text or with options.

    Args:
        path: where, such as s3://bucket/run; usually slower and safer than the first place.
        every: every so many-th checkpoint is sent, and the last one of the run.
        keep: newest checkpoints kept there.
        tries: how often a checkpoint is tried before it is given up.
    """

    path: str = Field(min_length=1)
    every: PositiveInt = 1
    keep: PositiveInt = 3
    tries: PositiveInt = 5

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class CheckpointPolicy(Value):
    """When to save and what to keep.

    Args:
        every: steps between checkpoints; 0 for only at the end; auto for the interval with the
            least lost time, from the measured failures and stalls.
        keep: newest checkpoints kept; the last verified one is kept in any case.
        path: directory or address such as s3://bucket/run; by default the run's directory.
        levels: further locations to which complete checkpoints are copied, nearest first; a resumed
            run loads the newest one from the nearest location that has it complete.
        mode: how saving overlaps with training.
        memory: in-memory checkpoints, in processes that outlive the ranks; None: checkpoints on
            disk only.
        dump: with each checkpoint, every rank also writes its shards unchanged in the files of
            another system, to ``dumps`` in the run's directory.
    """

    every: NonNegativeInt | Literal["auto"] = 100
    keep: PositiveInt = 3
    path: str | None = Field(default=None, min_length=1)
    levels: tuple[CheckpointLevel, ...] = ()
    mode: Annotated[Choice, Kind("save_mode")] = Choice(name="blocking")
    memory: Annotated[Choice, Kind("memory_code")] | None = None
    dump: Literal["deepspeed"] | None = None

    @model_validator(mode="after")
    def _apart(self) -> CheckpointPolicy:
        places = [*([self.path] if self.path else []), *(level.path for level in self.levels)]
        for number, place in enumerate(places):
            if place.rstrip("/") in [other.rstrip("/") for other in places[:number]]:
                raise ValueError(f"levels: {place} is given twice; give each level its own place")
        return self


class Replan(Value):
    """When a run changes to another plan while it trains.

    Args:
        enabled: measure every step, and change to a better plan.
        gain: minimum predicted gain of another plan, as a fraction of the step time.
        patience: number of consecutive steps with that gain.
        smoothing: weight of the newest step in the moving averages.
        probe_every: maximum number of steps between two measurements of the links.
    """

    enabled: bool = False
    gain: float = Field(default=0.1, gt=0.0, lt=1.0)
    patience: PositiveInt = 20
    smoothing: float = Field(default=0.2, gt=0.0, le=1.0)
    probe_every: PositiveInt = 50


class TrainJob(Job):
    """Train a decoder-only language model.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        model: a model of the zoo or of the shipped shapes, a Hugging Face
            directory (training continues from its weights), or a shape file.
        architecture: how the model is to differ from what ``model`` names; its weights are then
            converted.
        data: the corpus.
        tokenizer: path of a ``tokenizer.json``, or ``bpe`` to train one on the corpus.
        packing: how documents fill sequences; the default for chats is ``best_fit``.
        learn_after: text of one token; a sequence has a loss only after its first occurrence, and a
            masked-diffusion model masks only later tokens. None: a loss on every token.
        seq_len: tokens per sequence, T.
        global_batch: sequences of one step over all ranks, B.
        microbatch: sequences of one forward pass on one rank; None lets the planner
            choose.
        batching: how sequences of a step are assigned to data-parallel ranks, several ranks sharing
            a long one; None gives every rank the same number of rows.
        steps: optimizer steps; or give ``tokens`` or ``minutes``.
        tokens: training tokens; rounded up to whole steps.
        minutes: wall time, by the predicted step time; rounded to whole steps.
        optimizer: the update rule.
        lr_schedule: the learning-rate schedule, a factor of the optimizer's ``lr``.
        grad_clip: largest global gradient norm; 0 for no clipping.
        precision: fp32, or bf16 compute with fp32 weights and optimizer state; fp8 and mxfp8 are
            bf16 with such ``products``.
        products: type of the blocks' products: same as the precision, or fp8 or mxfp8 (scaled by
            tensor, or by 32 numbers) where the engine and the device have it.
        engine: the program that runs the steps. Plans for accelerators are priced for it; Shoal's
            own runtime runs its own, and ``--emit`` writes launch files for the others.
        objective: what a plan minimizes: time, cost (money) or energy.
        parallel: degrees of parallelism.
        shard: what is sharded over the data-parallel ranks.
        sync: how often data-parallel workers synchronize: every step, or once per round of steps.
        offload: which state is kept in host memory or on disk and fetched when needed; replaces
            ``shard``.
        activation: where activations saved for the backward pass are stored.
        recompute: none; selective (of each block its input and the outputs of products and
            attention are kept); full (only each block's input is kept); or stage (only the input of
            a pipeline stage is kept).
        layers: groups of blocks with their own parallelism, from first to last; their block counts
            add up to the model's.
        dropout: dropout probability of the outputs of attention and feed-forward.
        compile: compile the model with ``torch.compile``.
        kernel: operator -> backend that must compute it, of rms_norm, rope and swiglu; dispatch
            selects the fastest for others, and the plan stores the selection. For mixtures also
            grouped_linear, selected in every step from token counts by default.
        threads: threads of one rank; 0 shares the cores among the ranks of a host.
        seed: random seed.
        finetune: fine-tuning method; None trains all weights.
        base: storage of the frozen weights in fine-tuning: whole on every rank (own), matrices
            sharded over the data-parallel ranks and gathered for each product (divided), or shared
            with all jobs of this host on the same directory (shared).
        evaluation: when and how much to evaluate.
        checkpoint: when to save and what to keep.
        watch: what each rank records about itself.
        replan: whether the run changes its plan when measurements drift.
        timeout_s: time without progress after which a rank is reported and ended, s.
        log_every: steps between lines in the event file.
        sinks: further destinations of events, besides the run's ``events.jsonl``.
    """

    job: Literal["train"] = "train"
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: str = "shoal-4m"
    architecture: Architecture = Architecture()
    data: Annotated[Choice, Kind("corpus")] = Choice(name="stdlib")
    tokenizer: str = "bpe"
    packing: Annotated[Choice, Kind("packing")] = Choice(name="stream")
    learn_after: str | None = None
    seq_len: PositiveInt = 256
    global_batch: PositiveInt = 16
    microbatch: PositiveInt | None = None
    batching: Annotated[Choice, Kind("assigner")] | None = None
    steps: PositiveInt | None = None
    tokens: Count | None = None
    minutes: PositiveFloat | None = None
    optimizer: Annotated[Choice, Kind("optimizer")] = Choice(name="adamw")
    lr_schedule: Annotated[Choice, Kind("lr_schedule")] = Choice(name="cosine")
    grad_clip: NonNegativeFloat = 1.0
    precision: Literal["fp32", "bf16"] = "bf16"
    products: Literal["same", "fp8", "mxfp8"] = "same"
    engine: Literal["shoal", "megatron", "nemo", "torchtitan", "deepspeed", "accelerate"] = "shoal"
    objective: Literal["time", "cost", "energy"] = "time"
    parallel: Parallel = Parallel()
    shard: Annotated[Choice, Kind("shard")] = Choice(name="replicated")
    sync: Annotated[Choice, Kind("sync")] = Choice(name="every_step")
    offload: Annotated[Choice, Kind("offload")] | None = None
    activation: Annotated[Choice, Kind("activation")] = Choice(name="keep")
    recompute: Recomputation = "none"
    layers: tuple[LayerGroup, ...] = ()
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    compile: bool = False
    kernel: dict[str, str] = {}
    threads: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    finetune: Annotated[Choice, Kind("peft")] | None = None
    base: Literal["own", "divided", "shared"] = "own"
    evaluation: Evaluation = Evaluation()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    watch: WatchPolicy = WatchPolicy()
    replan: Replan = Replan()
    timeout_s: PositiveFloat = 120.0
    log_every: PositiveInt = 1
    sinks: tuple[Annotated[Choice, Kind("sink")], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, given: Any) -> Any:
        """What one setting says of another that is not given.

        ``precision: fp8`` is bf16 with such products. Answers are learned behind their whole
        prompts, unless a packing is given.
        """
        if not isinstance(given, Mapping):
            return given
        more: dict[str, Any] = {}
        if given.get("precision") in ("fp8", "mxfp8"):
            more = {"products": given["precision"], **given, "precision": "bf16"}
        data = given.get("data")
        name = data.get("name") if isinstance(data, Mapping) else getattr(data, "name", data)
        corpus = name if isinstance(name, str) and name in table("corpus") else None
        if corpus and "packing" not in given and "learns_answers" in traits("corpus", corpus):
            more = {**(more or given), "packing": "best_fit"}
        return more or given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [key for key in ("steps", "tokens", "minutes") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given; give one of them")
        # Where nobody has set the batch, a planner does, for the machine.
        known = "global_batch" in self.model_fields_set
        if known and self.global_batch % self.parallel.dp:
            raise ConfigError(
                f"parallel.dp = {self.parallel.dp}: {self.global_batch} sequences a step cannot be "
                f"split evenly over {self.parallel.dp} ranks; make global_batch a multiple of it, "
                f"or use at most {self.global_batch} ranks"
            )
        share = self.global_batch // self.parallel.dp
        if known and self.microbatch is not None and share % self.microbatch:
            raise ConfigError(
                f"microbatch = {self.microbatch}: each of {self.parallel.dp} ranks has {share} "
                f"sequences a step; give a divisor of {share}"
            )
        if self.learn_after is not None and "one_document" not in traits("packing", self.packing):
            raise ConfigError(
                f"packing = {self.packing.name} with learn_after: it is looked for once in a "
                "sequence, so give packing padded, whose sequences are one document each"
            )
        if self.layers and self.recompute in ("stage", "selective"):
            raise ConfigError(
                f"recompute = '{self.recompute}' with layers: groups of blocks are computed again "
                "as a whole or not at all; give none or full, or leave layers out"
            )
        inner = self.parallel.dp * self.parallel.tp * self.parallel.cp
        for number, group in enumerate(self.layers):
            dp, tp, cp = self.degrees(group)
            if dp * tp * cp != inner:
                raise ConfigError(
                    f"layers.{number}: dp * tp * cp = {dp} * {tp} * {cp} = {dp * tp * cp}; a stage "
                    f"of the job has {inner} ranks, so give degrees whose product is {inner}"
                )
        return self

    @classmethod
    def described(cls, model: str, values: Mapping[str, Any]) -> Self:
        """The job in a YAML file, or of a model by its name; values by dotted path go over it."""
        file = Path(model) if model.endswith((".yaml", ".yml")) else None
        flags = {"model": None if file else model, **values}
        return resolve(cls, file=file, flags=flags).value

    def degrees(self, group: LayerGroup) -> tuple[int, int, int]:
        """dp, tp and cp of a group of blocks."""
        split = self.parallel
        return group.dp or split.dp, group.tp or split.tp, group.cp or split.cp

    @property
    def layers_apart(self) -> bool:
        """Some blocks have degrees or a sharding that are not the job's."""
        p = self.parallel
        return any(
            self.degrees(group) != (p.dp, p.tp, p.cp) or group.shard not in (None, self.shard)
            for group in self.layers
        )

    @property
    def sends_again(self) -> bool:
        """The backward pass repeats what the blocks' forward pass sends.

        Shoal's own runtime calls a whole block again and keeps products; other engines call again
        what they do not keep.
        """
        return self.recompute in ("full", "stage") or (
            self.recompute == "selective" and self.engine == "shoal"
        )

    def recomputed(self, num_layers: int) -> frozenset[int]:
        """Blocks of which only the input is kept for the backward pass."""
        if not self.layers:
            return frozenset(range(num_layers if self.recompute == "full" else 0))
        numbers: set[int] = set()
        first = 0
        for group in self.layers:
            if (group.recompute or self.recompute) == "full":
                numbers.update(range(first, first + group.blocks))
            first += group.blocks
        return frozenset(numbers)
