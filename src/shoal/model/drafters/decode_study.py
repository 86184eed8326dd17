"""``shoal explain decode``: how many guesses should a step verify on this machine?

With ``hetero``: which drafter, tree and layers go beside a host (Dovetail)?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.errors import ConfigError, ModelError, require
from shoal.core.files import to_yaml
from shoal.core.parts import Choice, part
from shoal.core.parts import table as parts
from shoal.core.sizes import bytes_of, human_bytes
from shoal.core.tables import Table
from shoal.cost.shapes import resolve
from shoal.ir import DrafterCalibration, Explanation, Machine, ModelShape, Progress
from shoal.machine.described import load
from shoal.machine.fingerprint import fingerprint
from shoal.model.drafters.files import DrafterConfig, read_config, tokenizer_hash
from shoal.plan.serving.decode_measured import find, how_to, sentence
from shoal.plan.serving.guesses import decode_plan, expected_tokens, predicted_costs
from shoal.plan.serving.heterogeneous import Heterogeneous, HeterogeneousPlacement
from shoal.plan.serving.small_device import SmallDevice, layers_share
from shoal.plan.trees.auto import AutoTree
from shoal.plan.trees.drafting import RowCosts

_ROWS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
_NODES = (1, 2, 4, 8, 12, 16, 24, 32)
_LINK_GB_S, _LINK_US = 8.0, 20.0


@part
class DecodeStudy:
    """Choose the number of draft tokens that a step verifies. Nothing runs, and no torch is needed.

    The drafter's calibration gives the expected tokens of a step, and the cost table its time.

    **Examples**

        shoal explain decode runs/heads/drafter --costs costs.json

        shoal explain decode runs/prompts/drafter --model shoal-27m --machine laptop --requests 4

        shoal explain decode runs/one runs/two --hetero --model DIR --memory-cap 3GiB

    Args:
        drafters: the directory of a trained drafter; several with hetero.
        costs: a table of step costs, as shoal probe decode writes it.
        model: without a table: the target, to predict its steps.
        precision: dtype of the prediction: fp32 or bf16.
        tree: tree of draft tokens: auto, hardware or chain.
        requests: requests that decode together.
        hetero: rank Dovetail drafters on a device beside a host.
        draft_machine: the drafter's device, such as 1xH100; that of the machine if not given.
        memory_cap: bytes on the drafter's device, such as 3GiB; all of its memory if not given.
        link_gb_s: GB/s of the link between them; 8 if not given.
        link_us: us of latency per message; 20 if not given.
        context: tokens of the longest request; the model's limit, if not given.
        overlap: draft while the target verifies.
    """

    subject: ClassVar = "drafters"
    machine: ClassVar = ""

    drafters: tuple[str, ...]
    costs: Path | None = None
    model: str | None = None
    precision: str = "bf16"
    tree: str = "hardware"
    requests: int = 1
    hetero: bool = False
    draft_machine: str | None = None
    memory_cap: str | None = None
    link_gb_s: float | None = None
    link_us: float | None = None
    context: int | None = None
    overlap: bool = False

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """The number of rows with most tokens per second, or with ``hetero`` the best placement."""
        if self.hetero:
            require(self.requests == 1, "--requests", self.requests, expected="1 with --hetero")
            require(
                self.tree == "hardware",
                "--tree",
                self.tree,
                expected="none with --hetero: Dovetail's drafter grows its trees by its own "
                "confidence",
            )
            return self._beside(machine)
        for name in ("draft_machine", "memory_cap", "link_gb_s", "link_us", "context", "overlap"):
            given = getattr(self, name)
            require(
                given is None or given is False,
                f"--{name.replace('_', '-')}",
                given,
                expected="none without --hetero",
                hint="give --hetero",
            )
        count = len(self.drafters)
        require(count == 1, "drafters", count, expected="one without --hetero")
        return self._alone(machine)

    def _alone(self, machine: Machine | None) -> Explanation:
        """One drafter, where target and drafter compute on one machine."""
        (drafter,) = self.drafters
        config = read_config(Path(drafter))
        asking = int(config.options.get("ensemble", 1)) if config.name == "ppd" else 0
        expected = expected_tokens(
            DrafterCalibration(config.calibration), Choice(name=self.tree), asking=asking
        )
        if self.costs is None and self.model is None:
            raise ConfigError("decode: give --costs, or --model to predict what its steps cost")
        known, here, _ = self._host(machine)
        paying = decode_plan(expected, known, self.requests)
        rates, best = paying.table(self.requests), paying.best(self.requests)
        kept = find(here, target=config.target)
        measured = () if kept is None else kept.of(config.name)
        rows = sorted({*(rows for rows in _ROWS if rows <= len(expected)), best + 1})
        blocks: list[Table | str] = [Table(
            title=f"{config.name}, {self.requests} request{'s' if self.requests > 1 else ''}",
            columns=("rows", "tokens", "step", "over plain"),
            rows=tuple(
                (
                    f"{count}{' *' if count == best + 1 else ''}",
                    f"{rates[count - 1][0]:.2f}",
                    f"{1e3 * rates[count - 1][1]:.2f} ms",
                    f"{rates[count - 1][2]:.2f}x",
                )
                for count in rows
            ),
            right="rrrr",
        )]  # fmt: skip
        if known.falls:
            falls = ", ".join(map(str, known.falls))
            blocks.append(
                f"note: steps of {falls} rows are given less time than steps of fewer rows"
            )
        tokens, _, gain = rates[best]
        blocks.append(
            f"N* = {best + 1} rows: {tokens:.2f} tokens a step, {gain:.2f}x plain decoding"
            if best
            else "N* = 1: plain decoding is as fast as any tree; leave speculative out"
        )
        blocks.append(
            sentence(config.name, measured)
            if measured
            else "speculative decoding has not been measured on this machine; to compare methods: "
            + how_to(config.name, self.model or "TARGET", drafter)
        )
        return Explanation(
            blocks=tuple(blocks),
            data={
                "drafter": config.name,
                "chosen_rows": best + 1,
                "requests": self.requests,
                "falls": list(known.falls),
                "measured": [one.model_dump() for one in measured],
                "rows": {
                    str(count): dict(
                        zip(("tokens", "seconds", "over_plain"), rates[count - 1], strict=True)
                    )
                    for count in rows
                },
            },
        )

    def _host(self, machine: Machine | None) -> tuple[RowCosts, Mapping[str, str], str]:
        """What the target's steps take, the fingerprint of whose they are, how it is known."""
        if self.costs is not None:
            known = RowCosts.read(self.costs)
            return known, fingerprint(), f"measured steps of the host, {self.costs}"
        assert self.model is not None
        host = machine or load("local")
        return (
            predicted_costs(host, self.model, self.precision),
            host.fingerprint,
            f"estimated by the cost model for {host.name}, {self.precision}; to measure: shoal "
            "probe decode, and --costs",
        )

    def _beside(self, machine: Machine | None) -> Explanation:
        """Drafters on a device beside a host: the ranked table, and the best as a serving job.

        Raises:
            ConfigError: an option is missing or wrong.
            ModelError: a drafter is of another kind or target, or it was not calibrated.
            PlanError: the memory is too small for every drafter.
        """
        if self.model is None:
            raise ConfigError("decode --hetero: give --model, the target's directory or name")
        link_gb_s = _LINK_GB_S if self.link_gb_s is None else self.link_gb_s
        link_us = _LINK_US if self.link_us is None else self.link_us
        require(link_gb_s > 0, "--link-gb-s", link_gb_s, expected="above 0")
        require(link_us >= 0, "--link-us", link_us, expected="0 or more")
        shape = resolve(self.model)
        configs = _configs(self.drafters, shape, self.model)
        limit = shape.max_position
        context = limit if self.context is None else self.context
        require(1 <= context <= limit, "--context", context, expected=f"1 to {limit}, which "
                f"{shape.name} was made for")  # fmt: skip
        beside = load(self.draft_machine) if self.draft_machine else machine or load("local")
        known, here, of_host = self._host(machine)
        drafting = parts("speculative").build(Choice(name="dovetail", options={"path": ""}))
        block = parts("kv").build(Choice(name="paged")).block_size
        device = SmallDevice(
            machine=beside, shape=shape, precision=self.precision,
            places=-(-context // block) * block, depth=drafting.depth, breadth=drafting.breadth,
        )  # fmt: skip
        cap = beside.device.main_memory.capacity_bytes
        if self.memory_cap is not None:
            cap = bytes_of(self.memory_cap)
        require(cap > 0, "--memory-cap", self.memory_cap, expected="bytes above 0, such as 3GiB")
        options = [
            device.option(path, int(config.options.get("layers", 1)), config.calibration)
            for path, config in configs.items()
        ]
        ranked = Heterogeneous(
            verify=known,
            hidden=shape.hidden,
            itemsize=device.itemsize,
            memory_cap=int(cap),
            link_s=1e-6 * link_us,
            link_bytes_per_s=1e9 * link_gb_s,
            overlap=self.overlap,
            num_layers=shape.num_layers,
            layer_bytes=device.layer_bytes,
            # Models of another architecture are not cut.
            layer=None if shape.architecture.name else device.layer,
            head_s=known.seconds(1) * (1 - layers_share(shape)),
        ).rank(options)
        plain, best = 1 / known.seconds(1), ranked[0]
        snippet = None
        if best.tokens_per_s > plain:
            right = next(one.right for one in options if one.name == best.name)
            snippet = {
                "precision": self.precision,
                # The caches there are as long as these say.
                "max_position": context,
                "kv_tokens": device.places,
                "speculative": self._speculative(best, right, beside),
            }
        sources = {
            "tokens": "by each drafter's calibration, on held-out text",
            "verify": of_host,
            "draft": f"estimated by the cost model for {beside.name}, {self.precision}, as are the "
            "target's layers there",
            "link": f"{link_gb_s:g} GB/s and {link_us:g} us a message (--link-gb-s, --link-us)",
            "tokens_per_s": "follows from these; nothing was run",
        }
        large = {one.name: one.nbytes for one in options if one.nbytes > cap}
        # What was measured here does not say beside which other machine.
        kept = None if self.draft_machine else find(here, target=configs[best.name].target)
        measured = () if kept is None else kept.of("dovetail")
        title = f"dovetail on {beside.name} beside the host, {shape.name}"
        return Explanation(
            blocks=(
                _table(title, ranked, plain, int(cap)),
                *(f"left out: {name} takes {nbytes} bytes" for name, nbytes in large.items()),
                *(f"{name.replace('tokens_per_s', 'tokens/s')}: {source}"
                  for name, source in sources.items()),
                sentence("dovetail", measured)
                if measured
                else "speculative decoding has not been measured with such a device; to compare "
                "methods: "
                + how_to("dovetail", self.model, best.name),
                "plain decoding is as fast as the best of these; leave speculative out"
                if snippet is None
                else f"\n{to_yaml(snippet).rstrip()}",
            ),
            data={
                "drafter": "dovetail",
                "memory_cap": int(cap),
                "plain_tokens_per_s": plain,
                "sources": sources,
                "left_out": large,
                "measured": [one.model_dump() for one in measured],
                "rows": [{**one._asdict(), "over_plain": one.tokens_per_s / plain}
                         for one in _shown(ranked)],
                "best": snippet,
            },
        )  # fmt: skip

    def _speculative(
        self, best: HeterogeneousPlacement, right: tuple[tuple[float, ...], ...], beside: Machine
    ) -> dict[str, Any]:
        """Part and options of a serving job that place both so."""
        options: dict[str, Any] = {
            "path": best.name,
            "depth": AutoTree(nodes=best.nodes).build(DrafterCalibration(right)).depth,
            "nodes": best.nodes,
            "draft_device": "cuda:0" if beside.device.kind == "gpu" else "cpu",
            "target_layers": best.target_layers,
        }
        if self.memory_cap is not None:
            options["memory_cap"] = bytes_of(self.memory_cap)
        if self.overlap:
            options["overlap"] = True
        parts("speculative").build(Choice(name="dovetail", options=options))
        return {"name": "dovetail", **options}


def _configs(drafters: Sequence[str], shape: ModelShape, model: str) -> dict[str, DrafterConfig]:
    """What each drafter is, by its directory; all for this target."""
    configs: dict[str, DrafterConfig] = {}
    tokenizer = tokenizer_hash(Path(model)) if Path(model).is_dir() else ""
    for path in drafters:
        config = configs[path] = read_config(Path(path))
        if config.name != "dovetail":
            raise ModelError(
                f"{path}: a drafter of kind {config.name}, and --hetero places those of kind "
                "dovetail; leave --hetero out, or train one with drafter: dovetail"
            )
        if not config.calibration:
            raise ModelError(
                f"{path}: no calibration, so its acceptance rate is unknown; train it again "
                "with job: drafter, which judges it"
            )
        first = next(iter(configs.values()))
        for what, given, wanted in (
            ("vocab_size", config.vocab_size, shape.vocab_size),
            ("hidden", config.hidden, shape.hidden),
            ("target", config.target, first.target),
            ("tokenizer", config.tokenizer, tokenizer or first.tokenizer),
        ):
            if given != wanted:
                raise ModelError(
                    f"{path}: trained for {what} {given or 'none'}, but the target has "
                    f"{wanted or 'none'}; give --model and drafters of one target"
                )
    return configs


def _shown(ranked: Iterable[HeterogeneousPlacement]) -> list[HeterogeneousPlacement]:
    """The best of every drafter, with layers of the target and without, and of some trees."""
    seen: set[tuple[object, ...]] = set()
    results = []
    for one in ranked:
        keys: set[tuple[object, ...]] = {(one.name, one.target_layers > 0)}
        if one.nodes in _NODES:
            keys.add((one.name, "nodes", one.nodes))
        if not keys <= seen:
            results.append(one)
        seen |= keys
    return results


def _table(title: str, ranked: Sequence[HeterogeneousPlacement], plain: float, cap: int) -> Table:
    paths = {one.name for one in ranked}
    short = {path: Path(path).name for path in paths}
    if len(set(short.values())) < len(paths):
        short = {path: path for path in paths}
    columns = ("M", "n", "L", "tokens", "draft", "link", "verify", "on the way",
               f"of {human_bytes(cap)}", "tokens/s", "over plain", "drafter")  # fmt: skip
    rows = tuple(
        (
            f"{one.layers}",
            f"{one.nodes}",
            f"{one.target_layers}",
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
    )
    return Table(title=title, columns=columns, rows=rows, right="r" * 11)
