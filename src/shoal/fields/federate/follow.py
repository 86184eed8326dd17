"""What the page of a run shows of a federation, from its events: curves, clients, fairness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.sizes import human_bytes
from shoal.core.svg import Chart, Series
from shoal.core.tables import Table, digits
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.job import FederatePlan

# Points of a curve; when there are twice as many, every second one is dropped.
_POINTS = 1000
# Clients of the table.
_SHOWN = 30


@dataclass
class ClientCounts:
    """What a client has done.

    Args:
        jobs: that it was given.
        arrived: updates of it that have arrived.
        used: of these, that were aggregated.
        stale: versions by which those were late, in all.
        most_stale: versions by which one of them was late.
        seconds: between assignment and arrival, in all.
        refused: of its messages.
        left: whether it has gone.
        loss: of its newest update.
    """

    jobs: int = 0
    arrived: int = 0
    used: int = 0
    stale: int = 0
    most_stale: int = 0
    seconds: float = 0.0
    refused: int = 0
    left: bool = False
    loss: float = 0.0

    @property
    def mean_s(self) -> float:
        """Seconds of a job."""
        return self.seconds / self.arrived if self.arrived else 0.0


class FederationFollower:
    """Counts the events of one run; what it holds grows with clients, and no further."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientCounts] = {}
        self._curve: list[tuple[float, float, float, float]] = []
        self._fairness: list[float] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Count it; other events say nothing here."""
        kind = event["kind"]
        if kind == "evaluate":
            row = ("seconds", "up_bytes", "accuracy", "loss")
            self._curve.append(tuple(float(event[key]) for key in row))  # type: ignore[arg-type]
            if len(self._curve) > 2 * _POINTS:
                del self._curve[1:-1:2]
        elif kind == "assign":
            client = self._of(event)
            client.jobs, client.left = client.jobs + 1, False
        elif kind == "arrive":
            client, stale = self._of(event), int(event["stale"])
            client.arrived += 1
            client.seconds += float(event["seconds"])
            client.stale += stale
            client.most_stale = max(client.most_stale, stale)
            client.loss = float(event["loss"])
        elif kind == "aggregate":
            for name in event["clients"]:
                self._clients.setdefault(str(name), ClientCounts()).used += 1
        elif kind == "refuse":
            self._of(event).refused += 1
        elif kind == "leave":
            self._of(event).left = True
        elif kind == "fairness":
            self._fairness = [float(one) for one in event["accuracy"]]

    def _of(self, event: Mapping[str, Any]) -> ClientCounts:
        return self._clients.setdefault(str(event["client"]), ClientCounts())

    def charts(self) -> Sequence[Chart]:
        """Accuracy and loss against time, accuracy against bytes, and of clients by rank."""
        if not self._curve:
            return []
        seconds, nbytes, accuracy, loss = map(list, zip(*self._curve, strict=True))
        percent = [100 * one for one in accuracy]
        last = f"{percent[-1]:.1f} % at the end"
        results = [
            Chart(
                title="Accuracy against time",
                description=f"Accuracy on the server's examples against time: {last}.",
                x_label="seconds",
                y_label="% right",
                series=[Series("accuracy", seconds, percent)],
            ),
            Chart(
                title="Accuracy against bytes",
                description="Accuracy on the server's examples against the bytes of updates that "
                f"had reached it: {last}, after {human_bytes(nbytes[-1])}.",
                x_label="MB to the server",
                y_label="% right",
                series=[Series("accuracy", [one / 1e6 for one in nbytes], percent)],
            ),
            Chart(
                title="Loss against time",
                description=f"Loss on the server's examples: {loss[-1]:.4g} at the end.",
                x_label="seconds",
                y_label="loss",
                series=[Series("loss", seconds, loss)],
            ),
        ]
        if len(self._fairness) > 1:
            shares = [100 * at / (len(self._fairness) - 1) for at in range(len(self._fairness))]
            values = [100 * one for one in self._fairness]
            results.append(
                Chart(
                    title="Accuracy of clients",
                    description="Accuracy of the last model on the examples of each client, the "
                    f"worst first: {values[0]:.1f} % to {values[-1]:.1f} %.",
                    x_label="% of the clients",
                    y_label="% right",
                    series=[Series("accuracy", shares, values)],
                )
            )
        return results

    def tables(self, plan: FederatePlan) -> Sequence[Table]:
        """Clients: those that were refused or are malicious first, then the slowest."""
        if not self._clients:
            return []
        names = [spec.name for spec in parse_clients(plan.job.clients)]
        malicious = set(names[: plan.job.attackers])
        order = sorted(
            self._clients.items(),
            key=lambda pair: (-pair[1].refused, pair[0] not in malicious, -pair[1].mean_s),
        )
        usual = sorted(one.mean_s for one in self._clients.values())[len(order) // 2]
        rows = []
        for name, one in order[:_SHOWN]:
            marks = [
                *(["malicious"] if name in malicious else []),
                *([f"refused {one.refused} times"] if one.refused else []),
                *(["gone"] if one.left else []),
                *(["slow"] if usual and one.mean_s > 2 * usual else []),
            ]
            rows.append(
                (
                    name,
                    ", ".join(marks) or "–",
                    f"{one.jobs:,}",
                    f"{one.used:,}",
                    f"{one.arrived - one.used:,}",
                    f"{digits(one.mean_s)} s",
                    digits(one.stale / one.arrived) if one.arrived else "–",
                    f"{one.most_stale:,}",
                    digits(one.loss),
                )
            )
        return [
            Table(
                title=f"clients, {len(rows)} of {len(order):,}, those to look at first",
                columns=(
                    "client",
                    "what to know",
                    "jobs",
                    "aggregated",
                    "not used",
                    "time of a job",
                    "late, versions",
                    "at most",
                    "last loss",
                ),
                rows=tuple(rows),
                right="  rrrrrrr",
            )
        ]
