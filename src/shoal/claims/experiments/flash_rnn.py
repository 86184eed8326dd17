"""[116] FlashRNN: recurrences whose matrices stay next to the arithmetic, and ConstrINT.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024.

An LSTM of 12 heads of 64 units over 1024 steps, both passes, against a loop in Python and the
alternating kernel; one head of 256 against ``torch.nn.LSTM``; parity learnt at up to 40 bits and
tested at 256, beside a transformer; constraints solved beside brute force. The A/A run has the
loop, the transformer (a recurrence in its own place) and brute force.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import Arm, ClaimRun
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
_AA_PAIRS = 11

# Assignments that brute force tries before it is stopped.
_LEAVES = 2000


@part
class FlashRNN(BaseClaim, row=116, needs=("c++",)):
    """Recurrences and the solver of their tiles.

    Args:
        steps: T of the timed recurrences.
        pairs: rounds of each comparison.
        train_steps: steps of each model that learns parity.
    """

    steps: Annotated[int, Ge(1)] = 1024
    pairs: Annotated[int, Ge(1)] = 61
    train_steps: Annotated[int, Ge(1)] = 1500

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.bench.rnn import wrong

        run.progress("shapes", 0.02)
        fused = run.pick("fused", "reference")
        run.put("wrong_shapes", wrong(fused, _SHAPES, seed=run.seed, tolerance=1e-4))
        run.progress("systems of constraints", 0.05)
        saved, seconds = _systems(run.as_baseline)
        run.put("nodes_saved", saved)
        if run.quick:
            return
        run.put("solve_s", seconds)
        large = run.pick("alternating", "reference")
        shape = [("lstm", 2, 3, 1, 2048)]
        run.put("wrong_2048", wrong(large, shape, seed=run.seed, tolerance=1e-4))
        self._parity(run)
        self._time(run)

    def _parity(self, run: ClaimRun) -> None:
        from shoal.claims.bench.rnn import Parity, learn_parity

        learnt: dict[str, Parity] = {}
        for index, name in enumerate(("slstm", "lstm", "transformer")):
            begin = 0.08 + 0.12 * index

            def learn(name: str = name, begin: float = begin) -> Parity:
                return learn_parity(
                    name,
                    steps=self.train_steps,
                    seed=run.seed,
                    progress=lambda done: run.progress(f"parity, {name}", begin + 0.12 * done),
                )

            learnt[name] = run.remember(f"parity {name}", learn)
        swaps = {"slstm": "transformer", "lstm": "transformer", "transformer": "lstm"}
        for name, parity in run.arms(learnt, swaps).items():
            run.put(f"{name}_parity", parity.right)

    def _time(self, run: ClaimRun) -> None:
        """Times of all comparisons, and the physical limits of their numbers."""
        import torch

        from shoal.claims.bench.rnn import compiled_loop, inputs, one_head, train_step
        from shoal.kernel.base import roof_s
        from shoal.kernel.dispatch import here
        from shoal.kernel.rnn.call import Recurrence

        machine: Machine = run.context.machine or here()
        said: list[str] = []
        # That the loop is no faster than itself shows soon, and costs seconds a call.
        pairs = run.pick(self.pairs, min(self.pairs, _AA_PAIRS))
        steps, seed = self.steps, run.seed
        ours = run.pick("fused", "reference")

        def compare(name: str, method: Arm, baseline: Arm, at: float, call: Recurrence) -> None:
            run.progress(name, at)
            arms = {"method": method, "baseline": baseline}
            timed = run.race(arms, pairs, warmup=1, swaps={})
            slow, fast = (statistics.median(timed[arm]) for arm in ("baseline", "method"))
            roof = roof_s(call, machine)
            run.put(name, timed["method"], timed["baseline"], bound=slow / roof)
            taken = f"{1e3 * fast:.3g} beside {1e3 * slow:.3g}, roofline {1e3 * roof:.3g}"
            said.append(f"{name} [ms]: {taken}")

        for index, batch in enumerate((1, 4, 16)):
            given = inputs("lstm", batch, steps, 12, 64, seed=seed)
            compare(
                f"speedup_b{batch}",
                train_step(given, "lstm", ours),
                train_step(given, "lstm", "reference"),
                0.45 + 0.1 * index,
                Recurrence("lstm", batch, steps, 12, 64, backward=True),
            )
        given = inputs("lstm", 1, steps, 12, 64, seed=seed)
        compare(
            "fused_over_alternating",
            train_step(given, "lstm", run.pick("fused", "alternating")),
            train_step(given, "lstm", "alternating"),
            0.75,
            Recurrence("lstm", 1, steps, 12, 64, backward=True),
        )
        for batch in (1, 16):
            layer, peer = one_head(batch, steps, 256, seed=seed, backend=ours)
            compare(
                f"one_head_b{batch}",
                layer,
                peer,
                0.8 if batch == 1 else 0.85,
                Recurrence("lstm", batch, steps, 1, 256, backward=True),
            )
        if not run.as_baseline:
            run.progress("other functions, and torch.compile", 0.92)
            others: dict[str, Arm] = {
                function: train_step(
                    inputs(function, 1, steps, 12, 64, seed=seed), function, "fused"
                )
                for function in ("slstm", "gru", "elman")
            }
            others["compiled loop"] = compiled_loop(given, "lstm")
            timed = run.race(others, 3, warmup=1)
            said += [f"{n} [ms]: {1e3 * statistics.median(s):.3g}" for n, s in timed.items()]
        if torch.cuda.is_available():
            device = [
                one.detach().cuda().requires_grad_()
                for one in inputs("lstm", 16, steps, 12, 64, seed=seed)
            ]
            compare(
                "gpu_speedup",
                train_step(device, "lstm", run.pick("triton", "reference")),
                train_step(device, "lstm", "reference"),
                0.97,
                Recurrence("lstm", 16, steps, 12, 64, device="cuda", backward=True),
            )
        else:
            run.skip("no GPU", "gpu_speedup")
        run.profile = "; ".join(said)


def _systems(as_baseline: bool) -> tuple[list[float], list[float]]:
    """How many fewer nodes the solver visits than brute force, and its seconds, a system each.

    Brute force is stopped once it has tried as many assignments as the threshold asks for.
    """
    texts = (
        recurrence_system(RecurrenceShape(batch=16), _CPU),
        recurrence_system(RecurrenceShape(hidden=256, heads=1, batch=16), _CPU),
        recurrence_system(RecurrenceShape(number_bytes=2), _GPU),
        linear_system(LinearShape(m=4, n=4096, k=11008), _CPU),
    )
    saved, seconds = [], []
    for text in texts:
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
    return saved, seconds
