"""How a Triton kernel is judged: against its reference, then in turn with its peers.

Prediction: the kernel's own estimate on the priced machine. A peer whose result is not the
reference's is an error, not a ratio.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gpu.frame import Case
from gpu.place import Place
from gpu.timing import timed
from shoal.kernel.base import roof_s
from shoal.kernel.dispatch import kernels_of

# Of the largest number of the reference. Triton's interpreter cuts what a GPU rounds.
_CLOSE = 2e-2


class Problem(NamedTuple):
    """A call, what it is given, and whom it is compared with.

    Args:
        call: of a kernel.
        constants: that it is prepared with.
        given: each call.
        peers: name -> the same by a library; the backends of the operator named here are prepared.
        backends: of the same operator, beside it.
        gradients: of so many inputs, the first ones, are computed too, from the first result.
    """

    call: Any
    constants: tuple[Any, ...]
    given: tuple[Any, ...]
    peers: dict[str, Callable[..., Any]] = {}
    backends: tuple[str, ...] = ()
    gradients: int = 0


Problems = Iterator[tuple[str, Callable[[], Problem]]]
"""Names, each with what makes its problem when its turn comes."""


def cases_of(place: Place, problems: Problems) -> Iterator[Case]:
    """A case a problem."""
    for name, make in problems:
        made = functools.cache(make)
        yield Case(name, 40.0, functools.partial(_predict, place, made),
                   functools.partial(_measure, place, made))  # fmt: skip


def _predict(place: Place, make: Callable[[], Problem]) -> dict[str, Any]:
    call = make().call
    on_card = dataclasses.replace(call, device="cuda")
    estimate = kernels_of(call.op)["triton"].estimate(on_card, place.machine)
    return {"seconds": estimate.step_s.value, "limit_s": roof_s(call, place.machine)}


def _measure(place: Place, make: Callable[[], Problem]) -> dict[str, Any]:
    problem = make()
    call, kernels = problem.call, kernels_of(problem.call.op)
    with torch.set_grad_enabled(problem.gradients > 0):
        ready = kernels["triton"].prepare(call, *problem.constants)
        methods = {"triton": ready}
        for name in problem.backends:
            if kernels[name].refuses(call) is None:
                methods[name] = kernels[name].prepare(call, *problem.constants)
        methods |= problem.peers
        if problem.gradients:
            methods = {
                name: functools.partial(_both, problem.gradients, run)
                for name, run in methods.items()
            }
        wanted = _reference(problem)
        errors = {
            name: _apart(run(*_fresh(problem.given)), wanted) for name, run in methods.items()
        }
        wrong = {name: error for name, error in errors.items() if not error <= _CLOSE}
        if wrong:
            raise ArithmeticError(f"these differ from the reference: {wrong}")
        calls = {n: functools.partial(run, *_fresh(problem.given)) for n, run in methods.items()}
        result = timed(place, calls)
    share = roof_s(call, place.machine) / result["seconds"]
    return {**result, "errors": errors, "share_of_limit": share}


def _fresh(given: tuple[Any, ...]) -> list[Any]:
    """Copies: some kernels write to what they are given."""
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in given]


def _reference(problem: Problem) -> Any:
    """What the reference gives: on the CPU, where it knows nothing else."""
    call, kernel = problem.call, kernels_of(problem.call.op)["reference"]
    constants, given = list(problem.constants), _fresh(problem.given)
    if kernel.refuses(call) is not None:
        call = dataclasses.replace(call, device="cpu")
        constants, given = ([x.cpu() if isinstance(x, torch.Tensor) else x for x in some]
                            for some in (constants, given))  # fmt: skip
    run = kernel.prepare(call, *constants)
    return _both(problem.gradients, run, *given) if problem.gradients else run(*given)


def _both(count: int, run: Callable[..., Any], *given: Any) -> list[torch.Tensor]:
    """The first result, and the gradients of half its sum of squares by the first inputs."""
    leaves = [one.requires_grad_() for one in given[:count]]
    out = run(*given)
    first = out[0] if isinstance(out, tuple) else out
    return [first, *torch.autograd.grad(first, leaves, first.detach())]


def _apart(result: Any, wanted: Any) -> float:
    """The largest difference, over the largest number wanted."""
    if isinstance(wanted, tuple | list):
        return max(_apart(one, other) for one, other in zip(result, wanted, strict=True))
    a, b = (x.detach().cpu().double() for x in (result, wanted))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
