"""What makes a model another one than its family's: how its blocks are wired, and what they are.

Every option is plain by default, and one at a time may be anything else. The same value stands in
a job (``architecture: {residual: ladder}``), in a shape, and in ``config.json``, whose
``model_type`` then says that the model is not its family's: other programs refuse it instead of
misreading it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import ModelError, require
from shoal.ir.routing import Routing

_PREFIX = "shoal_"
# More than any router's scores differ by.
ALL_BIG = 1e4


class Residual(Value):
    """When the output of a sub-layer reaches the residual stream; its name alone will do.

    Args:
        name: when sub-layer outputs are added to the residual stream: ``standard``, immediately;
            ``ladder``, one sub-layer later, so that the all-reduce overlaps with the next
            sub-layer; ``desync``, all-reduced only in some sub-layers, with one stream per rank in
            between.
        layers: ladder: all, the upper half, or a list of blocks; the others are standard.
        every: desync: sub-layers per all-reduce (a block has two); the last one is always reduced.
        ranks: desync: number of streams; tensor parallelism is 1 or this number.
        rewire: ladder, desync: allow weights of a model with another residual architecture; not
            stored in directories.
    """

    name: Literal["standard", "ladder", "desync"] = "standard"
    layers: Literal["all", "upper_half"] | tuple[int, ...] = "all"
    every: PositiveInt = 2
    ranks: PositiveInt = 2
    rewire: bool = False

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        return {"name": raw} if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _of_its_name(self) -> Residual:
        for option, given in (("every", self.every), ("ranks", self.ranks)):
            require(
                self.name == "desync" or given == type(self).model_fields[option].default,
                f"residual.{option}",
                given,
                expected="desync in residual.name",
                error=ModelError,
            )
        require(
            self.name != "desync" or self.layers == "all",
            "residual.layers",
            self.layers,
            expected="all in a model with desync",
            error=ModelError,
        )
        return self

    @property
    def standard(self) -> bool:
        """Outputs reach the stream at once."""
        return self.name == "standard"

    @property
    def ladder(self) -> bool:
        """Outputs reach the stream one sub-layer late."""
        return self.name == "ladder"

    @property
    def desync(self) -> bool:
        """Ranks have streams of their own between sums."""
        return self.name == "desync"

    def late(self, num_layers: int) -> tuple[bool, ...]:
        """Of every block, whether its sub-layers read the stream without the one before."""
        if self.name != "ladder":
            return (False,) * num_layers
        if isinstance(self.layers, tuple):
            return tuple(layer in self.layers for layer in range(num_layers))
        first = 0 if self.layers == "all" else num_layers // 2
        return tuple(layer >= first for layer in range(num_layers))

    @property
    def apart(self) -> int:
        """Streams that a device which computes all of the model has."""
        return self.ranks if self.name == "desync" else 1

    def sums(self, num_layers: int) -> tuple[tuple[bool, bool], ...]:
        """Of every block, whether attention and feed-forward layer sum over the ranks."""
        every, last = self.every if self.name == "desync" else 1, 2 * num_layers
        kept = [place % every == 0 or place == last for place in range(1, last + 1)]
        return tuple(zip(kept[::2], kept[1::2], strict=True))

    def check(self, num_layers: int) -> None:
        """Refuse numbers that no model of so many blocks has.

        Raises:
            ModelError: names them.
        """
        if self.name == "desync":
            require(
                self.every <= 2 * num_layers,
                "residual.every",
                self.every,
                expected=f"at most {2 * num_layers}, the sub-layers of {num_layers} blocks",
                error=ModelError,
            )
        if isinstance(self.layers, tuple):
            require(
                bool(self.layers) and all(0 <= layer < num_layers for layer in self.layers),
                "residual.layers",
                list(self.layers),
                expected=f"numbers of blocks, 0 to {num_layers - 1}",
                error=ModelError,
            )


class Streams(Value):
    """How many streams of the same tokens the same weights compute; their number alone will do.

    Args:
        num: streams P.
        prefix: virtual tokens that each stream sees in every layer before the real ones; a single
            stream has none.
        smoothing: weight of the uniform mean in the learned mean of the streams, so that no stream
            vanishes.
    """

    num: PositiveInt = Field(default=1, le=64)
    prefix: PositiveInt = 48
    smoothing: float = Field(default=0.1, ge=0.0, le=1.0)

    @model_validator(mode="before")
    @classmethod
    def _number(cls, raw: Any) -> Any:
        return {"num": raw} if isinstance(raw, int) else raw


class FeedForward(Value):
    """What the feed-forward layers are; the name alone will do.

    Args:
        name: ``plain``, or ``duo``: a big and a small feed-forward layer in every block, and a
            router.
        small_ratio: width of the small layer, as a fraction of the big one.
        router: routing of tokens to big, small or no layer: trained (``linear``), ``random``, or
            ``fixed`` (always big).
        shifts: (share of the all-big model's feed-forward operations, what is taken from a route's
            score for all of the big one's cost so that routers spend that share), shares rising;
            measured when routers are trained, for requests that ask for a share.
    """

    name: Literal["plain", "duo"] = "plain"
    small_ratio: float = Field(default=0.125, gt=0.0, lt=1.0)
    router: Literal["linear", "random", "fixed"] = "fixed"
    shifts: tuple[tuple[float, float], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        return {"name": raw} if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _ordered(self) -> FeedForward:
        shares, shifts = zip(*self.shifts, strict=True) if self.shifts else ((), ())
        require(
            list(shares) == sorted(set(shares))
            and list(shifts) == sorted(shifts, reverse=True)
            and all(0 < share <= 1 for share in shares),
            "ffn.shifts",
            self.shifts,
            expected="pairs whose shares rise, above 0 and up to 1, and whose shifts fall",
            error=ModelError,
        )
        return self

    @property
    def duo(self) -> bool:
        """Every block has a big and a small layer, and a router."""
        return self.name == "duo"

    @property
    def shares(self) -> bool:
        """Requests may ask for a share of the computation."""
        return self.name == "duo" and self.router != "random" and bool(self.shifts)

    def shift(self, share: float | None) -> float:
        """What is taken from a route's score for all of the big one's cost.

        Args:
            share: of the all-big model's feed-forward operations, in (0, 1]; 1 is all big, and a
                share between those that were measured lies straight between them. None is what
                the model does by itself.
        """
        if share == 1 or (share is None and self.router == "fixed"):
            return -ALL_BIG
        if share is None:
            return 0.0
        shares, shifts = zip(*self.shifts, strict=True)
        at = min(max(1, bisect_left(shares, share)), len(shares) - 1)
        if at < 1 or not shares[0] < share < shares[-1]:
            return float(shifts[0] if share <= shares[0] else shifts[-1])
        part = (share - shares[at - 1]) / (shares[at] - shares[at - 1])
        return float(shifts[at - 1] + part * (shifts[at] - shifts[at - 1]))

    def small_width(self, ffn_hidden: int) -> int:
        """Width of the small layer, a multiple of 8."""
        return max(8, round(ffn_hidden * self.small_ratio / 8) * 8)


class Architecture(Value):
    """How a model differs from its family's.

    Args:
        residual: when the output of a sub-layer reaches the residual stream.
        streams: how often the same weights compute the same tokens.
        ffn: what the feed-forward layers are.
        moe: which experts a token goes to, in a mixture of experts.
    """

    residual: Residual = Residual()
    streams: Streams = Streams()
    ffn: FeedForward = FeedForward()
    moe: Routing = Routing()

    @model_validator(mode="after")
    def _one(self) -> Architecture:
        given = {
            "residual": self.residual.name != "standard",
            "streams": self.streams.num > 1,
            "ffn": self.ffn.name != "plain",
            "moe.gate": self.moe.gate.name != "softmax",
        }
        require(
            sum(given.values()) <= 1,
            "architecture",
            ", ".join(key for key, is_there in given.items() if is_there),
            expected="one of them",
            hint="leave the others out",
            error=ModelError,
        )
        return self

    @property
    def name(self) -> str:
        """What makes the trained model another one, in one word; empty where nothing does."""
        if self.residual.name != "standard":
            return self.residual.name
        if self.streams.num > 1:
            return "parscale"
        if self.ffn.name != "plain":
            return self.ffn.name
        return "" if self.moe.gate.name == "softmax" else self.moe.gate.name

    @property
    def shared_by_any(self) -> bool:
        """Any number of ranks can share the heads: nothing is wired for a number of its own."""
        return not (self.residual.desync or self.ffn.duo) and self.moe.gate == Routing().gate

    @property
    def rows_of_a_token(self) -> int:
        """Rows that one token is in a step that computes all of the model."""
        return self.streams.num * self.residual.apart

    @property
    def says(self) -> bool:
        """Something is not plain, if only in training."""
        return self != Architecture()

    @property
    def model_type(self) -> str:
        """``model_type`` of ``config.json``; empty where it is the family's."""
        return _PREFIX + self.name if self.name else ""

    def check(self, num_layers: int) -> None:
        """Refuse what no model of so many blocks can have.

        Raises:
            ModelError: says which option.
        """
        self.residual.check(num_layers)

    def to_huggingface(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The contents of ``config.json``, from those of the plain model of the same family."""
        if not self.name:
            return raw
        named = "".join(word.capitalize() for word in self.model_type.split("_"))
        return {
            **raw,
            **self.model_dump(mode="json", exclude_defaults=True, exclude={"residual": {"rewire"}}),
            "architectures": [f"{named}ForCausalLM"],
            "model_type": self.model_type,
            "base_model_type": raw["model_type"],
        }

    @classmethod
    def from_huggingface(
        cls, raw: dict[str, Any], where: str
    ) -> tuple[Architecture, dict[str, Any]]:
        """The option that ``config.json`` names, and the contents of the plain model's.

        Raises:
            ModelError: ``model_type`` names one, and the rest does not say the same.
        """
        from shoal.core.config import parse

        kind = raw.get("model_type")
        if not isinstance(kind, str) or "base_model_type" not in raw:
            return cls(), raw
        given = {key: raw[key] for key in cls.model_fields if key in raw}
        result = parse(cls, given, where=where)
        require(
            result.model_type == kind,
            f"{where}: model_type",
            kind,
            expected=f"{result.model_type!r}, which is what {', '.join(given) or 'nothing'} says",
            error=ModelError,
        )
        base = {key: value for key, value in raw.items() if key not in given}
        return result, {**base, "model_type": base.pop("base_model_type")}
