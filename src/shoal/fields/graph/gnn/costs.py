"""What training costs: the rates of a machine.

Rates are timed here in about a second, and kept in ``gnn.json`` of Shoal's home for this processor;
a machine that is only described is taken to have such cores, by their peak rate.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.extras import require_extra
from shoal.fields.graph.gnn.protocols import GnnRates
from shoal.fields.rates import least_seconds, machine_rates
from shoal.ir import Machine

# FLOP/s in fp32 of the core whose rates are below: one of Intel's Sapphire Rapids.
_FLOPS = 1.2e11
_THERE = GnnRates(
    flop_s=2e-11, number_s=3e-9, gather_s=6e-9, call_s=2e-5, step_s=1.5e-4, spread=2.0
)
_SPREAD = 0.8


def rates_of(machine: Machine) -> GnnRates:
    """How fast a core of a machine is: timed if it is this one, else by its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    return machine_rates(machine, "gnn.json", _THERE, timed, _FLOPS)


def timed() -> GnnRates:
    """Time the operators of a training step on one core of this machine."""
    require_extra("torch", purpose="timing a training step")
    import torch

    from shoal.kernel.threads import torch_threads

    # Vectors that are no longer in the caches of a core.
    rows, width, small = 50_000, 64, 16

    def step(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, times: int = 3) -> float:
        x.requires_grad_()

        def once() -> None:
            run(x).sum().backward()  # type: ignore[no-untyped-call]

        return least_seconds(once, times)[0]

    with torch_threads(1), torch.random.fork_rng(devices=[]):
        x = torch.randn(rows, width)
        matrix = torch.randn(6 * width, width, requires_grad=True)
        product = step(lambda x: torch.nn.functional.linear(x[: rows // 4], matrix), x)
        once = step(lambda x: torch.sigmoid(x), x.detach().clone())
        thrice = step(lambda x: torch.tanh(torch.sigmoid(x) * x), x.detach().clone())
        at = torch.randint(rows, (rows,))
        gather = step(lambda x: x[at], x.detach().clone())
        few = torch.randn(small, width)

        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(50):
                x = torch.tanh(x)
            return x

        calls = step(chain, few)
        gru = torch.nn.GRU(width, width)
        steps = step(lambda x: gru(x)[1], torch.randn(256, 1, width))
    number = max(thrice - once, 0.1 * thrice) / (2 * rows * width)
    return GnnRates(
        flop_s=product / (3 * 2 * (rows // 4) * 6 * width * width),
        number_s=number,
        gather_s=gather / (rows * width),
        call_s=calls / 50,
        step_s=steps / 256,
        spread=_SPREAD,
    )
