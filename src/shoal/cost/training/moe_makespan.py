"""How long a mixture's layer takes whose tokens go in chunks, task by task.

Three streams work at once: the network between nodes, the links inside a node, and the experts'
products; :mod:`shoal.plan.experts.moe_overlap` draws them, simulates them as a schedule, and says
why.

Source: Pan et al., FSMoE, 2025, section 4.
"""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import mixture_layers
from shoal.cost.price.ops import stage_share
from shoal.cost.training.moe_tasks import MoePass, layer_of
from shoal.ir import Machine, ModelShape, TrainJob


def check_chunks(r: float, tokens: int) -> None:
    """Refuse more chunks than tokens.

    Raises:
        PlanError: says how many there may be.
    """
    require(
        1 <= r <= tokens,
        "chunks r",
        r,
        expected=f"from 1 to {tokens}, the tokens that a rank has",
        error=PlanError,
    )


def aheads(r: int) -> tuple[int, ...]:
    """How many chunks may be gathered before the first one is summed, less one."""
    return tuple(sorted({0, min(1, r - 1), min(2, r - 1)}))


def makespan(pass_: MoePass, r: int, slice_s: float = 0.0, *, one_link: bool = False) -> float:
    """Seconds of a pass in r chunks, whose streams work at once.

    Args:
        pass_: what tasks take.
        r: chunks.
        slice_s: s of the gradient reduction in the middle of the pass.
        one_link: everything that is sent waits for what was sent before.

    Raises:
        PlanError: more chunks than tokens.
    """
    check_chunks(r, pass_.tokens)
    run = _one_link if one_link else two_links
    return min(run(*pass_.at(r), r, ahead, slice_s) for ahead in aheads(r))


def two_links(
    there: float, beside: float, work: float, r: int, ahead: int, slice_s: float
) -> float:
    """Seconds of r chunks with links between nodes and inside them, so many ahead."""
    inside = device = 0.0
    between = r * there + slice_s
    gathered = []
    for step in range(r + ahead):
        if step < r:
            inside = max(inside, (step + 1) * there) + beside
            gathered.append(inside)
        if step >= ahead:
            device = max(device, gathered[step - ahead]) + work
            inside = max(inside, device) + beside
            between = max(between, inside) + there
    return between


def _one_link(
    there: float, beside: float, work: float, r: int, ahead: int, slice_s: float
) -> float:
    link = device = 0.0
    gathered = []
    for step in range(r + ahead):
        if step < r:
            link += there + beside
            gathered.append(link)
        if step >= ahead:
            device = max(device, gathered[step - ahead]) + work
            link = max(link, device) + beside + there
    return link + slice_s


def gained_s(job: TrainJob, shape: ModelShape, machine: Machine, microbatch: int) -> float:
    """Seconds of a micro-batch and the fullest stage by which chunks are faster than one.

    Below zero where so many cost more than they hide. Nothing is known of machines with one node,
    nor of experts that nodes share.
    """
    split = job.parallel
    known = machine.nodes > 1 and machine.link("node") and machine.devices_per_node % split.etp == 0
    if max(split.chunks) == 1 or not (known and split.folded and mixture_layers(shape)):
        return 0.0
    tokens = max(1, microbatch * job.seq_len // split.cp // split.tp)
    layer = layer_of(shape, machine, split, tokens, job.seq_len)
    forward, backward = (
        makespan(one, 1) - makespan(one, min(r, tokens))
        for one, r in zip((layer.forward, layer.backward), split.chunks, strict=True)
    )
    again = job.sends_again
    layers = mixture_layers(shape) * stage_share(shape, split.pp)
    return layers * (forward * (1 + again) + backward)
