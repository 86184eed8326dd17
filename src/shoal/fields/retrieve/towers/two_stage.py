"""The way ``two_stage``: large towers learn from pairs, then a small query tower from the large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.fields.retrieve.towers.end_to_end import pair_cost
from shoal.fields.retrieve.towers.protocols import TextPairs, Tick, TowerCost, TowerTask
from shoal.fields.retrieve.towers.rates import TowerRates
from shoal.fields.retrieve.towers.shapes import config_of

if TYPE_CHECKING:
    from shoal.fields.retrieve.towers.pair import TowerPair
    from shoal.ir.comm import Comm

# Share of the work that stage 1 is, for the bar.
_FIRST = 0.85


@part
class TwoStage:
    """Train both towers large, then distil the query tower alone; documents stay as they are.

    Source: Huang et al., ScalingNote: Scaling up Retrievers with Large Language Models for
    Real-World Dense Retrieval, 2024.

    Args:
        teacher: directory of a pair that was trained before, which takes the place of stage 1.
        weight: of ``1 - cos`` beside the squared error.
        epochs: passes of stage 2 over all queries.
        lr: peak learning rate of stage 2 at width 128.
        batch: queries of a step of stage 2.
        linear_map: the student may have another width, and then has a map to the dimension.
        retokenise: the student may have another tokenizer than the teacher.
    """

    teacher: str = ""
    weight: Annotated[float, Ge(0)] = 1.0
    epochs: Annotated[int, Ge(1)] = 8
    lr: Annotated[float, Gt(0)] = 1e-2
    batch: Annotated[int, Ge(1)] = 256
    linear_map: bool = True
    retokenise: bool = False

    def estimate(
        self, task: TowerTask, pairs: int, unlabelled: int, rates: TowerRates
    ) -> TowerCost:
        """Stage 1 with large towers, then queries through the large one and often the small."""
        first = pair_cost(task, task.large, pairs, rates)
        large, small = config_of(task, task.large), config_of(task, task.small)
        count = pairs + unlabelled
        tokens = float(count * task.query_length)
        steps = self.epochs * max(count // self.batch, 1)
        second_s = rates.seen_s(large, tokens) + rates.trained_s(small, tokens * self.epochs, steps)
        kept = 4.0 * count * large.hidden
        return TowerCost(
            train_s=(0.0 if self.teacher else first.train_s) + second_s,
            parameters=first.parameters,
            memory_bytes=first.memory_bytes + kept,
            query_s=rates.encode_s(small, task.query_length),
        )

    def train(
        self, task: TowerTask, pairs: TextPairs, tick: Tick, comm: Comm | None = None
    ) -> TowerPair:
        """InfoNCE with large towers; then vectors of queries, on every rank alike."""
        from shoal.fields.retrieve.towers.contrastive import train_pair
        from shoal.fields.retrieve.towers.distil import distil_query, student_of
        from shoal.fields.retrieve.towers.pair import TowerPair

        if self.teacher:
            large = TowerPair.load(self.teacher)
        else:
            large = train_pair(
                task, task.large, pairs, lambda done, text: tick(_FIRST * done, text), comm
            )
        # A pair that was distilled before keeps its large query tower.
        teacher = large.teacher or large.query
        student = student_of(task, teacher, linear_map=self.linear_map, retokenise=self.retokenise)
        queries = [*pairs.queries, *pairs.unlabelled]
        distil_query(
            task, teacher, queries, student,
            lambda done, text: tick(_FIRST + (1 - _FIRST) * done, text),
            weight=self.weight, epochs=self.epochs, lr=self.lr, batch=self.batch,
        )  # fmt: skip
        return TowerPair(student, large.document, teacher)
