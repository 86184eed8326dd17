"""How many bytes of activations to swap, and how many to compute again.

Every tensor that the backward pass needs can be sent away in the forward pass and fetched back, or
be computed again. A tensor is worth the seconds of recomputation that each of its bytes saves; the
A bytes that are worth most are swapped. More of them relieve the device and load the links:

    T(A) = max(forward) + max(backward), over resources:
    forward   compute | down: out(A) | up, read: parameters | write: spilled(A)
    backward  compute + again(A) | up: parameters + in(A) | down: gradients
              read: parameters + spilled(A) + optimizer | write: optimizer | update

where spilled(A) is what the host has no room for. Each term is convex in A, so T is, and its least
value is where it stops to fall.

Source: Liao et al., Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single
GPU (Fuyou), 2024, section 4.5.
Differs: a tensor's worth is in seconds as measured, and not in operations: those that are bound by
memory take longer than their operations suggest. With the operations of matrix products alone the
order is the paper's.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Value
from shoal.core.errors import PlanError, require


class SwapTensor(Value):
    """What can be swapped.

    Args:
        again_s: seconds of computing it again.
    """

    nbytes: PositiveInt
    again_s: NonNegativeFloat


class SwapIteration(Value):
    """The last micro-batch of a step, forward and backward, with everything swapped.

    Args:
        forward_s: the device computes in the forward pass.
        backward_s: the device computes in the backward pass, and nothing again.
        forward_fetched: bytes of parameters read for the forward pass.
        backward_fetched: bytes of parameters read for the backward pass.
        gradients: bytes that leave the device in the backward pass.
        optimizer_read: bytes that the optimizer reads from the disk.
        optimizer_written: bytes that it writes there.
        update_s: seconds that it computes.
        always: bytes that are always swapped: the blocks' inputs.
        free_host: bytes of the host for what is swapped.
        down: bytes per second from device to host.
        up: from host to device.
        read: from disk to host.
        write: from host to disk.
        before: micro-batches of the step before this one, after which nothing is updated.
    """

    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    forward_fetched: NonNegativeFloat = 0.0
    backward_fetched: NonNegativeFloat = 0.0
    gradients: NonNegativeFloat = 0.0
    optimizer_read: NonNegativeFloat = 0.0
    optimizer_written: NonNegativeFloat = 0.0
    update_s: NonNegativeFloat = 0.0
    always: NonNegativeFloat = 0.0
    free_host: NonNegativeFloat = 0.0
    down: PositiveFloat
    up: PositiveFloat
    read: PositiveFloat
    write: PositiveFloat
    before: NonNegativeInt = 0

    def times(self, swapped: float, again_s: float) -> Times:
        """An iteration in which so many bytes are swapped and so many seconds done again."""
        out = self.always + swapped
        spilled = max(0.0, out - self.free_host)
        forward = {
            "compute": self.forward_s,
            "down": out / self.down,
            "up": self.forward_fetched / self.up,
            "read": self.forward_fetched / self.read,
            "write": spilled / self.write,
        }
        read = self.backward_fetched + spilled + self.optimizer_read
        backward = {
            "compute": self.backward_s + again_s,
            "down": self.gradients / self.down,
            "up": (self.backward_fetched + out) / self.up,
            "read": read / self.read,
            "write": self.optimizer_written / self.write,
            "update": self.update_s,
        }
        return Times(
            swapped=int(swapped),
            spilled=int(spilled),
            again_s=again_s,
            forward_s=forward,
            backward_s=backward,
            before_s=self._earlier(swapped, again_s),
        )

    def _earlier(self, swapped: float, again_s: float) -> float:
        """Seconds of the micro-batches before: sums of gradients are read and written."""
        if not self.before:
            return 0.0
        one = self.model_copy(
            update={
                "optimizer_read": self.gradients,
                "optimizer_written": self.gradients,
                "update_s": 0.0,
                "before": 0,
            }
        )
        return self.before * one.times(swapped, again_s).seconds


class Times(Value):
    """An iteration with a choice of what is swapped.

    Args:
        swapped: bytes, apart from those that always are.
        spilled: bytes that go on to the disk.
        again_s: seconds of computing again.
        forward_s: of each resource in the forward pass.
        backward_s: of each resource in the backward pass.
        before_s: of the micro-batches before.
    """

    swapped: NonNegativeInt
    spilled: NonNegativeInt
    again_s: NonNegativeFloat
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    before_s: NonNegativeFloat = 0.0

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.before_s + max(self.forward_s.values()) + max(self.backward_s.values())

    @property
    def binds(self) -> tuple[str, str]:
        """The resource that binds the forward pass, and that of the backward pass."""
        one, other = self.forward_s, self.backward_s
        return max(one, key=lambda name: one[name]), max(other, key=lambda name: other[name])


class Swappable:
    """Tensors in the order of what each of their bytes is worth.

    Args:
        tensors: in any order; of equals the first come first.

    Attributes:
        order: their numbers.
    """

    def __init__(self, tensors: Sequence[SwapTensor]) -> None:
        worth = [tensor.again_s / tensor.nbytes for tensor in tensors]
        self.order = sorted(range(len(tensors)), key=lambda number: (-worth[number], number))
        self.nbytes, self.again_s = [0], [sum(tensor.again_s for tensor in tensors)]
        """After so many tensors, the bytes that are swapped and the seconds that are left."""
        for number in self.order:
            self.nbytes.append(self.nbytes[-1] + tensors[number].nbytes)
            self.again_s.append(max(0.0, self.again_s[-1] - tensors[number].again_s))

    def __len__(self) -> int:
        return len(self.order)

    def first(self, nbytes: float) -> int:
        """The most tensors that so many bytes have room for."""
        return bisect.bisect_right(self.nbytes, nbytes) - 1


def _least(ordered: Swappable, least: float) -> int:
    require(
        least <= ordered.nbytes[-1],
        "swapped bytes",
        least,
        expected=f"at most the {ordered.nbytes[-1]} that all tensors have",
        error=PlanError,
    )
    return bisect.bisect_left(ordered.nbytes, least)


def choose(
    iteration: SwapIteration, ordered: Swappable, *, least: float = 0.0
) -> tuple[int, Times]:
    """The number of tensors, from the first, that makes the iteration shortest, and its times.

    T is convex, so where one more tensor is no longer better, none further on is: a search by
    halves. Of equals the fewest.

    Args:
        iteration: as measured.
        ordered: what can be swapped.
        least: bytes that must be, for the job to fit.

    Raises:
        PlanError: there are fewer.
    """

    def at(count: int) -> Times:
        return iteration.times(ordered.nbytes[count], ordered.again_s[count])

    low, high = _least(ordered, least), len(ordered)
    while low < high:
        middle = (low + high) // 2
        if at(middle + 1).seconds < at(middle).seconds * (1 - 1e-12):
            low = middle + 1
        else:
            high = middle
    return low, at(low)


def curve(
    iteration: SwapIteration, ordered: Swappable, points: int = 9, *, least: float = 0.0
) -> list[Times]:
    """T(A) at evenly spread amounts, from the least to everything.

    Raises:
        PlanError: fewer than two points.
    """
    require(points >= 2, "points", points, expected="at least 2", error=PlanError)
    first = _least(ordered, least)
    low, high = ordered.nbytes[first], ordered.nbytes[-1]
    counts = [ordered.first(low + (high - low) * k / (points - 1)) for k in range(points)]
    return [iteration.times(ordered.nbytes[n], ordered.again_s[n]) for n in counts]
