"""How many guesses pay: tokens of a step, its seconds, and the number of rows with the most.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding, 2024, section 3.3.
"""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.core.parts import Choice, table
from shoal.cost.shapes import resolve
from shoal.cost.step_cost.predicted import predicted_step_cost
from shoal.ir import MAX_NODES, DrafterCalibration, Machine, TreePart
from shoal.plan.trees.drafting import ProfitableDrafting, RowCosts
from shoal.plan.trees.dynamic import DynamicTrees

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def expected_tokens(
    calibration: DrafterCalibration, tree: Choice, *, asking: int = 0
) -> tuple[float, ...]:
    """Tokens of a step with 0, 1, ... rows beside the root.

    Args:
        calibration: of the drafter.
        tree: which of its guesses.
        asking: embeddings of each prompt token, where rows ask for the next guesses; 0 where the
            drafter guesses by itself.

    Raises:
        ConfigError: a tree that the drafter cannot fill.
    """
    part: TreePart = table("tree").build(tree, where="tree")
    if asking:
        return DynamicTrees(calibration, part, asking).expected()
    return part.build(calibration).expected()


def predicted_costs(
    machine: Machine, model: str, precision: str = "bf16", *, context: int = 256, threads: int = 0
) -> RowCosts:
    """Seconds of steps by their rows, predicted; nothing for guesses.

    Args:
        machine: whose rates count.
        model: name or directory.
        precision: of weights and cache.
        context: tokens before the rows.
        threads: that compute on a CPU; 0 for all cores.

    Raises:
        ConfigError: the model is unknown.
        MachineError: the machine has no value for a required rate.
    """
    cost = predicted_step_cost(machine, resolve(model), precision, threads)
    return RowCosts(
        rows=_ROWS,
        seconds_of=tuple(cost.seconds([(context, 1)] * rows) for rows in _ROWS),
    )


def decode_plan(
    expected: tuple[float, ...], costs: RowCosts, requests: int = 1
) -> ProfitableDrafting:
    """Who says how many nodes pay.

    Args:
        expected: tokens of a step with 0, 1, ... rows beside the root.
        costs: of steps and guesses.
        requests: that decode together.

    Raises:
        PlanError: no request at all.
    """
    require(requests >= 1, "requests", requests, expected="1 or more", error=PlanError)
    return ProfitableDrafting(expected[: MAX_NODES + 1], costs)
