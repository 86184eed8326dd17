"""Bodies of requests and answers, in the form in which Qdrant has them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field, StrictInt, StrictStr, model_validator

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError
from shoal.fields.retrieve.collections import PointFilter
from shoal.fields.retrieve.index.protocols import Metric
from shoal.fields.retrieve.search.protocols import PointId, SearchError, SearchQuery
from shoal.fields.retrieve.search.served import NewPoint, ServedPoint

METRICS: dict[str, Metric] = {"Cosine": "cosine", "Dot": "ip", "Euclid": "l2"}
"""Qdrant's name of a distance -> Shoal's."""

POINTS = 10_000
"""Most points of a request or an answer."""

_V = TypeVar("_V", bound=Value)


def _point_id(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return str(uuid.UUID(value))
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise ValueError("expected a whole number from 0 to 2^63 - 1, or a UUID")


Id: TypeAlias = Annotated[StrictInt | StrictStr, BeforeValidator(_point_id)]
Vector: TypeAlias = list[float]
Limit: TypeAlias = Annotated[int, Ge(1), Le(POINTS)]


class _Body(Value):
    """A body in which null is the same as nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            return {name: value for name, value in raw.items() if value is not None}
        return raw


class TextInput(_Body):
    """A text in the place of a vector.

    Args:
        text: that is embedded, or whose words are looked for.
        model: as Qdrant has it; the server's embedder is the only one.
    """

    text: str
    model: str = ""


class VectorParams(_Body):
    """What the vectors of a collection are.

    Args:
        size: numbers of a vector.
        distance: ``Cosine``, ``Dot`` or ``Euclid``.
    """

    size: int
    distance: Literal["Cosine", "Dot", "Euclid"] = "Cosine"


class CreateCollection(_Body):
    """``PUT /collections/{name}``.

    Args:
        vectors: of the collection.
        text: attribute that BM25 reads, and that is embedded where a point has no vector.
    """

    vectors: VectorParams
    text: Annotated[str, Field(min_length=1, max_length=256)] = "text"


class PointBody(_Body):
    """A point.

    Args:
        id: of the tenant's.
        vector: numbers, or a text; nothing for that of the collection's text attribute.
        payload: name -> JSON.
    """

    id: Id
    vector: Vector | TextInput | None = None
    payload: dict[str, Any] = {}

    def point(self) -> NewPoint:
        """The same for a collection."""
        text = self.vector.text if isinstance(self.vector, TextInput) else None
        vector = None if isinstance(self.vector, TextInput) else self.vector
        return NewPoint(self.id, vector, self.payload, text)


class UpsertBody(_Body):
    """``PUT /collections/{name}/points``.

    Args:
        points: that come, or take the place of those with their ids.
    """

    points: Annotated[list[PointBody], Field(max_length=POINTS)]


class DeleteBody(_Body):
    """``POST /collections/{name}/points/delete``.

    Args:
        points: ids; unknown ones are passed over.
        filter: which points, in the place of ids.
    """

    points: Annotated[list[Id], Field(max_length=POINTS)] | None = None
    filter: PointFilter | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> DeleteBody:
        if (self.points is None) == (self.filter is None):
            raise ValueError("expected points, or filter")
        return self


class _Shown(_Body):
    """What an answer has of each point.

    Args:
        with_payload: all attributes, none, or these.
        with_vector: its vector.
    """

    with_payload: bool | list[str] = True
    with_vector: bool = False


class RetrieveBody(_Shown):
    """``POST /collections/{name}/points``.

    Args:
        ids: unknown ones are passed over.
    """

    ids: Annotated[list[Id], Field(max_length=POINTS)]


class ScrollBody(_Shown):
    """``POST /collections/{name}/points/scroll``.

    Args:
        limit: points of a page.
        offset: id with which the page begins.
        filter: which points.
    """

    limit: Limit = 10
    offset: Id | None = None
    filter: PointFilter | None = None


class CountBody(_Body):
    """``POST /collections/{name}/points/count``.

    Args:
        filter: which points.
        exact: counts are always exact.
    """

    filter: PointFilter | None = None
    exact: bool = True


class SearchParams(_Body):
    """How a search is done.

    Args:
        exact: compare all vectors.
        hnsw_ef: of Qdrant; has no effect here.
    """

    exact: bool = False
    hnsw_ef: int | None = None


class RankedBy(_Body):
    """``{"fusion": "rrf"}``, or ``{"rrf": {"k": 60}}``.

    Args:
        fusion: of the rankings of ``prefetch``.
        rrf: its option ``k``.
    """

    fusion: Literal["rrf"] | None = None
    rrf: dict[Literal["k"], Annotated[int, Ge(0), Le(1_000_000)]] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> RankedBy:
        if (self.fusion is None) == (self.rrf is None):
            raise ValueError("expected fusion, or rrf")
        return self

    @property
    def smoothing(self) -> int:
        """The k of the paper."""
        return (self.rrf or {}).get("k", 60)


class HybridInput(_Body):
    """A vector and a text that belong together.

    Args:
        nearest: the vector.
        text: the words.
    """

    nearest: Vector
    text: str | None = None


Query: TypeAlias = Vector | TextInput | HybridInput


class Prefetch(_Body):
    """One of several rankings that are fused.

    Args:
        query: a vector, a text, or both.
        using: the search method.
        filter: which points.
        limit: points that it gives.
        params: how it is done.
    """

    query: Query
    using: str = "dense"
    filter: PointFilter | None = None
    limit: Limit = 100
    params: SearchParams = SearchParams()


class _Ranked(_Shown):
    """Which of the best points an answer has.

    Args:
        filter: which points; holds in every ranking.
        limit: most points.
        offset: so many of the best are left out.
        score_threshold: points with worse scores are left out.
        params: how it is done.
    """

    filter: PointFilter | None = None
    limit: Limit = 10
    offset: Annotated[int, Ge(0), Le(POINTS)] = 0
    with_payload: bool | list[str] = False
    score_threshold: float | None = None
    params: SearchParams = SearchParams()


class QueryBody(_Ranked):
    """``POST /collections/{name}/points/query``.

    Args:
        query: a vector, a text, both, or how rankings are fused; nothing to scroll.
        prefetch: rankings that are fused.
        using: the search method.
    """

    query: RankedBy | Query | None = None
    prefetch: Annotated[list[Prefetch], Field(max_length=16)] = []
    using: str = "dense"

    @model_validator(mode="before")
    @classmethod
    def _several(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and isinstance(raw.get("prefetch"), Mapping):
            return {**raw, "prefetch": [raw["prefetch"]]}
        return raw

    @model_validator(mode="after")
    def _go_together(self) -> QueryBody:
        if isinstance(self.query, RankedBy) != bool(self.prefetch):
            raise ValueError("prefetch and query.fusion: expected both, or neither")
        return self


class SearchBody(_Ranked):
    """``POST /collections/{name}/points/search``, the older form of a query by a vector.

    Args:
        vector: of the query.
    """

    vector: Vector

    def query(self) -> QueryBody:
        """The same in the newer form."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return QueryBody(query=values.pop("vector"), **values)


def read(cls: type[_V], raw: Mapping[str, Any]) -> _V:
    """A body as its type.

    Raises:
        SearchError: it does not fit; names the field.
    """
    try:
        return parse(cls, raw, where="body")
    except ConfigError as cause:
        raise SearchError(str(cause)) from None


def asked(
    query: Query, params: SearchParams, tenant: str, *filters: PointFilter | None
) -> SearchQuery:
    """A query for a collection; all filters that there are have to hold."""
    given = tuple(one for one in filters if one is not None)
    where = PointFilter(must=given) if len(given) > 1 else next(iter(given), None)
    text = None if isinstance(query, list) else query.text
    vector = query if isinstance(query, list) else getattr(query, "nearest", None)
    return SearchQuery(vector=vector, text=text, where=where, tenant=tenant, exact=params.exact)


def point_id(text: str) -> PointId:
    """The id in a path.

    Raises:
        SearchError: it is none.
    """
    try:
        name: PointId = _point_id(int(text) if text.isascii() and text.isdecimal() else text)
    except ValueError as cause:
        raise SearchError(f"point id {text[:80]!r}: {cause}") from None
    return name


def shown(point: ServedPoint, with_payload: bool | Sequence[str]) -> dict[str, Any]:
    """A point in an answer."""
    result: dict[str, Any] = {"id": point.id}
    if point.score is not None:
        result |= {"version": 0, "score": point.score}
    if isinstance(with_payload, bool):
        result["payload"] = dict(point.payload) if with_payload else None
    else:
        result["payload"] = {
            name: value for name, value in point.payload.items() if name in with_payload
        }
    result["vector"] = None if point.vector is None else point.vector.tolist()
    return result
