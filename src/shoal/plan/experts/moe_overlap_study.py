"""``shoal explain moe-overlap``: in how many chunks should the tokens of experts travel?"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.ir import Explanation, Machine, Progress
from shoal.plan.experts.moe_overlap_picture import streams
from shoal.plan.experts.moe_step import MoeStepPlan, planned

_Count = Annotated[int, Ge(1)]


@part
class MoeOverlapStudy:
    """Overlap the exchange of experts' tokens with computation, in chunks of tokens.

    Links between nodes, links inside a node and devices work concurrently; forward and backward
    passes have separate chunks, and gradients are summed when the network is idle (FSMoE). Nothing
    runs.

    **Examples**

        shoal explain moe-overlap Mixtral-8x7B-v0.1

        shoal explain moe-overlap Qwen3-30B-A3B -m 32xA100 --tokens 2048 --picture streams.svg

        shoal explain moe-overlap Mixtral-8x22B-v0.1 --ep 8 --etp 4 -o json

        shoal explain moe-overlap Qwen3-30B-A3B --ep 64 --etp 1 --dispatch 2dh

    Args:
        model: a mixture of experts: name, directory or file.
        tokens: tokens of a rank and micro-batch.
        seq_len: tokens of a sequence.
        ep: expert-parallel ranks; one per node if not given.
        etp: tensor-parallel ranks of an expert; all of a node if not given.
        dispatch: all-to-all algorithm between nodes: flat, 1dh or 2dh.
        most: largest number of chunks to try.
    """

    subject: ClassVar = "model"
    machine: ClassVar = "64xH100"

    model: str
    tokens: _Count = 4096
    seq_len: _Count = 4096
    ep: _Count | None = None
    etp: _Count | None = None
    dispatch: Literal["flat", "1dh", "2dh"] = "flat"
    most: _Count = 32

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """The chunks of both passes, what one takes, and a layer's streams uncut and as chosen."""
        result = planned(
            self.model,
            machine,
            tokens=self.tokens,
            seq_len=self.seq_len,
            ep=self.ep,
            etp=self.etp,
            dispatch=self.dispatch,
            most=self.most,
        )
        split, layer = result.parallel, result.layer
        passes = Table(
            title=f"{self.model} on {machine.name}: ep {split.ep}, etp {split.etp}, "
            f"{self.tokens} tokens of a rank",
            columns=("pass", "chunks", "r in theory", "layer", "uncut", "faster", "held up by"),
            rows=tuple(
                (
                    name,
                    str(one.r),
                    f"{one.relaxed:.2f}",
                    f"{digits(1e3 * one.seconds)} ms",
                    f"{digits(1e3 * uncut)} ms",
                    f"{uncut / one.seconds:.2f}x",
                    one.bound,
                )
                for name, one, uncut in result.rows()
            ),
            right=" rrrrr ",
        )
        return Explanation(
            blocks=(passes, _tasks(result), *_sentences(result)),
            data=result.as_record(),
            picture=lambda: streams(layer.forward, layer.backward),
        )


def _tasks(found: MoeStepPlan) -> Table:
    layer = found.layer
    named = zip(
        ("exchange", "gather", "experts"), layer.forward[:3], layer.backward[:3], strict=True
    )
    return Table(
        title="a task of one chunk: alpha + beta n / r",
        columns=("task", "alpha", "all chunks", "of a forward chunk", "of a backward chunk"),
        rows=tuple(
            (
                name,
                f"{1e6 * there.alpha:.1f} us",
                f"{digits(1e3 * there.work)} ms",
                f"{1e6 * there.at(found.forward.r):.0f} us",
                f"{1e6 * back.at(found.backward.r):.0f} us",
            )
            for name, there, back in named
        ),
        right=" rrrr",
    )


def _sentences(found: MoeStepPlan) -> tuple[str, str, str]:
    sums, split = found.gradients, found.parallel
    way = "" if split.expert_dispatch == "flat" else f", expert_dispatch: {split.expert_dispatch}"
    early = sum(one.bytes for one in sums.slices)
    return (
        f"{found.blocks} blocks: {digits(1e3 * found.seconds)} ms a micro-batch, "
        f"{digits(1e3 * found.uncut_s)} ms uncut with the sums of gradients at the end "
        f"({found.uncut_s / found.seconds:.2f}x)",
        f"parallel: {{ep: {split.ep}, etp: {split.etp}, "
        f"expert_chunks: [{found.forward.r}, {found.backward.r}]{way}}}",
        f"gradients: {human_bytes(int(early))} can be summed between nodes during the backward "
        f"pass in {len(sums.slices)} slices, {human_bytes(int(sums.tail))} after it "
        f"({digits(1e3 * sums.tail_s)} ms), with gradient_slices: auto",
    )
