"""A call as bytes, and its outcome as bytes: what both ends of every pool share.

These pickles live in pipes between processes of one user; none is ever read from a file.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.core.errors import ConfigError, RankError

Dumps = Callable[[Any], bytes]
"""How a value becomes a pickle; a worker may not have all modules of the caller."""


def name_of(function: Any) -> str:
    """``module.name`` of a function or class, for messages."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or 'builtins'}.{name}"


def pack_call(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dumps: Dumps = pickle.dumps
) -> bytes:
    """A call as bytes.

    Raises:
        ConfigError: something in it cannot be sent to another process.
    """
    try:
        return dumps((function, tuple(args), dict(kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError) as cause:
        raise ConfigError(
            f"pool: {name_of(function)} cannot be sent to another process ({cause}); "
            "use a function defined at the top of a module, and plain arguments"
        ) from cause


def run_call(payload: bytes, dumps: Dumps = pickle.dumps) -> bytes:
    """Run a packed call; the outcome, good or bad, as bytes."""
    try:
        function, args, kwargs = pickle.loads(payload)  # noqa: S301 - from our own pipe
        return _good(function(*args, **kwargs), dumps)
    except BaseException as error:
        return _bad(error, dumps)


def construct(payload: bytes, dumps: Dumps = pickle.dumps) -> tuple[Any, bytes]:
    """Run a packed constructor; the object, or None, and the outcome as bytes."""
    try:
        cls, args, kwargs = pickle.loads(payload)  # noqa: S301 - from our own pipe
        return cls(*args, **kwargs), _good(None, dumps)
    except BaseException as error:
        return None, _bad(error, dumps)


def run_method(target: Any, payload: bytes, dumps: Dumps = pickle.dumps) -> bytes:
    """Run a packed (method name, args, kwargs) on ``target``; the outcome as bytes."""
    try:
        method, args, kwargs = pickle.loads(payload)  # noqa: S301 - from our own pipe
        bound: Callable[..., Any] = getattr(target, method)
        return _good(bound(*args, **kwargs), dumps)
    except BaseException as error:
        return _bad(error, dumps)


def unpack_outcome(outcome: bytes, where: str) -> Any:
    """The result, or the exception raised again with the remote traceback as a note.

    Args:
        outcome: from :func:`run_call` or :func:`run_method`.
        where: names the worker.
    """
    good, value, text = pickle.loads(outcome)  # noqa: S301 - from our own pipe
    if good:
        return value
    value.add_note(f"Raised on {where}:\n{text.rstrip()}")
    raise value


def _good(value: Any, dumps: Dumps) -> bytes:
    return dumps((True, value, ""))


def _bad(error: BaseException, dumps: Dumps) -> bytes:
    text = "".join(traceback.format_exception(error))
    rank_error = RankError(f"{type(error).__qualname__}: {error}")
    if not isinstance(error, Exception):  # an exit there must not become an exit here
        return pickle.dumps((False, rank_error, text))
    try:
        packed = dumps((False, error, text))
        pickle.loads(packed)  # noqa: S301 - some exceptions pack but do not unpack
    except Exception:  # its own packing failed, in whatever way: its text goes in its place
        return pickle.dumps((False, rank_error, text))
    return packed
