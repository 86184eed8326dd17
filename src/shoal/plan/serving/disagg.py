"""Plans of serving for goodput: one engine for both phases, or instances for each.

Every way to split an instance of each phase over devices has a rate alone, under its own target,
by a closed form. The best of them are put together in the numbers that fill the devices, and
served whole in virtual time, beside engines that do both phases, with the same requests. What wins
is what serves the highest rate at which enough requests meet both targets.

Source: Zhong et al., DistServe, 2024, section 4.1 (instances on any devices) and algorithm 1.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from shoal.core.errors import PlanError, require
from shoal.core.parts import Choice, table
from shoal.core.pool.local import LocalPool
from shoal.core.sizes import human_bytes
from shoal.core.traits import traits
from shoal.cost.serving.fleet import KVTransferLink, SimulatedFleet, SimulatedInstance
from shoal.cost.serving.queueing import busy_share
from shoal.cost.shapes import resolve
from shoal.cost.workloads.describe import describe
from shoal.ir import (
    Arrival,
    Disagg,
    Machine,
    ModelShape,
    Phase,
    ServeJob,
    ServeParallel,
    ServeWork,
    StepCost,
)
from shoal.ir.phases import PhasePart
from shoal.plan.batching.dispatch import LeastLoadedDispatcher
from shoal.plan.serving.choices import offered
from shoal.plan.serving.goodput import FEWEST_REQUESTS, Goodput, Slo, poisson, replicas
from shoal.plan.serving.goodput_report import DisaggSetting, GoodputReport, SettingResult
from shoal.plan.serving.inputs import arrivals_of, positions, precision_of
from shoal.plan.serving.memory import fillable, fixed_memory, token_bytes
from shoal.plan.serving.simulation import blank, build_cache, counts_blocks, sharded_costs

Costs = Callable[[int, int], StepCost]
Progress = Callable[[float, float, str], None]

# Splits of each phase that are put together, best first.
_KEPT = 3
# As many times as many requests are served where instances work together.
_TOGETHER = 2
# What is looked for is known to two percent at last.
_FINE = 0.02
# Rates of the drawn curves, as shares of the goodput.
_CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
# Output tokens of a simulation from which on it is worth to search in two processes.
_LONG = 50_000
# Requests at once of an engine that no limit of the job's keeps smaller.
_UNLIMITED = 1e15


def plan_goodput(
    job: ServeJob,
    machine: Machine,
    slo: Slo,
    *,
    devices: int | None = None,
    costs: Costs | None = None,
    requests: int = FEWEST_REQUESTS,
    tolerance: float = 0.05,
    wanted: float | None = None,
    progress: Progress | None = None,
    processes: int = 1,
) -> GoodputReport:
    """Search settings for the highest rate under targets; needs no torch.

    Args:
        job: model, workload and limits of an instance.
        machine: what the devices are.
        slo: the targets.
        devices: how many; None for all of the machine.
        costs: (tp, pp) -> seconds of a step; None predicts them from the machine's rates.
        requests: simulated, at least; twice as many where instances work together.
        tolerance: of a rate, requests per second and device.
        wanted: requests per second that shall be served.
        progress: called with (done, total, text).
        processes: 2 lets another process search instances for each phase where that takes long;
            the caller's main module is imported there, so a script needs its guard. The result is
            the same.

    Raises:
        PlanError: fewer than two devices, a model that fits no phase, or targets that not even a
            request alone meets.
    """
    given = (job, machine, slo, devices, requests, tolerance)
    return _Search(*given, costs).report(wanted, progress, processes > 1 and costs is None)


def _apart(*given: Any) -> list[SettingResult]:
    """The settings with instances for each phase, by a process of their own."""
    search = _Search(*given)
    splits = list(search._splits())
    search._check(splits)
    return search._phases(splits, lambda text: None)


class _Search:
    """The search of :func:`plan_goodput`.

    Engines for both phases and instances for each are searched apart, so that two processes may
    share the work: what each finds does not depend on the other.
    """

    def __init__(
        self,
        job: ServeJob,
        machine: Machine,
        slo: Slo,
        devices: int | None,
        requests: int,
        tolerance: float,
        costs: Costs | None = None,
    ) -> None:
        self._given = (job, machine, slo, devices, requests, tolerance)
        self.machine, self.slo, self.tolerance = machine, slo, tolerance
        self.devices = devices or machine.num_devices
        require(
            self.devices >= 2,
            "--devices",
            self.devices,
            expected="at least 2, one for each phase",
            hint="plan one device without --slo",
            error=PlanError,
        )
        require(
            self.devices <= machine.num_devices,
            "--devices",
            self.devices,
            expected=f"at most the {machine.num_devices} of {machine.name}",
            hint=f"name a machine of so many, such as {self.devices}xH100",
            error=PlanError,
        )
        require(
            requests >= FEWEST_REQUESTS,
            "requests",
            requests,
            expected=f"at least {FEWEST_REQUESTS}; fewer say little about a tenth of them",
            error=PlanError,
        )
        self.shape: ModelShape = resolve(job.model)
        self.precision = precision_of(job)
        self.job = job.model_copy(
            update={
                "precision": self.precision,
                "max_position": positions(job, self.shape),
                "parallel": ServeParallel(),  # which is searched
            }
        )
        self.requests = requests
        # A rate per device that was good enough: where to look next; and where to look first.
        self._guess = self._near = 0.0
        self.lengths = arrivals_of(self.job, self.shape, count=min(requests, 2000))
        # Of instances that work together: a prompt that came before would be in some cache.
        self.many = arrivals_of(self.job, self.shape, count=_TOGETHER * requests)
        self.arrivals = poisson(self.lengths, len(self.lengths), job.seed)
        # Phases on any two devices: the slower link, where there are several nodes.
        self.link = machine.link("node") or machine.link("device") or machine.link("loopback")
        self.costs: Costs = costs or sharded_costs(job, machine)
        self.limits = self.job.limits

    def report(
        self, wanted: float | None, progress: Progress | None, shared: bool
    ) -> GoodputReport:
        """Search, and say what was found; ``shared`` with another process where it takes long."""
        splits = list(self._splits())
        self._check(splits)
        done = steps = 0

        def tell(text: str) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(min(done, steps), steps, text)

        whole = [(tp, pp) for tp, pp in splits if pp == 1]
        schedulers = list(offered("scheduler", self._work(*splits[0]), self.machine))
        steps = len(schedulers) * len(whole) + _KEPT
        tried: list[tuple[SettingResult, Goodput]] = []
        aside: Future[list[SettingResult]] | None = None
        tokens = sum(one.output_tokens for one in self.many)
        with contextlib.ExitStack() as stack:
            if shared and tokens >= _LONG:
                pool = stack.enter_context(LocalPool(workers=1).open())
                aside = pool.submit(_apart, *self._given)
            for scheduler, (tp, _) in itertools.product(schedulers, whole):
                both = Phase(count=self.devices // tp, tp=tp)
                tried.append(self._try(DisaggSetting(scheduler=scheduler, both=both), near=0.0))
                tell(str(scheduler))
            rows = self._drawn(tried)
            self._guess = 0.0
            rows += self._phases(splits, tell) if aside is None else aside.result()
            done = steps - 1
            tell("all settings")
        rows.sort(key=lambda one: -one.goodput)
        if rows[0].goodput == 0:
            raise PlanError(
                f"--slo: no setting of {self.devices} devices has {self.slo.share:.0%} of the "
                f"requests within ttft {self.slo.ttft:g} s and tpot {self.slo.tpot:g} s at any "
                "rate; long prompts take longer than the median one: give looser targets"
            )
        return self._reported(rows, wanted)

    def _phases(
        self, splits: Sequence[tuple[int, int]], tell: Callable[[str], None]
    ) -> list[SettingResult]:
        """Settings with instances for each phase."""
        tried: list[tuple[SettingResult, Goodput]] = []
        fronts = sorted(((self._prompts(*split), *split) for split in splits), reverse=True)
        backs = sorted(((self._tokens(*split), *split) for split in splits), reverse=True)
        better = 1.0  # than the closed forms, by the setting before
        for rate, setting in self._together(fronts[:_KEPT], backs[:_KEPT]):
            result, rates = self._try(setting, near=better * rate / setting.devices)
            tried.append((result, rates))
            better = max(better, result.goodput / rate)
            tell(str(setting))
        return self._drawn(tried)

    def _drawn(self, tried: list[tuple[SettingResult, Goodput]]) -> list[SettingResult]:
        """The settings, the best of them with its curve."""
        tried.sort(key=lambda one: -one[0].goodput)
        rows = [one for one, _ in tried]
        if rows and rows[0].per_device:
            rates = [share * rows[0].per_device for share in _CURVE]
            curve = tuple(tried[0][1].curve(self.slo, rates))
            rows[0] = rows[0].model_copy(update={"curve": curve})
        return rows

    def _reported(self, rows: Sequence[SettingResult], wanted: float | None) -> GoodputReport:
        best = rows[0]
        result = best.setting
        both = result.both or Phase()
        job = self.job.model_copy(
            update={
                "parallel": ServeParallel(tp=both.tp, pp=both.pp),
                "scheduler": result.scheduler or self.job.scheduler,
                "disagg": None
                if result.prefill is None or result.decode is None
                else Disagg(prefill=result.prefill, decode=result.decode),
            }
        )
        other = next(
            (r for r in rows if (r.setting.both is None) != (result.both is None) and r.goodput),
            None,
        )
        kinds = ("one engine for both phases", "instances for each phase")
        apart = result.both is None
        why = f"{kinds[apart]} serve {best.goodput:.3g} requests/s"
        if other is not None:
            why += f", {best.goodput / other.goodput:.2f} times the best of {kinds[not apart]}"
        notes = []
        if wanted is not None:
            copies = replicas(wanted, best.goodput)
            notes.append(
                f"{wanted:g} requests/s need {copies} times these {self.devices} devices"
                if copies > 1
                else f"{wanted:g} requests/s are served by these devices"
            )
        return GoodputReport(
            job=job,
            machine=self.machine,
            devices=self.devices,
            slo=self.slo,
            tried=tuple(rows),
            workload=describe(self.lengths),
            wanted=wanted,
            why=why,
            notes=tuple(notes),
        )

    def _splits(self) -> Iterator[tuple[int, int]]:
        """(tp, pp) of an instance that the model allows and that leaves a device to the other."""
        for tp, pp in itertools.product(_powers(self.devices), _powers(self.devices)):
            if tp * pp >= self.devices or tp > self.machine.devices_per_node:
                continue
            heads = self.shape.num_heads % tp or self.shape.num_layers % pp
            if not heads and self._kv_tokens(tp, pp) >= self.limits.max_position:
                yield tp, pp

    def _kv_tokens(self, tp: int, pp: int) -> int:
        """Tokens of the cache of an instance; 0 or less if the weights fill its devices."""
        memory = fixed_memory(self.job, self.shape, self.machine, self.precision)
        own = memory["weights"] / (tp * pp) + memory["activations"] / tp + memory["runtime"]
        room = (fillable(self.job, self.machine) - own) * tp * pp
        tokens = int(room / token_bytes(self.job, self.shape, self.precision))
        return min(tokens, self.job.kv_tokens or tokens)

    def _check(self, splits: Sequence[tuple[int, int]]) -> None:
        """Refuse what nothing can serve, with the numbers."""
        if not splits:
            memory = fixed_memory(self.job, self.shape, self.machine, self.precision)
            room = fillable(self.job, self.machine)
            raise PlanError(
                f"{self.shape.name} fits no phase: an instance of at most {self.devices - 1} of "
                f"{self.devices} devices of {human_bytes(room)} must hold "
                f"{human_bytes(memory['weights'])} of weights and the cache of a request of "
                f"{self.limits.max_position} tokens; use more devices, or a smaller max_position"
            )
        prompt = sorted(len(one.prompt) for one in self.lengths)[len(self.lengths) // 2]
        best = [self.costs(tp, pp) for tp, pp in splits]
        first = min(cost.seconds([(0, prompt)]) for cost in best)
        self._near = 1 / first  # one prompt after the other
        token = min(cost.seconds([(prompt, 1)]) for cost in best)
        many = f"the median prompt ({prompt} tokens)"
        for name, target, least, what in (
            ("TTFT", self.slo.ttft, first, "prefill time"),
            ("TPOT", self.slo.tpot, token, "time of a step alone"),
        ):
            if target < least:
                after = "of" if name == "TTFT" else "after"
                raise PlanError(
                    f"{name} target {1e3 * target:.3g} ms is below the {what} "
                    f"{1e3 * least:.3g} ms {after} {many} on {self.machine.name}; give a looser "
                    "target, or plan for faster devices"
                )

    def _instances(
        self, role: str, phase: Phase, scheduler: Choice | None = None, *, counted: bool
    ) -> list[SimulatedInstance]:
        """Schedulers with their costs; a pipeline that generates is one for each of its stages.

        As many groups of requests as stages take turns, each with its share of the cache.
        """
        cost = self.costs(phase.tp, phase.pp)
        lanes = phase.pp if role == "decode" else 1
        tokens = self._kv_tokens(phase.tp, phase.pp) // lanes
        part = (
            self._phase(role, phase.tp, phase.pp)
            if scheduler is None
            else table("scheduler").build(scheduler)
        )
        stages = phase.pp if role == "prefill" else 1
        return [
            SimulatedInstance(
                part.build(build_cache(self.job, tokens, counted=counted), self.limits),
                cost,
                stages,
            )
            for _ in range(phase.count * lanes)
        ]

    def _phase(self, role: str, tp: int, pp: int) -> PhasePart:
        """The first part that is offered for a phase, on such an instance."""
        for choice in offered("phase", self._work(tp, pp), self.machine):
            if f"phase_{role}" in traits("phase", choice):
                part: PhasePart = table("phase").build(choice)
                return part
        raise PlanError(f"no part of kind phase is offered for {role}: one must have its trait")

    def _work(self, tp: int, pp: int) -> ServeWork:
        """What the parts of an instance are asked for."""
        return ServeWork(
            shape=self.shape,
            job=self.job,
            arrivals=self.arrivals,
            room=self._kv_tokens(tp, pp),
            cost=self.costs(tp, pp),
        )

    def _wire(self) -> KVTransferLink:
        link = self.link
        return KVTransferLink(
            bandwidth=link.bandwidth if link else _UNLIMITED,
            latency_s=link.latency_s if link else 0.0,
            token_bytes=token_bytes(self.job, self.shape, self.precision),
            layers=self.shape.num_layers,
            overlap=True,
        )

    def _try(self, setting: DisaggSetting, near: float) -> tuple[SettingResult, Goodput]:
        """The goodput of a setting: of the smallest group of instances that repeats.

        Args:
            setting: what serves.
            near: where its goodput per device is looked for first; 0 if unknown.
        """
        counts = [p.count for p in (setting.both, setting.prefill, setting.decode) if p]
        copies = math.gcd(*counts)

        def fewer(phase: Phase) -> Phase:
            return phase.model_copy(update={"count": phase.count // copies})

        def serve(arrivals: Sequence[Arrival]) -> SimulatedFleet:
            if setting.both is not None:
                both = fewer(setting.both)
                fronts = self._instances("both", both, setting.scheduler, counted=counted)
                return SimulatedFleet(fronts, [], LeastLoadedDispatcher(len(fronts)), arrivals)
            assert setting.prefill is not None
            assert setting.decode is not None
            fronts = self._instances("prefill", fewer(setting.prefill), counted=counted)
            backs = self._instances("decode", fewer(setting.decode), counted=counted)
            dispatcher = LeastLoadedDispatcher(len(fronts), len(backs))
            return SimulatedFleet(fronts, backs, dispatcher, arrivals, wire=self._wire())

        used = setting.devices // copies
        together = min(_TOGETHER, sum(counts) // copies)
        drawn = self.lengths if together == 1 else self.many
        count = together * self.requests
        arrivals = poisson(drawn, count, self.job.seed)
        if counted := counts_blocks(self.job, arrivals):
            arrivals = blank(arrivals)
        rates = Goodput(serve, arrivals, used)
        position = rates.find(
            self.slo,
            tolerance=self.tolerance,
            relative=_FINE,
            start=self._guess or 1.0,
            near=near or self._guess or self._near,
        )
        self._guess = position or self._guess
        total = position * setting.devices
        return SettingResult(setting=setting, goodput=total, per_device=total / self.devices), rates

    def _prompts(self, tp: int, pp: int) -> float:
        """Rate per device of an instance that computes prompts alone, by its queue's closed form.

        Prompts share steps as its scheduler lets them, and come at random times.
        """
        cost = self.costs(tp, pp)
        lengths = [len(one.prompt) for one in self.lengths]
        service = [cost.seconds([(0, length)]) for length in lengths]
        most = self.limits.max_step_tokens
        batch = getattr(self._phase("prefill", tp, pp), "batch_tokens", None) or most
        steps = [[lengths[0]]]
        for length in lengths[1:]:
            if sum(steps[-1]) + length > batch:
                steps.append([])
            steps[-1].append(length)
        busy = sum(cost.seconds([(0, one) for one in step]) for step in steps) / pp
        weight = sum(one**2 for one in service) / sum(service) / pp
        used = busy_share(weight, [self.slo.ttft - one for one in service], self.slo.share)
        return used * len(lengths) / busy / (tp * pp)

    def _tokens(self, tp: int, pp: int) -> float:
        """Rate per device of a decode instance alone: of the largest batch in time."""
        cost = self.costs(tp, pp)
        outputs = sum(one.output_tokens for one in self.lengths)
        context = round(
            sum(
                (len(one.prompt) + one.output_tokens / 2) * one.output_tokens
                for one in self.lengths
            )
            / outputs
        )
        room = self._kv_tokens(tp, pp) // pp // (context + 1)
        most = max(1, min(self.limits.max_running, self.limits.max_step_tokens, room))
        number = bisect.bisect_right(
            range(1, most + 1), self.slo.tpot, key=lambda n: cost.seconds([(context, 1)] * n)
        )
        if not number:
            return 0.0
        step = cost.seconds([(context, 1)] * number)
        # As many batches take turns as there are stages.
        return pp * number / step / (outputs / len(self.lengths)) / (tp * pp)

    def _together(
        self, fronts: Sequence[tuple[float, int, int]], backs: Sequence[tuple[float, int, int]]
    ) -> Iterator[tuple[float, DisaggSetting]]:
        """(expected rate, setting) of both phases, in the numbers that should serve most."""
        made: list[tuple[float, DisaggSetting]] = []
        for (front, ftp, fpp), (back, btp, bpp) in itertools.product(fronts, backs):
            if not front or not back:
                continue
            most, disagg_setting = 0.0, None
            for prompts in range(1, self.devices // (ftp * fpp) + 1):
                decodes = (self.devices - prompts * ftp * fpp) // (btp * bpp)
                rate = min(prompts * ftp * fpp * front, decodes * btp * bpp * back)
                if rate > most:
                    most = rate
                    disagg_setting = DisaggSetting(
                        prefill=Phase(count=prompts, tp=ftp, pp=fpp),
                        decode=Phase(count=decodes, tp=btp, pp=bpp),
                    )
            if disagg_setting is not None:
                made.append((most, disagg_setting))
        made.sort(key=lambda one: -one[0])
        yield from made[:_KEPT]


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]
