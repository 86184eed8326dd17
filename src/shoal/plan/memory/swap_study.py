"""``shoal explain swap``: how many bytes of activations are swapped, how many computed again?"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le, Lt
from pydantic import Field

from shoal.core.parts import part
from shoal.core.sizes import Size, human_bytes
from shoal.core.tables import Table
from shoal.ir import Explanation, Progress
from shoal.plan.memory.swap import SwapIteration, Swappable, SwapTensor, choose, curve

# Bytes of a parameter: fp32 weight, gradient and two moments.
_WORD, _STATE = 4.0, 12.0
_Seconds = Annotated[float, Ge(0), Lt(1e9)]
_Bytes = Annotated[Size, Field(ge=1)]


@part
class SwapStudy:
    """Choose how many bytes of activations are swapped and how many are recomputed.

    Nine amounts and the best, as `offload: fuyou` chooses it (Fuyou). The recomputation time per
    byte is assumed to fall linearly, from twice the mean to 0.

    **Examples**

        shoal explain swap --forward 1 --backward 2 --again 1 --activations 4GB --parameters 1e8

    Args:
        forward: seconds of computation of the forward pass.
        backward: seconds of computation of the backward pass.
        again: seconds to recompute all activations.
        activations: bytes of activations, such as 116MiB.
        parameters: number of parameters; all state is on the disk.
        disk: byte/s of the disk in each direction.
        link: byte/s between device and host in each direction.
        host_free: bytes of host memory for activations.
        tensors: number of tensors into which the activations are divided.
    """

    machine: ClassVar = None

    forward: _Seconds
    backward: _Seconds
    again: _Seconds
    activations: _Bytes
    parameters: Annotated[float, Ge(1), Lt(1e15)]
    disk: _Bytes = 2 * 10**9
    link: _Bytes = 20 * 10**9
    host_free: Size = 2**30
    tensors: Annotated[int, Ge(1), Le(100_000)] = 100

    def explain(self, machine: None, progress: Progress) -> Explanation:
        """The time of a step for nine amounts, and the best one."""
        fetched = _WORD * self.parameters
        iteration = SwapIteration(
            forward_s=self.forward,
            backward_s=self.backward,
            forward_fetched=fetched,
            backward_fetched=fetched,
            gradients=fetched,
            optimizer_read=_STATE * self.parameters,
            optimizer_written=_STATE * self.parameters,
            free_host=self.host_free,
            down=self.link,
            up=self.link,
            read=self.disk,
            write=self.disk,
        )
        each, number = max(1, self.activations // self.tensors), self.tensors
        ordered = Swappable(
            [
                SwapTensor(nbytes=each, again_s=2 * self.again * (number - n - 0.5) / number**2)
                for n in range(number)
            ]
        )
        return curve_explained(iteration, ordered)


def curve_explained(iteration: SwapIteration, ordered: Swappable) -> Explanation:
    """The time of a step for nine amounts, and the best one."""
    _, best = choose(iteration, ordered)
    points = curve(iteration, ordered)
    shown = Table(
        title="step time and bottleneck",
        columns=("swapped", "to the disk", "done again", "step", "forward", "backward"),
        rows=tuple(
            (
                human_bytes(one.swapped),
                human_bytes(one.spilled),
                f"{one.again_s:.3f} s",
                f"{one.seconds:.3f} s",
                *one.binds,
            )
            for one in points
        ),
        right="rrrr  ",
    )
    chosen, *others = [
        {"swapped": one.swapped, "seconds": one.seconds, "binds": list(one.binds)}
        for one in (best, *points)
    ]
    return Explanation(
        blocks=(
            shown,
            f"{human_bytes(best.swapped)} swapped: {best.seconds:.3f} s; {best.binds[0]} binds "
            f"the forward pass, {best.binds[1]} the backward pass",
        ),
        data={"chosen": chosen, "curve": others},
    )
