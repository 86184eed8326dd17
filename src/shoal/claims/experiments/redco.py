"""[29] Redco: do two rules split any transformer, without its author's help?

Source: Tan et al., Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any
GPU/TPUs, 2023.

Eight families of transformers with random weights on two ranks that are threads: logits and
gradients beside one process, bytes that are split, all-reduces of a block, and transformers' own
plan where it has one. The A/A run puts a plan that splits nothing in the place of the rules.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.meter import Meter
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

_EXAMPLES = ("digits.py", "language_model.py", "maml.py")
_QUICK = ("gpt2", "llama", "t5")


@part
class RedcoClaim(BaseClaim, row=29, needs=("transformers",)):
    """Eight families at two ranks, against one process and against transformers' own plans.

    Args:
        tp: ranks.
    """

    tp: int = 2

    def collect(self, run: ClaimRun) -> None:
        """Trace, plan and run every family; the quick run takes three of them."""
        from shoal.parallel.autotp.families import FAMILIES

        names = _QUICK if run.quick else tuple(FAMILIES)
        result: dict[str, dict[str, float]] = {}
        for index, name in enumerate(names):
            run.progress(name, index / len(names))
            seen = run.remember(name, partial(run_family, name, self.tp, run.seed))
            # With nothing split, each rank is one process.
            result[name] = run.pick(seen, {**seen, "sharded": 0.0, "agrees": 0.0})
        rows = list(result.values())
        run.put("difference", (row["difference"] for row in rows))
        run.put("sharded", (row["sharded"] for row in rows))
        run.put("all_reduces", (row["all_reduces_a_layer"] for row in rows))
        run.put("agrees", (row["agrees"] for row in rows if row["agrees"] >= 0))
        lines = _lines()
        if lines:
            run.put("lines", lines.values())
        else:
            run.skip("the examples are not installed; run from a checkout", "lines")
        run.details |= {"families": result, "lines": lines}


def run_family(name: str, tp: int, seed: int) -> dict[str, float]:
    """One family on ranks that are threads, against one process, in float64."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.parallel.autotp.auto import discover, split_model
    from shoal.parallel.autotp.families import FAMILIES, example, from_config

    model: Any = from_config({"model_type": name, **FAMILIES[name]}, device="cpu", seed=seed)
    model = model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too, so that none of them can be forgotten unseen.
            parameter.add_(
                0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    inputs = example(model, seed=seed)
    planned = discover(model, (), inputs, tp=tp, name=name, fallback="refuse")
    logits = model(**inputs).logits
    whole = logits.detach()
    weight = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    (logits * weight).sum().backward()
    own = dict(model.named_parameters())
    meter = Meter([])

    def on(comm: Comm) -> tuple[Any, dict[str, Any], int]:
        split: Any = split_model(planned, model, comm)
        counted = _Counted(comm)
        split.comm = counted
        logits = split(**inputs).logits
        forward = counted.all_reduces
        (logits * weight).sum().backward()
        grads = {target: split.parameter_of(target).grad for target in split.names_of}
        return logits.detach(), grads, forward

    ranks = run_ranks(tp, on, meter=meter)
    part = planned.parts[0]
    by_target = {target: value for value, target in part.traced.params.items()}
    from shoal.parallel.autotp.split import whole_of

    largest = max(float(p.grad.abs().max()) for p in own.values() if p.grad is not None)
    worst = max(float((r[0] - whole).abs().max() / whole.abs().max()) for r in ranks)
    for target, value in by_target.items():
        expected = own[target].grad
        parts = [r[1][target] for r in ranks]
        if expected is None:
            assert all(p is None for p in parts)
            continue
        place = part.flow.params.get(value)
        for result in parts if place is None else [whole_of(parts, *place)]:
            scale = max(float(expected.abs().max()), 1e-3 * largest)
            worst = max(worst, float((result - expected).abs().max()) / scale)
    config = model.config
    layers = 2 * int(config.num_hidden_layers)
    if getattr(config, "is_encoder_decoder", False):
        # A decoder's block attends twice.
        layers += 3 * int(config.num_decoder_layers)
    tables = len(part.flow.tables)
    return {
        "difference": worst,
        "sharded": planned.plan.sharded,
        "all_reduces": float(ranks[0][2]),
        "all_reduces_a_layer": (ranks[0][2] - tables) / layers,
        "agrees": agreement(model, planned.plan.dtensor()),
    }


def agreement(model: Any, plan: dict[str, str]) -> float:
    """Share of transformers' own plan that is the same; -1 where it has none."""
    theirs = getattr(model.config, "base_model_tp_plan", None)
    if not theirs:
        return -1.0
    prefix = f"{model.base_model_prefix}."
    ours = {re.sub(r"\.\d+\.", ".*.", name.removeprefix(prefix)): s for name, s in plan.items()}
    linear = {name: style for name, style in theirs.items() if style in ("colwise", "rowwise")}
    same = sum(ours.get(name) == style for name, style in linear.items())
    return float(same / len(linear))


class _Counted:
    """A communicator that counts sums."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.all_reduces = 0

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        self.all_reduces += 1
        return self._comm.all_reduce(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def _lines() -> dict[str, int]:
    """Lines of each example, without blank ones and comments; empty outside a checkout."""
    place = Path(__file__).parents[4] / "examples" / "trainer"
    out = {}
    for name in _EXAMPLES:
        file = place / name
        if not file.exists():
            return {}
        text = [line.strip() for line in file.read_text().splitlines()]
        out[name] = sum(bool(line) and not line.startswith("#") for line in text)
    return out
