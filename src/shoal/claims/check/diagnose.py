"""What differing gradients have in common, and what that says of the cause.

Every rule is an equation that a wrong gradient satisfies when it has one cause: the ranks'
copies add up to the right one (a reduction is missing), it is a multiple of the right one
(something is added or divided too often), or it is a sum of the gradients of the ranks'
parts with other weights than the whole batch has (a wrong divisor). A rule counts when
the equation holds to a hundred times the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from shoal.claims.check.compare import Array, floor_of, groups_by
from shoal.claims.check.protocols import DATA_AXES, Axes, Finding


@dataclass(frozen=True)
class ModuleOutput:
    """The first module, in order of completion, whose output differs.

    Args:
        module: its name.
        one: what it returns in one process, on this rank's part.
        split: what it returns on the rank.
        total: the sum of that over the ranks of an axis that share the rows, or None.
        biases: vectors among its parameters and those of the modules in it, by name.
    """

    module: str
    one: Array
    split: Array
    biases: Mapping[str, Array] = field(default_factory=dict)
    total: Array | None = None


@dataclass(frozen=True)
class StepEvidence:
    """What is known of the first step that differs.

    Args:
        axes: the mesh.
        coordinates: of each rank.
        order: all parameters, in the order in which the model uses them.
        expected: one-process gradients by name.
        observed: each rank's view of the gradients that differ somewhere.
        differing: names of these, in order.
        solo: each rank's gradients of the unsplit model on its own part, or empty.
        output: where the forward pass parts ways, or None.
        loss: one-process and split loss.
        loss_differs: whether they are apart.
        forward_equal: every module returns on the rank's own part what it does in one process.
        others: whether start, parameters or buffers differ.
        limit: the tolerance.
    """

    axes: Axes
    coordinates: Sequence[Mapping[str, int]]
    order: Sequence[str]
    expected: Mapping[str, Array]
    observed: Sequence[Mapping[str, Array]]
    differing: Sequence[str]
    solo: Sequence[Mapping[str, Array]] = ()
    output: ModuleOutput | None = None
    loss: tuple[float, float] = (0.0, 0.0)
    loss_differs: bool = False
    forward_equal: bool = False
    others: frozenset[str] = field(default_factory=frozenset)
    limit: float = 1e-9


def diagnose(evidence: StepEvidence) -> list[Finding]:
    """What the differences are, the surest first; empty when no rule holds."""
    result = list(_not_finite(evidence))
    if result:
        return result
    explained: set[str] = set()
    for rule in (_forward, _everywhere, _parted, _each, _backward, _updates, _parts):
        for finding in rule(evidence, explained):
            result.append(finding)
            explained.update(finding.names or evidence.differing)
    return result


def _close(a: Array, b: Array, limit: float) -> bool:
    """Equal to a hundred times the tolerance, relative to the larger."""
    scale = max(float(np.abs(b).max(initial=0.0)), float(np.abs(a).max(initial=0.0)))
    return bool(np.abs(a - b).max(initial=0.0) <= 100 * limit * scale)


def _ratio(found: Array, expected: Array, limit: float) -> float | None:
    """The factor between two tensors, if one number is."""
    below = float(np.vdot(expected, expected))
    if not below:
        return None
    factor = float(np.vdot(found, expected)) / below
    return factor if factor and _close(found, factor * expected, limit) else None


def _is(value: float, target: float, limit: float) -> bool:
    return abs(value - target) <= 100 * limit * abs(target)


def _axis_sets(axes: Axes) -> Iterator[tuple[str, ...]]:
    """Axes with more than one rank: alone, then together."""
    several = [name for name, size in axes.items() if size > 1]
    for number in range(1, len(several) + 1):
        yield from combinations(several, number)


def _size(axes: Axes, names: Sequence[str]) -> int:
    size = 1
    for name in names:
        size *= axes[name]
    return size


def _matching(axes: Axes, value: float, limit: float, *, model_only: bool = False) -> str:
    """The axes whose number of ranks is this value: ``dp or tp``; empty when none has it.

    Args:
        axes: the mesh.
        value: a number of times.
        limit: the tolerance.
        model_only: leave out axes that share the rows, when others match.
    """
    sets = [names for names in _axis_sets(axes) if _is(value, _size(axes, names), limit)]
    inner = [names for names in sets if not DATA_AXES.intersection(names)]
    shortest = (inner if model_only else None) or sets
    return " or ".join(_over(names) for names in shortest if len(names) == len(shortest[0]))


def _over(names: Sequence[str]) -> str:
    return " and ".join(names)


def _list(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _not_finite(evidence: StepEvidence) -> Iterator[Finding]:
    names = tuple(
        name
        for name in evidence.differing
        if name in evidence.expected
        and np.isfinite(evidence.expected[name]).all()
        and any(not np.isfinite(view[name]).all() for view in evidence.observed if name in view)
    )
    if names:
        yield Finding(
            kind="not_finite",
            names=names,
            text=f"the split has gradients that are not finite: {_list(names)}; one process has "
            "none",
        )


def _forward(evidence: StepEvidence, _explained: set[str]) -> Iterator[Finding]:
    """A module returns its bias too often, or a multiple of what it should."""
    output = evidence.output
    if output is None or not evidence.loss_differs:
        return
    module, one = output.module, output.one
    for split in (output.split, output.total):
        if split is None or split.shape != one.shape:
            continue
        apart = split - one
        for name, bias in output.biases.items():
            if bias.shape[-1:] != one.shape[-1:]:
                continue
            times = _ratio(apart, np.broadcast_to(bias, apart.shape), evidence.limit)
            if times is not None:
                yield _bias(evidence, name, module, times)
                return
    if output.split.shape != one.shape:
        return
    factor = _ratio(output.split, one, evidence.limit)
    if factor is None:
        return
    what = f"the output of this module is {factor:.4g} times that of one process"
    if axes := _matching(evidence.axes, factor, evidence.limit, model_only=True):
        what += f", the number of ranks of {axes}: it is reduced once too often"
    elif axes := _matching(evidence.axes, 1 / factor, evidence.limit, model_only=True):
        what += f", 1 / the ranks of {axes}: shards are not reduced, or are divided once too often"
    yield Finding(
        kind="forward",
        names=_of_module(evidence, module),
        text=f"{module}: {what}; its input is equal",
    )


def _bias(evidence: StepEvidence, name: str, module: str, times: float) -> Finding:
    """The split's output has its bias ``times`` times more than one process."""
    total = 1 + times
    text = f"added {total:.4g} times instead of once"
    axes = _matching(evidence.axes, total, evidence.limit, model_only=True)
    if axes:
        text = (
            f"added {total:.4g} times, once by every rank of {axes}: add it after the reduction, "
            "or on one rank"
        )
    if _is(times, -1, evidence.limit):
        text = "not added"
    where = "" if name == f"{module}.bias" else f", visible in the output of {module}"
    return Finding(
        kind="bias_added_times", names=(name,), text=f"{name} is {text} (forward pass{where})"
    )


def _of_module(evidence: StepEvidence, module: str) -> tuple[str, ...]:
    return tuple(name for name in evidence.order if name.rpartition(".")[0] == module)


def _parted(evidence: StepEvidence, explained: set[str]) -> Iterator[Finding]:
    """Nothing better is known than where the forward pass parts ways."""
    output = evidence.output
    if output is not None and evidence.loss_differs and not explained:
        yield Finding(
            kind="forward",
            names=_of_module(evidence, output.module),
            text=f"{output.module}: the forward pass differs first in the output of this module; "
            "its input is equal",
        )


def _significant(evidence: StepEvidence) -> list[str]:
    """Parameters whose gradient is more than rounding."""
    floor = floor_of(evidence.expected.values())
    return [
        name
        for name in evidence.order
        if name in evidence.expected and float(np.abs(evidence.expected[name]).max()) > floor
    ]


def _everywhere(evidence: StepEvidence, explained: set[str]) -> Iterator[Finding]:
    """Causes that every gradient shows: a factor, or the weights of the ranks' parts."""
    if explained:
        return
    names = _significant(evidence)
    differing = set(evidence.differing)
    if not names or not differing.issuperset(names):
        return
    factors = []
    for view in evidence.observed:
        for name in names:
            if name in view:
                factor = _ratio(view[name], evidence.expected[name], evidence.limit)
                if factor is None:
                    break
                factors.append(factor)
        else:
            continue
        break
    else:
        if factors and max(factors) - min(factors) <= 100 * evidence.limit * max(map(abs, factors)):
            yield _factor(evidence, factors[0])
            return
    finding = _weights(evidence, names, everywhere=True)
    if finding is not None:
        yield finding


def _factor(evidence: StepEvidence, factor: float) -> Finding:
    names = tuple(evidence.differing)
    text = f"every gradient is {factor:.4g} times that of one process"
    kind = "factor"
    if axes := _matching(evidence.axes, factor, evidence.limit):
        kind = "not_averaged"
        text += (
            f", the number of ranks of {axes}: gradients are summed although the loss of each "
            "rank is a mean over its own shard, or are reduced twice"
        )
    elif axes := _matching(evidence.axes, 1 / factor, evidence.limit):
        kind = "mean_instead_of_sum"
        text += (
            f", 1 / the ranks of {axes}: a mean instead of a sum; the loss is already divided by "
            "the count of the whole batch, and the gradients are averaged over the ranks as well"
        )
    else:
        text += (
            "; no number of ranks of this mesh explains it: check micro-batches and loss scaling"
        )
    return Finding(kind=kind, names=names, text=text)


def _weights(evidence: StepEvidence, names: Sequence[str], *, everywhere: bool) -> Finding | None:
    """Gradients as a weighted sum of those of the ranks' parts."""
    if len(evidence.solo) != len(evidence.coordinates):
        return None
    axes = [axis for axis, size in evidence.axes.items() if size > 1 and axis in DATA_AXES]
    parts = groups_by(evidence.coordinates, axes)
    names = [n for n in names if all(n in evidence.solo[group[0]] for group in parts)]
    names = [n for n in names if all(n in view for view in evidence.observed)]
    if len(parts) < 2 or not names:
        return None
    matrix = np.stack(
        [np.concatenate([evidence.solo[g[0]][n].ravel() for n in names]) for g in parts], axis=1
    )
    right = _solve(matrix, np.concatenate([evidence.expected[n].ravel() for n in names]), evidence)
    if right is None:
        return None
    weights = []
    for view in evidence.observed:
        solved = _solve(matrix, np.concatenate([view[n].ravel() for n in names]), evidence)
        if solved is None:
            return None
        weights.append(solved)
    subject = "every gradient" if everywhere else f"the gradient of {_list(list(names))}"
    own = np.array([[rank in group for group in parts] for rank in range(len(weights))])
    alone = all(
        np.abs(np.where(own[rank], 0.0, weight)).max() <= 1e-6
        for rank, weight in enumerate(weights)
    )
    if alone:
        return Finding(
            kind="missing_reduction",
            names=tuple(names),
            text=f"{subject} is that of the rank's own shard: it is not reduced over {_over(axes)}",
        )
    got = weights[0]
    shown = f"{_shares(got)}; in the whole batch they have {_shares(right)}"
    if np.ptp(got) <= 1e-6 * np.abs(got).max() and np.ptp(right) > 1e-6 * np.abs(right).max():
        return Finding(
            kind="wrong_divisor",
            names=tuple(names),
            text=f"wrong divisor: {subject} sums the shards of the ranks of {_over(axes)} with the "
            f"weights {shown}. The shards have different numbers of tokens: divide their sum "
            "by the count of the whole batch, not each shard by its own count",
        )
    return Finding(
        kind="wrong_weights",
        names=tuple(names),
        text=f"{subject} sums the shards of the ranks of {_over(axes)} with the weights {shown}",
    )


def _solve(matrix: Array, target: Array, evidence: StepEvidence) -> Array | None:
    """Weights of the columns that make the target, if there are such."""
    # Columns that are nearly the same have no weights of their own.
    scale = np.linalg.norm(matrix, axis=0)
    if not scale.all():
        return None
    weights, _, rank, _ = np.linalg.lstsq(matrix / scale, target, rcond=1e-4)
    if rank < matrix.shape[1] or not _close(matrix @ (weights / scale), target, evidence.limit):
        return None
    return np.asarray(weights / scale, np.float64)


def _shares(weights: Array) -> str:
    return ", ".join(f"{weight:.4g}" for weight in weights)


def _each(evidence: StepEvidence, explained: set[str]) -> Iterator[Finding]:
    """Causes that single parameters show, gathered by what they say."""
    fields: dict[tuple[str, str], list[str]] = {}
    for name in evidence.differing:
        views = [view[name] for view in evidence.observed if name in view]
        expected = evidence.expected.get(name)
        if name in explained or expected is None or any(v.shape != expected.shape for v in views):
            continue
        say = _reduction(evidence, name) or _times(evidence, views, expected)
        if say is not None:
            fields.setdefault(say, []).append(name)
            continue
        finding = _weights(evidence, [name], everywhere=False)
        if finding is not None:
            _, _, rest = finding.text.partition(name)
            fields.setdefault((finding.kind, rest.strip()), []).append(name)
    if len(fields) > 3:  # many different stories are none
        return
    for (kind, text), names in fields.items():
        yield Finding(kind=kind, names=tuple(names), text=f"{_list(names)}: {text}")


def _reduction(evidence: StepEvidence, name: str) -> tuple[str, str] | None:
    """The ranks hold different gradients, which make the right one together."""
    if any(name not in view for view in evidence.observed):
        return None
    expected = evidence.expected[name]
    for axes in _axis_sets(evidence.axes):
        others = [axis for axis in evidence.axes if axis not in axes]
        groups = groups_by(evidence.coordinates, others)
        for kind, verb in (("sum", "sum"), ("mean", "mean")):
            views = [np.stack([evidence.observed[r][name] for r in group]) for group in groups]
            made = [v.sum(axis=0) if kind == "sum" else v.mean(axis=0) for v in views]
            differ = any(
                not _close(v[0], v[i], evidence.limit) for v in views for i in range(len(v))
            )
            if differ and all(_close(m, expected, evidence.limit) for m in made):
                return (
                    "missing_reduction",
                    f"missing reduction over {_over(axes)}: the ranks hold different gradients, "
                    f"and their {verb} over {_over(axes)} is the expected one",
                )
    return None


def _times(
    evidence: StepEvidence, views: Sequence[Array], expected: Array
) -> tuple[str, str] | None:
    """The gradient is a multiple of the right one."""
    factors = [_ratio(view, expected, evidence.limit) for view in views]
    if not factors or factors[0] is None:
        return None
    factor = factors[0]
    if any(f is None or not _is(f, factor, evidence.limit) for f in factors):
        return None
    if axes := _matching(evidence.axes, factor, evidence.limit):
        return (
            "added_times",
            f"its gradient is summed {factor:.4g} times, once by every rank of {axes}, each of "
            "which holds the whole gradient: do not reduce it there, or use it on one rank",
        )
    if axes := _matching(evidence.axes, 1 / factor, evidence.limit):
        return (
            "divided",
            f"its gradient is 1/{1 / factor:.4g} of that of one process: it is divided by the "
            f"ranks of {axes} once too often, or their shards are not summed",
        )
    return ("factor", f"its gradient is {factor:.4g} times that of one process")


def _backward(evidence: StepEvidence, explained: set[str]) -> Iterator[Finding]:
    """All gradients up to one parameter are wrong and all after it are right."""
    if evidence.loss_differs or explained:
        return
    order = _significant(evidence)
    wrong = [name in set(evidence.differing) for name in order]
    count = sum(wrong)
    if 1 < count < len(order) and all(wrong[:count]):
        yield Finding(
            kind="backward",
            names=(order[count - 1],),
            text=f"the loss is equal; gradients are correct from {order[count]} on and wrong in "
            f"all layers before it, up to {order[count - 1]}: in the backward pass the "
            "gradient is lost or doubled between these two",
        )


def _updates(evidence: StepEvidence, _explained: set[str]) -> Iterator[Finding]:
    if "start" in evidence.others:
        yield Finding(
            kind="start",
            text="parameters differ before the first step: parallelize() must keep the initial "
            "values of model() (do not initialize again, or load them afterwards)",
        )
    elif not evidence.differing and "parameter" in evidence.others:
        yield Finding(
            kind="optimizer",
            text="loss and gradients are equal, the updated parameters are not: check the "
            "optimizer: created before parallelize(), other parameter groups, a norm over "
            "one rank's shards, or decay of parameters without a gradient",
        )
    elif not evidence.differing and "buffer" in evidence.others:
        yield Finding(
            kind="buffer",
            text="only buffers differ: statistics are over a rank's own shard (use "
            "SyncBatchNorm, or reduce the statistics)",
        )
    elif not evidence.differing and evidence.loss_differs:
        one, split = evidence.loss
        text = f"gradients are equal, only the reported loss differs ({split:.6g} for {one:.6g})"
        factor = split / one if one else 0.0
        if factor and _matching(evidence.axes, 1 / factor, evidence.limit):
            text += f"; it is 1/{1 / factor:.4g}: use --loss sum if ranks return their share"
        elif factor and _matching(evidence.axes, factor, evidence.limit):
            text += f"; it is {factor:.4g} times: use --loss mean if ranks return a mean"
        yield Finding(kind="loss", text=text)


def _parts(evidence: StepEvidence, explained: set[str]) -> Iterator[Finding]:
    if evidence.forward_equal and evidence.loss_differs and not explained and evidence.differing:
        yield Finding(
            kind="parts",
            text="every module computes on a rank's shard what it computes in one process, so "
            "the shards do not add up to the whole: statistics over a shard of the batch "
            "(BatchNorm, a balance loss), negatives from a shard, or a loss that is not a "
            "sum over the rows",
        )
