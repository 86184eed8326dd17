"""Parts: the interchangeable techniques, found by kind and name.

A *part* is one technique in one file: a frozen, keyword-only dataclass whose
fields are its options. A room lists the parts of one kind in a plain lazy table::

    OPTIMIZERS = PartTable("optimizer", {"adamw": "shoal.train.optim.adamw:AdamW"})

A config chooses a part by name, in one of two spellings::

    optimizer: adamw
    optimizer: {name: adamw, lr: 1e-3}

Third parties add parts through the entry-point group ``shoal.parts``; the name of
the entry point is ``<kind>.<name>``::

    [project.entry-points."shoal.parts"]
    "optimizer.lion" = "my_package.lion:Lion"

A part's module must import without torch, so that planning needs none; what runs
imports torch inside its methods.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import (
    Annotated,
    Any,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from shoal.core.bounds import check_bounds, in_words
from shoal.core.errors import ConfigError, UnknownKeyError, UnknownPartError, suggestion

# Where the table of each kind lives. A room adds its line here when it opens a
# kind; modules are named, not imported, so the ground floor depends on nothing.
KINDS: dict[str, str] = {
    "job": "shoal.fields:JOBS",
    "study": "shoal.claims:STUDIES",
    "sink": "shoal.core.meter:SINKS",
    "pool": "shoal.core.pool:POOLS",
    "probe": "shoal.train:PROBES",
    "law": "shoal.cost.scaling:LAWS",
    "log": "shoal.cost.imports:LOGS",
    "planner": "shoal.plan.strategy:PLANNERS",
    "tuner": "shoal.plan.tune:TUNERS",
    "emitter": "shoal.plan.emit:EMITTERS",
    "path_planner": "shoal.plan.paths:PATH_PLANNERS",
    "mapper": "shoal.memory.mapping:MAPPERS",
    "workload": "shoal.cost.workloads:WORKLOADS",
    "scheduler": "shoal.plan.batching:SCHEDULERS",
    "phase": "shoal.plan.batching:PHASES",
    "kv": "shoal.plan.batching:KV_MANAGERS",
    "preempt": "shoal.plan.batching:PREEMPTIONS",
    "balancer": "shoal.plan.balance:BALANCERS",
    "placer": "shoal.plan.placement:PLACERS",
    "assigner": "shoal.plan.balance:ASSIGNERS",
    "memory": "shoal.serve:MEMORIES",
    "speculative": "shoal.serve.decode:SPECULATORS",
    "accept": "shoal.serve.decode:ACCEPTANCES",
    "tree": "shoal.plan.trees:TREES",
    "decode": "shoal.serve.decode:DECODES",
    "unmask": "shoal.serve.decode.diffusion:UNMASKS",
    "refresh": "shoal.serve.decode.diffusion:REFRESHES",
    "iteration": "shoal.serve.decode.diffusion:ITERATIONS",
    "hogwild_layout": "shoal.serve.decode:HOGWILD_LAYOUTS",
    "activation": "shoal.memory:ACTIVATIONS",
    "schedule": "shoal.plan.schedules:SCHEDULES",
    "kernel": "shoal.kernel:KERNELS",
    "weight_format": "shoal.kernel:WEIGHT_FORMATS",
    "kv_format": "shoal.kernel:KV_FORMATS",
    "family": "shoal.model:FAMILIES",
    "gate": "shoal.model:GATES",
    "quantizer": "shoal.model:QUANTIZERS",
    "corpus": "shoal.corpora:CORPORA",
    "packing": "shoal.corpora:PACKINGS",
    "optimizer": "shoal.train:OPTIMIZERS",
    "lr_schedule": "shoal.train:LR_SCHEDULES",
    "pattern": "shoal.checkpoint.universal:PATTERNS",
    "checkpoint_format": "shoal.checkpoint.formats:FORMATS",
    "shard": "shoal.parallel:SHARDS",
    "offload": "shoal.memory:OFFLOADS",
    "context": "shoal.parallel:CONTEXTS",
    "sync": "shoal.parallel:SYNCS",
    "save_mode": "shoal.checkpoint:SAVE_MODES",
    "launch": "shoal.train:LAUNCHERS",
    "peft": "shoal.train:PEFTS",
    "drafter": "shoal.train:DRAFTERS",
    "locator": "shoal.train.watch:LOCATORS",
    "memory_code": "shoal.checkpoint.inmemory:MEMORY_CODES",
    "clusterer": "shoal.fields.data.cluster:CLUSTERERS",
    "curator": "shoal.fields.data.curate:CURATORS",
    "text_filter": "shoal.fields.data.filters:TEXT_FILTERS",
    "data_scorer": "shoal.fields.data.prune:DATA_SCORERS",
    "data_selector": "shoal.fields.data.prune:DATA_SELECTORS",
    "miner": "shoal.fields.data.mine:MINERS",
    "log_parser": "shoal.fields.data.logs:LOG_PARSERS",
    "anomaly_detector": "shoal.fields.data.logs:ANOMALY_DETECTORS",
    "superposition": "shoal.fields.data.sparse_coding:SUPERPOSITIONS",
    "deduper": "shoal.fields.data.dedupe:DEDUPERS",
    "preparation": "shoal.fields.data.prepare:PREPARATIONS",
    "example_source": "shoal.fields.federate.learn:EXAMPLE_SOURCES",
    "partitioner": "shoal.fields.federate.learn:PARTITIONERS",
    "learner": "shoal.fields.federate.learn:LEARNERS",
    "client_scheduler": "shoal.fields.federate.schedule:CLIENT_SCHEDULERS",
    "server_optimizer": "shoal.fields.federate.aggregate:SERVER_OPTIMIZERS",
    "update_compressor": "shoal.fields.federate.compress:UPDATE_COMPRESSORS",
    "vi_problem": "shoal.fields.federate.vi:VI_PROBLEMS",
    "vi_method": "shoal.fields.federate.vi:VI_METHODS",
    "coded_scheme": "shoal.fields.federate.coded:CODED_SCHEMES",
    "attack": "shoal.fields.federate.attacks:ATTACKS",
    "federation_emitter": "shoal.fields.federate.flower:FEDERATION_EMITTERS",
    "robust_rule": "shoal.fields.federate.robust:ROBUST_RULES",
    "privacy": "shoal.fields.federate.privacy:PRIVACY",
    "aggregation_plane": "shoal.fields.federate.planes:AGGREGATION_PLANES",
    "topology": "shoal.fields.federate.gossip:TOPOLOGIES",
    "gossip_policy": "shoal.fields.federate.gossip:GOSSIP_POLICIES",
    "flow_training": "shoal.fields.federate.ddm:FLOW_TRAININGS",
    "expert_mixture": "shoal.fields.federate.ddm:EXPERT_MIXTURES",
    "ranker": "shoal.fields.retrieve.grank:RANKERS",
    "function_backend": "shoal.fields.retrieve.serverless:FUNCTION_BACKENDS",
    "vector_index": "shoal.fields.retrieve.index:VECTOR_INDEXES",
    "recommender": "shoal.fields.retrieve.recommend:RECOMMENDERS",
    "search_method": "shoal.fields.retrieve.search:SEARCH_METHODS",
    "embedder": "shoal.fields.retrieve.search:EMBEDDERS",
    "passage_index": "shoal.fields.retrieve.datastore:PASSAGE_INDEXES",
    "tower_training": "shoal.fields.retrieve.towers:TOWER_TRAININGS",
    "node_embedder": "shoal.fields.graph:NODE_EMBEDDERS",
    "community_expander": "shoal.fields.graph.communities:COMMUNITY_EXPANDERS",
    "aggregator": "shoal.fields.graph:AGGREGATORS",
    "graph_split": "shoal.fields.graph.deep:GRAPH_SPLITS",
    "feature_source": "shoal.fields.graph:FEATURE_SOURCES",
    "attention_kernel": "shoal.claims.lab.attention_kernels:ATTENTION_KERNELS",
    "claim": "shoal.claims:CLAIMS",
}


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def part(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a part: a frozen keyword-only dataclass that refuses unknown options.

    A part built with a number beyond the bounds of its annotation raises ``ConfigError``.
    """
    cls.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    result = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    construct = result.__init__

    @functools.wraps(construct)
    def checked(self: Any, **options: Any) -> None:
        # Before the rules between options, which may rely on the bounds.
        check_bounds(type(self), options, lambda: _spelled(type(self)))
        construct(self, **options)

    result.__init__ = checked  # type: ignore[method-assign]
    return result


def load_object(path: str) -> Any:
    """Import ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def lazy_names(package: str, /, **places: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package some names of which are imported when they are first used.

    Args:
        package: its ``__name__``.
        places: name -> module below the package.
    """

    def get(name: str) -> Any:
        if name in places:
            return load_object(f"{package}.{places[name]}:{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


@functools.cache
def _third_party() -> dict[str, dict[str, metadata.EntryPoint]]:
    result: dict[str, dict[str, metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group="shoal.parts"):
        kind, _, name = entry.name.partition(".")
        if kind not in KINDS or not name:
            raise ConfigError(
                f"entry point {entry.name!r} of group shoal.parts: expected <kind>.<name> "
                f"with a kind of {', '.join(KINDS)}"
            )
        result.setdefault(kind, {})[name] = entry
    return result


class Choice(BaseModel):
    """A part chosen by name, with its options: what a config holds before the part is built.

    Reads ``"adamw"`` and ``{"name": "adamw", "lr": 0.001}``; writes the shorter one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value, "options": {}}
        if isinstance(value, Mapping) and "name" in value and "options" not in value:
            return {
                "name": value["name"],
                "options": {key: item for key, item in value.items() if key != "name"},
            }
        return value

    @model_serializer
    def _write(self) -> str | dict[str, Any]:
        return {"name": self.name, **self.options} if self.options else self.name

    def __hash__(self) -> int:
        if not self.options:  # of most; planners hash them often
            return hash(self.name)
        return hash((self.name, frozenset(map(_hashable, self.options.items()))))

    def __str__(self) -> str:
        if not self.options:
            return self.name
        inner = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({inner})"


class PartTable(Mapping[str, str]):
    """The lazy table of the parts of one kind: name -> ``"module:Class"``.

    Args:
        kind: what the parts are, as spelled in :data:`KINDS` and in error messages.
        entries: the room's own parts.
        about: what such a part decides and where it is chosen, in Markdown, for the reference.
        protocol: ``"module:Class"``, what a part of the kind promises.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, str], *, about: str = "", protocol: str = ""
    ) -> None:
        self.kind = kind
        self.about = about
        self.protocol = protocol
        self._own = dict(entries)
        self._loaded: dict[str, type[Any]] = {}

    def __getitem__(self, name: str) -> str:
        if name in self._own:
            return self._own[name]
        return self._entry_points()[name].value

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in self._entry_points() if name not in self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        return _third_party().get(self.kind, {})

    def load(self, name: str, *, where: str = "") -> type[Any]:
        """The class of the part called ``name``.

        Raises:
            UnknownPartError: no such part; the message lists those that exist.
        """
        try:
            path = self[name]
        except KeyError:
            raise UnknownPartError(
                f"{where or self.kind} = {name!r}: expected one of {', '.join(self)}"
                + suggestion(name, self)
            ) from None
        if path not in self._loaded:
            self._loaded[path] = load_object(path)
        return self._loaded[path]

    def offered(self, work: Any, machine: Any) -> Iterator[tuple[Choice, Any]]:
        """What the parts offer for a piece of work, in the order of the table.

        A part that may be proposed has a class method ``candidates(work, machine)``: itself with
        the options that are worth trying there, or pairs of that and what goes with it.

        Yields:
            The choice, and what goes with it; None where that is nothing.
        """
        for name in self.proposable():
            for one in self.load(name).candidates(work, machine):
                part, more = one if isinstance(one, tuple) else (one, None)
                yield Choice.model_construct(name=name, options=_given(part)), more

    def proposable(self) -> tuple[str, ...]:
        """The parts that may be proposed without being asked for."""
        return tuple(name for name in self if hasattr(self.load(name), "candidates"))

    def build(self, choice: Choice | str | Mapping[str, Any], *, where: str = "") -> Any:
        """Construct the chosen part from its name and options.

        Raises:
            UnknownPartError: no such part.
            UnknownKeyError: an option that the part does not have.
            ConfigError: an option with a wrong value.
        """
        where = where or self.kind
        chosen = choice if isinstance(choice, Choice) else _choice(choice, where)
        cls = self.load(chosen.name, where=where)
        try:
            return _adapter(cls).validate_python(dict(chosen.options))
        except ValidationError as cause:
            check_bounds(cls, chosen.options, lambda: f"{where}.{chosen.name}")
            known = keys_at(cls, cause.errors()[0]["loc"][:-1])
            raise explain(cause, f"{where}.{chosen.name}", known=known) from None

    def spell(self, instance: object) -> Choice:
        """The choice that builds ``instance`` again; options at their defaults are left out."""
        name = self.name_of(type(instance))
        if name is None:
            raise UnknownPartError(
                f"{type(instance).__qualname__} is in no table of {self.kind} parts"
            )
        return Choice(name=name, options=_given(instance))

    def name_of(self, cls: type[Any]) -> str | None:
        """The name of a part in this table; None for any other class."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name in self if self[name] == path), None)


def _hashable(option: tuple[str, Any]) -> tuple[str, Any]:
    """An option with its value as text, unless that is a number or a text already."""
    key, value = option
    if value is None or isinstance(value, float | int | str):
        return option
    return key, json.dumps(value, sort_keys=True, default=str)


def table(kind: str) -> PartTable:
    """The table of the parts of ``kind``, imported now.

    Raises:
        UnknownPartError: there is no such kind.
    """
    if kind not in KINDS:
        raise UnknownPartError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    table: PartTable = load_object(KINDS[kind])
    return table


def _spelled(cls: type[Any]) -> str:
    """``kind.name`` of a part in a message; the name of the class if no table lists it."""
    for kind in KINDS:
        if name := table(kind).name_of(cls):
            return f"{kind}.{name}"
    return cls.__qualname__


def options_of(cls: type[Any]) -> tuple[str, ...]:
    """The names of the options of a part."""
    return tuple(field.name for field in dataclasses.fields(cls))


def keys_at(cls: type[Any], location: Sequence[int | str]) -> tuple[str, ...]:
    """The keys at a place inside a part or a value; none where nothing is known of it."""
    for piece in location:
        if dataclasses.is_dataclass(cls):
            hint = get_type_hints(cls).get(str(piece))
        else:
            info = cls.model_fields.get(str(piece))
            hint = info and info.annotation
        inner = next(_values(hint), None)
        if inner is None:
            return ()
        cls = inner
    return options_of(cls) if dataclasses.is_dataclass(cls) else tuple(cls.model_fields)


def _values(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from _values(get_args(annotation)[0])
    else:
        for inner in get_args(annotation):
            yield from _values(inner)


def meanings(cls: type[Any]) -> dict[str, str]:
    """Option -> what it means, from the ``Args`` of its docstring and of those it builds on."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        meanings |= _meanings(base.__doc__ or "")
    return meanings


def _meanings(text: str) -> dict[str, str]:
    meanings: dict[str, str] = {}
    inside, name = False, ""
    for line in inspect.cleandoc(text).splitlines():
        if line.strip() == "Args:":
            inside = True
        elif inside and line and not line.startswith(" "):
            break
        elif inside and (match := re.match(r"^    (\w+): (.*)$", line)):
            name = match.group(1)
            meanings[name] = match.group(2).strip()
        elif inside and line.strip() and name:
            meanings[name] += " " + line.strip()
    return meanings


def explain(cause: ValidationError, where: str, known: tuple[str, ...] = ()) -> ConfigError:
    """The first complaint of pydantic in the house's words: where, given, expected.

    Args:
        cause: what pydantic raised.
        where: the place of the validated value in the whole configuration.
        known: the keys that exist at the top, for spelling hints.
    """
    first = first_error(cause)
    keys = _keys(first)
    place = ".".join([where, *keys]).strip(".")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        key = str(first["loc"][-1])
        return UnknownKeyError(
            f"{place}: no such key"
            + suggestion(key, known)
            + (f"; there are {', '.join(known)}" if known else "")
        )
    if first["type"] == "missing":
        return ConfigError(f"{place}: missing; give a value")
    # A value of several types has an error of each of them, all at its place.
    same = [one for one in cause.errors(include_url=False) if _keys(one) == keys]
    reasons = dict.fromkeys(map(_reason, [first] if len(keys) == len(first["loc"]) else same))
    return ConfigError(f"{place} = {first['input']!r}: {', or '.join(reasons)}")


# How pydantic names the type of a union that an error belongs to; no key is spelled so.
_UNION_TYPE = re.compile(r"(constrained-)?(int|float|str|bool|date)|none|(function-)?[\w-]+\[.*\]")


def _keys(error: ErrorDetails) -> list[str]:
    """Where an error is, in keys and places of the configuration."""
    return [
        str(piece)
        for piece in error["loc"]
        if not (isinstance(piece, str) and _UNION_TYPE.fullmatch(piece))
    ]


def _reason(error: ErrorDetails) -> str:
    if error["type"].startswith(("greater_than", "less_than", "multiple_of")):
        return f"expected {in_words(error['ctx'])}"
    return error["msg"][0].lower() + error["msg"][1:]


def first_error(cause: ValidationError) -> ErrorDetails:
    """What is wrong in what was given; only if nothing is, what was not given."""
    errors = cause.errors(include_url=False)
    return next((one for one in errors if one["type"] != "missing"), errors[0])


def _choice(value: str | Mapping[str, Any], where: str) -> Choice:
    try:
        return Choice.model_validate(value)
    except ValidationError as cause:
        raise explain(cause, where, known=("name",)) from None


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def _given(instance: Any) -> dict[str, Any]:
    """Options of a part that differ from their defaults."""
    return {
        field.name: getattr(instance, field.name)
        for field in dataclasses.fields(instance)
        if getattr(instance, field.name) != _default(field)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING
