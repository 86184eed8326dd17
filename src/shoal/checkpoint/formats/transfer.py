"""From any format to any other, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.checkpoint.convert import require_new
from shoal.checkpoint.formats import FORMATS
from shoal.checkpoint.formats.shoal import ShoalContents, ShoalFormat
from shoal.checkpoint.formats.universal import UniversalFormat
from shoal.checkpoint.inspect import find
from shoal.checkpoint.remote import is_address
from shoal.checkpoint.store import MODEL, Store
from shoal.checkpoint.universal.atomic import UniversalCheckpoint
from shoal.checkpoint.universal.convert import consolidate
from shoal.checkpoint.universal.protocols import RankLayout
from shoal.checkpoint.universal.spec import UniversalSpec
from shoal.core.config import Value, resolve
from shoal.core.errors import CheckpointError, ConfigError, ModelError
from shoal.core.files import parse_yaml
from shoal.core.parts import Choice
from shoal.ir import Architecture

if TYPE_CHECKING:
    from shoal.checkpoint.formats.protocols import CheckpointFormat, Contents


class TensorDifference(Value):
    """One tensor of two checkpoints.

    Args:
        kind: what differs.
        a: its shape and dtype in the first; empty where it is missing.
        b: the same in the second.
        largest: largest difference of an element, as both are read in fp64; of equal shapes.
        share: elements that differ, as a share of all.
    """

    name: str
    kind: Literal["equal", "only in A", "only in B", "shape", "dtype", "values"]
    a: str = ""
    b: str = ""
    largest: float | None = None
    share: float | None = None


def format_of(path: Path) -> str:
    """Name of the format of a directory or file.

    Raises:
        ModelError: none is recognised.
    """
    if not path.exists():
        raise ModelError(f"{path}: no such directory; give a checkpoint, a run or a model")
    for name in FORMATS:
        if FORMATS.build(name).holds(path):
            return name
    raise ModelError(
        f"{path}: a checkpoint of no known format; expected one of {', '.join(FORMATS)}"
    )


def name_of(contents: Contents) -> str:
    """Name of the format that opens what these contents are."""
    if isinstance(contents, UniversalCheckpoint):
        return "universal"
    return "shoal" if isinstance(contents, ShoalContents) else format_of(Path(contents.path))


def open_any(place: str | Path, *, spec: UniversalSpec | None = None) -> Contents:
    """Open a checkpoint: a path, or ``FORMAT:PATH`` to override detection.

    From a store at a URL, such as ``s3://bucket/run``, the latest step is read.

    Raises:
        ShoalError: it cannot be read; says why.
    """
    if is_store(place):
        position = find(place)
        return ShoalContents(Store(position.path).open(position.steps[-1], verify=False))
    chosen, path = _named(str(place))
    reader: CheckpointFormat = FORMATS.build(chosen or format_of(path))
    return reader.open(path, spec=spec)


def is_store(place: str | Path) -> bool:
    """Whether this is the address of a store; ``universal://DIR`` is not, but a format's path."""
    return is_address(place) and str(place).partition("://")[0] not in FORMATS


def transfer(
    source: str | Path,
    out: Path | str,
    to: Choice | str | dict[str, Any],
    *,
    mesh: RankLayout | None = None,
    spec: UniversalSpec | None = None,
) -> Path | str:
    """Write a checkpoint of any format in another one.

    Rank files that become universal go there directly; everything else passes through tensors
    that are read one after the other.

    Args:
        source: path, ``FORMAT:PATH``, or the address of a store.
        out: directory to make; of our own format it may be an address.
        to: the format, with its options.
        mesh: ranks to write for; one if not given.
        spec: how fragments of rank files combine, where they do not say it.

    Raises:
        CheckpointError: ``out`` exists, or the source cannot be read or held.
        ModelError: no format is recognised.
    """
    writer: CheckpointFormat = FORMATS.build(to)
    require_new(out, elsewhere=isinstance(writer, ShoalFormat), error=CheckpointError)
    if is_store(source):
        contents: Contents = open_any(source)
        writer.write(_emptied(out), contents, mesh=mesh or RankLayout())
        return out
    named, path = _named(str(source))
    reader: Any = FORMATS.build(named or format_of(path))
    if isinstance(writer, UniversalFormat) and hasattr(reader, "dumps"):
        return consolidate(reader.dumps(path), _emptied(out), spec=spec)
    contents = reader.open(path, spec=spec)
    writer.write(_emptied(out), contents, mesh=mesh or RankLayout())
    return out


def _emptied(out: Path | str) -> Any:
    """The place of a new checkpoint, which its writer wants to make itself."""
    if is_address(out):
        return out
    if Path(out).exists():
        Path(out).rmdir()
    return Path(out)


def convert_any(
    source: Path | str,
    out: Path | str,
    *,
    to: str,
    dtype: str | None = None,
    mesh: str | None = None,
    spec: Path | None = None,
    options: Sequence[str] = (),
    architecture: Sequence[str] = (),
) -> str:
    """What ``shoal model convert`` does.

    Args:
        source: a directory or file of any format, or the address of a store.
        out: directory to make; of our own format it may be an address.
        to: format to write; ``checkpoint`` is our own.
        dtype: cast weights to fp32, bf16 or fp16; huggingface and checkpoint.
        mesh: ranks to write for, as ``dp=2,tp=2``.
        spec: file of patterns for rank files.
        options: of the format, each as ``option=value``.
        architecture: what the model becomes, each as ``residual=ladder``; huggingface and
            checkpoint.

    Returns:
        What the source held and could not be read; usually nothing.

    Raises:
        ShoalError: it cannot be read or written so.
    """
    from shoal.checkpoint.convert import convert
    from shoal.checkpoint.inspect import FOREIGN

    name = "shoal" if to == "checkpoint" else to
    chosen = {"name": name, **dict(_option(word) for word in options)}
    FORMATS.build(chosen, where="--to")  # a wrong name or option is said before anything is read
    if mesh is not None and name not in ("deepspeed", "megatron"):
        raise ConfigError(f"--mesh = {mesh}: {to} has no files for ranks; leave it out")
    kind = find(source).kind
    if spec is not None and kind not in ("deepspeed", "megatron"):
        raise ConfigError(f"--spec = {spec}: {source} has no fragments to combine; leave it out")
    if kind not in FOREIGN and name in ("shoal", "huggingface") and not options:
        own: Any = "checkpoint" if name == "shoal" else name
        becomes = resolve(Architecture, environment={}, sets=list(architecture)).value
        convert(source, out, to=own, dtype=dtype, architecture=becomes)
        return ""
    if architecture:
        raise ConfigError(
            f"--architecture = {', '.join(architecture)}: only a checkpoint or a model directory "
            f"of this product becomes another, and is written as huggingface or checkpoint, "
            f"without options; convert {source} first"
        )
    if dtype is not None:
        if name != "huggingface":
            raise ConfigError(f"--dtype = {dtype}: {to} keeps what is stored; leave it out")
        chosen["dtype"] = dtype
    tokenizer = find(source).tokenizer
    if name == "huggingface" and tokenizer is not None:
        chosen.setdefault("tokenizer", str(tokenizer))
    patterns = UniversalSpec.load(spec) if spec is not None else None
    grid = RankLayout.parse(mesh) if mesh is not None else RankLayout()
    transfer(source, out, chosen, mesh=grid, spec=patterns)
    return _left_out(source, kind)


def _left_out(source: Path | str, kind: str) -> str:
    if kind != "megatron":
        return ""
    return str(FORMATS.build(kind).dumps(Path(source)).meta.get("left_out", ""))


def _option(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"--set {word}: expected option=value, such as zero=3")
    return key.strip(), parse_yaml(value, f"--set {key}")


def differences(
    a: str | Path, b: str | Path, *, weights_only: bool | None = None
) -> Iterator[TensorDifference]:
    """What differs between two checkpoints, tensor by tensor, across formats.

    Args:
        a: path, or ``FORMAT:PATH``.
        b: the other.
        weights_only: leave out the optimizer's state; if not given, where only one has any.

    Raises:
        ShoalError: one cannot be read.
    """
    one, two = open_any(a), open_any(b)
    first, second = list(one.names()), list(two.names())
    if weights_only is None:
        has = [any(not name.startswith(MODEL) for name in names) for names in (first, second)]
        weights_only = not all(has)
    if weights_only:
        first, second = ([n for n in names if n.startswith(MODEL)] for names in (first, second))
    held = set(second)
    for name in [*first, *(name for name in second if name not in set(first))]:
        yield _compared(name, one if name in first else None, two if name in held else None)


def _compared(name: str, one: Contents | None, two: Contents | None) -> TensorDifference:
    if one is None or two is None:
        result = _report(one, name) if one is not None else _report(two, name)
        kind: Any = "only in A" if two is None else "only in B"
        return TensorDifference(name=name, kind=kind, **{"a" if two is None else "b": result})
    described = {"a": _report(one, name), "b": _report(two, name)}
    if one.shape(name) != two.shape(name):
        return TensorDifference(name=name, kind="shape", **described)
    x, y = one.tensor(name), two.tensor(name)
    apart = (x.double() - y.double()).abs()
    # Nothing differs where both are infinite or no number in the same way.
    unequal = ~((x == y) | ((x != x) & (y != y)))
    largest = float(apart[unequal].max()) if bool(unequal.any()) else 0.0
    share = float(unequal.double().mean()) if unequal.numel() else 0.0
    kind = "values" if share else "dtype" if one.dtype(name) != two.dtype(name) else "equal"
    finite = largest if largest == largest and largest != float("inf") else None
    return TensorDifference(name=name, kind=kind, largest=finite, share=share, **described)


def _report(contents: Contents | None, name: str) -> str:
    assert contents is not None
    return f"{contents.dtype(name)} {'x'.join(map(str, contents.shape(name))) or 'scalar'}"


def _named(place: str) -> tuple[str, Path]:
    """Format and path; no format where it has to be found."""
    head, colon, rest = place.partition(":")
    if not colon or Path(place).exists():
        return "", Path(place)
    if head not in FORMATS:
        raise ConfigError(
            f"{place}: {head!r} is no format; expected FORMAT:PATH with one of {', '.join(FORMATS)}"
        )
    # universal://DIR is the same as universal:DIR.
    return head, Path(rest.removeprefix("//"))
