"""``shoal explain sbp``: which placement should every tensor of a module have?"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from shoal.core.config import parse
from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table
from shoal.ir import Explanation, Machine, Progress
from shoal.ir.placement import parse_mesh
from shoal.parallel.placed.build import load
from shoal.plan.sbp.search import MeshRates, place


@part
class SbpStudy:
    """Choose split, broadcast or partial placement for every tensor of a module (SBP), with boxing.

    FILE is a program of yours and is executed. It defines `build()`, which returns a
    `torch.nn.Module` and the shapes of its inputs, such as `return Mlp(), [(8, 128, 512)]`;
    instead of a shape it may give a tensor, such as one of token numbers. Everything that
    `--show` names can be pinned; the result is pinned to B if you do not.

    **Examples**

        shoal explain sbp model.py --mesh 2x4 --show

        shoal explain sbp model.py --mesh 4 --pin x=B --pin down=B --memory 2e9

    Args:
        file: a Python file; it is executed.
        mesh: ranks of each axis, such as 4 or 2x4.
        pin: TENSOR=PLACEMENT, such as x=S(0),B.
        memory: bytes of a rank; a plan that needs more is none.
        flops: operations a second of a rank; 4e14 if not given.
        bandwidth: bytes a second that a rank sends; 5e10.
        latency: seconds of a collective besides its bytes; 5e-6.
        show: show every operation, not weights and boxing alone.
    """

    subject: ClassVar = "file"
    machine: ClassVar = None

    file: Path
    mesh: str
    pin: tuple[str, ...] = ()
    memory: float | None = None
    flops: float | None = None
    bandwidth: float | None = None
    latency: float | None = None
    show: bool = False

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """Placements of the weights, what is boxed, and what it costs."""
        pins: dict[str, str] = {}
        for word in self.pin:
            name, separator, placement = word.partition("=")
            if not separator:
                raise PlanError(f"--pin {word}: expected TENSOR=PLACEMENT, such as x=S(0),B")
            pins[name.strip()] = placement.strip()
        given = {
            "flops_per_s": self.flops,
            "bytes_per_s": self.bandwidth,
            "latency_s": self.latency,
        }
        raw = {key: value for key, value in given.items() if value is not None}
        rates = parse(MeshRates, raw, where="rates")
        traced, sizes = load(self.file), parse_mesh(self.mesh)
        pins.setdefault(traced.result, ",".join("B" * len(sizes)))
        plan = place(traced.graph, sizes, pins=pins, rates=rates, memory_limit=self.memory)
        blocks: list[Table | str] = [
            Table(
                title="weights",
                columns=("weight", "shape", "placement"),
                rows=tuple(
                    (name, "x".join(map(str, tensor.shape)), plan.placements[name])
                    for name, tensor in traced.weights.items()
                ),
            )
        ]
        if self.show:
            blocks.append(
                Table(
                    title="operations",
                    columns=("result", "operation", "takes", "placement"),
                    rows=tuple(
                        (
                            op.name,
                            op.kind,
                            "; ".join(plan.inputs[op.name]),
                            plan.placements[op.name],
                        )
                        for op in traced.graph.ops
                    ),
                )
            )
        inputs = ", ".join(f"{name} {plan.placements[name]}" for name in traced.inputs)
        blocks += [
            Table(
                title="boxing",
                columns=("tensor", "from", "to", "steps", "bytes of all ranks"),
                rows=tuple(
                    (
                        move.tensor,
                        move.source,
                        move.target,
                        ", ".join(move.steps),
                        human_bytes(move.bytes),
                    )
                    for move in plan.moves
                    if self.show or move.bytes
                ),
                right="    r",
            ),
            f"inputs: {inputs}; result: {traced.result} {plan.placements[traced.result]}",
            f"{1e3 * plan.seconds:,.4g} ms forward, {human_bytes(plan.boxing_bytes)} sent, "
            f"{human_bytes(plan.memory_bytes)} of memory on the fullest rank; by {plan.method}",
        ]
        return Explanation(blocks=tuple(blocks), data=plan.model_dump(mode="json"))
