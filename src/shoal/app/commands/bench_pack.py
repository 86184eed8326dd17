"""``shoal bench pack``: what a strided type becomes, and what packs it here."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["pack"]


def pack(
    datatype: Annotated[
        str, typer.Argument(help="A type such as vector(13, 100, 128, float32), or a slice.")
    ],
    count: Annotated[int, typer.Option(help="Such types, one behind the other.", min=0)] = 1,
) -> None:
    """Explain a strided type: rule by rule to its canonical form, and what packs it here.

    Constructors are named, contiguous, vector, hvector, subarray, resized, indexed, hindexed
    and struct, as in MPI.

    **Examples**

        shoal bench pack "vector(13, 100, 128, float32)"

        shoal bench pack "hvector(47, 1, 131072, vector(13, 100, 128, byte))" --count 2

        shoal bench pack "float32[256, 256, 256][:, 0, ::2]"
    """
    from shoal.kernel.strided.explain import explain

    typer.echo(explain(datatype, count=count))
