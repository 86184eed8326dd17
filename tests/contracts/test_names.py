"""Nothing asks how a part is called: what others must know of it is a trait of its class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sources

from shoal.core.parts import KINDS, table
from shoal.core.traits import TRAITS, traits

# Fields of jobs, shapes and configurations that choose a part, and what holds one.
CHOICES = {
    "accept", "activation", "architecture", "balancer", "batching", "chosen", "context", "corpus",
    "data", "decode", "drafter", "ffn", "finetune", "format", "gate", "kv", "kv_format", "launcher",
    "law", "lr_schedule", "mapper", "memory", "method", "mode", "offload", "optimizer", "packing",
    "part", "phase", "placer", "planner", "preempt", "residual", "schedule", "scheduler", "shard",
    "speculative", "sync", "tree", "unmask", "workload",
}  # fmt: skip

# File -> (comparisons there, why they stay).
REASONS = {
    "ir/architecture.py": (6, "the value's own file; a gate of its own makes another model_type"),
    "model/architecture.py": (1, "two descriptions of one model are compared with each other"),
}


def comparisons(path: Path) -> Iterator[str]:
    """Comparisons of ``X.name`` with a literal, where X chooses a part."""
    for node in sources.nodes(path):
        if not isinstance(node, ast.Compare):
            continue
        left = node.left
        if not (isinstance(left, ast.Attribute) and left.attr == "name"):
            continue
        held = left.value.attr if isinstance(left.value, ast.Attribute) else ""
        held = held or (left.value.id if isinstance(left.value, ast.Name) else "")
        literal = any(
            isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
            for side in node.comparators
            for leaf in ast.walk(side)
        )
        if held in CHOICES and literal:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_few_names_are_compared_and_each_has_a_reason() -> None:
    result: dict[str, list[str]] = {}
    for path in sources.paths():
        if lines := list(comparisons(path)):
            result[path.relative_to(sources.PACKAGE).as_posix()] = lines
    unexplained = [line for name, lines in result.items() if name not in REASONS for line in lines]
    assert not unexplained, "\n".join(["say it by a trait of the part:", *unexplained])
    counts = {name: len(lines) for name, lines in result.items()}
    assert counts == {name: count for name, (count, _) in REASONS.items()}
    elsewhere = sum(count for name, count in counts.items() if name != "ir/architecture.py")
    assert elsewhere <= 10


def test_the_count_sees_comparisons(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        'if job.shard.name == "zero1" or plan.job.kv.name not in ("paged", "slots"):\n    pass\n'
        'if tier.name == "disk" or job.shard.name == other:\n    pass\n'
    )
    assert len(list(comparisons(file))) == 2


def test_traits_are_described_and_every_description_is_of_one() -> None:
    kinds = [kind for kind in KINDS if kind != "claim"]
    stated = {trait for kind in kinds for name in table(kind) for trait in traits(kind, name)}
    assert stated == set(TRAITS)
