"""[116] FlashRNN: recurrences whose matrices stay next to the arithmetic, and ConstrINT.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024.

An LSTM of 12 heads of 64 units over 1024 steps, forward and backward, against a loop in Python,
against the alternating kernel, and with one head of 256 units against ``torch.nn.LSTM``. Parity
is learnt at up to 40 bits and tested at 256, by recurrences and by a transformer of as many
weights. The systems of constraints that cut the work are solved, and brute force tries the same
boxes. The A/A run puts the loop in the place of the fused kernel (the loop's own module in that
of ``torch.nn.LSTM``), the transformer in that of the recurrences and a recurrence in its own,
and brute force in the place of the solver. The GPU's kernels are timed where there is one.
"""

from __future__ import annotations

import time
from typing import Annotated, ClassVar

from annotated_types import Ge
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.measure import interleave
from shoal.core.native import compiler
from shoal.core.parts import part
from shoal.ir import Machine
from shoal.plan.constrint.solve import brute_force, parse, solve
from shoal.plan.constrint.tiles import (
    Facts,
    LinearShape,
    RecurrenceShape,
    linear_system,
    recurrence_system,
)

__all__ = ["FlashRNN"]

_CPU = Facts(cores=8, vector_bytes=64, registers=32, l1_bytes=49_152, l2_bytes=2_097_152)
_GPU = Facts(kind="gpu", cores=132, vector_bytes=128, registers=255, l1_bytes=233_472)
# Forward and backward, of many shapes, in fp32.
_SHAPES = [
    ("lstm", 3, 9, 2, 16),
    ("gru", 7, 5, 3, 33),
    ("elman", 1, 12, 1, 70),
    ("slstm", 4, 8, 2, 24),
    ("lstm", 13, 3, 1, 64),
    ("slstm", 1, 6, 1, 150),
]
_GPU_NEEDED = "no GPU"
_AA_PAIRS = 11
# Assignments that brute force tries before it is stopped.
_LEAVES = 2000


@part
class FlashRNN(BaseClaim):
    """Recurrences and the solver of their tiles.

    Args:
        steps: T of the timed recurrences.
        pairs: rounds of each comparison.
        train_steps: of each model that learns parity.
    """

    steps: Annotated[int, Ge(1)] = 1024
    pairs: Annotated[int, Ge(1)] = 61
    train_steps: Annotated[int, Ge(1)] = 1500

    rows: ClassVar[tuple[int, ...]] = (116,)
    # Noisy with 15 pairs.

    def refuses(self, context: ExperimentContext) -> str | None:
        """The fused kernel needs a compiler."""
        return None if compiler() else "no C++ compiler for the fused kernel"

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        from shoal.claims.bench.rnn import wrong

        context.progress("shapes", 0.02)
        fused = "reference" if as_baseline else "fused"
        result = wrong(fused, _SHAPES, seed=context.seed, tolerance=1e-4)
        context.progress("systems of constraints", 0.05)
        saved, seconds, solved = _systems(as_baseline)
        metrics = {
            "wrong_shapes": PairedSamples(method=(float(result),)),
            "nodes_saved": PairedSamples(method=tuple(saved)),
        }
        details: dict[str, JsonValue] = {"systems": solved}
        if quick:
            return ClaimSamples(metrics=metrics, details=details)
        metrics["solve_s"] = PairedSamples(method=tuple(seconds))
        large = "reference" if as_baseline else "alternating"
        shape = [("lstm", 2, 3, 1, 2048)]
        metrics["wrong_2048"] = PairedSamples(
            method=(float(wrong(large, shape, seed=context.seed, tolerance=1e-4)),)
        )
        self._parity(context, metrics, details, as_baseline)
        bounds = self._timed(context, metrics, details, as_baseline)
        return ClaimSamples(
            metrics=metrics,
            skipped={"gpu_speedup": _GPU_NEEDED} if "gpu_speedup" not in metrics else {},
            bounds=bounds,
            profile=_profile(details),
            details=details,
        )

    def _parity(
        self,
        context: ExperimentContext,
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
        as_baseline: bool,
    ) -> None:
        from shoal.claims.bench.rnn import Parity, learn_parity

        learnt: dict[str, Parity] = {}
        for index, name in enumerate(("slstm", "lstm", "transformer")):
            begin = 0.08 + 0.12 * index

            def learn(name: str = name, begin: float = begin) -> Parity:
                return learn_parity(
                    name,
                    steps=self.train_steps,
                    seed=context.seed,
                    progress=lambda done: context.progress(f"parity, {name}", begin + 0.12 * done),
                )

            learnt[name] = context.remember(f"parity {name}", learn)
            shown = {"slstm": "transformer", "lstm": "transformer", "transformer": "lstm"}
            details[f"parity_{name}"] = {
                "parameters": learnt[name].parameters,
                "loss": learnt[name].loss,
                "accuracy": sum(learnt[name].right) / len(learnt[name].right),
            }
        for name in learnt:
            who = shown[name] if as_baseline else name
            metrics[f"{name}_parity"] = PairedSamples(method=learnt[who].right)

    def _timed(
        self,
        context: ExperimentContext,
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
        as_baseline: bool,
    ) -> dict[str, float]:
        """Times of all comparisons; the physical limits of their numbers."""
        import torch

        from shoal.claims.bench.rnn import compiled_loop, inputs, one_head, train_step
        from shoal.kernel.base import roof_s
        from shoal.kernel.dispatch import here
        from shoal.kernel.rnn.call import Recurrence

        machine: Machine = context.machine or here()
        bounds: dict[str, float] = {}
        milliseconds: dict[str, JsonValue] = {}
        ours = "reference" if as_baseline else "fused"

        def compare(
            name: str, method: object, baseline: object, at: float, call: Recurrence
        ) -> None:
            context.progress(name, at)
            timed = interleave(
                {"method": method, "baseline": baseline},  # type: ignore[dict-item]
                # That the loop is no faster than itself shows soon, and costs seconds a call.
                min(self.pairs, _AA_PAIRS) if as_baseline else self.pairs,
                warmup=1,
                seed=context.seed,
            )
            metrics[name] = PairedSamples(
                method=timed.seconds["method"], baseline=timed.seconds["baseline"]
            )
            slow, fast = timed.median("baseline").value, timed.median("method").value
            roof = roof_s(call, machine)
            bounds[name] = slow / roof
            milliseconds[name] = {
                "method": 1e3 * fast,
                "baseline": 1e3 * slow,
                "roofline": 1e3 * roof,
            }

        for index, batch in enumerate((1, 4, 16)):
            given = inputs("lstm", batch, self.steps, 12, 64, seed=context.seed)
            compare(
                f"speedup_b{batch}",
                train_step(given, "lstm", ours),
                train_step(given, "lstm", "reference"),
                0.45 + 0.1 * index,
                Recurrence("lstm", batch, self.steps, 12, 64, backward=True),
            )
        given = inputs("lstm", 1, self.steps, 12, 64, seed=context.seed)
        compare(
            "fused_over_alternating",
            train_step(given, "lstm", "alternating" if as_baseline else "fused"),
            train_step(given, "lstm", "alternating"),
            0.75,
            Recurrence("lstm", 1, self.steps, 12, 64, backward=True),
        )
        for batch in (1, 16):
            layer, peer = one_head(batch, self.steps, 256, seed=context.seed, backend=ours)
            compare(
                f"one_head_b{batch}",
                layer,
                peer,
                0.8 if batch == 1 else 0.85,
                Recurrence("lstm", batch, self.steps, 1, 256, backward=True),
            )
        if not as_baseline:
            context.progress("other functions, and torch.compile", 0.92)
            others = {
                function: train_step(
                    inputs(function, 1, self.steps, 12, 64, seed=context.seed), function, "fused"
                )
                for function in ("slstm", "gru", "elman")
            }
            compiled = {"compiled loop": compiled_loop(given, "lstm")}
            timed = interleave({**others, **compiled}, 3, warmup=1, seed=context.seed)
            milliseconds["others"] = {
                name: 1e3 * timed.median(name).value for name in timed.seconds
            }
        if torch.cuda.is_available():
            device = [
                one.detach().cuda().requires_grad_()
                for one in inputs("lstm", 16, self.steps, 12, 64, seed=context.seed)
            ]
            compare(
                "gpu_speedup",
                train_step(device, "lstm", "reference" if as_baseline else "triton"),
                train_step(device, "lstm", "reference"),
                0.97,
                Recurrence("lstm", 16, self.steps, 12, 64, device="cuda", backward=True),
            )
        details["milliseconds"] = milliseconds
        details["threads"] = torch.get_num_threads()
        return bounds


def _systems(as_baseline: bool) -> tuple[list[float], list[float], dict[str, JsonValue]]:
    """How many fewer nodes the solver visits than brute force, and its seconds, a system each.

    Brute force is stopped once it has tried as many assignments as the threshold asks for.
    """
    texts = {
        "recurrence": recurrence_system(RecurrenceShape(batch=16), _CPU),
        "one head": recurrence_system(RecurrenceShape(hidden=256, heads=1, batch=16), _CPU),
        "recurrence on a GPU": recurrence_system(RecurrenceShape(number_bytes=2), _GPU),
        "linear": linear_system(LinearShape(m=4, n=4096, k=11008), _CPU),
    }
    saved, seconds, result = [], [], dict[str, JsonValue]()
    for name, text in texts.items():
        system = parse(text)
        started = time.perf_counter()
        solution = solve(text)
        solved_s = time.perf_counter() - started
        tried = solution.nodes
        # All of the box must be tried to know what is best; the search stops at a limit.
        started = time.perf_counter()
        _, leaves, whole = brute_force(system, max_leaves=_LEAVES)
        stopped_s = time.perf_counter() - started
        brute = leaves if whole else system.box
        saved.append(1.0 if as_baseline else brute / tried)
        seconds.append(stopped_s if as_baseline else solved_s)
        result[name] = {
            "nodes": tried,
            "box": system.box,
            "seconds": solved_s,
            "brute_force_s": stopped_s,
            "objective": solution.objective,
        }
    return saved, seconds, result


def _profile(details: dict[str, JsonValue]) -> str:
    times = details.get("milliseconds")
    lines = []
    if isinstance(times, dict):
        for name, result in times.items():
            if isinstance(result, dict):
                inner = ", ".join(f"{key} {value:.3g}" for key, value in result.items())
                lines.append(f"{name} [ms]: {inner}")
    return "; ".join(lines)
