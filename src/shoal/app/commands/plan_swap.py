"""``shoal plan swap``: how many bytes of activations are swapped, and how many computed again?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.plan.swap import Iteration, Swappable

__all__ = ["curve_of", "show_curve", "swap"]

# Bytes of a parameter: fp32 weight, gradient and two moments.
_WORD, _STATE = 4.0, 12.0


def swap(
    forward: Annotated[float, typer.Option(help="Seconds that the forward pass computes.")],
    backward: Annotated[float, typer.Option(help="Seconds that the backward pass computes.")],
    again: Annotated[float, typer.Option(help="Seconds of computing all activations again.")],
    activations: Annotated[str, typer.Option(help="Bytes of activations, such as 116MiB.")],
    parameters: Annotated[float, typer.Option(help="Parameters; all state is on the disk.")],
    disk: Annotated[str, typer.Option(help="Bytes of the disk, each way, in a second.")] = "2GB",
    link: Annotated[str, typer.Option(help="Bytes from device to host, and back.")] = "20GB",
    host_free: Annotated[str, typer.Option(help="Bytes of the host for activations.")] = "1GiB",
    tensors: Annotated[int, typer.Option(help="Tensors that activations are cut into.")] = 100,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """How many bytes of activations should a step swap, and how many compute again?

    Nine amounts and the best, as `offload: fuyou` chooses it (Fuyou). Tensors are worth more or
    less: the seconds of a byte fall evenly, from twice the mean to nothing. **Examples**

        shoal plan swap --forward 1 --backward 2 --again 1 --activations 4GB --parameters 1e8

        shoal plan swap --forward 1 --backward 2 --again 1 --activations 4G --parameters 8e7 -o json
    """
    from shoal.core.errors import require
    from shoal.core.sizes import bytes_of
    from shoal.plan.swap import Iteration, Swappable, Tensor

    sizes = {
        "activations": bytes_of(activations),
        "disk": bytes_of(disk),
        "link": bytes_of(link),
    }
    for name, size in sizes.items():
        require(size >= 1, f"--{name}", size, expected="at least 1 byte")
    require(1 <= tensors <= 100_000, "--tensors", tensors, expected="1 to 100,000")
    for name, value in (("forward", forward), ("backward", backward), ("again", again)):
        require(0 <= value < 1e9, f"--{name}", value, expected="seconds from 0")
    require(1 <= parameters < 1e15, "--parameters", parameters, expected="at least 1")
    iteration = Iteration(
        forward_s=forward,
        backward_s=backward,
        forward_fetched=_WORD * parameters,
        backward_fetched=_WORD * parameters,
        gradients=_WORD * parameters,
        optimizer_read=_STATE * parameters,
        optimizer_written=_STATE * parameters,
        free_host=bytes_of(host_free),
        down=sizes["link"],
        up=sizes["link"],
        read=sizes["disk"],
        write=sizes["disk"],
    )
    each = max(1, sizes["activations"] // tensors)
    ordered = Swappable(
        [
            Tensor(nbytes=each, again_s=2 * again * (tensors - n - 0.5) / tensors**2)
            for n in range(tensors)
        ]
    )
    show_curve(iteration, ordered, output)


def curve_of(iteration: Iteration, ordered: Swappable) -> dict[str, Any]:
    """The best amount and nine others, as JSON has them."""
    from shoal.plan.swap import choose, curve

    _, best = choose(iteration, ordered)
    chosen, *points = [
        {"swapped": one.swapped, "seconds": one.seconds, "binds": list(one.binds)}
        for one in (best, *curve(iteration, ordered))
    ]
    return {"chosen": chosen, "curve": points}


def show_curve(iteration: Iteration, ordered: Swappable, output: Format) -> None:
    """Print the time of a step for nine amounts, and the best one."""
    from shoal.app.show import as_json, table
    from shoal.core.sizes import human_bytes
    from shoal.plan.swap import choose, curve

    if output is Format.json:
        as_json(curve_of(iteration, ordered))
        return
    _, best = choose(iteration, ordered)
    rows = [
        (
            human_bytes(one.swapped),
            human_bytes(one.spilled),
            f"{one.again_s:.3f} s",
            f"{one.seconds:.3f} s",
            *one.binds,
        )
        for one in curve(iteration, ordered)
    ]
    columns = ("swapped", "to the disk", "done again", "step", "forward", "backward")
    table("time of a step, and what binds it", columns, rows, numeric="rrrr  ")
    typer.echo(
        f"{human_bytes(best.swapped)} swapped: {best.seconds:.3f} s; {best.binds[0]} binds the "
        f"forward pass, {best.binds[1]} the backward pass"
    )
