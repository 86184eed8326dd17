"""The error tree: complete, drawn, and with messages that say what to do."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import shoal.core
from shoal.core import errors
from shoal.core.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    ShoalError,
    nearest,
    require,
)
from shoal.core.extras import import_extra


def classes() -> dict[str, type[ShoalError]]:
    return {
        name: found
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, ShoalError)
    }


def drawn() -> dict[str, str]:
    """Class -> parent, as the docstring of the module draws them."""
    parents: dict[str, str] = {}
    stack: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ((?:│   |    )*)((?:├── |└── )?)(\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4 + bool(match[2])
            del stack[depth:]
            if stack:
                parents[match[3]] = stack[-1]
            stack.append(match[3])
    return parents


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    actual = {
        name: cls.__bases__[0].__name__ for name, cls in classes().items() if cls is not ShoalError
    }
    assert drawn() == actual


def test_all_names_are_handed_on() -> None:
    assert sorted(errors.__all__) == sorted(
        [*classes(), "install", "nearest", "rebuild", "require", "suggestion"]
    )


def test_no_shoal_error_is_defined_elsewhere_in_core() -> None:
    """One tree, in one file."""
    for info in pkgutil.walk_packages(shoal.core.__path__, "shoal.core."):
        module = importlib.import_module(info.name)
        for result in vars(module).values():
            if isinstance(result, type) and issubclass(result, ShoalError):
                assert result.__module__ == "shoal.core.errors"


def test_require_says_where_given_expected_and_hint() -> None:
    require(True, "a.b", 1, expected="anything")
    with pytest.raises(ConfigError) as caught:
        require(False, "parallel.tp", 4, expected="1, 2 or 3", hint="use 2")
    assert str(caught.value) == "parallel.tp = 4: expected 1, 2 or 3; use 2"
    with pytest.raises(DataError, match=r"expected text$"):
        require(False, "data", b"", expected="text", error=DataError)


def test_nearest() -> None:
    assert nearest("paralel", ["parallel", "seed"]) == "did you mean 'parallel'?"
    assert nearest("zzz", ["parallel"]) == ""


def test_missing_extra() -> None:
    assert str(MissingExtraError("ray", "cluster", "the pool")) == (
        "the pool needs the package 'ray'; install it with pip install 'shoal-ml[cluster]'"
    )
    with pytest.raises(MissingExtraError, match=r"it needs the package 'no_such'.*\[run\]"):
        import_extra("no_such.inner", extra="run", purpose="it")
    assert import_extra("math", extra="run", purpose="it").pi > 3


def test_a_package_that_is_broken_is_not_called_missing(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    broken = Path(str(tmp_path)) / "broken_pkg"
    broken.mkdir()
    (broken / "__init__.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_extra("broken_pkg", extra="run", purpose="it")


def test_a_suggestion_ends_a_sentence() -> None:
    assert errors.suggestion("tpp", ["tp", "cp"]) == "; did you mean 'tp'?"
    assert errors.suggestion("something else", ["tp", "cp"]) == ""
