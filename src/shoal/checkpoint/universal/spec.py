r"""The small language of Universal Checkpointing: which names combine by which pattern.

A list of entries, the first match wins, a name that none matches is an error::

    - match: "blocks\\.\\d+\\.attention\\.qkv_proj\\.weight"
      rule: fused(dim=0, parts=[2048, 256, 256])
    - match: "embed\\.weight"
      rule: fragment(dim=0, size=509)
    - match: ".*norm\\.weight"
      rule: {name: replicated, tolerance: 1e-6}
    - rule: tied("embed.weight", "output.weight")

``match`` is a regular expression over the whole name. A rule is a pattern, in either spelling;
``tied(a, b)`` says that b is the same tensor as a, which is stored once.

Source: Lian et al., Universal Checkpointing, 2024, section 3 (the language of patterns).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.universal.protocols import Pattern
from shoal.core.errors import CheckpointError, ConfigError, suggestion
from shoal.core.files import parse_yaml, read_yaml, to_yaml
from shoal.core.parts import Choice, table

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig


@dataclass(frozen=True)
class SpecEntry:
    """Names, and the pattern by which their fragments combine.

    Args:
        match: regular expression over whole names.
    """

    match: re.Pattern[str]
    choice: Choice
    pattern: Pattern


class UniversalSpec:
    """The patterns of a model's parameters.

    Args:
        entries: in order; the first that matches a name is its pattern.
        tied: second name -> first name of the same tensor.
    """

    def __init__(self, entries: Sequence[SpecEntry], tied: Mapping[str, str] | None = None) -> None:
        self.entries = tuple(entries)
        self.tied = dict(tied or {})

    @classmethod
    def parse(cls, given: str | Sequence[Any], where: str = "spec") -> UniversalSpec:
        """Read a spec from YAML text, or from the list that it says.

        Raises:
            ConfigError: no YAML, no list, an unknown pattern or option, or no expression.
        """
        raw = parse_yaml(given, where) if isinstance(given, str) else given
        if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
            raise ConfigError(f"{where}: expected a list of entries with match and rule")
        entries: list[SpecEntry] = []
        tied: dict[str, str] = {}
        for number, item in enumerate(raw):
            place = f"{where}[{number}]"
            if not isinstance(item, Mapping) or not {"rule"} <= set(item) <= {"match", "rule"}:
                raise ConfigError(f"{place} = {item!r}: expected the keys match and rule")
            choice = _choice(item["rule"], place)
            if choice.name == "tied":
                first, second = _two_names(choice, item, place)
                tied[second] = first
                continue
            if not isinstance(item.get("match"), str):
                raise ConfigError(f"{place}: match is missing; give a regular expression of names")
            entries.append(_entry(item["match"], choice, place))
        return cls(entries, tied)

    @classmethod
    def load(cls, path: Path) -> UniversalSpec:
        """Read a spec from a YAML file."""
        return cls.parse(read_yaml(path), str(path))

    def plain(self) -> list[dict[str, Any]]:
        """The list that :meth:`parse` reads."""
        results: list[dict[str, Any]] = [
            {"match": entry.match.pattern, "rule": entry.choice.model_dump(mode="json")}
            for entry in self.entries
        ]
        ties = [{"rule": f"tied({first!r}, {second!r})"} for second, first in self.tied.items()]
        return results + ties

    def text(self) -> str:
        """The spec as YAML."""
        return to_yaml(self.plain())

    def pattern(self, name: str) -> Pattern:
        """The pattern of a parameter.

        Raises:
            CheckpointError: none matches.
        """
        for entry in self.entries:
            if entry.match.fullmatch(name):
                return entry.pattern
        raise CheckpointError(
            f"{name}: no pattern of the spec matches this name; add an entry for it, such as "
            f"match: {re.escape(name)!r} with rule: replicated"
        )

    def check(self, names: Iterable[str]) -> None:
        """Refuse names without a pattern, and patterns that contradict each other.

        Raises:
            CheckpointError: a name that no pattern matches, two patterns of a name with another
                number of parts, or tied names whose patterns differ.
        """
        known = set(names)
        for name in sorted(known):
            self.pattern(name)
            arities = {
                entry.match.pattern: entry.pattern.arity
                for entry in self.entries
                if entry.pattern.arity > 1 and entry.match.fullmatch(name)
            }
            if len(set(arities.values())) > 1:
                text = " and ".join(f"{match!r} {count}" for match, count in arities.items())
                raise CheckpointError(
                    f"{name}: two patterns of different arity match it: {text} parts; make the "
                    "expressions exclude each other"
                )
        for second, first in self.tied.items():
            if first not in known:
                raise CheckpointError(
                    f"tied({first}, {second}): there is no parameter {first}"
                    + suggestion(first, known)
                )
            if second in known and self.pattern(first) != self.pattern(second):
                raise CheckpointError(
                    f"tied({first}, {second}): their patterns differ, so they cannot be the same "
                    "tensor; give both the same one"
                )


def default_spec(config: ModelConfig, *, vocab_axis: str = "tp") -> UniversalSpec:
    """The patterns of our own models, as :mod:`shoal.parallel.tensor.slices` splits them.

    Args:
        config: the model.
        vocab_axis: which ranks share the vocabulary: tp or pp; empty for none.
    """
    width, ffn = config.head_dim, config.ffn_hidden
    query, key = config.num_heads * width, config.num_kv_heads * width
    block = r"blocks\.\d+\."
    gate_up: dict[str, Any] = {"name": "fused", "parts": [ffn, ffn]}
    rules: list[tuple[str, Any]] = []
    if vocab_axis:
        vocabulary: dict[str, Any] = {"name": "fragment", "size": config.vocab_size}
        if vocab_axis != "tp":
            vocabulary["axis"] = vocab_axis
        rules.append((r"(embed|output)\.weight", vocabulary))
    rules += [
        (
            block + r"attention\.qkv_proj\.(weight|bias)",
            {"name": "fused", "parts": [query, key, key]},
        ),
        (block + r"(attention\.o_proj|mlp\.down_proj)\.weight", {"name": "fragment", "dim": 1}),
        (block + r"mlp\.gate_up_proj\.(weight|bias)", gate_up),
    ]
    if config.num_experts:
        rules += [
            (block + r"mlp\.gate_up_proj", {"name": "moe", "shard_dim": 1, "parts": [ffn, ffn]}),
            (block + r"mlp\.down_proj", {"name": "moe", "shard_dim": 2}),
        ]
    rules.append((".*", "replicated"))
    return UniversalSpec.parse([{"match": match, "rule": rule} for match, rule in rules])


def _entry(match: str, choice: Choice, place: str) -> SpecEntry:
    try:
        expression = re.compile(match)
    except re.error as cause:
        raise ConfigError(f"{place}.match = {match!r}: no regular expression ({cause})") from None
    pattern: Pattern = table("pattern").build(choice, where=f"{place}.rule")
    return SpecEntry(expression, choice, pattern)


def _two_names(choice: Choice, item: Mapping[str, Any], place: str) -> tuple[str, str]:
    names = choice.options.get("names", ())
    if len(names) != 2 or "match" in item or names[0] == names[1]:
        raise ConfigError(f"{place}: tied wants two different names and no match: tied(a, b)")
    return str(names[0]), str(names[1])


def _choice(rule: Any, place: str) -> Choice:
    """A rule in either spelling: a choice, or a text such as ``fused(dim=0, parts=[4, 2, 2])``."""
    if not isinstance(rule, str):
        if not isinstance(rule, Mapping) or not isinstance(rule.get("name"), str):
            raise ConfigError(
                f"{place}.rule = {rule!r}: expected a pattern such as fragment(dim=0)"
            )
        return Choice.model_validate(rule)
    try:
        tree = ast.parse(rule.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return Choice(name=tree.id)
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            raise ValueError("not a pattern")
        if tree.func.id == "tied":
            return Choice(name="tied", options={"names": [_name(node) for node in tree.args]})
        options = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
        if tree.args:
            if len(tree.args) > 1 or tree.func.id != "fragment" or "dim" in options:
                raise ValueError("its options need their names")
            options["dim"] = ast.literal_eval(tree.args[0])
        return Choice(name=tree.func.id, options=options)
    except (SyntaxError, ValueError) as cause:
        raise ConfigError(
            f"{place}.rule = {rule!r}: cannot be read ({cause}); expected a pattern such as "
            "fused(dim=0, parts=[2048, 256, 256])"
        ) from None


def _name(node: ast.expr) -> str:
    """``a.b`` as it stands there, or a text."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
