"""Eight bundled tables, dirt for them, and a model that learns from what two ways make of them."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from shoal.core.random import generator
from shoal.fields.data.prepare.guide import guide_table
from shoal.fields.data.prepare.pipeline import PrepPipeline

# The tables of scikit-learn without pixels, and the largest cross-sections of statsmodels: name ->
# target, and whether it is a class.
TABLES = {
    "iris": ("target", True),
    "wine": ("target", True),
    "breast_cancer": ("target", True),
    "diabetes": ("target", False),
    "randhie": ("mdvis", False),
    "fair": ("rate_marriage", True),
    "anes96": ("vote", True),
    "modechoice": ("choice", True),
}
_TARGET = "target"
# Rows that are taken of the larger ones; share of them that is held out.
_ROWS, _HELD_OUT = 3000, 0.3
# Of rows with anything missing; of numbers with a wrong unit; values of a column that is written as
# categories.
_GAPS, _WRONG, _FEW = 0.5, 0.01, 10


def load(name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns and target of a table."""
    target, _ = TABLES[name]
    if name in ("iris", "wine", "breast_cancer", "diabetes"):
        made = getattr(import_module("sklearn.datasets"), f"load_{name}")()
        names = [str(one).replace(" ", "_") for one in made.feature_names]
        return dict(zip(names, made.data.T.astype(float), strict=True)), made.target
    frame = import_module(f"statsmodels.datasets.{name}").load_pandas().data
    columns = {one: frame[one].to_numpy().astype(float) for one in frame.columns if one != target}
    return columns, frame[target].to_numpy()


def dirty(name: str, seed: int) -> tuple[Any, Any]:
    """Training and held-out rows as Arrow tables, both with the same sorts of dirt.

    Half of the rows miss something; one number in a hundred has a wrong unit; one column of numbers
    is text in two units, one of few values is text in several spellings; a number of the row and a
    constant say nothing.
    """
    columns, target = load(name)
    random = generator(seed, purpose=f"dirt in {name}")
    order = random.permutation(len(target))[:_ROWS]
    columns, y = {key: one[order].copy() for key, one in columns.items()}, target[order]
    few = [key for key, one in columns.items() if len(np.unique(one)) <= _FEW]
    many = [key for key in columns if key not in few]
    share = 1 - (1 - _GAPS) ** (1 / len(columns))
    table: dict[str, Any] = {"row": [f"r{at}" for at in order]}
    for key, values in columns.items():
        gone = random.random(len(y)) < share
        if key in few[:1]:
            words = [f"Kind {value:g}" for value in values]
            spelled = [
                [w, w.upper(), f" {w} "][at]
                for w, at in zip(words, random.integers(0, 3, len(y)), strict=True)
            ]
            table[key] = [None if lost else one for one, lost in zip(spelled, gone, strict=True)]
            continue
        if key not in few:
            values[random.random(len(y)) < _WRONG] *= 100
        if key in many[:1]:
            long = random.random(len(y)) < 0.5
            spelled = [
                f"{v:.6g} m" if m else f"{100 * v:.6g} cm"
                for v, m in zip(values, long, strict=True)
            ]
            table[key] = [None if lost else one for one, lost in zip(spelled, gone, strict=True)]
            continue
        table[key] = pa.array(np.where(gone, np.nan, values), from_pandas=True)
    table["source"] = ["bundled"] * len(y)
    table[_TARGET] = [f"class {one}" for one in y] if TABLES[name][1] else y.astype(float)
    whole = pa.table(table)
    cut = math.ceil(len(y) * (1 - _HELD_OUT))
    return whole.slice(0, cut), whole.slice(cut)


def score(name: str, train: Any, test: Any) -> float:
    """Accuracy or R2 of a linear model with its defaults on held-out rows."""
    linear = import_module("sklearn.linear_model")
    model = linear.LogisticRegression(max_iter=2000) if TABLES[name][1] else linear.Ridge()
    model.fit(*train)
    return float(model.score(*test))


def guided(train: Any, test: Any) -> tuple[Any, Any]:
    """What the guide's steps, fitted on the training rows, make of both."""
    steps = [choice for choice, _ in guide_table(train, _TARGET)]
    made = PrepPipeline(steps, _TARGET)
    pairs = []
    for rows in (made.fit_transform(train), made.transform(test)):
        y = rows[_TARGET].to_numpy()
        pairs.append((np.column_stack(rows.drop_columns([_TARGET]).columns), y))
    return pairs[0], pairs[1]


def usual(train: Any, test: Any) -> tuple[Any, Any]:
    """Incomplete training rows dropped, then scikit-learn's defaults, fitted on what is left."""
    compose, impute = import_module("sklearn.compose"), import_module("sklearn.impute")
    scale, pipe = import_module("sklearn.preprocessing"), import_module("sklearn.pipeline")
    numbers = [f.name for f in train.schema if pa.types.is_floating(f.type) and f.name != _TARGET]
    texts = [f.name for f in train.schema if f.name not in (*numbers, _TARGET)]
    places = list(range(len(numbers))), list(range(len(numbers), len(numbers) + len(texts)))
    made = compose.ColumnTransformer(
        [
            (
                "numbers",
                pipe.make_pipeline(impute.SimpleImputer(), scale.StandardScaler()),
                places[0],
            ),
            (
                "texts",
                pipe.make_pipeline(
                    impute.SimpleImputer(strategy="most_frequent"),
                    scale.OneHotEncoder(handle_unknown="ignore"),
                ),
                places[1],
            ),
        ]
    )

    def matrix(rows: Any) -> Any:
        columns = [np.array(rows[one].to_pylist(), object) for one in (*numbers, *texts)]
        result = np.column_stack(columns)
        result[result == None] = np.nan  # noqa: E711
        return result

    complete = train.filter(
        pa.array([all(v is not None for v in row.values()) for row in train.to_pylist()])
    )
    fitted = made.fit_transform(matrix(complete))
    y = [rows[_TARGET].to_numpy() for rows in (complete, test)]
    return (fitted, y[0]), (made.transform(matrix(test)), y[1])
