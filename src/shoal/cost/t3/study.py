"""``shoal explain t3``: what do products gain whose stores trigger their reduce-scatter?"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.cost.t3.sublayers import RingDevice, SublayerComparison, compare, sublayers
from shoal.ir import Explanation, Progress


@part
class T3Study:
    """Simulate matrix products whose stores trigger their reduce-scatter (T3), layer by layer.

    The output of a row-parallel layer is summed over the tensor-parallel devices. With trackers,
    triggered DMAs and near-memory reductions, this overlaps with the product.

    **Examples**

        shoal explain t3 --hidden 4256 --tp 8

        shoal explain t3 --hidden 12288 --tp 16 --tokens 4096 --device '{link_bandwidth: 1.5e11}'

        shoal explain t3 --device '{update_cost: 2, policy: round_robin}' -o json

    Args:
        hidden: size of the model.
        tp: tensor-parallel devices.
        tokens: tokens of a pass.
        device: values of the simulated device to override, such as {link_bandwidth: 1.5e11}.
    """

    machine: ClassVar = None

    hidden: int = 4256
    tp: int = 8
    tokens: int = 8192
    device: RingDevice = RingDevice()

    def explain(self, machine: None, progress: Progress) -> Explanation:
        """The four products of a layer that end in an all-reduce."""
        layers = sublayers("", self.hidden, self.tokens, self.tp)
        results = [compare(layer, self.device) for layer in layers]
        shown = Table(
            title=f"hidden {self.hidden}, tp {self.tp}, {self.tokens} tokens",
            columns=(
                *("sublayer", "product", "reduce-scatter", "all-gather", "sequential", "T3"),
                *("ideal", "faster", "bytes moved"),
            ),
            rows=tuple(_row(one) for one in results),
            right=" rrrrrrrr",
        )
        data = [
            {**one.model_dump(mode="json"), "speedup": one.speedup, "movement": one.movement}
            for one in results
        ]
        return Explanation(blocks=(shown,), data=data)


def _row(one: SublayerComparison) -> tuple[str, ...]:
    alone = (one.product_s, one.reduce_scatter_s, one.all_gather_s)
    return (
        one.sublayer.name,
        *(f"{1e6 * s:,.0f} us" for s in (*alone, one.sequential_s, one.t3_s, one.ideal_s)),
        f"{one.speedup:.2f}x",
        f"{100 * one.movement:+.0f} %",
    )
