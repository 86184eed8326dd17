"""What one layer costs under one strategy: seconds, bytes, and what a change between two costs.

Computation comes from the list of operators and the machine's rates, or, where they were
measured, from fits (:mod:`shoal.cost.training.layer_fit`). With b sequences of a micro-batch on the
ranks of a stage, a layer's pass takes::

    forward   compute + tensor-parallel sums [+ gathering its weights, ZeRO 3]
    backward  compute [+ forward again] + 1 or, recomputed, 2 times these sums [+ gathering]
    last      overlap(backward, data-parallel sums) instead of the backward pass

Where communication and computation overlap, both are slower, and what is left of the longer one
goes at full rate.

Source: Miao et al., Galvatron, 2023, sections 3.2 and 3.4; Rajbhandari et al., ZeRO, 2020.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.boxes import Box, uncovered
from shoal.core.errors import MachineError, PlanError, require
from shoal.core.parts import table
from shoal.cost.arithmetic import (
    activation_bytes,
    block_parameters,
    embedding_parameters,
    logits_bytes,
    parameters,
)
from shoal.cost.gpu.spec import SHOAL
from shoal.cost.price.accelerated import accelerated
from shoal.cost.price.collectives import ring_bytes
from shoal.cost.price.ops import MOST_PLAIN_SCORES, OpGroup, operators
from shoal.cost.price.passes import PassSeconds, op_pass
from shoal.cost.price.rates import RankRates, data_link
from shoal.cost.training.layer_fit import LayerProfile
from shoal.cost.training.layers import LayerCost, ModelLayer, Strategy
from shoal.ir import Link, Machine, ModelShape, Parallel, TrainJob, Work

# Operators that belong to the ends of the model, not to a block.
_ENDS = {"embedding": "embed", "final_norm": "head", "logits": "head", "loss": "head"}
_WEIGHTS = ("weight_cast", "gradient_sum")
# What a rank holds only its share of, by sharding.
_DIVIDES = {
    "replicated": frozenset[str](),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "weights"}),
}


class LayerPricer:
    """Costs of the layers of a job on a machine; remembers what it was asked.

    Args:
        job: its sequence length, precision, optimizer and kind of parallelism count; its degrees
            do not.
        machine: what there is.
        shape: of which embedding, output layer and precision of states are taken.
        profile: measurements of the layers; the machine's rates are used where there are none.

    Raises:
        MachineError: the machine has no rate, or no link, that is needed.
    """

    def __init__(
        self,
        job: TrainJob,
        machine: Machine,
        shape: ModelShape,
        profile: LayerProfile | None = None,
    ) -> None:
        self.job, self.machine, self.shape = job, machine, shape
        self.profile = profile or LayerProfile()
        self.is_cpu = machine.device.kind == "cpu"
        self.width = 2.0 if job.precision == "bf16" else 4.0
        optimizer = table("optimizer").build(job.optimizer, where="optimizer")
        own = optimizer.estimate(Work.model_construct(shape=shape, job=job), machine)
        every = parameters(shape)
        self._optimizer_bytes = own.memory_bytes.get("optimizer", 0.0) / every
        self._optimizer_s: float = own.terms_s.get("optimizer", 0.0) / every
        # One memory for each pricer.
        self.layer = functools.lru_cache(maxsize=None)(self._layer)
        self.end = functools.lru_cache(maxsize=None)(self._end)
        self.change = functools.lru_cache(maxsize=None)(self._change)
        self._pass = functools.lru_cache(maxsize=None)(self._pass_of)
        self._end_pass = functools.lru_cache(maxsize=None)(self._end_pass_of)
        self._link = functools.lru_cache(maxsize=None)(self._link_of)
        self._rates = functools.lru_cache(maxsize=None)(self._rates_of)

    # Rates and links ---------------------------------------------------------------------

    def _rates_of(self, world: int) -> RankRates:
        split = self.job.parallel.model_copy(
            update={"dp": world, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1}
        )
        return RankRates(self.machine, split, self.job.threads)

    def _link_of(self, group: int, stride: int, world: int) -> Link | None:
        """The slowest link among ``group`` ranks that are ``stride`` apart, of ``world`` in all."""
        machine = self.machine
        if not self.is_cpu:
            return data_link(machine, Parallel(dp=group, tp=stride))
        near = ("loopback", "device", "node")
        inside = max(1, math.ceil(world / machine.nodes))
        order = near if group * stride <= inside else ("node", *near)
        return next((link for scope in order if (link := machine.link(scope))), None)

    def wire_s(self, op: str, size: float, group: int, stride: int, world: int) -> float:
        """Seconds of a collective.

        Args:
            op: all_reduce, gather, scatter or send.
            size: bytes of the whole tensor; of a message for send.
            group: ranks that take part.
            stride: how far apart they are.
            world: ranks of the job.

        Raises:
            MachineError: the machine has no link between them.
        """
        if size <= 0 or (group <= 1 and op != "send"):
            return 0.0
        sent = size if op == "send" else ring_bytes(size, group)
        sent *= 2.0 if op == "all_reduce" else 1.0
        fit = self.profile.link(op, group, stride)
        if fit is not None:
            return fit.seconds(sent)
        # A message has one port; the members of a ring bring one each.
        link = self._link(1, group * stride, world) if op == "send" else None
        link = link or self._link(group, stride, world)
        if link is None:
            raise MachineError(
                f"machine {self.machine.name}: no link between {group} ranks {stride} apart; add "
                "links[] with scope device or node, bandwidth in byte/s and latency_s"
            )
        hops = {"all_reduce": 2 * (group - 1), "send": 1}.get(op, group - 1)
        return sent / link.bandwidth + hops * link.latency_s

    # Computation -------------------------------------------------------------------------

    def _ops(
        self, shape: ModelShape, sequences: int, tp: int, rates: RankRates
    ) -> tuple[OpGroup, ...]:
        if not rates.is_cpu:
            return accelerated(
                shape,
                seq_len=self.job.seq_len,
                microbatch=sequences,
                precision=self.job.precision,
                engine=SHOAL.compiled() if self.job.compile else SHOAL,
                tp=tp,
            )
        return operators(
            shape,
            seq_len=self.job.seq_len,
            microbatch=sequences,
            precision=self.job.precision,
            style="fused" if self.job.compile else "cpu",
            tp=tp,
        )

    def _pass_of(
        self, layer: ModelLayer, sequences: int, tp: int, cp: int, world: int
    ) -> tuple[PassSeconds, PassSeconds, PassSeconds]:
        """Forward, backward, and what recomputation adds."""
        measured = self._measured(layer.name, sequences, tp, cp)
        if measured is not None:
            return (*measured, measured[0])
        rates = self._rates(world)
        matmul, stream = rates.matmul_curve(self.job.precision), rates.stream_curve()
        ahead, behind, again = PassSeconds(), PassSeconds(), PassSeconds()
        weights: list[PassSeconds] = [PassSeconds(), PassSeconds()]
        for op in self._ops(layer.shape, sequences, tp, rates):
            if op.name in _ENDS:
                continue
            once, back = (
                op_pass(op, late, matmul, stream, self.job.precision, rates.is_cpu)
                for late in (False, True)
            )
            if op.name in _WEIGHTS:
                weights = [weights[0] + once, weights[1] + back]
                continue
            if op.kind == "attention":
                once, back = (_seen(x, layer.span, self.job.seq_len) for x in (once, back))
            ahead, behind = ahead + once, behind + back
            if op.recomputed:
                again = again + once
        # Ranks that share a sequence have the same weights.
        return ahead.shared(cp) + weights[0], behind.shared(cp) + weights[1], again.shared(cp)

    def _measured(
        self, name: str, sequences: int, tp: int, cp: int
    ) -> tuple[PassSeconds, PassSeconds] | None:
        forward = self.profile.forward.get(f"{name}/{tp}")
        backward = self.profile.backward.get(f"{name}/{tp}")
        if forward is None or backward is None:
            return None
        both = (fit.seconds(sequences, self.job.seq_len) for fit in (forward, backward))
        ahead, behind = (PassSeconds(matmul=seconds).shared(cp) for seconds in both)
        return ahead, behind

    def _end_pass_of(
        self, end: str, sequences: int, tp: int, cp: int, world: int
    ) -> tuple[PassSeconds, PassSeconds]:
        measured = self._measured(end, sequences, tp, cp)
        if measured is not None:
            return measured
        rates = self._rates(world)
        matmul, stream = rates.matmul_curve(self.job.precision), rates.stream_curve()
        one = self.shape.model_copy(update={"num_layers": 1, "num_dense_layers": 0})
        ahead, behind = PassSeconds(), PassSeconds()
        for op in self._ops(one, sequences, tp, rates):
            if _ENDS.get(op.name) == end:
                ahead += op_pass(op, False, matmul, stream, self.job.precision, rates.is_cpu)
                behind += op_pass(op, True, matmul, stream, self.job.precision, rates.is_cpu)
        return ahead.shared(cp), behind.shared(cp)

    def _overhead(self, both: PassSeconds, world: int) -> float:
        rates = self._rates(world)
        launch = both.calls * self.machine.device.op_overhead_s * rates.crowding
        return launch if rates.is_cpu else max(0.0, launch - both.device)

    # Layers ------------------------------------------------------------------------------

    def _layer(
        self, layer: ModelLayer, strategy: Strategy, sequences: int, pp: int, end: str = ""
    ) -> LayerCost:
        """The cost of one layer.

        Args:
            layer: the block.
            strategy: how it runs.
            sequences: of one micro-batch, on all ranks of the stage.
            pp: stages; the job has pp times the strategy's ranks.
            end: embed, head or both where the layer is at an end of the model, whose cost is
                added: its vocabulary is shared by the layer's tp ranks.
        """
        tp, cp = strategy.tp, strategy.cp
        world = pp * strategy.dp * tp * cp
        require(
            sequences % strategy.dp == 0,
            "sequences of a micro-batch",
            sequences,
            expected=f"a multiple of dp = {strategy.dp}",
            error=PlanError,
        )
        own = sequences // strategy.dp
        ahead, behind, again = self._pass(layer, own, tp, cp, world)
        if strategy.recompute:
            behind = behind + again
        tokens = own * self.job.seq_len / cp
        sums = self.wire_s("all_reduce", tokens * layer.shape.hidden * self.width, tp, 1, world)
        wire_ahead, wire_behind = 2 * sums, (4 if strategy.recompute else 2) * sums
        wire_ahead, wire_behind = self._with_context(
            layer, strategy, own, world, wire_ahead, wire_behind
        )
        local = block_parameters(layer.shape) / tp
        ends = [name for name in ("embed", "head") if name in end or end == "both"]
        for name in ends:
            first, second = self._end_pass(name, own, tp, cp, world)
            ahead, behind = ahead + first, behind + second
            # Its lookup is summed forward, the gradient of the logits' input backward.
            wire_ahead += sums if name == "embed" else 0.0
            wire_behind += sums if name == "head" else 0.0
            local += self._end_parameters(name, pp) / tp
        wire = self._data_parallel(strategy, local, ahead.device, behind.device, world, pp)
        overhead = self._overhead(ahead + behind, world)
        wire_ahead, wire_behind = wire_ahead + wire.ahead, wire_behind + wire.behind
        total = wire_ahead + wire_behind
        share = wire_ahead / total if total else ahead.calls / max(1, ahead.calls + behind.calls)
        states, transient = self._states(strategy, local, layer)
        held, peak = self._kept(layer, strategy, own, ends)
        return LayerCost(
            forward=ahead,
            backward=behind,
            overhead_s=overhead,
            wire_s=total,
            extra_s=wire.extra,
            update_s=self._update(strategy, local, world) + wire.publish,
            forward_share=share,
            states_bytes=states,
            held_bytes=held,
            transient_bytes=transient + peak,
            sent_bytes=wire.sent
            + (6 if strategy.recompute else 4)
            * tokens
            * layer.shape.hidden
            * self.width
            * 2
            * (tp - 1)
            / tp,
        )

    def _end(self, name: str, strategy: Strategy, sequences: int, pp: int) -> LayerCost:
        """The cost of embedding or output layer in a layout that the blocks need not have.

        Args:
            name: embed or head.
            strategy: how it runs; its vocabulary is shared by the tp ranks.
            sequences: of one micro-batch, on all ranks of the stage.
            pp: stages.
        """
        own, world = sequences // strategy.dp, pp * strategy.dp * strategy.tp * strategy.cp
        ahead, behind = self._end_pass(name, own, strategy.tp, strategy.cp, world)
        tokens = own * self.job.seq_len / strategy.cp
        sums = self.wire_s(
            "all_reduce", tokens * self.shape.hidden * self.width, strategy.tp, 1, world
        )
        local = self._end_parameters(name, pp) / strategy.tp
        wire = self._data_parallel(strategy, local, ahead.device, behind.device, world, pp)
        total = sums + wire.ahead + wire.behind
        sent_ahead = wire.ahead + (sums if name == "embed" else 0.0)
        states, _ = self._states(strategy, local, ModelLayer(name, self.shape))
        return LayerCost(
            forward=ahead,
            backward=behind,
            overhead_s=self._overhead(ahead + behind, world),
            wire_s=total,
            extra_s=wire.extra,
            update_s=self._update(strategy, local, world) + wire.publish,
            forward_share=sent_ahead / total if total else 0.5,
            states_bytes=states,
            transient_bytes=self._logits(strategy, own) if name == "head" else 0.0,
            sent_bytes=wire.sent,
        )

    def _with_context(
        self,
        layer: ModelLayer,
        strategy: Strategy,
        own: int,
        world: int,
        ahead: float,
        behind: float,
    ) -> tuple[float, float]:
        """Adds attention's own traffic where ranks share the sequences.

        Keys and values go round the ring once forward; backward they do again, and their
        gradients after them.
        """
        cp = strategy.cp
        if cp == 1:
            return ahead, behind
        kv = layer.shape.num_kv_heads * layer.shape.head_dim / strategy.tp
        block = 2 * kv * own * self.job.seq_len / cp * self.width
        seen = 1.0 if layer.span is None else min(1.0, 2 * layer.span / self.job.seq_len)
        turn = self.wire_s("send", block * seen, 2, strategy.tp, world) * (cp - 1)
        return ahead + turn, behind + (3 if strategy.recompute else 2) * turn

    def _end_parameters(self, end: str, pp: int) -> float:
        table_size = embedding_parameters(self.shape) / (1 if self.shape.tied else 2)
        if self.shape.tied and pp == 1 and end == "head":
            return self.shape.hidden  # the embedding's own table
        return table_size + (self.shape.hidden if end == "head" else 0)

    def _update(self, strategy: Strategy, local: float, world: int) -> float:
        divides = _DIVIDES[strategy.shard]
        ranks = strategy.dp * strategy.cp
        mine = local / (ranks if "optimizer" in divides else 1)
        if self.profile.per_parameter_s is not None:
            return mine * self.profile.per_parameter_s
        rates = self._rates(world)
        stream = rates.stream_curve()
        graded = local / (ranks if "gradients" in divides else 1)
        # Zero the gradients, take their norm, scale them.
        norm = 16.0 * graded / stream(4.0 * graded) if graded else 0.0
        update: float = mine * self._optimizer_s * rates.sharing
        return update + norm

    def _data_parallel(
        self,
        strategy: Strategy,
        local: float,
        ahead: float,
        behind: float,
        world: int,
        pp: int,
    ) -> _Wire:
        """What sharding and gradients cost, by when they are paid."""
        ranks, stride = strategy.dp * strategy.cp, strategy.tp
        if ranks == 1:
            return _Wire()
        size = 4.0 * local
        ring = ring_bytes(size, ranks)
        gather = self.wire_s("gather", size, ranks, stride, world)
        if strategy.shard in ("replicated", "zero1"):
            # The runtime hides sums behind the backward pass where there is one stage.
            sums = self.wire_s("all_reduce", size, ranks, stride, world)
            extra = self._hidden(behind, sums, self.is_cpu and pp > 1)
            publish = gather if strategy.shard == "zero1" else 0.0
            return _Wire(extra=extra, publish=publish, sent=2 * ring + (ring if publish else 0.0))
        # Gathers and scatters of FSDP block a CPU rank; on a GPU the next block's are hidden.
        reduced = self.wire_s("scatter", size, ranks, stride, world)
        scatter = self._hidden(behind, reduced, self.is_cpu)
        front, back = (self._hidden(x, gather, self.is_cpu) for x in (ahead, behind))
        if strategy.shard == "zero2":
            return _Wire(extra=scatter + front, sent=2 * ring)
        return _Wire(ahead=front, behind=back, extra=scatter, sent=3 * ring)

    def _hidden(self, compute: float, communication: float, blocks: bool) -> float:
        """Seconds that communication adds to computation."""
        if blocks:
            return communication
        return self.profile.overlap.seconds(compute, communication) - compute

    def _states(
        self, strategy: Strategy, local: float, layer: ModelLayer
    ) -> tuple[dict[str, float], float]:
        """Weights, gradients and optimizer state, and what is whole while a layer is at work."""
        divides = _DIVIDES[strategy.shard]
        ranks = strategy.dp * strategy.cp
        block = block_parameters(layer.shape) / strategy.tp
        low = 2.0 if self.job.precision == "bf16" else 0.0
        weights, gradients, transient = (4.0 + low) * local, 4.0 * local, 0.0
        if "weights" in divides:
            # Two blocks are whole at a time: the one at work and the next.
            weights = 4.0 * local / ranks
            transient += 2 * (4.0 + low) * block
        if "gradients" in divides:
            gradients /= ranks
            transient += 4.0 * block
        optimizer = self._optimizer_bytes * local / (ranks if "optimizer" in divides else 1)
        return {"weights": weights, "gradients": gradients, "optimizer": optimizer}, transient

    def _kept(
        self, layer: ModelLayer, strategy: Strategy, own: int, ends: Sequence[str]
    ) -> tuple[float, float]:
        """Bytes kept of a micro-batch, and those beside them while the layer is at work."""
        tp, cp = strategy.tp, strategy.cp
        tokens = own * self.job.seq_len
        sp = self.job.parallel.sp
        whole = activation_bytes(
            layer.shape,
            self.job.seq_len,
            1,
            precision=self.job.precision,
            tp=tp,
            sp=sp,
        )
        whole *= own / cp
        held, peak = whole, 0.0
        if strategy.recompute:
            held = tokens * layer.shape.hidden * self.width / (tp if sp else 1) / cp
            peak = whole
        if self.is_cpu and self.job.precision == "bf16":
            scores = own * layer.shape.num_heads * float(self.job.seq_len) ** 2 / tp
            peak += 4 * 2.0 * min(scores, MOST_PLAIN_SCORES) / cp
        if "head" in ends:
            peak += self._logits(strategy, own)
        return held, peak

    def _logits(self, strategy: Strategy, own: int) -> float:
        """Bytes beside the rest while the output layer is at work."""
        precision, tp = self.job.precision, strategy.tp
        logits = logits_bytes(self.shape, self.job.seq_len, 1, precision=precision, tp=tp)
        matrix = logits_bytes(self.shape, 1, 1, precision=precision, tp=tp)
        return matrix + max(0.0, logits - matrix) * own / strategy.cp

    # Changes and boundaries --------------------------------------------------------------

    def _change(
        self,
        before: tuple[int, int, int],
        after: tuple[int, int, int],
        hidden: int,
        sequences: int,
        pp: int,
    ) -> float:
        """Seconds to bring a micro-batch's activations from one layout to another, and back.

        What a rank has not got is sent to it (the table of OneFlow: slices are free, a gather
        costs the missing parts), forward; backward the gradient goes the other way.
        """
        if before == after:
            return 0.0
        ranks = math.prod(before)
        require(
            ranks == math.prod(after),
            "ranks of two layers",
            (before, after),
            expected="layouts of equally many ranks",
            error=PlanError,
        )
        there = self._moved(before, after, hidden, sequences, ranks * pp)
        return there + self._moved(after, before, hidden, sequences, ranks * pp)

    def _moved(
        self,
        before: tuple[int, int, int],
        after: tuple[int, int, int],
        hidden: int,
        sequences: int,
        world: int,
    ) -> float:
        ranks = math.prod(before)
        cells = sequences * self.job.seq_len
        had = [_held(before, rank, sequences, self.job.seq_len) for rank in range(ranks)]
        inside = min(ranks, self.machine.devices_per_node if not self.is_cpu else ranks)
        worst, far = 0, False
        for rank in range(ranks):
            wanted = _held(after, rank, sequences, self.job.seq_len)
            common = wanted.intersect(had[rank])
            missing = wanted.volume - (common.volume if common else 0)
            if missing > worst:
                worst = missing
            if missing and not far:
                first = rank - rank % inside
                far = bool(uncovered(wanted, had[first : first + inside]))
        if not worst:
            return 0.0
        assert worst <= cells
        size = worst * hidden * self.width
        return self.wire_s("send", size, 2, ranks if far else 1, world)

    def boundary_s(self, sequences: int, layout: tuple[int, int, int], pp: int) -> float:
        """Seconds to hand a micro-batch from stage to stage, one direction."""
        if pp == 1:
            return 0.0
        ranks = math.prod(layout)
        size = sequences * self.job.seq_len * self.shape.hidden * self.width / ranks
        return self.wire_s("send", size, 2, ranks, ranks * pp)


@dataclass(frozen=True)
class _Wire:
    """Seconds of data parallelism: of each pass, of the last one, after the update."""

    ahead: float = 0.0
    behind: float = 0.0
    extra: float = 0.0
    publish: float = 0.0
    sent: float = 0.0


def _held(layout: tuple[int, int, int], rank: int, sequences: int, length: int) -> Box:
    """Rows and tokens of a micro-batch that a rank of a stage holds."""
    dp, tp, cp = layout
    row, token = rank // (tp * cp), rank // tp % cp
    rows, tokens = sequences // dp, length // cp
    return Box((row * rows, token * tokens), (rows, tokens))


def _seen(found: PassSeconds, span: int | None, length: int) -> PassSeconds:
    """A pass of attention over the causal half, where a token sees ``span`` tokens back."""
    if span is None or span >= length:
        return found
    share = (span * length - span**2 / 2) / (length**2 / 2)
    return PassSeconds(
        found.matmul * share, found.attention * share, found.memory * share, found.calls
    )
