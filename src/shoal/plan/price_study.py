"""``shoal explain price``: from the numbers of a machine to the seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from shoal.core.config import resolve as read_job
from shoal.core.errors import ConfigError, require
from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.cost.calibration import calibrated
from shoal.cost.gpu.device import CALIBRATED, gpu_of
from shoal.cost.kernels.own import own_table
from shoal.cost.kernels.recorded import KernelCall
from shoal.cost.kernels.tables import shipped
from shoal.cost.kernels.times import kernel_times, table_of
from shoal.cost.price.ops import OpGroup
from shoal.cost.price.shares import microbatch_of, passes_of
from shoal.cost.shapes import resolve
from shoal.cost.step_cost.accelerated import AcceleratedStepCost
from shoal.cost.step_cost.roofline import Terms
from shoal.cost.training.step import Pricer
from shoal.ir import Explanation, Machine, Progress, ServeJob, TrainJob, TrainPlan, Work
from shoal.machine.described import load
from shoal.plan.saved import read_plan
from shoal.plan.serving.simulation import sharded_costs
from shoal.plan.strategy import PLANNERS

# What the calibrated constants say, and what set them.
_CONSTANTS = {
    "gemm": "fraction of the probed rate that matrix products reach in a step",
    "gemm_low": "the same for eight- and four-bit products",
    "stream": "fraction of the memory bandwidth that elementwise operators reach",
    "wire": "fraction of the link bandwidth that collectives reach",
    "host": "host seconds per kernel launch, if launches are the bottleneck",
}

_SEQ_LEN = 4096
_NEAREST = ", the nearest device, scaled by the rooflines"


@part
class PriceStudy:
    """Show the derivation of a price, from the machine's numbers through every kernel to the step.

    For a training plan: its rates, the operators of a micro-batch, and the step. For serving on
    accelerators: the kernels of a prefill and of a decoding step.

    **Examples**

        shoal explain price Llama-3-8B -m 8xH100

        shoal explain price plan.yaml

        shoal explain price Llama-3-70B -m 4xH100 --job serve --tp 4 --engine vllm --weights fp8

    Args:
        model: name or directory of a model, or the file of a plan of training.
        job: train or serve.
        engine: the engine that runs it; that of the kind of job if not given.
        seq_len: tokens of a sequence, or of a prompt; 4096 if not given, or fewer where the model
            has no more positions.
        global_batch: with train: sequences of a step.
        batch: with serve: sequences that decode.
        tp: with serve: devices that share every layer.
        weights: with serve: their format, such as fp8.
    """

    subject: ClassVar = "model"
    machine: ClassVar = ""  # a plan has its own

    model: str
    job: Literal["train", "serve"] = "train"
    engine: str = "shoal"
    seq_len: Annotated[int, Ge(1)] | None = None
    global_batch: Annotated[int, Ge(1)] = 128
    batch: Annotated[int, Ge(1)] = 32
    tp: Annotated[int, Ge(1)] = 1
    weights: str = "plain"

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """The chain of one step; without a machine, on this one."""
        if self.model.endswith((".yaml", ".yml")) and self.job == "train":
            plan = read_plan(Path(self.model))
            if not isinstance(plan, TrainPlan):
                raise ConfigError(
                    f"{self.model}: a plan of the job {plan.job.job}; give one of shoal plan train"
                )
            return explain_plan(plan)
        here = calibrated(load("local") if machine is None else machine)[0]
        return self._served(here) if self.job == "serve" else explain_plan(self._plan(here))

    @property
    def _length(self) -> int:
        most = resolve(self.model).max_position
        length = self.seq_len or min(_SEQ_LEN, most)
        expected = f"at most {most}, the longest sequence of {self.model}"
        require(length <= most, "seq_len", length, expected=expected)
        return length

    def _plan(self, machine: Machine) -> TrainPlan:
        given: dict[str, Any] = {"model": self.model, "engine": self.engine}
        given |= {"seq_len": self._length, "global_batch": self.global_batch}
        job = read_job(TrainJob, flags=given, environment={}).value
        best: TrainPlan = PLANNERS.build({"name": "search", "keep": 1}).plan(job, machine)[0]
        return best

    def _served(self, machine: Machine) -> Explanation:
        given = {"model": self.model, "engine": self.engine, "weights": self.weights}
        job = read_job(ServeJob, flags=given, environment={}).value
        cost = sharded_costs(job, machine)(self.tp, 1)
        require(
            isinstance(cost, AcceleratedStepCost),
            "--machine",
            machine.name,
            expected="accelerators: a CPU's step is one roofline; see shoal plan serve",
        )
        assert isinstance(cost, AcceleratedStepCost)
        shape, length = resolve(self.model), self._length
        chain = [
            (f"a prompt of {length} tokens", [(0, length)]),
            (
                f"a step of {self.batch} sequences with {length} tokens each",
                [(length, 1)] * self.batch,
            ),
        ]
        blocks: list[Table | str] = [_rates(machine, constants=False)]
        for what, chunks in chain:
            calls, terms = cost.kernels(chunks)
            blocks += [_kernels(f"{shape.name}, {what}: kernels", calls), _terms(what, terms)]
        table = shipped(table_of(gpu_of(machine).name))
        own, wrong = own_table(machine.device.name)
        far = "" if kernel_times(gpu_of(machine)).measured else _NEAREST
        rest = f"; those of `own` on {own.device} ({own.source})" if own else ""
        blocks += [wrong] if wrong else []
        blocks.append(
            f"Kernels were measured on {table.device} ({table.source}){far}{rest}. What "
            f"{self.engine} itself adds is fitted to measured runs; see "
            "docs/how-estimates-are-made.md and docs/scoreboard.md."
        )
        return Explanation(blocks=tuple(blocks))


def _s(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{digits(seconds / size)} {unit}"
    return "0"


def explain_plan(plan: TrainPlan) -> Explanation:
    """The chain of a training plan's step."""
    machine, job = plan.machine, plan.job
    pricer = Pricer(machine)
    work = Work(shape=plan.shape, job=job)
    cost = pricer.estimate(work)
    steps = tuple(
        (name, _s(seconds), f"{seconds / cost.step_s.value:.0%}")
        for name, seconds in sorted(cost.terms_s.items(), key=lambda item: -item[1])
    )
    split = job.parallel
    return Explanation(
        blocks=(
            _rates(machine, constants=machine.device.kind == "gpu"),
            Table(
                title=f"a micro-batch of {microbatch_of(job)} x {job.seq_len} tokens through "
                f"all {plan.shape.num_layers} blocks, on a rank with 1/{split.tp} of each "
                f"(engine {job.engine})",
                columns=("operator", "runs", "size", "forward", "backward", "reaches"),
                rows=tuple(_operators(pricer, work)),
                right=" r rrr",
            ),
            Table(
                title=f"a step: {passes_of(job)} micro-batches over {split.pp} stages, "
                f"recompute {job.recompute}: {_s(cost.step_s.value)} "
                f"({_s(cost.step_s.low)} to {_s(cost.step_s.high)})",
                columns=("cause", "seconds", "share"),
                rows=steps,
                right=" rr",
            ),
            "Each formula has its source in docs/how-estimates-are-made.md; docs/scoreboard.md "
            "has their errors on published runs.",
        )
    )


def _rates(machine: Machine, *, constants: bool) -> Table:
    """Numbers of the machine, and where each comes from."""
    device = machine.device
    probed = "matmul_flops" if device.matmul_flops else "peak_flops"
    rates: dict[str, list[str]] = {}
    for name, rate in getattr(device, probed).items():
        source = _source(machine, f"device.{probed}.{name}", f"device.{probed}")
        rates.setdefault(source, []).append(f"{name} {digits(rate / 1e12)}")
    rows = [("products", f"{', '.join(each)} TFLOP/s", source) for source, each in rates.items()]
    main = device.main_memory
    if main.read_bandwidth is not None:
        where = _source(machine, f"device.memory.{main.name}", "device.memory.read_bandwidth")
        rows.append((f"read {main.name}", f"{digits(main.read_bandwidth / 1e9)} GB/s", where))
    rows += [
        (f"link {one.scope}", f"{digits(one.bandwidth / 1e9)} GB/s", _source(machine, where))
        for one in machine.links
        for where in [f"links.{one.scope}"]
    ]
    rows += [
        (
            f"calibration {one.quantity}",
            f"x {one.factor:.3f}",
            f"{one.runs} run(s) of {one.engine} ({one.model or 'other models'}), by shoal score "
            "--calibrate; seconds below are before it",
        )
        for one in machine.calibration or ()
    ]
    if constants:
        rows += [
            (name, digits(getattr(CALIBRATED, name)), f"{what}; fitted to five published rows")
            for name, what in _CONSTANTS.items()
        ]
    return Table(
        title=f"what {machine.name} gives ({machine.provenance})",
        columns=("number", "value", "from"),
        rows=tuple(rows),
        right=" r ",
    )


def _source(machine: Machine, *fields: str) -> str:
    """What the description says of the first of these fields that it says something of."""
    said = (machine.sources[field] for field in fields if field in machine.sources)
    return next(said, machine.provenance)


def _operators(pricer: Pricer, work: Work) -> Iterator[tuple[str, ...]]:
    for op, ahead, behind in pricer.operators(work):
        both = ahead + behind
        if both.device <= 0.0:
            continue
        yield (
            op.name,
            f"{op.count:.4g}",
            _size(op),
            _s(ahead.device),
            _s(behind.device),
            _reached(op, ahead.device),
        )


def _size(op: OpGroup) -> str:
    if op.kind == "matmul":
        groups = f"{op.groups} x " if op.groups > 1 else ""
        return f"{groups}[{op.M:.0f}, {op.K:.0f}] x [{op.K:.0f}, {op.N:.0f}] {op.dtype}".rstrip()
    if op.kind == "attention":
        return f"{op.keys:.0f} keys, {op.heads:.0f} heads of {op.head_dim:.0f}, {op.kernel}"
    return human_bytes(op.forward_bytes or op.backward_bytes)


def _reached(op: OpGroup, seconds: float) -> str:
    """The rate of the forward pass."""
    if not seconds:
        return ""
    if op.kind == "matmul":
        return f"{digits(op.count * op.groups * 2 * op.M * op.N * op.K / seconds / 1e12)} TFLOP/s"
    if op.kind == "memory":
        return f"{digits(op.count * op.forward_bytes / seconds / 1e9)} GB/s"
    return ""


def _kernels(title: str, calls: Sequence[KernelCall]) -> Table:
    """Kernels of a step that differ, the longest first."""
    each = sorted(dict.fromkeys(calls), key=lambda call: -call.seconds)
    return Table(
        title=title,
        columns=("kernel", "asked for", "one takes", "from"),
        rows=tuple((call.kernel, call.size, _s(call.seconds), call.source) for call in each),
        right="  r ",
    )


def _terms(what: str, terms: Terms) -> Table:
    named = {name: value for name, value in terms._asdict().items() if value}
    rows = sorted(named.items(), key=lambda item: -item[1])
    return Table(
        title=f"{what}: {_s(terms.total)}",
        columns=("cause", "seconds", "share"),
        rows=tuple((name, _s(value), f"{value / terms.total:.0%}") for name, value in rows),
        right=" rr",
    )
