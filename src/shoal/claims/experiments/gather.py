"""[80] GPU-oriented gather: is it faster to read scattered rows than to pack and copy them?

Source: Min et al., Large Graph Convolutional Network Training with GPU-Oriented Data Communication
Architecture, 2021.

Requests of 128-byte lines are counted in a compiled kernel with the access pattern of a warp for
each row, with and without the circular shift. Then GraphSAGE is trained on sampled batches of the
graph of packages, whose features (FastRP and hashed words, 602 wide) lie in a memory that is held
to a rate: at it, the rows of a batch, moved once, take as long as training on the batch. Staged
rows are read, written and read again there; direct ones are read once. Plans are compared with
epochs that are held and with one that is not. The A/A run stages both.
"""

from __future__ import annotations

import contextlib
import importlib.util
from functools import partial
from statistics import median

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.native import cpu_model
from shoal.core.parts import part
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.fields.graph.gnn.job import TrainGnnJob


@part
class GatherClaim(BaseClaim, row=80, needs=("torch",)):
    """Direct gathers beside staged ones.

    Args:
        rounds: of the timing.
        epochs: of the trainings whose accuracy is compared.
        gpu_table_bytes: of the table that a GPU gathers from.
    """

    rounds: int = 5
    epochs: int = 5
    gpu_table_bytes: float = 2e10

    def collect(self, run: ClaimRun) -> None:
        """Requests, bytes and losses; the full run has packages, and times epochs."""
        from shoal.claims.lab.gather_arms import graph_with_features, requests_of_rows

        for width in (100, 129, 257, 602, 64):
            shifted = requests_of_rows(width, aligned=run.pick(True, False))
            run.put(f"requests_{width}", shifted, requests_of_rows(width, aligned=False))
        graph = "planted:2000" if run.quick else "packages"
        job = TrainGnnJob(data=graph, fanouts=(10, 10), epochs=self.epochs, seed=run.seed)
        data = run.remember("graph", partial(graph_with_features, job))
        self._learn(run, job, data)
        if not run.quick:
            self._time(run, job, data)
            self._gpu(run)

    def _learn(self, run: ClaimRun, job: TrainGnnJob, data: ClassifiedGraph) -> None:
        """Bytes of the host, accuracies and losses, by the training of the job itself."""
        from shoal.claims.lab.gather_arms import learned
        from shoal.kernel.threads import torch_threads

        run.progress("training", 0.2)
        with torch_threads(1):
            staged, direct = (
                run.remember(f"training {name}", partial(learned, job, data, name))
                for name in ("staged", run.pick("direct", "staged"))
            )
        run.put("host_bytes", direct[1], staged[1])
        run.put("test_accuracy", direct[0].test, staged[0].test)
        losses = zip(direct[0].losses, staged[0].losses, strict=True)
        run.put("other_losses", [float(one != other) for one, other in losses])
        run.details["test_accuracy"] = direct[0].test

    def _time(self, run: ClaimRun, job: TrainGnnJob, data: ClassifiedGraph) -> None:
        from shoal.claims.lab import gather_arms as arms
        from shoal.fields.graph.gnn.batches import plan_batches
        from shoal.fields.graph.gnn.costs import rates_of
        from shoal.kernel.threads import torch_threads
        from shoal.machine import load

        with torch_threads(1):
            rate = run.remember("rate", partial(arms.matched_rate, job, data))
        free = job.model_copy(update={"aggregator": arms.MEAN})
        held = free.model_copy(update={"host_bytes_per_s": rate})
        made = {name: arms.epoch_arm(held, name, data) for name in ("direct", "staged")}
        made["direct, not held"] = arms.epoch_arm(free, "direct", data)
        peer = importlib.util.find_spec("torch_geometric") is not None and not run.as_baseline
        if peer:
            made["peer"] = arms.epoch_arm(held, arms.GeometricStaged(), data)
        machine = run.context.machine or load("laptop")
        machine = machine.model_copy(update={"fingerprint": {"cpu": cpu_model()}})
        predicted = {}
        for one, more in ((held, ""), (free, ", not held")):
            for plan in plan_batches(one, machine, data, rates_of(machine)):
                predicted[f"{plan.job.placement}{more}"] = plan.predicted["epoch_s"].value
        run.progress("timing epochs", 0.5)
        epochs, pairs = {name: one for name, (one, _) in made.items()}, ("direct", "staged")
        seconds = run.versus(epochs, {"epoch": pairs}, self.rounds, warmup=1, threads=1)
        medians = {name: median(one) for name, one in seconds.items()}
        known = [name for name in medians if name in predicted]
        run.put("epoch_error", [abs(predicted[name] / medians[name] - 1) for name in known])
        if peer:
            run.put_peer("epoch", seconds["staged"], seconds["peer"])
        for _, source in made.values():
            source.close()
        run.details |= {"host_bytes_per_s": rate, "predicted_s": predicted, "seconds": medians}
        run.details["counters"] = {name: str(one.counters()) for name, (_, one) in made.items()}

    def _gpu(self, run: ClaimRun) -> None:
        import torch

        from shoal.claims.lab.gather_arms import gpu_gathers

        if run.lacks(None if torch.cuda.is_available() else "no GPU", "gpu_gather"):
            return
        with contextlib.ExitStack() as stack:
            arms = gpu_gathers(stack, self.gpu_table_bytes, 100_000)
            run.versus(arms, {"gpu_gather": ("gpu direct", "gpu staged")}, 21)
