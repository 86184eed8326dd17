"""``shoal plan sync``: how often should workers agree over this network?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["sync"]


def sync(
    model: Annotated[str, typer.Argument(help="Model: name, directory or shape file.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 16xA100, or a file.")
    ] = "16xA100",
    workers: Annotated[
        int | None, typer.Option(help="Data-parallel ranks; all devices if not given.", min=2)
    ] = None,
    gbit_per_s: Annotated[
        float | None, typer.Option(help="Of the slowest link, in the place of the machine's.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 2048,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences of a step; 8 a worker if not given.", min=2)
    ] = None,
    tau: Annotated[
        int | None,
        typer.Option(help="Steps of a round; the fewest that hide an average if not given.", min=1),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw who computes and waits when.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Sum gradients in every step, or average once a round, or behind the next round?

    Every way is priced for the same job; nothing runs. What rounds cost in loss is not priced:
    see the claim co2. **Examples**

        shoal plan sync gpt2-xl --machine 16xA100 --gbit-per-s 10

        shoal plan sync Llama-3.2-1B -m 32xH100 --workers 4 --tau 8 --svg rounds.svg
    """
    from shoal.app.show import as_json, table
    from shoal.core.files import write_atomic
    from shoal.core.sizes import human_bytes
    from shoal.ir import Parallel, TrainJob
    from shoal.machine.described import load
    from shoal.plan.rounds import rounds_picture, ways

    target = load(machine)
    if gbit_per_s is not None:
        far = next((one for one in ("wan", "node", "device", "loopback") if target.link(one)), None)
        links = tuple(
            link.model_copy(update={"bandwidth": gbit_per_s * 1e9 / 8})
            if link.scope == far
            else link
            for link in target.links
        )
        target = target.model_validate({**target.model_dump(), "links": links})
    dp = workers or target.num_devices
    job = TrainJob(
        model=model,
        seq_len=seq_len,
        global_batch=global_batch or 8 * dp,
        microbatch=1,
        parallel=Parallel(dp=dp),
    )
    found = ways(job, target, tau=tau)
    if svg is not None:
        write_atomic(svg, rounds_picture(found))
    if output is Format.json:
        as_json(
            {
                "alone_s": found.alone_s,
                "average_s": found.average_s,
                "ways": [way._asdict() for way in found.found],
            }
        )
        return
    table(
        f"{model}, {dp} workers on {target.name}: a step takes {found.alone_s:.3g} s alone, "
        f"an average travels {found.average_s:.3g} s",
        ("sync", "tau", "step", "waits", "sent/step"),
        [
            (
                way.name,
                str(way.tau),
                f"{way.step_s:.3g} s",
                f"{100 * way.waits_s / way.step_s:.0f} %",
                human_bytes(int(way.sent_bytes)),
            )
            for way in found.found
        ],
        numeric=" rrrr",
    )
