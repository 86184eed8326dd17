"""Which fine-tuning method fits: ranked, with what each trains, needs and costs, and why.

Parameters follow from the shape and the method's options; bytes are those of the training estimate,
with what a method changes in them: gradients and moments of what is trained alone, a base in four
bits, activations that are not kept. The order among those that fit is the survey's and our own
claim's: methods of low rank first, what stays beside the model later, what learns slowly last.

Source: Han et al., Parameter-Efficient Fine-Tuning for Large Models: A Comprehensive Survey, 2024,
sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import PlanError, require
from shoal.core.parts import Choice, table
from shoal.core.sizes import human_bytes
from shoal.cost.arithmetic import parameters
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, TrainJob, Work
from shoal.plan.strategy.judge import usable_bytes
from shoal.plan.strategy.space import families

# Methods whose adapters are served beside others in one batch.
_TOGETHER = ("lora", "rslora", "lora_fa", "dylora", "adalora", "vera")

# From what is tried first to what is tried last.
_ORDER = (
    "lora", "dora", "adalora", "rslora", "qlora", "loftq", "lora_fa", "dylora", "parallel_adapter",
    "mam", "unipelt", "adapter", "krona", "compacter", "adapter_drop", "ssf", "vera", "bitfit",
    "ladder", "fishmask", "pafi", "prefix", "ia3", "prompt", "diff_pruning", "offsite", "mezo",
)  # fmt: skip

# Operations of a forward pass that are added at serving time, per trained parameter and token.
_PER_PARAMETER = 2.0


@dataclass(frozen=True, kw_only=True)
class PeftOption:
    """A method and what it would take.

    Args:
        trained: parameters.
        share: of all parameters.
        memory_bytes: of a rank, by cause, under the first plan that fits, or the thriftiest.
        added_share: operations of a token that it adds at serving time, as a share; 0 when merged.
        fits: it satisfies the memory budget and the requirements.
        reason: why it is where it is in the list.
    """

    method: Choice
    trained: float
    share: float
    memory_bytes: dict[str, float]
    added_share: float
    fits: bool
    reason: str

    @property
    def peak_bytes(self) -> float:
        """Bytes of a rank."""
        return sum(self.memory_bytes.values())


def advise(
    job: TrainJob,
    machine: Machine,
    *,
    budget_bytes: float | None = None,
    must_merge: bool = False,
    tenants: int = 1,
    share: float | None = None,
    methods: Sequence[Choice] | None = None,
) -> list[PeftOption]:
    """All methods for a job, best first.

    Args:
        job: model, batch and optimizer; its own ``finetune`` is not looked at.
        machine: where it will run.
        budget_bytes: of one device; what a plan may fill of the machine's if not given.
        must_merge: what is served must cost no more than the model.
        tenants: adapters that will be served on one base.
        share: of the parameters that may be trained, at most.
        methods: with their options; every method with its defaults if not given.

    Raises:
        PlanError: the job splits the model.
    """
    require(share is None or 0 < share <= 1, "share", share, expected="in (0, 1]", error=PlanError)
    require(tenants >= 1, "tenants", tenants, expected="1 or more", error=PlanError)
    shape = shape_of(job)
    every = float(parameters(shape))
    pricer = Pricer(machine)
    peft_options: list[PeftOption] = []
    for method in methods or [Choice(name=name) for name in table("peft")]:
        name = method.name
        part: Any = table("peft").build(method)
        trained = float(part.parameters(shape))
        tuned = job.model_copy(update={"finetune": method, "microbatch": job.microbatch or 1})
        memory, fits = _memory(tuned, shape, pricer, budget_bytes)
        merged = part.mergeable and tenants == 1
        added = 0.0 if merged else _PER_PARAMETER * trained / (2.0 * every)
        reasons = []
        if not fits:
            reasons.append(f"needs {human_bytes(sum(memory.values()))}")
        if share is not None and trained > share * every:
            reasons.append(f"trains {100 * trained / every:.3g} %")
        if must_merge and not part.mergeable:
            reasons.append("cannot be merged")
        if tenants > 1 and name not in _TOGETHER:
            reasons.append(f"{tenants} of them are not served on one base")
        peft_options.append(
            PeftOption(
                method=method,
                trained=trained,
                share=trained / every,
                memory_bytes=memory,
                added_share=added,
                fits=not reasons,
                reason="; ".join(reasons) or _why(part, merged, tenants),
            )
        )
    place = {name: number for number, name in enumerate(_ORDER)}
    return sorted(
        peft_options, key=lambda one: (not one.fits, place.get(one.method.name, len(place)))
    )


def _memory(
    job: TrainJob, shape: ModelShape, pricer: Pricer, budget: float | None
) -> tuple[dict[str, float], bool]:
    """Bytes of a rank under the first plan that fits, or under the thriftiest; whether one fits.

    What the job leaves open is open: its ranks, where the base lies, what is computed again.

    Raises:
        PlanError: no split of the job is legal.
    """
    least: dict[str, float] = {}
    for family in families(job, pricer.machine, shape):
        room = budget or usable_bytes(family.job, pricer.machine)
        for recompute in family.recomputes:
            member = family.member(family.sizes[0], recompute, job.precision)
            memory = pricer.memory(Work.model_construct(shape=shape, job=member))
            if sum(memory.values()) <= room:
                return memory, True
            if not least or sum(memory.values()) < sum(least.values()):
                least = memory
    require(
        bool(least),
        "parallel",
        job.parallel,
        expected=f"a parallelism configuration that is valid with finetune = {job.finetune}",
        error=PlanError,
    )
    return least, False


def _why(part: Any, merged: bool, tenants: int) -> str:
    """What speaks for a method that fits."""
    if getattr(part, "weight_bits", 32.0) < 16:
        return "the base takes a quarter of bf16"
    if advice := getattr(part, "advice", ""):
        return str(advice)
    if getattr(part, "kept", 1.0) < 1:
        return "keeps fewer activations"
    if tenants > 1:
        return "many are served in one batch"
    return "merges to no cost" if merged else "stays beside the model"
