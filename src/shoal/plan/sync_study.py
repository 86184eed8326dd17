"""``shoal explain sync``: how often should workers agree over this network?"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.ir import Explanation, Machine, Parallel, Progress, TrainJob
from shoal.plan.rounds import rounds_picture, ways


@part
class SyncStudy:
    """Compare gradient synchronization in every step with local updates (Local SGD, DiLoCo, CO2).

    All methods are priced for the same job; nothing runs. Their effect on the loss is not priced:
    see the claim co2.

    **Examples**

        shoal explain sync gpt2-xl --machine 16xA100 --gbit-per-s 10

        shoal explain sync Llama-3.2-1B -m 32xH100 --workers 4 --tau 8 --picture rounds.svg

    Args:
        model: name, directory or shape file.
        workers: data-parallel ranks; all devices if not given.
        gbit_per_s: Gbit/s of the slowest link; overrides that of the machine.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step; 8 a worker if not given.
        tau: steps of a round; the smallest number that hides an all-reduce if not given.
    """

    subject: ClassVar = "model"
    machine: ClassVar = "16xA100"

    model: str
    workers: Annotated[int, Ge(2)] | None = None
    gbit_per_s: Annotated[float, Gt(0), Lt(1e9)] | None = None
    seq_len: Annotated[int, Ge(1)] = 2048
    global_batch: Annotated[int, Ge(2)] | None = None
    tau: Annotated[int, Ge(1)] | None = None

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """Every way to agree, and who computes and waits when."""
        if self.gbit_per_s is not None:
            machine = _slowed(machine, self.gbit_per_s * 1e9 / 8)
        dp = self.workers or machine.num_devices
        job = TrainJob(
            model=self.model,
            seq_len=self.seq_len,
            global_batch=self.global_batch or 8 * dp,
            microbatch=1,
            parallel=Parallel(dp=dp),
        )
        result = ways(job, machine, tau=self.tau)
        shown = Table(
            title=f"{self.model}, {dp} workers on {machine.name}: a step takes "
            f"{digits(result.alone_s)} s alone, an average travels {digits(result.average_s)} s",
            columns=("sync", "tau", "step", "waits", "sent/step"),
            rows=tuple(
                (
                    way.name,
                    str(way.tau),
                    f"{digits(way.step_s)} s",
                    f"{100 * way.waits_s / way.step_s:.0f} %",
                    human_bytes(int(way.sent_bytes)),
                )
                for way in result.options
            ),
            right=" rrrr",
        )
        return Explanation(
            blocks=(shown,),
            data={
                "alone_s": result.alone_s,
                "average_s": result.average_s,
                "ways": [way._asdict() for way in result.options],
            },
            picture=rounds_picture(result),
        )


def _slowed(machine: Machine, bandwidth: float) -> Machine:
    """The machine with this many bytes a second on the link between its farthest devices."""
    far = next((one for one in ("wan", "node", "device", "loopback") if machine.link(one)), None)
    links = [
        link.model_copy(update={"bandwidth": bandwidth}) if link.scope == far else link
        for link in machine.links
    ]
    return machine.model_validate({**machine.model_dump(), "links": links})
