"""``shoal plan decode --hetero``: which drafter, tree and layers go beside a host (Dovetail)?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.ir import Machine, ModelShape
    from shoal.model.drafters.files import DrafterConfig
    from shoal.plan.heterogeneous import Heterogeneous, Placed
    from shoal.plan.small_device import SmallDevice
    from shoal.plan.trees.drafting import RowCosts

__all__ = ["Asked", "hetero"]

_SHOWN = (1, 2, 4, 8, 12, 16, 24, 32)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked, as options have it.

    Args:
        drafters: directories.
        model: the target.
        costs: a table of the host's steps; None predicts them.
        machine: the host.
        draft_machine: the device beside it; None is another one like the host.
        precision: fp32 or bf16.
        memory_cap: bytes of that device, such as 3GiB; None takes all it has.
        link_gb_s: 10^9 byte/s between both.
        link_us: us of a message besides.
        context: tokens of the longest request; None for the model's limit.
        overlap: the drafter goes on while the target verifies.
    """

    drafters: Sequence[Path]
    model: str | None
    costs: Path | None
    machine: str
    draft_machine: str | None
    precision: str
    memory_cap: str | None
    link_gb_s: float
    link_us: float
    context: int | None
    overlap: bool


def hetero(asked: Asked, output: Format) -> None:
    """Print the ranked table, and the best as a snippet of a serving job.

    Raises:
        ConfigError: an option is missing or wrong.
        ModelError: a drafter is of another kind or target, or nobody judged it.
        PlanError: the memory is too small for every drafter.
    """
    from shoal.app.show import as_json
    from shoal.core.errors import ConfigError, require
    from shoal.core.files import to_yaml
    from shoal.core.parts import Choice, table
    from shoal.core.sizes import bytes_of
    from shoal.cost.shapes import resolve
    from shoal.machine.described import load
    from shoal.plan.decode_measured import find, how_to, sentence
    from shoal.plan.small_device import SmallDevice

    if asked.model is None:
        raise ConfigError("plan decode --hetero: give --model, the target's directory or name")
    require(asked.link_gb_s > 0, "--link-gb-s", asked.link_gb_s, expected="above 0")
    require(asked.link_us >= 0, "--link-us", asked.link_us, expected="0 or more")
    shape = resolve(asked.model)
    configs = _configs(asked.drafters, shape, asked.model)
    limit = shape.max_position
    context = limit if asked.context is None else asked.context
    require(1 <= context <= limit, "--context", context, expected=f"1 to {limit}, which "
            f"{shape.name} was made for")  # fmt: skip
    beside = load(asked.draft_machine or asked.machine)
    known, here, of_host = _host(asked, asked.model)
    part = table("speculative").build(Choice(name="dovetail", options={"path": ""}))
    block = table("kv").build(Choice(name="paged")).block_size
    device = SmallDevice(
        machine=beside, shape=shape, precision=asked.precision,
        places=-(-context // block) * block, depth=part.depth, breadth=part.breadth,
    )  # fmt: skip
    cap = beside.device.main_memory.capacity_bytes
    if asked.memory_cap is not None:
        cap = bytes_of(asked.memory_cap)
    require(cap > 0, "--memory-cap", asked.memory_cap, expected="bytes above 0, such as 3GiB")
    options = [
        device.option(path, int(config.options.get("layers", 1)), config.calibration)
        for path, config in configs.items()
    ]
    ranked = _case(asked, device, known, int(cap)).rank(options)
    plain, best = 1 / known.seconds(1), ranked[0]
    snippet = None
    if best.tokens_per_s > plain:
        right = next(one.right for one in options if one.name == best.name)
        snippet = {
            "precision": asked.precision,
            # The caches there are as long as these say.
            "max_position": context,
            "kv_tokens": device.places,
            "speculative": _speculative(asked, best, right, beside),
        }
    sources = {
        "tokens": "by each drafter's calibration, on held-out text",
        "verify": of_host,
        "draft": f"estimated by the cost model for {beside.name}, {asked.precision}, as are the "
        "target's layers there",
        "link": f"{asked.link_gb_s:g} GB/s and {asked.link_us:g} us a message (--link-gb-s, "
        "--link-us)",
        "tokens_per_s": "follows from these; nothing was run",
    }
    large = {one.name: one.nbytes for one in options if one.nbytes > cap}
    # What was measured here does not say beside which other machine.
    kept = None if asked.draft_machine else find(here, target=configs[best.name].target)
    measured = () if kept is None else kept.of("dovetail")
    if output is Format.json:
        as_json(
            {
                "drafter": "dovetail",
                "memory_cap": int(cap),
                "plain_tokens_per_s": plain,
                "sources": sources,
                "left_out": large,
                "measured": [one.model_dump() for one in measured],
                "rows": [{**one._asdict(), "over_plain": one.tokens_per_s / plain}
                         for one in _shown(ranked)],
                "best": snippet,
            }
        )  # fmt: skip
        return
    _table(f"dovetail on {beside.name} beside the host, {shape.name}", ranked, plain, int(cap))
    for name, nbytes in large.items():
        typer.echo(f"left out: {name} takes {nbytes} bytes")
    for name, source in sources.items():
        typer.echo(f"{name.replace('tokens_per_s', 'tokens/s')}: {source}")
    if measured:
        typer.echo(sentence("dovetail", measured))
    else:
        typer.echo(
            "whole answers were not measured with such a device; to see what pays: "
            + how_to("dovetail", asked.model, best.name)
        )
    if snippet is None:
        typer.echo("plain decoding is as fast as the best of these; leave speculative out")
    else:
        typer.echo(f"\n{to_yaml(snippet)}", nl=False)


def _case(asked: Asked, device: SmallDevice, known: RowCosts, cap: int) -> Heterogeneous:
    """The host, the device and the way between them."""
    from shoal.plan.heterogeneous import Heterogeneous
    from shoal.plan.small_device import layers_share

    shape = device.shape
    return Heterogeneous(
        verify=known,
        hidden=shape.hidden,
        itemsize=device.itemsize,
        memory_cap=cap,
        link_s=1e-6 * asked.link_us,
        link_bytes_per_s=1e9 * asked.link_gb_s,
        overlap=asked.overlap,
        num_layers=shape.num_layers,
        layer_bytes=device.layer_bytes,
        # Models of another architecture are not cut.
        layer=None if shape.architecture.name else device.layer,
        head_s=known.seconds(1) * (1 - layers_share(shape)),
    )


def _host(asked: Asked, model: str) -> tuple[RowCosts, Mapping[str, str], str]:
    """What the host's steps take, the fingerprint of whose they are, and how it is known."""
    from shoal.machine.described import load
    from shoal.machine.fingerprint import fingerprint
    from shoal.plan.decode import predicted_costs
    from shoal.plan.trees.drafting import RowCosts

    if asked.costs is not None:
        return (
            RowCosts.read(asked.costs),
            fingerprint(),
            f"measured steps of the host, {asked.costs}",
        )
    host = load(asked.machine)
    known = predicted_costs(host, model, asked.precision)
    told = (
        f"estimated by the cost model for {host.name}, {asked.precision}; to measure: shoal probe "
        "decode, and --costs"
    )
    return known, host.fingerprint, told


def _configs(drafters: Sequence[Path], shape: ModelShape, model: str) -> dict[str, DrafterConfig]:
    """What each drafter is, by its directory; all for this target."""
    from shoal.core.errors import ModelError
    from shoal.model.drafters.files import read_config, tokenizer_hash

    found: dict[str, DrafterConfig] = {}
    tokenizer = tokenizer_hash(Path(model)) if Path(model).is_dir() else ""
    for path in drafters:
        config = found[str(path)] = read_config(path)
        if config.name != "dovetail":
            raise ModelError(
                f"{path}: a drafter of kind {config.name}, and --hetero places those of kind "
                "dovetail; leave --hetero out, or train one with drafter: dovetail"
            )
        if not config.calibration:
            raise ModelError(
                f"{path}: no calibration, so nobody knows how often it is right; train it again "
                "with job: drafter, which judges it"
            )
        first = next(iter(found.values()))
        for what, given, wanted in (
            ("vocab_size", config.vocab_size, shape.vocab_size),
            ("hidden", config.hidden, shape.hidden),
            ("target", config.target, first.target),
            ("tokenizer", config.tokenizer, tokenizer or first.tokenizer),
        ):
            if given != wanted:
                raise ModelError(
                    f"{path}: trained for the {what} {given or 'none'}, and the target's is "
                    f"{wanted or 'none'}; give --model and drafters of one target"
                )
    return found


def _shown(ranked: Iterable[Placed]) -> list[Placed]:
    """The best of every drafter, with layers of the target and without, and of some trees."""
    seen: set[tuple[object, ...]] = set()
    found = []
    for one in ranked:
        keys: set[tuple[object, ...]] = {(one.name, one.target_layers > 0)}
        if one.nodes in _SHOWN:
            keys.add((one.name, "nodes", one.nodes))
        if not keys <= seen:
            found.append(one)
        seen |= keys
    return found


def _table(title: str, ranked: Sequence[Placed], plain: float, cap: int) -> None:
    from shoal.app.show import table
    from shoal.core.sizes import human_bytes

    paths = {one.name for one in ranked}
    short = {path: Path(path).name for path in paths}
    if len(set(short.values())) < len(paths):
        short = {path: path for path in paths}
    columns = ("M", "n", "L", "tokens", "draft", "link", "verify", "on the way",
               f"of {human_bytes(cap)}", "tokens/s", "over plain", "drafter")  # fmt: skip
    rows = [
        (
            one.layers,
            one.nodes,
            one.target_layers,
            f"{one.tokens:.2f}",
            f"{1e3 * one.draft_s:.2f} ms",
            f"{1e3 * one.link_s:.2f} ms",
            f"{1e3 * one.verify_s:.2f} ms",
            human_bytes(one.link_bytes),
            human_bytes(one.nbytes),
            f"{one.tokens_per_s:.1f}",
            f"{one.tokens_per_s / plain:.2f}x",
            short[one.name],
        )
        for one in _shown(ranked)
    ]
    table(title, columns, rows, numeric="r" * 11)


def _speculative(
    asked: Asked, best: Placed, right: tuple[tuple[float, ...], ...], beside: Machine
) -> dict[str, Any]:
    """Part and options of a serving job that place both so."""
    from shoal.core.parts import Choice, table
    from shoal.core.sizes import bytes_of
    from shoal.ir import Calibration
    from shoal.plan.trees.auto import Auto

    options: dict[str, Any] = {
        "path": best.name,
        "depth": Auto(nodes=best.nodes).build(Calibration(right)).depth,
        "nodes": best.nodes,
        "draft_device": "cuda:0" if beside.device.kind == "gpu" else "cpu",
        "target_layers": best.target_layers,
    }
    if asked.memory_cap is not None:
        options["memory_cap"] = bytes_of(asked.memory_cap)
    if asked.overlap:
        options["overlap"] = True
    table("speculative").build(Choice(name="dovetail", options=options))
    return {"name": "dovetail", **options}
