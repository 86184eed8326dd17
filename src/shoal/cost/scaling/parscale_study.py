"""``shoal explain parscale``: what are parallel streams of one model worth, and their cost?"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table
from shoal.cost.scaling.parscale import PUBLISHED, equal_loss, fit_parscale
from shoal.cost.shapes import resolve
from shoal.ir import Explanation, Machine, Progress


@part
class ParScaleStudy:
    """Compare P parallel streams with the dense model of equal loss.

    The law is fitted to the published losses of 24 models. Nothing runs.

    **Examples**

        shoal explain parscale --params 1.6e9

        shoal explain parscale Qwen3-8B --corpus stack --batch 8 -m 1xRTX-4090 -o json

    Args:
        model: name, directory or shape file.
        params: parameters, such as 1.6e9; the model's, if not given.
        corpus: corpus of the published losses: stack or pile.
        batch: requests at once.
        context: tokens of each.
    """

    subject: ClassVar = "model"
    machine: ClassVar = "1xH100"

    model: str = "Qwen2.5-1.5B"
    params: Annotated[float, Gt(0)] | None = None
    corpus: Literal["stack", "pile"] = "pile"
    batch: Annotated[int, Ge(1)] = 1
    context: Annotated[int, Ge(1)] = 1024

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """A row for 1, 2, 4 and 8 streams, and the law."""
        law = fit_parscale(PUBLISHED[self.corpus])
        rows = equal_loss(
            law,
            resolve(self.model),
            machine,
            params=self.params,
            batch=self.batch,
            context=self.context,
        )
        shown = Table(
            title=f"P streams and the dense model of equal loss: batch {self.batch}, "
            f"{self.context} tokens each, {machine.name}",
            columns=(
                *("P", "loss", "as good as", "memory", "dense", "increase"),
                *("step", "dense", "increase"),
            ),
            rows=tuple(
                (
                    str(row.streams),
                    f"{row.loss:.4f}",
                    f"{row.dense_params / 1e9:.2f}B",
                    human_bytes(int(row.memory_bytes)),
                    human_bytes(int(row.dense_memory_bytes)),
                    _times(row.memory_saved),
                    f"{row.step_s * 1e3:.2f} ms",
                    f"{row.dense_step_s * 1e3:.2f} ms",
                    _times(row.latency_saved),
                )
                for row in rows
            ),
            right="r" * 9,
        )
        return Explanation(
            blocks=(
                shown,
                f"law of {self.corpus}: L = {law.floor:.4f} + ({law.scale:.4g} * 1e9 / "
                f"(N * ({law.k:.3f} ln P + 1))) ^ {law.exponent:.4f}, R2 {law.r2:.4f}",
            ),
            data={"law": law.model_dump(), "rows": [row.model_dump() for row in rows]},
        )


def _times(saved: float | None) -> str:
    return "" if saved is None else f"{saved:.1f}x less"
