"""What one training step costs: a roofline, operator by operator.

A matrix product takes its FLOP over the measured rate at its size, or its bytes over the
bandwidth, whichever is longer; every other operator takes its bytes over the bandwidth
that elementwise operators reach; each operator costs its launch. Collectives follow the
ring formulas. The parts that a job chooses (optimizer, shard) add their own estimates. A step of
another engine on accelerators is priced by the same operators, as that engine runs them.

Sources: Williams et al., Roofline, 2009; Narayanan et al., Megatron-LM, 2021 (pipeline
bubble, tensor-parallel traffic); Rajbhandari et al., ZeRO, 2020 (what is divided);
Korthikanti et al., 2022 (activations).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import flops_per_token, parameters
from shoal.cost.gpu.device import CALIBRATED, GpuCalibration, gpu_of
from shoal.cost.gpu.engines import check_overlap, check_products
from shoal.cost.gpu.spec import EngineSpec
from shoal.cost.pipeline.simulator import simulate
from shoal.cost.price.experts import dispatch, held_parameters
from shoal.cost.price.rates import RankRates, ranks_per_host
from shoal.cost.price.rehearsed import OperatorTimes, RehearsedRates, events
from shoal.cost.price.shares import microbatch_of, passes_of, sharers, vocab_ranks
from shoal.cost.training.exchange import HIDES, exchanged_s
from shoal.cost.training.failures import Saving, saving_of
from shoal.cost.training.frozen import gather_s
from shoal.cost.training.gradient_slices import hidden_share
from shoal.cost.training.moe_makespan import gained_s
from shoal.cost.training.rank_memory import RankMemory
from shoal.cost.training.step_passes import StepPasses
from shoal.cost.training.totals import energy_of, occupied, price_of, whole_of
from shoal.cost.training.wire import (
    add_wire,
    data_parallel_s,
    not_hidden_s,
    tensor_parallel_s,
    tied_s,
)
from shoal.ir import Estimate, Interval, Machine, TrainJob, Work

# Share of the backward pass behind which a GPU hides the gradients' collectives.
OVERLAP = 0.8
# Share of what crosses between stages that is not hidden by an engine that overlaps it.
PIPE_EXPOSED = 0.1
# What a step does once on an accelerator, whatever its size: clip, schedule, log, fetch data.
ONCE_S = 5e-3
# Half-width of the 90 % interval on GPUs: 90 % of the rows of a new publication are no further
# off (shoal.cost.published.scoreboard).
GPU_SPREAD = 0.26
# What of a step is computing, and stretches where computing is slower.
_COMPUTE = ("matmul", "attention", "memory", "overhead", "optimizer", "bubble")
# Of a least price: so that rounding does not make it more than the price.
_LEAST = 1.0 - 1e-9
# Micro-batches of a pipeline that are simulated one by one.
_SIMULATED = 32


def estimate(work: Work, machine: Machine) -> Estimate:
    """Time, memory and traffic of one step of ``work`` on one rank of ``machine``.

    Allocates nothing that grows with the model and needs no torch.

    Raises:
        PlanError: more ranks than the machine's nodes can hold, or a shape that the
            degrees of parallelism do not divide.
        MachineError: the machine has no value for a required rate.
        ConfigError: an option of a part is wrong.
    """
    return Pricer(machine).estimate(work)


class Pricer(StepPasses, RankMemory):
    """Estimates of many jobs on one machine, which remembers what they share.

    Args:
        machine: the machine.
        engine: what runs the jobs on an accelerator; the engine of each job if not given.
        constants: of accelerators; those that plans are priced with if not given.
    """

    def __init__(
        self,
        machine: Machine,
        engine: EngineSpec | None = None,
        constants: GpuCalibration = CALIBRATED,
    ) -> None:
        super().__init__(machine, engine, constants)
        self._least: dict[tuple[object, ...], float] = {}
        self._sent: dict[tuple[object, ...], tuple[object, float, dict[str, float]]] = {}

    def least_s(self, work: Work, microbatch: int, recompute: str) -> float:
        """Seconds that a step of this split takes at least, and much sooner known than its price.

        What is computed counts, and the bubble of that; what is sent, updated and launched is left
        out. On CPUs, and where blocks differ, nothing is known: 0.

        Args:
            work: whose job says everything else.
            microbatch: sequences of a micro-batch.
            recompute: what is computed again.
        """
        work = self._made(work)
        job, split = work.job, work.job.parallel
        if self.machine.device.kind == "cpu" or job.layers or split.stages:
            return 0.0
        key = (
            *(work.shape, job.seq_len, microbatch, recompute, job.precision, job.compile),
            *(split.tp, split.sp, vocab_ranks(job), split.ep, split.etp, self._frozen(work)),
            *(job.engine, job.products),
        )
        device = self._least.get(key)
        if device is None:
            one = self._ranks_passes(work, self._rates(job), microbatch, 1)
            device = (one.forward + one.backward[recompute] + one.ends + one.last).device
            self._least[key] = device
        passes = passes_of(job, microbatch)
        # The busiest stage is no less busy than they are in the mean.
        share = passes / split.pp / split.cp
        return device * share * (1.0 + self._idle(split, passes)) * _LEAST

    def estimate(self, work: Work) -> Estimate:
        """See :func:`estimate`."""
        work = self._made(work)
        job, shape, machine = work.job, work.shape, self.machine
        if job.layers or job.parallel.stages:
            from shoal.cost.training.layer_plan import estimate_layers

            return estimate_layers(work, machine)
        _check(work, machine)
        check_products(job, machine)
        if self.engine is None:
            check_overlap(job)
        rates = self._rates(job)
        engine = self._engine(job)
        microbatch = microbatch_of(job)
        passes = passes_of(job, microbatch)
        forward, backward, evenness = self._both(work, rates, microbatch)
        both = forward + backward
        launch = both.calls * self._launch_s(job) * rates.crowding
        # A GPU receives launches while it works; only what it does not hide counts.
        overhead = launch if rates.is_cpu else max(0.0, launch - both.device)

        wire: dict[str, float] = {}
        tensor_s = tensor_parallel_s(work, machine, microbatch, wire)
        tensor_s = not_hidden_s(job, machine, tensor_s, both.matmul) * (1 - engine.tensor_overlap)
        exchange_s = dispatch(job, shape, machine, microbatch, wire, engine)
        tensor_s += exchange_s - self._behind(job, exchange_s, both.device, passes)
        tensor_s = max(0.0, tensor_s - gained_s(job, shape, machine, microbatch))
        pipe_s = self._pipeline(work, wire) / passes
        pipe_s *= PIPE_EXPOSED if engine.pipe_overlap else 1.0
        if job.parallel.pp > 1 and rates.is_cpu:
            whole, busy = self._staged(work, rates.crowding)
            bubble = whole - busy
            # The fullest stage's operators were counted; ranks of one host share the work.
            evenly = (busy / passes - tensor_s) / (both.device + overhead)
            both, overhead = both.times(evenly), evenly * overhead
        else:
            bubble = (
                self._idle(job.parallel, passes)
                * passes
                * (evenness * (both.device + overhead) + tensor_s + pipe_s)
            )
        context_s = self._context(work, wire)

        shard = self._part("shard", job.shard)
        divides: frozenset[str] = shard.divides
        own = self._update(work)
        experts, rest = held_parameters(shape, job.parallel)
        update = own.terms_s.get("optimizer", 0.0) * rates.sharing
        whole, mine = experts + rest, rest / sharers(job) + experts / job.parallel.edp
        moments = mine if "optimizer" in divides else whole
        update *= moments / parameters(shape)
        local = mine if "gradients" in divides else whole
        # Zero the gradients, take their norm, scale them.
        stream = self._curves_of(job, rates)[1]
        update += 16.0 * local / stream(4.0 * local)
        trained = self._trained(work)
        update *= trained
        before = dict(wire)
        foreign = self._foreign(job)
        if foreign is None:
            collective = data_parallel_s(work, machine, shard, wire) * trained
        else:
            gpu = gpu_of(machine)
            collective = exchanged_s(work, foreign, gpu, self.constants, divides, forward, backward)
            sharded = "optimizer" in divides or foreign.sharded_update
            moved = foreign.optimizer_bytes * (mine if sharded else whole) * trained
            update = moved / (self.constants.stream * gpu.stream)
        for scope, sent in wire.items():
            wire[scope] = before.get(scope, 0.0) + (sent - before.get(scope, 0.0)) * trained
        if work.job.finetune is not None and rates.is_cpu:
            # No product for the gradient of weights that stand still.
            both = both._replace(matmul=forward.matmul + (both.matmul - forward.matmul) / 2)
        if job.parallel.slices:
            # What no slice takes travels when nothing else does; so do new parameters, a third of
            # what ranks send that divide the optimizer.
            summed = 4.0 * (rest + (experts if job.parallel.edp > 1 else 0.0))
            gradients = 2.0 / 3.0 if "optimizer" in divides else 1.0
            collective *= 1.0 - gradients * hidden_share(job, shape, summed)
        elif foreign is None and not rates.is_cpu:
            hidden = OVERLAP * backward.device * passes
            collective = max(collective - hidden, 0.05 * collective)
        collective += gather_s(work, machine, wire)
        collective += add_wire(self._part("sync", job.sync).estimate(work, machine), wire)
        placer = self._part("placer", job.parallel.placer)
        collective += add_wire(placer.estimate(work, machine), wire)
        if job.batching is not None:
            assigner = self._part("assigner", job.batching)
            collective += add_wire(assigner.estimate(work, machine), wire)

        terms = {
            "matmul": both.matmul * passes,
            "attention": both.attention * passes,
            "memory": both.memory * passes,
            "overhead": overhead * passes + (0.0 if rates.is_cpu else ONCE_S),
            "optimizer": update,
            "collective": collective + (tensor_s + pipe_s) * passes + context_s,
            "bubble": bubble,
            "data": self._others(work),
        }
        if rates.is_cpu:
            self._as_rehearsed(work, rates, terms)
        if job.offload is not None:
            away = self._part("offload", job.offload).estimate(work, machine).terms_s
            terms["memory"] += away.get("memory", 0.0)
            terms["optimizer"] = away.get("optimizer", terms["optimizer"])
        saved = self._part("activation", job.activation).estimate(work, machine)
        terms["memory"] += saved.terms_s.get("memory", 0.0)
        step = sum(terms.values())
        groups = bounds_of(terms)
        tokens = float(job.global_batch * job.seq_len)
        interval = Interval.around(step, _spread(machine, terms, step))
        ahead = forward.device / both.device if both.device else 0.3
        whole_s = whole_of(job, step, ahead, self.saving(work, step))
        total = None
        if whole_s:
            repeated = interval.scaled((whole_s["steps"] + whole_s["evaluation"]) / step)
            total = repeated.shifted(whole_s["saves"] + whole_s["failures"])
        return Estimate(
            step_s=interval,
            terms_s=terms,
            memory_bytes=self.memory(work),
            wire_bytes=wire,
            flops=flops_per_token(shape, job.seq_len) * tokens,
            tokens=tokens,
            total_s=total,
            whole_s=whole_s,
            energy_j=energy_of(machine, job.parallel.world, total),
            usd=price_of(machine, job.parallel.world, total),
            bound=max(groups, key=lambda name: groups[name]),
        )

    def saving(self, work: Work, step_s: float) -> Saving:
        """How a job saves, as it is priced.

        Args:
            work: the job.
            step_s: seconds of its step.
        """
        mode = self._part("save_mode", work.job.checkpoint.mode).estimate(work, self.machine)
        devices, nodes = occupied(self.machine, work.job.parallel.world)
        return saving_of(
            work.job,
            self.machine.device,
            devices=devices,
            nodes=nodes,
            step_s=step_s,
            stall_s=sum(mode.terms_s.values()),
        )

    def _staged(self, work: Work, crowding: float) -> tuple[float, float]:
        """(seconds of a step, mean seconds that a rank computes) of a pipeline on one host.

        Where ranks share cores, one that waits leaves its core to another: the step takes as long
        as the schedule would on cores of their own, or as all work on the cores that there are.
        """
        split = work.job.parallel
        passes = passes_of(work.job)
        # Of a long schedule the middle repeats.
        few = min(passes, max(_SIMULATED, split.pp))
        few -= few % split.pp if few > split.pp else 0
        cost = self.passes(work)
        part = self._part("schedule", split.schedule)

        def told(count: int) -> tuple[float, float]:
            timeline = simulate(part.build(split.pp, count, split.vpp), cost)
            return timeline.makespan / crowding, sum(timeline.busy) / split.pp

        whole, busy = told(few)
        if few < passes:
            before, less = told(few - split.pp)
            whole += (passes - few) * (whole - before) / split.pp
            busy += (passes - few) * (busy - less) / split.pp
        return max(whole, busy), busy

    def _as_rehearsed(self, work: Work, rates: RankRates, terms: dict[str, float]) -> None:
        """Change the seconds of a step on this host by what rehearsed steps really took."""
        known = self._rehearsed
        if known is None:
            return
        job = work.job
        ranks = ranks_per_host(self.machine, job.parallel)
        factor = known.factor(job.precision, ranks, rates.crowding)
        for cause in _COMPUTE:
            terms[cause] *= factor
        # What meetings cost may be less than the links' formulas say.
        met = known.meeting_s(events(job, work.shape), rates.crowding)
        terms["collective"] = max(0.0, terms["collective"] + met)

    @functools.cached_property
    def _rehearsed(self) -> RehearsedRates | None:
        known = _LAST.get("machine")
        if known is None or known[0] is not self.machine:
            _LAST["machine"] = known = self.machine, _rehearsals(self.machine)
        return known[1]

    def _behind(self, job: TrainJob, exchange_s: float, device_s: float, passes: int) -> float:
        """Seconds of a micro-batch's exchange that hide behind another micro-batch's passes.

        What enters a pipeline before the first backward pass, and what leaves it after the last
        forward pass, has no other beside it.
        """
        if job.parallel.overlap != "experts":
            return 0.0
        paired = max(0.0, 1.0 - self._in_flight(job.parallel, passes) / passes)
        return paired * min(self._engine(job).expert_overlap * exchange_s, HIDES * device_s)

    def _pipeline(self, work: Work, wire: dict[str, float]) -> float:
        """Seconds in which a rank sends to its neighbours, all micro-batches."""
        if work.job.parallel.pp == 1:
            return 0.0
        job = work.job
        size = (job.seq_len, job.global_batch, job.microbatch, job.precision)
        key = (id(job.parallel), work.shape.name, *size)
        if key not in self._sent:
            part = self._part("schedule", job.parallel.schedule)
            own: dict[str, float] = {}
            seconds = add_wire(part.estimate(work, self.machine), own)
            seconds += tied_s(work, self.machine, own)
            self._sent[key] = job.parallel, seconds, own
        _, seconds, own = self._sent[key]
        for scope, sent in own.items():
            wire[scope] = wire.get(scope, 0.0) + sent
        return seconds

    def _context(self, work: Work, wire: dict[str, float]) -> float:
        """Seconds of attention's own traffic, where ranks share the sequences."""
        if work.job.parallel.cp == 1:
            return 0.0
        part = self._part("context", work.job.parallel.context)
        return add_wire(part.estimate(work, self.machine), wire)


# What the machine that was asked for last has rehearsed: pricers come and go.
_LAST: dict[str, tuple[Machine, RehearsedRates | None]] = {}


def _rehearsals(machine: Machine) -> RehearsedRates | None:
    if all(m.probe != "steps" for m in machine.measurements):
        return None
    plain = Pricer(machine)
    plain._rehearsed = None

    def told(work: Work) -> OperatorTimes:
        terms = plain.estimate(work).terms_s
        compute = sum(terms[cause] for cause in _COMPUTE)
        return OperatorTimes(compute, sum(terms.values()) - compute)

    return RehearsedRates(machine, told) or None


def _check(work: Work, machine: Machine) -> None:
    job, shape = work.job, work.shape
    tp, pp = job.parallel.tp, job.parallel.pp
    if machine.device.kind == "gpu":
        require(
            job.parallel.world <= machine.num_devices,
            "parallel",
            f"dp={job.parallel.dp} tp={tp} pp={pp}",
            expected=f"at most {machine.num_devices} ranks, one for each device of {machine.name}",
            error=PlanError,
        )
    require(
        shape.num_heads % tp == 0
        and (shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0),
        "parallel.tp",
        tp,
        expected=f"a divisor of {shape.num_heads} heads and {shape.num_kv_heads} key/value heads",
        error=PlanError,
    )
    require(
        pp <= shape.num_layers,
        "parallel.pp",
        pp,
        expected=f"at most {shape.num_layers}, the number of blocks",
        error=PlanError,
    )


def _spread(machine: Machine, terms: Mapping[str, float], step: float) -> float:
    """Half-width of the 90 % interval, as a share: the model's error and the machine's noise."""
    if machine.device.kind == "gpu":
        # Networks included: so far were the predictions of published runs off.
        return math.hypot(GPU_SPREAD, 2 * (machine.noise or 0.0))
    own = 0.3 if machine.provenance == "declared" else 0.2
    # Collectives depend on what else is on the network, and on how ranks drift apart.
    wire = 0.3 * terms["collective"] / step if step else 0.0
    return math.sqrt(own**2 + wire**2 + (2 * (machine.noise or 0.0)) ** 2)


def bounds_of(terms: Mapping[str, float]) -> dict[str, float]:
    """What may bind a step -> seconds of it."""
    return {
        "compute": terms["matmul"] + terms["attention"],
        "memory": terms["memory"] + terms["optimizer"],
        "network": terms["collective"],
        "bubble": terms["bubble"],
        "overhead": terms["overhead"],
    }
